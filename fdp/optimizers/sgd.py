"""Stochastic gradient descent with momentum.

    g_t = grad + lambda p        m_t = mu m_{t-1} + g_t
    p  <- p - lr m_t             (Nesterov: p <- p - lr (g_t + mu m_t))

Polyak (1964), Sutskever et al. (2013), and equal to ``torch.optim.SGD`` with dampening 0.

    >>> optimizer = sgd(0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(grads, state, params)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fdp import tree
from fdp.optimizers import checks
from fdp.optimizers.base import Optimizer, chain, pointwise
from fdp.optimizers.schedules import Schedule
from fdp.optimizers.transforms import add_decayed_weights, scale_by_learning_rate
from fdp.types import FdpError, Tree


class TraceState(NamedTuple):
    """The running sum of gradients, one leaf per parameter."""

    momentum: Tree


def trace(momentum: float, *, nesterov: bool = False) -> Optimizer:
    """``u_t = m_t = momentum m_{t-1} + g_t``; with ``nesterov``, ``u_t = g_t + momentum m_t``."""
    checks.decay_rate("momentum", momentum)

    def update(grads: Tree, state: TraceState, params: Tree) -> tuple[Tree, TraceState]:
        summed = tree.map(lambda g, m: torch.add(g, m, alpha=momentum), grads, state.momentum)
        ahead = tree.map(lambda g, m: torch.add(g, m, alpha=momentum), grads, summed) if nesterov else summed
        return ahead, TraceState(summed)

    return pointwise(lambda params: TraceState(tree.map(torch.zeros_like, params)), update)


def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Return gradient descent, with optional momentum, Nesterov look-ahead and L2 regularisation."""
    checks.decay_rate("momentum", momentum)
    checks.nonnegative("weight_decay", weight_decay)
    if nesterov and momentum == 0:
        raise FdpError("nesterov: expected momentum > 0 with it, got momentum 0; give momentum or leave nesterov out")
    parts = [add_decayed_weights(weight_decay)] if weight_decay else []
    parts += [trace(momentum, nesterov=nesterov)] if momentum else []
    return chain(*parts, scale_by_learning_rate(learning_rate))
