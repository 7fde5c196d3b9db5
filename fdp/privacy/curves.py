"""More than one number about a mechanism: its curve of (epsilon, delta), its trade-off curve, mu, and groups.

    delta(e)    = max over directions of  E_P[(1 - exp(e - L))_+],   L the privacy loss of all releases
    f(alpha)   >= max_e max(0, 1 - delta(e) - exp(e) alpha, exp(-e) (1 - delta(e) - alpha))       (trade-off curve)
    delta_mu(e) = Phi(-e/mu + mu/2) - exp(e) Phi(-e/mu - mu/2)                                     (mu-GDP)
    mu_CLT      = sqrt(sum_i T_i q_i^2 (exp(z_i^-2) - 1))

f: Wasserman & Zhou 2010, and Dong, Roth, Su 2022 (arXiv 1905.02383), Proposition 2.12: of any test that tells whether
one sample is in the data, with false positive rate alpha, the false negative rate is at least f(alpha). mu_CLT: Bu,
Dong, Long, Su 2020 (arXiv 1911.11607), an approximation for many steps, **not a bound**.

A group of k samples, added or removed together, is drawn Binomial(k, q) times per step, so that the sum moves by up to
that many C: a mixture of Gaussians, tight for Poisson sampling (Ganesh 2024, arXiv 2401.10294).

    >>> curve = PrivacyCurve.of(releases)
    >>> curve.epsilon(1e-6), curve.delta(2.0), curve.false_negatives(0.01)
    >>> group_epsilon(releases, size=10, delta=1e-6)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats
from scipy.optimize import brentq
from scipy.special import log_ndtr

from fdp.privacy.accounting import SMALLEST_DELTA
from fdp.privacy.loss_distributions import TOO_COARSE, grid_width, parts_of
from fdp.privacy.releases import Opaque, Release, composed_event, privacy_loss
from fdp.types import FdpError

LEAST_DELTA = 1e-10
"""The smallest delta of a table; the grid of the loss is chosen for it."""
LARGEST_GROUP = 200
_POINTS = 200
_GROUP_POINTS = 5000
"""Points of the grid of a group's loss, each of which takes a search for a root; this many cost 1 % of epsilon."""
_NEGLIGIBLE = 1e-13
"""Probability of being drawn more often that is moved to the largest count of a group."""


