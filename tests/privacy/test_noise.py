from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import keys
from fdp.privacy import noise
from fdp.privacy.clipping import clip_to, declare_clip
from fdp.privacy.noise import (
    add_gaussian,
    add_noise,
    declare_sensitivity,
    expected_mean,
    grid_of,
    noised,
    noised_leaves,
    rounded,
)
from fdp.privacy.sampling import poisson
from fdp.types import ClippedSum, FdpError, Norms

KEY = keys.key(11)


def total_of(value, sensitivity: float = 1.0) -> ClippedSum:
    return declare_sensitivity(value, sensitivity)


@pytest.mark.parametrize(("multiplier", "sensitivity"), [(1.0, 1.0), (0.7, 3.0), (4.0, 0.01)])
def test_the_noise_has_standard_deviation_multiplier_times_sensitivity(multiplier, sensitivity):
    noisy = add_gaussian(
        total_of({"w": torch.zeros(64, 100)}, sensitivity), key=KEY, step=0, noise_multiplier=multiplier
    )
    draws = noisy["w"].flatten().numpy()
    std = multiplier * sensitivity
    assert stats.kstest(draws, stats.norm(0, std).cdf).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(draws, stats.norm(0, wrong * std).cdf).pvalue < 1e-9


def test_noise_is_added_to_the_value_and_does_not_depend_on_it():
    zero, seven = (
        add_noise(total_of({"w": torch.full((50,), v, dtype=torch.float64)}), key=KEY, noise_multiplier=1.0)["w"]
        for v in (0.0, 7.0)
    )
    torch.testing.assert_close(seven - 7.0, zero, rtol=0, atol=1e-12)  # 7 is a multiple of the grid


@pytest.mark.parametrize("not_a_clipped_sum", [{"w": torch.zeros(3)}, ({"w": torch.zeros(3)}, torch.tensor(1.0)), None])
def test_nothing_but_a_clipped_sum_is_accepted(not_a_clipped_sum):
    with pytest.raises(FdpError, match="expected a ClippedSum"):
        add_gaussian(not_a_clipped_sum, key=KEY, step=0, noise_multiplier=1.0)


@pytest.mark.parametrize(
    "multiplier",
    [
        0.0,
        -1.0,
        -1e-9,
        float("nan"),
        float("inf"),
    ],
)
def test_a_multiplier_that_is_no_number_above_zero_is_refused(multiplier):
    with pytest.raises(FdpError, match="noise_multiplier: expected"):
        add_gaussian(total_of({"w": torch.zeros(3)}), key=KEY, step=0, noise_multiplier=multiplier)


def test_no_two_leaves_elements_or_keys_share_a_draw():
    value = {"a": torch.zeros(300), "b": torch.zeros(300), "c.0": torch.zeros(20, 15), "c.1": torch.zeros(7)}
    noisy = [add_gaussian(total_of(value), key=KEY, step=step, noise_multiplier=1.0) for step in range(2)]
    draws = torch.cat([leaf.flatten() for leaves in noisy for leaf in leaves.values()])
    assert len(draws.unique()) >= len(draws) - 4  # rounding to the grid may make two different draws meet
    a, b = noisy[0]["a"], noisy[0]["b"]
    assert torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 0.25


def test_noise_does_not_depend_on_the_order_or_company_of_leaves():
    value = {"a": torch.zeros(6), "b": torch.zeros(2, 3)}
    forward = add_gaussian(total_of(value), key=KEY, step=0, noise_multiplier=1.0)
    backward = add_gaussian(total_of(dict(reversed(value.items()))), key=KEY, step=0, noise_multiplier=1.0)
    alone = add_gaussian(total_of({"b": value["b"]}), key=KEY, step=0, noise_multiplier=1.0)
    assert torch.equal(forward["a"], backward["a"])
    assert torch.equal(forward["b"], backward["b"])
    assert torch.equal(forward["b"], alone["b"])


def test_inputs_are_not_modified():
    value = {"w": torch.zeros(4)}
    add_gaussian(total_of(value), key=KEY, step=0, noise_multiplier=1.0)
    assert (value["w"] == 0).all()


