"""Privacy loss distributions and Renyi divergences of composed events, on grids that are fine enough.

An event, built by :func:`fdp.privacy.accounting.event`, holds releases of a few kinds, each composed many times. PLD
convolves privacy loss distributions, rounded up (Doroshenko et al. 2022, arXiv 2207.04380); RDP adds up Renyi
divergences (Mironov et al. 2019, arXiv 1908.10530).

    >>> total = event(mechanism, steps=1000)
    >>> compose_pld(total, grid_width(total, delta)).get_epsilon_for_delta(delta)
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import stats

from fdp.types import FdpError

NEIGHBOURS = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

TOO_COARSE = 512.0
"""A grid this wide cannot tell one epsilon from another, and dp_accounting's exponentials overflow on it."""

TruncatedEvent = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent


def parts_of(total: Any) -> list[Any]:
    """Return the self-composed parts of an event; none if it is not private."""
    if isinstance(total, dp_accounting.ComposedDpEvent):
        return list(total.events)
    return [total] if isinstance(total, dp_accounting.SelfComposedDpEvent) else []


def compose_pld(total: Any, interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the privacy loss distribution of all parts together, on a grid of width ``interval``."""
    first, *rest = [one_step_pld(part.event, interval).self_compose(part.count) for part in parts_of(total)]
    for other in rest:
        first = first.compose(other)
    return first


def rdp_total(total: Any) -> tuple[Any, Any]:
    """Return the Renyi orders and the divergence at each, summed over all parts."""
    parts = [(one_step_rdp(part.event), part.count) for part in parts_of(total)]
    return parts[0][0][0], sum(count * rates for (_, rates), count in parts)


@lru_cache(maxsize=16)
def one_step_pld(step: Any, interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the privacy loss distribution of one release, an upper bound if the draw is truncated."""
    q, truncated = step.sampling_probability, isinstance(step, TruncatedEvent)
    z = step.noise_multiplier if truncated else step.event.noise_multiplier
    alone = sampled_gaussian(z, q, interval)
    if not truncated:
        return alone
    # dp_accounting's bound for n samples: if the others that are drawn fill the batch, which has probability t(n), the
    # sample replaces another one, with probability p(n) <= q. The mixture grows with both, and t grows with n. So t of
    # the public number, and q, bound it for every n up to the public number.
    others_fill = float(stats.binom.sf(step.truncated_batch_size - 1, step.dataset_size - 1, q))
    replacing = privacy_loss_distribution.from_gaussian_mechanism(
        z / 2,
        sampling_prob=q,
        value_discretization_interval=interval,
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
    )
    return replacing.compute_mixture(alone, others_fill) if others_fill else alone


def sampled_gaussian(z: float, q: float, interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return ``dp_accounting``'s ``from_gaussian_mechanism(z, sampling_prob=q)`` on this grid, several times faster.

    Guarantees:
      - the same numbers: only the hockey-stick divergences are computed for all points of the grid at once.
    """
    masses = [
        privacy_loss_distribution._create_pld_pmf_from_monotone_privacy_loss(
            _SampledGaussian(z, sampling_prob=q, adjacency_type=adjacency),
            value_discretization_interval=interval,
            use_connect_dots=True,
        )
        for adjacency in ((AdjacencyType.REMOVE,) if q == 1 else (AdjacencyType.REMOVE, AdjacencyType.ADD))
    ]
    return privacy_loss_distribution.PrivacyLossDistribution(*masses)


class _SampledGaussian(GaussianPrivacyLoss):
    """The privacy loss of a sampled Gaussian, whose divergences at many epsilons are computed at once."""

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        q, removed = self.sampling_prob, self.adjacency_type is AdjacencyType.REMOVE
        if q == 1 or np.ndim(epsilon) == 0 or self.adjacency_type is AdjacencyType.REPLACE:
            return super().get_delta_for_epsilon(epsilon)
        epsilons = np.asarray(epsilon, dtype=float)
        sign = 1.0 if removed else -1.0
        inside = sign * epsilons > math.log1p(-q)  # beyond, one distribution dominates the other
        deltas = np.where(inside, 0.0, -np.expm1(epsilons)) if removed else np.zeros_like(epsilons)
        # The loss of the same outcome without sampling: e^loss = 1 + (e^(loss with sampling) - 1) / q.
        sampled = sign * epsilons[inside]
        shifted = sampled + np.log(1 / q)
        losses = shifted + np.log1p(-np.exp(np.log(1 / q - 1) - shifted))
        losses[sampled == 0] = np.log(1 / q + (1 - 1 / q))
        edge = math.log(1 - q)
        losses[np.abs(sampled - edge) <= 1e-9 * np.maximum(np.abs(sampled), abs(edge))] = -math.inf
        outcomes = (
            self._inverse_privacy_loss_without_subsampling_remove(losses)
            if removed
            else self._inverse_privacy_loss_without_subsampling_add(-losses)
        )
        below = np.exp(epsilons[inside] + self.mu_lower_log_cdf(outcomes))
        deltas[inside] = self.mu_upper_cdf(outcomes) - below
        return np.clip(deltas, 0, 1)


@lru_cache(maxsize=64)
def one_step_rdp(step: Any) -> tuple[Any, Any]:
    """Return the Renyi orders and the divergence of one release at each."""
    if isinstance(step, TruncatedEvent):
        raise FdpError(
            "accountant: expected PLD, got RDP: dp_accounting has no Renyi bound for truncated Poisson "
            "sampling. Use Accountant.PLD, or max_batch_size=None"
        )
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns about each order it skips; skipping one is safe
    try:
        ledger = rdp_privacy_accountant.RdpAccountant(neighboring_relation=NEIGHBOURS).compose(step)
    finally:
        log.setLevel(level)
    return ledger.orders, ledger.rdp


def grid_width(total: Any, delta: float) -> float:
    """Return the width h of the PLD's grid. Any width is safe; a finer one is tighter and slower.

    The grid adds variance h^2 / 6 to a step's loss of deviation s, and so a relative h^2 / (12 s^2) to epsilon:
    h = s / 10 costs 0.1 %. The grid is limited to 80 000 points per step, which costs 2 % or more only at rates below
    1e-4 with little noise.
    """
    finest, coarsest, scale = 5e-4, 0.0, 0.0
    for part in parts_of(total):
        truncated = isinstance(part.event, TruncatedEvent)
        z = part.event.noise_multiplier if truncated else part.event.event.noise_multiplier
        q, moved = part.event.sampling_probability, 2 if truncated else 1
        furthest = moved * 10 / z + (moved / z) ** 2 / 2  # the loss, 10 deviations out, of a sample surely drawn
        width = 2 * max(0.0, furthest + math.log(q)) + 2 * q * math.expm1(min(furthest, -math.log(q)))
        finest = min(finest, _deviation(q, z) / 10)
        coarsest = max(coarsest, width / (20_000 if truncated else 80_000))
        scale += rough_epsilon(q, z, part.count, delta)
    interval = max(finest, coarsest, scale / 100_000)
    return 2.0 ** math.floor(math.log2(interval))  # nearby mechanisms share a grid


def _deviation(q: float, z: float) -> float:
    """Return the standard deviation of one step's privacy loss while it is small: ``q sqrt(e^(1 / z^2) - 1)``."""
    return q * math.sqrt(math.expm1(min(z**-2, 500.0)))


def rough_epsilon(q: float, z: float, steps: int, delta: float) -> float:
    """Return a rough epsilon: by the central limit, or by the likely number of full releases if that is less."""
    drawn = min(steps, steps * q + 6 * math.sqrt(steps * q) + 6)
    mu = min(_deviation(q, z) * math.sqrt(steps), math.sqrt(drawn) / z)
    return mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))
