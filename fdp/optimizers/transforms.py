"""Small gradient transformations, to be chained.

    scale:  c g        weight decay:  g + lambda p        global clip:  g min(1, C / ||g||)        value:  clamp(g)

A transformation is an :class:`Optimizer` whose updates go to the next one. The updates of the last are *added* to the
parameters: ``scale_by_learning_rate`` holds the minus sign.

    >>> l2 = chain(add_decayed_weights(1e-4), trace(0.9), scale_by_learning_rate(0.1))
    >>> no_bias = add_decayed_weights(0.01, mask=lambda params: tree.map(lambda p: p.ndim > 1, params))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import tree
from fdp.optimizers import checks
from fdp.optimizers.base import Optimizer, cast, once, pointwise, stateless, zero_step
from fdp.optimizers.foreach import each, in_groups
from fdp.optimizers.leaf_reductions import Reductions
from fdp.optimizers.schedules import Schedule
from fdp.types import Tree


class ScheduleState(NamedTuple):
    """The number of updates so far."""

    step: Int[Tensor, ""]


def scale(factor: float) -> Optimizer:
    """``u = factor g``."""
    return stateless(lambda grads, params, _: in_groups(lambda g: each("mul", g, factor), grads))


def scale_by_schedule(schedule: Schedule) -> Optimizer:
    """``u_t = schedule(t) g_t``."""

    def update(grads: Tree, state: ScheduleState, params: Tree) -> tuple[Tree, ScheduleState]:
        factor = once(schedule(state.step))
        return tree.map(lambda g: times(g, factor), grads), ScheduleState(state.step + 1)

    return pointwise(lambda params: ScheduleState(zero_step(params)), update)


def scale_by_learning_rate(learning_rate: float | Schedule) -> Optimizer:
    """``u_t = -lr(t) g_t``: the last of a chain, with the minus sign of descent."""
    if callable(learning_rate):
        return scale_by_schedule(lambda step: -learning_rate(step))
    checks.nonnegative("learning_rate", learning_rate)
    return scale(-learning_rate)


def add_decayed_weights(weight_decay: float | Schedule, *, mask: Callable[[Tree], Tree] | None = None) -> Optimizer:
    """``u = g + weight_decay p``.

    Before the moments it is L2 regularisation; after them, decoupled weight decay (Loshchilov & Hutter, arXiv
    1711.05101). ``mask(params)`` is a tree of booleans: leaves with False are not decayed.
    """

    def where_masked(fn: Callable[[list[Tensor], list[Tensor]], list[Tensor]], grads: Tree, params: Tree) -> Tree:
        if mask is None:
            return in_groups(fn, grads, params)
        return tree.map(lambda g, p, keep: fn([g], [p])[0] if keep else g, grads, params, mask(params))

    if not callable(weight_decay):
        checks.nonnegative("weight_decay", weight_decay)
        add = partial(where_masked, lambda g, p: each("add", g, p, alpha=weight_decay))
        return stateless(lambda grads, params, _: add(grads, params))

    def update(grads: Tree, state: ScheduleState, params: Tree) -> tuple[Tree, ScheduleState]:
        strength = once(weight_decay(state.step))
        decayed = where_masked(lambda g, p: each("add", g, [times(one, strength) for one in p]), grads, params)
        return decayed, ScheduleState(state.step + 1)

    return pointwise(lambda params: ScheduleState(zero_step(params)), update)


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """``u = g min(1, max_norm / ||g||)``, the norm over all leaves.

    For training without privacy: it clips the *mean* gradient, which does not bound the influence of a sample.
    """
    checks.positive("max_norm", max_norm)

    def update(grads: Tree, params: Tree, reductions: Reductions) -> Tree:
        norm = torch.stack(tree.leaves(reductions.sum_of_squares(grads))).sum().sqrt()
        factor = once((max_norm / norm).clamp(max=1))
        return tree.map(lambda g: times(g, factor), grads)

    return stateless(update)


def clip_by_value(limit: float) -> Optimizer:
    """``u = max(-limit, min(limit, g))``, element by element: ``torch.nn.utils.clip_grad_value_`` of the mean gradient.

    It does not bound the influence of a sample; on a noised mean it is post-processing.
    """
    checks.positive("limit", limit)
    return stateless(lambda grads, params, _: tree.map(lambda g: g.clamp(-limit, limit), grads))


def times(leaf: Float[Tensor, " *shape"], factor: Float[Tensor, ""]) -> Float[Tensor, " *shape"]:
    """Return ``factor leaf`` in the leaf's dtype, also for a 0-d leaf, which a float64 factor would promote."""
    return cast(leaf * factor, leaf.dtype)


def times_all(leaves: Sequence[Tensor], factor: Float[Tensor, ""]) -> list[Tensor]:
    """Apply :func:`times` to many leaves, in few kernels if they have one dtype."""
    if not leaves:
        return []
    products = torch._foreach_mul(list(leaves), factor.to(leaves[0].dtype))
    return [cast(product, leaf.dtype) for product, leaf in zip(products, leaves)]
