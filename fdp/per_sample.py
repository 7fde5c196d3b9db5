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

from collections.abc import Iterator, Sequence
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
    gram_rounding,
    gram_squared_norm,
    per_sample_gradient,
    squared_norm,
    weighted_gradient,
    widened,
)
from fdp.sharding import Pending, Sharding, Zero, finish_gather, reduce_scatter, start_gather
from fdp.taps import batch_size_of, tapped_vjp
from fdp.types import Clip, ClippedSum, FdpError, Flat, Norms, Path, Tree
from fdp.vjp import vjp


class Stash(NamedTuple):
    """What the norm pass keeps for the sum: records by leaf, and the input of every block for a second backward."""

    records: dict[Path, list[Record]]
    carries: tuple[Tree, ...]
    weights: Weights
    data: Tree
    plan: Plan


class Weights(NamedTuple):
    """Where a block's weights come from: this rank's parts of all leaves, and how wholes are made of them."""

    model: Model
    parts: Flat
    dtype: torch.dtype
    sharding: Sharding | None

    def start(self, i: int, token: Tree) -> Pending:
        """Send for the weights of block ``i``; ``token`` as in ``start_gather``."""
        paths = list(dict.fromkeys(tree.leaves(self.model.blocks[i].params)))
        return start_gather(self.sharding, paths, self.parts, dtype=self.dtype, token=token)

    def finish(self, pending: Pending) -> Flat:
        return finish_gather(self.sharding, pending)

    @property
    def dropped(self) -> bool:
        """Whether whole weights are dropped after a block's forward, to be gathered again for its backward."""
        return self.sharding is not None and self.sharding.zero is Zero.THREE


def per_sample_norms(
    model: Model, params: Tree, data: Tree, *, plan: Plan, sharding: Sharding | None = None
) -> tuple[Float[Tensor, " batch"], Norms, Stash]:
    """Losses, squared gradient norms per sample and leaf, and what the clipped sum needs. One forward, one backward.

    With ``sharding``, ``params`` are this rank's parts and ``data`` this rank's samples; a sample's norm needs nothing
    from other ranks, because its whole gradient is computed where the sample is.

    Guarantees:
      - every trainable leaf is in the norms, all its uses together (cross terms included);
      - sums of squares are accumulated in float64, whatever the compute dtype.
    """
    _check_shape(plan, data)
    flat = tree.flatten(params)
    weights = Weights(model, flat, plan.dtype, sharding)
    losses, pulls, carries = _forward(weights, data, plan)
    waiting = _count_uses(model, plan)
    open_records: dict[Path, list[Record]] = {}
    kept: dict[Path, list[Record]] = {}
    squared: dict[Path, Tensor] = {}
    for _, records in _backward(weights, losses, pulls, carries, data, plan):
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
    stash = Stash(kept, tuple(carries) if second else (), weights, data, plan)
    return losses.to(_wide(losses.dtype)), norms, stash


def clipped_sum(stash: Stash, clip: Clip) -> ClippedSum:
    """``sum_b factor_b G_b`` per leaf, in float64; with sharding, over all ranks' samples and this rank's part of it.

    Each block's sums are reduced as soon as they are made, so that one block's whole gradients are alive at a time.

    Guarantees:
      - every leaf in the norms is in the sum, scaled by its own factor;
      - a sample whose factor is 0 contributes exactly 0, even if its gradient is NaN or infinite.
    """
    weights, plan = stash.weights, stash.plan
    total: Flat = {}
    if stash.carries:
        whole: Flat = {}
        for i, records in _backward(weights, None, [], stash.carries, stash.data, plan):
            for path, found in records.items():
                if plan.choices[path].sum is SumBy.SECOND:
                    part = _weighted(found, clip.factors[path])
                    whole[path] = whole[path] + part if path in whole else part
            done = [path for path in _owned(weights.model, i) if path in whole]
            total |= reduce_scatter(weights.sharding, {path: whole.pop(path) for path in done})
    for i in range(len(weights.model.blocks)):
        kept = [path for path in _owned(weights.model, i) if path in stash.records]
        sums = {path: _weighted(stash.records[path], clip.factors[path]) for path in kept}
        total |= reduce_scatter(weights.sharding, sums) if sums else {}
    if set(total) != set(clip.factors):
        raise FdpError(f"clipped_sum: leaves {sorted(set(total) ^ set(clip.factors))} are in the norms or the sum only")
    return ClippedSum({path: total[path] for path in clip.factors}, clip.sensitivity)


