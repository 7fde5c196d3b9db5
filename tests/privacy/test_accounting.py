from __future__ import annotations

import math
import time
from itertools import pairwise

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from fdp.privacy import accounting
from fdp.privacy.accounting import (
    Accountant,
    delta,
    effective_noise_multiplier,
    epsilon,
    epsilon_curve,
    event,
    noise_multiplier_for,
)
from fdp.privacy.clipping import flat, quantile
from fdp.privacy.loss_distributions import NEIGHBOURS, one_step_pld, parts_of
from fdp.privacy.mechanism import Mechanism, statistics
from fdp.privacy.sampling import Poisson, poisson
from fdp.types import FdpError

FLAT = flat(max_norm=1.0)


def mechanism(
    q: float,
    z: float,
    *,
    count_noise: float | None = None,
    size: int = 10_000,
    population: int | None = None,
    most: int | None = None,
):
    sampling = poisson(size, expected_batch_size=q * size, population=population, max_batch_size=most)
    return Mechanism(sampling, FLAT._replace(count_noise=count_noise), z)


GOLDEN = mechanism(0.04, 1.5)


def gaussian_epsilon(z: float, target: float) -> float:
    """The exact epsilon of one Gaussian release (Balle & Wang 2018, arXiv 1805.06530, Theorem 8)."""

    def gap(e: float) -> float:
        return float(stats.norm.cdf(0.5 / z - e * z) - math.exp(e) * stats.norm.cdf(-0.5 / z - e * z)) - target

    return optimize.root_scalar(gap, bracket=(0, 200), xtol=1e-12).root


def exact_rdp_epsilon(q: float, z: float, steps: int, target: float) -> float:
    """Renyi accounting with the divergence by quadrature, at the orders 1.1, 1.2, ... 8."""

    def moment(order: float) -> float:
        def density(x: float) -> float:
            ratio = 1 - q + q * math.exp((2 * x - 1) / (2 * z * z))
            return math.exp(-x * x / (2 * z * z)) / (z * math.sqrt(2 * math.pi)) * ratio**order

        return integrate.quad(density, -20 * z, 40 * z, epsrel=1e-12, limit=400)[0]

    orders = [1 + tenth / 10 for tenth in range(1, 71)]
    return min(
        steps * math.log(moment(a)) / (a - 1) + math.log1p(-1 / a) - math.log(target * a) / (a - 1) for a in orders
    )


def test_rdp_golden():
    # Opacus' figure is exact; dp_accounting bounds moments of fractional order from above, by 3e-5 here.
    exact = exact_rdp_epsilon(0.04, 1.5, 2250, 1e-5)
    assert exact == pytest.approx(7.32911117143, abs=1e-6)
    found = epsilon(GOLDEN, steps=2250, delta=1e-5, accountant=Accountant.RDP)
    assert exact - 1e-9 <= found <= exact + 3e-4


def test_pld_golden():
    found = epsilon(GOLDEN, steps=2250, delta=1e-5)
    assert found == pytest.approx(6.7688, abs=1e-3)
    assert 6.7774 - 0.01 < found < 6.7774  # prv_accountant: 6.7774 from above, with an error of 0.01


def test_epsilon_is_close_to_a_lower_bound():
    # The same losses rounded down give a lower bound, off by at most one grid width per step.
    low = privacy_loss_distribution.from_gaussian_mechanism(
        1.5,
        sampling_prob=0.04,
        value_discretization_interval=1e-4,
        pessimistic_estimate=False,
        use_connect_dots=False,
    )
    lower = low.self_compose(50).get_epsilon_for_delta(1e-5)
    assert lower <= epsilon(GOLDEN, steps=50, delta=1e-5) <= lower + 50 * 1e-4


@pytest.mark.parametrize("z", [0.7, 2.0, 30.0])
@pytest.mark.parametrize("target", [1e-3, 1e-6, 1e-10])
def test_without_sampling_it_is_the_analytic_gaussian_mechanism(z, target):
    # T releases with multiplier z sqrt(T) are one with multiplier z
    exact = gaussian_epsilon(z, target)
    for steps in (1, 16):
        found = epsilon(mechanism(1.0, z * math.sqrt(steps)), steps=steps, delta=target)
        assert exact - 1e-9 <= found <= exact * 1.002 + 1e-9
        assert delta(mechanism(1.0, z * math.sqrt(steps)), steps=steps, epsilon=exact) == pytest.approx(
            target, rel=0.01
        )


