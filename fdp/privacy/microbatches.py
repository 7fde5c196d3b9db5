"""Microbatches: the drawn samples in rows of fixed shape, padded and masked, and fetched from the data.

    indices (n,)  ->  (max(1, ceil(n / size)), size),    mask 1: a sample, 0: padding

Shapes depend on the sizes and on the number of samples, not on the content of the data; an empty draw is one row of
padding. Microbatches of several sizes, multiples of the smallest, are groups of rows of the smallest size, so that few
rows are padding:

    minimise  sum over microbatches of (rows + OVERHEAD_ROWS)    such that there is a row for every sample

    >>> groups = group_rows(69, (64, 32, 16, 8))           # RowGroups((8, 1)): 64 samples, then 8
    >>> matrix, mask = pad_to_rows(drawn, rows=9, size=8)
    >>> data = fetch_rows(dataset, matrix)                 # leaves (9, 8, ...)
    >>> for data, mask in split_microbatches(batch): ...   # leaves (64, ...), then (8, ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import tree
from fdp.arguments import whole_number
from fdp.types import Batch, FdpError, RowGroups, Tree

OVERHEAD_ROWS = 0.5
"""The cost of one more microbatch (its share of small launches, a pass over the sum), as rows of the smallest size."""
HALVINGS = 3
"""Smaller sizes, each half of the one before, for draws of several microbatches."""
CLOSE_SIZES = ((10, 9, 8, 7, 4, 1), (8, 7, 4, 2, 1))
"""Sizes, as multiples of the smallest, for draws that are about one microbatch."""


@runtime_checkable
class Dataset(Protocol):
    """Data read on demand: ``fetch`` returns a tree whose leaves are ``(len(indices), ...)`` tensors."""

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> Tree: ...


def sizes_from(largest: int, *, expected: float) -> tuple[int, ...]:
    """Return ``largest`` and the smaller sizes for the end of a batch, largest first.

    These are halves, down to an eighth. If most draws fit into one microbatch, each cut would cost much of a step, so
    there are sizes close to the largest as well: 9/10, 8/10 and 7/10 of it, or 7/8, if these are whole numbers.
    """
    if expected <= largest < 2 * expected:
        for rows in CLOSE_SIZES:
            if largest % rows[0] == 0:
                return tuple(largest // rows[0] * size for size in rows)
    sizes = [largest]
    while len(sizes) <= HALVINGS and sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


def one_microbatch(expected: int) -> int:
    """Return the size that holds most draws in one microbatch: 10/8 of the expected batch, rounded up to tenths.

    A batch of less than 16 is rounded up to a power of two: its draws vary too much.
    """
    return 10 * -(-expected // 8) if expected >= 16 else 1 << (expected - 1).bit_length()


def power_of_two_below(number: int) -> int:
    """Return the largest power of two that is smaller: 8 of 9, 4 of 8. ``number`` is at least 2."""
    return 1 << (number - 1).bit_length() - 1


def samples_per_rank(microbatch_size: int, sizes: Sequence[int], *, ranks: int) -> int:
    """Return how many samples of a microbatch of all ranks are computed by each: its columns of every row."""
    return microbatch_size // sizes[-1] * -(-sizes[-1] // ranks)


def check_sizes(microbatch_size: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sizes as a tuple; raise :class:`FdpError` unless they fall and are multiples of the last."""
    given = microbatch_size if isinstance(microbatch_size, list | tuple) else (microbatch_size,)
    sizes = tuple(whole_number("microbatch_size", size) for size in given)
    if not sizes or any(more <= less for more, less in pairwise(sizes)) or any(size % sizes[-1] for size in sizes):
        raise FdpError(
            f"microbatch_size: expected sizes such as (64, 32, 16), each smaller than the one before and a multiple of "
            f"the last, got {sizes}"
        )
    return sizes


