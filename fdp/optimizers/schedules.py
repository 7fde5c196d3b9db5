"""Learning rates as functions of the step.

    lr(t), t = 0, 1, 2, ... a tensor

A schedule is a pure function from a 0-d step tensor to a 0-d float64 tensor, in torch operations only, so that a step
that uses it compiles once. Warm-up starts at 1/steps of the peak, not at 0: every private step costs budget, so none
is wasted.

    >>> lr = warmup_cosine(3e-4, warmup_steps=100, steps=5000)
    >>> lr(torch.tensor(0))                            # 3e-6
    >>> optimizer = adamw(lr)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp.arguments import whole_number
from fdp.optimizers import checks
from fdp.types import FdpError

Schedule: TypeAlias = Callable[[Int[Tensor, ""]], Float[Tensor, ""]]
"""The value at a step, counted from 0."""


def as_schedule(value: float | Schedule) -> Schedule:
    """Return a schedule unchanged, and a number as the constant schedule."""
    return value if callable(value) else constant(value)


def constant(value: float) -> Schedule:
    """``lr(t) = value``."""
    checks.nonnegative("value", value)
    return lambda step: torch.full((), value, dtype=torch.float64, device=step.device)


def linear(start: float, end: float, *, steps: int) -> Schedule:
    """``lr(t) = start + (end - start) min(t / steps, 1)``."""
    checks.nonnegative("start", start)
    checks.nonnegative("end", end)
    _count("steps", steps)
    return lambda step: start + (end - start) * _progress(step, steps)


def cosine(peak: float, *, steps: int, end: float = 0.0) -> Schedule:
    """``lr(t) = end + (peak - end) (1 + cos(pi min(t / steps, 1))) / 2`` (arXiv 1608.03983)."""
    checks.nonnegative("peak", peak)
    checks.nonnegative("end", end)
    _count("steps", steps)
    return lambda step: end + (peak - end) * (1 + torch.cos(math.pi * _progress(step, steps))) / 2


def warmup(schedule: Schedule, *, steps: int) -> Schedule:
    """``lr(t) = schedule(0) (t + 1) / steps`` for ``t < steps``, then ``schedule(t - steps)``."""
    _count("warmup steps", steps)
    return lambda step: schedule((step - steps).clamp(min=0)) * ((step + 1).double() / steps).clamp(max=1)


def warmup_cosine(peak: float, *, warmup_steps: int, steps: int, end: float = 0.0) -> Schedule:
    """Warm up linearly to ``peak`` over ``warmup_steps``, then follow a cosine to ``end`` at step ``steps``."""
    if not 0 < warmup_steps < steps:
        raise FdpError(f"warmup_steps: expected 0 < warmup_steps < steps = {steps}, got {warmup_steps}")
    return warmup(cosine(peak, steps=steps - warmup_steps, end=end), steps=warmup_steps)


def step_decay(value: float, *, every: int, factor: float) -> Schedule:
    """``lr(t) = value factor^floor(t / every)``."""
    checks.nonnegative("value", value)
    checks.positive("factor", factor)
    _count("every", every)
    return lambda step: value * torch.exp(math.log(factor) * (step // every).double())


def piecewise(value: float, *, factors: Mapping[int, float]) -> Schedule:
    """``lr(t) = value prod {factors[s] : s <= t}``: multiplied by ``factors[s]`` from step ``s`` on."""
    checks.nonnegative("value", value)
    for at, factor in factors.items():
        checks.nonnegative(f"factors[{at}]", factor)

    def schedule(step: Int[Tensor, ""]) -> Float[Tensor, ""]:
        rate = torch.full((), value, dtype=torch.float64, device=step.device)
        for at, factor in factors.items():
            rate = torch.where(step >= at, rate * factor, rate)
        return rate

    return schedule


def _progress(step: Int[Tensor, ""], steps: int) -> Float[Tensor, ""]:
    return (step.double() / steps).clamp(max=1)


def _count(name: str, value: int) -> None:
    whole_number(name, value)
