"""Samples as people have them (a torch ``Dataset``, tensors, lists, a ``DataLoader``) as a dataset of fdp.

| given                                         | dataset                                                            |
|-----------------------------------------------|--------------------------------------------------------------------|
| tensors or arrays, in a tuple or dictionary   | their rows (:class:`TensorSamples`)                                |
| samples by index, or a ``DataLoader`` of them | stacked, or collated by ``collate_fn`` (:class:`CollatedSamples`)  |
| a dataset of fdp                              | as it is                                                           |

Sampling stays fdp's: of a ``DataLoader`` only the dataset, the collate function and the batch size are used. A
``collate_fn`` that mixes, sorts, standardises or remembers samples is an error (``fdp.run.collate_checks``).

    >>> samples = as_samples(torch_dataset, collate_fn=pad)
    >>> samples.fetch(np.arange(4))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data._utils.collate import default_collate

from fdp import tree
from fdp.foreign.loss_state import Rewind
from fdp.privacy.microbatches import Dataset, dataset_length
from fdp.run.collate_checks import SAMPLES_COMPARED, check_memory, check_rows, find_longest
from fdp.run.collated_samples import Collate, CollatedSamples, stack_samples
from fdp.types import FdpError, Tree


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


def as_samples(dataset: Any, *, collate_fn: Collate | None = None) -> Dataset:
    """Return ``dataset`` as a dataset of fdp; raise an error with a remedy if that cannot be done.

    ``dataset`` is a map-style dataset, a ``DataLoader`` of one, tensors or arrays in a tuple or dictionary, a list of
    samples, or a dataset of fdp.
    """
    if isinstance(dataset, DataLoader):
        _check_sampler(dataset)
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
        rewind = Rewind(collate_fn)
        longest, shortest = find_longest(samples)
        samples = replace(samples, longest=longest)
        compared = [*shortest, *spread_indices(len(samples), SAMPLES_COMPARED).tolist()]
        check_rows(samples, compared)
        check_memory(samples, compared, rewind)
    return samples


def _check_sampler(loader: DataLoader[Any]) -> None:
    """Refuse a loader that leaves samples out or repeats some: its sampler is not used, so that all would be drawn."""
    of_samples = getattr(loader.batch_sampler, "sampler", loader.sampler)
    usual = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    if not usual or type(of_samples) not in (SequentialSampler, RandomSampler, DistributedSampler):
        name = type(of_samples if usual else loader.batch_sampler).__name__
        raise FdpError(
            f"dataset: expected a DataLoader that reads every sample of its dataset once, got one with a {name}: fdp "
            f"draws every step from all samples, by Poisson sampling. Give the samples that are meant: "
            f"torch.utils.data.Subset(dataset, indices)"
        )


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


def spread_indices(samples: int, count: int) -> np.ndarray:
    """Return so many indices from the first sample to the last; with fewer samples, some twice."""
    return np.linspace(0, samples - 1, count).round().astype(np.int64)


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
