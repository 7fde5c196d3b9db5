"""Settings for how a step is computed: its shards, its memory, its runner. Results differ by rounding only.

>>> execution = Execution(sharding, Memory(recompute=True), CompiledRunner(), cuda_graph=True)
>>> step = make_train_step(model, optimizer, mechanism=mechanism, plan=plan, execution=execution)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fdp import tree
from fdp.gradients.attached_taps import WritesInPlace, attached_vjp, can_attach
from fdp.gradients.plan import Plan
from fdp.gradients.tape import Use
from fdp.gradients.taps import tapped_vjp
from fdp.gradients.vjp import vjp
from fdp.model import Block
from fdp.parallel.offload import CPU, NO_OFFLOAD, Offload
from fdp.parallel.sharding import Sharding
from fdp.types import Flat, Path, Tree

Pull: TypeAlias = Callable[[Tree], tuple[Tree, dict[Path, Any]]]
"""From the gradient of a block's output to that of its carry and what was found of its leaves."""


class Runner(Protocol):
    """Differentiate blocks, eagerly or compiled. Each ``vjp`` returns a block's output and its pull-back."""

    @property
    def compiles(self) -> bool:
        """Return True if blocks and functions are compiled."""
        ...

    def tapped_vjp(
        self, block: Block, weights: Flat, carry: Tree, data: Tree, uses: tuple[Use, ...], trainable: frozenset[Path]
    ) -> tuple[Tree, Pull]:
        """Pull back to the carry and to the records of every trainable leaf (as ``taps.tapped_vjp``)."""
        ...

    def plain_vjp(
        self, block: Block, weights: Flat, carry: Tree, data: Tree, trainable: frozenset[Path]
    ) -> tuple[Tree, Pull]:
        """Pull back to the carry and to the gradient of every trainable leaf, summed over samples."""
        ...

    def head_vjp(
        self,
        block: Block,
        weights: Flat,
        carry: Tree,
        data: Tree,
        uses: tuple[Use, ...],
        plan: Plan,
        gradient: Tensor | None,
    ) -> tuple[Tensor, Pull] | None:
        """Run the last block's forward and backward together; None if it is to be run like any other block.

        ``gradient`` is that of the losses; None stands for all ones.
        """
        ...

    def function(self, key: Any, run: Callable[..., Any], *values: Any) -> Any:
        """Return ``run(*values)``. ``key`` identifies everything that ``run`` depends on except the tensors."""
        ...


class EagerRunner:
    """Run blocks as they are: taps under plain autograd where that is right, all else under ``torch.func``."""

    compiles = False

    def tapped_vjp(
        self, block: Block, weights: Flat, carry: Tree, data: Tree, uses: tuple[Use, ...], trainable: frozenset[Path]
    ) -> tuple[Tree, Pull]:
        if can_attach(block):
            try:
                return attached_vjp(block, weights, carry, data, uses, trainable)
            except WritesInPlace:
                pass
        return tapped_vjp(block, weights, carry, data, uses, trainable)

    def plain_vjp(
        self, block: Block, weights: Flat, carry: Tree, data: Tree, trainable: frozenset[Path]
    ) -> tuple[Tree, Pull]:
        trained = {path: w for path, w in weights.items() if path in trainable}
        frozen = {path: w for path, w in weights.items() if path not in trainable}

        def run(carry: Tree, trained: Flat) -> tuple[Tree, tuple[()]]:
            return block.apply(tree.select(trained | frozen, block.params), carry, data), ()

        out, pull, _ = vjp(run, carry, trained)
        return out, pull

    def head_vjp(
        self,
        block: Block,
        weights: Flat,
        carry: Tree,
        data: Tree,
        uses: tuple[Use, ...],
        plan: Plan,
        gradient: Tensor | None,
    ) -> None:
        return None

    def function(self, key: Any, run: Callable[..., Any], *values: Any) -> Any:
        return run(*values)


EAGER = EagerRunner()


class Memory(NamedTuple):
    """Options that store less at a time, at the price of time.

    ``recompute`` stores only the input of every block and runs its forward again in the backward.
    ``refetch`` drops a block's full weights after its forward and gathers them again, as ZeRO-3 always does.
    ``offload`` says which parts of the state stay in CPU memory; offloaded parameters are always refetched.
    ``sum_dtype`` is that of a private sum over microbatches. In float32 the sum is rounded, and noise that covers the
    rounding is added (``fdp.privacy.sum_rounding``): the more, the smaller ``microbatch_size`` (samples of all ranks).
    """

    recompute: bool = False
    refetch: bool = False
    offload: Offload = NO_OFFLOAD
    sum_dtype: torch.dtype = torch.float64
    microbatch_size: int | None = None

    @property
    def sums_device(self) -> torch.device | None:
        """Return the device on which finished sums are stored; None: where they are computed."""
        return CPU if self.offload.grads else None


STORE_ALL = Memory()


class Execution(NamedTuple):
    """Settings for how a step is computed. No field changes a result but by rounding, and by the noise that covers it.

    ``sharding``: None for one device. ``runner``: how blocks are differentiated. ``compile_step`` names the backend of
    torch.compile that makes one full graph of the work on a microbatch and one of the update. ``cuda_graph`` records
    the step once per shape of batch and replays it; the state must be donated. ``repeatable``: gradients are computed
    by deterministic algorithms alone; :func:`fdp.fast.compile_modes.make_execution` also compiles in one order then.
    """

    sharding: Sharding | None = None
    memory: Memory = STORE_ALL
    runner: Runner = EAGER
    compile_step: str | None = None
    cuda_graph: bool = False
    repeatable: bool = False


LOCAL = Execution()
