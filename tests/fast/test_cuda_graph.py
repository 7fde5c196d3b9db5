"""What is recorded and when, on a stand-in for CUDA graphs that replays on the CPU; the real ones are in test_gpu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import keys, tree
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.fast.cuda_graph import StepParts, capture
from fdp.gradients.accumulate import MicrobatchSum
from fdp.gradients.lazy_sum import add_onto
from fdp.gradients.plan import Method, add_smaller_sizes, make_plan
from fdp.models import mlp
from fdp.optimizers import adamw, sgd
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.microbatches import group_rows, pad_to_rows
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import init_state, make_train_step
from fdp.types import Batch, ClippedSum, FdpError, Metrics, RowGroups, TrainState
from tests.fake_graphs import Fake, FakeGraph, install


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install(monkeypatch)


# ---------------------------------------------------------------- parts that are simple enough to predict


def gradient(
    work: Any, state: TrainState, data: Any, mask: torch.Tensor, onto: ClippedSum | None = None
) -> MicrobatchSum:
    x = data["x"] * mask
    losses = x.clone()
    value = add_onto({} if onto is None else onto.value, {"w": x.sum().reshape(1)}, torch.float32)
    return MicrobatchSum(ClippedSum(value, torch.ones(())), mask.sum(), Metrics(losses, losses, losses, mask.clone()))


def end(state: TrainState, total: ClippedSum, tally: torch.Tensor, key: torch.Tensor) -> tuple[TrainState, Any]:
    """``w += sum(x) + key``; the number of samples is seen."""
    state.params["w"].add_(total.value.pop("w") + key.sum())
    state.step.add_(1)
    return state, tally.clone()


PARTS = StepParts(lambda state, device: (), gradient, end, lambda: None)


def state_of(value: float = 0.0) -> TrainState:
    return TrainState({"w": torch.tensor([value])}, (), (), torch.tensor(0))


def batch_of(value: float, groups: Sequence[int] = (1,), size: int = 2) -> Batch:
    rows = sum(groups)
    return Batch({"x": torch.full((rows, size), value)}, torch.ones(rows, size), groups=RowGroups(tuple(groups)))


def key_of(value: int) -> torch.Tensor:
    return torch.tensor([value])


def test_the_first_call_runs_the_second_is_recorded_and_all_read_their_own_data_and_key(fake):
    run, state, expected = capture(PARTS), state_of(), 0.0
    for t in range(5):
        given, key = batch_of(10.0 * t), key_of(t)
        state, metrics, seen = run(state, given, key)
        expected += 20.0 * t + t
        assert state.params["w"].item() == expected
        assert metrics.losses.tolist() == [10.0 * t] * 2
        assert float(seen) == 2.0
        assert given.data["x"].tolist() == [[10.0 * t] * 2]
        assert int(key.sum()) == t
        assert len(fake.graphs) == (0 if t == 0 else 1)
    assert int(state.step) == 5


def test_one_recording_per_size_whatever_the_number_of_microbatches(fake):
    run, state, expected = capture(PARTS), state_of(), 0.0
    sequences = [(4, 1), (4, 2), (4, 4, 1), (4, 4, 4, 2, 1), (4, 2), (4, 4), (4, 4, 4, 4, 4, 4, 1), (2, 1)]
    for t, groups in enumerate(sequences):
        state, metrics, seen = run(state, batch_of(float(t), groups), key_of(1))
        expected += 2.0 * t * sum(groups) + 1
        assert state.params["w"].item() == expected
        assert metrics.losses.tolist() == [float(t)] * (2 * sum(groups))
        assert float(seen) == 2.0 * sum(groups)
    assert len(fake.graphs) == 5, "expected one for the beginning, one per size (4, 2, 1), one for the end"
    state, _, _ = run(state, batch_of(1.0, (4,)), key_of(0))
    state, _, _ = run(state, batch_of(1.0, (4,)), key_of(0))
    assert state.params["w"].item() == expected + 16
    assert len(fake.graphs) == 6, "expected one more for a step of one microbatch"


def test_metrics_of_a_step_are_not_overwritten_by_the_next(fake):
    run, state, seen = capture(PARTS), state_of(), []
    for t in range(6):
        state, metrics, _ = run(state, batch_of(float(t), (1, 1) if t % 2 else (1,)), key_of(0))
        seen.append(metrics)
    assert [m.losses[0].item() for m in seen] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_another_dtype_is_another_shape(fake):
    run, state = capture(PARTS), state_of()
    whole = Batch({"x": torch.ones(1, 2, dtype=torch.int64)}, torch.ones(1, 2))
    for given in (batch_of(1.5), batch_of(1.5), whole, whole, batch_of(1.5)):
        before = state.params["w"].item()
        state, _, _ = run(state, given, key_of(0))
        assert state.params["w"].item() == before + float(given.data["x"].sum())
    assert len(fake.graphs) == 2


@pytest.mark.parametrize("groups", [(1,), (2, 1)])
@pytest.mark.parametrize("order", ["AAABBBAAA", "AABBAB", "AAB", "AABA"])
def test_another_state_is_recorded_anew_and_the_first_is_left_alone(order, groups, fake):
    run, states, counts = capture(PARTS), {"A": state_of(), "B": state_of(100.0)}, {"A": 0.0, "B": 100.0}
    for which in order:
        after, _, _ = run(states[which], batch_of(1.0, groups), key_of(0))
        counts[which] += 2.0 * sum(groups)
        assert {name: state.params["w"].item() for name, state in states.items()} == counts
        assert after.params["w"].data_ptr() == states[which].params["w"].data_ptr()


def test_a_microbatch_that_fails_leaves_the_state_and_the_next_step_alone(fake):
    run, state, failing = capture(PARTS._replace(gradient=lambda *given: fails_or(*given))), state_of(), [False]

    def fails_or(*given: Any) -> MicrobatchSum:
        if failing[0]:
            raise torch.OutOfMemoryError("no room")
        return gradient(*given)

    for t in range(4):
        failing[0] = t in (1, 2)
        groups = (2, 1) if t < 3 else (1, 1)
        before = state.params["w"].item()
        if failing[0]:
            with pytest.raises(torch.OutOfMemoryError):
                run(state, batch_of(1.0, groups), key_of(0))
            assert state.params["w"].item() == before
            assert int(state.step) == 1
        else:
            run(state, batch_of(1.0, groups), key_of(0))
            assert state.params["w"].item() == before + 2.0 * sum(groups)


class Calls(TorchDispatchMode):
    """The operations of torch since the list was last cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("groups", [(2,), (2, 1)])
