"""A preconditioner times a gradient: products only, nothing is decided, so it runs inside a compiled step.

    Sides     G -> L G R
    Product   G -> Q_L ((Q_L^T G Q_R) * scale) Q_R^T

What is stored in half precision is widened to float32 first; results have the dtype of what came in. What was computed
in half precision has no more than eleven bits: on a GPU its products are ``rounded`` to as many, in 0.29 of the time.

    >>> update = precondition(preconditioner, gradient)                    # (rows, columns)
    >>> y = apply_map(preconditioner.left, y)                              # (n, k)
    >>> x = apply_rows(preconditioner.right, x)                            # (..., n): every token's input
"""

from __future__ import annotations

from functools import reduce

import torch
from fdp_kernels.rounded_product import padded, rounded_product
from jaxtyping import Float
from torch import Tensor

from fdp.kfac.factors import HALF
from fdp.kfac.types import GroupedMap, Map, MatrixMap, Preconditioner, Product, Sides
from fdp.types import FdpError


def precondition(
    preconditioner: Preconditioner, gradient: Float[Tensor, "rows columns"], *, rounded: bool = False
) -> Float[Tensor, "rows columns"]:
    """``F^-1 G``, or the power of F that was asked for. ``rounded``: G was computed in half precision."""
    match preconditioner:
        case Sides(left, right):
            done = gradient.to(_widest(gradient))
            done = done if left is None else apply_left(left, done, rounded=rounded)
            return (done if right is None else apply_right(right, done, rounded=rounded)).to(gradient.dtype)
        case Product():
            left, right, scale, g = (x.to(_widest(gradient, *preconditioner)) for x in (*preconditioner, gradient))
            inside = _times(_times(left.mT, g, rounded), right, rounded) * scale
            return _times(_times(left, inside, rounded), right.mT, rounded).to(gradient.dtype)


def apply_left(
    map: Map, gradient: Float[Tensor, "*many rows columns"], *, rounded: bool = False
) -> Float[Tensor, "*many rows columns"]:
    """``map G``."""
    if isinstance(map, GroupedMap):
        return (gradient * map.diagonal.flatten()[:, None]).to(gradient.dtype)
    return apply_rows(map, gradient.mT, rounded=rounded).mT


def apply_right(
    map: Map, gradient: Float[Tensor, "*many rows columns"], *, rounded: bool = False
) -> Float[Tensor, "*many rows columns"]:
    """``G map``; of a map by group every group's rows by its own."""
    if isinstance(map, GroupedMap):
        groups = gradient.unflatten(-2, (len(map.diagonal), -1))
        return (groups * map.diagonal[:, None, :]).flatten(-3, -2).to(gradient.dtype)
    return apply_rows(map, gradient, rounded=rounded)


def apply_map(map: Map, y: Float[Tensor, "n k"], *, rounded: bool = False) -> Float[Tensor, "n k"]:
    """``map y``."""
    return apply_rows(map, y.mT, rounded=rounded).mT


def apply_rows(map: Map, rows: Float[Tensor, "*tokens n"], *, rounded: bool = False) -> Float[Tensor, "*tokens n"]:
    """``rows map``: the map of every row, as it is symmetric."""
    if isinstance(map, GroupedMap):
        raise FdpError("apply_rows: rows do not say which group they are of; use apply_left and apply_right")
    rounded = rounded or rows.dtype in HALF
    x, *parts = (part.to(_widest(rows, *map)) for part in (rows, *map))
    if isinstance(map, MatrixMap):
        return _times(x, parts[0], rounded).to(rows.dtype)
    diagonal, columns, core = parts
    scaled = x * diagonal
    if columns.shape[1]:
        scaled = scaled + _times(_times(_times(x, columns, rounded), core, rounded), columns.mT, rounded)
    return scaled.to(rows.dtype)


def trust_dot(
    gradient: Float[Tensor, "rows columns"], update: Float[Tensor, "rows columns"], *, root: bool
) -> Float[Tensor, ""]:
    """A layer's part of ``g^T F^-1 g``; a ``root`` meets gradients that one root has been applied to: |F^-1/2 g|^2."""
    return (gradient * (gradient if root else update)).sum(dtype=torch.float64)


def _times(x: Float[Tensor, "*tokens n"], matrix: Float[Tensor, "n k"], rounded: bool) -> Float[Tensor, "*tokens k"]:
    if not (rounded and x.is_cuda):
        return x @ matrix
    flat, k = x.reshape(-1, x.shape[-1]), matrix.shape[1]
    return rounded_product(padded(flat, rows=1), padded(matrix))[:, :k].unflatten(0, x.shape[:-1])


def _widest(*tensors: Tensor) -> torch.dtype:
    return reduce(torch.promote_types, [x.dtype for x in tensors], torch.float32)
