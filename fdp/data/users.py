"""User-level privacy: a dataset whose sample is all windows of one user.

    sample u = (windows, context + 1) tokens of user u        loss_u = mean over all counted tokens of all windows

**The unit of privacy is a user.** Users are sampled and accounted for; clipping a sample bounds the influence of all
data of a user together. Every sample has the same shape: a user with fewer windows is padded with windows in which
nothing counts, and of a user with more, ``windows`` are kept in their order,

    the ``windows`` smallest of   r_j = bits(fold_in(key, user), j),   j the index of a window among the user's own.

The rule is public, the same on every rank and in every run with the key, and depends only on the user's own name and
number of windows: other users change no one else's sample.

    >>> dataset = by_user(split_rows(documents, length=129), context=128, vocab_size=256, windows=8, key=key)
    >>> dataset.fetch(np.array([3]))["tokens"].shape            # (1, 8, 129)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fdp import keys
from fdp.data.documents import Documents, check_documents, pad_rows, rows_with_loss
from fdp.data.read_counts import ReadCounts
from fdp.data.units import PrivacyUnit, UnitKind, privacy_unit
from fdp.types import FdpError, Key


@dataclass(frozen=True)
class Users:
    """A dataset in which **a sample is one user**: ``rows[u]`` are the user's windows in ``documents``, -1 for none.

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

    @property
    def unit(self) -> PrivacyUnit:
        """The unit of privacy, in words."""
        windows, word = self.rows.shape[1], self.documents.word
        return privacy_unit(UnitKind.USER, tokens=self.context + 1, word=word, windows=windows)

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


def by_user(documents: Documents, *, context: int, vocab_size: int, windows: int, key: Key) -> Users:
    """Group all rows of each owner to one sample of ``windows`` windows. The owners must be the users.

    Rows of more than ``context + 1`` tokens keep their first ones. ``fdp.data.documents.split_rows`` splits long rows
    before, and ``fdp.data.document_packing.pack`` joins short ones.
    """
    check_documents(documents, context=context, vocab_size=vocab_size)
    if windows < 1:
        raise FdpError(f"windows: expected at least 1 for each user, got {windows}")
    owned: dict[str, list[int]] = {}
    for i, owner in enumerate(documents.owners):
        owned.setdefault(owner, []).append(i)
    rows = np.full((len(owned), windows), -1, dtype=np.int64)
    for u, (user, mine) in enumerate(owned.items()):
        kept = np.array(mine) if len(mine) <= windows else np.array(mine)[_choose(user, len(mine), windows, key)]
        rows[u, : len(kept)] = kept
    used = rows >= 0
    learned = np.append(rows_with_loss(documents, context=context), False)  # -1 points to the appended False
    reading = ReadCounts(
        UnitKind.USER,
        len(owned),
        context + 1,
        documents.word,
        texts=documents.texts,
        windows=int(used.sum()),
        cut=int((np.diff(documents.starts)[rows[used]] > context + 1).sum()),
        capped=sum(len(mine) > windows for mine in owned.values()),
        left_out=len(documents.owners) - int(used.sum()),
        silent=int((~learned[rows].any(1)).sum()),
        links=documents.links,
    )
    return Users(documents, context, rows, reading)


def _choose(user: str, count: int, windows: int, key: Key) -> np.ndarray:
    """Return the ``windows`` of a user's ``count`` windows that are kept, ascending."""
    bits = keys.bits(keys.fold_in(key, user), (count,))
    return bits.argsort(stable=True)[:windows].sort().values.cpu().numpy()
