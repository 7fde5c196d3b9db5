"""One step, traced on tensors without memory: the ledger of :func:`fdp.step.make_train_step` itself.

:class:`_Watch` wraps the functions that a step is composed of (model, clipping style, optimizer), and so labels the
storages that are alive between them: pairs that are stored for the sum, gradient sums, optimizer state.

    >>> ledger = trace_step(work, microbatches=2)
    >>> ledger.peaks(host=False)[Phase.PASS].total
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fdp import tree
from fdp.checks.first_call import Checks
from fdp.estimate.ledger import DEVICE, HOST, Ledger, MemoryKind, Phase, fused_attention
from fdp.fast.compile_modes import make_execution
from fdp.fast.fused_head import can_fuse, fused_vjp
from fdp.gradients.execution import EagerRunner, Execution, Pull
from fdp.gradients.plan import Plan
from fdp.gradients.tape import Use
from fdp.kfac.optimizer import Kfac
from fdp.kfac.private.refresh import sides_of
from fdp.kfac.refresh import measure
from fdp.kfac.state import find_kfac_state, move_factors, replace_kfac_state
from fdp.model import Block, Model
from fdp.optimizers import LOCAL, Optimizer, Reductions
from fdp.parallel.offload import Offload
from fdp.parallel.sharding import Sharding
from fdp.privacy import clipping
from fdp.privacy.clipping import ClipStyle
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import make_train_step
from fdp.types import Clip, Flat, Norms, TrainState, Tree

NOISE_OPERATIONS = (torch.ops.fdp_kernels.normal.default, torch.ops.fdp_kernels.foreach_normal.default)
"""The operations that draw noise: leaf by leaf, and on the host for many leaves."""


class TracedWork(NamedTuple):
    """The step to trace, for any number of microbatches."""

    model: Model
    optimizer: Optimizer
    curvature: Kfac | None
    plan: Plan
    sharding: Sharding | None
    shapes: Tree
    offload: Offload
    checkpoint_activations: bool
    sum_dtype: torch.dtype = torch.float64
    in_place: bool = False


class _CompiledRunner(EagerRunner):
    """Run blocks as they are, but fuse the head with its loss and end the step in one pass, as a compiled step does."""

    compiles = True

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
        return fused_vjp(self, block, weights, carry, data, uses, plan, gradient) if can_fuse(block, plan) else None


def trace_step(work: TracedWork, microbatches: int) -> Ledger:
    """Run one step on tensors without memory and return its ledger."""
    plan, sharding = work.plan, work.sharding
    ledger = Ledger(_groups(sharding))
    with ledger, fused_attention():
        state = _labelled_state(work, ledger)
        data, mask = _data(work, microbatches), torch.ones(microbatches, plan.batch_size, device=DEVICE)
        sampling = poisson(1 << 20, expected_batch_size=1024)
        batch = trusted_batch(data, mask, sampling, step=None, ranks=1 if sharding is None else sharding.ranks)
        key = torch.empty(8, dtype=torch.int64, device=DEVICE)
        watch = _Watch(ledger, plan)
        style = watch.style(clipping.flat(max_norm=1.0))
        roots = work.curvature is not None and plan.private
        step = make_train_step(
            watch.model(work.model),
            watch.optimizer(work.optimizer),
            mechanism=Mechanism(sampling, style, 1.0 if plan.private else 0.0),
            plan=plan,
            execution=_execution(work),
            donate=("state",) if work.in_place else (),
            checks=Checks.SKIPPED,  # there are no values to check
            precondition=sides_of if roots else None,
        )
        after, _ = step(state, batch, key)
        ledger.label(after.params, MemoryKind.PARAMETERS)
    return ledger


def _execution(work: TracedWork) -> Execution:
    ranks = 1 if work.sharding is None else work.sharding.ranks
    execution = make_execution(
        sharding=work.sharding,
        offload=work.offload,
        checkpoint_activations=work.checkpoint_activations,
        sum_dtype=work.sum_dtype,
        microbatch_size=work.plan.batch_size * ranks,
    )
    return execution._replace(runner=_CompiledRunner()) if work.in_place else execution


def trace_measurement(work: TracedWork, curvature: Kfac) -> Ledger:
    """Measure the curvature of a microbatch on tensors without memory and return the ledger."""
    ledger = Ledger(_groups(work.sharding))
    with ledger, fused_attention():
        state = _labelled_state(work, ledger)
        data = tree.map(lambda leaf: leaf[0], _data(work, 1))
        mask = torch.ones(work.plan.batch_size, device=DEVICE)
        key = torch.empty(8, dtype=torch.int64, device=DEVICE)
        ledger.begin(Phase.CURVATURE)
        new = measure(state.params, data, mask, key, plan=curvature.plan)
        ledger.label(new, MemoryKind.OPTIMIZER)
    return ledger


def _data(work: TracedWork, microbatches: int) -> Tree:
    return tree.map(lambda x: torch.empty((microbatches, *x.shape), dtype=x.dtype, device=DEVICE), work.shapes)


def _labelled_state(work: TracedWork, ledger: Ledger) -> TrainState:
    """Return this rank's shards, on the devices they live on between steps, with labels in the ledger."""
    model, sharding, offload = work.model, work.sharding, work.offload
    parts = {
        path: torch.empty(spec.shape if sharding is None else sharding.leaves[path].local_shape, device=DEVICE)
        for path, spec in model.leaves.items()
    }

    def there(values: Tree, *, on_host: bool) -> Tree:
        return tree.map(lambda leaf: leaf.to(HOST if on_host else DEVICE), values)

    opt = work.optimizer.init({path: leaf for path, leaf in parts.items() if path in model.trainable})
    params = tree.nest(there(parts, on_host=offload.params))
    opt = there(opt, on_host=offload.optimizer)
    if work.curvature is not None:
        opt = replace_kfac_state(opt, move_factors(find_kfac_state(opt), work.curvature.plan.config))
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    ledger.label(params, MemoryKind.PARAMETERS)
    ledger.label(opt, MemoryKind.OPTIMIZER)
    return TrainState(params, opt, (), count)


