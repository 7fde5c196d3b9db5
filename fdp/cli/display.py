"""What a run shows: a header, a line that moves (or, in a log, one line in ten), and a closing statement.

    >>> show_header(console, run, state, settings)
    >>> for state, record in follow(steps(run, state), run, console): ...
    >>> show_closing(console, summary, folder)

On a terminal the progress is redrawn in place; anywhere else it is plain lines without control codes.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from fdp import tree
from fdp.cli import rounded_up
from fdp.cli.configure import learning_rate
from fdp.data.read_counts import read_counts_of
from fdp.data.units import dataset_unit, sentence
from fdp.gradients.plan import Method
from fdp.kfac.private.sources import Feed, kind_of
from fdp.kfac.state import KfacPlan
from fdp.privacy.guarantee import RELATION, delta_advice, shown_epsilon, training_again
from fdp.run.step_metrics import Record, guarantee_of
from fdp.run.training_run import Run
from fdp.step import Compile
from fdp.types import TrainState

BARS = "▁▂▃▄▅▆▇█"
WINDOW = 20
"""Steps over which speed is averaged."""

ROUNDED = ", of the number of samples rounded up; --population announces another"
COVERED = "the parameters: model.safetensors (of a folder: model/), and all that is computed from them alone"
NOT_COVERED = (
    "every loss, norm of a gradient, clipped fraction, sample count and time: metrics.jsonl, report.png, summary.json, "
    "this screen, computed on the private data; and checkpoints/, which hold the key of the noise. Guard them as you "
    "guard the data"
)
EARLY_STOP = (
    "after {steps} of {steps_planned} steps. The epsilon is that of all {steps_planned}, since what the run showed may "
    "have decided the stop; it is {less} if the {steps} steps were decided on before the run"
)
FIXED_SEED = "the noise can be repeated, and taken away, by whoever guesses it. For a real release leave --seed out"


def show_header(console: Console, run: Run, state: TrainState, settings: Mapping[str, Any]) -> None:
    """The run in words, before it starts; ``settings`` are the names it was asked for by."""
    config, model, rate = run.config, run.config.model, run.mechanism.sampling.rate
    population, reading = run.mechanism.sampling.population, read_counts_of(config.dataset)
    rounded = ROUNDED if config.population is None else ""
    rows = [
        (
            "model",
            f"{model.name}, {tree.size(state.params):,} parameters"
            + (f", context {model.context}" if model.context else ""),
        ),
        (
            "data",
            f"{settings['data']}, "
            + (f"{len(config.dataset):,} samples" if reading is None else reading.line())
            + " (counts are private)",
        ),
        (
            "training",
            f"{config.steps} steps of {settings['optimizer']}, learning rate {learning_rate(settings):g} "
            f"({settings['schedule']}), {settings['dtype']} on {config.device.type}"
            + ("" if config.compile is Compile.NONE else f", compiled by {config.compile.value}")
            + (", replayed as a CUDA graph" if config.cuda_graph else ""),
        ),
        (
            "sampling",
            f"Poisson, {config.batch_size} of {population:,} expected per step (public rate {rate:.3g}{rounded}), "
            f"{config.microbatch_size} at a time",
        ),
    ]
    if run.kfac is not None:
        rows.append(("curvature", _curvature(run.kfac.plan, run.feed)))
    if run.sharding is not None and config.layout is not None:
        axes = ", ".join(f"{axis}={size}" for axis, size in config.layout.axes.items())
        rows.append(("ranks", f"{run.sharding.world.size}: {axes}, ZeRO-{config.layout.zero.value}"))
    if kept := [name for name, on_cpu in config.offload._asdict().items() if on_cpu]:
        rows.append(("on the CPU", ", ".join(kept)))
    if config.method is not Method.NONE:
        start = "C = " if config.clip.count_noise is None else "adapting from C = "
        bound = f"{start}{settings['max_norm']:g}"
        rows += [
            ("clipping", f"{config.clip.name}, {bound}, method {config.method.value}"),
            ("noise", f"{rounded_up(run.mechanism.noise_multiplier, 4)} x C on the sum of the clipped gradients"),
        ]
    if (more := run.mechanism.statistics) is not None:
        rows.append(
            (
                "statistics",
                f"of the curvature, a draw of their own every {more.period} steps, clipped to {more.max_norm:g}, "
                f"noise {rounded_up(more.noise_multiplier, 4)} x that; the budget has them",
            )
        )
    if run.epsilons is None:
        rows.append(("privacy", "none: this run is not private"))
    else:
        rows += [
            ("unit of privacy", sentence(dataset_unit(config.dataset), change="added or removed")),
            ("neighbours", RELATION),
            (
                "budget",
                f"epsilon {shown_epsilon(run.epsilons[-1])} at delta {config.delta:.3g} after {config.steps} steps",
            ),
        ]
    console.print(_panel("fdp train", rows))
    if config.model.remark is not None:
        console.print(Text(config.model.remark, style="yellow"), soft_wrap=True)
    for warning in [] if reading is None else reading.warnings():
        console.print(Text(f"{warning} (counts of private data: covered by no budget)", style="yellow"))
    if warning := training_again(config.before, guarantee_of(run)):
        console.print(Text(warning, style="yellow"))
    if run.epsilons is not None:
        if advice := delta_advice(max(population, len(config.dataset)), config.delta):
            console.print(Text(advice, style="yellow"))
        if config.seed is not None:
            console.print(Text(f"seed {config.seed}: {FIXED_SEED}", style="yellow"))


def show_closing(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """The result in words, and which outputs the budget covers."""
    first, last = _number(summary["loss_first"]), _number(summary["loss_last"])
    rows = [("loss", f"{first} → {last} in {summary['steps']} steps")]
    if summary.get("kfac_failures"):
        rows.append(
            ("curvature", f"{summary['kfac_failures']} times a layer kept its last: not finite or not invertible")
        )
    if summary["private"]:
        promised = (
            f"epsilon {shown_epsilon(summary['epsilon'])} at delta {summary['delta']:.3g} ({summary['relation']})"
        )
        rows.append(("privacy", promised))
        if summary["steps"] < summary["steps_planned"]:
            less = shown_epsilon(summary["epsilon_if_stop_was_decided_in_advance"])
            rows.append(("early stop", EARLY_STOP.format(**summary, less=less)))
        rows += [
            ("covered", COVERED),
            ("not covered", NOT_COVERED),
        ]
    else:
        rows.append(("privacy", "none: the parameters may reveal the data they were trained on"))
    if "warning" in summary:
        rows.append(("trained before", summary["warning"]))
    rows.append(("files", str(folder)))
    console.print(_panel("done", rows))


def follow(
    stream: Iterable[tuple[TrainState, Record]], run: Run, console: Console
) -> Iterator[tuple[TrainState, Record]]:
    """The same stream, shown as it passes."""
    return (_live if console.is_terminal else _lines)(stream, run.config.steps, console)


def _lines(
    stream: Iterable[tuple[TrainState, Record]], total: int, console: Console
) -> Iterator[tuple[TrainState, Record]]:
    recent: deque[Record] = deque(maxlen=WINDOW)
    every = max(1, total // 10)
    for state, record in stream:
        recent.append(record)
        if record.step == 1 or record.step % every == 0 or record.step == total:
            console.print(f"step {record.step:>{len(str(total))}}/{total}  " + "  ".join(facts(recent, total)))
        yield state, record


def _live(
    stream: Iterable[tuple[TrainState, Record]], total: int, console: Console
) -> Iterator[tuple[TrainState, Record]]:
    recent: deque[Record] = deque(maxlen=WINDOW)
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
            line = Text("  ·  ".join(facts(recent, total)) + "   ") + Text(sparkline(losses), style="cyan")
            live.update(Group(bar, line))
            yield state, record


def facts(recent: Sequence[Record], total: int) -> list[str]:
    """Loss, epsilon spent, samples per second and time left."""
    last = recent[-1]
    seconds = statistics.median(record.seconds for record in recent)  # the first step may have compiled
    rate = statistics.mean(record.samples for record in recent) / seconds
    left = (total - last.step) * seconds
    spent = "not private" if last.epsilon is None else f"epsilon {shown_epsilon(last.epsilon)}"
    speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
    return [f"loss {_number(last.loss)}", spent, f"{speed} samples/s", f"{_duration(left)} left"]


def sparkline(values: list[float], width: int = 24) -> str:
    """The values as a row of bars, averaged into at most ``width`` groups, from the least to the greatest."""
    if len(values) < 2:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _curvature(plan: KfacPlan, feed: Feed | None) -> str:
    """The forms that were chosen, and when and on what they are measured."""
    on = "" if feed is None else f" on {kind_of(feed)} data"
    forms = Counter(f"{row.left.value} x {row.right.value}" for row in plan.rows)
    layers = ", ".join(f"{count} {form}" for form, count in forms.items())
    config = plan.config
    return (
        f"{config.fisher.value} Fisher information, damping {config.damping:g}, every {config.factor_period} "
        f"steps{on}; layers: {layers}"
    )


def _panel(title: str, rows: list[tuple[str, str]]) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return Panel(table, title=title, title_align="left", border_style="cyan", expand=False)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
