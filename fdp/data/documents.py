"""Documents of unequal length with their owners, and datasets with one sample per owner.

    inputs_t = tokens_t,  targets_t = tokens_{t+1},  t = 0 .. context - 1
    mask_t   = 1  iff  token t + 1 exists, counts (is no prompt), and is of the same document as token t

Documents are stored one after another without padding, and padded when fetched: on the right, with token 0 and mask 0.
A causal model does not look ahead, so padding changes no loss. A document longer than ``context + 1`` tokens keeps its
first ones.

**The unit of privacy is the owner.** Clipping bounds the influence of one *row* of a batch, so a row must be an owner:
:func:`records` takes documents with one row per owner; for several rows per owner see ``fdp.data.users``.

    >>> dataset = records(documents, context=128, vocab_size=256)
    >>> dataset.fetch(np.array([0, 7]))              # {'tokens': (2, 129), 'loss_mask': (2, 128)}
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdp.data.array_store import ArrayWriter, join_arrays
from fdp.data.nouns import FILE, RECORD
from fdp.data.person_fields import PersonField
from fdp.data.read_counts import ReadCounts, SampleCounts
from fdp.data.units import PrivacyUnit, UnitKind, privacy_unit
from fdp.types import FdpError

CHUNK_TOKENS = 1 << 22
"""Tokens looked at together, so that mapped arrays are never all in memory."""


class Long(Enum):
    """The part of a text that is used if it is longer than a window: its beginning, or several windows."""

    CUT = "cut"
    SPLIT = "split"


class TextCounts(NamedTuple):
    """Counts of the texts of one owner: how many there are, how many were cut, and the tokens that these lost."""

    texts: int
    cut: int = 0
    lost: int = 0


class Documents(NamedTuple):
    """Concatenated rows: row i is ``[starts[i], starts[i + 1])`` of the first three arrays, owned by ``owners[i]``.

    ``counted`` tells which tokens are predicted. ``segments`` numbers the documents of a row from 1 (None: every row is
    one document). ``texts``, ``links`` and ``unread`` count the texts read and the files left out, ``owned`` the texts
    of every owner (None: every row is one), and ``text`` is the noun for one; see ``fdp.data.read_counts``. ``person``
    is a field of the records that seems to name a person, ``separated`` the separators of tables with unusual ones.
    """

    tokens: np.ndarray
    counted: np.ndarray
    segments: np.ndarray | None
    starts: np.ndarray
    owners: tuple[str, ...]
    source: str
    word: str = "token"
    texts: int = 0
    links: int = 0
    owned: dict[str, TextCounts] | None = None
    text: str = RECORD
    person: PersonField | None = None
    unread: int = 0
    separated: str = ""

    def __repr__(self) -> str:
        """Name the source and show no content, so that printing by accident shows nothing private."""
        return f"Documents({self.source!r})"

    def row(self, i: int) -> np.ndarray:
        """Return the tokens of row i."""
        return self.tokens[self.starts[i] : self.starts[i + 1]]

    def content(self) -> list[tuple[str, np.ndarray]]:
        """Return the arrays that rows are made from, for ``fdp.data.digest``; owners are in no sample."""
        segments = [] if self.segments is None else [("segments", self.segments)]
        return [("tokens", self.tokens), ("counted", self.counted), ("starts", self.starts), *segments]


def join_documents(
    pieces: Iterable[tuple[Sequence[int], Sequence[bool] | np.ndarray]],
    owners: Sequence[str],
    *,
    source: str,
    word: str = "token",
    dtype: np.dtype = np.dtype(np.int64),  # noqa: B008
) -> Documents:
    """Join (tokens, whether each counts) pairs to documents, in order; ``source`` names them in errors.

    ``owners`` may still grow while ``pieces`` are read. One piece at a time is in memory; ``dtype`` is that of the
    tokens. Arrays that are larger than memory become mapped files (``fdp.data.array_store``).
    """
    tokens, counted, starts = ArrayWriter(dtype), ArrayWriter(np.dtype(bool)), array("q", [0])
    for numbers, counts in pieces:
        tokens.append(numbers)
        counted.append(np.asarray(counts, dtype=bool))
        starts.append(tokens.size)
    if len(starts) == 1:
        raise FdpError(f"{source}: expected text or records, got nothing (empty); check that it is the one you meant")
    owned = {owner: TextCounts(texts) for owner, texts in Counter(owners).items()}
    return Documents(
        tokens.finish(),
        counted.finish(),
        None,
        np.array(starts, dtype=np.int64),
        tuple(owners),
        source,
        word,
        texts=len(starts) - 1,
        owned=owned,
    )


def row_chunks(starts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of rows that hold ``CHUNK_TOKENS`` together, or one longer row."""
    first, rows = 0, len(starts) - 1
    while first < rows:
        last = int(np.searchsorted(starts, starts[first] + CHUNK_TOKENS, side="right")) - 1
        last = min(max(last, first + 1), rows)
        yield first, last
        first = last


