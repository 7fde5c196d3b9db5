"""Samples as people have them (a torch ``Dataset``, tensors, lists, a ``DataLoader``) as a dataset of fdp.

    fetch(indices) = collate([dataset[i] for i in indices])             leaves (samples, ...)

Sampling stays fdp's: of a ``DataLoader`` only the dataset, the collate function and the batch size are used. If samples
have different lengths, ``collate_fn`` pads them. Every batch is collated together with the longest sample of all, which
is then dropped, so that shapes are the same at every step. Whoever collates must make padding harmless;
:func:`check_padding` tests it.

    >>> samples = as_samples(torch_dataset, collate_fn=pad)
    >>> samples.fetch(np.arange(4))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data._utils.collate import default_collate

from fdp import tree
from fdp.data.units import dataset_unit
from fdp.privacy.microbatches import Dataset, dataset_length
from fdp.types import FdpError, Tree

Collate: TypeAlias = Callable[[list[Any]], Any]
"""Turns a list of samples into one batch: a tree of tensors with a leading sample dim."""


@dataclass(frozen=True)
class TensorSamples:
    """Samples that are rows of tensors, in any structure."""

    data: Tree

    def __len__(self) -> int:
        return dataset_length(self.data)

    def fetch(self, indices: np.ndarray) -> Tree:
        rows = torch.from_numpy(np.asarray(indices))
        return tree.map(lambda leaf: leaf[rows.to(leaf.device)], self.data)

    def content(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that samples are made from, for ``fdp.data.digest``."""
        return list(tree.flatten(self.data).items())


@dataclass(frozen=True)
class CollatedSamples:
    """Samples of a map-style dataset, collated; ``longest`` are the samples that fix the shape of every batch."""

    source: Any
    collate: Collate
    longest: tuple[int, ...] = ()

    @property
    def unit(self) -> Any:
        """The unit of privacy that the source states, if any."""
        return dataset_unit(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, indices: np.ndarray) -> Tree:
        chosen = [int(index) for index in indices]
        batch = collate_rows(self.collate, [self.source[index] for index in (*chosen, *self.longest)])
        return tree.map(lambda leaf: leaf[: len(chosen)], batch)

    def fetch_alone(self, index: int) -> Tree:
        """Return one sample, collated without any other."""
        return collate_rows(self.collate, [self.source[index]])


def as_samples(dataset: Any, *, collate_fn: Collate | None = None) -> Dataset:
    """Return ``dataset`` as a dataset of fdp; raise an error with a remedy if that cannot be done.

    ``dataset`` is a map-style dataset, a ``DataLoader`` of one, tensors or arrays in a tuple or dictionary, a list of
    samples, or a dataset of fdp.
    """
    if isinstance(dataset, DataLoader):
        own = None if dataset.collate_fn is default_collate else dataset.collate_fn
        return as_samples(dataset.dataset, collate_fn=collate_fn or own)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise FdpError(
            f"dataset: expected one with a length and samples by index, got {type(dataset).__name__}, which can only "
            f"be read in order: Poisson sampling draws any sample at any step. Read it into a list first "
            f"(list(dataset)), or write its samples to disk and index them"
        )
    if isinstance(dataset, (str, bytes)):
        raise FdpError("dataset: expected samples, got a text; load it first (fdp.data.datasets.load)")
    samples = _convert(dataset, collate_fn)
    if len(samples) == 0:
        raise FdpError("dataset: expected at least one sample, got none (empty)")
    if isinstance(samples, CollatedSamples) and collate_fn is not None:
        return replace(samples, longest=find_longest(samples))
    return samples


def _convert(dataset: Any, collate_fn: Collate | None) -> Dataset:
    if isinstance(dataset, Dataset):
        return dataset
    if isinstance(dataset, TensorDataset) and collate_fn is None:
        return TensorSamples(dataset.tensors)
    if collate_fn is None and _is_columns(dataset):
        columns = tree.map(_as_column, dataset)
        dataset_length(columns)
        return TensorSamples(columns)
    if not hasattr(dataset, "__getitem__"):
        raise FdpError(f"dataset: expected samples by index (__getitem__), got {type(dataset).__name__}")
    return CollatedSamples(dataset, collate_fn or stack_samples)


def stack_samples(samples: list[Any]) -> Any:
    """Stack samples of one shape; numbers, lists of numbers and arrays become tensors."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack_samples([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple):
        return tuple(stack_samples(list(column)) for column in zip(*samples))
    leaves = [_as_leaf(sample) for sample in samples]
    if len({leaf.shape for leaf in leaves}) > 1:
        raise FdpError(
            "dataset: expected samples of one shape, got several; give a collate_fn that pads them, such as "
            "transformers' DataCollatorWithPadding(tokenizer), and a loss that leaves padding out"
        )
    return torch.stack(leaves)


def collate_rows(collate: Collate, samples: list[Any]) -> Tree:
    """Return the collated samples as a tree of tensors with one row each, or say what is wrong."""
    try:
        batch = collate(samples)
    except FdpError:
        raise
    except Exception as error:  # its message may show samples, and is left to the traceback
        raise FdpError(
            f"collate_fn: expected it to collate {len(samples)} samples, got {type(error).__name__} from it; try it: "
            f"collate_fn([dataset[0], dataset[1]])"
        ) from error
    batch = _plain(batch)
    for path, leaf in tree.flatten(batch).items():
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (len(samples),):
            got = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise FdpError(
                f"dataset{path and f' {path}'}: expected a tensor with one row for each of {len(samples)} samples, got "
                f"{got}; turn texts and images into tensors in the dataset or in collate_fn, and drop other entries"
            )
    return batch


def find_longest(samples: CollatedSamples) -> tuple[int, ...]:
    """Return the indices of samples that are the longest in some dim of some entry; every sample is collated once."""
    most: dict[tuple[str, int], tuple[int, int]] = {}
    for index in range(len(samples)):
        for path, leaf in tree.flatten(samples.fetch_alone(index)).items():
            for dim, length in enumerate(leaf.shape[1:]):
                if length > most.get((path, dim), (-1, 0))[0]:
                    most[path, dim] = (length, index)
    return tuple(sorted({index for _, index in most.values()}))


def _is_columns(dataset: Any) -> bool:
    """Return True for a tuple or dictionary of tensors or arrays, each with one row per sample."""
    if isinstance(dataset, TorchDataset):
        return False
    if isinstance(dataset, (Tensor, np.ndarray)):
        return True
    parts = list(dataset.values()) if isinstance(dataset, Mapping) else dataset if isinstance(dataset, tuple) else ()
    return bool(parts) and all(isinstance(part, (Tensor, np.ndarray)) for part in parts)


def _as_column(values: Tensor | np.ndarray) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))


def _as_leaf(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FdpError(
            f"dataset: expected tensors, arrays or numbers, got {type(value).__name__}; turn it into a tensor in the "
            f"dataset (a tokenizer for text, torchvision's ToTensor for images) or give a collate_fn that does"
        ) from error


def _plain(batch: Any) -> Any:
    """Return a batch of any mapping and sequence types as one of dictionaries and tuples."""
    if isinstance(batch, Mapping):
        return {key: _plain(value) for key, value in batch.items() if value is not None}
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return tuple(_plain(value) for value in batch)
    return torch.from_numpy(batch) if isinstance(batch, np.ndarray) else batch
