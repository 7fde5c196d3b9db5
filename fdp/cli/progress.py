"""The progress that ``fdp train`` shows: a line redrawn in place on a terminal, else one plain line in ten steps.

Reading the data, checking the model and the first step, which may compile, can take minutes. Until they end, a terminal
shows what the run is doing and since when; a log gets a line about it after a while, and again after twice as long.

>>> for state, record in follow(steps(run, state), run, console): ...
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from fdp.cli.display import loss_text
from fdp.fast.compile_modes import Compile
from fdp.privacy.shown_numbers import shown_epsilon
from fdp.run.prepare_run import Run
from fdp.run.step_record import StepRecord
from fdp.types import TrainState

BARS = "▁▂▃▄▅▆▇█"
SPEED_STEPS = 20
"""Steps over which the speed is averaged."""
PATIENCE_S = 10.0
"""Seconds after which a log says what the run is still doing, and again after twice, four times, ... as many."""
STEP_COMPILE_S, LAYER_COMPILE_S = 60, 10
"""Seconds that a compiled step takes to start, and more for each block; measured on an H200 and on two CPU cores."""
FIRST_STEP = {
    Compile.NONE: "making the first step",
    Compile.BLOCK: "compiling every kind of block once, in the first step (half a minute for gpt-nano on a CPU)",
    Compile.STEP: (
        "compiling the step as one graph of all {blocks} blocks, about {minutes} here; --compile block starts within "
        "seconds"
    ),
}
"""What a run does before its first step ends."""


class Waiting:
    """A line that says what the run is doing, and for how long it has been. ``long`` things are told at once."""

    def __init__(self, what: str, *, long: bool = False) -> None:
        self.what, self.long, self.since = what, long, time.monotonic()

    def __str__(self) -> str:
        return f"{self.what}, {time.monotonic() - self.since:.0f} s so far"

    def __rich__(self) -> Text:
        return Text(str(self), style="dim")


class ProgressLine:
    """The line below the bar. It is composed when the terminal is refreshed, and not at every step."""

    def __init__(self, recent: deque[StepRecord], losses: list[float], total: int) -> None:
        self.recent, self.losses, self.total = recent, losses, total

    def __rich__(self) -> Text:
        recent = list(self.recent)
        words = "  ·  ".join(progress_words(recent, self.total)) + "   " if recent else ""
        return Text(words) + Text(sparkline(list(self.losses)), style="cyan")


def follow(
    stream: Iterable[tuple[TrainState, StepRecord]], run: Run, console: Console
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on and show its progress."""
    waiting = Waiting(first_step_words(run), long=run.config.compile is not Compile.NONE)
    if console.is_terminal:
        return _redraw(stream, run.config.steps, console, waiting)
    return _print_lines(stream, run.config.steps, console, waiting)


def first_step_words(run: Run) -> str:
    """Return what happens in the first step, and how long it is expected to take if a whole step is compiled."""
    blocks = len(run.config.model.blocks)
    minutes = max(1, round((STEP_COMPILE_S + LAYER_COMPILE_S * blocks) / 60))
    spelled = "a minute" if minutes == 1 else f"{minutes} minutes"
    return FIRST_STEP[run.config.compile].format(blocks=blocks, minutes=spelled)


@contextmanager
def tell_stages(console: Console) -> Iterator[Callable[[str], None]]:
    """Show what a run does before its steps; call the value with the words for each stage as it begins."""
    waiting = Waiting("starting")

    def say(what: str) -> None:
        waiting.what, waiting.since = what, time.monotonic()

    if console.is_terminal:
        with Live(waiting, console=console, refresh_per_second=4, transient=True):
            yield say
    else:
        with _repeat_when_late(waiting, console):
            yield say


def progress_words(recent: Sequence[StepRecord], total: int) -> list[str]:
    """Return the loss, the epsilon spent, the samples per second and the time left, as text."""
    last = recent[-1]
    seconds = statistics.median(record.seconds for record in recent)  # the first step may have compiled
    rate = statistics.mean(record.samples for record in recent) / seconds
    left = (total - last.step) * seconds
    spent = "not private" if last.epsilon is None else f"epsilon {shown_epsilon(last.epsilon)}"
    speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
    return [f"loss {loss_text(last.loss)}", spent, f"{speed} samples/s", f"{_duration(left)} left"]


def sparkline(values: list[float], width: int = 24) -> str:
    """Return the values, averaged into at most ``width`` groups, as a row of bars."""
    if len(values) < 2:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    bars_per_unit = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * bars_per_unit)] for mean in means)


@contextmanager
def _repeat_when_late(waiting: Waiting, console: Console) -> Iterator[Callable[[], None]]:
    """Print one line at once if the run compiles, and more while it takes long; the value ends that."""
    if waiting.long:
        console.print(waiting.what, soft_wrap=True)
    ended = threading.Event()

    def repeat() -> None:
        stage, due = waiting.since, PATIENCE_S
        while not ended.wait(min(1.0, PATIENCE_S / 4)):
            if waiting.since != stage:
                stage, due = waiting.since, PATIENCE_S
            if time.monotonic() - stage >= due:
                console.print(str(waiting), soft_wrap=True)
                due *= 2

    threading.Thread(target=repeat, name="fdp-waiting", daemon=True).start()
    try:
        yield ended.set
    finally:
        ended.set()


def _print_lines(
    stream: Iterable[tuple[TrainState, StepRecord]], total: int, console: Console, waiting: Waiting
) -> Iterator[tuple[TrainState, StepRecord]]:
    recent: deque[StepRecord] = deque(maxlen=SPEED_STEPS)
    every = max(1, total // 10)
    with _repeat_when_late(waiting, console) as end_waiting:
        for state, record in stream:
            end_waiting()
            recent.append(record)
            if record.step == 1 or record.step % every == 0 or record.step == total:
                words = "  ".join(progress_words(recent, total))
                console.print(f"step {record.step:>{len(str(total))}}/{total}  {words}")
            yield state, record


def _redraw(
    stream: Iterable[tuple[TrainState, StepRecord]], total: int, console: Console, waiting: Waiting
) -> Iterator[tuple[TrainState, StepRecord]]:
    recent: deque[StepRecord] = deque(maxlen=SPEED_STEPS)
    losses: list[float] = []
    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=None, complete_style="cyan", finished_style="cyan"),
        TaskProgressColumn(),
        console=console,
        expand=True,
    )
    task = bar.add_task("train", total=total)
    line = ProgressLine(recent, losses, total)
    with Live(Group(bar, waiting), console=console, refresh_per_second=8) as live:
        for state, record in stream:
            if not recent:
                live.update(Group(bar, line))
            recent.append(record)
            losses += [record.loss] if record.loss is not None else []
            bar.update(task, completed=record.step)
            yield state, record


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