class PrivacyCurve(NamedTuple):
    """The privacy loss of some releases; None if the noise is too small to say anything.

    ``points`` are (epsilon, delta) at 200 values of epsilon from 0 to that of a delta of 1e-10; none if that is
    infinite.
    """

    loss: Any
    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, releases: Sequence[Release], *, opaque: Sequence[Opaque] = ()) -> PrivacyCurve:
        """Return the curve of all releases, and of runs of which only the promise is known, together."""
        loss = privacy_loss(releases, delta=LEAST_DELTA, opaque=opaque)
        most = cls(loss, ()).epsilon(LEAST_DELTA)
        if loss is None or math.isinf(most):
            return cls(loss, ())
        epsilons = [most * place / _POINTS for place in range(_POINTS + 1)]
        with np.errstate(all="ignore"):
            deltas = [min(1.0, max(0.0, float(each))) for each in np.atleast_1d(loss.get_delta_for_epsilon(epsilons))]
        return cls(loss, tuple(zip(epsilons, deltas)))

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon at ``delta``; ``inf`` if there is none."""
        if self.loss is None:
            return math.inf
        with np.errstate(all="ignore"):
            return float(self.loss.get_epsilon_for_delta(delta))

    def delta(self, epsilon: float) -> float:
        """Return the least delta at ``epsilon``, an upper bound; at least ``SMALLEST_DELTA``."""
        if self.loss is None:
            return 1.0
        with np.errstate(all="ignore"):
            return float(min(1.0, max(SMALLEST_DELTA, self.loss.get_delta_for_epsilon(epsilon))))

    def false_negatives(self, false_positives: float) -> float:
        """Return a lower bound on the false negative rate of any test with this false positive rate."""
        bounds = [0.0]
        for epsilon, delta in self.points:
            missed = 1 - delta - math.exp(epsilon) * false_positives, math.exp(-epsilon) * (1 - delta - false_positives)
            bounds += missed
        return max(bounds)

    def mu(self) -> float:
        """Return the least mu with ``delta_mu(e) >= delta(e)`` at every one of the points; ``inf`` if there are none.

        (epsilon, delta) of mu-GDP are upper bounds there; it is no proof of mu-GDP, which speaks of all deltas.
        """
        if not self.points:
            return math.inf
        return max((gaussian_mu(*pair) for pair in self.points if pair[1] >= LEAST_DELTA / 2), default=0.0)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return ``delta_mu(epsilon)`` of mu-GDP."""
    first, second = -epsilon / mu + mu / 2, -epsilon / mu - mu / 2
    return float(math.exp(log_ndtr(first)) - math.exp(epsilon + log_ndtr(second)))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the mu whose ``delta_mu(epsilon)`` is ``delta``."""
    low, high = 1e-6, 1.0
    if gaussian_delta(epsilon, low) >= delta:
        return low
    while gaussian_delta(epsilon, high) < delta:
        high *= 2
        if high > 1e4:
            return math.inf
    return float(brentq(lambda mu: gaussian_delta(epsilon, mu) - delta, low, high, xtol=1e-9)) + 1e-8  # pyright: ignore


def mu_by_central_limit(releases: Sequence[Release]) -> float:
    """Return ``mu_CLT``: what many steps of much noise tend to, an approximation and not a bound."""
    return math.sqrt(
        sum(each.count * each.sampling_rate**2 * math.expm1(min(each.noise_multiplier**-2, 500)) for each in releases)
    )


def group_epsilon(releases: Sequence[Release], *, size: int, delta: float) -> float:
    """Return the epsilon of a group of ``size`` samples, added or removed together, at ``delta``.

    Guarantees:
      - an upper bound, whichever of the releases each sample of the group is drawn for;
      - for a size of 1, the epsilon of the releases.
    """
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LARGEST_GROUP:
        raise FdpError(f"group: expected a whole number of samples from 1 to {LARGEST_GROUP}, got {size!r}")
    if any(each.max_batch_size is not None for each in releases):
        raise FdpError("group: expected Poisson sampling, got a truncated draw, for which no tight bound is known")
    return _group_epsilon(tuple(_merged(releases)), size, delta)


@lru_cache(maxsize=64)
def _group_epsilon(releases: tuple[Release, ...], size: int, delta: float) -> float:
    if not releases:
        return 0.0
    certain = [each._replace(noise_multiplier=each.noise_multiplier / size) for each in releases]
    more_often = [each._replace(sampling_rate=min(1.0, size * each.sampling_rate)) for each in certain]
    furthest = max(10 / each.noise_multiplier + each.noise_multiplier**-2 / 2 for each in certain)
    interval = max(grid_width(composed_event(more_often), delta), furthest / _GROUP_POINTS)
    if interval > TOO_COARSE or not parts_of(composed_event(releases)):
        return math.inf
    with np.errstate(all="ignore"):
        first, *rest = [_group_loss(each, size, interval).self_compose(each.count) for each in releases]
        for other in rest:
            first = first.compose(other)
        return float(first.get_epsilon_for_delta(delta))


def group_bound(curve: PrivacyCurve, *, size: int, delta: float) -> float:
    """Return the epsilon of a group by the definition alone, for any mechanism; looser than :func:`group_epsilon`.

    (e, d)-DP for one sample is (k e, d (exp(k e) - 1) / (exp(e) - 1))-DP for k of them.
    """
    found = math.inf
    for exponent in np.linspace(math.log(delta), math.log(1e-12), _POINTS):
        alone = math.exp(exponent)
        epsilon = curve.epsilon(alone)
        if (
            epsilon * size < 600
            and alone * (math.expm1(size * epsilon) / math.expm1(epsilon) if epsilon else size) <= delta
        ):
            found = min(found, size * epsilon)
    return found


def _merged(releases: Sequence[Release]) -> list[Release]:
    counts: dict[tuple[float, float], int] = {}
    for each in releases:
        kind = (each.sampling_rate, each.noise_multiplier)
        counts[kind] = counts.get(kind, 0) + each.count
    return [Release("", *kind, count) for kind, count in counts.items() if count]


def _group_loss(release: Release, size: int, interval: float) -> Any:
    """Return the loss of one release for a group: the sum moves by j with the probability that j of them are drawn."""
    chances = stats.binom.pmf(np.arange(size + 1), size, release.sampling_rate)
    last = next(j for j in range(size + 1) if stats.binom.sf(j, size, release.sampling_rate) <= _NEGLIGIBLE)
    counts, chances = [*range(last + 1)], [*chances[: last + 1]]
    if last < size:  # more than that is as good as impossible: count it as all of them
        counts, chances = [*counts, size], [*chances, max(0.0, 1 - math.fsum(chances))]
    total = math.fsum(chances)
    return privacy_loss_distribution.from_mixture_gaussian_mechanism(
        release.noise_multiplier,
        counts,
        [chance / total for chance in chances],
        value_discretization_interval=interval,
    )
