"""Batch size and number of steps that make most progress within a budget of time and privacy.

    max over (B, T) of   T / (1 + (1 - a^2) / (a^2 B) + z(B, T)^2 k / (a B)^2)
    with                 T (t_step + B t_sample) <= seconds,   B <= population / 2

z(B, T) is the noise multiplier that the privacy budget needs, and the rest is the predicted progress of
:mod:`fdp.advice.signal`. Small batches drown in noise. Large ones take steps away, and near a sampling rate of 1 they
need as much more noise as they average away: from there on only the total matters (Sander et al. 2023, arXiv
2210.03403), so among settings within 3 % of the best we take the one that needs least time. The result is a batch
size well above the usual one, the more so the longer the run: the finding of De et al. 2022 (arXiv 2204.13650), Li et
al. 2022 (2110.05679), Anil et al. 2021 (2108.01624) and McKenna et al. 2025 (2501.18914).

    >>> choose_batch_and_steps(problem, speed, seconds=3600.0, fixed=Fixed())        # Choice(256, 1300, 0.61)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from fdp.advice import signal
from fdp.privacy import accounting
from fdp.privacy.clipping import flat
from fdp.privacy.loss_distributions import rough_epsilon
from fdp.privacy.sampling import poisson
from fdp.types import FdpError

MOST_STEPS, FEWEST_STEPS = 20_000, 10
HIGHEST_RATE = 0.5
NEARLY_BEST = 0.97


class Problem(NamedTuple):
    """A number of trained parameters, a population and a budget. Every number in it is public.

    Exactly one of ``epsilon`` and ``noise_multiplier`` is given.
    """

    parameters: int
    pretrained: bool
    population: int
    epsilon: float | None
    delta: float
    noise_multiplier: float | None = None


class Speed(NamedTuple):
    """Seconds of a step: ``per_step + batch size x per_sample``."""

    per_step: float
    per_sample: float

    def seconds(self, batch_size: float, steps: int) -> float:
        """Return the seconds of ``steps`` steps."""
        return steps * (self.per_step + batch_size * self.per_sample)


class Fixed(NamedTuple):
    """Settings that are given: a batch size, and steps or epochs; None: to be chosen."""

    batch_size: int | None = None
    steps: int | None = None
    epochs: float | None = None

    def steps_of(self, batch_size: int, population: int) -> int | None:
        """Return the steps that follow for a batch size; None if they are to be chosen."""
        if self.epochs is not None:
            return max(1, math.ceil(self.epochs * population / batch_size))
        return self.steps


class Choice(NamedTuple):
    """A batch size and a number of steps, with the noise multiplier that the budget needs."""

    batch_size: int
    steps: int
    noise_multiplier: float


def largest_batch(population: int) -> int:
    """Return the largest batch size that is recommended: above it sampling protects no one."""
    return max(1, int(HIGHEST_RATE * population))


def exact_noise(problem: Problem, *, batch_size: int, steps: int) -> float:
    """Return the noise multiplier of a run, by the accountant that ``fdp train`` uses."""
    if problem.epsilon is None:
        assert problem.noise_multiplier is not None
        return problem.noise_multiplier
    sampling = poisson(problem.population, expected_batch_size=batch_size, population=problem.population)
    return accounting.noise_multiplier_for(
        sampling, flat(max_norm=1.0), epsilon=problem.epsilon, delta=problem.delta, steps=steps
    )


def rough_noise(problem: Problem, *, batch_size: float, steps: int) -> float:
    """Return about the noise multiplier, from a closed form, in microseconds."""
    if problem.epsilon is None:
        assert problem.noise_multiplier is not None
        return problem.noise_multiplier
    low, high = math.log(0.05), math.log(1e5)
    while high - low > 1e-3:
        middle = (low + high) / 2
        spent = rough_epsilon(batch_size / problem.population, math.exp(middle), steps, problem.delta)
        low, high = (middle, high) if spent > problem.epsilon else (low, middle)
    return math.exp(high)


def choose_batch_and_steps(
    problem: Problem,
    speed: Speed,
    *,
    seconds: float,
    fixed: Fixed,
) -> Choice:
    """Return the batch size and steps of most predicted progress; what is ``fixed`` stays as it is."""
    if not 0 < seconds < math.inf:
        raise FdpError(f"--hours: expected a positive number, got {seconds / 3600:g}")
    correction, found = 1.2, (1, 1)
    for _ in range(3):  # the closed form is off by a factor that changes slowly with both
        found = _best(problem, speed, seconds, fixed, correction)
        noise = exact_noise(problem, batch_size=found[0], steps=found[1])
        before, correction = correction, noise / rough_noise(problem, batch_size=found[0], steps=found[1])
        if abs(correction / before - 1) < 0.05:
            break
    return Choice(*found, exact_noise(problem, batch_size=found[0], steps=found[1]))


def _best(problem: Problem, speed: Speed, seconds: float, fixed: Fixed, correction: float) -> tuple[int, int]:
    """Return the cheapest (batch size, steps) whose progress is within 3 % of the largest."""

    def progress(batch: int, count: int) -> float:
        return signal.progress(
            noise_multiplier=correction * rough_noise(problem, batch_size=batch, steps=count),
            batch_size=batch,
            parameters=problem.parameters,
            steps=count,
            alignment=signal.alignment_of(pretrained=problem.pretrained, steps=count),
        )

    pairs = list(_candidates(problem, speed, seconds, fixed))
    if not pairs:
        smallest = fixed.batch_size or _round_sizes()[0]
        raise FdpError(
            f"--hours: expected time for {FEWEST_STEPS} steps, got {seconds / 3600:.3g} hours, and a step of "
            f"{smallest} samples takes about {speed.seconds(smallest, 1):.3g} s on this machine, as busy as it is now; "
            f"give more time, a smaller --model or a shorter --context, or try again when the machine is less busy"
        )
    fitting = [pair for pair in pairs if speed.seconds(*pair) <= seconds]
    if not fitting:  # the given settings take longer, whatever the rest: take the quickest
        return min(pairs, key=lambda pair: speed.seconds(*pair))
    known = {pair: progress(*pair) for pair in fitting}
    enough = NEARLY_BEST * max(known.values())
    return min((pair for pair in fitting if known[pair] >= enough), key=lambda pair: speed.seconds(*pair))


def _candidates(problem: Problem, speed: Speed, seconds: float, fixed: Fixed) -> Iterator[tuple[int, int]]:
    """Yield batch sizes in round numbers with the steps that fit, and fewer; settings that are fixed need not fit."""
    most = largest_batch(problem.population)
    batches = [batch for batch in _round_sizes() if batch <= most] or [most]
    for batch in batches if fixed.batch_size is None else [fixed.batch_size]:
        if (steps := fixed.steps_of(batch, problem.population)) is not None:
            yield batch, steps
            continue
        fitting = min(int(seconds / speed.seconds(batch, 1)), MOST_STEPS)
        counts = {_round_steps(round(fitting * part)) for part in (1, 0.7, 0.5, 0.35, 0.25, 0.1)}
        yield from ((batch, count) for count in sorted(counts) if count >= FEWEST_STEPS)


def _round_sizes() -> list[int]:
    """Return 8, 12, 16, 24, 32, ...: powers of two and the numbers half-way between them."""
    return sorted({size for power in range(3, 24) for size in (2**power, 3 * 2 ** (power - 1))})


def _round_steps(steps: int) -> int:
    """Round down to two digits."""
    grain = 10 ** max(0, len(str(steps)) - 2)
    return steps // grain * grain