def text_counts(documents: Documents) -> dict[str, TextCounts]:
    """Return the counts of the texts of every owner."""
    if documents.owned is not None:
        return documents.owned
    return {owner: TextCounts(texts) for owner, texts in Counter(documents.owners).items()}


def cut_rows(documents: Documents, *, length: int) -> Documents:
    """Keep the first ``length`` tokens of every row; ``owned`` counts what is lost."""
    sizes = np.diff(documents.starts)
    kept = np.minimum(sizes, length)

    def cut(values: np.ndarray) -> np.ndarray:
        starts = documents.starts[:-1]
        return join_arrays((values[start : start + size] for start, size in zip(starts, kept)), values.dtype)

    owned = text_counts(documents).copy()
    for i in np.flatnonzero(sizes > length):
        before = owned[documents.owners[i]]
        owned[documents.owners[i]] = before._replace(cut=before.cut + 1, lost=before.lost + int(sizes[i]) - length)
    return documents._replace(
        tokens=cut(documents.tokens),
        counted=cut(documents.counted),
        segments=None if documents.segments is None else cut(documents.segments),
        starts=np.concatenate([[0], np.cumsum(kept)]),
        owned=owned,
    )


def split_rows(documents: Documents, *, length: int) -> Documents:
    """Split rows of more than ``length`` tokens into several of the same owner; no token is lost or used twice."""
    starts, owners = [0], []
    for i, owner in enumerate(documents.owners):
        first, last = int(documents.starts[i]), int(documents.starts[i + 1])
        ends = [*range(first + length, last, length), last]
        starts += ends
        owners += [owner] * len(ends)
    return documents._replace(starts=np.array(starts), owners=tuple(owners))