def test_the_key_of_a_release_is_the_root_with_step_noise_and_bound_folded_in():
    total = total_of({"w": torch.zeros(50)}, 0.5)
    by_root = add_gaussian(total, key=KEY, step=torch.tensor(3), noise_multiplier=2.0)
    key = keys.step_key(KEY, "noise 2.0, declared 0.5", 3)
    assert torch.equal(by_root["w"], add_noise(total, key=key, noise_multiplier=2.0)["w"])


def test_the_mean_is_over_the_expected_batch_size():
    mean = expected_mean({"a": torch.ones(2), "b": torch.full((), 4.0)}, poisson(10, expected_batch_size=4))
    assert mean["a"].tolist() == [0.25, 0.25]
    assert mean["b"].item() == 1.0


# ---------------------------------------------------------------- low bits


@pytest.mark.parametrize("deviation", [1.0, 0.7, 3e-9, 1.9999, 2.0, 5e7])
def test_the_grid_is_a_power_of_two_about_a_millionth_of_the_noise(deviation):
    grid = float(grid_of(torch.tensor(deviation, dtype=torch.float64)))
    assert torch.frexp(torch.tensor(grid, dtype=torch.float64)).mantissa == 0.5
    assert deviation * 2.0**-21 < grid <= deviation * 2.0**-20


@pytest.mark.parametrize(("multiplier", "sensitivity"), [(1.0, 1.0), (0.7, 3.0), (4.0, 0.01)])
def test_every_released_value_lies_on_the_grid(multiplier, sensitivity):
    value = {"zero": torch.zeros(500, dtype=torch.float64), "other": torch.randn(500, dtype=torch.float64) * 1e3}
    noisy = add_noise(total_of(value, sensitivity), key=KEY, noise_multiplier=multiplier)
    grid = grid_of(torch.tensor(multiplier * sensitivity, dtype=torch.float64))
    for path, leaf in noisy.items():
        assert leaf.dtype == torch.float64
        assert torch.equal(rounded(leaf, grid), leaf)
        draw = keys.normal(keys.fold_in(KEY, path), (500,), dtype=torch.float64)
        exact = value[path] + draw * multiplier * sensitivity
        assert ((leaf - exact).abs() <= grid / 2 * (1 + 1e-9)).all()


def explained(released: torch.Tensor, deviation: float) -> float:
    """Return the fraction of values that pure noise, a float32 number times the deviation, can equal: the attack."""
    z = (released / deviation).float()
    around = torch.stack([z, torch.nextafter(z, z + 1), torch.nextafter(z, z - 1)])
    return float((around.double() * deviation == released).any(0).double().mean())


def test_low_bits_do_not_tell_whether_a_sum_was_zero(monkeypatch):
    """Rows without a sample look like rows with one; under the attacked mechanism they do not."""
    touched, deviation = torch.randn(4000, dtype=torch.float64).mul(0.3), torch.tensor(0.7, dtype=torch.float64)

    def shares() -> tuple[float, float]:
        both = [noised(value, deviation, keys.fold_in(KEY, i)) for i, value in enumerate((touched * 0, touched))]
        return explained(both[0], 0.7), explained(both[1], 0.7)

    untouched, seen = shares()
    assert abs(untouched - seen) < 0.05
    real = keys.normal
    # As it was: 32 bits in float32, added in float64, not rounded.
    monkeypatch.setattr("fdp.privacy.noise.rounded", lambda value, grid: value)
    monkeypatch.setattr(keys, "normal", lambda *args, dtype, **options: real(*args, **options).double())
    untouched, seen = shares()
    assert untouched == 1.0
    assert seen < 0.5


def test_the_fractions_below_the_grid_of_any_value_leave_no_trace_in_the_low_digits():
    """The last eight bits on the grid are uniform for any value: chi-square against one in 256 each."""
    deviation = torch.tensor(1.0, dtype=torch.float64)
    for i, value in enumerate((0.0, 2.0**-21, 2.0**-22 * 3, 0.1234567)):
        released = noised(torch.full((1 << 16,), value, dtype=torch.float64), deviation, keys.fold_in(KEY, 100 + i))
        digits = (released * 2**20).round().long() & 255
        assert stats.chisquare(torch.bincount(digits, minlength=256).numpy()).pvalue > 1e-3