def group_rows(count: int, sizes: Sequence[int]) -> RowGroups:
    """Return microbatches, largest first, with a place for each of ``count`` samples, as numbers of rows.

    Guarantees:
      - there are at least ``count`` places, and fewer than one row of the largest size more;
      - an empty draw is one microbatch of the smallest size;
      - the result depends on ``count`` and ``sizes`` alone, so that all ranks compute the same sequence.
    """
    rows, options = max(1, -(-count // sizes[-1])), tuple(size // sizes[-1] for size in sizes)
    full = (rows - 1) // options[0]
    return RowGroups(options[:1] * full + _cover(rows - full * options[0], options))


@cache
def _cover(rows: int, options: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes among ``options``, descending, whose sum is at least ``rows``, at the least cost."""
    found = [(size,) if size >= rows else (size, *_cover(rows - size, options[i:])) for i, size in enumerate(options)]
    return min(found, key=lambda sizes: (sum(sizes) + OVERHEAD_ROWS * len(sizes), len(sizes)))


def split_microbatches(batch: Batch) -> list[tuple[Tree, Tensor]]:
    """Return data and mask of every microbatch, ``(samples, ...)``, as views of the batch.

    Guarantees:
      - every row of the batch is in exactly one microbatch.
    """
    if batch.groups is None:
        return [(tree.map(lambda leaf, i=i: leaf[i], batch.data), batch.mask[i]) for i in range(len(batch.mask))]
    sizes = batch.groups.sizes
    if sum(sizes) != len(batch.mask) or min(sizes) < 1:
        raise FdpError(f"batch.groups: expected groups that add up to its {len(batch.mask)} rows, got {sizes}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def join(leaf: Tensor, i: int) -> Tensor:
        return leaf[starts[i] : starts[i] + sizes[i]].flatten(0, 1)

    return [(tree.map(lambda leaf, i=i: join(leaf, i), batch.data), join(batch.mask, i)) for i in range(len(sizes))]


def pad_to_microbatches(
    indices: Int[Tensor, " drawn"], *, microbatch_size: int
) -> tuple[Int[Tensor, "microbatches samples"], Float[Tensor, "microbatches samples"]]:
    """Return ``indices`` in rows of ``microbatch_size``, and the mask: 1 for a sample, 0 for padding (index 0).

    There are ``max(1, ceil(n / microbatch_size))`` rows: an empty draw is one row of padding, a normal step.
    """
    (size,) = check_sizes(microbatch_size)
    return pad_to_rows(indices, rows=max(1, -(-len(indices) // size)), size=size)


def pad_to_rows(
    indices: Int[Tensor, " drawn"], *, rows: int, size: int
) -> tuple[Int[Tensor, "rows samples"], Float[Tensor, "rows samples"]]:
    """Return ``indices`` in ``rows`` rows of ``size``, and the mask: 1 for a sample, 0 for padding (index 0)."""
    count = len(indices)
    matrix = indices.new_zeros(rows * size, dtype=torch.int64)
    mask = torch.zeros(rows * size, dtype=torch.float32, device=indices.device)
    matrix[:count], mask[:count] = indices, 1.0
    return matrix.view(rows, size), mask.view(rows, size)


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
    rows = dataset.fetch(flat.cpu().numpy()) if _fetches(dataset) else tree.map(lambda leaf: _rows(leaf, flat), dataset)
    for path, leaf in tree.flatten(rows).items():
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != flat.shape:
            got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise FdpError(f"dataset{_at(path)}: expected fetch to return a tensor of {len(flat)} rows, got {got}")
    return tree.map(lambda leaf: leaf.view(*shape, *leaf.shape[1:]), rows)


def dataset_length(dataset: Dataset | Tree) -> int:
    """Return the number of samples: the leading dimension that all leaves share."""
    if _fetches(dataset):
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


def _fetches(dataset: Dataset | Tree) -> TypeGuard[Dataset]:
    return _is_dataset(type(dataset))


@cache
def _is_dataset(kind: type) -> bool:
    """Return ``issubclass(kind, Dataset)``, which looks up all names of the protocol, once per type."""
    return issubclass(kind, Dataset)


def _rows(leaf: Tensor | np.ndarray, flat: Int[Tensor, " rows"]) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf[flat.to(leaf.device)]
    return torch.from_numpy(np.asarray(leaf[flat.cpu().numpy()]))


def _at(path: str) -> str:
    return f".{path}" if path else ""
