"""What T steps of a mechanism cost, by Google's ``dp_accounting``, and how much noise a budget needs.

    step    = Poisson(q) -> sum of clipped gradients + z C N(0, I)  [quantile clipping: and count + b N(0, 1)]
    z_eff   = (z^-2 + (2 b)^-2)^(-1/2)                 (Andrew et al. 2021, arXiv 1905.03871, Theorem 1)
    epsilon = min { e : delta_T(e) <= delta },         delta_T the hockey-stick divergence of T composed steps

Sum and count are one Gaussian release on one draw, hence one multiplier; ``mechanism.statistics``, released before
every period-th step, are draws of their own, composed with the steps. Neighbours differ by one sample
**added or removed**, the sampling rate q being public. No figure depends on the number of samples, which is not.
Truncated Poisson, where a removed sample may let another one in, takes an upper bound for the same relation (after
arXiv 2508.15089) that holds for every number of samples up to the public one. PLD adds up privacy loss distributions,
rounded up (Doroshenko et al. 2022, arXiv 2207.04380); RDP adds up Renyi divergences (Mironov et al. 2019, arXiv
1908.10530) and is looser. Every figure is an upper bound.

    >>> sampling, clip = poisson(48_211, expected_batch_size=256, population=50_000), flat(max_norm=1.0)
    >>> z = noise_multiplier_for(sampling, clip, epsilon=3.0, delta=1e-6, steps=1000)
    >>> epsilon(Mechanism(sampling, clip, z), steps=1000, delta=1e-6)                   # at most 3.0
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, lru_cache, partial
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import stats
from scipy.optimize import root_scalar

from fdp.privacy import sampling as sampling_
from fdp.privacy.clipping import ClipStyle
from fdp.privacy.composition import Composition
from fdp.privacy.mechanism import Mechanism, Statistics
from fdp.privacy.sampling import Poisson
from fdp.types import FdpError

NEIGHBOURS = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

SMALLEST_DELTA = 1e-12
"""Below this the rounding of the PLD's Fourier transforms is felt; RDP has no such limit."""

_TOO_COARSE = 512.0
"""A grid this wide cannot tell one epsilon from another, and dp_accounting's exponentials overflow on it."""

_NEGLIGIBLE = 1e-9
"""A noise multiplier below this is none: dp_accounting's squares of it overflow."""

_EVERY, _TOLERANCE = 300, 0.003
"""Epsilons that are computed one by one; of more, what may lie between two, as a part of the last. 3 ms each."""

_NOISE_RANGE = (0.05, 1e5)
_NOISE_TOLERANCE = 5e-4
_COARSER = 8

_Truncated = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent


class Accountant(Enum):
    """How losses are added up over steps. PLD is tight to about 0.1 %; RDP is 5 to 15 % above it, or more."""

    PLD = "pld"
    RDP = "rdp"


def effective_noise_multiplier(mechanism: Mechanism) -> float:
    """``z_eff``: the noise multiplier of sum and quantile count taken together, at most the sum's own."""
    z, count_noise = mechanism.noise_multiplier, mechanism.clip.count_noise
    if not math.isfinite(z) or z < 0:
        raise FdpError(f"noise_multiplier: expected a finite number, 0 or more, got {z}")
    if count_noise is not None and not count_noise >= 0:
        raise FdpError(f"clip.count_noise: expected None or a number, 0 or more, got {count_noise}")
    if z == 0 or count_noise == 0:
        return 0.0
    return z if count_noise is None else 1.0 / math.hypot(1.0 / z, 0.5 / count_noise)


