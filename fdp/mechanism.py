"""The private mechanism of one step, as one value: who is sampled, how far a sample can move the sum, how much noise.

The sampler, the step and the accountant all read this object, so they cannot disagree:

    >>> mechanism = Mechanism(Poisson(50_000, expected_batch_size=256), flat(max_norm=1.0), noise_multiplier=1.1)
    >>> step = make_train_step(model, optimizer, mechanism=mechanism, plan=plan)
    >>> epsilon(mechanism, steps=1000, delta=1e-6)
"""

from __future__ import annotations

from typing import NamedTuple

from fdp.clipping import ClipStyle
from fdp.sampling import Poisson


class Mechanism(NamedTuple):
    """Poisson-subsampled Gaussian mechanism: ``sum_i clip(g_i) + noise_multiplier * sensitivity * N(0, I)``."""

    sampling: Poisson
    clip: ClipStyle
    noise_multiplier: float
