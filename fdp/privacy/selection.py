"""The privacy of choosing the best of a random number of runs (Papernot and Steinke 2022, arXiv 2110.03620).

    K ~ Poisson(m), or truncated negative binomial with shape s and mean m (s = 1: geometric)
    K runs, each with settings drawn at random, release only the one with the best score

If one run, its score included, has Renyi divergence eps(a), the released run has, for Poisson (Theorem 6),

    eps'(a) = eps(a) + m delta' + log(m) / (a - 1),     delta' = delta of one run at epsilon log(1 + 1 / (a - 1))

and for the others (Theorem 2), with the constant g of the distribution,

    eps'(a) = eps(a) + (1 + s) min_b [(1 - 1/b) eps(b) - log(g) / b] + log(m) / (a - 1).

So a search costs a little more than one run, and not K times as much. The number of runs has to be random and drawn
before the first of them; to choose it, or to stop early, breaks the theorem. K and the runs that were not chosen are
not covered. Figures are those of ``dp_accounting``'s ``RepeatAndSelectDpEvent`` with its RDP accountant.

    >>> search = Repetitions(mean=10.0, shape=POISSON)
    >>> z = noise_multiplier_for_selection(sampling, clip, search, epsilon=3.0, delta=1e-6, steps=500)
    >>> selection_epsilon(Mechanism(sampling, clip, z), search, steps=500, delta=1e-6)          # at most 3.0
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant

from fdp.arguments import positive_number
from fdp.privacy.accounting import check_small_delta, event
from fdp.privacy.clipping import ClipStyle
from fdp.privacy.loss_distributions import NEIGHBOURS
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import Poisson
from fdp.types import FdpError

POISSON, GEOMETRIC, LOGARITHMIC = math.inf, 1.0, 0.0
"""Shapes of the distribution of the number of runs."""

_NOISE_RANGE = (0.05, 1e4)
_TOLERANCE = 1e-3


class Repetitions(NamedTuple):
    """The distribution of the number of runs. Of Poisson, 0 runs are possible; of the others, 1 is the least."""

    mean: float
    shape: float


def selection_epsilon(mechanism: Mechanism, repetitions: Repetitions, *, steps: int, delta: float) -> float:
    """Return the epsilon of the best of K runs of ``steps`` steps each; ``inf`` without noise.

    Guarantees:
      - at least the RDP epsilon of one run, and an upper bound for the run that is chosen;
      - the settings of a run may be drawn at random, but every run has this mechanism and number of steps.
    """
    _check(repetitions)
    if not 0 < delta < 1:
        raise FdpError(f"delta: expected a probability in (0, 1), got {delta}; well below 1 / population is usual")
    one: Any = event(mechanism, steps)
    if isinstance(one, dp_accounting.NonPrivateDpEvent):
        return math.inf
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns about each order it skips; skipping one is safe
    try:
        with np.errstate(all="ignore"):
            accountant = rdp_privacy_accountant.RdpAccountant(neighboring_relation=NEIGHBOURS)
            total = dp_accounting.dp_event.RepeatAndSelectDpEvent(one, repetitions.mean, repetitions.shape)
            return float(accountant.compose(total).get_epsilon(delta))
    finally:
        log.setLevel(level)


def noise_multiplier_for_selection(
    sampling: Poisson, clip: ClipStyle, repetitions: Repetitions, *, epsilon: float, delta: float, steps: int
) -> float:
    """Return the noise multiplier of every run, to 0.1 %, with which the whole search stays within the budget.

    Guarantees:
      - :func:`selection_epsilon` of the mechanism with this multiplier is at most ``epsilon``;
      - a budget that cannot be met is an error.
    """
    positive_number("epsilon", epsilon)
    if clip.count_noise is not None:
        raise FdpError(f"clip: expected a style without a released count for a search, got {clip.name}; use flat")
    low, high = (math.log(z) for z in _NOISE_RANGE)

    def spent(log_noise: float) -> float:
        mechanism = Mechanism(sampling, clip, math.exp(log_noise))
        return selection_epsilon(mechanism, repetitions, steps=steps, delta=delta)

    if spent(high) > epsilon:
        raise FdpError(
            f"epsilon: expected a target within reach of a search of {repetitions.mean:g} runs, got {epsilon} at delta "
            f"{delta}. Raise --epsilon, or lower --trials, --steps or --batch-size"
        )
    if spent(low) <= epsilon:
        check_small_delta(delta, sampling.population)
        raise FdpError(f"epsilon: expected a target that needs noise, got {epsilon}: that is no privacy. Lower epsilon")
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return math.exp(high)


def draw_repetitions(repetitions: Repetitions, rng: np.random.Generator) -> int:
    """Draw the number of runs. Draw it once, before the first run."""
    _check(repetitions)
    mean = repetitions.mean
    if repetitions.shape == POISSON:
        return int(rng.poisson(mean))
    if repetitions.shape == GEOMETRIC:
        return int(rng.geometric(1 / mean))
    raise FdpError(f"repetitions: expected Poisson or geometric, got shape {repetitions.shape}")


def _check(repetitions: Repetitions) -> None:
    if not 1 <= repetitions.mean < math.inf:
        raise FdpError(f"--trials: expected a mean number of runs of at least 1, got {repetitions.mean}")
    if not repetitions.shape >= 0:
        raise FdpError(f"repetitions: expected a shape of 0 or more, got {repetitions.shape}")
