"""Forward and backward through a stack of blocks, with one block's full weights at a time.

forward    carry_i = block_i(weights_i, carry_{i-1})                          weights are gathered block by block
backward   (g_{i-1}, found_i) = pull_i(g_i)                                   found: records by taps, or plain gradients

While block i computes, the weights of the next one are being gathered. What the forward saves of a block decides what
its backward needs: a pull-back (nothing more), its full weights (its forward again), or nothing (weights and forward).

>>> weights = make_weights(model, params, data, plan, execution)
>>> losses, saved, carries = forward(weights, data, plan)
>>> for i, found in backward(weights, ones, saved, carries, data, plan, token=losses): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fdp import tree
from fdp.cpu.promise import differentiated_once
from fdp.gradients.costs import NormBy
from fdp.gradients.execution import LOCAL, Execution, Pull
from fdp.gradients.plan import Plan
from fdp.gradients.rules import Dense, Record
from fdp.gradients.taps import batch_size_of
from fdp.gradients.vjp import refuse_recomputation, vjp
from fdp.model import Block, Model, check_losses
from fdp.parallel.gather_reduce import PendingGather, finish_gather, start_gather
from fdp.parallel.sharding import Zero
from fdp.types import FdpError, Flat, Path, Tree


class Weights(NamedTuple):
    """The source of a block's weights: this rank's shards of all leaves, and how full leaves are gathered."""

    model: Model
    shards: Flat
    dtype: torch.dtype
    device: torch.device
    execution: Execution

    def start_gather(self, i: int, token: Tree) -> PendingGather:
        """Start to gather the weights of block ``i``; ``token`` as in ``gather_reduce.start_gather``."""
        paths = list(dict.fromkeys(tree.leaves(self.model.blocks[i].params)))
        sharding = self.execution.sharding
        return start_gather(sharding, paths, self.shards, dtype=self.dtype, device=self.device, token=token)

    def finish_gather(self, pending: PendingGather) -> Flat:
        """Wait for the weights of a block."""
        return finish_gather(self.execution.sharding, pending)

    @property
    def refetched(self) -> bool:
        """Return True if full weights are dropped after a block's forward and gathered again for its backward."""
        sharding, memory = self.execution.sharding, self.execution.memory
        return memory.refetch or memory.offload.params or (sharding is not None and sharding.zero is Zero.THREE)


class Saved(NamedTuple):
    """Values of a block saved in the forward for its backward: its pull-back, else its full weights, else nothing."""

    pull: Pull | None
    weights: Flat | None


NOTHING_SAVED = Saved(None, None)


def make_weights(model: Model, params: Tree, data: Tree, plan: Plan, execution: Execution = LOCAL) -> Weights:
    """Return the source of weights for one microbatch of the plan's shape."""
    if batch_size_of(data) != plan.batch_size:
        raise FdpError(
            f"batch: expected {plan.batch_size} samples, the plan's microbatch, got {batch_size_of(data)}; pad the "
            f"microbatch with a mask, or make a plan for this shape (fdp.gradients.plan.add_smaller_sizes)"
        )
    return Weights(model, tree.flatten(params), plan.dtype, tree.leaves(data)[0].device, execution)


def forward(
    weights: Weights, data: Tree, plan: Plan, *, gradient: Tensor | None = None
) -> tuple[Tensor, list[Saved], list[Tree]]:
    """Return the losses, what is saved of every block, and every block's input.

    ``gradient`` is that of the losses, None for all ones: a fused head runs its backward at once.
    """
    count = len(weights.model.blocks)
    saved: list[Saved] = []
    carries: list[Tree] = []
    carry: Tree = ()
    pending: PendingGather | None = weights.start_gather(0, token=())
    for i in range(count):
        assert pending is not None
        full: Flat = weights.finish_gather(pending)
        pending = None  # the bucket is freed before the next one is filled
        pending = weights.start_gather(i + 1, token=carry) if i + 1 < count else None
        carries.append(carry)
        carry, this = _forward_block(weights, i, full, carry, data, plan, gradient)
        saved.append(this)
        full, this = {}, NOTHING_SAVED
    return check_losses(weights.model, carry, plan.batch_size), saved, carries


def _forward_block(
    weights: Weights, i: int, full: Flat, carry: Tree, data: Tree, plan: Plan, gradient: Tensor | None
) -> tuple[Tree, Saved]:
    """Return a block's output and what is saved of it. The last block's backward comes at once: it never runs twice."""
    block, runner = weights.model.blocks[i], weights.execution.runner
    last = i + 1 == len(weights.model.blocks)
    fused = runner.head_vjp(block, full, carry, data, plan.uses[i], plan, gradient) if last else None
    if fused is not None:
        return fused[0], Saved(fused[1], None)
    if last or not (weights.refetched or weights.execution.memory.recompute):
        out, pull = _vjp(weights, block, full, carry, data, plan.uses[i], plan)
        return out, Saved(pull, None)
    with torch.no_grad(), differentiated_once():  # the values that the block's pull-back will compute again
        out = block.apply(tree.select(full, block.params), carry, data)
    return out, NOTHING_SAVED if weights.refetched else Saved(None, full)


