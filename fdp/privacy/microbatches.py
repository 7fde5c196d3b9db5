"""Microbatches: the drawn samples in rows of fixed shape, padded and masked, and fetched from the data.

    indices (n,)  ->  (max(1, ceil(n / size)), size),    mask 1: a sample, 0: padding

Shapes depend on the microbatch size, and not on the content of the data; an empty draw is one row of padding.

    >>> matrix, mask = pad_to_microbatches(drawn, microbatch_size=64)
    >>> data = fetch_rows(dataset, matrix)                 # leaves (microbatches, 64, ...)
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import tree
from fdp.types import FdpError, Tree


@runtime_checkable
class Dataset(Protocol):
    """Data read on demand: ``fetch`` returns a tree whose leaves are ``(len(indices), ...)`` tensors."""

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> Tree: ...


def pad_to_microbatches(
    indices: Int[Tensor, " drawn"], *, microbatch_size: int
) -> tuple[Int[Tensor, "microbatches samples"], Float[Tensor, "microbatches samples"]]:
    """Return ``indices`` in rows of ``microbatch_size``, and the mask: 1 for a sample, 0 for padding (index 0).

    There are ``max(1, ceil(n / microbatch_size))`` rows: an empty draw is one row of padding, a normal step.
    """
    if not is_whole_number(microbatch_size) or microbatch_size < 1:
        raise FdpError(f"microbatch_size: expected a whole number, 1 or more, got {microbatch_size!r}")
    count = len(indices)
    rows = max(1, -(-count // microbatch_size))
    matrix = indices.new_zeros(rows * microbatch_size, dtype=torch.int64)
    mask = torch.zeros(rows * microbatch_size, dtype=torch.float32, device=indices.device)
    matrix[:count], mask[:count] = indices, 1.0
    return matrix.view(rows, microbatch_size), mask.view(rows, microbatch_size)


def fetch_rows(dataset: Dataset | Tree, index_matrix: Int[Tensor, "microbatches samples"]) -> Tree:
    """Fetch the rows of every data leaf, ``(microbatches, samples, ...)``, in the structure of the data.

    ``dataset`` is a :class:`Dataset`, or a tree of tensors and numpy arrays (memory-mapped ones are read only
    where needed) with one leading sample dimension. Tensors stay on their device.
    """
    flat = index_matrix.flatten()
    shape = tuple(index_matrix.shape)
    size = dataset_length(dataset)
    if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < size:
        raise FdpError(f"index_matrix: expected indices in [0, {size}), got {int(flat.min())} to {int(flat.max())}")
    if isinstance(dataset, Dataset):
        rows = dataset.fetch(flat.cpu().numpy())
    else:
        rows = tree.map(lambda leaf: _rows(leaf, flat), dataset)
    for path, leaf in tree.flatten(rows).items():
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != flat.shape:
            got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise FdpError(f"dataset{_at(path)}: expected fetch to return a tensor of {len(flat)} rows, got {got}")
    return tree.map(lambda leaf: leaf.view(*shape, *leaf.shape[1:]), rows)


def dataset_length(dataset: Dataset | Tree) -> int:
    """Return the number of samples: the leading dimension that all leaves share."""
    if isinstance(dataset, Dataset):
        return len(dataset)
    flat = tree.flatten(dataset)
    for path, leaf in flat.items():
        if not isinstance(leaf, (Tensor, np.ndarray)) or leaf.ndim == 0:
            raise FdpError(
                f"dataset{_at(path)}: expected a tensor or numpy array with a leading sample dimension, got "
                f"{type(leaf).__name__}"
            )
    sizes = {path: int(leaf.shape[0]) for path, leaf in flat.items()}
    if len(set(sizes.values())) != 1:
        raise FdpError(f"dataset: expected leaves with one common leading sample dimension, got {sizes}")
    return next(iter(sizes.values()))


def _rows(leaf: Tensor | np.ndarray, flat: Int[Tensor, " rows"]) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf[flat.to(leaf.device)]
    return torch.from_numpy(np.asarray(leaf[flat.cpu().numpy()]))


def _at(path: str) -> str:
    return f".{path}" if path else ""


def is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
