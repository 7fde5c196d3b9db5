"""Count the samples that occur more than once, in the pass that computes the digest of the data.

    repeated = number of samples whose SHA-256 is that of another one,  most = how often one of them occurs

Epsilon is about one sample: who is in k equal samples has k times the sensitivity. Samples are compared value by value,
as they are trained on, so only exact copies are found. Not counted are users, who are one sample each, though two may
have the same short note; windows of a stream of tokens, in which a copied text begins anywhere; files that are mapped,
which would be read twice; and more than ``MOST_COUNTED`` samples. The numbers are computed on private data and covered
by no budget: they are shown, and written nowhere.

    >>> digest, repeats = digest_and_repeats(dataset)

:func:`count_equal_texts` compares texts as they are read, whatever the sample: ``fdp inspect --data`` shows them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import numpy as np

from fdp import tree
from fdp.data.digest import ArrayBacked, data_digest, fetch_all
from fdp.data.documents import Documents
from fdp.data.held_out import Subset
from fdp.data.mixed import Mixed
from fdp.data.overlap import digests_of
from fdp.data.units import UnitKind
from fdp.data.users import Users
from fdp.data.windows import Windows
from fdp.privacy.microbatches import Dataset
from fdp.types import Path, Tree

MOST_COUNTED = 1 << 18
"""Samples that are counted: a few seconds for records of 512 tokens."""


class Repeats(NamedTuple):
    """Samples that are equal to another one, and how often one of them occurs. Private: covered by no budget."""

    repeated: int
    most: int


NO_REPEATS = Repeats(0, 0)


def digest_and_repeats(dataset: Dataset, *, own: Collection[Path] = ()) -> tuple[str, Repeats]:
    """Return ``data_digest(dataset)`` and the repeats among its private samples; none where they are not counted.

    ``own`` are leaves that every sample has of its own, whatever it holds, such as a key of its dropout.
    """
    counts: Counter[bytes] = Counter()
    count = partial(_count, counts, own)
    private = dataset.private if isinstance(dataset, Mixed) else dataset
    source = private.dataset if isinstance(private, Subset) else private
    users = isinstance(source, Users) and source.kind is UnitKind.USER
    counted = len(private) <= MOST_COUNTED and not isinstance(source, Windows) and not users
    fetched = not isinstance(dataset, ArrayBacked)
    digest = data_digest(dataset, see=count if counted and fetched else None)
    if counted and not fetched and _is_in_memory(source):
        for samples in fetch_all(private):
            count(samples)
    return digest, _repeats(counts)


def count_equal_texts(documents: Documents) -> Repeats:
    """Return the repeats among texts that are not empty, each compared as a whole; none where they are too many."""
    rows = len(documents.starts) - 1
    if rows > MOST_COUNTED:
        return NO_REPEATS
    texts = (documents.row(i) for i in range(rows))
    return _repeats(Counter(hashlib.sha256(text.tobytes()).digest()[:16] for text in texts if len(text)))


def _repeats(counts: Counter[bytes]) -> Repeats:
    often = [times for times in counts.values() if times > 1]
    return Repeats(sum(often), max(often)) if often else NO_REPEATS


def _count(counts: Counter[bytes], own: Collection[Path], samples: Tree) -> None:
    leaves = {path: leaf for path, leaf in tree.flatten(samples).items() if path not in own}
    counts.update(digest[:16] for digest in digests_of(leaves))


def _is_in_memory(dataset: Dataset) -> bool:
    """Return True if samples can be fetched without reading a file."""
    return isinstance(dataset, ArrayBacked) and not any(isinstance(each, np.memmap) for _, each in dataset.content())