def backward(
    weights: Weights,
    gradient: Tensor | None,
    saved: list[Saved],
    carries: list[Tree],
    data: Tree,
    plan: Plan,
    *,
    token: Tree,
    see: Callable[[int, Tree], None] | None = None,
) -> Iterator[tuple[int, dict[Path, Any]]]:
    """Yield, from the last block to the first, its number and what its pull-back found of its leaves.

    A block of which nothing is saved is gathered and run again, while the next one is being gathered. ``gradient`` is
    that of the losses, None for all ones; the first gather waits for ``token``; ``see`` is called with the number and
    the output of every block that is run again. Uses up ``saved`` and ``carries``, and
    empties what it found of a block when it is asked for the next, so that nothing outlives its use.
    """
    pending: PendingGather | None = None
    for i in range(len(weights.model.blocks) - 1, -1, -1):
        this = saved.pop()
        if this.pull is None and this.weights is None:
            here = weights.start_gather(i, token=token) if pending is None else pending
            this = Saved(None, weights.finish_gather(here))
            here = None
        pending = None
        if i and saved[-1].pull is None and saved[-1].weights is None:
            pending = weights.start_gather(i - 1, token=token)
        gradient, found = _pull_block(weights, i, this, carries.pop(), gradient, data, plan, see)
        this, token = NOTHING_SAVED, gradient
        yield i, found
        found.clear()  # also for a caller whose loop variable still holds it


def _pull_block(
    weights: Weights,
    i: int,
    saved: Saved,
    carry: Tree,
    gradient: Tree,
    data: Tree,
    plan: Plan,
    see: Callable[[int, Tree], None] | None,
) -> tuple[Tree, dict[Path, Any]]:
    if saved.pull is not None:
        return saved.pull(gradient)
    assert saved.weights is not None
    out, pull = _vjp(weights, weights.model.blocks[i], saved.weights, carry, data, plan.uses[i], plan)
    if see is not None:
        see(i, out)
    return pull(gradient)


def _vjp(weights: Weights, block: Block, full: Flat, carry: Tree, data: Tree, uses: Any, plan: Plan):
    """Return a block's output and its pull-back, in which a gradient of None stands for all ones."""
    runner = weights.execution.runner
    if not plan.private:
        out, pull = runner.plain_vjp(block, full, carry, data, plan.trainable)
    elif any(path in plan.choices and plan.choices[path].norm is NormBy.VMAP for path in full):
        out, pull = _vmapped_vjp(block, full, carry, data, plan.trainable)
    else:
        out, pull = runner.tapped_vjp(block, full, carry, data, uses, plan.trainable)
    return out, lambda gradient: pull(torch.ones_like(out) if gradient is None else gradient)


def _vmapped_vjp(block: Block, weights: Flat, carry: Tree, data: Tree, trainable: frozenset[Path]):
    """Pull back any block to per-sample gradients: one vector-Jacobian product each, under ``vmap`` if possible."""
    trained = {path: w for path, w in weights.items() if path in trainable}
    frozen = {path: w for path, w in weights.items() if path not in trainable}

    def apply_to_one(trained: Flat, carry: Tree, data: Tree) -> Tree:
        one = tree.map(lambda leaf: leaf.unsqueeze(0), (carry, data))
        out = block.apply(tree.select(trained | frozen, block.params), *one)
        return tree.map(lambda leaf: leaf.squeeze(0), out)

    def pull_one(carry: Tree, data: Tree, gradient: Tree) -> tuple[Tree, ...]:
        _, pull, _ = vjp(lambda w, c: (apply_to_one(w, c, data), ()), trained, carry)
        return pull(gradient)

    with torch.no_grad():
        out = block.apply(tree.select(weights, block.params), carry, data)

    def pull(gradient: Tree) -> tuple[Tree, dict[Path, list[Record]]]:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused CPU attention has no batching rule
            try:
                per_sample, carry_gradient = torch.func.vmap(pull_one)(carry, data, gradient)
            except RuntimeError:  # no batching rule, or a shape that depends on the data
                per_sample, carry_gradient = _one_by_one(apply_to_one, trained, carry, data, gradient)
        return carry_gradient, {path: [Dense(leaf)] for path, leaf in per_sample.items()}

    return out, pull


def _one_by_one(
    apply_to_one: Callable[[Flat, Tree, Tree], Tree], trained: Flat, carry: Tree, data: Tree, gradient: Tree
) -> tuple[Flat, Tree]:
    """Compute the same sample by sample with plain autograd, for anything that has a derivative at all."""
    found = []
    for i in range(len(tree.leaves(data)[0])):
        one, entry, slope = tree.map(lambda leaf: leaf[i], (carry, data, gradient))  # noqa: B023
        inputs = tree.map(lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), (trained, one))
        with torch.enable_grad(), refuse_recomputation():
            out = apply_to_one(inputs[0], inputs[1], entry)
        wanted = [leaf for leaf in tree.leaves(inputs) if leaf.requires_grad]
        follows = [(o, g) for o, g in zip(tree.leaves(out), tree.leaves(slope)) if o.requires_grad]
        if follows:
            outs, slopes = zip(*follows)
            with refuse_recomputation():
                grads = iter(torch.autograd.grad(outs, wanted, slopes, allow_unused=True, materialize_grads=True))
        else:  # this sample's output depends on no leaf
            grads = iter([torch.zeros_like(leaf) for leaf in wanted])
        found.append(tree.map(lambda leaf: next(grads) if leaf.requires_grad else torch.zeros_like(leaf), inputs))  # noqa: B023
    return tree.map(lambda *leaves: torch.stack(leaves), *found)
