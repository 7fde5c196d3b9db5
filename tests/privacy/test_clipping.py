from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdp import keys
from fdp.privacy.clipping import (
    automatic,
    clip_factors,
    clip_to,
    declare_clip,
    flat,
    normalising_factors,
    per_group,
    per_layer,
    quantile,
)
from fdp.types import FdpError, Norms

INF, NAN = float("inf"), float("nan")
KEY = keys.key(5)

# Norms and bounds are float32 numbers, as in a step: "at most" can be checked without slack in float64.
finite = st.floats(0, 2.0**60, width=32)
norm_lists = st.lists(finite | st.sampled_from([0.0, NAN, INF, 1e-30, 1e18]), min_size=1, max_size=6)
bounds = st.floats(2.0**-20, 2.0**20, width=32)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@given(norm_lists, bounds)
def test_a_gradient_times_its_factor_has_norm_at_most_the_bound(norms, bound):
    for given_as in (bound, torch.tensor(bound)):
        factors = clip_factors(tensor(norms), max_norm=given_as).double()
        for norm, factor in zip(tensor(norms).double().tolist(), factors.tolist()):
            assert not math.isfinite(norm) or norm * factor <= bound
            assert 0 <= factor <= 1


@given(norm_lists, bounds)
def test_a_norm_that_is_not_finite_has_factor_exactly_zero(norms, bound):
    norms = tensor(norms)
    bad = ~norms.isfinite()
    assert (clip_factors(norms, max_norm=bound)[bad] == 0).all()
    assert (normalising_factors(norms, max_norm=bound, gamma=0.01)[bad] == 0).all()


@given(norm_lists, bounds)
def test_a_norm_of_at_most_the_bound_has_factor_exactly_one(norms, bound):
    norms = tensor([*norms, bound])
    assert (clip_factors(norms, max_norm=bound)[norms <= bound] == 1).all()


@given(st.floats(2.0**-10, 2.0**20, width=32), bounds)
def test_clipping_wastes_nearly_nothing_of_the_bound(norm, bound):
    assume(norm > bound)
    assert float(clip_factors(tensor([norm]), max_norm=bound)) * norm >= bound * (1 - 1e-6)


@given(norm_lists, bounds, st.floats(2.0**-10, 1.0, width=32))
def test_a_gradient_times_its_normalising_factor_has_norm_below_the_bound(norms, bound, gamma):
    factors = normalising_factors(tensor(norms), max_norm=bound, gamma=gamma).double()
    for norm, factor in zip(tensor(norms).double().tolist(), factors.tolist()):
        assert not math.isfinite(norm) or norm * factor < bound


def test_normalising_factors_are_the_bound_over_norm_plus_gamma():
    factors = normalising_factors(tensor([0.0, 1.0, 99.5]), max_norm=2.0, gamma=0.5)
    torch.testing.assert_close(factors, tensor([4.0, 4 / 3, 0.02]), rtol=1e-6, atol=0)


def test_a_bound_that_float32_cannot_hold_is_kept_to_a_rounding():
    for bound in (0.1, 1 / 3, 0.7):
        norms = tensor([bound, bound * (1 + 1e-6), 1e3])
        assert (clip_factors(norms, max_norm=bound).double() * norms.double() <= bound * (1 + 1e-7)).all()


leaf_norms = st.dictionaries(st.sampled_from("abcd"), st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=4)


def of(norms: dict[str, list[float]]) -> Norms:
    """Norms as a step has them: squares, in float32 (those that overflow are infinite)."""
    return Norms({path: tensor(values).square() for path, values in norms.items()})


def moved(norms: Norms, clip) -> torch.Tensor:
    """Return how far each sample moves the sum: the norm over leaves of factor times gradient."""
    parts = [
        torch.where(clip.factors[p] > 0, clip.factors[p].double().square() * norms.squared[p].double(), 0)
        for p in norms.squared
    ]
    return torch.stack(parts).sum(0).sqrt()


STYLES = {
    "clip_to": lambda bound, paths: lambda norms: clip_to(norms, max_norm=bound),
    "flat": lambda bound, paths: lambda norms: flat(max_norm=bound).clip(norms, ()),
    "per-layer": lambda bound, paths: lambda norms: per_layer(max_norm=bound).clip(norms, ()),
    "per-group": lambda bound, paths: (
        lambda norms: per_group(
            groups={"first": paths[:1]} | ({"rest": paths[1:]} if paths[1:] else {}),
            max_norms={"first": 0.6 * bound if paths[1:] else bound} | ({"rest": 0.8 * bound} if paths[1:] else {}),
        ).clip(norms, ())
    ),
    "automatic": lambda bound, paths: lambda norms: automatic(max_norm=bound).clip(norms, ()),
    "quantile": lambda bound, paths: (
        lambda norms: quantile(max_norm=7.0, target_quantile=0.5, learning_rate=0.2, count_noise=1.0).clip(
            norms, torch.tensor(bound)
        )
    ),
}