def test_one_subsampled_step_is_the_closed_form():
    # removing: delta(e) = q delta_gauss(e') with e' = log(1 + (exp(e) - 1) / q)
    q, z, target = 0.1, 0.8, 1e-6
    exact = math.log1p(q * math.expm1(gaussian_epsilon(z, target / q)))
    assert exact - 1e-9 <= epsilon(mechanism(q, z), steps=1, delta=target) <= exact * 1.001


@pytest.mark.parametrize("built", [GOLDEN, mechanism(0.02, 0.9, count_noise=3.0), mechanism(0.01, 2.5, most=150)])
def test_figures_are_those_of_dp_accounting_on_the_event(built):
    total = event(built, 300)
    reference = PLDAccountant(NEIGHBOURS, value_discretization_interval=4e-4).compose(total)
    assert epsilon(built, steps=300, delta=1e-6) == pytest.approx(reference.get_epsilon(1e-6), rel=2e-3)
    assert delta(built, steps=300, epsilon=0.4) == pytest.approx(reference.get_delta(0.4), rel=2e-2)
    if built.sampling.max_batch_size is None:
        renyi = RdpAccountant(neighboring_relation=NEIGHBOURS).compose(total)
        assert epsilon(built, steps=300, delta=1e-6, accountant=Accountant.RDP) == renyi.get_epsilon(1e-6)
        assert delta(built, steps=300, epsilon=1.0, accountant=Accountant.RDP) == renyi.get_delta(1.0)


def test_the_event_describes_the_mechanism():
    assert event(GOLDEN, 7) == dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.04, dp_accounting.GaussianDpEvent(1.5)), 7
    )
    assert event(mechanism(0.01, 1.0, most=120), 7) == dp_accounting.SelfComposedDpEvent(
        dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(10_000, 0.01, 120, 1.0), 7
    )
    assert NEIGHBOURS is dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


def test_every_field_that_matters_changes_event_and_epsilon():
    base = mechanism(0.02, 1.0, count_noise=5.0)
    changed = {
        "rate": base._replace(sampling=poisson(10_000, expected_batch_size=201)),
        "noise": base._replace(noise_multiplier=0.99),
        "count noise": mechanism(0.02, 1.0, count_noise=4.0),
        "truncation": mechanism(0.02, 1.0, count_noise=5.0, most=215),
    }
    before = epsilon(base, steps=100, delta=1e-6)
    for field, other in changed.items():
        assert event(other, 100) != event(base, 100), field
        assert epsilon(other, steps=100, delta=1e-6) > before, field
    assert event(base, 101) != event(base, 100)
    assert epsilon(base, steps=101, delta=1e-6) > before
    assert epsilon(base._replace(clip=FLAT), steps=100, delta=1e-6) < before
    # C and the style of clipping do not matter
    assert event(GOLDEN._replace(clip=flat(max_norm=9.0)), 5) == event(GOLDEN, 5)


@given(z=st.floats(0.2, 20), b=st.floats(0.2, 200))
def test_sum_and_count_are_one_release_with_the_effective_multiplier(z, b):
    style = quantile(max_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=b)
    found = effective_noise_multiplier(Mechanism(GOLDEN.sampling, style, z))
    assert found == pytest.approx((z**-2 + (2 * b) ** -2) ** -0.5, rel=1e-12)
    assert found < z


def test_the_effective_multiplier_is_that_of_the_two_releases_composed():
    # on the whole data: the sum with multiplier z, and a count of sensitivity 1/2 with noise b
    z, b = 2.0, 1.5
    two = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(z), dp_accounting.GaussianDpEvent(2 * b)])
    reference = PLDAccountant(NEIGHBOURS).compose(two).get_epsilon(1e-6)
    assert epsilon(mechanism(1.0, z, count_noise=b), steps=1, delta=1e-6) == pytest.approx(reference, rel=1e-3)


