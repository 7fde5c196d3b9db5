"""The charts of a report: which curves go together, their labels, and whether the budget covers them.

>>> [draw(chart) for chart in make_charts(runs)]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fdp.privacy.shown_numbers import shown_delta
from fdp.report.charts import Band, Chart, Line
from fdp.report.contents import Contents
from fdp.report.curves import Curve
from fdp.report.markup import Html, element

COLOURS = 8
"""Colours of runs before they repeat."""
COSTS = {
    "public": ("free", "public", "Computed on public data: costs no privacy."),
    "outside": ("bad", "outside the guarantee", "On held-out private data: nothing is promised to the people in it."),
    "noised": ("good", "covered", "Released with noise, within the budget of --eval-epsilon."),
}
"""The badge of held-out figures, by the cost of the evaluation."""
EMPTY = Curve(np.array([]), np.array([]))


def make_charts(runs: Sequence[Contents]) -> list[Chart]:
    """Return the charts for which any run has values."""
    makers = (_loss, _accuracy, _epsilon, _norms, _clipped, _throughput, _memory, _learning_rate, _parameter_norm)
    charts = [make(runs) for make in makers]
    return [chart for chart in charts if any(len(line.curve.present) for line in chart.lines)]


def coverage(runs: Sequence[Contents], *, covered: bool) -> Html:
    """Return the badge of a figure that the budget covers, or does not; another one if no run is private."""
    if not any(run.private for run in runs):
        return badge("none", "not private", "These runs have no privacy budget.")
    if covered:
        return badge("good", "covered", "The privacy budget covers this figure: it may be shared.")
    return badge("bad", "not covered", "Computed on private data without noise: guard it as you guard the data.")


def badge(kind: str, text: str, why: str) -> Html:
    """Return a small label with an explanation."""
    return element("span", text, class_=f"badge {kind}", title=why)


def cost_badge(cost: str) -> Html:
    """Return the badge of a held-out figure."""
    return badge(*COSTS.get(cost, ("bad", "not covered", "Of an unknown kind.")))


def colour(run: int) -> str:
    """Return the CSS class of a run's colour."""
    return f"c{run % COLOURS}"


def _loss(runs: Sequence[Contents]) -> Chart:
    several, lines, costs = len(runs) > 1, [], []
    for i, run in enumerate(runs):
        lines += [] if several else [Line(None, _of(run, "loss"), f"{colour(i)} faint", i)]
        lines += [Line(_name("training", run, several), _of(run, "loss_smoothed"), colour(i), i)]
        if run.cost is not None:
            other = colour(i) if several else "c1"
            lines.append(Line(_name("held out", run, several), _of(run, "held_out_loss"), f"{other} dots", i))
            costs.append(run.cost)
    training = [("c0" if not several else "ink", "training, smoothed" if costs or not several else "smoothed")]
    keys = training + ([("c1 dots" if not several else "ink dots", "held out")] if costs else [])
    badges = [element("span", "training ", coverage(runs, covered=False))] if costs else [coverage(runs, covered=False)]
    badges += [element("span", "held out ", cost_badge(cost)) for cost in dict.fromkeys(costs)]
    return _chart(
        runs,
        "loss",
        "Loss",
        "nats, mean over the samples",
        lines,
        tuple(badges),
        keys=tuple(keys),
        logarithmic=1,
        wide=True,
    )


def _accuracy(runs: Sequence[Contents]) -> Chart:
    lines = [
        Line(_name("accuracy", run, len(runs) > 1), _percent(_of(run, "held_out_accuracy")), f"{colour(i)} dots", i)
        for i, run in enumerate(runs)
    ]
    badges = tuple(cost_badge(cost) for cost in dict.fromkeys(run.cost for run in runs if run.cost))
    return _chart(runs, "accuracy", "Held-out accuracy", "%", lines, badges)


def _epsilon(runs: Sequence[Contents]) -> Chart:
    several, lines, bands, top = len(runs) > 1, [], [], 0.0
    deltas = {run.results["delta"] for run in runs if run.results["delta"] is not None}
    for i, run in enumerate(runs):
        spent, budget = _of(run, "epsilon"), run.results["epsilon_planned"]
        if budget is None or not len(spent.steps):
            continue
        last = run.results["steps_planned"]
        limit = Curve(np.array([1.0, float(last)]), np.array([budget, budget]))
        lines += [
            Line(_name("spent", run, several), spent, colour(i), i),
            Line(None, limit, f"{colour(i) if several else 'ink'} dashed", i),
        ]
        top = max(top, budget * 1.08)
        bands += [] if several else [Band(spent, Curve(spent.steps, np.full(len(spent.steps), budget)), "ink", i)]
    at = f"at delta {shown_delta(next(iter(deltas)))}" if len(deltas) == 1 else "at each run's delta"
    at += ", each run alone" if any(run.results["total_in_words"] is not None for run in runs) else ""
    style = "ink" if several else "c0"
    keys = ((style, "spent"), ("ink dashed", "when all steps are made"))
    keys += () if several else (("ink area", "left"),)
    return _chart(
        runs,
        "epsilon",
        "Privacy spent, epsilon",
        at,
        lines,
        (coverage(runs, covered=True),),
        bands=tuple(bands),
        keys=keys,
        from_zero=True,
        top=top,
    )


