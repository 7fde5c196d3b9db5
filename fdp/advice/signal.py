"""Predicted signal and noise of a private step, in the directions that matter for the loss.

    signal     = a C                                   norm of the mean clipped gradient
    noise      = z C sqrt(k) / B                       Gaussian noise on the mean, in k directions
    sampling   = C sqrt((1 - a^2) / B)                 spread of the mean over the draw of samples
    per step   = a / sqrt(z^2 k / B^2 + (1 - a^2) / B)
    in T steps = sqrt(T) x per step                    signals add up, independent noise adds in squares

z is the noise multiplier, B the expected batch size and C the clipping bound, which cancels. Two numbers are
assumptions, since measuring them would cost privacy:

- ``a``, the alignment: the norm of the mean of the clipped gradients, divided by C. It is 1 if all samples agree, and
  falls as training goes on (McCandlish et al. 2018, arXiv 1812.06162, measure how). We take 1/3 for a model trained
  from scratch and 1/10 for a pretrained one, and 1 / sqrt(T) of that beyond 100 steps (:func:`alignment_of`).
- ``k``, the effective dimension. With all d parameters the ratio would be hopeless for every language model; the
  gradients live in far fewer directions, and noise in the others changes the loss little (Li et al. 2022, "When does
  differentially private learning not suffer in high dimensions?", arXiv 2207.00160). We take k = sqrt(d).

So the ratio compares settings; it does not predict a loss. It depends on z and B only through z / B, the noise-to-batch
ratio, as long as noise outweighs sampling: that is the scaling rule of Sander et al. 2023 ("TAN without a burn", arXiv
2210.03403) and McKenna et al. 2025 (arXiv 2501.18914).

    >>> signal_to_noise(noise_multiplier=0.6, batch_size=256, parameters=830_000, alignment=0.1)
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fdp.model import Model
from fdp.types import FdpError

FROM_SCRATCH, PRETRAINED = 1 / 3, 1 / 10
"""The assumed norm of the mean clipped gradient, in units of C, over the first steps."""

EARLY_STEPS = 100
"""Steps over which the alignment stays about the same."""


class Signal(NamedTuple):
    """Signal against noise: of one step, and of all steps together."""

    per_step: float
    in_total: float


def trained_parameters(model: Model) -> int:
    """Return the number of parameters that a model trains, frozen ones left out."""
    return sum(math.prod(model.leaves[path].shape) for path in model.trainable)


def effective_dimension(parameters: int) -> float:
    """Return the assumed number of directions that matter, ``sqrt(d)`` for d trained parameters."""
    if parameters < 1:
        raise FdpError(f"parameters: expected at least 1 that is trained, got {parameters}")
    return math.sqrt(parameters)


def alignment_of(*, pretrained: bool, steps: int) -> float:
    """Return the assumed alignment of a run: ``a_0 min(1, sqrt(100 / steps))``."""
    return (PRETRAINED if pretrained else FROM_SCRATCH) * math.sqrt(min(1.0, EARLY_STEPS / steps))


def signal_to_noise(
    *, noise_multiplier: float, batch_size: float, parameters: int, alignment: float, steps: int = 1
) -> Signal:
    """Return the predicted ratio of signal to noise of one step and of ``steps`` steps."""
    if not 0 < alignment <= 1:
        raise FdpError(f"alignment: expected a number above 0 and at most 1, got {alignment}")
    if not batch_size > 0 or steps < 1:
        raise FdpError(f"batch_size, steps: expected positive numbers, got {batch_size} and {steps}")
    noise = (noise_multiplier / batch_size) ** 2 * effective_dimension(parameters)
    spread = (1 - alignment**2) / batch_size
    per_step = alignment / math.sqrt(noise + spread) if noise + spread > 0 else math.inf
    return Signal(per_step, math.sqrt(steps) * per_step)


def progress(*, noise_multiplier: float, batch_size: float, parameters: int, steps: int, alignment: float) -> float:
    """Return ``T / (1 + 1 / r^2)``, r the ratio of one step: T steps as steps without any noise.

    A step with noise makes ``1 / (1 + noise^2 / signal^2)`` of the progress of a step without it (McCandlish et al.
    2018, arXiv 1812.06162, equation 2.7).
    """
    ratio = signal_to_noise(
        noise_multiplier=noise_multiplier, batch_size=batch_size, parameters=parameters, alignment=alignment
    ).per_step
    return steps / (1 + ratio**-2)


def critical_batch_size(*, noise_multiplier: float, parameters: int, alignment: float) -> float:
    """Return the batch size at which the noise equals the signal: ``B = z sqrt(k) / a``.

    For a fixed number of samples B T and a fixed a, :func:`progress` is largest exactly here:
    ``T / (1 + s / B + z^2 k / (a B)^2) = B T / (B + s + z^2 k / (a^2 B))``, whatever the sampling term s.
    """
    return noise_multiplier * math.sqrt(effective_dimension(parameters)) / alignment