def test_after_the_end_of_a_step_nothing_is_allocated_and_a_replay_of_it_is_marked_before(groups, fake, monkeypatch):
    calls, marked, replay = Calls(), [], FakeGraph.replay

    def end_and_forget(*given: Any) -> tuple[TrainState, Any]:
        result = end(*given)
        calls.names.clear()
        return result

    def replay_and_forget(graph: FakeGraph) -> None:
        before = int(state.step)
        replay(graph)
        if int(state.step) > before:
            assert marked == [before], "expected the end to be marked once, just before its replay"
        calls.names.clear()

    monkeypatch.setattr(FakeGraph, "replay", replay_and_forget)
    state = state_of()
    run = capture(PARTS._replace(end=end_and_forget, mark_end=lambda: marked.append(int(state.step))))
    for t in range(4):
        marked.clear()
        with calls:
            run(state, batch_of(1.0, groups), key_of(0))
        assert set(calls.names) <= {"copy_"}
        assert int(state.step) == t + 1
        assert bool(marked) == (t > 0)


def test_a_step_that_does_not_write_in_place_is_refused(fake):
    def elsewhere(state: TrainState, *rest: Any):
        return end(state._replace(params={"w": state.params["w"].clone()}), *rest)

    with pytest.raises(FdpError, match="writes the state in place"):
        capture(PARTS._replace(end=elsewhere))(state_of(), batch_of(1.0), key_of(0))


# ---------------------------------------------------------------- the real step

SIZES = (8, 4, 2)
MODEL = mlp(widths=(6, 5), classes=3)
SAMPLING = poisson(1000, expected_batch_size=11)
COUNTS = (11, 8, 0, 13, 3, 8, 21, 7, 16, 2, 11, 29, 1, 8)


