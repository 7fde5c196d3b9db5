"""Symmetric linear maps of a gradient's two sides: a matrix, a diagonal plus low rank, or a diagonal per group.

    G -> left G right

Maps stored in half precision are widened to float32 first; results have the dtype of the input. Inputs computed in half
precision have at most eleven significant bits, so on a GPU their products are ``rounded`` to as many.

    >>> y = apply_map(sides.left, y)                              # (n, k)
    >>> x = apply_rows(sides.right, x)                            # (..., n): every token's input
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple, TypeAlias

import torch
from fdp_kernels.rounded_product import pad_to_alignment, rounded_product
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.rules import HALF
from fdp.types import FdpError


class MatrixMap(NamedTuple):
    """``y -> matrix y``, symmetric."""

    matrix: Float[Tensor, "n n"]


class LowRankMap(NamedTuple):
    """``y -> diagonal * y + columns core columns^T y``, symmetric; with no columns, a diagonal."""

    diagonal: Float[Tensor, " n"]
    columns: Float[Tensor, "n k"]
    core: Float[Tensor, "k k"]


class GroupedMap(NamedTuple):
    """``y_g -> diagonal_g * y_g`` for every group of consecutive rows of a gradient."""

    diagonal: Float[Tensor, "groups n"]


Map: TypeAlias = MatrixMap | LowRankMap | GroupedMap


def diagonal_map(diagonal: Float[Tensor, " n"]) -> LowRankMap:
    """Return the map ``y -> diagonal * y``."""
    return LowRankMap(diagonal, diagonal.new_zeros(len(diagonal), 0), diagonal.new_zeros(0, 0))


class Sides(NamedTuple):
    """``G -> left G right``; None is the identity."""

    left: Map | None
    right: Map | None


def apply_left(
    map: Map, gradient: Float[Tensor, "*many rows columns"], *, rounded: bool = False
) -> Float[Tensor, "*many rows columns"]:
    """Return ``map G``."""
    if isinstance(map, GroupedMap):
        return (gradient * map.diagonal.flatten()[:, None]).to(gradient.dtype)
    return apply_rows(map, gradient.mT, rounded=rounded).mT


def apply_right(
    map: Map, gradient: Float[Tensor, "*many rows columns"], *, rounded: bool = False
) -> Float[Tensor, "*many rows columns"]:
    """Return ``G map``, with a grouped map every group of rows times its own."""
    if isinstance(map, GroupedMap):
        groups = gradient.unflatten(-2, (len(map.diagonal), -1))
        return (groups * map.diagonal[:, None, :]).flatten(-3, -2).to(gradient.dtype)
    return apply_rows(map, gradient, rounded=rounded)


def apply_map(map: Map, y: Float[Tensor, "n k"], *, rounded: bool = False) -> Float[Tensor, "n k"]:
    """Return ``map y``."""
    return apply_rows(map, y.mT, rounded=rounded).mT


def apply_rows(map: Map, rows: Float[Tensor, "*tokens n"], *, rounded: bool = False) -> Float[Tensor, "*tokens n"]:
    """Return ``rows map``, which maps every row because the map is symmetric."""
    if isinstance(map, GroupedMap):
        raise FdpError("apply_rows: rows do not say which group they belong to; use apply_left and apply_right")
    rounded = rounded or rows.dtype in HALF
    x, *parts = (part.to(widest(rows, *map)) for part in (rows, *map))
    if isinstance(map, MatrixMap):
        return multiply(x, parts[0], rounded).to(rows.dtype)
    diagonal, columns, core = parts
    scaled = x * diagonal
    if columns.shape[1]:
        scaled = scaled + multiply(multiply(multiply(x, columns, rounded), core, rounded), columns.mT, rounded)
    return scaled.to(rows.dtype)


def multiply(x: Float[Tensor, "*tokens n"], matrix: Float[Tensor, "n k"], rounded: bool) -> Float[Tensor, "*tokens k"]:
    """Return ``x matrix``; if ``rounded``, on a GPU, from factors rounded to eleven significant bits."""
    if not (rounded and x.is_cuda):
        return x @ matrix
    flat, k = x.reshape(-1, x.shape[-1]), matrix.shape[1]
    return rounded_product(pad_to_alignment(flat, rows=1), pad_to_alignment(matrix))[:, :k].unflatten(0, x.shape[:-1])


def widest(*tensors: Tensor) -> torch.dtype:
    """Return the widest dtype of all tensors, at least float32."""
    return reduce(torch.promote_types, [x.dtype for x in tensors], torch.float32)
