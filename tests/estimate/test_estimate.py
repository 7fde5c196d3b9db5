"""Plans against sizes worked out by hand, against a step that runs, and against bytes counted between real ranks."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import keys, tree
from fdp.checks.first_call import Checks
from fdp.estimate import estimate
from fdp.estimate.estimate import Footprint, Scale, StepSettings, plan_at_scale
from fdp.estimate.ledger import Ledger, MemoryKind, Phase
from fdp.fast.compile_modes import make_execution
from fdp.gradients.execution import Execution
from fdp.gradients.plan import Method, make_plan
from fdp.kfac.config import KfacConfig
from fdp.kfac.factor_storage import Where
from fdp.kfac.private.curvature_sources import KfacOptimizer, Synthetic, make_kfac
from fdp.model import Model
from fdp.models import GPTConfig, LlamaConfig, gpt, llama
from fdp.optimizers import adamw, lamb
from fdp.parallel.mesh import make_mesh
from fdp.parallel.offload import NO_OFFLOAD, Offload
from fdp.parallel.sharded_init import init_params
from fdp.parallel.sharding import Reduce, Zero, abstract_params, make_sharding, over_tensor_axis
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import init_state, make_train_step
from fdp.types import Batch, FdpError
from tests.fake_ranks import fake_ranks
from tests.ranks import run_on_ranks

# Every leaf has many times 8 rows and 512 bytes, so that parts are equal and rounding is small.
WIDE = GPTConfig(layers=2, width=512, heads=8, context=64, vocab_size=1024, tied=False)
SMALL = GPTConfig(layers=1, width=16, heads=2, context=8, vocab_size=24, tied=False)
ALL = Offload(params=True, grads=True, optimizer=True)
STATE = (MemoryKind.PARAMETERS, MemoryKind.OPTIMIZER)
# Stage, axes, method and microbatches of what two ranks run; 13 microbatches are never traced whole.
RUNS = (
    (Zero.NONE, {"shard": 2}, Method.AUTO, 1),
    (Zero.TWO, {"shard": 2}, Method.AUTO, 13),
    (Zero.THREE, {"shard": 2}, Method.AUTO, 13),
    (Zero.THREE, {"shard": 2}, Method.GHOST, 1),
    (Zero.THREE, {"shard": 2}, Method.NONE, 2),
    (Zero.THREE, {"replicate": 2}, Method.AUTO, 1),
    (Zero.THREE, {"tensor": 2}, Method.GHOST_BK, 1),
)


def tokens(model: Model, samples: int = 2) -> dict[str, torch.Tensor]:
    assert model.context is not None
    return {"tokens": torch.zeros((), dtype=torch.int64).expand(samples, model.context + 1)}


def size_of(model: Model, block: str = "") -> int:
    return sum(math.prod(spec.shape) for path, spec in model.leaves.items() if path.startswith(block))


def planned(
    config: GPTConfig = WIDE,
    axes: dict[str, int] | None = None,
    zero: Zero = Zero.THREE,
    *,
    samples: int = 2,
    **settings: Any,
) -> Footprint:
    model = gpt(config)
    scale = None if axes is None else Scale(axes, zero)
    return plan_at_scale(model, tokens(model, samples), scale=scale, settings=StepSettings(**settings))


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("offload", [NO_OFFLOAD, ALL], ids=["device", "offload"])
def test_kinds_add_up_to_the_peak(method, offload):
    found = planned(axes={"shard": 8}, method=method, offload=offload, dtype=torch.bfloat16)
    for device, host in found.phases.values():
        assert device.total == sum(device.by_kind.values())
        assert host.total == sum(host.by_kind.values())
        assert min(device.by_kind.values()) >= 0
    assert found.device.total == max(device.total for device, _ in found.phases.values())
    assert Phase.UPDATE in found.phases


def test_a_step_on_one_device_holds_its_state_once_and_writes_a_second_one():
    model = gpt(WIDE)
    found = planned()
    before, after = found.phases[Phase.PASS][0].by_kind, found.phases[Phase.UPDATE][0].by_kind
    size = 4 * size_of(model)
    assert before[MemoryKind.PARAMETERS] == pytest.approx(size, rel=1e-3)
    assert before[MemoryKind.OPTIMIZER] == pytest.approx(2 * size, rel=1e-3)
    assert after[MemoryKind.OPTIMIZER] == pytest.approx(4 * size, rel=1e-3)
    assert found.transfers == ()
    assert found.units == 0


@pytest.mark.parametrize("zero", [Zero.TWO, Zero.THREE])
def test_a_rank_of_eight_holds_an_eighth_of_the_state(zero):
    whole = planned(axes={"shard": 8}, zero=Zero.NONE).phases[Phase.PASS][0].by_kind
    part = planned(axes={"shard": 8}, zero=zero).phases[Phase.PASS][0].by_kind
    for kind in STATE:
        assert part[kind] == pytest.approx(whole[kind] / 8, rel=0.02)


def test_offload_moves_the_state_to_the_host():
    here = planned(axes={"shard": 8})
    there = planned(axes={"shard": 8}, offload=ALL)
    on_device, on_host = there.phases[Phase.PASS]
    for kind in STATE:
        assert on_device.by_kind[kind] <= 512  # a step count
        assert on_host.by_kind[kind] == pytest.approx(here.phases[Phase.PASS][0].by_kind[kind], rel=1e-3)
        assert here.host.by_kind[kind] == 0
    assert there.phases[Phase.UPDATE][0].total < 2**20 < there.phases[Phase.UPDATE][1].total
    assert there.transfers == here.transfers
    assert here.flops[torch.float32] == there.flops[torch.float32]


def test_traffic_in_units_of_the_parameters():
    model = gpt(WIDE)
    whole, head = size_of(model), size_of(model, "head.")

    def elements(zero: Zero, method: Method = Method.AUTO) -> dict[str, int]:
        found = planned(axes={"shard": 8}, zero=zero, method=method, dtype=torch.bfloat16)
        # what is not a leaf is a few numbers per sample
        big = [each for each in found.transfers if each.elements > 1000]
        assert {each.axis for each in big} == {"shard"}
        assert found.units == pytest.approx(sum(each.passes * each.elements for each in big) / whole, abs=1e-4)
        return {each.collective: each.elements for each in big}

    assert elements(Zero.NONE) == {"all-reduce": whole}
    assert elements(Zero.TWO) == {"all-gather": whole, "reduce-scatter": whole}
    # the last block's backward follows its forward: one gather for both
    assert elements(Zero.THREE) == {"all-gather": 2 * whole - head, "reduce-scatter": whole}
    assert elements(Zero.THREE, Method.GHOST) == {"all-gather": 3 * whole - head, "reduce-scatter": whole}


def test_gathers_use_the_compute_dtype_and_sums_their_own_or_the_reduce_dtype():
    model = gpt(WIDE)
    scale = Scale({"shard": 8}, Zero.THREE)

    def dtypes(scale: Scale) -> dict[str, torch.dtype]:
        found = plan_at_scale(model, tokens(model), scale=scale, settings=StepSettings(dtype=torch.bfloat16))
        return {each.collective: each.dtype for each in found.transfers if each.elements > 1000}

    assert dtypes(scale) == {"all-gather": torch.bfloat16, "reduce-scatter": torch.float64}
    assert dtypes(scale._replace(reduce_dtype=torch.float32))["reduce-scatter"] == torch.float32


def test_the_kept_bytes_are_those_of_the_plan():
    for method in (Method.GHOST_BK, Method.MATERIALIZE):
        found = planned(axes={"shard": 8}, method=method)
        # an input that two leaves share is kept once and was counted twice
        assert 0.75 * found.plan.stored_bytes < found.kept < 1.1 * found.plan.stored_bytes
    second = planned(axes={"shard": 8}, method=Method.GHOST)
    assert all(device.by_kind[MemoryKind.KEPT] == 0 for device, _ in second.phases.values())


def test_zero_3_gathers_a_few_blocks_and_zero_2_all_of_them():
    deep = WIDE._replace(layers=8)
    held = {
        zero: planned(deep, {"shard": 8}, zero).phases[Phase.PASS][0].by_kind[MemoryKind.GATHERED]
        for zero in (Zero.TWO, Zero.THREE)
    }
    assert held[Zero.THREE] < 0.4 * held[Zero.TWO]
    assert held[Zero.TWO] >= 4 * size_of(gpt(deep))


def test_activation_checkpointing_holds_fewer_activations():
    deep = WIDE._replace(layers=6)

    def activations(*, checkpoint: bool) -> int:
        found = planned(deep, samples=64, method=Method.NONE, checkpoint_activations=checkpoint)
        return found.phases[Phase.PASS][0].by_kind[MemoryKind.ACTIVATIONS]

    assert activations(checkpoint=True) < 0.6 * activations(checkpoint=False)


@pytest.mark.parametrize(
    ("method", "fused"),
    [(Method.NONE, True), (Method.GHOST_BK, True), (Method.AUTO, True), (Method.MATERIALIZE, False)],
)
def test_a_compiled_step_is_planned_with_its_head_fused_with_the_loss(method, fused):
    """Its logits exist once, in the compute dtype; others are held with their gradient, and in float32."""
    many_words = SMALL._replace(context=64, vocab_size=8192)
    eager, compiled = (
        planned(many_words, samples=16, method=method, dtype=torch.bfloat16, in_place=in_place)
        for in_place in (False, True)
    )
    logits = 2 * 16 * 64 * 8192
    assert eager.phases[Phase.PASS][0].total > 4 * logits
    assert logits < compiled.phases[Phase.PASS][0].total
    assert (compiled.phases[Phase.PASS][0].total < 2 * logits) == fused
    assert compiled.flops == eager.flops


@pytest.mark.parametrize(
    ("zero", "method"), [(Zero.NONE, Method.NONE), (Zero.TWO, Method.AUTO), (Zero.THREE, Method.AUTO)]
)
def test_many_microbatches_are_extrapolated_from_three(zero, method, monkeypatch):
    thin = WIDE._replace(layers=1)
    short = planned(thin, {"shard": 8}, zero, method=method, microbatches=5)
    monkeypatch.setattr(estimate, "TRACED_MICROBATCHES", 5)
    whole = planned(thin, {"shard": 8}, zero, method=method, microbatches=5)
    assert short.transfers == whole.transfers
    assert short.flops == whole.flops
    # metrics of five microbatches are a few numbers more than those of three
    assert short.device.total == pytest.approx(whole.device.total, rel=1e-3)


def test_a_plan_leaves_no_process_group_and_refuses_one():
    planned(SMALL, {"shard": 2})
    assert not dist.is_initialized()
    with fake_ranks(2), pytest.raises(FdpError, match="found a process group"):
        planned(SMALL, {"shard": 2})
    with pytest.raises(FdpError, match="tensor axis that divides the model's 2 heads"):
        planned(SMALL, {"tensor": 3})
    assert not dist.is_initialized()
    with pytest.raises(FdpError, match="at least 1, got 0"):
        planned(SMALL, microbatches=0)


def test_any_model_and_optimizer_can_be_planned():
    model = llama(LlamaConfig(layers=2, width=64, heads=4, key_heads=2, hidden=96, context=16, vocab_size=40))
    scale = Scale({"replicate": 2, "shard": 2, "tensor": 2}, Zero.THREE, Reduce.PER_STEP)
    found = plan_at_scale(
        model, tokens(model), scale=scale, settings=StepSettings(optimizer=lamb(1e-3), dtype=torch.bfloat16)
    )
    assert {"replicate", "shard", "tensor"} <= {each.axis for each in found.transfers}
    assert found.parameters == size_of(model)


SHARDED = Scale({"shard": 2}, Zero.THREE)


@pytest.mark.parametrize(
    ("private", "scale"),
    [
        (False, SHARDED),
        (True, None),
        pytest.param(False, None, marks=pytest.mark.slow),
        pytest.param(True, SHARDED, marks=pytest.mark.slow),
    ],
)
def test_kfac_is_planned_with_its_state_and_a_phase_for_its_curvature(private: bool, scale: Scale | None):
    model = gpt(WIDE)
    config = KfacConfig(store=Where.DEVICE)
    optimizer = KfacOptimizer(0.1, config, Synthetic() if private else None)
    method = Method.GHOST_BK if private else Method.NONE
    found = plan_at_scale(model, tokens(model), scale=scale, settings=StepSettings(method=method, optimizer=optimizer))
    plain = plan_at_scale(model, tokens(model), scale=scale, settings=StepSettings(method=method))
    assert next(iter(found.phases)) is Phase.CURVATURE
    assert Phase.CURVATURE not in plain.phases
    assert plain.measurement is None
    assert found.measurement is not None
    assert found.measurement.flops[torch.float32] > 0.5 * plain.flops[torch.float32]  # a backward at least
    assert bool(found.measurement.transfers) == (scale is not None)
    assert all(peak.total == sum(peak.by_kind.values()) for pair in found.phases.values() for peak in pair)
    if scale is None:  # the state of a run that exists
        kfac = make_kfac(model, tokens(model), optimizer)
        state = kfac.optimizer.init({path: leaf for path, leaf in tree.flatten(model.init(keys.key(0))).items()})
        held = sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(state))
        assert found.phases[Phase.PASS][0].by_kind[MemoryKind.OPTIMIZER] == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_plan_is_the_memory_of_a_step_that_runs(microbatches):
    """Real tensors in a ledger: the same storages live and die. Plain training, which needs no workspace."""
    model, optimizer = gpt(WIDE), adamw(1e-3)
    predicted = planned(method=Method.NONE, microbatches=microbatches).phases
    mechanism = Mechanism(poisson(100, expected_batch_size=10), flat(max_norm=1.0), 0.0)
    state = init_state(model, model.init(keys.key(0)), optimizer, mechanism)
    shape = (microbatches, 2, WIDE.context + 1)
    batch = Batch({"tokens": torch.zeros(shape, dtype=torch.int64)}, torch.ones(shape[:2]))
    chosen = make_plan(model, abstract_params(model, None), tokens(model), method=Method.NONE)
    step = make_train_step(model, optimizer, mechanism=mechanism, plan=chosen)
    ledger = Ledger({})
    with ledger:
        ledger.begin(Phase.PASS)
        views = tree.map(lambda leaf: leaf.view_as(leaf), (state, batch))  # seen by the ledger, as every view is
        step(views[0], views[1], keys.key(1))
    measured = ledger.peaks(host=True)[Phase.PASS].total
    assert max(device.total for device, _ in predicted.values()) == pytest.approx(measured, rel=0.01)


class Counted(TorchDispatchMode):
    """Calls and bytes of every collective on real tensors, by name and dtype."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[tuple[str, str, str]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            name = func.__name__.split(".")[0]
            self.seen[name, str(args[0].dtype), "bytes"] += max(args[0].nbytes, out.nbytes)
            self.seen[name, str(args[0].dtype), "calls"] += 1
        return out