@pytest.mark.parametrize("style", STYLES)
@given(norms=leaf_norms, bound=bounds)
def test_one_sample_moves_the_sum_by_at_most_the_sensitivity(style, norms, bound):
    values = of(norms)
    clip = STYLES[style](bound, sorted(norms))(values)
    assert list(clip.factors) == list(values.squared)
    assert float(clip.sensitivity) == pytest.approx(bound, rel=1e-6)
    assert (moved(values, clip) <= float(clip.sensitivity) * (1 + 1e-6)).all()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_sample_gets_factor_zero_and_the_others_keep_theirs(style, bad):
    good = {"a": [3.0, 1.0, 0.1], "b": [4.0, 0.0, 0.1]}
    worse = {"a": [3.0, bad, 0.1], "b": [4.0, bad, 0.1]}
    clips = [STYLES[style](1.0, ["a", "b"])(of(norms)) for norms in (good, worse)]
    for path in good:
        assert clips[1].factors[path][1] == 0
        assert torch.equal(clips[0].factors[path][[0, 2]], clips[1].factors[path][[0, 2]])


def test_flat_clipping_has_one_factor_for_all_leaves():
    clip = clip_to(of({"a": [3.0], "b": [4.0]}), max_norm=1.0)
    assert clip.factors["a"] is clip.factors["b"]
    assert float(clip.factors["a"]) == pytest.approx(0.2, rel=1e-6)


def test_one_bad_leaf_drops_the_whole_sample():
    assert clip_to(of({"a": [NAN], "b": [4.0]}), max_norm=1.0).factors["b"].item() == 0
    assert per_layer(max_norm=1.0).clip(of({"a": [NAN], "b": [0.1]}), ()).factors["b"].item() == 0


def test_per_layer_gives_every_leaf_its_share():
    clip = per_layer(max_norm=1.0).clip(of({p: [10.0] for p in "abcd"}), ())
    assert float(clip.factors["a"]) == pytest.approx(0.05, rel=1e-6)
    assert float(clip.sensitivity) == pytest.approx(1.0, rel=1e-6)


def test_per_group_clips_the_norm_of_the_group():
    style = per_group(groups={"x": ["a", "b"], "y": ["c"]}, max_norms={"x": 1.0, "y": 2.0})
    clip = style.clip(of({"a": [3.0], "b": [4.0], "c": [1.0]}), ())
    assert [float(clip.factors[p]) for p in "abc"] == pytest.approx([0.2, 0.2, 1.0], rel=1e-6)
    assert float(clip.sensitivity) == pytest.approx(5**0.5, rel=1e-6)


@pytest.mark.parametrize("number", [0.0, -1.0, NAN, INF])
def test_invalid_bounds_are_refused(number):
    makers = {
        "max_norm": [
            lambda: flat(max_norm=number),
            lambda: per_layer(max_norm=number),
            lambda: automatic(max_norm=number),
            lambda: quantile(max_norm=number, target_quantile=0.5, learning_rate=0.2, count_noise=1.0),
            lambda: per_group(groups={"x": ["a"]}, max_norms={"x": number}),
        ],
        "gamma": [lambda: automatic(max_norm=1.0, gamma=number)],
        "count_noise": [lambda: quantile(max_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=number)],
        "learning_rate": [lambda: quantile(max_norm=1.0, target_quantile=0.5, learning_rate=number, count_noise=1.0)],
    }
    for name, calls in makers.items():
        for call in calls:
            with pytest.raises(FdpError, match=f"{name}.*expected a finite number above 0"):
                call()


@pytest.mark.parametrize("target", [0.0, 1.0, -0.1, NAN])
def test_a_quantile_outside_zero_and_one_is_refused(target):
    with pytest.raises(FdpError, match="target_quantile"):
        quantile(max_norm=1.0, target_quantile=target, learning_rate=0.2, count_noise=1.0)


def test_groups_must_hold_every_leaf_exactly_once():
    with pytest.raises(FdpError, match=r"\['a'\] in two"):
        per_group(groups={"x": ["a"], "y": ["a", "b"]}, max_norms={"x": 1.0, "y": 1.0})
    with pytest.raises(FdpError, match=r"a max_norm for each of \['x', 'y'\], got \['x'\]"):
        per_group(groups={"x": ["a"], "y": ["b"]}, max_norms={"x": 1.0})
    style = per_group(groups={"x": ["a"], "y": ["b"]}, max_norms={"x": 1.0, "y": 1.0})
    for leaves, odd in (("a", "b"), ("abc", "c")):
        with pytest.raises(FdpError, match=rf"missing or unknown: \['{odd}'\]"):
            style.clip(of({p: [1.0] for p in leaves}), ())


def test_an_empty_group_is_refused():
    with pytest.raises(FdpError):
        per_group(groups={"x": ["a"], "y": []}, max_norms={"x": 1.0, "y": 1.0}).clip(of({"a": [1.0]}), ())


