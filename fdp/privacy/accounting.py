"""Privacy accounting: the epsilon of T steps, by Google's ``dp_accounting``, and the noise that a budget needs.

    step    = Poisson(q) -> sum of clipped gradients + z C N(0, I)  [quantile clipping: and count + b N(0, 1)]
    z_eff   = (z^-2 + (2 b)^-2)^(-1/2)                 (Andrew et al. 2021, arXiv 1905.03871, Theorem 1)
    epsilon = min { e : delta_T(e) <= delta },         delta_T the hockey-stick divergence of T composed steps

Sum and count are one Gaussian release on one draw, hence one multiplier. ``mechanism.statistics``, released before
every period-th step from draws of their own, are composed with the steps. Neighbours differ by one sample **added or
removed**, and the sampling rate q is public. The number of samples is not, and no figure depends on it. For truncated
Poisson, where removing a sample may let another one in, an upper bound for the same relation is used (after arXiv
2508.15089), which holds for every number of samples up to the public one. Every figure is an upper bound; RDP is
looser than PLD (``fdp.privacy.loss_distributions``).

    >>> sampling, clip = poisson(48_211, expected_batch_size=256, population=50_000), flat(max_norm=1.0)
    >>> z = noise_multiplier_for(sampling, clip, epsilon=3.0, delta=1e-6, steps=1000)
    >>> epsilon(Mechanism(sampling, clip, z), steps=1000, delta=1e-6)                   # at most 3.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, lru_cache
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant
from scipy.optimize import root_scalar

from fdp.arguments import nonnegative_number, positive_number, probability, whole_number
from fdp.privacy import sampling as sampling_
from fdp.privacy.clipping import ClipStyle
from fdp.privacy.composition import Composition
from fdp.privacy.loss_distributions import (
    TOO_COARSE,
    TruncatedEvent,
    compose_pld,
    grid_width,
    one_step_pld,
    parts_of,
    rdp_total,
    rough_epsilon,
)
from fdp.privacy.mechanism import Mechanism, Statistics
from fdp.privacy.sampling import Poisson
from fdp.privacy.shown_numbers import shown_delta
from fdp.types import FdpError

SMALLEST_DELTA = 1e-12
"""Below this the rounding of the PLD's Fourier transforms matters; RDP has no such limit."""

_NEGLIGIBLE = 1e-9
"""A noise multiplier below this counts as none: dp_accounting's squares of it overflow."""

_EVERY, _TOLERANCE = 300, 0.003
"""Up to this many epsilons are computed one by one; beyond, neighbours may differ by this fraction of the last."""

_NOISE_RANGE = (0.05, 1e5)
_NOISE_TOLERANCE = 5e-4
_COARSER = 8


class Accountant(Enum):
    """The way losses are composed over steps. PLD is tight to about 0.1 %; RDP is 5 to 15 % above it, or more."""

    PLD = "pld"
    RDP = "rdp"


def effective_noise_multiplier(mechanism: Mechanism) -> float:
    """Return ``z_eff``, the noise multiplier of sum and quantile count together; at most the sum's own."""
    z, count_noise = mechanism.noise_multiplier, mechanism.clip.count_noise
    z = nonnegative_number("noise_multiplier", z)
    if count_noise is not None:
        count_noise = nonnegative_number("clip.count_noise", count_noise)
    if z == 0 or count_noise == 0:
        return 0.0
    return z if count_noise is None else 1.0 / math.hypot(1.0 / z, 0.5 / count_noise)


def event(mechanism: Mechanism, steps: int) -> dp_accounting.DpEvent:
    """Return ``steps`` steps of ``mechanism`` as a dp_accounting event, for any of its accountants.

    Guarantees:
      - every field that bears on privacy is in it: rate, truncation, noise multiplier, count noise, steps; and the same
        of every release of statistics in these steps;
      - no noise on the sum, on a released count or on statistics makes it a ``NonPrivateDpEvent``.
    """
    steps = whole_number("steps", steps)
    parts: list[Any] = [_composed_event(mechanism.sampling, effective_noise_multiplier(mechanism), steps)]
    if (more := mechanism.statistics) is not None:
        noise = nonnegative_number("statistics.noise_multiplier", more.noise_multiplier)
        parts.append(_composed_event(more.sampling, noise, more.releases(steps)))
    if None in parts:
        return dp_accounting.NonPrivateDpEvent()
    return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)


def epsilon(mechanism: Mechanism, *, steps: int, delta: float, accountant: Accountant = Accountant.PLD) -> float:
    """Return the epsilon of ``steps`` steps at ``delta``; ``inf`` without noise, and possibly if it exceeds 700.

    Choose ``delta`` well below ``1 / population``: see :func:`fdp.privacy.guarantee.delta_advice`.

    Guarantees:
      - at least the true epsilon of the mechanism;
      - more steps, a larger rate or a smaller delta never lower it; more noise never raises it.
    """
    _check_delta(delta, accountant)
    return _epsilon(event(mechanism, steps), delta, accountant)


