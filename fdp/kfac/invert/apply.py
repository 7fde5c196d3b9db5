"""A preconditioner times a gradient: products only, nothing is decided, so it runs inside a compiled step.

Sides     G -> L G R
Product   G -> Q_L ((Q_L^T G Q_R) * scale) Q_R^T

>>> update = precondition(preconditioner, gradient)                    # (rows, columns)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.linear_maps import Sides, apply_left, apply_right, multiply, widest
from fdp.kfac.types import Preconditioner, Product


def precondition(
    preconditioner: Preconditioner, gradient: Float[Tensor, "rows columns"], *, rounded: bool = False
) -> Float[Tensor, "rows columns"]:
    """``F^-1 G``, or the power of F that was asked for. ``rounded``: G was computed in half precision."""
    match preconditioner:
        case Sides(left, right):
            done = gradient.to(widest(gradient))
            done = done if left is None else apply_left(left, done, rounded=rounded)
            return (done if right is None else apply_right(right, done, rounded=rounded)).to(gradient.dtype)
        case Product():
            left, right, scale, g = (x.to(widest(gradient, *preconditioner)) for x in (*preconditioner, gradient))
            inside = multiply(multiply(left.mT, g, rounded), right, rounded) * scale
            return multiply(multiply(left, inside, rounded), right.mT, rounded).to(gradient.dtype)


def trust_dot(
    gradient: Float[Tensor, "rows columns"], update: Float[Tensor, "rows columns"], *, root: bool
) -> Float[Tensor, ""]:
    """A layer's part of ``g^T F^-1 g``; a ``root`` meets gradients that one root has been applied to: |F^-1/2 g|^2."""
    return (gradient * (gradient if root else update)).sum(dtype=torch.float64)
