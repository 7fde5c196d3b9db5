"""The block loop: forward and backward through a stack, with one block's whole weights at a time.

forward    carry_i = block_i(weights_i, carry_{i-1})                          weights gathered block by block
backward   (g_{i-1}, found_i) = pull_i(g_i)                                   found: records by taps, or plain gradients

While block i computes, the weights of the next one are on their way. What the forward leaves of a block decides what
its backward needs: a pull-back (nothing), its whole weights (its forward again), or nothing at all (its weights, too).

>>> weights = make_weights(model, params, data, plan, sharding, memory)
>>> losses, opened, carries = forward(weights, data, plan)
>>> for i, found in backward(weights, ones, opened, carries, data, plan, token=losses): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fdp import tree
from fdp.fast.compiled import Blocks
from fdp.fast.fused_head import can_fuse, fused_vjp
from fdp.gradients.costs import NormBy
from fdp.gradients.plan import Plan
from fdp.gradients.rules import Dense, Record
from fdp.gradients.taps import batch_size_of, tapped_vjp
from fdp.gradients.vjp import vjp
from fdp.model import Block, Model, check_losses
from fdp.parallel.gather_reduce import PendingGather, finish_gather, start_gather
from fdp.parallel.sharding import Sharding, Zero
from fdp.types import FdpError, Flat, Path, Tree


class Memory(NamedTuple):
    """What is given up to hold less at a time. None of it changes a result but by rounding.

    ``recompute``: keep only the input of every block, and run its forward again in the backward.
    ``refetch``: drop a block's whole weights after its forward, and fetch them again; so also under ZeRO-3.
    ``sums_on``: where finished sums are kept; None: where they are made.
    """

    recompute: bool = False
    refetch: bool = False
    sums_on: torch.device | None = None


ALL_KEPT = Memory()


class Weights(NamedTuple):
    """Where a block's weights come from: this rank's parts of all leaves, and how wholes are made of them.

    ``blocks``: blocks are compiled by kind, and a model's head is fused with its loss; None: as they stand.
    """

    model: Model
    parts: Flat
    dtype: torch.dtype
    device: torch.device
    sharding: Sharding | None
    memory: Memory
    blocks: Blocks | None = None

    def start(self, i: int, token: Tree) -> PendingGather:
        """Send for the weights of block ``i``; ``token`` as in ``start_gather``."""
        paths = list(dict.fromkeys(tree.leaves(self.model.blocks[i].params)))
        return start_gather(self.sharding, paths, self.parts, dtype=self.dtype, device=self.device, token=token)

    def finish(self, pending: PendingGather) -> Flat:
        return finish_gather(self.sharding, pending)

    @property
    def dropped(self) -> bool:
        """Whether whole weights are dropped after a block's forward, to be fetched again for its backward."""
        return self.memory.refetch or (self.sharding is not None and self.sharding.zero is Zero.THREE)


class Left(NamedTuple):
    """What the forward leaves of a block for its backward: its pull-back, else its whole weights, else nothing."""

    pull: Callable[[Tree], tuple[Tree, dict[Path, Any]]] | None
    whole: Flat | None


NOTHING_LEFT = Left(None, None)


def make_weights(
    model: Model,
    params: Tree,
    data: Tree,
    plan: Plan,
    sharding: Sharding | None,
    memory: Memory,
    blocks: Blocks | None = None,
) -> Weights:
    """Where ``model``'s blocks find their weights, for one microbatch of the plan's shape."""
    if batch_size_of(data) != plan.batch_size:
        raise FdpError(
            f"batch: expected {plan.batch_size} samples, the plan's microbatch, got {batch_size_of(data)}; pad the "
            f"microbatch with a mask, or make a plan for this shape"
        )
    return Weights(model, tree.flatten(params), plan.dtype, tree.leaves(data)[0].device, sharding, memory, blocks)


def forward(
    weights: Weights, data: Tree, plan: Plan, *, gradient: Tensor | None = None
) -> tuple[Tensor, list[Left], list[Tree]]:
    """Losses; what the forward left of every block; every block's input.

    ``gradient`` is that of the losses, None for all ones: a fused head makes its backward at once.
    """
    count = len(weights.model.blocks)
    opened: list[Left] = []
    carries: list[Tree] = []
    carry: Tree = ()
    pending: PendingGather | None = weights.start(0, token=())
    for i in range(count):
        assert pending is not None
        whole: Flat = weights.finish(pending)
        pending = None  # the bucket is released before the next one is filled
        pending = weights.start(i + 1, token=carry) if i + 1 < count else None
        carries.append(carry)
        carry, left = _forward_block(weights, i, whole, carry, data, plan, gradient)
        opened.append(left)
        whole, left = {}, NOTHING_LEFT
    return check_losses(weights.model, carry, plan.batch_size), opened, carries


def _forward_block(
    weights: Weights, i: int, whole: Flat, carry: Tree, data: Tree, plan: Plan, gradient: Tensor | None
) -> tuple[Tree, Left]:
    """A block's output and what is left of it. The last block's backward comes at once: it is never run twice."""
    block = weights.model.blocks[i]
    last = i + 1 == len(weights.model.blocks)
    if last and weights.blocks is not None and can_fuse(block, plan):
        out, pull = fused_vjp(weights.blocks, block, whole, carry, data, plan.uses[i], plan, gradient)
        return out, Left(pull, None)
    if last or not (weights.dropped or weights.memory.recompute):
        out, pull = _open(weights, block, whole, carry, data, plan.uses[i], plan)
        return out, Left(pull, None)
    with torch.no_grad():
        out = block.apply(tree.select(whole, block.params), carry, data)
    return out, NOTHING_LEFT if weights.dropped else Left(None, whole)


