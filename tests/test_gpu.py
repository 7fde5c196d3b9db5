"""On a GPU: offload keeps what it says on the CPU and changes no number; a mesh of one rank over NCCL does neither.

Compiled blocks and recorded steps are the step; in half precision no sample moves the sum by more than its bound.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fdp import keys, ops, optimizers, tree
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.costs import NormBy
from fdp.gradients.execution import Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, Plan, add_smaller_sizes, make_plan
from fdp.model import from_loss
from fdp.models import GPTConfig, gpt
from fdp.parallel.dtensors import localize
from fdp.parallel.mesh import make_mesh
from fdp.parallel.offload import NO_OFFLOAD, Offload
from fdp.parallel.sharded_init import init_params
from fdp.parallel.sharding import Zero, abstract_params, make_sharding
from fdp.privacy import clipping
from fdp.privacy.clipping import clip_to
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.microbatches import group_rows, pad_to_rows
from fdp.privacy.sampling import poisson, sample_batch, trusted_batch
from fdp.run.compare import Stage, compare, first_over
from fdp.step import init_state, make_train_step
from fdp.types import Batch, Clip, TrainState
from tests.adversary import IN_8_BITS, forced
from tests.conftest import share, summed
from tests.run.test_compare import half_the_deviation, observed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MODEL = gpt(GPTConfig(layers=3, width=64, heads=4, context=32, vocab_size=211))
DATA = {"tokens": torch.randint(0, 211, (64, 33), generator=torch.Generator().manual_seed(0))}
SAMPLING, EIGHT = poisson(64, expected_batch_size=12), poisson(64, expected_batch_size=8)
ALL = Offload(params=True, grads=True, optimizer=True)


@pytest.mark.parametrize("method", ["none", "auto", "auto --stored-dtype int8"])
def test_the_command_records_steps_of_any_number_of_microbatches(method, tmp_path):
    """Run the command of docs/fast_on_one_gpu.md; the number of microbatches varies from step to step."""
    out = tmp_path / "run"
    options = "--dtype bfloat16 --compile block --cuda-graph --steps 24 --batch-size 24 --microbatch 12 --seed 3"
    command = [sys.executable, "-m", "fdp", "train", *options.split(), "--method", *method.split(), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    assert len({-(-row["samples"] // 12) for row in rows}) > 1, "the number of microbatches never varied"
    assert rows[-1]["loss"] < rows[0]["loss"]


def train(
    device: str,
    *,
    offload: Offload = NO_OFFLOAD,
    zero: Zero | None = None,
    method: Method = Method.AUTO,
    dtype: torch.dtype = torch.float32,
    compile: Compile = Compile.NONE,
    steps: int = 3,
) -> tuple[TrainState, dict[str, Any]]:
    mechanism = Mechanism(SAMPLING, clipping.flat(max_norm=0.3), 0.0 if method is Method.NONE else 1.0)
    optimizer, root, there = optimizers.sgd(0.1, momentum=0.9), keys.key(0), torch.device(device)
    sharding = None if zero is None else make_sharding(MODEL, make_mesh({"shard": 1}, device_type=device), zero=zero)
    key = root.to("cpu" if offload.params else there)
    params = MODEL.init(key) if sharding is None else init_params(MODEL, key, sharding)
    state = init_state(
        MODEL, params, optimizer, mechanism, execution=make_execution(sharding=sharding, offload=offload), device=there
    )
    example = {"tokens": DATA["tokens"][:6].to(there)}
    plan = make_plan(MODEL, abstract_params(MODEL, sharding, device=there), example, method=method, dtype=dtype)
    step = make_train_step(
        MODEL,
        optimizer,
        mechanism=mechanism,
        plan=plan,
        execution=make_execution(sharding=sharding, offload=offload, compile=compile),
    )
    losses, norms = [], []
    for t in range(steps):
        batch = sample_batch(DATA, SAMPLING, root, step=t, microbatch_size=6)
        state, metrics = step(state, tree.map(lambda leaf: leaf.to(there), batch), root.to(there))
        real = metrics.mask > 0
        losses.append(metrics.losses[real].cpu())
        norms.append(metrics.norms[real].cpu())
    flat = {path: leaf.cpu() for path, leaf in tree.flatten(localize(state.params)).items()}
    return localize(state), {"losses": torch.cat(losses), "norms": torch.cat(norms), **flat}


def assert_same(got: dict[str, Any], expected: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    for what, value in expected.items():
        torch.testing.assert_close(
            got[what],
            value,
            rtol=tolerance,
            equal_nan=True,
            atol=tolerance,
            msg=lambda m, w=what: f"{w}: {m}",
        )


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return train("cuda")[1]


def test_the_gpu_computes_what_the_cpu_computes(plain):
    assert_same(plain, train("cpu")[1], tolerance=1e-4)


@pytest.mark.parametrize("offload", [ALL, Offload(params=True), Offload(grads=True), Offload(optimizer=True)], ids=repr)
def test_offload_changes_no_number_and_keeps_what_it_says_on_the_cpu(offload, plain):
    state, got = train("cuda", offload=offload)
    assert {leaf.device.type for leaf in tree.leaves(state.params)} == {"cpu" if offload.params else "cuda"}
    assert {leaf.device.type for leaf in tree.leaves(state.opt)} == {"cpu" if offload.optimizer else "cuda"}
    assert_same(got, plain)


@pytest.mark.parametrize("method", [Method.NONE, Method.GHOST, Method.MATERIALIZE])
def test_every_method_offloads(method):
    assert_same(train("cuda", offload=ALL, method=method)[1], train("cuda", method=method)[1])


@pytest.mark.parametrize("zero", list(Zero))
@pytest.mark.parametrize("offload", [NO_OFFLOAD, ALL], ids=["device", "offload"])
def test_a_mesh_of_one_rank_over_nccl_is_the_same_as_none(zero, offload, plain):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        state, got = train("cuda", zero=zero, offload=offload)
    finally:
        dist.destroy_process_group()
    assert {leaf.device.type for leaf in tree.leaves(state.params)} == {"cpu" if offload.params else "cuda"}
    assert_same(got, plain)


@pytest.mark.parametrize("offload", [NO_OFFLOAD, ALL], ids=["here", "offload"])
def test_compiled_equals_eager_also_with_offload(plain, offload):
    assert_same(train("cuda", compile=Compile.STEP, offload=offload)[1], plain)


def test_offload_takes_less_of_the_gpu():
    big = gpt(GPTConfig(layers=8, width=512, heads=8, context=32, vocab_size=211))
    peaks = []
    for offload in (NO_OFFLOAD, ALL):
        mechanism = Mechanism(SAMPLING, clipping.flat(max_norm=0.3), 0.0)
        optimizer, there = optimizers.adamw(1e-2), torch.device("cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        params = big.init(keys.key(0) if offload.params else keys.key(0).to(there))
        state = init_state(big, params, optimizer, mechanism, execution=make_execution(offload=offload), device=there)
        del params
        batch = sample_batch(DATA, SAMPLING, keys.key(1), step=0, microbatch_size=4)
        batch = tree.map(lambda leaf: leaf.to("cuda"), batch)
        example = {"tokens": batch.data["tokens"][0]}
        plan = make_plan(big, abstract_params(big, None, device=there), example, method=Method.NONE)
        step = make_train_step(
            big, optimizer, mechanism=mechanism, plan=plan, execution=make_execution(offload=offload)
        )
        torch.cuda.reset_peak_memory_stats()
        step(state, batch, keys.key(2).to(there))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del state, step
    whole, little = peaks
    assert little < whole / 4


# ---------------------------------------------------------------- compiled blocks, recorded steps

SMALL = gpt(GPTConfig(layers=2, width=64, heads=4, context=32, vocab_size=211))
FAST = [Method.NONE, Method.GHOST_BK, Method.FLASH, Method.FLASH_BK, Method.AUTO]
TWICE = (Method.FLASH, 0.0)  # without room: direct or symmetric norms, then a second backward


@pytest.fixture(scope="module")
def shared() -> CompiledRunner:
    """One set of compiled blocks for all tests of this file."""
    return CompiledRunner()


def batch_of(seed: int, *, microbatches: int = 2, size: int = 4, step: int | None = None) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 211, (microbatches, size, 33), generator=draw).cuda()
    mask = torch.ones(microbatches, size, device="cuda")
    mask[-1, -1] = 0
    return trusted_batch({"tokens": tokens}, mask, EIGHT, step=step)


def fresh_state(seed: int = 0, z: float = 1.0, optimizer: Any = None) -> tuple[Any, Mechanism, TrainState]:
    optimizer = optimizers.adamw(1e-2, eps=1e-3, weight_decay=0.1) if optimizer is None else optimizer
    mechanism = Mechanism(EIGHT, clipping.flat(max_norm=0.3), z)
    params = SMALL.init(keys.key(seed).cuda())
    return optimizer, mechanism, init_state(SMALL, params, optimizer, mechanism)


def step_of(
    method: Method,
    dtype: torch.dtype,
    compile: Compile,
    *,
    runner: CompiledRunner,
    cuda_graph: bool = False,
    budget: float | None = None,
    sizes: tuple[int, ...] = (4,),
    optimizer: Any = None,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> tuple[Any, TrainState]:
    optimizer, mechanism, state = fresh_state(z=0.0 if method is Method.NONE else 1.0, optimizer=optimizer)
    example = {"tokens": batch_of(0, size=sizes[0]).data["tokens"][0]}
    plan = make_plan(SMALL, state.params, example, method=method, memory_budget=budget, dtype=dtype)
    plan = add_smaller_sizes(change(plan), SMALL, state.params, example, sizes=sizes[1:])
    step = make_train_step(
        SMALL,
        optimizer,
        mechanism=mechanism,
        plan=plan,
        execution=share(make_execution(compile=compile, cuda_graph=cuda_graph), runner),
        donate=("state",),
    )
    return step, state


KEY = keys.key(9)
"""Of the whole run: a step folds its own number in."""


def results(step: Any, state: TrainState, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Metrics as they are after the last step, not as they were after theirs."""
    seen = []
    for batch in batches:
        state, metrics = step(state, batch, KEY.cuda())
        seen.append(metrics)
    found = {f"losses {t}": m.losses for t, m in enumerate(seen)} | {f"norms {t}": m.norms for t, m in enumerate(seen)}
    return found | {path: leaf.clone() for path, leaf in tree.flatten(state.params).items()}


