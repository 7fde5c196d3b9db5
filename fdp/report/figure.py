"""``report.png``: loss, epsilon, and the norms of the gradients against C, over the steps.

>>> write_report(folder, run, records, title="gpt-nano on stdlib")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fdp.gradients.plan import Method
from fdp.privacy.guarantee import RELATION
from fdp.privacy.shown_numbers import shown_delta
from fdp.report.curves import Curve, curve, held_out, smoothed
from fdp.run.prepare_run import Run
from fdp.run.step_record import StepRecord
from fdp.storage.private_files import open_private

BLUE, ORANGE, GREEN, GREY = "#0b7285", "#d9480f", "#5c940d", "#868e96"
HELD_OUT = {
    "public": "held out (public data)",
    "outside": "held out (outside the guarantee)",
    "noised": "held out (noised, in the budget)",
}
"""Labels of the held-out loss, by the ``cost`` of an evaluation."""
TITLE_LENGTH = 90


def write_report(folder: Path, run: Run, records: Sequence[StepRecord], *, title: str) -> None:
    """Write ``report.png`` with three panels."""
    with open_private(folder / "report.png", "xb") as file:
        save_png(draw_report(run, records, title=title), file)


def save_png(figure: Any, file: IO[bytes]) -> None:
    """Write a matplotlib figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(file)


def draw_report(run: Run, records: Sequence[StepRecord], *, title: str) -> Any:
    """Return the matplotlib figure of ``report.png``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.4), dpi=130, layout="constrained")
    layout: Any = figure.get_layout_engine()
    layout.set(wspace=0.06, w_pad=0.1, h_pad=0.08)
    loss, epsilon, norms = figure.subplots(1, 3)
    _plot_loss(loss, records)
    _plot_epsilon(epsilon, run, records)
    _plot_norms(norms, run, records)
    for axes in (loss, epsilon, norms):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    # A dollar sign would start a formula.
    shown = (title if len(title) <= TITLE_LENGTH else f"{title[: TITLE_LENGTH - 3]}...").replace("$", r"\$")
    figure.suptitle(shown, fontsize=12, fontweight="bold")
    note = "losses and norms are computed on private data: the budget covers the parameters only"
    figure.supxlabel(note if run.epsilons is None else f"{note} ({RELATION})", fontsize=8)
    return figure


def _plot_loss(axes: Any, records: Sequence[StepRecord]) -> None:
    losses, other = curve(records, "loss"), held_out(records, "loss")
    axes.plot(losses.steps, losses.values, color=BLUE, alpha=0.3, linewidth=1)
    axes.plot(*smoothed(losses), color=BLUE, linewidth=2, label="training")
    if len(other.steps):
        costs = [record.evaluation.cost for record in records if record.evaluation is not None]
        axes.plot(
            *other, color=GREEN, linewidth=1.5, marker="o", markersize=4, label=HELD_OUT.get(costs[-1], "held out")
        )
        axes.legend(frameon=False, fontsize=8)
    _title(axes, "Loss of a sample", "nats")


def _plot_epsilon(axes: Any, run: Run, records: Sequence[StepRecord]) -> None:
    if run.epsilons is None:
        axes.text(0.5, 0.5, "not private", ha="center", va="center", transform=axes.transAxes, color=GREY)
        _title(axes, "Privacy", "epsilon")
        return
    budget, spent = float(run.epsilons[-1]), curve(records, "epsilon")
    axes.plot(*spent, color=ORANGE, linewidth=2, label="spent")
    axes.axhline(budget, color=GREY, linewidth=1.2, linestyle="--", label=f"of all {run.config.steps} steps")
    if len(spent.steps):
        axes.fill_between(spent.steps, spent.values, budget, color=GREY, alpha=0.12, linewidth=0, label="left")
    axes.set_ylim(bottom=0, top=budget * 1.08)
    axes.set_xlim(left=0, right=run.config.steps * 1.02)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    title = "Epsilon of this run alone" if run.config.before else "Epsilon"
    _title(axes, title, f"at delta {shown_delta(run.config.delta)}")


def _plot_norms(axes: Any, run: Run, records: Sequence[StepRecord]) -> None:
    low, middle, high, bound = (curve(records, name) for name in ("norm_q10", "norm_q50", "norm_q90", "max_norm"))
    if len(low.present):
        axes.fill_between(low.steps, low.values, high.values, color=BLUE, alpha=0.2, linewidth=0, label="10 % to 90 %")
        axes.plot(*middle, color=BLUE, linewidth=1.5, label="median")
    if run.config.method is not Method.NONE:
        axes.plot(*bound, color=ORANGE, linewidth=1.5, linestyle="--", label="C")
    if _is_positive(low):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
    else:
        axes.text(0.5, 0.5, "not clipped", ha="center", va="center", transform=axes.transAxes, color=GREY)
    _title(axes, "Gradient norm of a sample", "against C")


def _title(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", pad=8)
    axes.set_ylabel(unit, fontsize=9, color=GREY)


def _is_positive(found: Curve) -> bool:
    return bool(len(found.present)) and bool(np.nanmin(found.values, initial=math.inf) > 0)