def test_a_bound_that_is_not_a_number_clips_everything_away():
    assert float(clip_factors(tensor([5.0]), max_norm=torch.tensor(NAN))) == 0


def adaptive(target: float = 0.5, noise: float = 1.0, rate: float = 0.2):
    return quantile(max_norm=8.0, target_quantile=target, learning_rate=rate, count_noise=noise)


def test_static_styles_release_nothing_but_the_sum():
    for style in (flat(max_norm=1.0), per_layer(max_norm=1.0), automatic(max_norm=1.0)):
        assert style.count_noise is None
        assert style.init() == ()
        assert style.update((), style.tally(of({"a": [1.0]}), torch.ones(1), ()), KEY, 10.0) == ()


@given(
    norms=st.lists(finite | st.sampled_from([NAN, INF]), min_size=0, max_size=8),
    extra=finite | st.sampled_from([NAN, INF]),
    bound=bounds,
)
def test_adding_any_one_sample_changes_the_tally_by_at_most_one_half(norms, extra, bound):
    style, state = adaptive(), torch.tensor(bound)

    def tally(values: list[float]) -> float:
        return float(style.tally(of({"a": values}), torch.ones(len(values)), state))

    assert abs(tally([*norms, extra]) - tally(norms)) == 0.5
    assert tally(norms) == sum(0.5 if n <= bound else -0.5 for n in tensor(norms).square().sqrt().tolist())


@given(norms=st.lists(finite, min_size=2, max_size=8), padding=finite | st.sampled_from([NAN, INF]))
def test_padding_is_not_counted(norms, padding):
    style, state = adaptive(), torch.tensor(1.0)
    mask = torch.ones(len(norms) + 1)
    mask[0] = 0
    whole = style.tally(of({"a": [padding, *norms]}), mask, state)
    assert whole == style.tally(of({"a": norms}), mask[1:], state)


@pytest.mark.parametrize("target", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("start", [0.05, 20.0])
def test_the_bound_moves_to_the_quantile(target, start):
    style = adaptive(target)
    samples = torch.linspace(0.001, 1.0, 500)  # the quantile q of these norms is q
    bound, distance = torch.tensor(start), []
    for step in range(150):
        total = style.tally(Norms({"a": samples.square()}), torch.ones(500), bound)
        bound = style.update(bound, total, keys.fold_in(KEY, step), 500.0)
        distance.append(abs(math.log(float(bound) / target)))
    assert distance[9] < abs(math.log(start / target))
    assert float(bound) == pytest.approx(target, rel=0.05)


def test_the_next_bound_depends_on_the_data_only_through_the_noised_count():
    style, state = adaptive(noise=3.0), torch.tensor(1.0)
    tallies = [
        style.tally(of({"a": norms}), torch.ones(4), state)
        for norms in ([0.1, 0.2, 5.0, 9.0], [0.9, 0.9, 1.1, 1e9], [0.1, 0.1, 0.1, 9.0])
    ]
    same, also, other = (float(style.update(state, tally, KEY, 4.0)) for tally in tallies)
    assert same == also != other
    noise = 3.0 * float(keys.normal(keys.fold_in(KEY, 0), (), dtype=torch.float64))
    assert same == pytest.approx(math.exp(-0.2 * (noise / 4)), rel=1e-5)
    assert other == pytest.approx(math.exp(-0.2 * ((1 + noise) / 4)), rel=1e-5)


def test_the_count_is_noised_with_its_stated_deviation():
    style, state = adaptive(noise=3.0), torch.tensor(1.0)
    bounds_ = torch.stack([style.update(state, torch.tensor(0.0), keys.fold_in(KEY, i), 10.0) for i in range(400)])
    noise = -bounds_.log() / 0.2 * 10.0
    assert float(noise.std()) == pytest.approx(3.0, rel=0.15)
    assert abs(float(noise.mean())) < 0.6
    assert style.count_noise == 3.0


def test_a_bound_that_is_changed_in_place_afterwards_is_that_which_clipped():
    """An adaptive bound of one's own: the noise must cover the old one."""
    for dtype in (torch.float32, torch.float64):
        bound = torch.tensor(1.0, dtype=dtype)
        clip, declared = clip_to(of({"a": [100.0]}), max_norm=bound), declare_clip({"a": torch.ones(1)}, bound)
        bound.mul_(0.01)
        assert float(clip.sensitivity) == float(declared.sensitivity) == 1.0


@pytest.mark.parametrize("bad", [1.0, torch.ones(2), torch.tensor(1), None])
def test_a_declared_sensitivity_is_one_number(bad):
    with pytest.raises(FdpError, match="sensitivity: expected a floating point tensor of one number, got"):
        declare_clip({"a": torch.ones(1)}, bad)


def test_the_sensitivity_of_the_sum_is_the_bound_that_clipped_it():
    style = adaptive()
    assert float(style.clip(of({"a": [100.0]}), torch.tensor(0.3)).sensitivity) == pytest.approx(0.3)
    assert float(style.init()) == 8.0