@pytest.mark.parametrize(
    ("method", "budget", "dtype"),
    [
        *((method, None, torch.bfloat16) for method in FAST),
        (*TWICE, torch.bfloat16),
        *((method, None, torch.float32) for method in (Method.NONE, Method.GHOST_BK, Method.AUTO)),
    ],
)
def test_compiled_blocks_in_a_recorded_step_take_the_same_steps(method, budget, dtype, shared):
    batches = [batch_of(t) for t in range(4)]
    found = results(*step_of(method, dtype, Compile.BLOCK, runner=shared, cuda_graph=True, budget=budget), batches)
    expected = results(*step_of(method, dtype, Compile.NONE, runner=shared, budget=budget), batches)
    half = dtype == torch.bfloat16
    for what, value in expected.items():
        metric = what.startswith(("losses", "norms"))
        rtol, atol = ((2e-2, 1e-3) if metric else (2e-2, 1e-2)) if half else (1e-4, 1e-5)
        torch.testing.assert_close(
            found[what], value, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, w=what: f"{w}: {m}"
        )


def in_8_bits(plan: Plan) -> Plan:
    """Return the plan with every product's gradients in 8 bits, those of the tied head included."""
    rules: dict[str, set[str]] = {}
    for use in (use for block in plan.uses for use in block):
        rules.setdefault(use.path, set()).add(use.rule)
    found = forced(plan, *IN_8_BITS, leaves=[path for path, of in rules.items() if "linear" in of])
    assert sum(choice.norm is NormBy.KEEP_INT8 for choice in found.choices.values()) == 9
    return found


