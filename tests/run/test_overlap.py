"""A run whose host works beside the device computes, records and promises what a run does that waits for every step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fdp import optimizers, tree
from fdp.cli import session
from fdp.parallel.offload import Offload
from fdp.privacy import clipping
from fdp.run import flight
from fdp.run.overlap import Draws, send_to_device, send_to_host
from fdp.run.prepare_run import prepare
from fdp.run.step_record import StepRecord
from fdp.run.training_run import can_run_ahead, steps
from fdp.types import FdpError
from tests.cli.train_runs import interrupt_after, last_json, train
from tests.run.test_training_run import Rows, config, rows

IN_PLACE = Offload(True, True, True)
QUANTILE = clipping.quantile(max_norm=0.1, target_quantile=0.5, learning_rate=0.2, count_noise=2.0)


def same(record: StepRecord) -> StepRecord:
    return record._replace(seconds=0.0, peak_memory_bytes=0)


@pytest.mark.parametrize("clip", [clipping.flat(max_norm=1.0), QUANTILE])
@pytest.mark.parametrize("changes", [{}, {"offload": IN_PLACE}], ids=["new states", "in place"])
def test_running_ahead_changes_no_record_and_no_state_that_is_used(clip: Any, changes: dict[str, Any]) -> None:
    settings = config(steps=7, clip=clip, optimizer=optimizers.adamw(0.1), **changes)
    waited = [(tree.map(Tensor.clone, state), same(record)) for state, record in steps(*prepare(settings))]
    used, begun = {3, 6}, [0]
    for state, record in steps(*prepare(settings), ahead=lambda step: step not in used, begin=begun.append):
        then, expected = waited[record.step - 1]
        assert same(record) == expected
        assert begun[-1] == (record.step if record.step in (3, 6, 7) else record.step + 1)
        if record.step in (3, 6, 7):  # the last state is never overwritten
            assert all(torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(then)))
    assert begun == list(range(8))


def test_a_stop_ends_the_run_after_the_step_that_was_launched_with_its_own_state() -> None:
    settings, asked = config(steps=9, offload=IN_PLACE), []
    found = []
    for state, record in steps(*prepare(settings), stop=lambda: bool(asked), ahead=lambda step: True):
        found.append((record.step, int(state.step)))
        if record.step == 3:
            asked.append(1)
    assert [step for step, _ in found] == [1, 2, 3, 4]
    assert found[-1] == (4, 4)


def test_an_error_of_a_draw_comes_after_the_record_of_the_step_before_it() -> None:
    class Breaks(Rows):
        calls = 0

        def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
            if threading.current_thread() is not threading.main_thread():
                Breaks.calls += 1
                if Breaks.calls == 3:
                    raise FdpError("the disk is gone")
            return super().fetch(indices)

    stream = steps(*prepare(config(dataset=Breaks(rows().x), steps=6)), ahead=lambda step: True)
    assert [next(stream)[1].step for _ in range(2)] == [1, 2]
    with pytest.raises(FdpError, match="the disk is gone"):
        next(stream)


def test_parameters_that_stop_being_finite_are_noticed_at_their_step() -> None:
    explodes = optimizers.sgd(optimizers.piecewise(1.0, factors={2: 1e38}))
    settings = config(optimizer=explodes, noise_multiplier=1000.0, steps=6)
    stream = steps(*prepare(settings), ahead=lambda step: True)
    assert [next(stream)[1].step for _ in range(2)] == [1, 2]
    with pytest.raises(flight.NotFinite, match="step 3: w became NaN or infinite"):
        next(stream)


def test_draws_are_those_of_their_steps_and_end_with_their_thread() -> None:
    drawn: list[int] = []

    def draw(t: int) -> Any:
        drawn.append(t)
        return t * t

    with Draws(draw, first=3, end=7) as draws:
        assert [draws.take(t) for t in (3, 4)] == [9, 16]
        with pytest.raises(FdpError, match="in order"):
            draws.take(6)
    assert drawn[:4] == [3, 4, 5, 6][: len(drawn)]
    assert not any(thread.name.startswith("fdp-draws") for thread in threading.enumerate())


def test_numbers_on_their_way_keep_the_values_of_that_moment() -> None:
    value = torch.ones(3)
    arrival = send_to_host({"x": value})
    value.zero_()
    assert arrival.wait()["x"].tolist() == [1.0, 1.0, 1.0]
    assert send_to_device({"x": value}, torch.device("cpu"))["x"] is value


def test_only_a_run_on_one_gpu_that_writes_in_place_runs_ahead() -> None:
    run, _ = prepare(config(offload=IN_PLACE))
    assert not can_run_ahead(run)
    on_gpu = run._replace(config=config(device=torch.device("cuda")))
    assert can_run_ahead(on_gpu)
    assert not can_run_ahead(on_gpu._replace(in_place=False))


def test_a_command_that_runs_ahead_saves_stops_and_resumes_like_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--seed", "1", "--save-every", "2", "--offload", "all", "--json", "--quiet", "--optimizer", "adamw")
    assert train(tmp_path / "waits", *words, steps=6) == 0
    expected = last_json(capsys.readouterr().out)
    monkeypatch.setattr(session, "can_run_ahead", lambda run: True)
    with monkeypatch.context() as patch:
        interrupt_after(4, patch)
        assert train(tmp_path / "ahead", *words, steps=6) == 130
    assert train(tmp_path / "ahead", *words, steps=6) == 0
    got = last_json(capsys.readouterr().out)
    assert got["parameter_sha256"] == expected["parameter_sha256"]
    lines = (tmp_path / "ahead" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 6