class _Watch:
    """Wrappers of the functions a step is composed of, which label the storages passed from one to the next."""

    def __init__(self, ledger: Ledger, plan: Plan):
        self.ledger = ledger
        self.keeps = plan.stored_bytes > 0
        self.ended = False
        self.start = self.since = ledger.begin(Phase.PASS)

    def model(self, model: Model) -> Model:
        """Return the same model; a call of its first block begins the forward of a microbatch."""
        first, *rest = model.blocks

        def apply(params: Tree, carry: Tree, data: Tree) -> Tree:
            if self.ended:
                self.since = self.ledger.begin(Phase.PASS)
                self.ended = False
            return first.apply(params, carry, data)

        return model._replace(blocks=(first._replace(apply=apply), *rest))

    def style(self, style: ClipStyle) -> ClipStyle:
        """Return the same style; storages alive when it clips were kept for the sum, and later ones are the sum."""

        def clip(norms: Norms, state: Tree) -> Clip:
            if self.keeps:
                self.ledger.relabel(MemoryKind.KEPT, since=self.since)
            self.since = self.ledger.begin(Phase.SUM)
            self.ledger.begin_at(NOISE_OPERATIONS, Phase.NOISE)
            return style.clip(norms, state)

        def tally(norms: Norms, mask: Tensor, state: Tree) -> Tensor:
            self.ledger.relabel(MemoryKind.GRADIENTS, since=self.since)
            self.ended = True
            return style.tally(norms, mask, state)

        return style._replace(clip=clip, tally=tally)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the same optimizer; storages alive when it is called are sums, and new ones its state or update."""

        def update(grads: Tree, state: Tree, params: Tree, reductions: Reductions = LOCAL) -> tuple[Tree, Tree]:
            self.ledger.relabel(MemoryKind.GRADIENTS, since=self.start)
            self.ledger.begin(Phase.UPDATE)
            self.ledger.default = MemoryKind.GRADIENTS
            updates, after = optimizer.update(grads, state, params, reductions)
            self.ledger.label(after, MemoryKind.OPTIMIZER)
            return updates, after

        watched = optimizer._replace(update=update)
        if optimizer.adamw is None or optimizer.rule is not optimizer.adamw:
            return watched
        return watched._replace(adamw=optimizer.adamw._replace(update=update))  # an update in place does not call it


def _groups(sharding: Sharding | None) -> dict[str, tuple[str, int]]:
    if sharding is None:
        return {}
    axes = (sharding.world, sharding.replicate, sharding.tensor, sharding.shard)
    return {axis.group: (axis.name, axis.size) for axis in axes}