def test_no_noise_is_no_privacy():
    for open_ in (mechanism(0.01, 0.0), mechanism(0.01, 1.0, count_noise=0.0)):
        assert isinstance(event(open_, 10), dp_accounting.NonPrivateDpEvent)
        for accountant in Accountant:
            assert epsilon(open_, steps=10, delta=1e-6, accountant=accountant) == math.inf
            assert delta(open_, steps=10, epsilon=5.0, accountant=accountant) == 1.0
            assert epsilon_curve(open_, steps=[1, 5], delta=1e-6, accountant=accountant) == [math.inf] * 2


@pytest.mark.parametrize("z", [1e-3, 1e-8, 1e-200])
def test_tiny_noise_gives_a_large_or_infinite_epsilon_without_errors(z):
    little = mechanism(0.01, z)
    for accountant in Accountant:
        assert epsilon(little, steps=10, delta=1e-6, accountant=accountant) > 1e4
    assert delta(little, steps=10, epsilon=5.0) > 0.09
    assert min(epsilon_curve(little, steps=[1, 10], delta=1e-6)) > 1e4


def test_truncation_costs_little_when_rare_and_much_when_common():
    plain = epsilon(mechanism(0.01, 1.0), steps=200, delta=1e-6)
    rare = epsilon(mechanism(0.01, 1.0, most=200), steps=200, delta=1e-6)
    common = epsilon(mechanism(0.01, 1.0, most=105), steps=200, delta=1e-6)
    assert plain <= rare < 1.005 * plain
    assert common > 1.5 * plain
    never = mechanism(0.01, 1.0, most=10_000)
    assert event(never, 3) == event(mechanism(0.01, 1.0), 3)


