"""User-level privacy: a dataset whose sample is all windows of one user; or all windows of one long record.

    sample u = (windows, context + 1) tokens of user u        loss_u = mean over all counted tokens of all windows

**The unit of privacy is a user.** Users are sampled and accounted for; clipping a sample bounds the influence of all
data of a user together. Every sample has the same shape: a user with fewer windows is padded with windows in which
nothing counts, and of a user with more, ``windows`` are kept in their order,

    the ``windows`` smallest of   r_j = bits(fold_in(key, user), j),   j the index of a window among the user's own.

The rule is public, the same on every rank and in every run with the key, and depends only on the user's own name and
number of windows: other users change no one else's sample.

A record longer than a window may be a sample of several windows too: :func:`by_record` keeps its first ``windows``. The
unit stays the record, since its windows are clipped together.

    >>> dataset = by_user(split_rows(documents, length=129), context=128, vocab_size=256, windows=8, key=key)
    >>> dataset.fetch(np.array([3]))["tokens"].shape            # (1, 8, 129)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from fdp import keys
from fdp.data.document_packing import packed_rows
from fdp.data.documents import Documents, Long, check_documents, pad_rows, rows_with_loss, text_counts
from fdp.data.nouns import FILE, USER
from fdp.data.read_counts import ReadCounts, SampleCounts
from fdp.data.units import PrivacyUnit, UnitKind, privacy_unit
from fdp.types import FdpError, Key


@dataclass(frozen=True)
class Users:
    """A dataset in which **a sample is one user**: ``rows[u]`` are the user's windows in ``documents``, -1 for none.

    ``kind`` says what an owner is: a user, or a record or file that is split into windows. ``which`` says which users
    they are (``fdp.data.units``).

    Guarantees:
      - no window is in two samples, and a sample holds one user's windows only;
      - a user's sample does not depend on which other users there are;
      - padding changes no loss, and a user of whom nothing counts has loss and gradient exactly 0.

    ``reading`` counts those users, and the data not trained on; it is computed from the data and covered by no budget.
    """

    documents: Documents
    context: int
    rows: np.ndarray = field(repr=False)
    reading: ReadCounts = field(repr=False)
    counts: SampleCounts = field(repr=False)
    kind: UnitKind = UnitKind.USER
    long: Long = Long.SPLIT
    which: str = ""

    @property
    def unit(self) -> PrivacyUnit:
        """The unit of privacy, in words."""
        if self.documents.segments is not None:
            filled = "each of as many records as fit"
        else:
            filled = "each the beginning of a record" if self.long is Long.CUT else ""
        windows, word = self.rows.shape[1], self.documents.word
        sizes = {"tokens": self.context + 1, "word": word, "windows": windows}
        return privacy_unit(self.kind, **sizes, filled=filled, which=self.which)

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``{"tokens": (n, windows, context + 1), "loss_mask": (n, windows, context)}``; segments if packed."""
        rows = self.rows[indices]
        flat = pad_rows(self.documents, rows.reshape(-1), context=self.context)
        return {name: leaf.view(*rows.shape, leaf.shape[1]) for name, leaf in flat.items()}

    def content(self) -> list[tuple[str, np.ndarray]]:
        """Return the arrays that samples are made from, for ``fdp.data.digest``."""
        return [*self.documents.content(), ("rows", self.rows), ("context", np.array([self.context]))]


