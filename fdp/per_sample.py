"""The block loop: per-sample norms in one backward, and the clipped sum from what it left behind.

forward    carry_i = block_i(weights_i, carry_{i-1})                          weights gathered block by block
backward   (g_{i-1}, records_i) = pull_i(g_i)                                 taps: no weight gradient yet
norms      |G_b|^2 per leaf from its records                                  all uses of a tied leaf together
sum        sum_b c_b G_b per leaf, block by block                             from kept gradients or kept pairs, or
                                                                              by a second backward, as planned

>>> losses, norms, stash = per_sample_norms(model, params, data, plan=plan)
>>> total = clipped_sum(stash, clip_to(norms, max_norm=1.0))                  # ClippedSum(value, sensitivity)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fdp import tree
from fdp.methods import Choice, NormBy, Plan, SumBy
from fdp.model import Block, Model, check_losses
from fdp.rules import (
    Dense,
    Record,
    cross_term,
    gram_squared_norm,
    magnitude,
    per_sample_gradient,
    squared_norm,
    weighted_gradient,
    widened,
)
from fdp.taps import batch_size_of, tapped_vjp
from fdp.types import Clip, ClippedSum, FdpError, Flat, Norms, Path, Tree
from fdp.vjp import vjp


class Stash(NamedTuple):
    """What the norm pass keeps for the sum: records by leaf, and the input of every block for a second backward."""

    records: dict[Path, list[Record]]
    carries: tuple[Tree, ...]
    model: Model
    flat: Flat
    data: Tree
    plan: Plan


def per_sample_norms(
    model: Model, params: Tree, data: Tree, *, plan: Plan
) -> tuple[Float[Tensor, " batch"], Norms, Stash]:
    """Losses, squared gradient norms per sample and leaf, and what the clipped sum needs. One forward, one backward.

    Guarantees:
      - every trainable leaf is in the norms, all its uses together (cross terms included);
      - sums of squares are accumulated in float32 or better, whatever the compute dtype.
    """
    _check_shape(plan, data)
    flat = tree.flatten(params)
    pulls, carries = [], []
    carry: Tree = ()
    for block, uses in zip(model.blocks, plan.uses):
        carries.append(carry)
        carry, pull = _open(block, gather(block, flat, plan), carry, data, uses, plan)
        pulls.append(pull)
    losses = check_losses(model, carry, plan.batch_size)
    gradient: Tree = torch.ones_like(losses)
    waiting = _count_uses(model, plan)
    open_records: dict[Path, list[Record]] = {}
    kept: dict[Path, list[Record]] = {}
    squared: dict[Path, Tensor] = {}
    while pulls:
        gradient, records = pulls.pop()(gradient)
        for path, found in records.items():
            choice = plan.choices[path]
            open_records[path] = _merge(open_records.get(path, []) + found, choice)
            waiting[path] -= 1
            if waiting[path] == 0:
                done = open_records.pop(path)
                squared[path] = _squared(done, choice)
                if choice.sum is not SumBy.SECOND:
                    kept[path] = done
    norms = Norms({path: squared[path] for path in flat if path in plan.trainable})
    second = any(choice.sum is SumBy.SECOND for choice in plan.choices.values())
    stash = Stash(kept, tuple(carries) if second else (), model, flat, data, plan)
    return losses.to(_wide(losses.dtype)), norms, stash


def clipped_sum(stash: Stash, clip: Clip) -> ClippedSum:
    """``sum_b factor_b G_b`` per leaf, in float32.

    Guarantees:
      - every leaf in the norms is in the sum, scaled by its own factor;
      - a sample whose factor is 0 contributes exactly 0, even if its gradient is NaN or infinite.
    """
    total: Flat = {}
    for path, records in stash.records.items():
        total[path] = _weighted(records, clip.factors[path])
    if stash.carries:
        total |= _second_backward(stash, clip)
    if set(total) != set(clip.factors):
        raise FdpError(f"clipped_sum: leaves {sorted(set(total) ^ set(clip.factors))} are in the norms or the sum only")
    return ClippedSum({path: total[path] for path in clip.factors}, clip.sensitivity)


def plain_sum(
    model: Model, params: Tree, data: Tree, mask: Float[Tensor, " batch"], *, plan: Plan
) -> tuple[Float[Tensor, " batch"], Flat]:
    """Losses and ``sum_b mask_b G_b``: the same loop without privacy, one ordinary backward."""
    _check_shape(plan, data)
    flat = tree.flatten(params)
    pulls = []
    carry: Tree = ()
    for block in model.blocks:
        carry, pull = _plain_vjp(block, gather(block, flat, plan), carry, data, plan.trainable)
        pulls.append(pull)
    losses = check_losses(model, carry, plan.batch_size)
    gradient: Tree = torch.where(mask > 0, torch.ones_like(losses), torch.zeros_like(losses))
    total: Flat = {}
    while pulls:
        found, gradient = pulls.pop()(gradient)
        for path, leaf in found.items():
            leaf = leaf.to(_wide(leaf.dtype))
            total[path] = total[path] + leaf if path in total else leaf
    return losses.to(_wide(losses.dtype)), {path: total[path] for path in flat if path in plan.trainable}


def gather(block: Block, flat: Flat, plan: Plan) -> Flat:
    """A block's full weights in the compute dtype. On one device: a cast."""
    return {path: flat[path].to(plan.dtype) for path in dict.fromkeys(tree.leaves(block.params))}