def train(method: Method, compile: Compile, optimizer: Any, *, sizes: Sequence[int], recorded: bool) -> dict[str, Any]:
    clip = clipping.quantile(max_norm=0.5, target_quantile=0.5, learning_rate=0.3, count_noise=1.0)
    private = method is not Method.NONE
    mechanism = Mechanism(SAMPLING, clip, 0.7) if private else without_noise(SAMPLING, clip)
    params = MODEL.init(keys.key(0))
    draw = torch.Generator().manual_seed(1)
    pool = {"image": torch.randn(40, 6, generator=draw), "label": torch.randint(3, (40,), generator=draw)}
    example = tree.map(lambda leaf: leaf[: sizes[0]], pool)
    plan = make_plan(MODEL, params, example, method=method)
    plan = add_smaller_sizes(plan, MODEL, params, example, sizes=sizes[1:])
    execution = make_execution(compile=compile, cuda_graph=recorded)
    step = make_train_step(MODEL, optimizer, mechanism=mechanism, plan=plan, execution=execution, donate=("state",))
    state, seen = init_state(MODEL, params, optimizer, mechanism), []
    for t, count in enumerate(COUNTS):
        groups = group_rows(count, sizes)
        which = torch.randperm(40, generator=draw)[:count]
        matrix, mask = pad_to_rows(which, rows=sum(groups.sizes), size=sizes[-1])
        data = tree.map(lambda leaf, matrix=matrix: leaf[matrix], pool)
        batch = trusted_batch(data, mask, SAMPLING, step=t, groups=groups)
        state, metrics = step(state, batch, keys.key(9))
        real = metrics.mask > 0
        assert int(real.sum()) == count
        seen.append((metrics.losses[real], metrics.norms[real], metrics.factors[real]))
    return {"params": tree.flatten(state.params), "clip": state.clip, "metrics": seen}


@pytest.mark.parametrize("optimizer", [adamw(1e-2, eps=1e-3), sgd(0.1)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("compile", [Compile.NONE, Compile.BLOCK], ids=lambda c: c.value)
@pytest.mark.parametrize("method", [Method.NONE, Method.AUTO, Method.GHOST], ids=lambda m: m.value)
def test_recorded_steps_of_any_sizes_are_the_eager_steps_of_one_size(method, compile, optimizer, fake, monkeypatch):
    monkeypatch.setattr(CompiledRunner, "_compile_as", lambda self, name, run: run)  # not inside a stand-in
    expected = train(method, Compile.NONE, optimizer, sizes=(32,), recorded=False)
    found = train(method, compile, optimizer, sizes=SIZES, recorded=True)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6, equal_nan=True)
    most = 2 + 2 * len(SIZES)
    assert 4 <= len(fake.graphs) <= most, "expected one or two recordings per size, one to begin, one to end"
    assert all(graph.replays for graph in fake.graphs)


def test_a_cpu_is_refused():
    with pytest.raises(FdpError, match="expected a step on a CUDA device, got a key on cpu"):
        capture(PARTS)(state_of(), batch_of(1.0), torch.tensor([0]))
    model, optimizer = mlp(widths=(4, 5), classes=3), adamw(1e-2)
    mechanism = Mechanism(poisson(100, expected_batch_size=4), clipping.flat(max_norm=1.0), 1.0)
    params, data = model.init(keys.key(0)), {"image": torch.zeros(2, 4), "label": torch.tensor([0, 1])}
    plan = make_plan(model, params, data)
    with pytest.raises(FdpError, match=r"cuda_graph: expected donate=\('state',\)"):
        make_train_step(model, optimizer, mechanism=mechanism, plan=plan, execution=make_execution(cuda_graph=True))
    step = make_train_step(
        model,
        optimizer,
        mechanism=mechanism,
        plan=plan,
        execution=make_execution(compile=Compile.BLOCK, cuda_graph=True),
        donate=("state",),
    )
    whole = {name: leaf[None] for name, leaf in data.items()}
    batch = trusted_batch(whole, torch.ones(1, 2), mechanism.sampling, step=0)
    with pytest.raises(FdpError, match="leave it out"):
        step(init_state(model, params, optimizer, mechanism), batch, keys.key(0))
