"""AdamW whose two moments are stored in bfloat16: 4 bytes of optimizer state per parameter instead of 8.

    m, v <- round_at_random(AdamW's new moments)            the update itself uses them before they are rounded

Rounded to the nearest bfloat16, a second moment with ``1 - b2 = 1e-3`` would stand still: a change below 2^-9 of a
number is rounded away. Rounded up or down at random (``fdp_kernels.stochastic_rounding``), it moves on average. The
moments are computed from noised sums, so none of this bears on privacy.

    >>> optimizer = narrow_moments(adamw(1e-4))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from fdp_kernels.stochastic_rounding import random_bits_reference, round_reference
from torch import Tensor

from fdp import tree
from fdp.optimizers.adam import AdamState
from fdp.optimizers.base import Optimizer
from fdp.optimizers.leaf_reductions import LOCAL, Reductions
from fdp.types import FdpError, Tree


def narrow_moments(optimizer: Optimizer) -> Optimizer:
    """Return ``adam`` or ``adamw`` with moments in bfloat16; any other optimizer is refused.

    Guarantees:
      - the moments are never held in float32 for more than one leaf set at a time, and not at all by a fused update;
      - a moment's expectation, over the rounding, is that of the optimizer in float32 from the same stored moments.
    """
    known = optimizer.adamw
    if known is None or optimizer.rule is not known:
        raise FdpError("narrow_moments: expected adam or adamw as it is, got another optimizer, or one with a wrapper")

    def init(params: Tree, reductions: Reductions = LOCAL) -> Tree:
        here = tree.leaves(params)[0].device
        shapes = optimizer.init(tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params), reductions)
        return tuple(_zeros(part, here) for part in shapes)

    def update(grads: Tree, state: Tree, params: Tree, reductions: Reductions = LOCAL) -> tuple[Tree, Tree]:
        wide = tuple(_map_moments(part, lambda leaf: leaf.float()) for part in state)
        updates, after = optimizer.update(grads, wide, params, reductions)
        return updates, tuple(_round(part) for part in after)

    return optimizer._replace(init=init, update=update, adamw=known._replace(update=update))


def _zeros(shapes: Tree, device: torch.device) -> Tree:
    """Return the first state of one part of the chain: all zeros, moments in bfloat16."""

    def zeros(leaf: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(leaf.shape, dtype=dtype, device=device)

    if not isinstance(shapes, AdamState):
        return tree.map(lambda leaf: zeros(leaf, leaf.dtype), shapes)
    narrow = partial(tree.map, lambda leaf: zeros(leaf, torch.bfloat16))
    return AdamState(zeros(shapes.step, shapes.step.dtype), narrow(shapes.mean), narrow(shapes.square))


def _map_moments(part: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    if not isinstance(part, AdamState):
        return part
    return AdamState(part.step, tree.map(change, part.mean), tree.map(change, part.square))


def _round(part: Tree) -> Tree:
    if not isinstance(part, AdamState):
        return part
    before = part.step - 1

    def round_leaf(leaf: Tensor, which: int) -> Tensor:
        return round_reference(leaf, random_bits_reference(leaf.numel(), 0, before)[which].view(leaf.shape))

    mean = tree.map(lambda leaf: round_leaf(leaf, 0), part.mean)
    return AdamState(part.step, mean, tree.map(lambda leaf: round_leaf(leaf, 1), part.square))
