"""Divergence: the loss stays well above that of the first parameters.

    limit = first + max(1, first / 2)         first: the loss of step 1, at the parameters before any update
    diverged if ``patience`` losses in a row are above the limit, or 3 in a row above 10 (first + 1) or not finite

A model that has learnt nothing stays near ``first``, and a single batch of difficult samples does not count. After the
last step fewer losses suffice: if the last quarter of a short run is above the limit, it has not made progress.

    >>> find_divergence(records, steps=40)    # a Divergence, or None
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fdp.run.step_record import StepRecord

FAR_STEPS = 3
"""This many losses in a row that are far above the first one, or not finite, end a run."""


class Divergence(NamedTuple):
    """A loss that stayed above ``limit``: at ``step`` it was ``loss`` (None: not finite), at first ``first``."""

    step: int
    loss: float | None
    first: float
    limit: float

    @property
    def sentence(self) -> str:
        """The divergence in words."""
        now = "not finite" if self.loss is None else f"{self.loss:.4g}"
        return f"the loss is {now} at step {self.step}; before the first update it was {self.first:.4g}"


def patience(steps: int) -> int:
    """Return how many losses in a row must be above the limit in a run of ``steps`` steps."""
    return min(max(steps // 20, 5), 50)


def find_divergence(records: Sequence[StepRecord], *, steps: int) -> Divergence | None:
    """Return the divergence that the records so far of a run of ``steps`` steps show, or None."""
    first = next((record.loss for record in records if record.loss is not None), None)
    if first is None:
        return None
    limit, needed = first + max(1.0, first / 2), patience(steps)
    if records[-1].step >= steps:
        needed = min(needed, max(1, steps // 4))
    drawn = [record for record in records[-2 * needed - FAR_STEPS :] if record.samples]  # a draw may be empty
    losses = [math.inf if record.loss is None else record.loss for record in drawn]
    far = len(losses) >= FAR_STEPS and min(losses[-FAR_STEPS:]) > 10 * (first + 1)
    if far or (len(losses) >= needed and min(losses[-needed:]) > limit):
        return Divergence(drawn[-1].step, drawn[-1].loss, first, limit)
    return None
