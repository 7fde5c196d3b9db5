"""Samples as people have them (a torch ``Dataset``, tensors, lists, a ``DataLoader``) as a dataset of fdp.

    fetch(indices)  =  the rows of collate([dataset[i], *longest]) for every i          leaves (samples, ...)

Sampling stays fdp's: of a ``DataLoader`` only the dataset, the collate function and the batch size are used. If samples
have different lengths, ``collate_fn`` pads them. Every sample is collated by itself, so that no other sample of the
batch has a part in it, beside the longest samples of all, so that shapes are the same at every step. Their rows must
come out as always: a ``collate_fn`` that mixes, sorts, standardises or remembers samples is an error. Whoever collates
must make padding harmless; ``fdp.run.module_model`` tests it. Samples that have one length need no others.

    >>> samples = as_samples(torch_dataset, collate_fn=pad)
    >>> samples.fetch(np.arange(4))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

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
from fdp.data.units import dataset_unit
from fdp.foreign.loss_state import Rewind
from fdp.privacy.microbatches import Dataset, dataset_length
from fdp.types import FdpError, Tree

SAMPLES_COMPARED = 32
"""The shortest samples, and as many from all over the data, on which a ``collate_fn`` is checked."""
NOT_BY_ROW = (
    "collate_fn: expected one row for each sample, in their order, that does not depend on the samples beside it, got "
    "another row for the same sample: it sorts, mixes or standardises the samples of a batch, or draws random numbers. "
    "No bound on one sample would hold. Let it pad and stack only; standardise by public numbers, and augment single "
    "samples, or mask their tokens (mlm=True), in the dataset (docs/hugging_face.md shows how)"
)
REMEMBERS = (
    "collate_fn: expected a row that depends on its sample alone, got another one after others had been collated: it "
    "remembers samples, like a vocabulary that numbers words as it meets them. No bound on one sample would hold. "
    "Make what it looks up before training, from public data, and leave it as it is"
)
NOT_THE_SAME_LENGTH = (
    "dataset: expected samples that have the same length whenever they are read, and at most that of the longest one, "
    "got a longer one; if lengths are random, cut and pad all samples to one public length"
)
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Difference of two computed rows, relative to their largest entry, that rounding explains; in half precision, 0.02."""

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
    """Samples of a map-style dataset, stacked; or collated one by one, if ``collate`` is not ours.

    ``longest`` are the samples that fix the shape of every row.
    """

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
        if self.collate is stack_samples:
            return collate_rows(self.collate, [copy_sample(self.source[int(index)]) for index in indices])
        if not len(indices):
            return _slice(self.row(self.source[0]), 0, 0)
        rows = [copy_sample(self.row(self.source[int(index)])) for index in indices]
        if any(_shapes(row) != _shapes(rows[0]) for row in rows[1:]):
            raise FdpError(NOT_THE_SAME_LENGTH)
        return _cat(rows)

    @cached_property
    def beside(self) -> tuple[list[Any], Tree]:
        """The samples ``longest`` and their rows, read once."""
        samples = [self.source[index] for index in self.longest]
        return samples, collate_rows(self.collate, samples) if samples else ()

    def row(self, sample: Any) -> Tree:
        """Return one sample as a batch of one row, in the shape of all.

        Guarantees:
          - of all samples, the row depends on this one and on ``longest`` alone;
          - if ``collate`` gives other rows for ``longest`` than always, or in another place, that is an error.
        """
        longest, always = self.beside
        batch = collate_rows(self.collate, [sample, *longest])
        if not longest:
            return batch
        others = _slice(batch, 1, None)
        if _shapes(others) != _shapes(always):
            raise FdpError(NOT_THE_SAME_LENGTH)
        if not _same_rows(others, always):
            raise FdpError(NOT_BY_ROW)
        return _slice(batch, 0, 1)

    def row_alone(self, sample: Any) -> Tree:
        """Return one sample as a batch of one row, collated without any other."""
        return collate_rows(self.collate, [sample])

    def fetch_alone(self, index: int) -> Tree:
        """Return the sample of that index, collated without any other."""
        return self.row_alone(self.source[index])


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


