"""The contents of a report: everything the page shows about a run, as plain values.

The page (:mod:`fdp.report.page`) and ``fdp report --json`` are made from the same :class:`Contents`, so they cannot
differ.

    >>> contents = read_contents(read_run_folder(Path("runs/notes")), settings=settings, learning_rates=None)
    >>> contents.results["loss_last"], contents.curves["epsilon"], contents.as_json()
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fdp.report.curves import Curve, average, curve, curve_of, held_out, sample_at, smoothed, thin
from fdp.report.headline import model_total
from fdp.report.search_price import find_search
from fdp.run.run_folder import RunFolder
from fdp.run.step_record import StepRecord

SHOWN_TEXTS = 12
"""Evaluations whose generated texts are shown, the last ones."""
TEXT_LENGTH = 2000
"""Characters of a generated text that are shown."""
OLD_SEARCH = (
    "An older fdp made this run of a search: its summary.json leaves out the price of the search. fdp statement states "
    "the total with other runs on the same data."
)
NORMS = ("norm_q10", "norm_q50", "norm_q90", "max_norm")


class State(Enum):
    """The state of a run: ended, stopped before its last step, or still open."""

    FINISHED = "finished"
    STOPPED = "stopped early"
    UNFINISHED = "not finished"
    DIVERGED = "diverged"


class Setting(NamedTuple):
    """An option of ``fdp train`` as the run used it. ``group`` is its heading in ``--help``."""

    key: str
    flag: str
    value: Any
    default: Any
    group: str

    @property
    def changed(self) -> bool:
        """True if the value is not the default."""
        return self.value != self.default


class Contents(NamedTuple):
    """All that is shown about one run. Curves are thinned; ``results`` are computed from all steps."""

    name: str
    path: str
    title: str
    state: State
    private: bool
    cost: str | None
    results: dict[str, Any]
    curves: dict[str, Curve]
    texts: list[tuple[int, tuple[str, ...]]]
    settings: tuple[Setting, ...]
    plan: dict[str, Any] | None
    config: dict[str, Any]
    statement: str

    def as_json(self) -> dict[str, Any]:
        """Return the contents as values of JSON."""
        return {
            "name": self.name,
            "path": self.path,
            "title": self.title,
            "state": self.state.value,
            "private": self.private,
            "evaluation_cost": self.cost,
            "results": self.results,
            "curves": {name: found.as_json() for name, found in self.curves.items()},
            "texts": [{"step": step, "texts": list(texts)} for step, texts in self.texts],
            "settings": {each.key: each.value for each in self.settings},
            "changed_settings": {each.key: each.value for each in self.settings if each.changed},
            "plan": self.plan,
            "versions": self.config.get("versions"),
            "statement": self.statement,
        }


def read_contents(
    run: RunFolder,
    *,
    settings: Sequence[Setting],
    statement: str,
    learning_rates: Sequence[float] | None = None,
    points: int = 400,
) -> Contents:
    """Return what is shown of a run, with at most ``points`` points per curve.

    ``learning_rates`` are those of the planned steps, from the first; None if they are not known.
    """
    records, planned = run.records, int(run.settings["steps"])
    costs = [record.evaluation.cost for record in records if record.evaluation is not None]
    private = run.summary["private"] if run.summary else bool(run.config.get("noise_multiplier"))
    return Contents(
        name=run.path.resolve().name,
        path=str(run.path),
        title=f"{_short(run.settings['model'])} on {_short(run.settings['data'])}",
        state=_state(run, planned),
        private=bool(private),
        cost=costs[-1] if costs else None,
        results=_results(run, planned),
        curves=_curves(records, learning_rates, points),
        texts=_texts(records),
        settings=tuple(settings),
        plan=read_plan(run.path),
        config=run.config,
        statement=statement,
    )


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Return ``plan.json``, or None if the run has none that can be read: runs of older versions wrote none."""
    try:
        plan = json.loads((folder / "plan.json").read_text())
    except (OSError, ValueError):
        return None
    return plan if isinstance(plan, dict) and isinstance(plan.get("rows"), list) else None


def planned_epsilon(run: RunFolder) -> float | None:
    """Return the epsilon of all planned steps: what the run states when it ends."""
    found = (run.summary or {}).get("epsilon")
    return next(
        (e for e in (found, run.config.get("epsilon_planned"), run.config.get("epsilon")) if e is not None), None
    )


def _state(run: RunFolder, planned: int) -> State:
    if run.summary is None:
        return State.UNFINISHED
    if run.summary.get("diverged"):
        return State.DIVERGED
    return State.STOPPED if run.summary["steps"] < planned else State.FINISHED


