"""Memory by kind, traffic and flops of one rank for a step at any scale, estimated on any machine.

    peak  = max over phases of (parameters + optimizer + gathered + gradients + kept pairs + activations)
    units = elements sent / elements of the model        ZeRO-2: 2, ZeRO-3: 3 (Rajbhandari et al., arXiv 1910.02054)

The step of :func:`fdp.step.make_train_step` itself is traced, as rank 0 of a fake process group and on tensors that
have shapes but no memory. Nothing is assumed about the step: if it changes, so does the estimate.

    >>> scale, settings = Scale({"shard": 128}, Zero.THREE), StepSettings(method=Method.GHOST, dtype=torch.bfloat16)
    >>> found = plan_at_scale(build("gpt3-175b"), tokens, scale=scale, settings=settings)
    >>> found.device.total / 2**30, found.device.by_kind[MemoryKind.KEPT], found.units
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from fdp import tree
from fdp.estimate.ledger import Ledger, MemoryKind, Peak, Phase, Transfer
from fdp.estimate.trace import TracedWork, trace_measurement, trace_step
from fdp.gradients import timing
from fdp.gradients.execution import Execution, Memory
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.kfac.optimizer import Kfac
from fdp.kfac.private.curvature_sources import KfacOptimizer, make_kfac
from fdp.kfac.state import inversion_bytes
from fdp.model import Model
from fdp.optimizers import Optimizer, adamw
from fdp.parallel.mesh import make_mesh
from fdp.parallel.offload import NO_OFFLOAD, Offload
from fdp.parallel.sharding import Reduce, Sharding, Zero, abstract_params, make_sharding, over_tensor_axis
from fdp.types import FdpError, Tree

TRACED_MICROBATCHES = 3
"""Microbatches that are traced. From the third on a step holds no more memory, and each sends what the third did."""


class Scale(NamedTuple):
    """The number of ranks along each axis of the mesh, and the ZeRO stage over ``shard``."""

    axes: Mapping[str, int]
    zero: Zero
    reduce: Reduce | None = None
    reduce_dtype: torch.dtype | None = None


class StepSettings(NamedTuple):
    """The settings of a step that change its memory, traffic or flops. ``optimizer`` None: AdamW.

    ``in_place``: the state is donated, the head is fused with the loss, and one pass over every leaf ends the step, as
    with compiled blocks on a GPU.
    """

    method: Method = Method.AUTO
    dtype: torch.dtype = torch.float32
    optimizer: Optimizer | KfacOptimizer | None = None
    offload: Offload = NO_OFFLOAD
    checkpoint_activations: bool = False
    memory_budget: float | None = None
    microbatches: int = 1
    sum_dtype: torch.dtype = torch.float64
    stored_dtype: torch.dtype | None = None
    in_place: bool = False


class Measurement(NamedTuple):
    """Traffic and flops of one rank when K-FAC measures curvature, without inverses and gathered columns."""

    transfers: tuple[Transfer, ...]
    flops: dict[torch.dtype, float]


class Footprint(NamedTuple):
    """Memory, traffic and flops of one rank in a step. ``phases`` holds the peaks on the device and on the host.

    ``kept`` is the most bytes that the device stores at any time between norms and sum. ``measurement`` is K-FAC's
    extra work, once in a period; None for other optimizers.
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
        """The phase in which the device holds most."""
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
    model: Model, microbatch: Tree, *, scale: Scale | None = None, settings: StepSettings | None = None
) -> Footprint:
    """Trace one step of ``model``, per rank, on microbatches with the shapes and dtypes of ``microbatch``.

    Without a ``scale``: one device and no process group. Master weights are float32. For K-FAC the measurement of a
    microbatch is traced too, as a phase of its own: it happens once in a period, and its traffic and flops are
    reported apart from the step's (``Footprint.measurement``). Inverting depends on values, so its memory is computed,
    not traced. Memory that no trace can see is left out: the CUDA context, workspaces of cuBLAS and NCCL, and
    fragmentation. Blocks are traced as they are: compiled ones may store less, as those of Llama do.

    Guarantees:
      - the kinds add up to the peak;
      - the operations are those of the step, in its order; no memory of their size is used;
      - at most 3 microbatches are traced, with the result of a trace of all.
    """
    settings = StepSettings() if settings is None else settings
    if settings.microbatches < 1:
        raise FdpError(f"microbatches: expected at least 1, got {settings.microbatches}")
    with _fake_ranks(model, scale) as (local, sharding):
        shapes = tree.map(lambda leaf: torch.empty((), dtype=leaf.dtype).expand(leaf.shape), microbatch)
        work = _make_work(local, sharding, shapes, settings)
        measured = None if work.curvature is None else trace_measurement(work, work.curvature)

        def traced(count: int) -> Footprint:
            return _footprint(work, trace_step(work, count), measured)

        if settings.microbatches <= TRACED_MICROBATCHES:
            return traced(settings.microbatches)
        before, last = traced(TRACED_MICROBATCHES - 1), traced(TRACED_MICROBATCHES)
        return extrapolate(before, last, more=settings.microbatches - TRACED_MICROBATCHES)