def plain_sum(
    model: Model,
    params: Tree,
    data: Tree,
    mask: Float[Tensor, " batch"],
    *,
    plan: Plan,
    sharding: Sharding | None = None,
) -> tuple[Float[Tensor, " batch"], Flat]:
    """Losses and ``sum_b mask_b G_b``: the same loop without privacy, one ordinary backward."""
    _check_shape(plan, data)
    flat = tree.flatten(params)
    weights = Weights(model, flat, plan.dtype, sharding)
    losses, pulls, carries = _forward(weights, data, plan)
    start = torch.where(mask > 0, torch.ones_like(losses), torch.zeros_like(losses))
    whole: Flat = {}
    total: Flat = {}
    for i, found in _backward(weights, start, pulls, carries, data, plan):
        for path, leaf in found.items():
            leaf = leaf.to(_wide(leaf.dtype))
            whole[path] = whole[path] + leaf if path in whole else leaf
        done = [path for path in _owned(model, i) if path in whole]
        total |= reduce_scatter(sharding, {path: whole.pop(path) for path in done})
    return losses.to(_wide(losses.dtype)), {path: total[path] for path in flat if path in plan.trainable}


def _forward(weights: Weights, data: Tree, plan: Plan) -> tuple[Tensor, list[Any], list[Tree]]:
    """Losses, the pull-back of every block (of the last one only, if weights are dropped) and every block's input."""
    blocks = weights.model.blocks
    pulls, carries = [], []
    carry: Tree = ()
    pending = weights.start(0, token=())
    for i, block in enumerate(blocks):
        whole = weights.finish(pending)
        last = i + 1 == len(blocks)
        pending = pending if last else weights.start(i + 1, token=carry)
        carries.append(carry)
        if weights.dropped and not last:
            with torch.no_grad():
                carry = block.apply(tree.select(whole, block.params), carry, data)
        else:
            carry, pull = _open(block, whole, carry, data, plan.uses[i], plan)
            pulls.append(pull)
    return check_losses(weights.model, carry, plan.batch_size), pulls, carries


def _backward(
    weights: Weights, losses: Tensor | None, pulls: list[Any], carries: Sequence[Tree], data: Tree, plan: Plan
) -> Iterator[tuple[int, dict[Path, Any]]]:
    """Block by block from the last: its number and what its pull-back found of its leaves.

    A block without a pull-back is gathered and run again, from its input, the next one already on its way. ``losses``
    is the gradient to start from for plain training, or gives its shape; None: the last block is run again, too.
    """
    blocks = weights.model.blocks
    gradient: Tree = None if losses is None else (losses if not plan.private else torch.ones_like(losses))
    pending = None
    for i in range(len(blocks) - 1, -1, -1):
        if pulls:
            pull = pulls.pop()
        else:
            here = weights.start(i, token=gradient if gradient is not None else ()) if pending is None else pending
            whole = weights.finish(here)
            pending = weights.start(i - 1, token=gradient if gradient is not None else ()) if i else None
            out, pull = _open(blocks[i], whole, carries[i], data, plan.uses[i], plan)
            gradient = torch.ones_like(out) if gradient is None else gradient
        gradient, found = pull(gradient)
        yield i, found


def _owned(model: Model, i: int) -> list[Path]:
    """The leaves whose first block is ``i``: in a backward, the block after which their sums are complete."""
    earlier = {path for block in model.blocks[:i] for path in tree.leaves(block.params)}
    return [path for path in dict.fromkeys(tree.leaves(model.blocks[i].params)) if path not in earlier]


def _open(block: Block, weights: Flat, carry: Tree, data: Tree, uses: Any, plan: Plan):
    """A block's output and its pull-back: to (carry, what is found of its leaves)."""
    if not plan.private:
        return _plain_vjp(block, weights, carry, data, plan.trainable)
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

    def run(carry: Tree, trained: Flat) -> tuple[Tree, tuple[()]]:
        return block.apply(tree.select(trained | rest, block.params), carry, data), ()

    out, pull, _ = vjp(run, carry, trained)
    return out, pull


def _merge(records: list[Record], choice: Choice) -> list[Record]:
    """Records of one leaf so far: one running per-sample gradient if that is what is kept, else the pairs."""
    if choice.norm not in (NormBy.KEEP, NormBy.VMAP):
        return records
    first, *rest = [per_sample_gradient(record) for record in records]
    return [Dense(sum(rest, start=first))]


def _squared(records: list[Record], choice: Choice) -> Tensor:
    """The squared norm, in float64, of exactly what the sum will add for each sample, all uses of the leaf together."""
    if choice.norm is NormBy.GRAM:
        total = sum(gram_squared_norm(record) for record in records)
        crossed = [(a, b) for i, a in enumerate(records) for b in records[:i]]
        square = torch.as_tensor(total + 2 * sum(cross_term(a, b) for a, b in crossed))
        return square.clamp_min(0) + gram_rounding(records)
    # Kept gradients are added as they are; pairs are multiplied out in float64 by the sum, and so here.
    exact = records if choice.sum is SumBy.REUSE else [widened(record) for record in records]
    first, *rest = [per_sample_gradient(record) for record in exact]
    return squared_norm(Dense(sum(rest, start=first)))


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
