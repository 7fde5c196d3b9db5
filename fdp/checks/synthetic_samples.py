"""Synthetic samples with the entries, shapes and dtypes of real ones, and unusual values.

A check on a few real samples can miss what later samples may be: one long document, many documents of one token,
nothing but padding, values a thousand times larger. Integers are drawn from the values seen in the data and 0, so that
indices and classes stay valid. ``segments`` and positions of a language model take extreme values.

    >>> for sample in make_synthetic_samples(data): losses = model.loss(params, sample.data)            # a batch of one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdp import keys, tree
from fdp.types import Path, Tree

SEGMENTS = "segments"
"""The entry with the number of each token's document in its row; see ``fdp.models.language``."""
POSITIONS = ("position_ids", "positions")
"""Entries with the position of each token in its document."""


class Sample(NamedTuple):
    """A batch of one sample, and its description for errors.

    If not ``regular``, its own loss is not checked, because it may be NaN or dominated by rounding: the sample serves
    as a neighbour of others.
    """

    words: str
    data: Tree
    regular: bool = True


def make_synthetic_samples(data: Tree) -> list[Sample]:
    """Return samples shaped like those of ``data``, a function of the data. Neighbours in the list differ much."""
    makers = dict(REGULAR)
    names = {_name(path) for path in tree.flatten(data)}
    if not names & {SEGMENTS, *POSITIONS}:
        del makers[ONE_TOKEN_EACH]
    samples = [_sample(words, data, make, regular=True) for words, make in makers.items()]
    return samples + [_sample(words, data, make, regular=False) for words, make in NEIGHBOURS.items()]


def nan_sample(data: Tree) -> Sample:
    """Return the first sample with all floats NaN. It can hide the effect of others, so put it in its own batch."""
    return _sample("NaN", data, _nan, regular=False)


def concatenate(samples: Sequence[Sample]) -> Tree:
    """Return one batch of all samples, in order."""
    first, *rest = (sample.data for sample in samples)
    return tree.map(lambda *leaves: torch.cat(leaves), first, *rest)


class Column(NamedTuple):
    """An entry of the data: its path, all samples' values (batch, ...), and the description of the sample to make."""

    path: Path
    leaf: Tensor
    words: str

    @property
    def first(self) -> Tensor:
        """Return the first sample's values."""
        return self.leaf[0]

    @property
    def places(self) -> Tensor:
        """Return 0, 1, 2, ... along the last dim of a sample."""
        index = torch.arange(self.first.numel(), device=self.leaf.device).view(self.first.shape)
        return index % self.first.shape[-1] if self.first.ndim else index

    def draw(self) -> Tensor:
        """Draw random values: integers from those of :meth:`values`, floats with the data's mean and deviation."""
        key = keys.fold_in(keys.fold_in(keys.key(0), self.words), self.path)
        if self.leaf.is_floating_point():
            known = self.leaf[torch.isfinite(self.leaf)].double()
            spread, middle = (known.std(correction=0), known.mean()) if known.numel() else (0.0, 0.0)
            noise = keys.normal(key, self.first.shape, dtype=torch.float64).to(self.leaf.device)
            return (middle + spread * noise).to(self.leaf.dtype)
        values = self.values()
        which = keys.bits(key, self.first.shape).to(self.leaf.device).remainder(len(values))
        return values[which]

    def values(self) -> Tensor:
        """Return the distinct values in the data, without 0 if there are others."""
        if self.leaf.dtype == torch.bool:
            return torch.ones(1, dtype=torch.bool, device=self.leaf.device)
        seen = self.leaf.unique()
        return seen[seen != 0] if bool((seen != 0).any()) else seen

    def max_position(self) -> int:
        """Return the largest position: that of the row, or on a GPU, where a bad index is fatal, the largest seen."""
        length = self.first.shape[-1] if self.first.ndim else 1
        return length - 1 if self.leaf.device.type == "cpu" else int(self.leaf.max())

    def integer_kind(self) -> str:
        """Return the meaning of the entry's integers: ``segments``, ``positions``, or '' for anything else."""
        name = _name(self.path)
        return name if name == SEGMENTS else "positions" if name in POSITIONS else ""


def _sample(words: str, data: Tree, make: Callable[[Column], Tensor], *, regular: bool) -> Sample:
    flat = {path: make(Column(path, leaf, words))[None] for path, leaf in tree.flatten(data).items()}
    return Sample(f"a synthetic sample ({words})", tree.unflatten(data, flat), regular)


def _documents(size: int | None) -> Callable[[Column], Tensor]:
    """Return a maker of random values in documents of ``size`` tokens each; None: in one document."""

    def make(column: Column) -> Tensor:
        places, kind = column.places, column.integer_kind()
        if kind == SEGMENTS:
            return (1 + (places // size if size else torch.zeros_like(places))).to(column.leaf.dtype)
        if kind:
            return (places % size if size else places).clamp_max(column.max_position()).to(column.leaf.dtype)
        return column.draw()

    return make


def _padded_document(share: float) -> Callable[[Column], Tensor]:
    """Return a maker of a long document whose first ``share``, at least one element, is followed by padding."""

    def make(column: Column) -> Tensor:
        row = _documents(None)(column)
        if row.ndim == 0 or (column.leaf.is_floating_point() and share == 0):
            return row
        index = torch.arange(row.numel(), device=row.device).view(row.shape)
        return torch.where(index < max(1, share * row.numel()), row, torch.zeros_like(row))

    return make


def _repeat_last_value(column: Column) -> Tensor:
    """Repeat the last value of the first sample from the middle on: padding that is not 0."""
    row = column.first
    if row.ndim == 0 or column.leaf.is_floating_point():
        return row
    return torch.where(column.places < row.shape[-1] / 2, row, row[..., -1:])


def _equal_values(column: Column) -> Tensor:
    if column.leaf.is_floating_point() or column.integer_kind() == SEGMENTS:
        return _documents(None)(column)
    return (
        torch.zeros_like(column.first) if column.integer_kind() else column.values()[0].expand_as(column.first).clone()
    )


def _zeros(column: Column) -> Tensor:
    return torch.zeros_like(column.first)


def _largest(column: Column) -> Tensor:
    if column.leaf.is_floating_point():
        return column.first * 1e3
    return column.values()[-1].expand_as(column.first).clone()


def _nan(column: Column) -> Tensor:
    return torch.full_like(column.first, torch.nan) if column.leaf.is_floating_point() else column.first


ONE_TOKEN_EACH = "many documents of one token"
REGULAR: dict[str, Callable[[Column], Tensor]] = {
    "one long document": _documents(None),
    "many documents of two tokens": _documents(2),
    "one token, then padding": _padded_document(0.0),
    ONE_TOKEN_EACH: _documents(1),
    "half of it padding": _padded_document(0.5),
    "an end of equal values": _repeat_last_value,
    "equal values": _equal_values,
}
NEIGHBOURS: dict[str, Callable[[Column], Tensor]] = {
    "all zeros": _zeros,
    "values as large as can be": _largest,
}


def _name(path: Path) -> str:
    return path.rpartition(".")[2]
