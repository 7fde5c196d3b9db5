"""Data known again: a digest, so that noise drawn for some data is never used for others.

digest = SHA-256(size, samples)

>>> data_digest(dataset) == digest_of_the_checkpoint
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from fdp import tree
from fdp.sampling import Dataset

DIGESTED = 1 << 25
"""Bytes of the data that a run looks at to know them again: a tenth of a second."""
TOGETHER = 1 << 22
"""Bytes of them that are held at a time."""


def data_digest(dataset: Dataset) -> str:
    """SHA-256 of the size and of every sample, to notice that they are not the same data.

    Of more than ``DIGESTED`` bytes, as many samples as that holds, all over the data; at least 256. Not covered by any
    budget: it belongs beside the data.
    """
    size = len(dataset)
    digest = hashlib.sha256(str(size).encode())
    each = max(1, sum(leaf.nbytes for leaf in tree.leaves(dataset.fetch(np.arange(1)))))
    count, together = min(size, max(256, DIGESTED // each)), max(1, TOGETHER // each)
    some = np.unique(np.linspace(0, size - 1, count).round().astype(np.int64))
    for part in np.array_split(some, -(-len(some) // together)):
        for path, leaf in tree.flatten(dataset.fetch(part)).items():
            digest.update(path.encode())
            digest.update(leaf.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
