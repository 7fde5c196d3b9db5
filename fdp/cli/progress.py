"""The progress that ``fdp train`` shows: a line redrawn in place on a terminal, else one plain line in ten steps.

>>> for state, record in follow(steps(run, state), run, console): ...
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from fdp.cli.display import loss_text
from fdp.privacy.guarantee import shown_epsilon
from fdp.run.step_metrics import StepRecord
from fdp.run.training_run import Run
from fdp.types import TrainState

BARS = "▁▂▃▄▅▆▇█"
SPEED_STEPS = 20
"""Steps over which the speed is averaged."""


def follow(
    stream: Iterable[tuple[TrainState, StepRecord]], run: Run, console: Console
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on and show its progress."""
    return (_redraw if console.is_terminal else _print_lines)(stream, run.config.steps, console)


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


def _print_lines(
    stream: Iterable[tuple[TrainState, StepRecord]], total: int, console: Console
) -> Iterator[tuple[TrainState, StepRecord]]:
    recent: deque[StepRecord] = deque(maxlen=SPEED_STEPS)
    every = max(1, total // 10)
    for state, record in stream:
        recent.append(record)
        if record.step == 1 or record.step % every == 0 or record.step == total:
            words = "  ".join(progress_words(recent, total))
            console.print(f"step {record.step:>{len(str(total))}}/{total}  {words}")
        yield state, record


def _redraw(
    stream: Iterable[tuple[TrainState, StepRecord]], total: int, console: Console
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
    line = Text("waiting for the first step", style="dim")
    with Live(Group(bar, line), console=console, refresh_per_second=8) as live:
        for state, record in stream:
            recent.append(record)
            losses += [record.loss] if record.loss is not None else []
            bar.update(task, completed=record.step)
            line = Text("  ·  ".join(progress_words(recent, total)) + "   ") + Text(sparkline(losses), style="cyan")
            live.update(Group(bar, line))
            yield state, record


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
