"""The values of K-FAC: layers, Kronecker factors and preconditioners.

A leaf's gradient is a sum of outer products, ``G = left^T right`` (``fdp.gradients.rules.Pair``), where left has the
leaf's rows and right its columns. In a linear layer left is the output gradient and right the input, followed by a
column of ones for the bias. K-FAC approximates the curvature by the product of one second moment per side (Martens and
Grosse 2015, arXiv 1503.05671):

    F = L (x) R,    L = E[left^T left],    R = E[right^T right],    F^-1 G = L^-1 G R^-1

A second moment is stored as a sum and the weight that divides it, never as a mean, because sums of parts add up to the
sum of the whole whatever the sizes of the parts. All forms represent the same matrix, at different costs.

    >>> factor = DenseFactor(x.T @ x, torch.tensor(float(len(x))))            # M = total / weight
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from jaxtyping import Float
from torch import Tensor

from fdp.gradients.linear_maps import Sides
from fdp.types import Path


class DenseFactor(NamedTuple):
    """``M = total / weight``."""

    total: Float[Tensor, "n n"]
    weight: Float[Tensor, ""]


class ColumnsFactor(NamedTuple):
    """``M = columns columns^T / weight``, of low rank if there are fewer columns than rows; M is never formed."""

    columns: Float[Tensor, "n k"]
    weight: Float[Tensor, ""]


class DiagonalFactor(NamedTuple):
    """``M = diag(total / weight)``."""

    total: Float[Tensor, " n"]
    weight: Float[Tensor, ""]


class SoftmaxFactor(NamedTuple):
    """``M = (diag(total) - columns columns^T) / weight``, the output side of a softmax head; M is never formed."""

    total: Float[Tensor, " n"]
    columns: Float[Tensor, "n k"]
    weight: Float[Tensor, ""]


class GroupedFactor(NamedTuple):
    """``M_g = diag(total_g / weight)`` for every group g of a convolution, or every expert."""

    total: Float[Tensor, "groups n"]
    weight: Float[Tensor, ""]


Factor: TypeAlias = DenseFactor | ColumnsFactor | DiagonalFactor | SoftmaxFactor | GroupedFactor


class Curvature(NamedTuple):
    """``F = left (x) right`` of a layer; a side of None is the identity."""

    left: Factor | None
    right: Factor | None


class Layer(NamedTuple):
    """A weight and the bias that is added to its output, preconditioned together as the weight's last column."""

    weight: Path
    bias: Path | None


class Product(NamedTuple):
    """``G -> left ((left^T G right) * scale) right^T``, in the eigenvectors of both sides, damped as one product."""

    left: Float[Tensor, "rows rows"]
    right: Float[Tensor, "columns columns"]
    scale: Float[Tensor, "rows columns"]


Preconditioner: TypeAlias = Sides | Product