def backward(
    weights: Weights,
    gradient: Tensor | None,
    opened: list[Left],
    carries: list[Tree],
    data: Tree,
    plan: Plan,
    *,
    token: Tree,
) -> Iterator[tuple[int, dict[Path, Any]]]:
    """Block by block from the last: its number and what its pull-back found of its leaves.

    A block of which nothing is left is gathered and run again, the next one already on its way. ``gradient`` is that
    of the losses, None for all ones; ``token`` is what the first gather waits for, as in ``start_gather``. Uses up
    ``opened`` and ``carries``, so that nothing outlives its use.
    """
    pending: PendingGather | None = None
    for i in range(len(weights.model.blocks) - 1, -1, -1):
        left = opened.pop()
        if left.pull is None and left.whole is None:
            here = weights.start(i, token=token) if pending is None else pending
            left = Left(None, weights.finish(here))
            here = None
        pending = None
        if i and opened[-1].pull is None and opened[-1].whole is None:
            pending = weights.start(i - 1, token=token)
        gradient, found = _pull_block(weights, i, left, carries.pop(), gradient, data, plan)
        left, token = NOTHING_LEFT, gradient
        yield i, found
        found = {}


def _pull_block(
    weights: Weights, i: int, left: Left, carry: Tree, gradient: Tree, data: Tree, plan: Plan
) -> tuple[Tree, dict[Path, Any]]:
    if left.pull is not None:
        return left.pull(gradient)
    assert left.whole is not None
    _, pull = _open(weights, weights.model.blocks[i], left.whole, carry, data, plan.uses[i], plan)
    return pull(gradient)


def _open(weights: Weights, block: Block, whole: Flat, carry: Tree, data: Tree, uses: Any, plan: Plan):
    """A block's output and its pull-back: to (carry, what is found of its leaves). A gradient of None is all ones."""
    blocks = weights.blocks
    if not plan.private:
        plain = _plain_vjp if blocks is None else blocks.plain_vjp
        out, pull = plain(block, whole, carry, data, plan.trainable)
    elif any(path in plan.choices and plan.choices[path].norm is NormBy.VMAP for path in whole):
        out, pull = _vmapped_vjp(block, whole, carry, data, plan.trainable)
    else:
        tapped = tapped_vjp if blocks is None else blocks.tapped_vjp
        out, pull = tapped(block, whole, carry, data, uses, plan.trainable)
    return out, lambda gradient: pull(torch.ones_like(out) if gradient is None else gradient)


def _vmapped_vjp(block: Block, weights: Flat, carry: Tree, data: Tree, trainable: frozenset[Path]):
    """As ``tapped_vjp`` for any block at all: every sample's vector-Jacobian product by itself, under ``vmap`` if that
    can."""
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
            try:
                per_sample, carry_gradient = torch.func.vmap(pull_one)(carry, data, gradient)
            except RuntimeError:  # no batching rule, or a shape that depends on the data: then one at a time
                per_sample, carry_gradient = _one_by_one(alone, trained, carry, data, gradient)
        return carry_gradient, {path: [Dense(leaf)] for path, leaf in per_sample.items()}

    return out, pull


def _one_by_one(
    alone: Callable[[Flat, Tree, Tree], Tree], trained: Flat, carry: Tree, data: Tree, gradient: Tree
) -> tuple[Flat, Tree]:
    """The same sample by sample, by plain autograd: whatever has a derivative at all."""
    found = []
    for i in range(len(tree.leaves(data)[0])):
        one, entry, slope = tree.map(lambda leaf: leaf[i], (carry, data, gradient))  # noqa: B023
        opened = tree.map(lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), (trained, one))
        with torch.enable_grad():
            out = alone(opened[0], opened[1], entry)
        wanted = [leaf for leaf in tree.leaves(opened) if leaf.requires_grad]
        follows = [(o, g) for o, g in zip(tree.leaves(out), tree.leaves(slope)) if o.requires_grad]
        if follows:
            outs, slopes = zip(*follows)
            grads = iter(torch.autograd.grad(outs, wanted, slopes, allow_unused=True, materialize_grads=True))
        else:  # what this sample returns depends on no leaf: a branch of its own, or nothing that counts
            grads = iter([torch.zeros_like(leaf) for leaf in wanted])
        found.append(tree.map(lambda leaf: next(grads) if leaf.requires_grad else torch.zeros_like(leaf), opened))  # noqa: B023
    return tree.map(lambda *leaves: torch.stack(leaves), *found)


def _plain_vjp(block: Block, weights: Flat, carry: Tree, data: Tree, trainable: frozenset[Path]):
    trained = {path: w for path, w in weights.items() if path in trainable}
    rest = {path: w for path, w in weights.items() if path not in trainable}

    def run(carry: Tree, trained: Flat) -> tuple[Tree, tuple[()]]:
        return block.apply(tree.select(trained | rest, block.params), carry, data), ()

    out, pull, _ = vjp(run, carry, trained)
    return out, pull