def pad_rows(documents: Documents, which: np.ndarray, *, context: int) -> dict[str, Tensor]:
    """Return rows ``which`` padded to a fixed length; -1 is a row of padding only.

    ``{"tokens": int64 (n, context + 1), "loss_mask": bool (n, context)}``, and for packed rows also
    ``"segments": int64 (n, context)`` of the inputs, 0 where there is none.
    """
    tokens = np.zeros((len(which), context + 1), dtype=np.int64)
    counted = np.zeros((len(which), context + 1), dtype=bool)
    segments = np.zeros((len(which), context + 1), dtype=np.int64)
    for row, i in enumerate(which):
        if i < 0:
            continue
        first = documents.starts[i]
        size = min(documents.starts[i + 1] - first, context + 1)
        tokens[row, :size] = documents.tokens[first : first + size]
        counted[row, :size] = documents.counted[first : first + size]
        segments[row, :size] = 1 if documents.segments is None else documents.segments[first : first + size]
    mask = counted[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    data = {"tokens": torch.from_numpy(tokens), "loss_mask": torch.from_numpy(mask)}
    return data if documents.segments is None else data | {"segments": torch.from_numpy(segments[:, :-1].copy())}


@dataclass(frozen=True)
class Records:
    """A dataset in which **a sample is one row with all data of its owner**: a record, or a packed row.

    Guarantees:
      - no two samples have the same owner: removing one removes every use of the owner's tokens;
      - padding changes no loss, and a sample in which nothing counts has loss and gradient exactly 0.

    ``reading`` counts what is not trained on; it is computed from the data and covered by no budget.
    """

    documents: Documents
    context: int
    unit: PrivacyUnit
    reading: ReadCounts = field(repr=False)
    counts: SampleCounts = field(repr=False)

    def __len__(self) -> int:
        return len(self.documents.owners)

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the samples as :func:`pad_rows` does."""
        return pad_rows(self.documents, indices, context=self.context)

    def content(self) -> list[tuple[str, np.ndarray]]:
        """Return the arrays that samples are made from, for ``fdp.data.digest``."""
        return [*self.documents.content(), ("context", np.array([self.context]))]


def records(documents: Documents, *, context: int, vocab_size: int, kind: UnitKind = UnitKind.RECORD) -> Records:
    """Return a dataset of one row per owner; ``kind`` says what an owner is."""
    check_documents(documents, context=context, vocab_size=vocab_size)
    rows = max(Counter(documents.owners).values())
    if rows > 1:
        raise FdpError(
            f"{documents.source}: expected one row per unit of privacy, got {rows} rows of one owner: a sample would "
            "be less than a unit, and epsilon a statement about the sample. Group them with "
            "fdp.data.users.by_user, or pack with PackUnit.ROW if the unit is to be a row"
        )
    learned, learnable = rows_with_loss(documents, context=context), rows_with_loss(documents, context=None)
    over, none = np.maximum(np.diff(documents.starts) - (context + 1), 0), np.zeros(len(learned), dtype=np.int64)
    counts = SampleCounts(
        texts=none + 1,
        windows=none + 1,
        cut=over > 0,
        lost=over,
        unlearned=learnable & ~learned,
        left_out=none,
        silent=~learned,
        packed=none,
    )
    reading = ReadCounts(
        kind,
        len(learned),
        context + 1,
        documents.word,
        links=documents.links,
        unread=documents.unread,
        separated=documents.separated,
        text=FILE if kind is UnitKind.FILE else documents.text,
        person_field=documents.person,
    ).total(counts)
    reading = reading._replace(texts=documents.texts) if kind is UnitKind.ROW else reading
    unit = privacy_unit(kind, tokens=context + 1, word=documents.word)
    return Records(documents, context, unit, reading, counts)


def rows_with_loss(documents: Documents, *, context: int | None) -> np.ndarray:
    """Return for every row whether a token counts among its first ``context + 1`` (None: among all of it)."""
    found = np.zeros(len(documents.owners), dtype=bool)
    for first, last in row_chunks(documents.starts):
        found[first:last] = _rows_with_loss(documents, first, last, context)
    return found


def _rows_with_loss(documents: Documents, first: int, last: int, context: int | None) -> np.ndarray:
    begin, end = documents.starts[first], documents.starts[last]
    starts, targets = documents.starts[first : last + 1] - begin, np.array(documents.counted[begin:end])
    targets[starts[:-1][starts[:-1] < len(targets)]] = False  # nothing predicts a row's first token
    if documents.segments is not None:
        segments = documents.segments[begin:end]
        targets[1:] &= segments[1:] == segments[:-1]
    positions = np.flatnonzero(targets)
    rows = np.searchsorted(starts, positions, side="right") - 1
    if context is not None:
        rows = rows[positions - starts[rows] <= context]
    found = np.zeros(last - first, dtype=bool)
    found[rows] = True
    return found


def check_documents(documents: Documents, *, context: int, vocab_size: int) -> None:
    """Refuse a context below 1, and tokens outside the vocabulary."""
    if context < 1:
        raise FdpError(f"context: expected at least 1, got {context}")
    for start in range(0, len(documents.tokens), CHUNK_TOKENS):
        chunk = documents.tokens[start : start + CHUNK_TOKENS]
        if int(chunk.max()) < vocab_size and int(chunk.min()) >= 0:
            continue
        first = start + int(np.argmax((chunk >= vocab_size) | (chunk < 0)))
        row = int(np.searchsorted(documents.starts, first, side="right")) - 1
        raise FdpError(
            f"{documents.source}: expected token ids from 0 to {vocab_size - 1}, got another in document {row + 1}; "
            "use the model's tokenizer or a model with a larger vocabulary"
        )
