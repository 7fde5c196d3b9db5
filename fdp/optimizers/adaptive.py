"""Adagrad, Adadelta and Adamax: gradients divided by a running measure of their size.

    Adagrad    s_t = s_{t-1} + g_t^2                         u_t = g_t / (sqrt(s_t) + eps)
    Adadelta   v_t = rho v_{t-1} + (1 - rho) g_t^2           u_t = sqrt(d_{t-1} + eps) / sqrt(v_t + eps) g_t
               d_t = rho d_{t-1} + (1 - rho) u_t^2
    Adamax     m_t = b1 m_{t-1} + (1 - b1) g_t               u_t = m_t / ((1 - b1^t) n_t)
               n_t = max(b2 n_{t-1}, |g_t| + eps)

Duchi et al. 2011 (JMLR 12); Zeiler, arXiv 1212.5701; Kingma & Ba, arXiv 1412.6980, section 7.1. Each is equal to its
namesake in ``torch.optim``, whose weight decay is L2 regularisation. All three are elementwise, and so exact on shards.

    >>> optimizer = adagrad(1e-2)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(grads, state, params)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fdp import tree
from fdp.optimizers import checks
from fdp.optimizers.adam import unbias
from fdp.optimizers.base import Optimizer, cast, chain, pointwise, zero_step
from fdp.optimizers.schedules import Schedule, as_schedule
from fdp.optimizers.transforms import add_decayed_weights, scale_by_learning_rate
from fdp.types import Tree


class AdagradState(NamedTuple):
    """The sum of squared gradients so far."""

    total: Tree


class AdadeltaState(NamedTuple):
    """The running means of squared gradients and squared updates."""

    square: Tree
    delta: Tree


class AdamaxState(NamedTuple):
    """The number of updates so far, the running mean of gradients, and their decayed largest size."""

    step: Int[Tensor, ""]
    mean: Tree
    largest: Tree


def scale_by_adagrad(*, initial_accumulator_value: float = 0.0, eps: float = 1e-10) -> Optimizer:
    """``u_t = g_t / (sqrt(s_t) + eps)``; ``s_0 = initial_accumulator_value``."""
    checks.nonnegative("initial_accumulator_value", initial_accumulator_value)
    checks.nonnegative("eps", eps)

    def init(params: Tree) -> AdagradState:
        return AdagradState(tree.map(lambda p: torch.full_like(p, initial_accumulator_value), params))

    def update(grads: Tree, state: AdagradState, params: Tree) -> tuple[Tree, AdagradState]:
        total = tree.map(lambda s, g: torch.addcmul(s, g, g), state.total, grads)
        return tree.map(lambda g, s: g / s.sqrt().add_(eps), grads, total), AdagradState(total)

    return pointwise(init, update)


def scale_by_adadelta(*, rho: float = 0.9, eps: float = 1e-6) -> Optimizer:
    """``u_t = sqrt(d_{t-1} + eps) / sqrt(v_t + eps) g_t``."""
    checks.decay_rate("rho", rho)
    checks.nonnegative("eps", eps)

    def init(params: Tree) -> AdadeltaState:
        return AdadeltaState(tree.map(torch.zeros_like, params), tree.map(torch.zeros_like, params))

    def update(grads: Tree, state: AdadeltaState, params: Tree) -> tuple[Tree, AdadeltaState]:
        square = tree.map(lambda v, g: torch.lerp(v, g.square(), 1 - rho), state.square, grads)

        def scaled(g: Tensor, v: Tensor, d: Tensor) -> Tensor:
            return (d + eps).sqrt_().div_((v + eps).sqrt_()).mul_(g)

        updates = tree.map(scaled, grads, square, state.delta)
        delta = tree.map(lambda d, u: torch.lerp(d, u.square(), 1 - rho), state.delta, updates)
        return updates, AdadeltaState(square, delta)

    return pointwise(init, update)


def scale_by_adamax(*, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """``u_t = m_t / ((1 - b1^t) n_t)``."""
    checks.decay_rate("b1", b1)
    checks.decay_rate("b2", b2)
    checks.nonnegative("eps", eps)

    def init(params: Tree) -> AdamaxState:
        return AdamaxState(zero_step(params), tree.map(torch.zeros_like, params), tree.map(torch.zeros_like, params))

    def update(grads: Tree, state: AdamaxState, params: Tree) -> tuple[Tree, AdamaxState]:
        step = state.step + 1
        mean = tree.map(lambda m, g: torch.lerp(m, g, 1 - b1), state.mean, grads)
        largest = tree.map(lambda n, g: torch.maximum(n * b2, g.abs() + eps), state.largest, grads)
        factor = unbias(b1, step)
        updates = tree.map(lambda m, n: cast((m * factor).div_(n), m.dtype), mean, largest)
        return updates, AdamaxState(step, mean, largest)

    return pointwise(init, update)


def adagrad(
    learning_rate: float | Schedule,
    *,
    lr_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
) -> Optimizer:
    """``torch.optim.Adagrad``: the rate of update t, from 0, is ``learning_rate / (1 + t lr_decay)``."""
    checks.nonnegative("lr_decay", lr_decay)
    rate = as_schedule(learning_rate)
    return chain(
        *_l2(weight_decay),
        scale_by_adagrad(initial_accumulator_value=initial_accumulator_value, eps=eps),
        scale_by_learning_rate((lambda step: rate(step) / (1 + step.double() * lr_decay)) if lr_decay else rate),
    )


def adadelta(
    learning_rate: float | Schedule = 1.0, *, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0
) -> Optimizer:
    """``torch.optim.Adadelta``."""
    return chain(*_l2(weight_decay), scale_by_adadelta(rho=rho, eps=eps), scale_by_learning_rate(learning_rate))


def adamax(
    learning_rate: float | Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """``torch.optim.Adamax``."""
    return chain(*_l2(weight_decay), scale_by_adamax(b1=b1, b2=b2, eps=eps), scale_by_learning_rate(learning_rate))


def _l2(weight_decay: float) -> list[Optimizer]:
    checks.nonnegative("weight_decay", weight_decay)
    return [add_decayed_weights(weight_decay)] if weight_decay else []