@pytest.mark.parametrize("sizes", [(4,), (8, 4, 2)])
def test_steps_with_gradients_in_8_bits_are_nearly_those_without(sizes, shared):
    how = {"runner": shared, "sizes": sizes}
    batches = [batch_of(t, size=sizes[0]) for t in range(4)]
    exact = results(*step_of(Method.AUTO, torch.bfloat16, Compile.NONE, **how), batches)
    for compile, recorded in ((Compile.NONE, False), (Compile.BLOCK, False), (Compile.BLOCK, True)):
        step = step_of(Method.AUTO, torch.bfloat16, compile, cuda_graph=recorded, change=in_8_bits, **how)
        found = results(*step, batches)
        for what, value in exact.items():
            near = 1e-3 if what.startswith(("losses", "norms")) else 1e-2
            torch.testing.assert_close(
                found[what], value, rtol=2e-2, atol=near, equal_nan=True, msg=lambda m, w=what: f"{w}: {m}"
            )


def test_a_recorded_step_is_the_step_with_new_data_new_keys_and_other_shapes(shared):
    batches = [batch_of(t, microbatches=1 if t in (3, 4, 6) else 2) for t in range(8)]
    found = results(*step_of(Method.AUTO, torch.bfloat16, Compile.BLOCK, runner=shared, cuda_graph=True), batches)
    expected = results(*step_of(Method.AUTO, torch.bfloat16, Compile.BLOCK, runner=shared), batches)
    for what, value in expected.items():
        torch.testing.assert_close(found[what], value, rtol=1e-3, atol=1e-4, msg=lambda m, w=what: f"{w}: {m}")
    norms = [found[f"norms {t}"] for t in range(8)]
    assert all(not torch.equal(a, b) for a, b in pairwise(norms)), "metrics of a step were overwritten"