def delta(mechanism: Mechanism, *, steps: int, epsilon: float, accountant: Accountant = Accountant.PLD) -> float:
    """Return the delta of ``steps`` steps at ``epsilon``, an upper bound; by PLD at least ``SMALLEST_DELTA``."""
    nonnegative_number("epsilon", epsilon)
    total = event(mechanism, steps)
    if not parts_of(total):
        return 1.0
    with np.errstate(all="ignore"):
        if accountant is Accountant.RDP:
            return float(rdp_privacy_accountant.compute_delta(*rdp_total(total), epsilon)[0])
        interval = grid_width(total, 1e-6)
        found = 1.0 if interval > TOO_COARSE else float(compose_pld(total, interval).get_delta_for_epsilon(epsilon))
    return min(1.0, max(SMALLEST_DELTA, found))


def epsilon_curve(
    mechanism: Mechanism,
    *,
    steps: Sequence[int],
    delta: float,
    accountant: Accountant = Accountant.PLD,
    tolerance: float | None = None,
) -> list[float]:
    """Return the epsilon after each of ``steps``, for a plot or a live display. The last is :func:`epsilon`.

    With a ``tolerance`` above 0, only about ``1.5 / tolerance`` of them are computed, so that neighbours differ by at
    most that fraction of the last; a step between two computed ones gets the value of the later one. By default up to
    300 steps are all computed, and more with a tolerance of 0.003.

    Guarantees:
      - at least the true epsilon at every step; never falls from one step to a later one.
    """
    _check_delta(delta, accountant)
    if not len(steps):
        return []
    points = sorted(set(steps))
    last = len(points) - 1
    if tolerance is None:
        tolerance = 0.0 if last < _EVERY else _TOLERANCE
    value_at = _epsilons(mechanism, points, delta, accountant)
    known = {last: epsilon(mechanism, steps=points[last], delta=delta, accountant=accountant), 0: value_at(points[0])}
    gaps = [(0, last)] if last else []
    while gaps and known[last] < math.inf:
        left, right = gaps.pop()
        if right - left > 1 and known[right] - known[left] > tolerance * known[last]:
            middle = (left + right) // 2
            known[middle] = value_at(points[middle])
            gaps += [(left, middle), (middle, right)]
    value, answer = known[last], {}
    for place in range(last, -1, -1):
        value = min(value, known.get(place, value))
        answer[points[place]] = value
    return [answer[count] for count in steps]


def _epsilons(
    mechanism: Mechanism, points: Sequence[int], delta: float, accountant: Accountant
) -> Callable[[int], float]:
    """Return the function from a number of steps, between the first and last of ``points``, to epsilon on one grid."""
    total = event(mechanism, points[-1])
    if accountant is Accountant.RDP or not parts_of(total) or (interval := grid_width(total, delta)) > TOO_COARSE:
        return lambda count: _epsilon(event(mechanism, count), delta, accountant)
    with np.errstate(all="ignore"):
        kinds = [one_step_pld(part.event, interval) for part in parts_of(total)]
        composition = Composition(kinds, most=[part.count for part in parts_of(total)], delta=delta)
    return lambda count: composition.epsilon([part.count for part in parts_of(event(mechanism, count))])


def noise_multiplier_for(
    sampling: Poisson,
    clip: ClipStyle,
    *,
    epsilon: float,
    delta: float,
    steps: int,
    accountant: Accountant = Accountant.PLD,
    statistics: Statistics | None = None,
    before: dp_accounting.ComposedDpEvent | None = None,
) -> float:
    """Return the smallest noise multiplier, its ``z_eff`` to 0.1 %, that keeps ``steps`` steps within the budget.

    ``statistics`` are paid for from the same budget, with their own noise. So is ``before``: releases about the same
    data that were made already (:func:`fdp.privacy.releases.composed_event`).

    Guarantees:
      - by the same accountant, the mechanism with this multiplier has an epsilon of at most ``epsilon``;
      - a budget that cannot be met is an error, not a best effort.
    """
    positive_number("epsilon", epsilon)
    steps = whole_number("steps", steps)
    _check_delta(delta, accountant)
    _check_left(before, epsilon, delta, accountant)

    def excess(log_noise: float, coarser: float = 1) -> float:
        mechanism = Mechanism(sampling, clip._replace(count_noise=None), math.exp(log_noise), statistics)
        total = event(mechanism, steps)
        if before is not None:
            total = dp_accounting.ComposedDpEvent([*parts_of(before), *parts_of(total)])
        interval = coarser * grid_width(total, delta)
        return min(_epsilon(total, delta, accountant, interval=interval), 1e9) - epsilon

    # Find the root and the slope on a coarse grid, then take two or three Newton steps on the fine one.
    coarse = cache(lambda log_noise: excess(log_noise, _COARSER))
    low, high = _bracket(coarse, sampling, epsilon=epsilon, delta=delta, steps=steps)
    slope = (coarse(high) - coarse(low)) / (high - low)
    found = root_scalar(coarse, bracket=(low, high), xtol=_NOISE_TOLERANCE / 4).root
    for _ in range(4):
        change = -excess(found) / slope
        found += min(max(change, low - high), high - low)
        if abs(change) < _NOISE_TOLERANCE / 4:
            break
    found += _NOISE_TOLERANCE / 2
    while excess(found) > 0:
        found += _NOISE_TOLERANCE / 2
    noise = math.exp(found)
    if clip.count_noise is None:
        return noise
    # 1 / z^2 = 1 / z_eff^2 - 1 / (2 b)^2; the last factor covers the rounding of this conversion and its inverse.
    left = noise**-2 - (2 * clip.count_noise) ** -2 if clip.count_noise > 0 else -math.inf
    if left <= 1e-6 * noise**-2:
        raise FdpError(
            f"clip.count_noise: expected more than {noise / 2:.4g}, got {clip.count_noise}: the quantile "
            f"count alone spends epsilon {epsilon} at delta {delta}. Raise count_noise, which is a twentieth of "
            f"--batch-size in fdp train, or the target"
        )
    return left**-0.5 * (1 + 1e-9)


