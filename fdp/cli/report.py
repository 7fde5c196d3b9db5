"""``report.png``: loss, epsilon, and the norms of the gradients against C, over the steps.

>>> write_report(folder, run, records, title="gpt-nano on stdlib")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdp.gradients.plan import Method
from fdp.privacy.guarantee import RELATION
from fdp.run.step_metrics import StepRecord
from fdp.run.training_run import Run
from fdp.storage.private_files import open_private

BLUE, ORANGE, GREY = "#0b7285", "#d9480f", "#868e96"


def write_report(folder: Path, run: Run, records: Sequence[StepRecord], *, title: str) -> None:
    """Write ``report.png`` with three panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), dpi=130, layout="constrained")
    loss, epsilon, norms = figure.subplots(1, 3)
    _plot_loss(loss, records)
    _plot_epsilon(epsilon, run, records)
    _plot_norms(norms, run, records)
    for axes in (loss, epsilon, norms):
        axes.set_xlabel("step")
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12)
    note = "losses and norms are computed on private data: the budget covers the parameters only"
    figure.supxlabel(note if run.epsilons is None else f"{note} ({RELATION})", fontsize=8)
    with open_private(folder / "report.png", "xb") as file:
        FigureCanvasAgg(figure).print_png(file)


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred running mean over a twentieth of the steps, without missing values."""
    half = max(1, len(values) // 40)
    present = np.isfinite(values)
    kernel = np.ones(2 * half + 1)
    total = np.convolve(np.where(present, values, 0.0), kernel)[half:-half]
    weight = np.convolve(present.astype(float), kernel)[half:-half]
    return np.divide(total, weight, out=np.full(len(values), math.nan), where=weight > 0)


def _plot_loss(axes: Any, records: Sequence[StepRecord]) -> None:
    steps, losses = _series(records, "step"), _series(records, "loss")
    axes.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=1)
    axes.plot(steps, smooth(losses), color=BLUE, linewidth=2)
    axes.set_title("loss per sample")


def _plot_epsilon(axes: Any, run: Run, records: Sequence[StepRecord]) -> None:
    if run.epsilons is None:
        axes.text(0.5, 0.5, "not private", ha="center", va="center", transform=axes.transAxes, color=GREY)
    else:
        axes.plot(_series(records, "step"), _series(records, "epsilon"), color=ORANGE, linewidth=2)
        axes.set_ylim(bottom=0)
    axes.set_title(f"epsilon spent at delta {run.config.delta:.3g}")


def _plot_norms(axes: Any, run: Run, records: Sequence[StepRecord]) -> None:
    steps = _series(records, "step")
    low, middle, high = (_series(records, name) for name in ("norm_q10", "norm_q50", "norm_q90"))
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.2, linewidth=0, label="10 % to 90 %")
    axes.plot(steps, middle, color=BLUE, linewidth=1.5, label="median")
    if run.config.method is not Method.NONE:
        axes.plot(steps, _series(records, "max_norm"), color=ORANGE, linewidth=1.5, linestyle="--", label="C")
    if np.nanmin(low, initial=math.inf) > 0 and np.isfinite(low).any():
        axes.set_yscale("log")
    axes.set_title("gradient norm of a sample")
    axes.legend(frameon=False)


def _series(records: Sequence[StepRecord], name: str) -> np.ndarray:
    """Return a field of every record, NaN where it is None."""
    values = [getattr(record, name) for record in records]
    return np.array([math.nan if value is None else value for value in values], dtype=float)