def _results(run: RunFolder, planned: int) -> dict[str, Any]:
    """Return the figures of the run; None for one that it does not have."""
    records, summary = run.records, run.summary or {}
    losses, other, right = curve(records, "loss"), held_out(records, "loss"), held_out(records, "accuracy")
    budget, spent = planned_epsilon(run), _last(curve(records, "epsilon"))
    total, covers = model_total(run) or (None, None)
    seconds = [record.seconds for record in records]
    shared = next((each.evaluation.shared for each in reversed(records) if each.evaluation is not None), 0)
    best = float(other.values.min()) if len(other.values) else None
    return {
        "steps": summary.get("steps", len(records)),
        "steps_planned": planned,
        "loss_first": _first(losses),
        "loss_last": _last(losses),
        "held_out_loss_last": _last(other),
        "held_out_loss_best": best,
        "held_out_loss_best_step": int(other.steps[other.values.argmin()]) if best is not None else None,
        "held_out_samples_trained_on": shared,
        "held_out_perplexity": _last(held_out(records, "perplexity")),
        "held_out_accuracy_last": _last(right),
        "epsilon_spent": spent,
        "epsilon_planned": budget,
        "epsilon_left": None if budget is None else max(0.0, budget - (spent or 0.0)),
        "epsilon_first_step": _first(curve(records, "epsilon")),
        "delta": run.config.get("delta") if budget is not None else None,
        "epsilon_total": total and total.epsilon,
        "delta_total": total and total.delta,
        "total_in_words": covers,
        "noise_multiplier": run.config.get("noise_multiplier"),
        "clipped_fraction": _mean(curve(records, "clipped_fraction")),
        "norm_median": _last(curve(records, "norm_q50")),
        "max_norm": _last(curve(records, "max_norm")),
        "samples_per_second": sum(record.samples for record in records) / sum(seconds) if sum(seconds) > 0 else None,
        "seconds_per_step": statistics.median(seconds) if seconds else None,
        "seconds": sum(seconds),
        "peak_memory_bytes": summary.get("peak_memory_bytes") or _last(curve(records, "peak_memory_bytes")),
        "parameter_count": summary.get("parameter_count"),
        "unit": summary.get("unit"),
        "relation": run.config.get("relation"),
        "world_size": summary.get("world_size"),
        "device": run.config.get("device"),
        "method": run.settings.get("method"),
        "warning": _warning(run),
    }


def _warning(run: RunFolder) -> str | None:
    """Return what the summary says of other runs, unless an older fdp left the price of a search out of it."""
    summary = run.summary or {}
    if "epsilon_of_model" not in summary and find_search(run.path) is not None:
        return OLD_SEARCH
    return summary.get("warning")


def _curves(records: Sequence[StepRecord], learning_rates: Sequence[float] | None, points: int) -> dict[str, Curve]:
    """Return the curves that have values, thinned."""
    speed = curve_of(records, lambda record: record.samples / record.seconds if record.seconds > 0 else None)
    memory = curve_of(records, lambda record: record.peak_memory_bytes and record.peak_memory_bytes / 2**30)
    rates = [] if learning_rates is None else list(learning_rates)
    found = {
        "loss": thin(curve(records, "loss"), limit=points),
        "loss_smoothed": sample_at(smoothed(curve(records, "loss")), limit=points // 2),
        "held_out_loss": thin(held_out(records, "loss"), limit=points // 2),
        "held_out_accuracy": thin(held_out(records, "accuracy"), limit=points // 2),
        "epsilon": sample_at(curve(records, "epsilon"), limit=points // 2),
        **{name: average(curve(records, name), limit=points // 2) for name in NORMS},
        "clipped_fraction": thin(curve(records, "clipped_fraction"), limit=points),
        "clipped_fraction_smoothed": sample_at(smoothed(curve(records, "clipped_fraction")), limit=points // 2),
        "samples_per_second": thin(speed, limit=points),
        "samples_per_second_smoothed": sample_at(smoothed(speed), limit=points // 2),
        "memory_gib": sample_at(memory, limit=points // 2),
        "learning_rate": sample_at(
            Curve(np.arange(1.0, len(rates) + 1), np.array(rates, dtype=float)), limit=points // 2
        ),
        "parameter_norm": sample_at(curve(records, "parameter_norm"), limit=points // 2),
    }
    return {name: each for name, each in found.items() if len(each.present)}


def _texts(records: Sequence[StepRecord]) -> list[tuple[int, tuple[str, ...]]]:
    found = [(each.step, each.evaluation.texts) for each in records if each.evaluation and each.evaluation.texts]
    return [(step, tuple(text[:TEXT_LENGTH] for text in texts)) for step, texts in found[-SHOWN_TEXTS:]]


def _first(found: Curve) -> float | None:
    return float(found.present[0]) if len(found.present) else None


def _last(found: Curve) -> float | None:
    return float(found.present[-1]) if len(found.present) else None


def _mean(found: Curve) -> float | None:
    return float(found.present.mean()) if len(found.present) else None


def _short(name: Any) -> str:
    """Return the last part of a path."""
    return Path(str(name)).name or str(name)


def differing_settings(runs: Sequence[Contents]) -> list[tuple[Setting, list[Any]]]:
    """Return the settings whose values differ between the runs, with the value of each run; not where files go."""
    by_key: dict[str, Setting] = {each.key: each for run in runs for each in run.settings}
    rows = []
    for key, setting in by_key.items():
        values = [next((each.value for each in run.settings if each.key == key), None) for run in runs]
        if key != "out" and any(value != values[0] for value in values):
            rows.append((setting, values))
    return rows


def as_json(runs: Sequence[Contents]) -> dict[str, Any]:
    """Return everything a page of these runs shows."""
    differing: Mapping[str, list[Any]] = {setting.key: values for setting, values in differing_settings(runs)}
    return {"runs": [run.as_json() for run in runs], "differing_settings": differing}