def _epsilon(total: Any, delta: float, accountant: Accountant, *, interval: float | None = None) -> float:
    return _epsilon_of(tuple(parts_of(total)), delta, accountant, interval)


@lru_cache(maxsize=512)
def _epsilon_of(parts: tuple[Any, ...], delta: float, accountant: Accountant, interval: float | None) -> float:
    if not parts:
        return math.inf
    total = dp_accounting.ComposedDpEvent(list(parts))
    # Masses that underflow make the libraries divide by denormals; they skip it, or return inf.
    with np.errstate(all="ignore"):
        if accountant is Accountant.RDP:
            return float(rdp_privacy_accountant.compute_epsilon(*rdp_total(total), delta)[0])
        interval = interval or grid_width(total, delta)
        return math.inf if interval > TOO_COARSE else float(compose_pld(total, interval).get_epsilon_for_delta(delta))


def _composed_event(drawn: Poisson, z: float, count: int) -> dp_accounting.SelfComposedDpEvent | None:
    """Return ``count`` subsampled Gaussian releases, or None if the noise is too small to give a finite epsilon."""
    sampling_.check(drawn)
    if z < _NEGLIGIBLE:
        return None
    if drawn.max_batch_size is None or drawn.max_batch_size >= drawn.population:
        each = dp_accounting.PoissonSampledDpEvent(drawn.rate, dp_accounting.GaussianDpEvent(z))
    else:
        each = TruncatedEvent(drawn.population, drawn.rate, drawn.max_batch_size, z)
    return dp_accounting.SelfComposedDpEvent(each, count)


def _bracket(
    excess: Callable[[float], float], sampling: Poisson, *, epsilon: float, delta: float, steps: int
) -> tuple[float, float]:
    """Bracket the root of ``excess`` in log noise, ``(low, high)``, from a closed-form guess."""
    least, most = (math.log(z) for z in _NOISE_RANGE)
    low, high = least, most
    while high - low > 0.01:
        guess = (low + high) / 2
        scale = rough_epsilon(sampling.rate, math.exp(guess), steps, delta)
        low, high = (guess, high) if scale > epsilon else (low, guess)
    while excess(high) > 0:
        if high >= most:
            raise FdpError(
                f"epsilon: expected a target within reach of a noise multiplier of {_NOISE_RANGE[1]:g}, got "
                f"{epsilon} at delta {delta} over {steps} steps. Raise epsilon, or lower steps or batch size (or "
                f"the share of the budget that statistics spend, if there are any)"
            )
        low, high = high, min(high + 0.2, most)
    while excess(low) <= 0:
        if low <= least:
            check_small_delta(delta, sampling.population)
            raise FdpError(
                f"epsilon: expected a target that needs a noise multiplier above {_NOISE_RANGE[0]:g}, got "
                f"{epsilon}: that is no privacy. Lower epsilon, or train without noise"
            )
        low, high = max(low - 0.2, least), low
    return low, high


def check_small_delta(delta: float, population: int) -> None:
    """Raise if delta is so large that a target without noise is its fault: publishing one sample would meet it."""
    if delta * population >= 1:
        raise FdpError(
            f"delta: expected well below 1 / population, which is {1 / population:.2g}, got {shown_delta(delta)}: with "
            f"that probability nothing is promised, so no noise is needed. Lower delta, or leave it to its default"
        )


def _check_left(before: Any, epsilon: float, delta: float, accountant: Accountant) -> None:
    """Raise if earlier releases have spent the budget already."""
    if before is not None and (spent := _epsilon(before, delta, accountant)) >= epsilon:
        raise FdpError(
            f"epsilon: expected more than the {spent:.4g} at delta {shown_delta(delta)} that was spent on the same "
            f"data before, got {epsilon}; raise it"
        )


def _check_delta(delta: float, accountant: Accountant) -> None:
    probability("delta", delta, advice="; well below 1 / population is usual")
    if accountant is Accountant.PLD and delta < SMALLEST_DELTA:
        raise FdpError(
            f"delta: expected at least {SMALLEST_DELTA:g} for the PLD accountant, whose arithmetic is not "
            f"exact below it, got {delta}. Give a larger delta; or, from Python, Accountant.RDP"
        )
