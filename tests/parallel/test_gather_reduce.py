"""Traffic of a step: how much, in which order, and how many gathered weights are alive at once."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fdp import keys, ops, tree
from fdp.checks.first_call import Checks
from fdp.fast.compile_modes import make_execution
from fdp.gradients import block_loop
from fdp.gradients.execution import Execution
from fdp.gradients.plan import Method, make_plan
from fdp.init import normal
from fdp.model import Block, LeafSpec, Model
from fdp.models import GPTConfig, gpt
from fdp.optimizers import adamw, sgd
from fdp.parallel import collectives
from fdp.parallel.dtensors import localize
from fdp.parallel.gather_reduce import start_reduce, sum_over_tensor_axis
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharded_init import init_params
from fdp.parallel.sharding import Reduce, Sharding, Zero, abstract_params, make_sharding, over_tensor_axis
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.stages import Stages, make_stages
from fdp.step import init_state, make_train_step
from fdp.types import Norms, Tree
from tests.fake_ranks import fake_ranks

WIDTH, BLOCKS, SAMPLES = 16, 5, 3


def layer(p: Tree, h: Tensor, data: Tree) -> Tensor:
    return torch.tanh(ops.linear(h if isinstance(h, Tensor) else data["x"], p["w"], p["b"]))


def last(p: Tree, h: Tensor, data: Tree) -> Tensor:
    return ops.linear(h, p["w"], p["b"]).square().sum(1)


def stack() -> Model:
    leaves, blocks = {}, []
    for i in range(BLOCKS):
        leaves |= {
            f"b.{i}.w": LeafSpec((WIDTH, WIDTH), normal(0.1)),
            f"b.{i}.b": LeafSpec((WIDTH,), normal(0.1)),
        }
        paths = {"w": f"b.{i}.w", "b": f"b.{i}.b"}
        blocks.append(Block(f"b{i}", paths, last if i + 1 == BLOCKS else layer))
    return Model("stack", leaves, tuple(blocks))


MODEL = stack()
DATA = {"x": torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))}
ONE = WIDTH * WIDTH + WIDTH
"""Parameters of a block."""
UNIT = BLOCKS * ONE


def mechanism(method: Method) -> Mechanism:
    z = 0.0 if method is Method.NONE else 1.0
    return Mechanism(poisson(100, expected_batch_size=6), clipping.flat(max_norm=1.0), z)


def stages_of(axes: dict[str, int], zero: Zero, method: Method, **options: Any) -> tuple[Stages, Sharding, Tree]:
    sharding = make_sharding(MODEL, make_mesh(axes, device_type="cpu"), zero=zero, **options)
    plan = make_plan(MODEL, abstract_params(MODEL, sharding), DATA, method=method)
    stages = make_stages(
        MODEL, sgd(0.1), mechanism=mechanism(method), plan=plan, execution=make_execution(sharding=sharding)
    )
    return stages, sharding, localize(init_params(MODEL, keys.key(0), sharding))


class Sent(NamedTuple):
    op: str
    elements: int
    dtype: torch.dtype
    axis: str


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """Every collective, in order; elements count the full tensor that is gathered or scattered."""
    log: list[Sent] = []

    def watch(op: str) -> None:
        real = getattr(collectives, op)

        def wrapped(x: Tensor, axis: collectives.Axis) -> Tensor:
            whole = x.numel() * (axis.size if op == "all_gather" else 1)
            log.append(Sent(op, whole, x.dtype, axis.name))
            return real(x, axis)

        monkeypatch.setattr(collectives, op, wrapped)

    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        watch(op)
    return log


def a_step(axes: dict[str, int], zero: Zero, method: Method, *, microbatches: int = 1, **options: Any) -> None:
    sharding = make_sharding(MODEL, make_mesh(axes, device_type="cpu"), zero=zero, **options)
    plan = make_plan(MODEL, abstract_params(MODEL, sharding), DATA, method=method)
    how: dict[str, Any] = {"plan": plan, "execution": Execution(sharding), "checks": Checks.SKIPPED}
    step = make_train_step(MODEL, sgd(0.1), mechanism=mechanism(method), **how)
    state = init_state(
        MODEL,
        init_params(MODEL, keys.key(0), sharding),
        sgd(0.1),
        mechanism(method),
        execution=make_execution(sharding=sharding),
    )
    share: dict[str, Any] = {"rank": sharding.rank, "ranks": sharding.ranks}
    data, mask = {"x": DATA["x"].expand(microbatches, -1, -1)}, torch.ones(microbatches, SAMPLES)
    batch = trusted_batch(data, mask, mechanism(method).sampling, step=0, **share)
    step(state, batch, keys.key(1))


def moved(log: list[Sent], op: str) -> list[int]:
    """Return the elements of each collective that moves weights or sums, without the per-sample values."""
    return [entry.elements for entry in log if entry.op == op and entry.elements >= ONE]


GATHERED = {  # units of the parameters that are gathered in a microbatch: the last block is never run twice
    (Zero.NONE, Method.AUTO): 0, (Zero.TWO, Method.AUTO): BLOCKS, (Zero.THREE, Method.AUTO): 2 * BLOCKS - 1,
    (Zero.NONE, Method.NONE): 0, (Zero.TWO, Method.NONE): BLOCKS, (Zero.THREE, Method.NONE): 2 * BLOCKS - 1,
    (Zero.THREE, Method.GHOST): 3 * BLOCKS - 1,  # the second backward runs every block again
    (Zero.THREE, Method.MATERIALIZE): 2 * BLOCKS - 1,
}  # fmt: skip


@pytest.mark.parametrize(("zero", "method"), GATHERED, ids=str)
def test_a_step_moves_two_units_under_zero_2_three_under_zero_3_and_four_with_a_second_backward(zero, method, sent):
    with fake_ranks(4):
        a_step({"shard": 4}, zero, method)
    gathered, scattered, reduced = (moved(sent, op) for op in ("all_gather", "reduce_scatter", "all_reduce"))
    assert gathered == [ONE] * GATHERED[zero, method]  # one gather per block
    summed = BLOCKS * [ONE]
    assert (scattered, reduced) == (([], summed) if zero is Zero.NONE else (summed, []))
    wide = torch.float32 if method is Method.NONE else torch.float64
    assert {entry.dtype for entry in sent if entry.op == "reduce_scatter"} <= {wide}
    total = sum(gathered + scattered) / UNIT
    expected = {Zero.NONE: 0.0, Zero.TWO: 2.0, Zero.THREE: 4.0 if method is Method.GHOST else 3.0}[zero]
    assert expected - ONE / UNIT <= total <= expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_reduced_in_the_chosen_dtype(dtype, sent):
    with fake_ranks(2):
        a_step({"shard": 2}, Zero.THREE, Method.AUTO, reduce_dtype=dtype)
    assert {entry.dtype for entry in sent if entry.op == "reduce_scatter"} == {dtype}


def test_microbatches_are_reduced_once_per_step_or_as_chosen(sent):
    cases = {
        (Zero.TWO, None): (BLOCKS, BLOCKS),
        (Zero.TWO, Reduce.PER_MICROBATCH): (3 * BLOCKS, 3 * BLOCKS),
        (Zero.THREE, None): (3 * (2 * BLOCKS - 1), 3 * BLOCKS),
        (Zero.THREE, Reduce.PER_STEP): (3 * (2 * BLOCKS - 1), BLOCKS),
    }
    for (zero, reduce), (gathers, scatters) in cases.items():
        sent.clear()
        with fake_ranks(2):
            a_step({"shard": 2}, zero, Method.AUTO, microbatches=3, reduce=reduce)
        assert (len(moved(sent, "all_gather")), len(moved(sent, "reduce_scatter"))) == (gathers, scatters), (
            zero,
            reduce,
        )


def test_replicas_reduce_their_shards_and_tensor_ranks_their_norms(sent):
    with fake_ranks(4):
        a_step({"replicate": 2, "shard": 2}, Zero.THREE, Method.AUTO)
    parts = [entry for entry in sent if entry.op == "all_reduce" and entry.axis == "replicate" and entry.elements > 1]
    assert [entry.elements for entry in parts] == [ONE // 2] * BLOCKS
    sent.clear()
    model = gpt(GPTConfig(layers=2, width=8, heads=2, context=6, vocab_size=13))
    with fake_ranks(2):
        mesh = make_mesh({"tensor": 2}, device_type="cpu")
        cut = over_tensor_axis(model, mesh)
        sharding = make_sharding(cut, mesh, zero=Zero.THREE)
        data = {"tokens": torch.zeros(SAMPLES, 7, dtype=torch.int64)}
        plan = make_plan(cut, abstract_params(cut, sharding), data)
        stages = make_stages(
            cut, sgd(0.1), mechanism=mechanism(Method.AUTO), plan=plan, execution=make_execution(sharding=sharding)
        )
        stages.gradient(localize(init_params(cut, keys.key(0), sharding)), (), data, torch.ones(SAMPLES))
    cut_leaves = [path for path, leaf in sharding.leaves.items() if leaf.is_sharded_over("tensor")]
    norms = [entry for entry in sent if entry.elements == len(cut_leaves) * SAMPLES]
    assert len(cut_leaves) == 12
    assert len(norms) == 1  # all leaves together, and never over an axis of other samples
    assert {entry.axis for entry in sent if entry.elements > 1} == {"tensor"}


def test_a_replicated_leaf_is_counted_once_and_a_sharded_one_summed(monkeypatch):
    monkeypatch.setattr(collectives, "all_reduce", lambda x, axis: x * 3)
    monkeypatch.setattr(collectives, "wait", lambda x: x)
    model = gpt(GPTConfig(layers=1, width=6, heads=3, context=4, vocab_size=7))
    with fake_ranks(3):
        mesh = make_mesh({"tensor": 3}, device_type="cpu")
        sharding = make_sharding(over_tensor_axis(model, mesh), mesh, zero=Zero.TWO)
    norms = sum_over_tensor_axis(sharding, Norms({path: torch.ones(2) for path in model.leaves}))
    cut = {"qkv", "qkv_bias", "out", "up", "up_bias", "down"}
    for path, square in norms.squared.items():
        assert square.tolist() == ([3, 3] if path.split(".")[-1] in cut else [1, 1]), path


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gathers, blocks and reductions as they happen: G gather, B block run, R reduce-scatter."""
    log: list[str] = []
    gather, scatter = collectives.all_gather, collectives.reduce_scatter
    monkeypatch.setattr(collectives, "all_gather", lambda x, a: (log.append("G"), gather(x, a))[1])
    monkeypatch.setattr(collectives, "reduce_scatter", lambda x, a: (log.append("R"), scatter(x, a))[1])
    return log


