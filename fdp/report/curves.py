"""Curves over the steps of a run: read from its records, smoothed, and thinned for a page.

    smooth(y)_t = mean of y over a twentieth of the steps around t
    thin(x, y, n): the least and the greatest y of each of n / 2 groups of steps, so that a spike is never lost

>>> loss = curve(records, "loss")
>>> shown = thin(loss, limit=400)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fdp.run.step_record import StepRecord

DIGITS = 6
"""Significant digits of a value on a page."""


class Curve(NamedTuple):
    """Values by step. A missing or infinite value is NaN."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def present(self) -> np.ndarray:
        """The values that are there."""
        return self.values[np.isfinite(self.values)]

    def as_json(self) -> dict[str, list[float | None]]:
        """Return steps and values with ``DIGITS`` digits, None for a missing value."""
        values = [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in self.values.tolist()]
        return {"step": [int(step) for step in self.steps], "value": values}


def curve(records: Sequence[StepRecord], name: str) -> Curve:
    """Return a field of every record by step."""
    return curve_of(records, lambda record: getattr(record, name))


def curve_of(records: Sequence[StepRecord], value: Callable[[StepRecord], float | None]) -> Curve:
    """Return ``value(record)`` by step, NaN where it is None or infinite."""
    steps = np.array([record.step for record in records], dtype=float)
    found = [value(record) for record in records]
    values = np.array([math.nan if each is None else each for each in found], dtype=float)
    return Curve(steps, np.where(np.isfinite(values), values, math.nan))


def held_out(records: Sequence[StepRecord], name: str) -> Curve:
    """Return ``loss``, ``perplexity`` or ``accuracy`` on held-out data, only at the steps that have it."""
    found = curve_of(records, lambda record: record.evaluation and getattr(record.evaluation, name))
    there = np.isfinite(found.values)
    return Curve(found.steps[there], found.values[there])


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred running mean over a twentieth of the steps, without missing values."""
    half = max(1, len(values) // 40)
    present = np.isfinite(values)
    kernel = np.ones(2 * half + 1)
    total = np.convolve(np.where(present, values, 0.0), kernel)[half:-half]
    weight = np.convolve(present.astype(float), kernel)[half:-half]
    return np.divide(total, weight, out=np.full(len(values), math.nan), where=weight > 0)


def smoothed(found: Curve) -> Curve:
    """Return a curve smoothed by :func:`smooth`."""
    return Curve(found.steps, smooth(found.values)) if len(found.steps) else found


def thin(found: Curve, *, limit: int) -> Curve:
    """Return at most ``limit`` points: the first, the last, and the extremes of equal groups of the others."""
    if len(found.steps) <= limit:
        return found
    keep = {0, len(found.steps) - 1}
    for group in np.array_split(np.arange(1, len(found.steps) - 1), max(1, limit // 2 - 1)):
        values = found.values[group]
        if np.isfinite(values).any():
            keep |= {int(group[np.nanargmin(values)]), int(group[np.nanargmax(values)])}
        else:
            keep.add(int(group[0]))  # a gap stays a gap
    chosen = sorted(keep)
    return Curve(found.steps[chosen], found.values[chosen])


def average(found: Curve, *, limit: int) -> Curve:
    """Return at most ``limit`` points: the means of equal groups of steps, for curves that jump from step to step."""
    if len(found.steps) <= limit:
        return found
    groups = np.array_split(np.arange(len(found.steps)), limit)
    there = [group[np.isfinite(found.values[group])] for group in groups]
    values = [found.values[group].mean() if len(group) else math.nan for group in there]
    return Curve(np.array([round(found.steps[group].mean()) for group in groups], dtype=float), np.array(values))


def sample_at(found: Curve, *, limit: int) -> Curve:
    """Return at most ``limit`` points, evenly spaced: for curves that are smooth."""
    chosen = np.unique(np.linspace(0, len(found.steps) - 1, limit).round().astype(int)) if len(found.steps) else []
    return Curve(found.steps[chosen], found.values[chosen]) if len(found.steps) > limit else found
