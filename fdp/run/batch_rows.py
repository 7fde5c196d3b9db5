"""Rows of a batch, which is a tree of tensors ``(samples, ...)``: cut, join and compare them.

same_rows(one, other)  =  |one - other| <= ROUNDING max |one| in every row, or both NaN, or both the same infinity

>>> same_rows(slice_rows(batch, 0, 1), collate_rows(collate, [dataset[0]]))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fdp import tree
from fdp.types import Tree

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Difference of two computed rows, relative to their largest entry, that rounding explains; in half precision, 0.02."""


def slice_rows(batch: Tree, first: int, last: int | None) -> Tree:
    """Return the rows from ``first`` to ``last``, which is left out."""
    return tree.map(lambda leaf: leaf[first:last], batch)


def join_rows(batches: Sequence[Tree]) -> Tree:
    """Return the rows of several batches as one batch."""
    return tree.map(lambda *leaves: torch.cat(leaves), *batches)


def leaf_shapes(batch: Tree) -> dict[str, tuple[int, ...]]:
    """Return the shape of every leaf, by path."""
    return {path: tuple(leaf.shape) for path, leaf in tree.flatten(batch).items()}


def same_rows(one: Tree, other: Tree) -> bool:
    """Return True if two batches are equal but for rounding: a product may round otherwise in a larger batch."""
    return leaf_shapes(one) == leaf_shapes(other) and all(map(_is_close, tree.leaves(one), tree.leaves(other)))


def _is_close(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    one, other = (torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in (one, other))
    if not one.dtype.is_floating_point or one.dtype != other.dtype:
        return False
    tolerance = ROUNDING.get(one.dtype, 0.02)
    a, b = (leaf.double().flatten(1) if leaf.ndim > 1 else leaf.double()[:, None] for leaf in (one, other))
    largest = a.abs().nan_to_num(posinf=0.0).amax(1, keepdim=True) if a.numel() else a
    same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= tolerance * largest)
    return bool(same.all())
