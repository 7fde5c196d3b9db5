"""Evaluations released with noise: K means over held-out samples, within one (epsilon, delta).

    x_b  = (clip(loss_b, 0, L) / L - 1/2,  correct_b - 1/2)             in [-1/2, 1/2], rounded to multiples of 2^-24
    S    = sum_b x_b                                                    moved by at most sqrt(entries) / 2 by one sample
    loss = L (1/2 + noisy S_1 / N),  accuracy = 1/2 + noisy S_2 / N     N public

Held-out and trained-on samples are disjoint, and the side of a sample depends on that sample alone. So a held-out
sample reaches the outside only through the K noisy sums, and a trained-on one only through the parameters (parallel
composition). The K sums are Gaussian mechanisms on the same samples, each computed from parameters that may depend on
the earlier ones (early stopping): adaptive composition, by the accountant of the steps at a sampling rate of 1.

Values are centred at 1/2: that halves the sensitivity, and a public N that differs from the number of samples moves
the mean towards 1/2 only. The sums are exact, since all terms are multiples of 2^-24: no rounding adds to the
sensitivity, and any number of ranks computes the same sum.

    >>> release = make_release(budget, steps=(10, 20, 30), entries=1, max_loss=math.log(256), key=key)
    >>> release(contributions(losses, None, counted, max_loss=release.max_loss).sum(0), step=10)     # (mean loss,)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fdp.privacy.accounting import noise_multiplier_for
from fdp.privacy.clipping import flat
from fdp.privacy.noise import add_gaussian, declare_sensitivity
from fdp.privacy.sampling import Poisson
from fdp.run.evaluation_config import Budget
from fdp.types import FdpError, Key

UNIT = 2.0**-24
"""Contributions are multiples of this, so that sums of fewer than 2^29 of them are exact in float64."""

EVERYONE = Poisson(1, 1, 1)
"""The sampling of an evaluation: every held-out sample, each time."""


def contributions(
    losses: Float[Tensor, " batch"],
    correct: Bool[Tensor, " batch"] | None,
    counted: Bool[Tensor, " batch"],
    *,
    max_loss: float,
) -> Float[Tensor, "batch entries"]:
    """Return what every sample adds to the sum, in float64: its loss, and whether it is right, centred at 1/2.

    Guarantees:
      - every entry is a multiple of ``UNIT`` in [-1/2, 1/2], whatever the loss;
      - a loss that is NaN or infinite counts as ``max_loss``;
      - a sample that does not count (padding, nothing to predict) adds exactly 0.
    """
    bounded = losses.double().nan_to_num(nan=max_loss, posinf=max_loss, neginf=0.0).clamp(0.0, max_loss) / max_loss
    entries = [bounded] if correct is None else [bounded, correct.double()]
    centred = torch.stack(entries, 1) - 0.5
    return torch.where(counted.unsqueeze(1), (centred / UNIT).round() * UNIT, 0.0)


def sensitivity(entries: int) -> float:
    """Return how far one sample, added or removed, can move the sum of contributions: ``sqrt(entries) / 2``."""
    return math.sqrt(entries) / 2


def evaluation_noise(budget: Budget, *, releases: int) -> float:
    """Return the noise multiplier at which ``releases`` sums over all held-out samples are within the budget."""
    return noise_multiplier_for(
        EVERYONE, flat(max_norm=1.0), epsilon=budget.epsilon, delta=budget.delta, steps=releases
    )


class Release:
    """The noised evaluations of a run: one for each planned step, and no more.

    Guarantees:
      - the noise has the standard deviation ``noise_multiplier * sensitivity(entries)``, drawn from (key, step);
      - a step that was not planned, or whose evaluation was released already, is refused.
    """

    def __init__(self, budget: Budget, *, steps: Sequence[int], entries: int, max_loss: float, key: Key) -> None:
        self.budget, self.max_loss, self.entries = budget, max_loss, entries
        self.planned = frozenset(steps)
        self.noise_multiplier = evaluation_noise(budget, releases=len(self.planned))
        self._key, self._released = key, set[int]()

    def __call__(self, total: Float[Tensor, " entries"], *, step: int) -> tuple[float, ...]:
        """Return the mean loss, and the accuracy if there is one, from the exact sum of all contributions."""
        if step not in self.planned or step in self._released:
            raise FdpError(
                f"evaluation after step {step}: expected one of the {len(self.planned)} steps that its budget was "
                f"planned for, each once, got another; every release is paid for in advance"
            )
        if tuple(total.shape) != (self.entries,) or total.dtype != torch.float64:
            raise FdpError(
                f"evaluation: expected a float64 sum of {self.entries} entries, got {total.dtype} of "
                f"{tuple(total.shape)}"
            )
        self._released.add(step)
        summed = declare_sensitivity({"evaluation": total.cpu()}, sensitivity(self.entries))
        noisy = add_gaussian(summed, key=self._key, step=step, noise_multiplier=self.noise_multiplier)["evaluation"]
        means = (0.5 + noisy / self.budget.population).clamp(0.0, 1.0).tolist()
        return (means[0] * self.max_loss, *means[1:])

    def loss_deviation(self) -> float:
        """Return the standard deviation of the noise on the mean loss, before it is clamped to [0, max_loss]."""
        return self.max_loss * self.noise_multiplier * sensitivity(self.entries) / self.budget.population
