"""The private mechanism of a run as one value: sampling, clipping and noise multiplier.

The sampler, the step and the accountant all read this object, so they cannot disagree. It holds the noise multiplier z
and the clipping bound C apart; their product is taken in one place, :func:`fdp.privacy.noise.noise_deviation`.

    >>> mechanism = Mechanism(poisson(48_211, expected_batch_size=256), flat(max_norm=1.0), noise_multiplier=1.1)
    >>> step = make_train_step(model, optimizer, mechanism=mechanism, plan=plan)
    >>> epsilon(mechanism, steps=1000, delta=1e-6)
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from fdp.arguments import is_number, positive_number, shown, whole_number
from fdp.privacy.clipping import ClipStyle
from fdp.privacy.sampling import Poisson
from fdp.types import FdpError


class Statistics(NamedTuple):
    """A second release, before steps 0, period, 2 period, ...: clipped sums of statistics, from their own Poisson draw.

    ``sum_i clip(statistics_i) + noise_multiplier * max_norm * N(0, I)``, where all statistics of a sample are clipped
    as one vector (curvature: ``fdp.kfac.private.noised_factors``). :func:`statistics` builds and checks it.
    """

    sampling: Poisson
    max_norm: float
    noise_multiplier: float
    period: int

    def due(self, step: int) -> bool:
        """Return True if there is a release before this step, counted from 0."""
        return step % self.period == 0

    def public(self) -> dict[str, float]:
        """Return the public numbers that decide the privacy cost; the number of samples is not among them."""
        numbers = {"max_norm": self.max_norm, "noise_multiplier": self.noise_multiplier, "period": self.period}
        return {"sampling_rate": self.sampling.rate} | numbers

    def releases(self, steps: int) -> int:
        """Return the number of releases in the first ``steps`` steps."""
        return -(-steps // self.period)


def statistics(sampling: Poisson, *, max_norm: float, noise_multiplier: float, period: int) -> Statistics:
    """Return checked :class:`Statistics`."""
    max_norm = positive_number("statistics.max_norm", max_norm)
    noise_multiplier = positive_number("statistics.noise_multiplier", noise_multiplier)
    period = whole_number("statistics.period", period, of=" of steps")
    return Statistics(sampling, max_norm, noise_multiplier, period)


class Noise(Enum):
    """The noise on sums. NONE is not private, and must be asked for: see :func:`without_noise`."""

    GAUSSIAN = "gaussian"
    NONE = "none"


class Mechanism(NamedTuple):
    """The Poisson-subsampled Gaussian mechanism: ``sum_i clip(g_i) + noise_multiplier * sensitivity * N(0, I)``.

    ``statistics`` are released besides the steps' sums, if given. A noise multiplier of 0 is for plain training
    (method none); to clip and add no noise, use :func:`without_noise`.
    """

    sampling: Poisson
    clip: ClipStyle
    noise_multiplier: float
    statistics: Statistics | None = None
    noise: Noise = Noise.GAUSSIAN


def without_noise(sampling: Poisson, clip: ClipStyle, *, statistics: Statistics | None = None) -> Mechanism:
    """Return a mechanism that clips but adds no noise: **not private**, for comparisons, tests and debugging."""
    return Mechanism(sampling, clip, 0.0, statistics, Noise.NONE)


def check_noise(mechanism: Mechanism) -> None:
    """Refuse private training without noise, unless it was asked for by :func:`without_noise`."""
    z, none = mechanism.noise_multiplier, mechanism.noise is Noise.NONE
    if none and z != 0:
        raise FdpError(f"noise_multiplier: expected 0 in a mechanism without noise, got {z}; use Mechanism(...)")
    if not none and not (is_number(z) and z > 0):
        raise FdpError(
            f"noise_multiplier: expected a finite number above 0 for private training, got {shown(z)}. The noise for a "
            f"budget is fdp.noise_multiplier_for(sampling, clip, epsilon=..., delta=..., steps=...). To clip and add "
            f"no noise, which is not private, say so: fdp.privacy.mechanism.without_noise(sampling, clip)"
        )