def _open(block: Block, weights: Flat, carry: Tree, data: Tree, uses: Any, plan: Plan):
    if any(path in plan.choices and plan.choices[path].norm is NormBy.VMAP for path in weights):
        return _vmapped_vjp(block, weights, carry, data, plan.trainable)
    return tapped_vjp(block, weights, carry, data, uses, plan.trainable)


def _vmapped_vjp(block: Block, weights: Flat, carry: Tree, data: Tree, trainable: frozenset[Path]):
    """As ``tapped_vjp`` for any block at all: every sample's vector-Jacobian product by itself, under ``vmap``."""
    trained = {path: w for path, w in weights.items() if path in trainable}
    rest = {path: w for path, w in weights.items() if path not in trainable}

    def alone(trained: Flat, carry: Tree, data: Tree) -> Tree:
        one = tree.map(lambda leaf: leaf.unsqueeze(0), (carry, data))
        out = block.apply(tree.select(trained | rest, block.params), *one)
        return tree.map(lambda leaf: leaf.squeeze(0), out)

    def pull_one(carry: Tree, data: Tree, gradient: Tree) -> tuple[Tree, ...]:
        _, pull, _ = vjp(lambda w, c: (alone(w, c, data), ()), trained, carry)
        return pull(gradient)

    with torch.no_grad():
        out = block.apply(tree.select(weights, block.params), carry, data)

    def pull(gradient: Tree) -> tuple[Tree, dict[Path, list[Record]]]:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused CPU attention has no batching rule
            per_sample, carry_gradient = torch.func.vmap(pull_one)(carry, data, gradient)
        return carry_gradient, {path: [Dense(leaf)] for path, leaf in per_sample.items()}

    return out, pull


def _plain_vjp(block: Block, weights: Flat, carry: Tree, data: Tree, trainable: frozenset[Path]):
    trained = {path: w for path, w in weights.items() if path in trainable}
    rest = {path: w for path, w in weights.items() if path not in trainable}

    def run(trained: Flat, carry: Tree) -> tuple[Tree, tuple[()]]:
        return block.apply(tree.select(trained | rest, block.params), carry, data), ()

    out, pull, _ = vjp(run, trained, carry)
    return out, pull


def _second_backward(stash: Stash, clip: Clip) -> Flat:
    """Recompute each block's records from its input and weigh them at once; nothing is kept."""
    model, plan = stash.model, stash.plan
    total: Flat = {}
    gradient: Tree = None
    for block, uses, carry in reversed(list(zip(model.blocks, plan.uses, stash.carries))):
        out, pull = _open(block, gather(block, stash.flat, plan), carry, stash.data, uses, plan)
        gradient = torch.ones_like(out) if gradient is None else gradient
        gradient, records = pull(gradient)
        for path, found in records.items():
            if plan.choices[path].sum is SumBy.SECOND:
                part = _weighted(found, clip.factors[path])
                total[path] = total[path] + part if path in total else part
    return total


def _merge(records: list[Record], choice: Choice) -> list[Record]:
    """Records of one leaf so far: one running per-sample gradient if that is what is kept, else the pairs."""
    if choice.norm not in (NormBy.KEEP, NormBy.VMAP):
        return records
    first, *rest = [per_sample_gradient(record) for record in records]
    return [Dense(sum(rest, start=first))]


def _squared(records: list[Record], choice: Choice) -> Tensor:
    """The squared norm of what the sum will add for each sample, all uses of the leaf together.

    Kept gradients are themselves what is added. Otherwise a float32 matrix product makes the sum later, and its
    rounding comes on top: up to about ``eps sum_t |left_t| |right_t|``, which an adversarial sample can make large
    beside a norm that cancels. Twice that is added to the norm, so that the bound holds for the rounded sum.
    """
    if choice.norm is NormBy.GRAM:
        total = sum(gram_squared_norm(record) for record in records)
        crossed = [(a, b) for i, a in enumerate(records) for b in records[:i]]
        # Rounding may leave a square that cancels to zero slightly below it.
        square = torch.as_tensor(total + 2 * sum(cross_term(a, b) for a, b in crossed)).clamp_min(0)
    else:
        wide = records if choice.sum is SumBy.REUSE else [widened(record) for record in records]
        first, *rest = [per_sample_gradient(record) for record in wide]
        square = squared_norm(Dense(sum(rest, start=first)))
    if choice.sum is SumBy.REUSE:
        return square
    dtype = _wide(_dtype(records[0]))
    slack = 2 * torch.finfo(dtype).eps * sum(magnitude(record) for record in records)
    return (square.double().sqrt() + slack).square().to(dtype)


def _dtype(record: Record) -> torch.dtype:
    return record.gradient.dtype if isinstance(record, Dense) else record.right.dtype


def _weighted(records: list[Record], factors: Tensor) -> Tensor:
    first, *rest = [weighted_gradient(record, factors) for record in records]
    return sum(rest, start=first)


def _count_uses(model: Model, plan: Plan) -> dict[Path, int]:
    """In how many blocks each trainable leaf appears: its norm is complete when all have been pulled."""
    counts = dict.fromkeys(plan.trainable, 0)
    for block, uses in zip(model.blocks, plan.uses):
        by_vmap = [p for p in tree.leaves(block.params) if p in plan.choices and plan.choices[p].norm is NormBy.VMAP]
        for path in {use.path for use in uses} | set(by_vmap):
            counts[path] += 1
    return counts


def _check_shape(plan: Plan, data: Tree) -> None:
    if batch_size_of(data) != plan.batch_size:
        raise FdpError(
            f"batch: expected {plan.batch_size} samples, the plan's microbatch, got {batch_size_of(data)}; pad the "
            f"microbatch with a mask, or make a plan for this shape"
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
