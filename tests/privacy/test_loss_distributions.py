"""Privacy loss distributions: those that we compute faster are those of dp_accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

from fdp.privacy.loss_distributions import _SampledGaussian, sampled_gaussian


@pytest.mark.parametrize("q", [1e-5, 1e-3, 0.016, 0.5, 0.999, 1.0])
@pytest.mark.parametrize(("z", "interval"), [(0.3, 0.01), (0.44, 5e-4), (1.0, 0.125), (2.5, 2e-3), (20.0, 5e-4)])
def test_the_distribution_of_a_sampled_gaussian_is_that_of_the_library(z: float, q: float, interval: float) -> None:
    found = sampled_gaussian(z, q, interval)
    expected = privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=interval
    )
    assert found._symmetric == expected._symmetric
    for mine, theirs in ((found._pmf_remove, expected._pmf_remove), (found._pmf_add, expected._pmf_add)):
        a, b = mine.to_dense_pmf(), theirs.to_dense_pmf()
        assert a._lower_loss == b._lower_loss
        assert a._infinity_mass == pytest.approx(b._infinity_mass, rel=1e-12, abs=0)
        np.testing.assert_allclose(a._probs, b._probs, rtol=1e-9, atol=1e-18)


def test_divergences_at_once_are_those_one_by_one() -> None:
    """At the ends of the range, at 0, and for a single epsilon, where the library is asked itself."""
    q = 0.25
    edge = math.log1p(-q)
    for adjacency in (AdjacencyType.ADD, AdjacencyType.REMOVE):
        loss, theirs = (
            kind(0.8, sampling_prob=q, adjacency_type=adjacency) for kind in (_SampledGaussian, GaussianPrivacyLoss)
        )
        epsilons = np.array([-9.0, edge - 1e-3, edge + 1e-3, -1e-9, 0.0, 1e-9, -edge - 1e-3, -edge + 1e-3, 9.0])
        single = [theirs.get_delta_for_epsilon(float(epsilon)) for epsilon in epsilons]
        np.testing.assert_allclose(loss.get_delta_for_epsilon(list(epsilons)), single, rtol=1e-12, atol=1e-18)
        assert loss.get_delta_for_epsilon(0.5) == theirs.get_delta_for_epsilon(0.5)