def event(mechanism: Mechanism, steps: int) -> dp_accounting.DpEvent:
    """``steps`` steps of ``mechanism`` in dp_accounting's own words, for any of its accountants.

    Guarantees:
      - every field that bears on privacy is in it: rate, truncation, noise multiplier, count noise, steps; and the same
        of every release of statistics in these steps;
      - no noise on the sum, or none on a released count or statistics, is a ``NonPrivateDpEvent``.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise FdpError(f"steps: expected a whole number, 1 or more, got {steps!r}")
    parts: list[Any] = [_composed_event(mechanism.sampling, effective_noise_multiplier(mechanism), steps)]
    if (more := mechanism.statistics) is not None:
        if not math.isfinite(more.noise_multiplier) or more.noise_multiplier < 0:
            raise FdpError(f"statistics.noise_multiplier: expected a finite number, 0 or more, got {more}")
        parts.append(_composed_event(more.sampling, more.noise_multiplier, more.releases(steps)))
    if None in parts:
        return dp_accounting.NonPrivateDpEvent()
    return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)


def epsilon(mechanism: Mechanism, *, steps: int, delta: float, accountant: Accountant = Accountant.PLD) -> float:
    """The epsilon of ``steps`` steps at ``delta``; ``inf`` without noise, and possibly where it exceeds 700.

    Choose ``delta`` well below ``1 / population``: see :func:`fdp.privacy.guarantee.delta_advice`.

    Guarantees:
      - at least the true epsilon of the mechanism;
      - more steps, a larger rate or a smaller delta never lower it; more noise never raises it.
    """
    _check_delta(delta, accountant)
    return _epsilon(event(mechanism, steps), delta, accountant)


def delta(mechanism: Mechanism, *, steps: int, epsilon: float, accountant: Accountant = Accountant.PLD) -> float:
    """The delta of ``steps`` steps at ``epsilon``, an upper bound; by PLD at least ``SMALLEST_DELTA``."""
    if not epsilon >= 0:
        raise FdpError(f"epsilon: expected a number, 0 or more, got {epsilon}")
    total = event(mechanism, steps)
    if not _parts(total):
        return 1.0
    with np.errstate(all="ignore"):
        if accountant is Accountant.RDP:
            return float(rdp_privacy_accountant.compute_delta(*_rdp_total(total), epsilon)[0])
        interval = _interval(total, 1e-6)
        found = 1.0 if interval > _TOO_COARSE else float(_composed(total, interval).get_delta_for_epsilon(epsilon))
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

    With a ``tolerance`` above 0, only so many are computed that neighbours differ by at most that part of the last,
    about ``1.5 / tolerance`` of them; a step between two computed ones gets the value of the later one. None: every one
    of up to 300 steps is computed; of more, as many as a tolerance of 0.003 takes.

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
    """Epsilon after a number of steps between the first and the last of ``points``; on one grid, that of the last."""
    total = event(mechanism, points[-1])
    if accountant is Accountant.RDP or not _parts(total) or (interval := _interval(total, delta)) > _TOO_COARSE:
        return lambda count: _epsilon(event(mechanism, count), delta, accountant)
    with np.errstate(all="ignore"):
        kinds = [_pld(part.event, interval) for part in _parts(total)]
        composition = Composition(kinds, most=[part.count for part in _parts(total)], delta=delta)
    return lambda count: composition.epsilon([part.count for part in _parts(event(mechanism, count))])


def noise_multiplier_for(
    sampling: Poisson,
    clip: ClipStyle,
    *,
    epsilon: float,
    delta: float,
    steps: int,
    accountant: Accountant = Accountant.PLD,
    statistics: Statistics | None = None,
) -> float:
    """The smallest noise multiplier, its ``z_eff`` to 0.1 %, that keeps ``steps`` steps within the budget.

    ``statistics`` are paid for out of the same budget, with the noise that they say.

    Guarantees:
      - by the same accountant, the mechanism with this multiplier has an epsilon of at most ``epsilon``;
      - a budget that cannot be met is an error, not a best effort.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise FdpError(f"epsilon: expected a finite target above 0, got {epsilon}")
    _check_delta(delta, accountant)

    def excess(log_noise: float, coarser: float = 1) -> float:
        mechanism = Mechanism(sampling, clip._replace(count_noise=None), math.exp(log_noise), statistics)
        total = event(mechanism, steps)
        interval = coarser * _interval(total, delta)
        return min(_epsilon(total, delta, accountant, interval=interval), 1e9) - epsilon

    # A coarse grid gives the place and the slope; two or three looks at the fine one settle the rest.
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
    # 1 / z^2 = 1 / z_eff^2 - 1 / (2 b)^2; the last factor covers the rounding of going there and back.
    left = noise**-2 - (2 * clip.count_noise) ** -2 if clip.count_noise > 0 else -math.inf
    if left <= 1e-6 * noise**-2:
        raise FdpError(
            f"clip.count_noise: expected more than {noise / 2:.4g}, got {clip.count_noise}: the quantile "
            f"count alone spends epsilon {epsilon} at delta {delta}. Raise count_noise, or the target"
        )
    return left**-0.5 * (1 + 1e-9)


