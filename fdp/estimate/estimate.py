"""A step at any scale before it exists: memory by kind, traffic and flops of one rank, on any machine.

    peak  = max over phases of (parameters + optimizer + gathered + gradients + kept pairs + activations)
    units = elements sent / elements of the model        ZeRO-2: 2, ZeRO-3: 3 (Rajbhandari et al., arXiv 1910.02054)

The step of :func:`fdp.step.make_train_step` itself runs, as rank 0 of a group of ranks that are not there and on
tensors that have shapes but no memory, so that what it would hold and send can be read off. Nothing is assumed about
it: a change of the step is a change of its plan.

    >>> scale = Scale({"shard": 128}, Zero.THREE)
    >>> found = plan_at_scale(build("gpt3-175b"), tokens, scale=scale, method=Method.GHOST, dtype=torch.bfloat16)
    >>> found.device.total / 2**30, found.device.by_kind[Kind.KEPT], found.units
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fdp import tree
from fdp.checks.first_call import Checks
from fdp.estimate.ledger import DEVICE, HOST, Kind, Ledger, Peak, Phase, Transfer, fused_attention
from fdp.gradients import timing
from fdp.gradients.block_loop import Memory
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.kfac.optimizer import Kfac
from fdp.kfac.private.refresh import sides_of
from fdp.kfac.private.sources import KfacOptimizer, make_kfac
from fdp.kfac.refresh import measure
from fdp.kfac.state import find, inverse_bytes, replaced, stored
from fdp.model import Model
from fdp.optimizers import LOCAL, Optimizer, Reductions, adamw
from fdp.parallel.mesh import make_mesh
from fdp.parallel.offload import NO_OFFLOAD, Offload
from fdp.parallel.sharding import Reduce, Sharding, Zero, abstract_params, make_sharding, over_tensor_axis
from fdp.privacy import clipping
from fdp.privacy.clipping import ClipStyle
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import make_train_step
from fdp.types import Clip, FdpError, Norms, TrainState, Tree

TRACED = 3
"""Microbatches that are traced: from the third on a step holds no more, and sends what the third added."""


class Scale(NamedTuple):
    """How many ranks there are along each axis of the mesh, and what is cut over ``shard``."""

    axes: Mapping[str, int]
    zero: Zero
    reduce: Reduce | None = None
    reduce_dtype: torch.dtype | None = None


class Measurement(NamedTuple):
    """What one rank sends and multiplies when K-FAC measures curvature; without inverses, and columns that travel."""

    transfers: tuple[Transfer, ...]
    flops: dict[torch.dtype, float]


class Footprint(NamedTuple):
    """What one rank holds, sends and multiplies in a step. ``phases``: the peaks on the device and on the host.

    ``kept``: the most bytes that the device keeps between norms and sum, whenever that is. ``measurement``: what K-FAC
    does beside, once in a period; None of other optimizers.
    """

    parameters: int
    phases: dict[Phase, tuple[Peak, Peak]]
    transfers: tuple[Transfer, ...]
    flops: dict[torch.dtype, float]
    plan: Plan
    kept: int
    measurement: Measurement | None = None

    @property
    def phase(self) -> Phase:
        """When the device holds most."""
        return max(self.phases, key=lambda phase: self.phases[phase][0].total)

    @property
    def device(self) -> Peak:
        """The peak on the device."""
        return self.phases[self.phase][0]

    @property
    def host(self) -> Peak:
        """The peak in CPU memory."""
        return max((host for _, host in self.phases.values()), key=lambda peak: peak.total)

    @property
    def units(self) -> float:
        """Elements sent over the data axes, in numbers of parameters; an all-reduce sends everything twice."""
        sent = [each.passes * each.elements for each in self.transfers if each.axis in ("shard", "replicate")]
        return sum(sent) / self.parameters


def plan_at_scale(
    model: Model,
    microbatch: Tree,
    *,
    scale: Scale | None = None,
    method: Method = Method.AUTO,
    dtype: torch.dtype = torch.float32,
    optimizer: Optimizer | KfacOptimizer | None = None,
    offload: Offload = NO_OFFLOAD,
    checkpoint_activations: bool = False,
    memory_budget: float | None = None,
    microbatches: int = 1,
) -> Footprint:
    """Trace one step of ``model`` on ``microbatches`` of the shapes of ``microbatch``, per rank.

    Master weights are float32; the optimizer defaults to AdamW. Of K-FAC the measurement of a microbatch is traced,
    too, as a phase by itself: it happens once in a period, and what it sends and multiplies is not the step's
    (``Footprint.measurement``). Inverting decides by values, and its memory is reckoned. No ``scale``: one device, no
    process group. Only shapes and dtypes are read of the microbatch. What no trace can see is left out: the CUDA
    context, workspaces of cuBLAS and NCCL, fragmentation.

    Guarantees:
      - the kinds add up to the peak;
      - the operations are those of the step, in its order; no memory of their size is used;
      - of more than 3 microbatches no more than 3 are traced, with the result of a trace of all.
    """
    if microbatches < 1:
        raise FdpError(f"microbatches: expected at least 1, got {microbatches}")
    with _ranks(model, scale) as (cut, sharding):
        shapes = tree.map(lambda leaf: torch.empty((), dtype=leaf.dtype).expand(leaf.shape), microbatch)
        parts = abstract_params(cut, sharding)
        gpu = torch.device("cuda")
        timed = sharding is None and torch.cuda.is_available()  # as a run: ranks do not go by times of their own
        times = timing.remembered(gpu, store=timing.default_store()) if timed else None
        plan = make_plan(
            cut, parts, shapes, method=method, memory_budget=memory_budget, dtype=dtype, timings=times, device=gpu
        )

        curvature = None
        if isinstance(optimizer, KfacOptimizer):
            memory = Memory(checkpoint_activations, offload.params)
            curvature = make_kfac(cut, shapes, optimizer, sharding=sharding, dtype=dtype, memory=memory)
        chosen = adamw(1e-3) if optimizer is None else optimizer if curvature is None else curvature.optimizer
        assert isinstance(chosen, Optimizer)
        work = _Work(cut, chosen, curvature, plan, sharding, shapes, offload, checkpoint_activations)
        measured = None if curvature is None else _trace_measurement(work, curvature)

        def traced(count: int) -> Footprint:
            ledger = _trace(work, count)
            size = sum(math.prod(leaf.shape) for leaf in cut.leaves.values())
            found = Footprint(size, _phases(ledger), ledger.transfers(), ledger.flops, plan, ledger.most(Kind.KEPT))
            if curvature is None or measured is None:
                return found
            before = _with_inverses(_phases(measured), inverse_bytes(curvature.plan))
            more = Measurement(measured.transfers(), measured.flops)
            return found._replace(phases=before | found.phases, measurement=more)

        if microbatches <= TRACED:
            return traced(microbatches)
        return continued(traced(TRACED - 1), traced(TRACED), more=microbatches - TRACED)


def continued(before: Footprint, last: Footprint, *, more: int) -> Footprint:
    """``last`` with ``more`` microbatches, each of which sends and multiplies what the last of them added."""
    transfers = tuple(
        b._replace(calls=b.calls + more * (b.calls - a.calls), elements=b.elements + more * (b.elements - a.elements))
        for a, b in zip(before.transfers, last.transfers, strict=True)
    )
    flops = {dtype: count + more * (count - before.flops[dtype]) for dtype, count in last.flops.items()}
    return last._replace(transfers=transfers, flops=flops)


@contextmanager
def _ranks(model: Model, scale: Scale | None) -> Iterator[tuple[Model, Sharding | None]]:
    """The model and its sharding as rank 0 of ranks that are not there sees them."""
    if scale is None:
        yield model, None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise FdpError("plan: found a process group; a plan makes its own of ranks that are not there. Plan before")
    world = math.prod(scale.axes.values())
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        mesh = make_mesh(scale.axes, device_type="cpu")
        cut = over_tensor_axis(model, mesh)
        yield (
            cut,
            make_sharding(cut, mesh, zero=scale.zero, reduce=scale.reduce, reduce_dtype=scale.reduce_dtype),
        )
    finally:
        dist.destroy_process_group()


class _Work(NamedTuple):
    """What is traced, whatever the number of microbatches."""

    model: Model
    optimizer: Optimizer
    curvature: Kfac | None
    plan: Plan
    sharding: Sharding | None
    shapes: Tree
    offload: Offload
    checkpoint_activations: bool


def _phases(ledger: Ledger) -> dict[Phase, tuple[Peak, Peak]]:
    device, host = ledger.peaks(host=False), ledger.peaks(host=True)
    nothing = Peak(0, dict.fromkeys(Kind, 0))
    return {phase: (device[phase], host.get(phase, nothing)) for phase in device}


def _with_inverses(phases: dict[Phase, tuple[Peak, Peak]], inverting: int) -> dict[Phase, tuple[Peak, Peak]]:
    """The peak of the curvature: while it is measured, or while it is inverted, when no activations are held.

    Sums that travel pass for gradients; here they are factors, and so the optimizer's.
    """
    device, host = phases[Phase.CURVATURE]
    factors = device.by_kind[Kind.OPTIMIZER] + device.by_kind[Kind.GRADIENTS]
    device = device._replace(by_kind=device.by_kind | {Kind.OPTIMIZER: factors, Kind.GRADIENTS: 0})
    kept = {kind: size for kind, size in device.by_kind.items() if kind in (Kind.PARAMETERS, Kind.OPTIMIZER)}
    by_kind = dict.fromkeys(Kind, 0) | kept | {Kind.ACTIVATIONS: inverting}
    if sum(by_kind.values()) > device.total:
        device = Peak(sum(by_kind.values()), by_kind)
    return {Phase.CURVATURE: (device, host)}


def _trace(work: _Work, microbatches: int) -> Ledger:
    """Run one step on tensors without memory; the ledger of it."""
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
            sharding=sharding,
            offload=work.offload,
            checkpoint_activations=work.checkpoint_activations,
            checks=Checks.SKIPPED,  # nothing to be looked at
            precondition=sides_of if roots else None,
        )
        after, _ = step(state, batch, key)
        ledger.label(after.params, Kind.PARAMETERS)
    return ledger


def _trace_measurement(work: _Work, curvature: Kfac) -> Ledger:
    """Measure a microbatch's curvature on tensors without memory."""
    ledger = Ledger(_groups(work.sharding))
    with ledger, fused_attention():
        state = _labelled_state(work, ledger)
        data = tree.map(lambda leaf: leaf[0], _data(work, 1))
        mask = torch.ones(work.plan.batch_size, device=DEVICE)
        key = torch.empty(8, dtype=torch.int64, device=DEVICE)
        ledger.begin(Phase.CURVATURE)
        new = measure(state.params, data, mask, key, plan=curvature.plan, memory=curvature.memory)
        ledger.label(new, Kind.OPTIMIZER)
    return ledger


