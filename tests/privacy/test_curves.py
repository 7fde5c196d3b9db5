"""The curves of a mechanism against closed forms and against ``dp_accounting``."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from scipy.stats import norm

from fdp.privacy.curves import (
    PrivacyCurve,
    gaussian_delta,
    gaussian_mu,
    group_bound,
    group_epsilon,
    mu_by_central_limit,
)
from fdp.privacy.releases import GRADIENTS, Release, composed_epsilon
from fdp.types import FdpError
from tests.conftest import coarse_groups

FULL = Release(GRADIENTS, 1.0, 2.0, 4)  # four Gaussian releases of everything: exactly mu = sqrt(4) / 2 = 1
SAMPLED = Release(GRADIENTS, 0.02, 1.0, 500)


def test_full_batches_are_exactly_gaussian():
    curve = PrivacyCurve.of([FULL])
    assert curve.mu() == pytest.approx(1.0, rel=2e-3)
    assert curve.mu() >= 1.0 - 1e-6
    for epsilon in (0.5, 2.0, 4.0):
        assert curve.delta(epsilon) == pytest.approx(gaussian_delta(epsilon, 1.0), rel=2e-2)
    for alpha in (0.01, 0.1, 0.5):
        exact = norm.cdf(norm.ppf(1 - alpha) - 1.0)
        assert exact - 5e-3 <= curve.false_negatives(alpha) <= exact + 1e-9, "a lower bound"


def test_the_curve_holds_the_epsilon_of_the_run():
    curve = PrivacyCurve.of([SAMPLED])
    alone = composed_epsilon([SAMPLED], delta=1e-6)
    assert curve.epsilon(1e-6) == pytest.approx(alone, rel=1e-2)
    assert curve.delta(alone) == pytest.approx(1e-6, rel=0.2)
    found = [curve.epsilon(10.0**-k) for k in range(5, 11)]
    assert found == sorted(found)


def test_mu_bounds_the_curve_and_the_central_limit_is_near_it():
    curve = PrivacyCurve.of([SAMPLED])
    mu = curve.mu()
    for epsilon in (0.0, 0.3, 1.0, 2.0, 3.0):
        assert curve.delta(epsilon) <= gaussian_delta(epsilon, mu) + 1e-9
    assert mu_by_central_limit([SAMPLED]) == pytest.approx(mu, rel=0.5)
    assert mu_by_central_limit([SAMPLED]) == pytest.approx(0.02 * math.sqrt(500 * math.expm1(1.0)))
    assert gaussian_mu(1.0, gaussian_delta(1.0, 0.7)) == pytest.approx(0.7, rel=1e-4)


def test_a_group_of_one_is_a_sample():
    assert group_epsilon([SAMPLED], size=1, delta=1e-6) == pytest.approx(
        composed_epsilon([SAMPLED], delta=1e-6), rel=1e-2
    )


@pytest.fixture
def _coarse_groups() -> Iterator[None]:
    with coarse_groups():
        yield


@pytest.mark.usefixtures("_coarse_groups")
def test_a_group_in_full_batches_moves_the_sum_by_its_size():
    tripled = FULL._replace(noise_multiplier=FULL.noise_multiplier / 3)
    assert group_epsilon([FULL], size=3, delta=1e-6) == pytest.approx(composed_epsilon([tripled], delta=1e-6), rel=1e-2)


@pytest.mark.long
@pytest.mark.usefixtures("_coarse_groups")
def test_a_group_costs_more_than_a_sample_and_less_than_the_definition_allows():
    alone, group = (group_epsilon([SAMPLED], size=size, delta=1e-6) for size in (1, 4))
    loose = group_bound(PrivacyCurve.of([SAMPLED]), size=4, delta=1e-6)
    assert 2 * alone < group < loose
    # Four samples at q each are better than one at 4 q that moves the sum by 4 C.
    assert group < composed_epsilon([Release(GRADIENTS, 0.08, 0.25, 500)], delta=1e-6)


@pytest.mark.usefixtures("_coarse_groups")
def test_groups_of_several_releases_are_composed():
    both = group_epsilon([SAMPLED, FULL], size=2, delta=1e-6)
    assert both > max(group_epsilon([each], size=2, delta=1e-6) for each in (SAMPLED, FULL))


def test_a_group_of_a_truncated_draw_is_refused():
    with pytest.raises(FdpError, match="truncated"):
        group_epsilon([SAMPLED._replace(max_batch_size=30, population=1000)], size=2, delta=1e-6)
    with pytest.raises(FdpError, match="expected a whole number of samples from 1 to"):
        group_epsilon([SAMPLED], size=0, delta=1e-6)
