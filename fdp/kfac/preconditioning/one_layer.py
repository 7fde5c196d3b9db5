"""The product of a preconditioner and the full gradient of one layer: matrix products only, so it compiles in a step.

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
    """Return ``F^-1 G``, or ``F^-1/2 G`` for a root. ``rounded``: G was computed in half precision."""
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
    """Return the layer's part of ``g^T F^-1 g``.

    With ``root``, one root has already been applied to the gradient, and the result is ``|F^-1/2 g|^2``.
    """
    return (gradient * (gradient if root else update)).sum(dtype=torch.float64)