def _data(work: _Work, microbatches: int) -> Tree:
    return tree.map(lambda x: torch.empty((microbatches, *x.shape), dtype=x.dtype, device=DEVICE), work.shapes)


def _labelled_state(work: _Work, ledger: Ledger) -> TrainState:
    """This rank's parts, where they are kept between steps."""
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
        opt = replaced(opt, stored(find(opt), work.curvature.plan.config))
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    ledger.label(params, Kind.PARAMETERS)
    ledger.label(opt, Kind.OPTIMIZER)
    return TrainState(params, opt, (), count)


class _Watch:
    """Names what passes from one part of a step to the next, seen from the functions that it is composed of."""

    def __init__(self, ledger: Ledger, plan: Plan):
        self.ledger = ledger
        self.keeps = plan.kept_bytes > 0
        self.ended = False
        self.start = self.since = ledger.begin(Phase.PASS)

    def model(self, model: Model) -> Model:
        """The same model. Its first block is the first that runs of a microbatch."""
        first, *rest = model.blocks

        def apply(params: Tree, carry: Tree, data: Tree) -> Tree:
            if self.ended:
                self.since = self.ledger.begin(Phase.PASS)
                self.ended = False
            return first.apply(params, carry, data)

        return model._replace(blocks=(first._replace(apply=apply), *rest))

    def style(self, style: ClipStyle) -> ClipStyle:
        """The same style. What is alive when a microbatch is clipped was kept for the sum; what comes of it, is it."""

        def clip(norms: Norms, state: Tree) -> Clip:
            if self.keeps:
                self.ledger.relabel(Kind.KEPT, since=self.since)
            self.since = self.ledger.begin(Phase.SUM)
            self.ledger.begin_at(torch.ops.fdp_kernels.normal.default, Phase.NOISE)
            return style.clip(norms, state)

        def tally(norms: Norms, mask: Tensor, state: Tree) -> Tensor:
            self.ledger.relabel(Kind.GRADIENTS, since=self.since)
            self.ended = True
            return style.tally(norms, mask, state)

        return style._replace(clip=clip, tally=tally)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The same optimizer. What is alive when it is called are sums; what it makes is its state, or an update."""

        def update(grads: Tree, state: Tree, params: Tree, reductions: Reductions = LOCAL) -> tuple[Tree, Tree]:
            self.ledger.relabel(Kind.GRADIENTS, since=self.start)
            self.ledger.begin(Phase.UPDATE)
            self.ledger.default = Kind.GRADIENTS
            updates, after = optimizer.update(grads, state, params, reductions)
            self.ledger.label(after, Kind.OPTIMIZER)
            return updates, after

        return optimizer._replace(update=update)


def _groups(sharding: Sharding | None) -> dict[str, tuple[str, int]]:
    if sharding is None:
        return {}
    axes = (sharding.world, sharding.replicate, sharding.tensor, sharding.shard)
    return {axis.group: (axis.name, axis.size) for axis in axes}
