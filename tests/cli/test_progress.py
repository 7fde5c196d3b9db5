"""Before the first step ends, a run says what it is doing."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fdp.cli import progress
from fdp.fast.compile_modes import Compile
from fdp.run.step_record import StepRecord


def record(step: int) -> Any:
    fields: dict[str, Any] = dict.fromkeys(StepRecord._fields)
    fields |= {"step": step, "loss": 1.0, "epsilon": 2.0, "samples": 4, "seconds": 0.1}
    return StepRecord(**fields)


@pytest.fixture
def _slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second last twenty, so that what takes a fraction of one does so on a busy machine too."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() / 20)
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05 / 20)


def shown(compile: Compile, seconds: float, *, terminal: bool) -> str:
    def stream() -> Any:
        time.sleep(seconds)
        yield None, record(1)
        yield None, record(2)

    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    model = SimpleNamespace(blocks=[None] * 8)
    run: Any = SimpleNamespace(config=SimpleNamespace(compile=compile, steps=2, model=model))
    assert len(list(progress.follow(stream(), run, console))) == 2
    return out.getvalue()


@pytest.mark.parametrize("compile", [Compile.BLOCK, Compile.STEP])
def test_a_log_says_at_once_that_the_run_compiles(compile: Compile) -> None:
    lines = shown(compile, 0, terminal=False).splitlines()
    assert [line.split()[0] for line in lines] == ["compiling", "step", "step"]


def test_a_log_says_nothing_of_a_first_step_that_is_not_slow() -> None:
    assert len(shown(Compile.NONE, 0, terminal=False).splitlines()) == 2


@pytest.mark.usefixtures("_slow_clock")
def test_a_log_says_that_the_first_step_is_slow() -> None:
    assert shown(Compile.NONE, 0.2, terminal=False).splitlines()[0] == "making the first step, 0 s so far"


@pytest.mark.usefixtures("_slow_clock")
def test_a_terminal_shows_what_happens_and_since_when() -> None:
    text = shown(Compile.STEP, 0.3, terminal=True)
    assert "compiling the step as one graph of all 8 blocks, about 2 minutes here" in text.replace("\n", " ")
    assert "0 s so far" in text
    waiting = progress.Waiting("waiting")
    waiting.since -= 34
    assert str(waiting) == "waiting, 34 s so far"


def test_a_log_says_again_and_again_that_a_step_is_still_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    lines = shown(Compile.STEP, 0.6, terminal=False).splitlines()
    said = [line for line in lines if line.startswith("compiling the step as one graph of all 8 blocks")]
    assert 2 <= len(said) <= 5, "at once, and after 0.05, 0.1, 0.2 and 0.4 seconds"
    assert [line.endswith("s so far") for line in said] == [False] + [True] * (len(said) - 1)


@pytest.mark.usefixtures("_slow_clock")
@pytest.mark.parametrize("terminal", [False, True])
def test_stages_before_the_first_step_are_told_while_they_last(terminal: bool) -> None:
    out = io.StringIO()
    with progress.tell_stages(Console(file=out, force_terminal=terminal, width=120)) as say:
        say("reading the data")
        time.sleep(0.4)
        say("checking the model")
    assert "reading the data, 0 s so far" in out.getvalue()
    assert "checking the model" not in out.getvalue() or terminal
