"""Count the held-out samples that are trained on too, whatever their files are called.

    shared = number of held-out samples whose SHA-256 is that of a sample to train on

Samples are compared value by value, so only exact copies are found, and both datasets must be read with the same
options. All data is fetched once; memory grows with the number of held-out samples. Above ``MOST_COMPARED`` samples
only the digests of the two datasets are compared.

    >>> shared = count_shared(held_out, dataset)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fdp import tree
from fdp.data.digest import data_digest, fetch_all
from fdp.privacy.microbatches import Dataset
from fdp.types import Tree

MOST_COMPARED = 1 << 20
"""Samples that are compared one by one: half a minute for windows of 512 tokens."""


def count_shared(held_out: Dataset, dataset: Dataset) -> int:
    """Return how many samples of ``held_out`` are equal to one of ``dataset``.

    If there are more than ``MOST_COMPARED`` in either, return all or none: whether the two are the same data.
    """
    if max(len(held_out), len(dataset)) > MOST_COMPARED:
        same = len(held_out) == len(dataset) and data_digest(held_out) == data_digest(dataset)
        return len(held_out) if same else 0
    counts = Counter(_sample_digests(held_out))
    shared = {digest for digest in _sample_digests(dataset) if digest in counts}
    return sum(counts[digest] for digest in shared)


def _sample_digests(dataset: Dataset) -> Iterator[bytes]:
    """Yield SHA-256 of the names, types, shapes and values of every sample."""
    for samples in fetch_all(dataset):
        yield from digests_of(samples)


def digests_of(samples: Tree) -> Iterator[bytes]:
    """Yield SHA-256 of the names, types, shapes and values of every one of these samples."""
    leaves = tree.flatten(samples)
    form = str([(path, leaf.dtype, tuple(leaf.shape[1:])) for path, leaf in leaves.items()]).encode()
    for rows in zip(*[_bytes(leaf) for leaf in leaves.values()], strict=True):
        digest = hashlib.sha256(form)
        for row in rows:
            digest.update(row)
        yield digest.digest()


def _bytes(leaf: Tensor) -> np.ndarray:
    """Return the bytes of every sample, one row each."""
    return leaf.detach().cpu().contiguous().reshape(len(leaf), leaf[0].numel()).view(torch.uint8).numpy()
