"""Composition against ``dp_accounting``'s own, release by release."""

from __future__ import annotations

import math

import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from fdp.privacy.composition import Composition

GRID = 2e-3


def gaussian(z: float, q: float, **options) -> PrivacyLossDistribution:
    return privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=GRID, **options
    )


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize(("z", "q"), [(0.5, 0.001), (1.0, 0.02), (4.0, 0.3), (20.0, 1.0), (0.6, 0.5)])
def test_epsilon_equals_dp_accounting_for_every_number_of_steps(z, q, delta):
    step = gaussian(z, q)
    composition = Composition([step], most=[200], delta=delta)
    for count in (200, 1, 2, 7, 60, 199):
        expected = step.self_compose(count).get_epsilon_for_delta(delta)
        assert composition.epsilon([count]) == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_several_kinds_add_up():
    kinds, delta = [gaussian(1.0, 0.05), gaussian(2.0, 0.2)], 1e-6
    composition = Composition(kinds, most=[50, 5], delta=delta)
    for counts in ((50, 5), (1, 1), (20, 2), (31, 4), (7, 0)):
        first, second = (kind.self_compose(count) if count else None for kind, count in zip(kinds, counts))
        whole = first if second is None else first.compose(second)  # pyright: ignore
        assert composition.epsilon(counts) == pytest.approx(whole.get_epsilon_for_delta(delta), rel=1e-6)  # pyright: ignore


def test_epsilon_is_the_larger_of_both_directions_in_any_order_of_calls():
    """A sample added and a sample removed: the larger counts, also where it is not the usual one."""
    step = gaussian(1.0, 0.1)
    mirrored = PrivacyLossDistribution(step._pmf_add, step._pmf_remove)
    for counts in ((100, 40, 3), (3, 40, 100), (40, 100, 3)):
        both = [Composition([kind], most=[100], delta=1e-6) for kind in (step, mirrored)]
        for count in counts:
            expected = step.self_compose(count).get_epsilon_for_delta(1e-6)
            assert [one.epsilon([count]) for one in both] == pytest.approx([expected] * 2, rel=1e-6)


def test_mass_at_infinity_above_delta_gives_infinity():
    step = gaussian(1.0, 0.1)
    pmf = step._pmf_remove.to_dense_pmf()
    masses = dict(enumerate(pmf._probs * (1 - 1e-4), start=pmf._lower_loss))
    leaky = PrivacyLossDistribution.create_from_rounded_probability(masses, 1e-4, GRID)
    composition = Composition([leaky], most=[50], delta=1e-3)
    assert composition.epsilon([9]) == pytest.approx(leaky.self_compose(9).get_epsilon_for_delta(1e-3), rel=1e-6)
    assert composition.epsilon([11]) == math.inf


def test_no_loss_at_all_is_zero():
    assert Composition([gaussian(1e4, 0.01)], most=[10], delta=1e-3).epsilon([10]) == 0.0
    replaced = gaussian(3.0, 0.1, neighboring_relation=NeighboringRelation.REPLACE_ONE)
    expected = replaced.self_compose(10).get_epsilon_for_delta(1e-6)
    assert Composition([replaced], most=[10], delta=1e-6).epsilon([10]) == pytest.approx(expected, rel=1e-6)
