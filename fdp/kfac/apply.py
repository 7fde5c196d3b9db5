"""A preconditioner times a gradient: products only, nothing is decided, so it runs inside a compiled step.

    Sides     G -> L G R
    Product   G -> Q_L ((Q_L^T G Q_R) * scale) Q_R^T

What is stored in half precision is widened to float32 first; results have the dtype of what came in.

    >>> update = precondition(preconditioner, gradient)                    # (rows, columns)
    >>> y = apply_map(preconditioner.left, y)                              # (n, k)
    >>> x = apply_rows(preconditioner.right, x)                            # (..., n): every token's input
"""

from __future__ import annotations

from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.kfac.types import Map, MatrixMap, Preconditioner, Product, Sides


def precondition(
    preconditioner: Preconditioner, gradient: Float[Tensor, "rows columns"]
) -> Float[Tensor, "rows columns"]:
    """``F^-1 G``, or the power of F that was asked for."""
    match preconditioner:
        case Sides(left, right):
            done = gradient.to(_widest(gradient))
            done = done if left is None else apply_map(left, done)
            return (done if right is None else apply_rows(right, done)).to(gradient.dtype)
        case Product():
            left, right, scale, g = (x.to(_widest(gradient, *preconditioner)) for x in (*preconditioner, gradient))
            return (left @ ((left.mT @ g @ right) * scale) @ right.mT).to(gradient.dtype)


def apply_map(map: Map, y: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """``map y``."""
    return apply_rows(map, y.mT).mT


def apply_rows(map: Map, rows: Float[Tensor, "*tokens n"]) -> Float[Tensor, "*tokens n"]:
    """``rows map``: the map of every row, as it is symmetric."""
    x, *parts = (part.to(_widest(rows, *map)) for part in (rows, *map))
    if isinstance(map, MatrixMap):
        return (x @ parts[0]).to(rows.dtype)
    diagonal, columns, core = parts
    low = ((x @ columns) @ core) @ columns.mT if columns.shape[1] else 0.0
    return (x * diagonal + low).to(rows.dtype)


def _widest(*tensors: Tensor) -> torch.dtype:
    return reduce(torch.promote_types, [x.dtype for x in tensors], torch.float32)