@settings(max_examples=4, deadline=None)
@given(
    q=st.floats(1e-3, 0.3),
    z=st.floats(0.7, 6.0),
    steps=st.integers(1, 2000),
    exponent=st.floats(3, 9),
    accountant=st.sampled_from(Accountant),
)
def test_epsilon_is_monotone(q, z, steps, exponent, accountant):
    def at(q: float, z: float, steps: int, exponent: float) -> float:
        return epsilon(mechanism(q, z), steps=steps, delta=10**-exponent, accountant=accountant)

    base = at(q, z, steps, exponent) * (1 - 1e-9)
    assert at(min(1.0, 1.1 * q), z, steps, exponent) >= base
    assert at(q, 0.9 * z, steps, exponent) >= base
    assert at(q, z, steps + 1 + steps // 10, exponent) >= base
    assert at(q, z, steps, exponent + 0.3) >= base


@settings(max_examples=4, deadline=None)
@given(q=st.floats(2e-3, 0.2), z=st.floats(0.8, 4.0), steps=st.integers(10, 2000))
def test_pld_is_below_rdp(q, z, steps):
    pld, rdp = (epsilon(mechanism(q, z), steps=steps, delta=1e-6, accountant=a) for a in Accountant)
    assert pld <= rdp


@pytest.mark.parametrize(
    ("q", "target", "steps", "accountant"),
    [
        (0.005, 0.5, 300, Accountant.PLD),
        (0.01, 3.0, 5000, Accountant.PLD),
        (1.0, 1.0, 10, Accountant.PLD),
        (0.1, 20.0, 200, Accountant.PLD),
        (0.01, 3.0, 5000, Accountant.RDP),
        (1.0, 1.0, 10, Accountant.RDP),
    ],
)
def test_the_noise_for_a_budget_meets_it_closely(q, target, steps, accountant):
    sampling = poisson(10_000, expected_batch_size=10_000 * q)
    z = noise_multiplier_for(sampling, FLAT, epsilon=target, delta=1e-6, steps=steps, accountant=accountant)
    spent = epsilon(Mechanism(sampling, FLAT, z), steps=steps, delta=1e-6, accountant=accountant)
    assert target * (1 - 1e-2) <= spent <= target
    less = epsilon(Mechanism(sampling, FLAT, z * 0.998), steps=steps, delta=1e-6, accountant=accountant)
    assert less > target


@pytest.mark.parametrize("built", [mechanism(0.01, 1.0, most=120), mechanism(0.02, 1.0, count_noise=2.0)])
def test_the_noise_for_a_budget_covers_truncation_and_count(built):
    sampling, clip = built.sampling, built.clip
    z = noise_multiplier_for(sampling, clip, epsilon=0.7, delta=1e-6, steps=300)
    assert 0.693 <= epsilon(Mechanism(sampling, clip, z), steps=300, delta=1e-6) <= 0.7
    plain = sampling._replace(max_batch_size=None)
    assert z > noise_multiplier_for(plain, FLAT, epsilon=0.7, delta=1e-6, steps=300)


MORE = statistics(poisson(10_000, expected_batch_size=100), max_norm=1.0, noise_multiplier=2.0, period=10)


@pytest.mark.parametrize("accountant", Accountant)
@pytest.mark.parametrize(
    "built", [GOLDEN, GOLDEN._replace(statistics=MORE), mechanism(1.0, 30.0)], ids=["steps", "and statistics", "all"]
)
def test_the_curve_is_the_epsilon_of_every_step(built, accountant):
    """The epsilon shown after a step is that of the step, not of a later one."""
    steps = list(range(1, 301))
    curve = epsilon_curve(built, steps=steps, delta=1e-5, accountant=accountant)
    assert all(a <= b for a, b in pairwise(curve))
    for t in (1, 2, 17, 100, 233, 299):
        exact = epsilon(built, steps=t, delta=1e-5, accountant=accountant)
        assert exact * (1 - 1e-3) <= curve[t - 1] <= exact * (1 + 2e-3)
    assert curve[-1] == epsilon(built, steps=300, delta=1e-5, accountant=accountant)
    if built is GOLDEN:
        assert all(a < b for a, b in pairwise(curve))


def test_a_long_curve_is_never_below_and_at_most_the_tolerance_above():
    steps = list(range(1, 2001))
    curve = epsilon_curve(GOLDEN, steps=steps, delta=1e-5)
    assert all(a <= b for a, b in pairwise(curve))
    for t in (1, 5, 77, 400, 1234, 1999, 2000):
        exact = epsilon(GOLDEN, steps=t, delta=1e-5)
        assert exact * (1 - 1e-3) <= curve[t - 1] <= 1.002 * exact + 0.003 * curve[-1]


@pytest.mark.parametrize("accountant", Accountant)
def test_a_curve_with_a_tolerance_is_never_below_and_never_falls(accountant):
    steps = list(range(1, 401))
    curve = epsilon_curve(GOLDEN, steps=steps, delta=1e-5, accountant=accountant, tolerance=0.02)
    assert len(set(curve)) < 100
    assert all(a <= b for a, b in pairwise(curve))
    for t in (1, 2, 17, 100, 333, 400):
        exact = epsilon(GOLDEN, steps=t, delta=1e-5, accountant=accountant)
        assert exact * (1 - 1e-3) <= curve[t - 1] <= 1.01 * exact + 0.02 * curve[-1]
    assert curve[-1] == epsilon(GOLDEN, steps=400, delta=1e-5, accountant=accountant)


def test_the_curve_does_not_fall_where_the_last_point_is_on_a_finer_grid():
    curve = epsilon_curve(mechanism(1e-3, 1.0), steps=[997, 998, 999, 1000], delta=1e-6, tolerance=0)
    assert all(a <= b for a, b in pairwise(curve))


def test_the_curve_follows_the_order_of_its_steps():
    assert epsilon_curve(GOLDEN, steps=[], delta=1e-5) == []
    one, two, three = epsilon_curve(GOLDEN, steps=[50, 5, 50], delta=1e-5)
    assert one == three > two > 0


def test_delta_and_epsilon_are_inverse():
    spent = epsilon(GOLDEN, steps=100, delta=1e-6)
    assert delta(GOLDEN, steps=100, epsilon=spent) == pytest.approx(1e-6, rel=1e-2)
    assert delta(GOLDEN, steps=100, epsilon=spent * 0.9) > 1e-6 > delta(GOLDEN, steps=100, epsilon=spent * 1.1)
    assert delta(GOLDEN, steps=1, epsilon=60.0) == accounting.SMALLEST_DELTA


@pytest.mark.parametrize("most", [None, 320, 2995])
def test_no_figure_depends_on_the_number_of_samples(most):
    """The number of samples differs between neighbours, so the public population is used in its place."""
    found = set()
    for size in (2990, 2991, 3000):
        sampling = poisson(size, expected_batch_size=300, population=3000, max_batch_size=most)
        z = noise_multiplier_for(sampling, FLAT, epsilon=3.0, delta=1e-6, steps=50)
        found.add((sampling.rate, z, event(Mechanism(sampling, FLAT, z), 50)))
    assert len(found) == 1


@pytest.mark.parametrize(("population", "q", "most"), [(200, 0.1, 30), (200, 0.1, 12), (1000, 0.02, 35), (60, 0.5, 31)])
def test_truncation_is_bounded_for_every_number_of_samples_up_to_the_public_one(population, q, most):
    """dp_accounting's bound depends on the number of samples; ours must be above it for every possible number."""
    grid = 0.02
    [step] = parts_of(event(mechanism(q, 1.2, size=population, population=population, most=most), 1))
    bound = one_step_pld(step.event, grid).self_compose(20)
    for size in {most + 1, (most + population) // 2, round(0.9 * population), population - 1, population}:
        exact = privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=size,
            sampling_probability=q,
            truncated_batch_size=most,
            noise_multiplier=1.2,
            value_discretization_interval=grid,
        ).self_compose(20)
        for e in (0.1, 1.0, 4.0):
            assert exact.get_delta_for_epsilon(e) <= bound.get_delta_for_epsilon(e) * (1 + 1e-9)


TINY = poisson(10_000, expected_batch_size=10_000)
BUDGET = {"delta": 1e-6, "steps": 100}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: epsilon(GOLDEN, steps=0, delta=1e-5), "steps"),
        (lambda: epsilon(GOLDEN, steps=-1, delta=1e-5), "steps"),
        (lambda: epsilon(GOLDEN, steps=1.5, delta=1e-5), "steps"),  # pyright: ignore
        (lambda: epsilon_curve(GOLDEN, steps=[0, 5], delta=1e-5), "steps"),
        (lambda: epsilon(GOLDEN, steps=1, delta=0.0), "delta"),
        (lambda: epsilon(GOLDEN, steps=1, delta=1.0), "delta"),
        (lambda: epsilon(GOLDEN, steps=1, delta=math.nan), "delta"),
        (lambda: epsilon(GOLDEN, steps=1, delta=1e-14), "Accountant.RDP"),
        (lambda: epsilon(GOLDEN._replace(noise_multiplier=-1.0), steps=1, delta=1e-5), "noise_multiplier"),
        (
            lambda: epsilon(GOLDEN._replace(noise_multiplier=math.inf), steps=1, delta=1e-5),
            "noise_multiplier",
        ),
        (lambda: epsilon(mechanism(0.1, 1.0, count_noise=-1.0), steps=1, delta=1e-5), "count_noise"),
        (lambda: epsilon(GOLDEN._replace(sampling=Poisson(10, 20, 10)), steps=1, delta=1e-5), "batch larger"),
        (
            lambda: epsilon(mechanism(0.1, 1.0, most=9), steps=1, delta=1e-5, accountant=Accountant.RDP),
            "no Renyi bound",
        ),
        (lambda: delta(GOLDEN, steps=1, epsilon=-0.1), "epsilon"),
        (lambda: noise_multiplier_for(TINY, FLAT, epsilon=0.0, **BUDGET), "above 0"),
        (lambda: noise_multiplier_for(TINY, FLAT, epsilon=math.inf, **BUDGET), "finite"),
        (lambda: noise_multiplier_for(TINY, FLAT, epsilon=1e-9, delta=1e-12, steps=10**6), "within reach"),
        (lambda: noise_multiplier_for(GOLDEN.sampling, FLAT, epsilon=1e6, **BUDGET), "no privacy"),
        (
            lambda: noise_multiplier_for(GOLDEN.sampling, FLAT, epsilon=3.0, delta=0.5, steps=2),
            "delta: expected well below 1 / population",
        ),
        (
            lambda: noise_multiplier_for(
                GOLDEN.sampling, FLAT._replace(count_noise=0.5), epsilon=0.5, delta=1e-6, steps=1000
            ),
            "Raise count_noise",
        ),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(call, words):
    with pytest.raises(FdpError, match=words):
        call()


def test_a_hundred_thousand_steps_take_about_a_second():
    built = mechanism(0.001, 1.03, size=1_000_000)
    start = time.process_time()
    epsilon(built, steps=100_000, delta=1e-7)
    assert time.process_time() - start < 3