# ---------------------------------------------------------------- many leaves in one pass


@pytest.mark.parametrize("scale", [0.37, 1e-3, 3e5, 2.0**-899, 1e-303])
def test_leaves_noised_together_are_those_noised_one_by_one_bit_for_bit(scale, cpu_loops):
    draw = torch.Generator().manual_seed(3)
    value = {
        "a": torch.randn(7, 5, generator=draw),
        "empty": torch.zeros(0, 3),
        "b.0": torch.randn((), generator=draw).double(),
        "c": 1e6 * torch.randn(3, 2, 4, generator=draw),
        "b.1": torch.randn(300, generator=draw).double(),
        "zeros": torch.zeros(40),
    }
    deviation = torch.tensor(scale, dtype=torch.float64)
    together = noised_leaves(value, deviation, KEY)
    assert list(together) == list(value)
    for path, leaf in value.items():
        assert torch.equal(together[path], noised(leaf, deviation, keys.fold_in(KEY, path))), path


def test_noised_leaves_are_the_same_in_any_pieces(cpu_loops, monkeypatch):
    value = {"a": torch.randn(70), "b": torch.randn(9, 30).double()}
    deviation = torch.tensor(2.5, dtype=torch.float64)
    monkeypatch.setattr(noise, "ELEMENTS_IN_CACHE", 64)  # a piece ends inside a leaf
    for path, leaf in noised_leaves(value, deviation, KEY).items():
        assert torch.equal(leaf, noised(value[path], deviation, keys.fold_in(KEY, path)))


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.rounded = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.rounded += str(func) == "aten.round_.default"
        return func(*args, **(kwargs or {}))


def test_noise_is_torchs_operations_for_those_who_watch_or_differentiate_them(cpu_loops):
    value, deviation = {"w": torch.randn(300, dtype=torch.float64)}, torch.tensor(0.5, dtype=torch.float64)
    expected = noised_leaves(value, deviation, KEY)["w"]
    with _Seen() as seen:
        assert torch.equal(noised_leaves(value, deviation, KEY)["w"], expected)
    assert seen.rounded
    ones = torch.ones(300, dtype=torch.float64)
    found = torch.func.jvp(lambda w: noised_leaves({"w": w}, deviation, KEY)["w"], (value["w"],), (ones,))
    assert torch.equal(found[0], expected)
    assert not found[1].any()  # the slope of rounding


def test_two_declared_sensitivities_share_no_noise_and_a_tensor_is_its_number():
    """Mutation: twice the noise of one minus that of the other would leave the value itself."""
    value = {"w": torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)}

    def noisy(sensitivity: float | torch.Tensor) -> torch.Tensor:
        return add_gaussian(declare_sensitivity(value, sensitivity), key=KEY, step=0, noise_multiplier=1.0)["w"]

    one, two = noisy(torch.tensor(1.0)), noisy(torch.tensor(2.0))
    assert float((2 * one - two - value["w"]).abs().max()) > 0.1
    assert torch.equal(one, noisy(1.0))
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(FdpError, match="sensitivity: expected a finite number above 0, got"):
            noisy(torch.tensor(wrong))
    with pytest.raises(FdpError, match=r"sensitivity: expected a number, got a tensor of shape \(1,\)"):
        noisy(torch.ones(1))


@pytest.mark.parametrize("made", ["by hand", "by a tensor"])
def test_sensitivities_that_their_origin_does_not_name_share_no_noise(made):
    squared = torch.tensor([4.0, 9.0], dtype=torch.float64)

    def noise_of(sensitivity: float) -> torch.Tensor:
        bound = torch.tensor(sensitivity, dtype=torch.float64)
        by_hand = declare_clip({"w": torch.ones(2)}, bound)
        clip = by_hand if made == "by hand" else clip_to(Norms({"w": squared}), max_norm=bound)
        total = ClippedSum({"w": torch.zeros(3, dtype=torch.float64)}, clip.sensitivity, clip.bound)
        return add_gaussian(total, key=KEY, step=0, noise_multiplier=1.0)["w"]

    assert float((2 * noise_of(1.0) - noise_of(2.0)).abs().max()) > 0.1
    assert torch.equal(noise_of(1.0), noise_of(1.0))
