"""Hold out some units of a dataset for evaluation.

    unit u is held out   iff   SHA-256("fdp held out" | u) / 2^256 < fraction

where u is the name of a user if a sample is a user, and otherwise the content of the sample. No key is involved: the
choice is public, and the same in every run and on every rank.

**The choice depends on the unit alone.** Adding or removing a unit changes one side by that unit and moves no other
unit, so neighbouring datasets have neighbouring training sides, and the guarantee of a run is about every unit of the
training side. Held-out units are not trained on. What is computed on them is covered by no budget.

    >>> train, held_out = split_held_out(dataset, 0.1)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fdp import tree
from fdp.data.documents import Records
from fdp.data.mixed import Mixed
from fdp.data.read_counts import ReadCounts, select_counts
from fdp.data.units import PrivacyUnit, UnitKind, dataset_unit
from fdp.data.users import Users
from fdp.privacy.microbatches import Dataset
from fdp.types import FdpError, Tree

LABEL = b"fdp held out"
FETCHED_SAMPLES = 1024
"""Samples that are fetched and hashed at a time."""


@dataclass(frozen=True)
class Subset:
    """The samples of a dataset at ``indices``, in that order; a sample stays what it was."""

    dataset: Dataset
    indices: np.ndarray = field(repr=False)

    @property
    def unit(self) -> PrivacyUnit:
        """The unit of privacy, in words."""
        return dataset_unit(self.dataset)

    @property
    def reading(self) -> ReadCounts | None:
        """The counts of these samples; covered by no budget."""
        return select_counts(self.dataset, self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: np.ndarray) -> Tree:
        """Return the samples as the dataset does."""
        return self.dataset.fetch(self.indices[indices])


def split_held_out(dataset: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """Return the samples to train on and those held out: about ``fraction`` of the units.

    Of a :class:`~fdp.data.mixed.Mixed` dataset only private units are held out.

    Guarantees:
      - whether a unit is held out depends on that unit and on ``fraction``, and on no other unit;
      - every sample is on one side; equal samples, and all data of one user, are on the same side;
      - a larger fraction holds out the same units and more;
      - it is the same in every run, on every rank.
    """
    if not 0 < fraction < 1:
        raise FdpError(f"fraction held out: expected a number between 0 and 1, such as 0.1, got {fraction!r}")
    if isinstance(dataset, Mixed):
        train, held_out = split_held_out(dataset.private, fraction)
        return Mixed(train, dataset.public), held_out
    bound = int(fraction * 2**64)
    held = np.fromiter((_hash(unit) < bound for unit in _units(dataset)), dtype=bool, count=len(dataset))
    if held.all() or not held.any():
        side = "trained on" if held.all() else "held out"
        raise FdpError(
            f"fraction held out: expected samples on both sides, got none {side} with a fraction of {fraction:g}; give "
            "more data, or another fraction"
        )
    return Subset(dataset, np.flatnonzero(~held)), Subset(dataset, np.flatnonzero(held))


def _hash(unit: bytes) -> int:
    return int.from_bytes(hashlib.sha256(LABEL + b"|" + unit).digest()[:8], "big")


def _units(dataset: Dataset) -> Iterator[bytes]:
    """Yield what identifies the unit of every sample: the user's name, or the content."""
    if isinstance(dataset, Users) and dataset.kind is UnitKind.USER:
        yield from (b"user " + dataset.documents.owners[row].encode() for row in dataset.rows[:, 0])
        return
    for start in range(0, len(dataset), FETCHED_SAMPLES):
        last = min(start + FETCHED_SAMPLES, len(dataset))
        samples = tree.flatten(dataset.fetch(np.arange(start, last)))
        if isinstance(dataset, (Records, Users)):
            windows = [{name: leaf[i] for name, leaf in samples.items()} for i in range(last - start)]
            yield from (_record_content(each) for each in windows)
        else:
            yield from (_content({path: leaf[i] for path, leaf in samples.items()}) for i in range(last - start))


def _record_content(sample: dict[str, Tensor]) -> bytes:
    """Return the content of a padded row, or of several, without the padding: it does not depend on the context."""
    rows = zip(*(leaf.reshape(-1, leaf.shape[-1]) for leaf in sample.values()))
    return b"|".join(_row_content(dict(zip(sample, row))) for row in rows)


def _row_content(row: dict[str, Tensor]) -> bytes:
    used = row["tokens"] != 0
    used[1:] |= row["loss_mask"]
    size = int(used.nonzero().max()) + 1 if bool(used.any()) else 0
    return _content({name: leaf[: size if name == "tokens" else max(size - 1, 0)] for name, leaf in row.items()})


def _content(sample: dict[str, Tensor]) -> bytes:
    """Return all values of a sample with their names, types and shapes."""
    parts: list[bytes] = []
    for path, leaf in sample.items():
        values = leaf.detach().cpu().contiguous()
        values = values.view(torch.int16) if values.dtype is torch.bfloat16 else values
        parts += [f"{path} {leaf.dtype} {tuple(leaf.shape)} ".encode(), values.numpy().tobytes()]
    return b"".join(parts)
