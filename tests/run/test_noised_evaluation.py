"""Noised evaluations: the sensitivity of their sums, their noise, and how many there may be."""

from __future__ import annotations

import math

import dp_accounting
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, floats, lists, sampled_from, tuples

from fdp import keys
from fdp.run.evaluation_config import Budget
from fdp.run.noised_evaluation import UNIT, Release, contributions, evaluation_noise, sensitivity
from fdp.types import FdpError

BUDGET = Budget(epsilon=1.0, delta=1e-6, population=100)
LOSSES = floats(allow_nan=True, allow_infinity=True) | sampled_from([0.0, -1.0, 1e30, 5.0])


def release(**changes: object) -> Release:
    given = {"steps": (1, 2, 3), "entries": 2, "max_loss": 4.0, "key": keys.key(0)} | changes
    return Release(BUDGET, **given)  # pyright: ignore


@given(rows=lists(tuples(LOSSES, booleans(), booleans()), min_size=1, max_size=20), max_loss=floats(0.1, 20.0))
@settings(max_examples=200, deadline=None)
def test_one_sample_added_or_removed_moves_the_sum_by_at_most_the_sensitivity(rows, max_loss) -> None:
    """The losses may be anything: negative, huge, infinite or NaN."""
    losses = torch.tensor([loss for loss, _, _ in rows], dtype=torch.float64)
    correct, counted = (torch.tensor([row[i] for row in rows]) for i in (1, 2))
    for right in (None, correct):
        each = contributions(losses, right, counted, max_loss=max_loss)
        without = contributions(losses[1:], None if right is None else right[1:], counted[1:], max_loss=max_loss).sum(0)
        moved = torch.linalg.vector_norm(each.sum(0) - without)
        assert float(moved) <= sensitivity(each.shape[1])
        assert bool((each == (each / UNIT).round() * UNIT).all()), "sums are exact"
        assert bool((each[~counted] == 0).all())


def test_the_sensitivity_is_reached_by_the_most_extreme_samples() -> None:
    """A smaller number would be a mistake: these two samples move the sum by all of it."""
    yes = torch.tensor([True])
    for loss, right in ((9.0, True), (0.0, False)):
        both = contributions(torch.tensor([loss]), torch.tensor([right]), yes, max_loss=2.0)
        assert float(torch.linalg.vector_norm(both)) == sensitivity(2)
        assert float(contributions(torch.tensor([loss]), None, yes, max_loss=2.0).abs()) == sensitivity(1)


def test_a_loss_that_is_not_finite_counts_as_the_largest() -> None:
    losses = torch.tensor([math.nan, math.inf, -math.inf])
    each = contributions(losses, None, torch.ones(3, dtype=torch.bool), max_loss=2.0)
    assert each.flatten().tolist() == [0.5, 0.5, -0.5]


def test_the_noise_has_the_stated_deviation_and_no_two_releases_share_it() -> None:
    steps = tuple(range(1, 4001))
    wide = release(steps=steps)
    zero = torch.zeros(2, dtype=torch.float64)
    # Undo the mean and the bound: with a population this large nothing is clamped.
    wide.budget = BUDGET._replace(population=10**7)
    drawn = torch.tensor([wide(zero, step=step) for step in steps], dtype=torch.float64)
    noise = torch.stack([drawn[:, 0] / wide.max_loss - 0.5, drawn[:, 1] - 0.5], 1) * 10**7
    expected = wide.noise_multiplier * sensitivity(2)
    assert noise.std(0).tolist() == pytest.approx([expected, expected], rel=0.05)
    assert noise.mean(0).abs().max() < 4 * expected / math.sqrt(len(steps))
    distinct = len({float(value) for value in noise.flatten()})  # a few of 8000 meet on the grid by chance
    assert distinct > 0.995 * noise.numel()
    assert wide.loss_deviation() == pytest.approx(float(drawn[:, 0].std()), rel=0.05)


@pytest.mark.parametrize("count", [1, 7])
def test_all_releases_together_are_within_the_budget(count: int) -> None:
    """The multiplier is that of one Gaussian mechanism, composed: checked by another accountant of dp_accounting."""
    z = release(steps=range(1, count + 1)).noise_multiplier
    assert z == evaluation_noise(BUDGET, releases=count)
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(z / math.sqrt(count)))
    assert 0.99 * BUDGET.epsilon < accountant.get_epsilon(BUDGET.delta) <= BUDGET.epsilon * (1 + 1e-3)


def test_more_releases_than_planned_are_refused() -> None:
    planned, zero = release(), torch.zeros(2, dtype=torch.float64)
    for step in (1, 2, 3):
        planned(zero, step=step)
    for step in (2, 4):
        with pytest.raises(FdpError, match=f"evaluation after step {step}: expected one of the 3 steps"):
            planned(zero, step=step)
    with pytest.raises(FdpError, match="expected a float64 sum of 2 entries"):
        release()(torch.zeros(3), step=1)


def test_the_same_step_of_the_same_key_has_the_same_noise_and_another_key_has_not() -> None:
    """So a resumed run releases the same number again, which costs nothing."""
    zero = torch.zeros(2, dtype=torch.float64)
    assert release()(zero, step=2) == release()(zero, step=2)
    assert release()(zero, step=2) != release(key=keys.key(1))(zero, step=2)
