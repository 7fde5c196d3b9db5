"""Made-up samples: the entries, shapes and dtypes of real ones, with values that the first real ones may not have.

A check on real samples sees what those few happen to be. Who is still to come may be one long document beside many of
one token, nothing but padding, or a number a thousand times larger. Integers are drawn from the values seen in the
data and 0, so that an index or a class stays one; what a language model calls ``segments`` and positions are numbers
that a sample may choose freely, and go to their extremes.

    >>> for sample in made_up(data): losses = model.loss(params, sample.data)            # a batch of one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdp import keys, tree
from fdp.types import Path, Tree

SEGMENTS = "segments"
"""The entry that says which document of its row a token is of; see ``fdp.models.language``."""
POSITIONS = ("position_ids", "positions")
"""Entries that say where in its document a token is."""


class Sample(NamedTuple):
    """A batch of one sample, and what it is in words.

    ``regular``: its own loss is to be looked at. Of the others it may be NaN, or all rounding: they are neighbours.
    """

    words: str
    data: Tree
    regular: bool = True


def made_up(data: Tree) -> list[Sample]:
    """Samples like those of ``data``: the same ones for the same data. Each differs much from the ones beside it."""
    makers = dict(REGULAR)
    names = {_name(path) for path in tree.flatten(data)}
    if not names & {SEGMENTS, *POSITIONS}:
        del makers[ONE_TOKEN_EACH]
    samples = [_sample(words, data, make, regular=True) for words, make in makers.items()]
    return samples + [_sample(words, data, make, regular=False) for words, make in NEIGHBOURS.items()]


def not_a_number(data: Tree) -> Sample:
    """The first sample, its floats NaN. It may hide what others do, and so is for a batch without them."""
    return _sample("NaN", data, _nan, regular=False)


def join(samples: Sequence[Sample]) -> Tree:
    """One batch of all samples, in order."""
    first, *rest = (sample.data for sample in samples)
    return tree.map(lambda *leaves: torch.cat(leaves), first, *rest)


class Column(NamedTuple):
    """An entry of the data: its path, all samples' values (batch, ...), and the kind of sample that is made."""

    path: Path
    leaf: Tensor
    words: str

    @property
    def first(self) -> Tensor:
        """The first sample's."""
        return self.leaf[0]

    @property
    def places(self) -> Tensor:
        """0, 1, 2, ... along the last dim of a sample."""
        index = torch.arange(self.first.numel(), device=self.leaf.device).view(self.first.shape)
        return index % self.first.shape[-1] if self.first.ndim else index

    def drawn(self) -> Tensor:
        """Values at random: of those seen, 0 left out if it can be; floats as far apart as the data's."""
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
        """The values seen, 0 left out if it can be."""
        if self.leaf.dtype == torch.bool:
            return torch.ones(1, dtype=torch.bool, device=self.leaf.device)
        seen = self.leaf.unique()
        return seen[seen != 0] if bool((seen != 0).any()) else seen

    def reach(self) -> int:
        """The largest position: of the row or, where an index too large for a table ends the process, the one seen."""
        length = self.first.shape[-1] if self.first.ndim else 1
        return length - 1 if self.leaf.device.type == "cpu" else int(self.leaf.max())

    def numbers(self) -> str:
        """What the entry's integers are: numbers of documents, positions, or something else."""
        name = _name(self.path)
        return name if name == SEGMENTS else "positions" if name in POSITIONS else ""


def _sample(words: str, data: Tree, make: Callable[[Column], Tensor], *, regular: bool) -> Sample:
    flat = {path: make(Column(path, leaf, words))[None] for path, leaf in tree.flatten(data).items()}
    return Sample(f"a made-up sample ({words})", tree.unflatten(data, flat), regular)


def _documents(size: int | None) -> Callable[[Column], Tensor]:
    """Random values, in documents of ``size`` tokens each; None: in one."""

    def make(column: Column) -> Tensor:
        places, numbers = column.places, column.numbers()
        if numbers == SEGMENTS:
            return (1 + (places // size if size else torch.zeros_like(places))).to(column.leaf.dtype)
        if numbers:
            return (places % size if size else places).clamp_max(column.reach()).to(column.leaf.dtype)
        return column.drawn()

    return make


def _padded(share: float) -> Callable[[Column], Tensor]:
    """A long document of which only the first ``share`` is there, or the first element if that is less."""

    def make(column: Column) -> Tensor:
        row = _documents(None)(column)
        if row.ndim == 0 or (column.leaf.is_floating_point() and share == 0):
            return row
        index = torch.arange(row.numel(), device=row.device).view(row.shape)
        return torch.where(index < max(1, share * row.numel()), row, torch.zeros_like(row))

    return make


def _repeated(column: Column) -> Tensor:
    """The first sample, its last value from the middle on: padding that is not 0."""
    row = column.first
    if row.ndim == 0 or column.leaf.is_floating_point():
        return row
    return torch.where(column.places < row.shape[-1] / 2, row, row[..., -1:])


def _equal(column: Column) -> Tensor:
    if column.leaf.is_floating_point() or column.numbers() == SEGMENTS:
        return _documents(None)(column)
    return torch.zeros_like(column.first) if column.numbers() else column.values()[0].expand_as(column.first).clone()


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
    "one token, then padding": _padded(0.0),
    ONE_TOKEN_EACH: _documents(1),
    "half of it padding": _padded(0.5),
    "an end of equal values": _repeated,
    "equal values": _equal,
}
NEIGHBOURS: dict[str, Callable[[Column], Tensor]] = {
    "all zeros": _zeros,
    "values as large as can be": _largest,
}


def _name(path: Path) -> str:
    return path.rpartition(".")[2]