COUNTS = (11, 8, 0, 13, 3, 8, 21, 7, 16, 2, 11, 29, 1, 8, 25, 6, 6, 14, 30, 5)
"""Numbers of samples of the steps: every size of microbatch occurs first, in the middle and last, and none at all."""


def drawn_of(count: int, sizes: tuple[int, ...], seed: int) -> Batch:
    draw, groups = torch.Generator().manual_seed(seed), group_rows(count, sizes)
    tokens = torch.randint(0, 211, (32, 33), generator=draw).cuda()
    matrix, mask = pad_to_rows(torch.arange(count, device="cuda"), rows=sum(groups.sizes), size=sizes[-1])
    return trusted_batch({"tokens": tokens[matrix]}, mask, EIGHT, step=None, groups=groups)


@pytest.mark.parametrize("optimizer", [None, optimizers.sgd(0.1, momentum=0.9)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("compile", [Compile.NONE, Compile.BLOCK], ids=lambda how: how.value)
@pytest.mark.parametrize("method", [Method.NONE, Method.AUTO, Method.GHOST_BK], ids=lambda how: how.value)
def test_recorded_microbatches_of_all_sizes_are_the_eager_steps_of_one_size(method, compile, optimizer, shared):
    """Float32, so that wrong reuse of memory between recordings is not taken for rounding."""
    sizes, found = (8, 4, 2, 1), []
    for own, how, recorded in (((32,), Compile.NONE, False), (sizes, compile, True)):
        step, state = step_of(
            method, torch.float32, runner=shared, sizes=own, optimizer=optimizer, compile=how, cuda_graph=recorded
        )
        seen = []
        for t, count in enumerate(COUNTS):
            state, metrics = step(state, drawn_of(count, own, seed=t), KEY.cuda())
            seen.append(metrics)
        kept = [(m.losses[m.mask > 0], m.norms[m.mask > 0]) for m in seen]
        found.append((kept, tree.flatten(tree.map(torch.clone, state.params))))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4, equal_nan=True)
    assert [len(losses) for losses, _ in found[1][0]] == list(COUNTS)


def test_another_state_is_recorded_anew_and_the_first_is_left_alone(shared):
    step, first = step_of(Method.AUTO, torch.bfloat16, Compile.BLOCK, runner=shared, cuda_graph=True)
    for t in range(3):
        first, _ = step(first, batch_of(t), KEY.cuda())
    before = tree.map(torch.clone, first.params)
    _, _, second = fresh_state(seed=5)
    plain, _ = step_of(Method.AUTO, torch.bfloat16, Compile.NONE, runner=shared)
    truth = tree.map(torch.clone, second)
    for t in range(3):
        second, metrics = step(second, batch_of(t), KEY.cuda())
        truth, expected = plain(truth, batch_of(t), KEY.cuda())
        torch.testing.assert_close(metrics.losses, expected.losses, rtol=2e-2, atol=1e-2)
    assert all(map(torch.equal, tree.leaves(before), tree.leaves(first.params)))
    first, metrics = step(first, batch_of(7), KEY.cuda())  # and back
    losses = SMALL.loss(before, {"tokens": batch_of(7).data["tokens"].flatten(0, 1)})
    torch.testing.assert_close(metrics.losses, losses, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_parameters_changed_between_steps_are_computed_with(cuda_graph, shared):
    step, state = step_of(Method.AUTO, torch.bfloat16, Compile.BLOCK, runner=shared, cuda_graph=cuda_graph)
    for t in range(3):
        state, _ = step(state, batch_of(t), KEY.cuda())
    for leaf in tree.leaves(state.params):
        leaf.mul_(1.5)
    losses = SMALL.loss(state.params, {"tokens": batch_of(3).data["tokens"].flatten(0, 1)}).clone()
    state, metrics = step(state, batch_of(3), KEY.cuda())
    torch.testing.assert_close(metrics.losses, losses, rtol=2e-2, atol=1e-2)


# ---------------------------------------------------------------- what one sample can do, in half precision

B, T, WIDTH, CLIP = 4, 160, 96, 0.5


def use_twice(p: Any, d: Any) -> torch.Tensor:
    y = ops.linear(d["x"], p["w"]) * d["g"] + ops.linear(d["x"].flip(1), p["w"]) * d["g"]
    return y.float().sum((1, 2))


def use_once(p: Any, d: Any) -> torch.Tensor:
    return (ops.linear(d["x"], p["w"]) * d["g"]).float().sum((1, 2))


def use_a_table(p: Any, d: Any) -> torch.Tensor:
    return (ops.embedding(d["ids"], p["w"]) * d["g"]).float().sum((1, 2))


def use_as_head_and_table(p: Any, d: Any) -> torch.Tensor:
    """A tied head: a linear layer and an embedding of one leaf."""
    return use_once(p, d) + use_a_table(p, d)


def use_as_opposites(p: Any, d: Any) -> torch.Tensor:
    """A tied head whose two parts cancel exactly."""
    one_hot = torch.nn.functional.one_hot(d["ids"], WIDTH).to(d["x"].dtype)
    head = (ops.linear(d["x"], p["w"]) * one_hot).sum((1, 2))
    return head - (ops.embedding(d["ids"], p["w"]) * d["x"]).sum((1, 2))


PARAMS = {"w": torch.zeros(WIDTH, WIDTH)}
USES = {
    loss.__name__: from_loss(loss, PARAMS)
    for loss in (use_once, use_twice, use_a_table, use_as_head_and_table, use_as_opposites)
}
HALF_WAYS = [*((method, None) for method in (Method.AUTO, Method.FLASH_BK, Method.GHOST_BK, Method.FLASH)), TWICE]
half_ways = pytest.mark.parametrize(("method", "budget"), HALF_WAYS)


def pairs_with(extreme: float | str) -> dict[str, torch.Tensor]:
    """Samples of which the second is extreme: nearly constant inputs, output gradients that sum to about 0."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(B, 1, WIDTH, generator=draw) + 1e-2 * torch.randn(B, T, WIDTH, generator=draw)
    g = torch.randn(B, T, WIDTH, generator=draw)
    ids = torch.randint(0, WIDTH, (B, T), generator=draw)
    ids[1] = ids[1, 0]
    g[1] -= g[1].mean(0)
    if isinstance(extreme, str):
        x[1, 3, 5] = g[1, 3, 5] = float(extreme)
    else:
        x[1], g[1] = extreme * x[1], extreme * g[1]
    return {"x": x.bfloat16().cuda(), "g": g.bfloat16().cuda(), "ids": ids.cuda()}


@pytest.mark.parametrize("extreme", [1.0, 1e3, 1e6, "nan", "inf"])
@pytest.mark.parametrize("name", USES)
@half_ways
def test_in_half_precision_one_sample_moves_the_sum_by_at_most_its_sensitivity(method, budget, name, extreme, shared):
    model, params, data = USES[name], tree.map(torch.Tensor.cuda, PARAMS), pairs_with(extreme)
    plan = make_plan(model, params, data, method=method, memory_budget=budget, dtype=torch.bfloat16)
    _, norms, stash = per_sample_norms(model, params, data, plan=plan, execution=Execution(runner=shared))
    clip = clip_to(norms, max_norm=CLIP)
    slack = 2.0**-24 * (B + 3) ** 2 * (3 if "as_" in name else 1) + 1e-6  # two sums of up to sqrt(2) C each
    everyone = torch.ones(B, device="cuda")
    for lazy in (False, True):
        present = summed(stash, clip, lazy=lazy).value["w"].double()
        assert bool(present.isfinite().all())
        for b in range(B):
            mask = everyone.clone()
            mask[b] = 0
            absent = summed(stash, clip.masked(mask), lazy=lazy).value["w"].double()
            assert float((present - absent).norm()) <= CLIP * (1 + slack)
    # the norm is that of what is added, whatever rounding made of it
    for b in range(B):
        if not bool(norms.total()[b].isfinite()):
            assert float(clip.smallest()[b]) == 0
            continue
        one_hot = torch.zeros(B, dtype=torch.float64, device="cuda")
        one_hot[b] = 1
        alone = summed(stash, Clip({"w": one_hot}, clip.sensitivity)).value["w"].double()
        assert float(norms.total()[b]) >= float(alone.norm()) * (1 - 1e-6)


@half_ways
def test_in_half_precision_a_whole_model_keeps_the_bound_and_repeats_bit_for_bit(method, budget, shared):
    """With deterministic attention, as the tests ask for; norms of a second backward are then those of the first."""
    params, data = SMALL.init(keys.key(0).cuda()), tree.map(lambda leaf: leaf[0], batch_of(0).data)
    params = tree.map(lambda leaf: 3 * leaf, params)
    plan = make_plan(SMALL, params, data, method=method, memory_budget=budget, dtype=torch.bfloat16)
    _, norms, stash = per_sample_norms(SMALL, params, data, plan=plan, execution=Execution(runner=shared))
    _, again, _ = per_sample_norms(SMALL, params, data, plan=plan, execution=Execution(runner=shared))
    assert all(torch.equal(again.squared[path], square) for path, square in norms.squared.items())
    clip = clip_to(norms, max_norm=0.1)
    assert bool((clip.smallest() < 1).all())
    everyone = torch.ones(4, device="cuda")
    present = summed(stash, clip, lazy=True)
    for b in range(4):
        mask = everyone.clone()
        mask[b] = 0
        absent = summed(stash, clip.masked(mask), lazy=True)
        moved = sum((present.value[p] - absent.value[p]).double().square().sum() for p in present.value) ** 0.5
        assert float(moved) <= 0.1 * (1 + 2.0**-24 * 7**2 + 1e-6)
        assert float(moved) >= 0.1 * 0.9


def test_a_recorded_fused_step_is_observed_as_it_trains_and_a_fault_in_its_noise_is_named():
    """``fdp compare method=auto,compile=block,cuda_graph=true method=materialize``, in one process."""
    there: dict[str, Any] = {"device": torch.device("cuda"), "steps": 5, "batch_size": 8, "microbatch_size": 16}
    how = {"compile": Compile.BLOCK, "compile_backend": "aot_eager", "cuda_graph": True}
    fast: dict[str, Any] = {**there, "method": Method.AUTO, **how}
    plain = observed(**there)
    assert first_over(compare(observed(**fast), plain), tolerance=1e-3) is None
    with mock.patch("fdp.fast.fused_update.noise_deviation", half_the_deviation):
        first = first_over(compare(observed(**fast), plain), tolerance=1e-3)
    assert first is not None
    assert (first.step, first.stage) == (1, Stage.NOISE)
