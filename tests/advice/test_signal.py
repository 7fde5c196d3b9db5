"""The predicted signal-to-noise ratio follows its formula, and the critical batch size is its optimum."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fdp import models
from fdp.advice.signal import critical_batch_size, effective_dimension, signal_to_noise, trained_parameters
from fdp.types import FdpError


def test_the_ratio_is_the_formula_of_the_docstring() -> None:
    a, z, batch, d, steps = 0.2, 0.7, 128, 10_000, 50
    found = signal_to_noise(noise_multiplier=z, batch_size=batch, parameters=d, steps=steps, alignment=a)
    noise = z * math.sqrt(math.sqrt(d)) / batch
    assert found.per_step == pytest.approx(a / math.hypot(noise, math.sqrt((1 - a * a) / batch)))
    assert found.in_total == pytest.approx(math.sqrt(steps) * found.per_step)


def test_the_ratio_is_that_of_simulated_clipped_gradients() -> None:
    rng, a, z, batch, k, trials = np.random.default_rng(0), 0.3, 0.5, 64, 100, 2000
    other = rng.standard_normal((trials, batch, k - 1))
    other *= math.sqrt(1 - a * a) / np.linalg.norm(other, axis=-1, keepdims=True)
    samples = np.concatenate([np.full((trials, batch, 1), a), other], axis=-1)  # norm 1: clipped to C = 1
    means = samples.mean(1) + z / batch * rng.standard_normal((trials, k))
    error = np.sqrt(((means - np.eye(1, k)[0] * a) ** 2).sum(-1).mean())
    predicted = signal_to_noise(noise_multiplier=z, batch_size=batch, parameters=k * k, alignment=a)
    assert predicted.per_step == pytest.approx(a / error, rel=0.02)


def test_noise_and_batch_matter_through_their_ratio_when_noise_dominates() -> None:
    small = signal_to_noise(noise_multiplier=1.0, batch_size=64, parameters=10**14, alignment=1.0)
    large = signal_to_noise(noise_multiplier=4.0, batch_size=256, parameters=10**14, alignment=1.0)
    assert small.per_step == pytest.approx(large.per_step)


def test_the_critical_batch_makes_most_progress_at_a_fixed_number_of_samples() -> None:
    z, d, a, samples = 0.6, 10**6, 0.1, 10**6
    best = critical_batch_size(noise_multiplier=z, parameters=d, alignment=a)

    def progress(batch: float) -> float:
        ratio = signal_to_noise(noise_multiplier=z, batch_size=batch, parameters=d, alignment=a).per_step
        return samples / batch / (1 + ratio**-2)

    assert progress(best) > max(progress(0.8 * best), progress(1.25 * best))


def test_frozen_parameters_do_not_count() -> None:
    model = models.build("logistic")
    assert trained_parameters(model) == 650
    assert effective_dimension(650) == pytest.approx(math.sqrt(650))


@pytest.mark.parametrize("changes", [{"alignment": 0.0}, {"alignment": 1.5}, {"batch_size": 0}, {"parameters": 0}])
def test_impossible_values_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(FdpError, match=next(iter(changes))):
        signal_to_noise(**({"noise_multiplier": 1.0, "batch_size": 8, "parameters": 10, "alignment": 0.1} | changes))  # type: ignore
