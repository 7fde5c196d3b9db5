"""The releases of a run in public numbers, for a file, and the composition of the releases of several runs.

    run i releases sum + noise  T_i times at rate q_i and noise multiplier z_i        (statistics: at their own q and z)
    epsilon = min { e : delta(e) <= delta },   delta(e) the hockey-stick divergence of all releases of all runs

This is tighter than adding up the epsilons of the runs. **Theorem used**: the product of dominating pairs dominates the
adaptive composition (Zhu, Dong, Wang 2022, arXiv 2106.08567, Theorem 10). A later run may depend in any way on what the
earlier ones released: initial parameters, learning rate, model. Its *rate, noise multiplier and number of steps* must
not: they are fixed before the earlier results are seen. If they were chosen after looking, the figure is a reading of
an odometer for the runs that were made, which the theorem does not cover.

A run of which only (epsilon, delta) is known is composed as the worst mechanism with that promise (Kairouz, Oh,
Viswanath 2015, arXiv 1311.0776).

    >>> first, second = releases_of(mechanism, steps=100), releases_of(other, steps=40)
    >>> composed_epsilon([*first, *second], delta=1e-6)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting.pld import common, privacy_loss_distribution

from fdp.privacy.accounting import SMALLEST_DELTA, event
from fdp.privacy.loss_distributions import TOO_COARSE, TruncatedEvent, compose_pld, grid_width, parts_of
from fdp.privacy.mechanism import Mechanism
from fdp.types import FdpError

GRADIENTS, STATISTICS = "sums of clipped gradients", "statistics for K-FAC"
EVALUATIONS = "evaluations of held-out samples"


class Release(NamedTuple):
    """Subsampled Gaussian releases of one kind: one before or in every ``every``-th step, ``count`` in all.

    ``noise_multiplier`` is that of everything released together on one draw: with quantile clipping, of the sum and
    the count. ``max_batch_size`` is that of truncated Poisson sampling, else None; ``population`` matters only then.
    All of it is public.
    """

    what: str
    sampling_rate: float
    noise_multiplier: float
    count: int
    every: int = 1
    max_batch_size: int | None = None
    population: int | None = None

    def within(self, steps: int) -> Release:
        """Return the releases of the first ``steps`` steps."""
        return self._replace(count=min(self.count, -(-steps // self.every)))


class Opaque(NamedTuple):
    """A run of which only the promise is known, not the mechanism."""

    epsilon: float
    delta: float


def releases_of(mechanism: Mechanism, *, steps: int) -> tuple[Release, ...] | None:
    """Return the releases of ``steps`` steps of a mechanism; None if it is not private.

    Guarantees:
      - as the accountant charges for them: they are read from the event of :func:`fdp.privacy.accounting.event`.
    """
    parts = parts_of(event(mechanism, steps))
    kinds = [(GRADIENTS, 1)] + ([] if mechanism.statistics is None else [(STATISTICS, mechanism.statistics.period)])
    return tuple(_release(part, *kind) for part, kind in zip(parts, kinds, strict=True)) if parts else None


def composed_event(releases: Sequence[Release]) -> Any:
    """Return all releases as one event of dp_accounting; releases of the same kind are counted together."""
    counts = Counter[Any]()
    for release in releases:
        if release.count:
            counts[_one_event(release)] += release.count
    return dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(each, n) for each, n in counts.items()])


def composed_epsilon(releases: Sequence[Release], *, delta: float, opaque: Sequence[Opaque] = ()) -> float:
    """Return the epsilon of all releases and all ``opaque`` runs together, at ``delta``.

    Guarantees:
      - at least the true epsilon of the adaptive composition; for releases alone, dp_accounting's own composition;
      - ``inf`` if ``delta`` is not above the deltas of the opaque runs.
    """
    if not SMALLEST_DELTA <= delta < 1:
        raise FdpError(f"delta: expected a number from {SMALLEST_DELTA:g} up to 1, got {delta}")
    distribution = privacy_loss(releases, delta=delta, opaque=opaque)
    if distribution is None:
        return math.inf
    with np.errstate(all="ignore"):
        return float(distribution.get_epsilon_for_delta(delta))


def privacy_loss(
    releases: Sequence[Release], *, delta: float, opaque: Sequence[Opaque] = ()
) -> privacy_loss_distribution.PrivacyLossDistribution | None:
    """Return the privacy loss distribution of all of them, on a grid fine enough at ``delta``; None if too coarse."""
    total = composed_event(releases)
    interval = grid_width(total, delta) if parts_of(total) else 1e-4
    if interval > TOO_COARSE:
        return None
    with np.errstate(all="ignore"):
        parts = [compose_pld(total, interval)] if parts_of(total) else []
        parts += [
            privacy_loss_distribution.from_privacy_parameters(
                common.DifferentialPrivacyParameters(*run), value_discretization_interval=interval
            )
            for run in opaque
        ]
        if not parts:
            return privacy_loss_distribution.identity(value_discretization_interval=interval)
        first, *rest = parts
        for other in rest:
            first = first.compose(other)
    return first


def _release(part: Any, what: str, every: int) -> Release:
    step = part.event
    if isinstance(step, TruncatedEvent):
        numbers = (step.sampling_probability, step.noise_multiplier, part.count)
        return Release(what, *numbers, every, step.truncated_batch_size, step.dataset_size)
    return Release(what, step.sampling_probability, step.event.noise_multiplier, part.count, every)


def _one_event(release: Release) -> Any:
    rate, z, most = release.sampling_rate, release.noise_multiplier, release.max_batch_size
    if not (0 < rate <= 1 and 0 < z < math.inf):
        raise FdpError(f"release: expected a rate in (0, 1] and noise above 0, got rate {rate} and noise {z}")
    if most is None:
        return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
    assert release.population is not None, "a truncated draw is from a known number of samples"
    return TruncatedEvent(release.population, rate, most, z)