def copy_sample(sample: Any) -> Any:
    """Return a sample whose tensors and arrays are its own: a dataset may fill the same ones for the next sample."""
    if isinstance(sample, Tensor):
        return sample.clone()
    if isinstance(sample, np.ndarray):
        return sample.copy()
    if isinstance(sample, Mapping):
        return {key: copy_sample(value) for key, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(copy_sample(value) for value in sample)
    if isinstance(sample, list):
        return [copy_sample(value) for value in sample]
    return sample


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


def spread_indices(samples: int, count: int) -> np.ndarray:
    """Return so many indices from the first sample to the last; with fewer samples, some twice."""
    return np.linspace(0, samples - 1, count).round().astype(np.int64)


def find_longest(samples: CollatedSamples) -> tuple[tuple[int, ...], list[int]]:
    """Return the samples that are the longest in some dim of some entry, and a few of the shortest ones.

    Every sample is collated once. If all have one shape, none is the longest.
    """
    most: dict[tuple[str, int], tuple[int, int]] = {}
    elements, shapes = [], set()
    for index in range(len(samples)):
        found = tree.flatten(samples.fetch_alone(index))
        elements.append(sum(leaf.numel() for leaf in found.values()))
        shapes.add(tuple(leaf.shape for leaf in found.values()))
        for path, leaf in found.items():
            for dim, length in enumerate(leaf.shape[1:]):
                if length > most.get((path, dim), (-1, 0))[0]:
                    most[path, dim] = (length, index)
    shortest = np.argsort(elements, kind="stable")[:SAMPLES_COMPARED]
    longest = {index for _, index in most.values()} if len(shapes) > 1 else set()
    return tuple(sorted(longest)), shortest.tolist()


def check_rows(samples: CollatedSamples, indices: Sequence[int]) -> None:
    """Refuse a ``collate_fn`` that gives a sample another row beside other samples, or at another call.

    Guarantees:
      - among these samples, the row of each is the same by itself, a second time, and beside the next one;
      - if it needs no padding, it is the same without any sample beside it.
    """
    for pair in zip(indices, [*indices[1:], indices[0]]):
        given = [samples.source[index] for index in pair]
        rows = [samples.row(sample) for sample in given]
        together = _slice(collate_rows(samples.collate, [*given, *samples.beside[0]]), 0, len(given))
        same = _same_rows(_cat(rows), together) and _same_rows(samples.row(given[0]), rows[0])
        alone = collate_rows(samples.collate, given[:1])
        if not same or (_shapes(alone) == _shapes(rows[0]) and not _same_rows(alone, rows[0])):
            raise FdpError(NOT_BY_ROW)


def check_memory(samples: CollatedSamples, indices: Sequence[int], rewind: Callable[[], None]) -> None:
    """Refuse a ``collate_fn`` whose rows depend on the samples that it was called with before.

    ``rewind`` puts back what it could reach before its first call; by now it has collated every sample.

    Guarantees:
      - among these samples, the row of each is what it would be if no other sample had been collated before.
    """
    given = [[samples.source[index], *samples.beside[0]] for index in indices]
    after = [_slice(collate_rows(samples.collate, these), 0, 1) for these in given]
    for these, row in zip(given, after):
        rewind()
        if not _same_rows(_slice(collate_rows(samples.collate, these), 0, 1), row):
            raise FdpError(REMEMBERS)


def _slice(batch: Tree, first: int, last: int | None) -> Tree:
    return tree.map(lambda leaf: leaf[first:last], batch)


def _cat(batches: Sequence[Tree]) -> Tree:
    return tree.map(lambda *leaves: torch.cat(leaves), *batches)


def _shapes(batch: Tree) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in tree.flatten(batch).items()}


def _same_rows(one: Tree, other: Tree) -> bool:
    """Return True if two batches are equal but for rounding: a product may round otherwise in a larger batch."""
    return _shapes(one) == _shapes(other) and all(map(_is_close, tree.leaves(one), tree.leaves(other)))


def _is_close(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    one, other = (torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in (one, other))
    if not one.dtype.is_floating_point or one.dtype != other.dtype:
        return False
    tolerance = ROUNDING.get(one.dtype, 0.02)
    a, b = (leaf.double().flatten(1) if leaf.ndim > 1 else leaf.double()[:, None] for leaf in (one, other))
    largest = a.abs().nan_to_num(posinf=0.0).amax(1, keepdim=True) if a.numel() else a
    same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= tolerance * largest)
    return bool(same.all())


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