def count_on_rank(zero: Zero, axes: dict[str, int], method: Method, microbatches: int) -> dict[Any, int]:
    mesh = make_mesh(axes, device_type="cpu")
    model, optimizer = over_tensor_axis(gpt(SMALL), mesh), adamw(1e-3)
    sharding = make_sharding(model, mesh, zero=zero)
    chosen = make_plan(model, abstract_params(model, sharding), tokens(model), method=method)
    z = 0.0 if method is Method.NONE else 1.0
    mechanism = Mechanism(poisson(100, expected_batch_size=10), flat(max_norm=1.0), z)
    options: dict[str, Any] = {"plan": chosen, "execution": Execution(sharding), "checks": Checks.SKIPPED}
    step = make_train_step(model, optimizer, mechanism=mechanism, **options)
    params = init_params(model, keys.key(0), sharding)
    state = init_state(model, params, optimizer, mechanism, execution=make_execution(sharding=sharding))
    shape = (microbatches, 2, SMALL.context + 1)
    share: dict[str, Any] = {"rank": sharding.rank, "ranks": sharding.ranks}
    tokens_of = {"tokens": torch.zeros(shape, dtype=torch.int64)}
    batch = trusted_batch(tokens_of, torch.ones(shape[:2]), mechanism.sampling, step=0, **share)
    with Counted() as counted:
        step(state, batch, keys.key(1))
    return dict(counted.seen)


def count_all() -> list[dict[Any, int]]:
    return [count_on_rank(*run) for run in RUNS]


@pytest.mark.long
@pytest.mark.ranks
def test_the_bytes_of_a_plan_are_those_that_two_ranks_send():
    names = {
        "all-gather": "all_gather_into_tensor_out",
        "reduce-scatter": "reduce_scatter_tensor",
        "all-reduce": "all_reduce",
    }
    expected = []
    for zero, axes, method, microbatches in RUNS:
        seen: Counter[tuple[str, str, str]] = Counter()
        for each in planned(SMALL, axes, zero, method=method, microbatches=microbatches).transfers:
            seen[names[each.collective], str(each.dtype), "bytes"] += each.bytes
            seen[names[each.collective], str(each.dtype), "calls"] += each.calls
        expected.append(dict(seen))
    for rank in run_on_ranks(count_all, 2):
        assert rank == expected