def test_the_next_block_is_gathered_while_one_computes(order, monkeypatch):
    with fake_ranks(2):
        stages, _, params = stages_of({"shard": 2}, Zero.THREE, Method.NONE)
        for name in ("_forward_block", "_pull_block"):
            real = getattr(block_loop, name)
            monkeypatch.setattr(block_loop, name, lambda *a, real=real: (order.append("B"), real(*a))[1])
        stages.gradient(params, (), DATA, torch.ones(SAMPLES))
    forward = "GG" + "BG" * (BLOCKS - 2) + "BB"
    # In the backward a block's sums leave while the next block is worked on.
    backward = "GB" + "".join("RGB" if i < BLOCKS - 1 else "RB" for i in range(1, BLOCKS)) + "R"
    assert "".join(order) == forward + backward


def whole_weights_alive(monkeypatch: pytest.MonkeyPatch, act: Any) -> int:
    """Return the most elements of full weights, gathered or in flight, that are alive at once while ``act`` runs."""
    alive: list[tuple[StorageWeakRef, int]] = []
    most = 0

    def count(tensors: Iterator[Tensor]) -> None:
        nonlocal most
        known = {ref.cdata for ref, _ in alive if not ref.expired()}
        for tensor in tensors:
            ref = StorageWeakRef(tensor.untyped_storage())
            if ref.cdata not in known:
                known.add(ref.cdata)
                alive.append((ref, tensor.untyped_storage().nbytes() // tensor.element_size()))
        alive[:] = [(ref, size) for ref, size in alive if not ref.expired()]
        most = max(most, sum(size for _, size in alive))

    gather, finish = collectives.all_gather, block_loop.finish_gather

    def gathered(x: Tensor, axis: collectives.Axis) -> Tensor:
        out = gather(x, axis)
        count(iter([out]))
        return out

    def finished(*args: Any) -> Any:
        whole = finish(*args)
        count(iter(whole.values()))
        return whole

    monkeypatch.setattr(collectives, "all_gather", gathered)
    monkeypatch.setattr(block_loop, "finish_gather", finished)
    gc.disable()  # what is released must be released at once, not by a collection some time later
    try:
        act()
    finally:
        gc.enable()
    return most


@pytest.mark.parametrize("method", [Method.NONE, Method.AUTO, Method.GHOST, Method.MATERIALIZE])
def test_zero_3_holds_one_block_and_one_in_flight(method, monkeypatch):
    with fake_ranks(2):
        stages, _, params = stages_of({"shard": 2}, Zero.THREE, method)
        most = whole_weights_alive(monkeypatch, lambda: stages.gradient(params, (), DATA, torch.ones(SAMPLES)))
    assert most <= 2 * ONE
    with fake_ranks(2):
        stages, _, params = stages_of({"shard": 2}, Zero.TWO, method, reduce=Reduce.PER_MICROBATCH)
        more = whole_weights_alive(monkeypatch, lambda: stages.gradient(params, (), DATA, torch.ones(SAMPLES)))
    assert more >= UNIT  # what the test would see if nothing were dropped


def compiled_code(zero: Zero, method: Method) -> str:
    import torch._inductor.config as inductor_config
    from torch._inductor.utils import run_and_get_code

    with fake_ranks(2):
        stages, _, params = stages_of({"shard": 2}, zero, method, reduce=Reduce.PER_MICROBATCH)
        torch._dynamo.reset()
        fn = torch.compile(stages.gradient, fullgraph=True, dynamic=False)
        # Told to save memory, the scheduler may put gathers where they belong by itself: here it must be the program.
        with torch.no_grad(), inductor_config.patch(reorder_for_peak_memory=False):
            _, (code,) = run_and_get_code(fn, params, (), DATA, torch.ones(SAMPLES))
    return code[code.index("def call(") :]


def gathers_alive(code: str) -> tuple[int, str]:
    """From the compiled program: how many gathered buckets are alive at once at most, and the order of events.

    G gather, M matrix product, R reduce-scatter. A bucket is copied into leaves just before they are used.
    """
    alive: set[str] = set()
    order, most = "", 0
    for line in code.splitlines():
        line = line.strip()
        alive -= set(re.findall(r"del (\w+)", line))
        if made := re.match(r"(\w+) = torch\.ops\._c10d_functional\.all_gather", line):
            alive.add(made[1])
            order += "G"
        elif "_c10d_functional.reduce_scatter_tensor.default(" in line:
            order += "R"
        elif re.match(r"extern_kernels\.(addmm|mm|bmm)", line):
            order += "M"
        most = max(most, len(alive))
    return most, order


@pytest.mark.slow
@pytest.mark.parametrize("method", [Method.NONE, Method.AUTO])
def test_the_compiled_program_keeps_the_order_and_drops_the_weights(method):
    most, order = gathers_alive(compiled_code(Zero.THREE, method))
    assert order.count("G") == 2 * BLOCKS - 1
    assert order.count("R") == BLOCKS
    assert most <= 2
    assert order.startswith("GG" + "MG" * (BLOCKS - 2) + "MM")  # as in eager
    assert order.index("R") > order.rindex("G") if method is Method.AUTO else "RMG" in order or "MRG" in order


@pytest.mark.slow
def test_without_the_barrier_the_compiled_program_gathers_everything_first(monkeypatch):
    monkeypatch.setattr(collectives, "after", lambda x, token: x)
    most, order = gathers_alive(compiled_code(Zero.THREE, Method.AUTO))
    assert order.startswith("G" * (2 * BLOCKS - 1))
    assert most >= BLOCKS


def test_a_rank_of_eight_holds_an_eighth_of_parameters_and_optimizer_state():
    model = gpt(GPTConfig(layers=2, width=64, heads=4, context=32, vocab_size=509))
    alone = 3 * sum(torch.Size(leaf.shape).numel() for leaf in model.leaves.values())
    held = []
    for rank in range(8):
        with fake_ranks(8, rank=rank):
            sharding = make_sharding(model, make_mesh({"shard": 8}, device_type="cpu"), zero=Zero.THREE)
            params = init_params(model, keys.key(0), sharding)
            state = init_state(
                model, params, adamw(1e-3), mechanism(Method.AUTO), execution=make_execution(sharding=sharding)
            )
            held.append(tree.size(localize((state.params, state.opt))))
    assert max(held) * 7 <= alone
    assert alone <= sum(held) <= 1.01 * alone + 64


def test_initialisation_holds_at_most_this_ranks_shards_and_one_draw(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    live: dict[int, tuple[StorageWeakRef, int]] = {}
    peak = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal peak
            out = func(*args, **(kwargs or {}))
            for leaf in tree.leaves(out):
                if isinstance(leaf, Tensor):
                    storage = leaf.untyped_storage()
                    live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            for key in [key for key, (ref, _) in live.items() if ref.expired()]:
                del live[key]
            peak = max(peak, sum(size for _, size in live.values()))
            return out

    leaves = {f"b.{i}": LeafSpec((1024, 512), normal(0.02)) for i in range(16)}
    blocks = tuple(Block(f"b{i}", f"b.{i}", lambda p, h, data: h) for i in range(16))
    model = Model("wide", leaves, blocks)
    with fake_ranks(8, rank=3):
        sharding = make_sharding(model, make_mesh({"shard": 8}, device_type="cpu"), zero=Zero.THREE)
        with Watch():
            params = init_params(model, keys.key(0), sharding)
    whole = 16 * 1024 * 512 * 4
    assert tree.size(localize(params)) * 4 == whole // 8
    assert peak < whole / 8 + 64 * 1024 * 512 / 8  # the parts, and the temporaries of one draw, 16 words an element


def test_an_empty_set_of_sums_moves_nothing(sent):
    with fake_ranks(2):
        sharding = make_sharding(MODEL, make_mesh({"shard": 2}, device_type="cpu"), zero=Zero.TWO)
        assert start_reduce(sharding, {}).scattered is None
    assert sent == []