def _epsilon(total: Any, delta: float, accountant: Accountant, *, interval: float | None = None) -> float:
    if not _parts(total):
        return math.inf
    # Masses that underflow make the libraries divide by denormals; they skip it, or answer inf.
    with np.errstate(all="ignore"):
        if accountant is Accountant.RDP:
            return float(rdp_privacy_accountant.compute_epsilon(*_rdp_total(total), delta)[0])
        interval = interval or _interval(total, delta)
        return math.inf if interval > _TOO_COARSE else float(_composed(total, interval).get_epsilon_for_delta(delta))


def _composed_event(drawn: Poisson, z: float, count: int) -> dp_accounting.SelfComposedDpEvent | None:
    """``count`` subsampled Gaussian releases; None: without noise that is worth the name."""
    sampling_.check(drawn)
    if z < _NEGLIGIBLE:
        return None
    if drawn.max_batch_size is None or drawn.max_batch_size >= drawn.population:
        each = dp_accounting.PoissonSampledDpEvent(drawn.rate, dp_accounting.GaussianDpEvent(z))
    else:
        each = _Truncated(drawn.population, drawn.rate, drawn.max_batch_size, z)
    return dp_accounting.SelfComposedDpEvent(each, count)


def _parts(total: Any) -> list[Any]:
    """What an event is composed of, each many times the same; nothing, if it is not private."""
    if isinstance(total, dp_accounting.ComposedDpEvent):
        return list(total.events)
    return [total] if isinstance(total, dp_accounting.SelfComposedDpEvent) else []