def _norms(runs: Sequence[Contents]) -> Chart:
    several, lines, bands = len(runs) > 1, [], []
    for i, run in enumerate(runs):
        bands += [] if several else [Band(_of(run, "norm_q10"), _of(run, "norm_q90"), colour(i), i)]
        lines.append(Line(_name("median norm", run, several), _of(run, "norm_q50"), colour(i), i))
        if not several:
            lines += [Line(f"{q} %", _of(run, f"norm_q{q}"), f"{colour(i)} hidden", i) for q in (90, 10)]
        lines.append(
            Line(_name("C", run, several), _of(run, "max_norm"), f"{colour(i) if several else 'c2'} dashed", i)
        )
    keys = (("ink", "median"), ("ink dashed", "C, the clipping bound"))
    if not several:
        keys = (("c0", "median"), ("c0 area", "10 % to 90 %"), ("c2 dashed", "C, the clipping bound"))
    return _chart(
        runs,
        "norms",
        "Gradient norm of a sample",
        "before clipping",
        lines,
        (coverage(runs, covered=False),),
        bands=tuple(bands),
        keys=keys,
        logarithmic=2,
    )


def _clipped(runs: Sequence[Contents]) -> Chart:
    lines = _with_smoothed(runs, "clipped_fraction", "clipped", scale=100.0)
    unit = "% of the samples of a step"
    return _chart(
        runs, "clipped", "Clipped samples", unit, lines, (coverage(runs, covered=False),), from_zero=True, top=100.0
    )


def _throughput(runs: Sequence[Contents]) -> Chart:
    lines = _with_smoothed(runs, "samples_per_second", "samples per second")
    badges = (coverage(runs, covered=False),)
    return _chart(runs, "throughput", "Throughput", "samples per second", lines, badges, from_zero=True)


def _memory(runs: Sequence[Contents]) -> Chart:
    several = len(runs) > 1
    lines = [Line(_name("peak", run, several), _of(run, "memory_gib"), colour(i), i) for i, run in enumerate(runs)]
    badges = (coverage(runs, covered=False),)
    return _chart(runs, "memory", "Peak memory so far", "GiB, first rank", lines, badges, from_zero=True)


def _learning_rate(runs: Sequence[Contents]) -> Chart:
    several = len(runs) > 1
    lines = [Line(_name("rate", run, several), _of(run, "learning_rate"), colour(i), i) for i, run in enumerate(runs)]
    public = badge("free", "public", "A setting: nothing of the data is in it.")
    return _chart(runs, "learning-rate", "Learning rate", "per step", lines, (public,), from_zero=True)


def _parameter_norm(runs: Sequence[Contents]) -> Chart:
    several = len(runs) > 1
    lines = [Line(_name("norm", run, several), _of(run, "parameter_norm"), colour(i), i) for i, run in enumerate(runs)]
    badges = (coverage(runs, covered=True),)
    return _chart(runs, "parameters", "Norm of all parameters", "after the step", lines, badges)


def _with_smoothed(runs: Sequence[Contents], name: str, label: str, *, scale: float = 1.0) -> list[Line]:
    several, lines = len(runs) > 1, []
    for i, run in enumerate(runs):
        raw, smooth = (_scaled(_of(run, key), scale) for key in (name, f"{name}_smoothed"))
        lines += [] if several else [Line(None, raw, f"{colour(i)} faint", i)]
        lines.append(Line(_name(label, run, several), smooth, colour(i), i))
    return lines


def _chart(
    runs: Sequence[Contents],
    name: str,
    title: str,
    unit: str,
    lines: Sequence[Line],
    badges: tuple[Html, ...],
    **more: object,
) -> Chart:
    last = max([run.results["steps_planned"] for run in runs if run.results["steps"]], default=1)
    told = [_tell(line) for line in lines if line.label is not None]
    summary = "; ".join(words for words in told if words)
    return Chart(name, title, unit, tuple(lines), badges, summary, last_step=last, **more)  # pyright: ignore


def _tell(line: Line) -> str | None:
    """Return a curve in words, for readers who do not see it."""
    there = np.isfinite(line.curve.values)
    if not there.any():
        return None
    steps, values = line.curve.steps[there], line.curve.values[there]
    return f"{line.label}: from {values[0]:.4g} at step {steps[0]:.0f} to {values[-1]:.4g} at step {steps[-1]:.0f}"


def _of(run: Contents, name: str) -> Curve:
    return run.curves.get(name, EMPTY)


def _name(what: str, run: Contents, several: bool) -> str:
    return f"{run.name}, {what}" if several else what


def _percent(found: Curve) -> Curve:
    return _scaled(found, 100.0)


def _scaled(found: Curve, factor: float) -> Curve:
    return Curve(found.steps, np.where(np.isfinite(found.values), found.values * factor, math.nan))
