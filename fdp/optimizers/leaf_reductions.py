"""The interface for reductions over a full parameter that some optimizers need, and its version for full leaves.

    sum_of_squares(w) = ||w||^2      size(w) = number of elements      mean(w, dim), mean_of_squares(w, dim)

Everything else in an optimizer is element by element, and so exact on a shard. These four are not: if a tree holds
shards, give ``update`` the ``Reductions`` of ``fdp.parallel.sharded_norms``, which sum over ranks. Each maps a whole
tree, so that the sharded version can pack all leaves into one collective.

    >>> optimizer.update(grads, state, params)                                    # full leaves: LOCAL
    >>> optimizer.update(grads, state, params, sharded_reductions(sharding))      # shards
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.types import Tree


class Reductions(NamedTuple):
    """Reductions over full parameters, each from a tree to a tree of the same structure.

    ``sum_of_squares(tree)`` and ``size(tree)`` return a 0-d tensor and an int per leaf. ``mean(tree, dim)`` and
    ``mean_of_squares(tree, dim)`` reduce dim ``dim`` (-1 or -2, kept with size 1) of every leaf with two or more
    dims; they return other leaves unchanged, or squared.
    """

    sum_of_squares: Callable[[Tree], Tree]
    size: Callable[[Tree], Tree]
    mean: Callable[[Tree, int], Tree]
    mean_of_squares: Callable[[Tree, int], Tree]


def squared_norm(leaf: Float[Tensor, " *shape"]) -> Float[Tensor, ""]:
    """Return ``||leaf||^2`` in float64, so that shards can be summed before rounding."""
    return leaf.to(torch.float64).square().sum()


def _mean(values: Tree, dim: int) -> Tree:
    return tree.map(lambda v: v.mean(dim, keepdim=True) if v.ndim > 1 else v, values)


def _mean_of_squares(values: Tree, dim: int) -> Tree:
    return tree.map(lambda v: v.square().mean(dim, keepdim=True) if v.ndim > 1 else v.square(), values)


LOCAL = Reductions(
    sum_of_squares=lambda values: tree.map(lambda v: squared_norm(v).to(v.dtype), values),
    size=lambda values: tree.map(lambda v: v.numel(), values),
    mean=_mean,
    mean_of_squares=_mean_of_squares,
)
"""The reductions for trees whose leaves are full parameters."""