def by_user(
    documents: Documents,
    *,
    context: int,
    vocab_size: int,
    windows: int,
    key: Key,
    person: str = USER,
    long: Long = Long.SPLIT,
    which: str = "",
) -> Users:
    """Group all rows of each owner to one sample of ``windows`` windows. The owners must be the users.

    Rows of more than ``context + 1`` tokens keep their first ones. ``fdp.data.documents`` splits long rows before
    (``split_rows``) or cuts them (``cut_rows``, to be named in ``long``), and ``fdp.data.document_packing.pack`` joins
    short ones. ``person`` is the noun for a user, and ``which`` says which users they are.
    """
    check_documents(documents, context=context, vocab_size=vocab_size)
    if windows < 1:
        raise FdpError(f"windows: expected at least 1 for each user, got {windows}")
    owned = _rows_by_owner(documents)
    chosen = (mine[_choose(user, len(mine), windows, key)] if len(mine) > windows else mine for user, mine in owned)
    dataset = _group(documents, owned, list(chosen), context=context, windows=windows, kind=UnitKind.USER)
    reading = dataset.reading._replace(person=person)
    if documents.segments is None:
        packed = packed_rows(documents, context=context)
        counts = dataset.counts._replace(packed=np.array([packed[user] for user, _ in owned]))
        dataset, reading = replace(dataset, counts=counts), reading.total(counts)
    return replace(dataset, reading=reading, long=long, which=which)


def by_record(documents: Documents, *, context: int, vocab_size: int, windows: int, kind: UnitKind) -> Users:
    """Group the rows of each record, or file, to one sample: its first ``windows`` windows.

    The owners must be the records, each split by ``fdp.data.documents.split_rows``. The windows of a record are chosen
    by their order alone, since the place of a record, unlike a user's name, changes if another record is removed.

    Guarantees:
      - a sample depends on its own record only: however many windows it has, the record is one unit.
    """
    check_documents(documents, context=context, vocab_size=vocab_size)
    if windows < 1:
        raise FdpError(f"windows: expected at least 1 for each record, got {windows}")
    owned = _rows_by_owner(documents)
    return _group(documents, owned, [mine[:windows] for _, mine in owned], context=context, windows=windows, kind=kind)


def _rows_by_owner(documents: Documents) -> list[tuple[str, np.ndarray]]:
    """Return every owner with the rows that are the owner's, in order of appearance."""
    owned: dict[str, list[int]] = {}
    for i, owner in enumerate(documents.owners):
        owned.setdefault(owner, []).append(i)
    return [(owner, np.array(rows)) for owner, rows in owned.items()]


def _group(
    documents: Documents,
    owned: list[tuple[str, np.ndarray]],
    chosen: list[np.ndarray],
    *,
    context: int,
    windows: int,
    kind: UnitKind,
) -> Users:
    """Return the dataset whose samples are the ``chosen`` rows of every owner, and its counts."""
    rows = np.full((len(owned), windows), -1, dtype=np.int64)
    for u, kept in enumerate(chosen):
        rows[u, : len(kept)] = kept
    used = rows >= 0
    over = np.maximum(np.diff(documents.starts) - (context + 1), 0)
    beyond = np.where(used, np.append(over, 0)[rows], 0)
    learned = np.append(rows_with_loss(documents, context=context), False)  # -1 points to the appended False
    texts = text_counts(documents)
    per_owner = np.array([texts[owner] for owner, _ in owned])
    counts = SampleCounts(
        texts=per_owner[:, 0],
        windows=used.sum(1),
        cut=per_owner[:, 1] + (beyond > 0).sum(1),
        lost=per_owner[:, 2] + beyond.sum(1),
        unlearned=np.zeros(len(owned), dtype=np.int64),
        left_out=np.array([len(mine) for _, mine in owned]) - used.sum(1),
        silent=np.logical_not(learned[rows].any(1)),
        packed=np.zeros(len(owned), dtype=np.int64),
    )
    noun = FILE if kind is UnitKind.FILE else documents.text
    reading = ReadCounts(
        kind,
        len(owned),
        context + 1,
        documents.word,
        most=windows,
        text=noun,
        links=documents.links,
        unread=documents.unread,
        separated=documents.separated,
        person_field=documents.person,
    )
    return Users(documents, context, rows, reading.total(counts), counts, kind)


def _choose(user: str, count: int, windows: int, key: Key) -> np.ndarray:
    """Return the ``windows`` of a user's ``count`` windows that are kept, ascending."""
    bits = keys.bits(keys.fold_in(key, user), (count,))
    return bits.argsort(stable=True)[:windows].sort().values.cpu().numpy()
