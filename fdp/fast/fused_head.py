"""Fuse a model's head with its loss: forward and backward together, full logits never stored.

    losses_b = sum_t weights_bt cross_entropy(features_bt W^T, targets_bt)  the block's ``LossHead`` says which is which

The backward runs in the forward, because nothing comes between the two. Pull-back and records are those of
``Block.apply``: W's per-sample gradients or the pair of logit gradients and features, as the plan chose, and the
records of the features' own parameters.

    >>> losses, pull = fused_vjp(runner, block, weights, carry, data, uses, plan, gradient)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fdp import tree
from fdp.fast.chunked_head import fused_head_pair, fused_head_plain, fused_head_rounded, fused_head_stored
from fdp.gradients.costs import NormBy, SumBy
from fdp.gradients.eight_bits import Rounded
from fdp.gradients.execution import Pull, Runner
from fdp.gradients.plan import Plan
from fdp.gradients.rules import Dense, Pair
from fdp.gradients.tape import Use
from fdp.model import Block
from fdp.types import Flat, Path, Tree


def can_fuse(block: Block, plan: Plan) -> bool:
    """Return True if W is trained, used nowhere else in the block, and what the sum needs of it is stored."""
    if block.head is None:
        return False
    path = block.params[block.head.weight]
    once = tree.leaves(block.params).count(path) == 1
    stored = not plan.private or (path in plan.choices and plan.choices[path].sum in (SumBy.REUSE, SumBy.PAIR))
    vmapped = plan.private and path in plan.choices and plan.choices[path].norm is NormBy.VMAP
    return once and stored and not vmapped and path in plan.trainable


def fused_vjp(
    runner: Runner,
    block: Block,
    weights: Flat,
    carry: Tree,
    data: Tree,
    uses: tuple[Use, ...],
    plan: Plan,
    gradient: Tensor | None,
) -> tuple[Tensor, Pull]:
    """Return the losses and their pull-back for a known ``gradient`` of the losses (None: all ones).

    Private training needs all ones: a sample's gradient is that of its own loss.
    """
    head = block.head
    assert head is not None
    path = block.params[head.weight]
    before = Block(
        f"{block.name}.features", _without(block.params, head.weight), head.features, compiled=block.compiled
    )
    counts = None if head.weights is None else head.weights(data)
    rest = {name: leaf for name, leaf in weights.items() if name != path}
    if plan.private:
        assert gradient is None
        own = tuple(use for use in uses if use.path != path)
        features, pull = runner.tapped_vjp(before, rest, carry, data, own, plan.trainable)
        w, targets = weights[path], head.targets(data)
        if plan.choices[path].norm is NormBy.KEEP:
            losses, of_features, per_sample = fused_head_stored(features, w, targets, counts)
            found: dict[Path, Any] = {path: [Dense(per_sample)]}
        elif plan.choices[path].norm is NormBy.KEEP_INT8:
            losses, of_features, integers, powers, squares = fused_head_rounded(features, w, targets, counts)
            found = {path: [Rounded(integers, powers, squares, tuple(w.shape))]}
        else:
            losses, of_features, of_logits = fused_head_pair(features, w, targets, counts)
            found = {path: [Pair(of_logits.unsqueeze(1), features.unsqueeze(1), tuple(w.shape))]}
    else:
        features, pull = runner.plain_vjp(before, rest, carry, data, plan.trainable)
        start = gradient if gradient is not None else features.new_ones(len(features))
        losses, of_features, total = fused_head_plain(features, weights[path], head.targets(data), start, counts)
        found = {path: total}

    def pull_all(_: Tree) -> tuple[Tree, dict[Path, Any]]:
        carry_gradient, more = pull(of_features)
        return carry_gradient, found | more

    return losses, pull_all


def _without(params: dict[str, Path], name: str) -> dict[str, Path]:
    return {key: path for key, path in params.items() if key != name}
