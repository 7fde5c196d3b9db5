"""Packing: several documents in one row, each attending to itself only.

    row = [a_0 a_1 a_2 | b_0 b_1 | c_0 c_1 c_2 | padding]       segments = 1 1 1 2 2 3 3 3 0
    mask_t = 1 only where tokens t and t + 1 are of one segment; attention is causal and within a segment

A row's loss is the mean over all of its counted tokens, whatever segments they are of.

**Packing must not change the unit of privacy.** Per-sample gradients are per row of the batch: what shares a row is
clipped together. So documents share a row if they have the same owner (``Unit.OWNER``): chunks of one record, or texts
of one user. Documents of different owners in a row (``Unit.ROW``) make the *row* the unit, and say nothing of the
strength one would think about an owner: one document less moves every later one to another place, in other rows.
Nothing chooses this but who names it.

    >>> packed = pack(documents, context=128, unit=Unit.OWNER)
    >>> dataset = by_user(packed, context=128, vocab_size=256, windows=8, key=key)
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from fdp.data.documents import Documents, cut
from fdp.types import FdpError

OPEN = 32
"""Rows that are looked at for room, the latest ones: a look at all would take a time quadratic in their number."""


class Unit(Enum):
    """What the unit of privacy is, and so who may share a row: documents of one owner, or whoever comes along."""

    OWNER = "owner"
    ROW = "row"


def pack(documents: Documents, *, context: int, unit: Unit) -> Documents:
    """Rows of at most ``context + 1`` tokens, each document in the first of the latest rows with room for it.

    Longer documents are cut, each piece a segment of its own. With ``Unit.OWNER`` an owner may have several rows, to be
    made one sample by ``fdp.data.users.by_user``; with ``Unit.ROW`` every row is its own owner.

    Guarantees:
      - with ``Unit.OWNER`` a row holds documents of one owner, and depends on that owner's documents only;
      - every token is in exactly one row; no owner is lost.
    """
    if documents.segments is not None:
        raise FdpError(f"{documents.source}: expected documents, got rows that are packed already; pack once")
    pieces = cut(documents, length=context + 1)
    sizes = np.diff(pieces.starts)
    groups: dict[str, list[int]] = {}
    for i, owner in enumerate(pieces.owners):
        groups.setdefault(owner if unit is Unit.OWNER else "", []).append(i)
    rows: list[list[int]] = []
    owners: list[str] = []
    for owner, members in groups.items():
        found = _first_fit(members, sizes, context + 1)
        rows += found
        owners += [owner] * len(found) if unit is Unit.OWNER else [f"row {i}" for i in range(len(found))]
    return _joined(pieces, rows, tuple(owners))


def _first_fit(members: list[int], sizes: np.ndarray, length: int) -> list[list[int]]:
    """The members in rows of at most ``length``."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in members:
        size = int(sizes[i])
        latest = range(max(0, len(rows) - OPEN), len(rows))
        row = next((r for r in latest if room[r] >= size), None)
        if row is None:
            rows.append([i])
            room.append(length - size)
        else:
            rows[row].append(i)
            room[row] -= size
    return rows


def _joined(pieces: Documents, rows: list[list[int]], owners: tuple[str, ...]) -> Documents:
    order = [i for row in rows for i in row]
    spans = [slice(int(pieces.starts[i]), int(pieces.starts[i + 1])) for i in order]
    numbers = [number for row in rows for number in range(1, len(row) + 1)]
    lengths = [span.stop - span.start for span in spans]
    ends = np.cumsum(lengths)
    last = np.cumsum([len(row) for row in rows]) - 1
    return pieces._replace(
        tokens=np.concatenate([pieces.tokens[span] for span in spans]),
        counted=np.concatenate([pieces.counted[span] for span in spans]),
        segments=np.repeat(np.array(numbers), lengths),
        starts=np.concatenate([[0], ends[last]]),
        owners=owners,
    )
