"""LAMB: Adam's direction, with the step of every layer proportional to the norm of its weights.

    r = m^ / (sqrt(v^) + eps) + lambda w            w <- w - lr (||w|| / ||r||) r

You et al., arXiv 1904.00962 (Algorithm 2, phi the identity). A leaf is a layer; if ``||w||`` or ``||r||`` is 0, the
ratio is 1.

    >>> optimizer = lamb(2e-3, weight_decay=0.01)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(grads, state, params)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fdp import tree
from fdp.optimizers.adam import scale_by_adam
from fdp.optimizers.base import Optimizer, chain, once, stateless
from fdp.optimizers.leaf_reductions import Reductions
from fdp.optimizers.schedules import Schedule
from fdp.optimizers.transforms import add_decayed_weights, scale_by_learning_rate, times
from fdp.types import Tree


def scale_by_trust_ratio() -> Optimizer:
    """``u = (||p|| / ||g||) g`` per leaf; ``u = g`` if either norm is 0."""

    def scaled(g: Tensor, p_square: Tensor, g_square: Tensor) -> Tensor:
        ratio = p_square.sqrt() / g_square.sqrt()
        ratio = torch.where((p_square > 0) & (g_square > 0), ratio, torch.ones_like(ratio))
        return times(g, once(ratio))

    def update(grads: Tree, params: Tree, reductions: Reductions) -> Tree:
        squares = reductions.sum_of_squares
        return tree.map(scaled, grads, squares(params), squares(grads))

    return stateless(update)


def lamb(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    mask: Callable[[Tree], Tree] | None = None,
) -> Optimizer:
    """Return LAMB with weight decay of the masked leaves."""
    return chain(
        scale_by_adam(b1=b1, b2=b2, eps=eps),
        add_decayed_weights(weight_decay, mask=mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )
