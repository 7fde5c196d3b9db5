"""A digest of a dataset, so that noise drawn for one dataset is never used for another.

    digest = SHA-256(size, every value of every sample)

All of the data is read: one changed token anywhere changes the digest. If a dataset is made from arrays
(:class:`ArrayBacked`), mapped files included, the arrays are hashed; otherwise every sample is fetched once. The
digest is not covered by any privacy budget: keep it beside the data.

    >>> data_digest(dataset) == digest_of_the_checkpoint
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fdp import tree
from fdp.privacy.microbatches import Dataset
from fdp.types import Tree

CHUNK_ELEMENTS = 1 << 20
"""Elements hashed at a time, as the narrowest integers that hold them."""
FETCHED_BYTES = 1 << 22
"""Bytes of samples that are fetched at a time."""
UNSIGNED = tuple(np.dtype(name) for name in ("u1", "<u2", "<u4", "<u8"))


@runtime_checkable
class ArrayBacked(Protocol):
    """A dataset whose samples are a function of its size and of the arrays that ``content`` returns.

    An array is a tensor, a numpy array, or anything with a shape of one dim and slices that are numpy arrays.
    """

    def content(self) -> Iterable[tuple[str, Any]]: ...


def data_digest(dataset: Dataset, *, see: Callable[[Tree], None] | None = None) -> str:
    """Return SHA-256 of the size and of every sample, to notice that they are not the same data.

    If samples have to be fetched, ``see`` is called with some of them at a time, until it has seen all.

    Guarantees:
      - a change of one value of one sample changes it;
      - it does not depend on the integer type that tokens are stored in.
    """
    digest = hashlib.sha256(str(len(dataset)).encode())
    for name, values in arrays_of(dataset, see=see):
        array = _array(values)
        digest.update(f"|{name} {array.shape}".encode())
        for chunk in _chunks(array):
            canonical = _canonical(chunk)
            digest.update(canonical.dtype.str.encode())
            digest.update(np.ascontiguousarray(canonical).data)
    return digest.hexdigest()


def arrays_of(dataset: Dataset, *, see: Callable[[Tree], None] | None = None) -> Iterable[tuple[str, Any]]:
    """Return the arrays that a dataset is made from, or else those of all its samples, with names."""
    return dataset.content() if isinstance(dataset, ArrayBacked) else _fetch_all(dataset, see)


def _fetch_all(dataset: Dataset, see: Callable[[Tree], None] | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the leaves of all samples, some samples at a time."""
    for samples in fetch_all(dataset):
        if see is not None:
            see(samples)
        yield from tree.flatten(samples).items()


def fetch_all(dataset: Dataset) -> Iterator[Tree]:
    """Yield all samples, as many at a time as have ``FETCHED_BYTES``, but at least one."""
    size = len(dataset)
    each = max(1, sum(leaf.nbytes for leaf in tree.leaves(dataset.fetch(np.arange(1))))) if size else 1
    together = max(1, FETCHED_BYTES // each)
    for start in range(0, size, together):
        yield dataset.fetch(np.arange(start, min(start + together, size)))


def _array(values: Any) -> Any:
    if not isinstance(values, Tensor):
        return values
    values = values.detach().cpu().contiguous()
    return (values.view(torch.int16) if values.dtype is torch.bfloat16 else values).numpy()


def _chunks(array: Any) -> Iterator[np.ndarray]:
    flat = array.reshape(-1) if isinstance(array, np.ndarray) else array
    for start in range(0, len(flat), CHUNK_ELEMENTS):
        yield flat[start : start + CHUNK_ELEMENTS]


def _canonical(chunk: np.ndarray) -> np.ndarray:
    """Cast integers to the narrowest unsigned type that holds all of them, or to 64 bits if one is negative."""
    if chunk.dtype == UNSIGNED[0] or not np.issubdtype(chunk.dtype, np.integer):
        return chunk
    least, most = int(chunk.min()), int(chunk.max())
    wide = np.dtype("<i8") if least < 0 else next(dtype for dtype in UNSIGNED if most <= np.iinfo(dtype).max)
    return chunk.astype(wide, copy=False)
