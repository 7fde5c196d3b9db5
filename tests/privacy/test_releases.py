"""The composition of several runs, against ``dp_accounting``'s own accountant."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from fdp.privacy.accounting import epsilon, event
from fdp.privacy.clipping import flat, quantile
from fdp.privacy.mechanism import Mechanism, statistics, without_noise
from fdp.privacy.releases import GRADIENTS, STATISTICS, Opaque, Release, composed_epsilon, composed_event, releases_of
from fdp.privacy.sampling import poisson
from fdp.types import FdpError

DELTA = 1e-6
SAMPLING = poisson(960, expected_batch_size=32, population=1000)
FIRST = Mechanism(SAMPLING, flat(max_norm=1.0), 1.1)
SECOND = Mechanism(
    poisson(960, expected_batch_size=50, population=1000),
    quantile(max_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=3.0),
    0.9,
    statistics(SAMPLING, max_norm=1.0, noise_multiplier=2.0, period=7),
)


def releases(*runs: tuple[Mechanism, int]) -> list[Release]:
    found = [releases_of(mechanism, steps=steps) for mechanism, steps in runs]
    assert None not in found
    return [release for each in found for release in each or ()]


def dp_accounting_epsilon(*runs: tuple[Mechanism, int], delta: float = DELTA) -> float:
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 2.0**-12)
    for mechanism, steps in runs:
        accountant.compose(event(mechanism, steps))
    return float(accountant.get_epsilon(delta))


def test_one_run_has_the_epsilon_that_the_run_states():
    for mechanism, steps in ((FIRST, 100), (SECOND, 30)):
        alone = epsilon(mechanism, steps=steps, delta=DELTA)
        assert composed_epsilon(releases((mechanism, steps)), delta=DELTA) == pytest.approx(alone, rel=1e-9)


def test_several_runs_are_composed_as_dp_accounting_composes_them():
    runs = ((FIRST, 100), (SECOND, 30), (FIRST, 40))
    found = composed_epsilon(releases(*runs), delta=DELTA)
    assert found == pytest.approx(dp_accounting_epsilon(*runs), rel=2e-3)
    added = sum(epsilon(mechanism, steps=steps, delta=DELTA) for mechanism, steps in runs)
    assert found < 0.8 * added, "tighter than adding up epsilons, although at one delta instead of three"


def test_two_runs_of_one_mechanism_are_one_longer_run():
    split = composed_epsilon(releases((FIRST, 60), (FIRST, 40)), delta=DELTA)
    assert split == pytest.approx(epsilon(FIRST, steps=100, delta=DELTA), rel=1e-9)
    assert len(composed_event(releases((FIRST, 60), (FIRST, 40))).events) == 1


@pytest.mark.parametrize("dropped", range(4))
def test_a_release_that_is_left_out_changes_the_epsilon(dropped):
    all_of_them = releases((FIRST, 100), (SECOND, 30), (FIRST, 40))
    fewer = [release for place, release in enumerate(all_of_them) if place != dropped]
    assert composed_epsilon(fewer, delta=DELTA) < composed_epsilon(all_of_them, delta=DELTA) - 1e-3


def test_the_numbers_of_a_release_are_those_that_are_accounted_for():
    gradients, curvature = releases((SECOND, 30))
    assert (gradients.what, gradients.count, gradients.every) == (GRADIENTS, 30, 1)
    assert gradients.noise_multiplier < 0.9, "sum and count together"
    assert (curvature.what, curvature.count, curvature.every) == (STATISTICS, 5, 7)
    assert [each.within(8).count for each in (gradients, curvature)] == [8, 2]
    assert releases_of(without_noise(SAMPLING, flat(max_norm=1.0)), steps=3) is None


def test_a_truncated_draw_is_composed_as_such():
    truncated = Mechanism(SAMPLING._replace(max_batch_size=40), flat(max_norm=1.0), 1.1)
    (release,) = releases((truncated, 20))
    assert (release.max_batch_size, release.population) == (40, 1000)
    assert composed_epsilon([release], delta=DELTA) == pytest.approx(
        epsilon(truncated, steps=20, delta=DELTA), rel=1e-9
    )


def test_a_run_of_which_only_the_promise_is_known_is_composed_as_the_worst_of_its_kind():
    known = releases((FIRST, 100))
    alone = composed_epsilon(known, delta=DELTA)
    both = composed_epsilon(known, delta=3e-6, opaque=[Opaque(1.0, 2e-6)])
    assert alone < both <= alone + 1.0 + 1e-3
    assert composed_epsilon(known, delta=DELTA, opaque=[Opaque(1.0, 2e-6)]) == math.inf
    assert composed_epsilon([], delta=DELTA) == 0.0
    assert composed_epsilon([], delta=1e-5, opaque=[Opaque(1.0, 1e-5)]) == pytest.approx(1.0, abs=1e-3)


def test_a_release_without_noise_is_refused():
    with pytest.raises(FdpError, match="expected a rate in"):
        composed_epsilon([Release(GRADIENTS, 0.1, 0.0, 3)], delta=DELTA)
