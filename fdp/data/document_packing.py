"""Packing: several documents in one row, each attending to itself only.

    row = [a_0 a_1 a_2 | b_0 b_1 | c_0 c_1 c_2 | padding]       segments = 1 1 1 2 2 3 3 3 0
    mask_t = 1 only where tokens t and t + 1 are of one segment; attention is causal and within a segment

A row's loss is the mean over all its counted tokens, of all segments.

**Packing must not change the unit of privacy.** Per-sample gradients are per row of the batch: documents that share a
row are clipped together. So by ``PackUnit.OWNER`` documents share a row only if they have the same owner: chunks of
one record, or texts of one user. ``PackUnit.ROW`` puts documents of different owners in a row. Then the *row* is the
unit, and the promise about an owner is much weaker: removing one document moves every later one to another position,
in other rows. It must be asked for by name.

    >>> packed = pack(documents, context=128, unit=PackUnit.OWNER)
    >>> dataset = by_user(packed, context=128, vocab_size=256, windows=8, key=key)
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from fdp.data.array_store import join_arrays
from fdp.data.documents import Documents, split_rows
from fdp.types import FdpError

OPEN_ROWS = 32
"""Latest rows that are searched for room; searching all of them would take quadratic time."""


class PackUnit(Enum):
    """The unit of privacy, and so which documents may share a row: those of one owner, or any."""

    OWNER = "owner"
    ROW = "row"


def pack(documents: Documents, *, context: int, unit: PackUnit) -> Documents:
    """Pack documents into rows of at most ``context + 1`` tokens, each into the first recent row with room for it.

    Longer documents are split; each piece is a segment of its own. With ``PackUnit.OWNER`` an owner may have several
    rows, which ``fdp.data.users.by_user`` joins to one sample; with ``PackUnit.ROW`` every row is its own owner.

    Guarantees:
      - with ``PackUnit.OWNER`` a row holds documents of one owner, and depends on that owner's documents only;
      - every token is in exactly one row; no owner is lost.
    """
    if documents.segments is not None:
        raise FdpError(f"{documents.source}: expected documents, got rows that are already packed; pack once")
    pieces = split_rows(documents, length=context + 1)
    sizes = np.diff(pieces.starts)
    groups: dict[str, list[int]] = {}
    for i, owner in enumerate(pieces.owners):
        groups.setdefault(owner if unit is PackUnit.OWNER else "", []).append(i)
    rows: list[list[int]] = []
    owners: list[str] = []
    for owner, members in groups.items():
        found = _first_fit(members, sizes, context + 1)
        rows += found
        owners += [owner] * len(found) if unit is PackUnit.OWNER else [f"row {i}" for i in range(len(found))]
    return _join_rows(pieces, rows, tuple(owners))


def packed_rows(documents: Documents, *, context: int) -> dict[str, int]:
    """Return for every owner the number of rows that :func:`pack` with ``PackUnit.OWNER`` would make."""
    pieces = split_rows(documents, length=context + 1)
    sizes = np.diff(pieces.starts)
    groups: dict[str, list[int]] = {}
    for i, owner in enumerate(pieces.owners):
        groups.setdefault(owner, []).append(i)
    return {owner: len(_first_fit(members, sizes, context + 1)) for owner, members in groups.items()}


def _first_fit(members: list[int], sizes: np.ndarray, length: int) -> list[list[int]]:
    """Distribute the members over rows of at most ``length`` tokens."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in members:
        size = int(sizes[i])
        latest = range(max(0, len(rows) - OPEN_ROWS), len(rows))
        row = next((r for r in latest if room[r] >= size), None)
        if row is None:
            rows.append([i])
            room.append(length - size)
        else:
            rows[row].append(i)
            room[row] -= size
    return rows


def _join_rows(pieces: Documents, rows: list[list[int]], owners: tuple[str, ...]) -> Documents:
    order = [i for row in rows for i in row]
    spans = [slice(int(pieces.starts[i]), int(pieces.starts[i + 1])) for i in order]
    numbers = [number for row in rows for number in range(1, len(row) + 1)]
    lengths = [span.stop - span.start for span in spans]
    ends = np.cumsum(lengths)
    last = np.cumsum([len(row) for row in rows]) - 1
    return pieces._replace(
        tokens=join_arrays((pieces.tokens[span] for span in spans), pieces.tokens.dtype),
        counted=join_arrays((pieces.counted[span] for span in spans), pieces.counted.dtype),
        segments=join_arrays((np.full(size, n, np.uint32) for n, size in zip(numbers, lengths)), np.dtype(np.uint32)),
        starts=np.concatenate([[0], ends[last]]),
        owners=owners,
    )
