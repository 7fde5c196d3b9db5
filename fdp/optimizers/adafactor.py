"""Adafactor: Adam's scaling with the second moment stored as one row and one column per matrix.

    b_t = 1 - t^beta2_decay
    R_t = b_t R_{t-1} + (1 - b_t) mean(g^2, dim=-1)          C_t = b_t C_{t-1} + (1 - b_t) mean(g^2, dim=-2)
    u   = g / sqrt(max(R C / mean(R), eps1^2))               u  <- u / max(1, RMS(u) / clip_threshold)
    w  <- w - lr weight_decay w - max(eps2, RMS(w)) min(lr, 1 / sqrt(t)) u

Shazeer & Stern, arXiv 1804.04235, equal to ``torch.optim.Adafactor``. An n by m matrix has n + m numbers of state
instead of nm; a vector has its full second moment; leading dims are batches of matrices.

    >>> optimizer = adafactor(1e-2)
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
from fdp.optimizers.base import Optimizer, chain, once, stateless, zero_step
from fdp.optimizers.leaf_reductions import LOCAL, Reductions
from fdp.optimizers.schedules import Schedule, as_schedule
from fdp.optimizers.transforms import add_decayed_weights, scale_by_learning_rate, times
from fdp.types import FdpError, Tree


class FactoredState(NamedTuple):
    """The number of updates so far; means of the squared gradient, ``(..., n, 1)`` and ``(..., 1, m)``.

    For a leaf with fewer than two dims ``rows`` is the full second moment and ``cols`` is empty.
    """

    step: Int[Tensor, ""]
    rows: Tree
    cols: Tree


def scale_by_factored_rms(*, beta2_decay: float = -0.8, eps1: float | None = None) -> Optimizer:
    """``u = g / sqrt(max(R C / mean(R), eps1^2))``; ``eps1`` defaults to the machine epsilon."""
    if not beta2_decay <= 0:
        raise FdpError(f"beta2_decay: expected an exponent <= 0, got {beta2_decay}")
    if eps1 is not None:
        checks.nonnegative("eps1", eps1)

    def init(params: Tree, reductions: Reductions = LOCAL) -> FactoredState:
        # A mean over ranks has the shape of the mean over the local shard, so zeros need no reductions.
        rows = tree.map(lambda p: p.new_zeros((*p.shape[:-1], 1) if p.ndim > 1 else p.shape), params)
        cols = tree.map(lambda p: p.new_zeros((*p.shape[:-2], 1, p.shape[-1]) if p.ndim > 1 else 0), params)
        return FactoredState(zero_step(params), rows, cols)

    def update(
        grads: Tree, state: FactoredState, params: Tree, reductions: Reductions = LOCAL
    ) -> tuple[Tree, FactoredState]:
        step = state.step + 1
        new_weight = once(step.double() ** beta2_decay)

        def averaged(old: Tensor, new: Tensor) -> Tensor:
            return old + times(new - old, new_weight) if old.numel() else old

        rows = tree.map(averaged, state.rows, reductions.mean_of_squares(grads, -1))
        cols = tree.map(averaged, state.cols, reductions.mean_of_squares(grads, -2))

        def scaled(g: Tensor, row: Tensor, col: Tensor, row_mean: Tensor) -> Tensor:
            floor = torch.finfo(g.dtype).eps if eps1 is None else eps1
            variance = row * col / row_mean.clamp(min=floor) if g.ndim > 1 else row
            return g * variance.clamp(min=floor**2).rsqrt_()

        return tree.map(scaled, grads, rows, cols, reductions.mean(rows, -2)), FactoredState(step, rows, cols)

    return Optimizer(init, update)


def clip_by_rms(threshold: float) -> Optimizer:
    """``u = g / max(1, RMS(g) / threshold)`` per leaf."""
    checks.positive("threshold", threshold)

    def update(grads: Tree, params: Tree, reductions: Reductions) -> Tree:
        rms = _rms(grads, reductions)
        return tree.map(lambda g, r: times(g, once(1 / (r / threshold).clamp(min=1))), grads, rms)

    return stateless(update)


def scale_by_param_rms(*, floor: float = 1e-3) -> Optimizer:
    """``u = max(floor, RMS(p)) g`` per leaf."""
    checks.nonnegative("floor", floor)

    def update(grads: Tree, params: Tree, reductions: Reductions) -> Tree:
        return tree.map(lambda g, r: times(g, once(r.clamp(min=floor))), grads, _rms(params, reductions))

    return stateless(update)


def adafactor(
    learning_rate: float | Schedule,
    *,
    beta2_decay: float = -0.8,
    eps1: float | None = None,
    eps2: float = 1e-3,
    clip_threshold: float = 1.0,
    weight_decay: float = 0.0,
) -> Optimizer:
    """``torch.optim.Adafactor``; ``clip_threshold`` is its ``d``, the learning rate a cap on the step."""
    checks.nonnegative("weight_decay", weight_decay)
    rate = as_schedule(learning_rate)
    return chain(
        scale_by_factored_rms(beta2_decay=beta2_decay, eps1=eps1),
        clip_by_rms(clip_threshold),
        scale_by_param_rms(floor=eps2),
        scale_by_learning_rate(lambda step: torch.minimum(rate(step), (step + 1).double().rsqrt())),
        # After the minus sign, and proportional to the rate itself, not to the relative step.
        add_decayed_weights(lambda step: -weight_decay * rate(step)),
    )


def _rms(values: Tree, reductions: Reductions) -> Tree:
    squares, sizes = reductions.sum_of_squares(values), reductions.size(values)
    return tree.map(lambda square, size: (square / size).sqrt(), squares, sizes)