def extrapolate(before: Footprint, last: Footprint, *, more: int) -> Footprint:
    """Add ``more`` microbatches to ``last``, each with the traffic and flops that ``last`` has beyond ``before``."""
    transfers = tuple(
        b._replace(calls=b.calls + more * (b.calls - a.calls), elements=b.elements + more * (b.elements - a.elements))
        for a, b in zip(before.transfers, last.transfers, strict=True)
    )
    flops = {dtype: count + more * (count - before.flops[dtype]) for dtype, count in last.flops.items()}
    return last._replace(transfers=transfers, flops=flops)


def _make_work(model: Model, sharding: Sharding | None, shapes: Tree, settings: StepSettings) -> TracedWork:
    gpu = torch.device("cuda")
    timed = sharding is None and torch.cuda.is_available()  # as in a run: sharded plans do not use measured times
    plan = make_plan(
        model,
        abstract_params(model, sharding),
        shapes,
        method=settings.method,
        memory_budget=settings.memory_budget,
        dtype=settings.dtype,
        stored_dtype=settings.stored_dtype,
        timings=timing.load_times(gpu, store=timing.default_store()) if timed else None,
        device=gpu,
    )
    curvature: Kfac | None = None
    optimizer = adamw(1e-3) if settings.optimizer is None else settings.optimizer
    if isinstance(optimizer, KfacOptimizer):
        memory = Memory(settings.checkpoint_activations, settings.offload.params)
        execution = Execution(sharding, memory)
        curvature = make_kfac(model, shapes, optimizer, execution=execution, dtype=settings.dtype)
        optimizer = curvature.optimizer
    return TracedWork(
        model,
        optimizer,
        curvature,
        plan,
        sharding,
        shapes,
        settings.offload,
        settings.checkpoint_activations,
        settings.sum_dtype,
        settings.in_place,
    )


def _footprint(work: TracedWork, ledger: Ledger, measured: Ledger | None) -> Footprint:
    size = sum(math.prod(leaf.shape) for leaf in work.model.leaves.values())
    kept = ledger.most(MemoryKind.KEPT)
    found = Footprint(size, _phases(ledger), ledger.transfers(), ledger.flops, work.plan, kept)
    if work.curvature is None or measured is None:
        return found
    before = _with_inverses(_phases(measured), inversion_bytes(work.curvature.plan))
    measurement = Measurement(measured.transfers(), measured.flops)
    return found._replace(phases=before | found.phases, measurement=measurement)


@contextmanager
def _fake_ranks(model: Model, scale: Scale | None) -> Iterator[tuple[Model, Sharding | None]]:
    """Return the model and its sharding as rank 0 of a fake process group."""
    if scale is None:
        yield model, None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise FdpError("plan: found a process group; a plan creates a fake one of its own. Plan before joining ranks")
    world = math.prod(scale.axes.values())
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        mesh = make_mesh(scale.axes, device_type="cpu")
        local = over_tensor_axis(model, mesh)
        yield (
            local,
            make_sharding(local, mesh, zero=scale.zero, reduce=scale.reduce, reduce_dtype=scale.reduce_dtype),
        )
    finally:
        dist.destroy_process_group()


def _phases(ledger: Ledger) -> dict[Phase, tuple[Peak, Peak]]:
    device, host = ledger.peaks(host=False), ledger.peaks(host=True)
    nothing = Peak(0, dict.fromkeys(MemoryKind, 0))
    return {phase: (device[phase], host.get(phase, nothing)) for phase in device}


def _with_inverses(phases: dict[Phase, tuple[Peak, Peak]], inverting: int) -> dict[Phase, tuple[Peak, Peak]]:
    """Return the curvature peak: while it is measured, or while it is inverted, when no activations are held.

    The ledger labels reduced sums as gradients; here they are factors, which belong to the optimizer.
    """
    device, host = phases[Phase.CURVATURE]
    factors = device.by_kind[MemoryKind.OPTIMIZER] + device.by_kind[MemoryKind.GRADIENTS]
    device = device._replace(by_kind=device.by_kind | {MemoryKind.OPTIMIZER: factors, MemoryKind.GRADIENTS: 0})
    kept = {
        kind: size for kind, size in device.by_kind.items() if kind in (MemoryKind.PARAMETERS, MemoryKind.OPTIMIZER)
    }
    by_kind = dict.fromkeys(MemoryKind, 0) | kept | {MemoryKind.ACTIVATIONS: inverting}
    if sum(by_kind.values()) > device.total:
        device = Peak(sum(by_kind.values()), by_kind)
    return {Phase.CURVATURE: (device, host)}
