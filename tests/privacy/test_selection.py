"""The epsilon of a search: the theorem's bound, by hand and by simulation, and the noise that meets it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fdp.privacy import selection
from fdp.privacy.accounting import Accountant, epsilon
from fdp.privacy.clipping import flat, quantile
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson
from fdp.privacy.selection import (
    GEOMETRIC,
    POISSON,
    Repetitions,
    draw_repetitions,
    noise_multiplier_for_selection,
    selection_epsilon,
)
from fdp.types import FdpError

CLIP, DELTA = flat(max_norm=1.0), 1e-6
FULL = poisson(1000, expected_batch_size=1000, population=1000)
"""Every sample in every step: T steps are one Gaussian of noise z / sqrt(T), with Renyi divergence a T / (2 z^2)."""


def gaussian_epsilon(orders: np.ndarray, rdp: np.ndarray, delta: float) -> float:
    """Return epsilon from Renyi divergences, by Canonne, Kamath and Steinke 2020, Proposition 12."""
    bounds = rdp + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return float(np.min(bounds))


def test_the_geometric_bound_is_theorem_2_by_hand() -> None:
    z, steps, mean = 8.0, 4, 10.0
    orders = np.linspace(1.01, 200, 40_000)
    rdp = orders * steps / (2 * z * z)
    gamma = 1 / mean  # shape 1 is the geometric distribution
    constant = 2 * np.min((1 - 1 / orders) * rdp - np.log(gamma) / orders)
    expected = gaussian_epsilon(orders, rdp + np.log(mean) / (orders - 1) + constant, DELTA)
    found = selection_epsilon(Mechanism(FULL, CLIP, z), Repetitions(mean, GEOMETRIC), steps=steps, delta=DELTA)
    assert found == pytest.approx(expected, rel=0.03)  # dp_accounting has fewer orders


def test_the_poisson_bound_is_theorem_6_by_hand() -> None:
    z, steps, mean = 8.0, 4, 10.0
    orders = np.linspace(1.5, 200, 2000)
    rdp = orders * steps / (2 * z * z)

    def one_delta(eps: float) -> float:
        logs = (orders - 1) * (rdp - eps) + (orders - 1) * np.log1p(-1 / orders) - np.log(orders)
        return min(1.0, math.exp(logs.min()))

    deltas = np.array([one_delta(math.log1p(1 / (order - 1))) for order in orders])
    expected = gaussian_epsilon(orders, rdp + mean * deltas + np.log(mean) / (orders - 1), DELTA)
    found = selection_epsilon(Mechanism(FULL, CLIP, z), Repetitions(mean, POISSON), steps=steps, delta=DELTA)
    assert found == pytest.approx(expected, rel=0.03)


def test_a_search_costs_more_than_one_run_and_less_than_all_of_them() -> None:
    mechanism = Mechanism(poisson(10_000, expected_batch_size=100, population=10_000), CLIP, 1.0)
    one = epsilon(mechanism, steps=100, delta=DELTA, accountant=Accountant.RDP)
    for shape in (POISSON, GEOMETRIC):
        few, many = (selection_epsilon(mechanism, Repetitions(mean, shape), steps=100, delta=DELTA) for mean in (3, 30))
        assert one < few < many < 10 * one


def test_the_bound_holds_for_an_attack_on_the_best_of_many() -> None:
    """Release the largest of K scores N(x, 1 / mu^2): the tail of its privacy loss must be within (epsilon, delta)."""
    z, mean, delta = 2.0, 10.0, 1e-3
    bound = selection_epsilon(Mechanism(FULL, CLIP, z), Repetitions(mean, POISSON), steps=1, delta=delta)
    # P(max > t or nothing) of a Poisson number of draws: 1 - exp(-m (1 - F(t)))
    cuts = np.linspace(-5 * z, 8 * z, 2000)
    with_sample, without = (1 - np.exp(-mean * stats.norm.sf(cuts, loc=x, scale=z)) for x in (1.0, 0.0))
    assert np.all(with_sample <= math.exp(bound) * without + delta)
    single = epsilon(Mechanism(FULL, CLIP, z), steps=1, delta=delta)
    assert np.any(with_sample > math.exp(single / 4) * without + delta), "the attack has some power"


@pytest.mark.parametrize("shape", [POISSON, pytest.param(GEOMETRIC, marks=pytest.mark.long)])
def test_the_noise_meets_the_budget_and_hardly_more(shape: float) -> None:
    sampling, search = poisson(5000, expected_batch_size=50, population=5000), Repetitions(8.0, shape)
    budget = {"steps": 40, "delta": DELTA}
    z = noise_multiplier_for_selection(sampling, CLIP, search, epsilon=3.0, **budget)
    assert 2.95 < selection_epsilon(Mechanism(sampling, CLIP, z), search, **budget) <= 3.0
    assert z > noise_multiplier_for_selection(sampling, CLIP, Repetitions(1.0, shape), epsilon=3.0, **budget)


def test_a_mutant_that_ignores_the_number_of_runs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection.dp_accounting.dp_event, "RepeatAndSelectDpEvent", lambda event, mean, shape: event)
    with pytest.raises(AssertionError):
        test_a_search_costs_more_than_one_run_and_less_than_all_of_them()
    with pytest.raises(AssertionError):
        test_the_geometric_bound_is_theorem_2_by_hand()


def test_the_number_of_runs_has_its_distribution() -> None:
    rng = np.random.default_rng(0)
    runs = np.array([draw_repetitions(Repetitions(4.0, POISSON), rng) for _ in range(4000)])
    assert runs.mean() == pytest.approx(4, rel=0.05)
    assert runs.var() == pytest.approx(4, rel=0.1)
    assert (runs == 0).mean() == pytest.approx(math.exp(-4), abs=0.01)
    runs = np.array([draw_repetitions(Repetitions(4.0, GEOMETRIC), rng) for _ in range(4000)])
    assert runs.min() == 1
    assert runs.mean() == pytest.approx(4, rel=0.1)


def test_what_cannot_be_promised_is_refused() -> None:
    mechanism = Mechanism(FULL, CLIP, 1.0)
    with pytest.raises(FdpError, match="--trials"):
        selection_epsilon(mechanism, Repetitions(0.5, POISSON), steps=1, delta=DELTA)
    with pytest.raises(FdpError, match="delta"):
        selection_epsilon(mechanism, Repetitions(2.0, POISSON), steps=1, delta=0.0)
    with pytest.raises(FdpError, match="shape"):
        selection_epsilon(mechanism, Repetitions(2.0, -1.0), steps=1, delta=DELTA)
    counted = quantile(max_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=5.0)
    with pytest.raises(FdpError, match="released count"):
        noise_multiplier_for_selection(FULL, counted, Repetitions(2.0, POISSON), epsilon=1.0, delta=DELTA, steps=1)
    with pytest.raises(FdpError, match="that is no privacy"):
        noise_multiplier_for_selection(FULL, CLIP, Repetitions(2.0, POISSON), epsilon=1e9, delta=DELTA, steps=1)
    with pytest.raises(FdpError, match="delta: expected well below 1 / population"):
        noise_multiplier_for_selection(FULL, CLIP, Repetitions(2.0, POISSON), epsilon=1e9, delta=0.9, steps=1)
