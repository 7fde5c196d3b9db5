"""Samples of a map-style dataset, stacked, or collated one by one.

    fetch(indices)  =  the rows of collate([dataset[i], *longest]) for every i          leaves (samples, ...)

If samples have different lengths, ``collate_fn`` pads them. Every sample is collated by itself, so that no other sample
of the batch has a part in it, beside the longest samples of all, so that shapes are the same at every step. Their rows
must come out as always: anything else is an error. Samples that have one length need no others.

    >>> samples = CollatedSamples(torch_dataset, pad, longest=(17,))
    >>> samples.fetch(np.arange(4))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fdp import tree
from fdp.data.units import dataset_unit
from fdp.run.batch_rows import join_rows, leaf_shapes, same_rows, slice_rows
from fdp.types import FdpError, Tree

NOT_BY_ROW = (
    "collate_fn: expected one row for each sample, in their order, that does not depend on the samples beside it, got "
    "another row for the same sample: it sorts, mixes or standardises the samples of a batch, or draws random numbers. "
    "No bound on one sample would hold. Let it pad and stack only; standardise by public numbers, and augment single "
    "samples, or mask their tokens (mlm=True), in the dataset (docs/hugging_face.md shows how)"
)
NOT_THE_SAME_LENGTH = (
    "dataset: expected samples that have the same length whenever they are read, and at most that of the longest one, "
    "got a longer one; if lengths are random, cut and pad all samples to one public length"
)

Collate: TypeAlias = Callable[[list[Any]], Any]
"""Turns a list of samples into one batch: a tree of tensors with a leading sample dim."""


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
            return slice_rows(self.row(self.source[0]), 0, 0)
        rows = [copy_sample(self.row(self.source[int(index)])) for index in indices]
        if any(leaf_shapes(row) != leaf_shapes(rows[0]) for row in rows[1:]):
            raise FdpError(NOT_THE_SAME_LENGTH)
        return join_rows(rows)

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
        others = slice_rows(batch, 1, None)
        if leaf_shapes(others) != leaf_shapes(always):
            raise FdpError(NOT_THE_SAME_LENGTH)
        if not same_rows(others, always):
            raise FdpError(NOT_BY_ROW)
        return slice_rows(batch, 0, 1)

    def row_alone(self, sample: Any) -> Tree:
        """Return one sample as a batch of one row, collated without any other."""
        return collate_rows(self.collate, [sample])

    def fetch_alone(self, index: int) -> Tree:
        """Return the sample of that index, collated without any other."""
        return self.row_alone(self.source[index])


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
