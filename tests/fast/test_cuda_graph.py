"""What is recorded and when, on a stand-in for CUDA graphs that replays on the CPU; the real ones are in test_gpu."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fdp import keys
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.cuda_graph import capture
from fdp.gradients.plan import make_plan
from fdp.models import mlp
from fdp.optimizers import adamw
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import init_state, make_train_step
from fdp.types import Batch, FdpError, Metrics, TrainState


class Graph:
    """Runs the recorded work again, on the same tensors."""

    recording: Graph | None = None
    made: int = 0

    def __init__(self) -> None:
        Graph.made += 1
        self.work: Any = None
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.work()


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def record(graph: Graph, pool: Any):
        Graph.recording = graph
        yield
        Graph.recording = None

    Graph.made = 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def body(state: TrainState, batch: Batch, key: torch.Tensor) -> tuple[TrainState, Metrics]:
    """``w += sum(x) + key``: enqueued while recording, done at once otherwise, as a GPU does it."""
    losses = torch.full_like(batch.mask.flatten(), torch.nan)

    def work() -> None:
        state.params["w"].add_(batch.data["x"].sum() + key.sum())
        losses.copy_(batch.data["x"].flatten())
        state.step.add_(1)

    if Graph.recording is None:
        work()
    else:
        Graph.recording.work = work
    return state, Metrics(losses, losses, losses, batch.mask.flatten())


def state_of(value: float = 0.0) -> TrainState:
    return TrainState({"w": torch.tensor([value])}, (), (), torch.tensor(0))


def batch_of(value: float, samples: int = 2) -> Batch:
    return Batch({"x": torch.full((1, samples), value)}, torch.ones(1, samples))


def key_of(value: int) -> torch.Tensor:
    return torch.tensor([value]).as_subclass(OnDevice)


def test_the_first_call_runs_the_second_is_recorded_and_all_read_their_own_data_and_key():
    run, state, expected = capture(body), state_of(), 0.0
    for t in range(5):
        given, key = batch_of(10.0 * t), key_of(t)
        state, metrics = run(state, given, key)
        expected += 20.0 * t + t
        assert state.params["w"].item() == expected
        assert metrics.losses.tolist() == [10.0 * t] * 2
        assert given.data["x"].tolist() == [[10.0 * t] * 2]
        assert int(key.sum()) == t
        assert Graph.made == (0 if t == 0 else 1)
    assert int(state.step) == 5


def test_metrics_of_a_step_are_not_overwritten_by_the_next():
    run, state, seen = capture(body), state_of(), []
    for t in range(4):
        state, metrics = run(state, batch_of(float(t)), key_of(0))
        seen.append(metrics)
    assert [m.losses[0].item() for m in seen] == [0.0, 1.0, 2.0, 3.0]


def test_another_shape_is_recorded_beside_the_first():
    run, state = capture(body), state_of()
    for samples in (2, 2, 3, 3, 2, 3, 2):
        before = state.params["w"].item()
        state, metrics = run(state, batch_of(1.0, samples), key_of(0))
        assert state.params["w"].item() == before + samples
        assert len(metrics.losses) == samples
    assert Graph.made == 2


def test_another_dtype_is_another_shape():
    run, state = capture(body), state_of()
    whole = Batch({"x": torch.ones(1, 2, dtype=torch.int64)}, torch.ones(1, 2))
    for given in (batch_of(1.5), batch_of(1.5), whole, whole, batch_of(1.5)):
        before = state.params["w"].item()
        state, _ = run(state, given, key_of(0))
        assert state.params["w"].item() == before + float(given.data["x"].sum())
    assert Graph.made == 2


@pytest.mark.parametrize("order", ["AAABBBAAA", "AABBAB", "AAB", "AABA"])
def test_another_state_is_recorded_anew_and_the_first_is_left_alone(order):
    run, states, counts = capture(body), {"A": state_of(), "B": state_of(100.0)}, {"A": 0.0, "B": 100.0}
    for which in order:
        after, _ = run(states[which], batch_of(1.0), key_of(0))
        counts[which] += 2.0
        assert {name: state.params["w"].item() for name, state in states.items()} == counts
        assert after.params["w"].data_ptr() == states[which].params["w"].data_ptr()


def test_a_state_seen_with_another_shape_is_not_replayed_into_the_old_one():
    run, first, second = capture(body), state_of(), state_of(100.0)
    for _ in range(2):
        run(first, batch_of(1.0, 2), key_of(0))
    for samples in (3, 3, 2, 2, 3):
        before = second.params["w"].item()
        run(second, batch_of(1.0, samples), key_of(0))
        assert second.params["w"].item() == before + samples
    assert first.params["w"].item() == 4.0


def test_a_step_that_does_not_write_in_place_is_refused():
    def elsewhere(state: TrainState, batch: Batch, key: torch.Tensor):
        after, metrics = body(state._replace(params={"w": state.params["w"].clone()}), batch, key)
        return after, metrics

    run, state = capture(elsewhere), state_of()
    run(state, batch_of(1.0), key_of(0))
    with pytest.raises(FdpError, match="writes the state in place"):
        run(state, batch_of(1.0), key_of(0))


def test_a_cpu_is_refused():
    with pytest.raises(FdpError, match="expected a step on a CUDA device, got a key on cpu"):
        capture(body)(state_of(), batch_of(1.0), torch.tensor([0]))
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