def _composed(total: Any, interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
    first, *rest = [_pld(part.event, interval).self_compose(part.count) for part in _parts(total)]
    for other in rest:
        first = first.compose(other)
    return first


def _rdp_total(total: Any) -> tuple[Any, Any]:
    """Orders and the divergence at each, added up over all parts."""
    parts = [(_rdp(part.event), part.count) for part in _parts(total)]
    return parts[0][0][0], sum(count * rates for (_, rates), count in parts)


@lru_cache(maxsize=16)
def _pld(step: Any, interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
    q, truncated = step.sampling_probability, isinstance(step, _Truncated)
    z = step.noise_multiplier if truncated else step.event.noise_multiplier
    gaussian = partial(
        privacy_loss_distribution.from_gaussian_mechanism, sampling_prob=q, value_discretization_interval=interval
    )
    alone = gaussian(z, neighboring_relation=NEIGHBOURS)
    if not truncated:
        return alone
    # dp_accounting's bound for n samples: if the others that are drawn fill the batch, which they do with probability
    # t(n), the sample takes another's place, with probability p(n) <= q. The mixture grows with both; t grows with n.
    # So t of the public number, and q, bound it for every n up to the public number.
    others_fill = float(stats.binom.sf(step.truncated_batch_size - 1, step.dataset_size - 1, q))
    replacing = gaussian(z / 2, neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    return replacing.compute_mixture(alone, others_fill) if others_fill else alone


@lru_cache(maxsize=64)
def _rdp(step: Any) -> tuple[Any, Any]:
    if isinstance(step, _Truncated):
        raise FdpError(
            "accountant: expected PLD, got RDP: dp_accounting has no Renyi bound for truncated Poisson "
            "sampling. Use Accountant.PLD, or max_batch_size=None"
        )
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns for each order that it leaves out; leaving one out is safe
    try:
        ledger = rdp_privacy_accountant.RdpAccountant(neighboring_relation=NEIGHBOURS).compose(step)
    finally:
        log.setLevel(level)
    return ledger.orders, ledger.rdp


def _interval(total: Any, delta: float) -> float:
    """The width h of the PLD's grid. Any is safe; a finer one is tighter and slower.

    The grid adds variance h^2 / 6 to a step's loss of deviation s, and so h^2 / (12 s^2) to epsilon,
    relatively: h = s / 10 costs 0.1 %. Not so fine that a step takes over 80 000 points: that is felt (2 % or
    more) only at rates below 1e-4 with little noise.
    """
    finest, coarsest, scale = 5e-4, 0.0, 0.0
    for part in _parts(total):
        truncated = isinstance(part.event, _Truncated)
        z = part.event.noise_multiplier if truncated else part.event.event.noise_multiplier
        q, moved = part.event.sampling_probability, 2 if truncated else 1
        furthest = moved * 10 / z + (moved / z) ** 2 / 2  # the loss, 10 deviations out, of a sample surely drawn
        width = 2 * max(0.0, furthest + math.log(q)) + 2 * q * math.expm1(min(furthest, -math.log(q)))
        finest = min(finest, _deviation(q, z) / 10)
        coarsest = max(coarsest, width / (20_000 if truncated else 80_000))
        scale += _epsilon_scale(q, z, part.count, delta)
    interval = max(finest, coarsest, scale / 100_000)
    return 2.0 ** math.floor(math.log2(interval))  # nearby mechanisms share a grid


def _deviation(q: float, z: float) -> float:
    """The standard deviation of one step's privacy loss while it is small: ``q sqrt(e^(1 / z^2) - 1)``."""
    return q * math.sqrt(math.expm1(min(z**-2, 500.0)))


def _epsilon_scale(q: float, z: float, steps: int, delta: float) -> float:
    """Roughly epsilon: by the central limit or by as many full releases as are likely, whichever is less."""
    drawn = min(steps, steps * q + 6 * math.sqrt(steps * q) + 6)
    mu = min(_deviation(q, z) * math.sqrt(steps), math.sqrt(drawn) / z)
    return mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))


def _bracket(
    excess: Callable[[float], float], sampling: Poisson, *, epsilon: float, delta: float, steps: int
) -> tuple[float, float]:
    """``(low, high)`` in log noise, ``excess`` above 0 at low and not at high; from a closed-form guess."""
    least, most = (math.log(z) for z in _NOISE_RANGE)
    low, high = least, most
    while high - low > 0.01:
        guess = (low + high) / 2
        scale = _epsilon_scale(sampling.rate, math.exp(guess), steps, delta)
        low, high = (guess, high) if scale > epsilon else (low, guess)
    while excess(high) > 0:
        if high >= most:
            raise FdpError(
                f"epsilon: expected a target within reach of a noise multiplier of {_NOISE_RANGE[1]:g}, got "
                f"{epsilon} at delta {delta} over {steps} steps. Raise epsilon, or lower steps or batch size (or "
                f"what statistics, if there are any, spend beside the steps)"
            )
        low, high = high, min(high + 0.2, most)
    while excess(low) <= 0:
        if low <= least:
            raise FdpError(
                f"epsilon: expected a target that needs a noise multiplier above {_NOISE_RANGE[0]:g}, got "
                f"{epsilon}: that is no privacy. Lower epsilon, or train without noise"
            )
        low, high = max(low - 0.2, least), low
    return low, high


def _check_delta(delta: float, accountant: Accountant) -> None:
    if not 0 < delta < 1:
        raise FdpError(f"delta: expected a probability in (0, 1), got {delta}; well below 1 / population is usual")
    if accountant is Accountant.PLD and delta < SMALLEST_DELTA:
        raise FdpError(
            f"delta: expected at least {SMALLEST_DELTA:g} for the PLD accountant, whose arithmetic is not "
            f"exact below it, got {delta}. Give a larger delta; or, from Python, Accountant.RDP"
        )
