"""The values of K-FAC: what is known of one leaf's curvature, and what is applied to its gradient.

A leaf's gradient is a sum of outer products, ``G = left^T right`` (``fdp.gradients.rules.Pair``: left has the leaf's
rows, right its columns; of a linear layer left is the output gradient and right the input, a column of ones for its
bias last). K-FAC takes its curvature to be the product of one second moment per side (Martens and Grosse 2015, arXiv
1503.05671):

    F = L (x) R,    L = E[left^T left],    R = E[right^T right],    F^-1 G = L^-1 G R^-1

A second moment is kept as a sum and the weight it is divided by, never as a mean: sums of parts add up to the sum of
the whole, whatever the sizes of the parts. Which form it has is a question of cost; all stand for one matrix.

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
    """``M = columns columns^T / weight``: low rank while there are fewer columns than rows; M is never formed."""

    columns: Float[Tensor, "n k"]
    weight: Float[Tensor, ""]


class DiagonalFactor(NamedTuple):
    """``M = diag(total / weight)``."""

    total: Float[Tensor, " n"]
    weight: Float[Tensor, ""]


class SoftmaxFactor(NamedTuple):
    """``M = (diag(total) - columns columns^T) / weight``: the output side of a softmax head; M is never formed."""

    total: Float[Tensor, " n"]
    columns: Float[Tensor, "n k"]
    weight: Float[Tensor, ""]


class GroupedFactor(NamedTuple):
    """``M_g = diag(total_g / weight)`` of every group of a convolution, or expert: a product of its own with M_g."""

    total: Float[Tensor, "groups n"]
    weight: Float[Tensor, ""]


Factor: TypeAlias = DenseFactor | ColumnsFactor | DiagonalFactor | SoftmaxFactor | GroupedFactor


class Curvature(NamedTuple):
    """``F = left (x) right`` of a layer; None is the identity."""

    left: Factor | None
    right: Factor | None


class Layer(NamedTuple):
    """What is preconditioned together: a leaf, and the bias added to its output, as its last column; None: no such."""

    weight: Path
    bias: Path | None


class Product(NamedTuple):
    """``G -> left ((left^T G right) * scale) right^T``: in the eigenvectors of both sides, damped as one product."""

    left: Float[Tensor, "rows rows"]
    right: Float[Tensor, "columns columns"]
    scale: Float[Tensor, "rows columns"]


Preconditioner: TypeAlias = Sides | Product
