from __future__ import annotations

import pytest
import torch

from fdp.types import Clip, ClippedSum, FdpError, Norms, Weighted


def test_the_total_norm_is_over_all_leaves():
    norms = Norms({"a": torch.tensor([9.0, 0.0]), "b": torch.tensor([16.0, 4.0])})
    assert norms.total().tolist() == [5.0, 2.0]
    assert norms.total().dtype == torch.float32


def test_the_total_norm_is_added_up_in_float64():
    # in float32, 2^24 + 1 + 1 + ... stays 2^24: ten thousand small leaves would vanish from the norm
    squared = {"large": torch.tensor([2.0**24])} | {str(i): torch.ones(1) for i in range(10_000)}
    assert Norms(squared).total().item() == torch.tensor((2.0**24 + 10_000) ** 0.5).item()


def test_not_a_number_in_one_leaf_is_in_the_total_of_that_sample_only():
    norms = Norms({"a": torch.tensor([1.0, float("nan"), 1.0]), "b": torch.tensor([0.0, 0.0, float("inf")])})
    assert norms.total()[0] == 1.0
    assert norms.total()[1].isnan()
    assert norms.total()[2].isinf()


def test_the_smallest_factor_is_over_leaves():
    clip = Clip({"a": torch.tensor([1.0, 0.5]), "b": torch.tensor([0.25, 1.0])}, torch.tensor(1.0))
    assert clip.smallest().tolist() == [0.25, 0.5]


def test_padding_has_factor_exactly_zero_whatever_its_norm():
    clip = Clip({"a": torch.tensor([0.5, float("nan"), float("inf")])}, torch.tensor(2.0))
    masked = clip.masked(torch.tensor([1.0, 0.0, 0.0]))
    assert masked.factors["a"].tolist() == [0.5, 0.0, 0.0]
    assert masked.sensitivity is clip.sensitivity


def test_an_error_is_a_value_error():
    assert issubclass(FdpError, ValueError)


def test_the_sum_of_two_sums_of_different_samples_keeps_the_sensitivity_of_one():
    a = ClippedSum({"w": torch.tensor([1.0, 2.0])}, torch.tensor(0.5))
    b = ClippedSum({"w": torch.tensor([3.0, 5.0])}, torch.tensor(0.5))
    assert a.plus(b).value["w"].tolist() == [4.0, 7.0]
    assert float(a.plus(b).sensitivity) == 0.5


def test_flat_clipping_keeps_one_tensor_for_all_leaves():
    factors = torch.tensor([1.0, 0.5, 0.25])
    masked = Clip(dict.fromkeys(["a", "b", "c"], factors), torch.tensor(1.0)).masked(torch.tensor([1.0, 0.0, 1.0]))
    assert len({id(f) for f in masked.factors.values()}) == 1
    assert masked.factors["b"].tolist() == [1.0, 0.0, 0.25]
    assert masked.smallest().tolist() == [1.0, 0.0, 0.25]
    different = Clip({"a": factors, "b": factors / 2, "c": factors}, torch.tensor(1.0))
    assert different.smallest().tolist() == [0.5, 0.25, 0.125]
    kept = different.masked(torch.tensor([0.0, 1.0, 1.0])).factors
    assert {path: f.tolist() for path, f in kept.items()} == {
        "a": [0.0, 0.5, 0.25], "b": [0.0, 0.25, 0.125], "c": [0.0, 0.5, 0.25]
    }  # fmt: skip


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_whose_factor_is_zero_contributes_exactly_zero(bad):
    rows = torch.tensor([[1.0, 2.0], [bad, bad], [4.0, 8.0]])
    total = Weighted(rows, torch.tensor([0.5, 0.0, 0.25], dtype=torch.float64)).total()
    assert total.tolist() == [1.5, 3.0]


def test_a_sum_is_made_in_the_dtype_of_its_factors():
    rows = torch.full((2, 3), 1.0, dtype=torch.bfloat16)
    factor = 1 - 2.0**-30  # 1 in float32, let alone in bfloat16
    total = Weighted(rows, torch.tensor([factor, 0.0], dtype=torch.float64)).total()
    assert total.dtype == torch.float64
    assert total.tolist() == [factor] * 3
    single = Weighted(torch.tensor([2.0, 3.0]), torch.tensor([0.5, 1.0], dtype=torch.float64)).total()
    assert single.shape == ()
    assert single.item() == 4.0


def test_making_a_sum_keeps_its_sensitivity_and_leaves_made_ones_alone():
    leaf = torch.ones(2, dtype=torch.float64)
    half = Weighted(torch.ones(3, 2), torch.full((3,), 0.5, dtype=torch.float64))
    total = ClippedSum({"a": leaf, "b": half}, torch.tensor(0.5))
    made = total.made()
    assert made.value["a"] is leaf
    assert made.value["b"].tolist() == [1.5, 1.5]
    assert made.sensitivity is total.sensitivity
    both = total.plus(total)
    assert both.value["b"].tolist() == [3.0, 3.0]
    assert float(both.sensitivity) == 0.5


def test_sums_not_yet_made_add_up_to_the_sum_over_all_rows():
    rows = torch.randn(5, 3, 2, dtype=torch.float64)
    factors = torch.tensor([0.5, 0.0, 1.0, 0.25, 1.0], dtype=torch.float64)
    rows[1] = torch.inf
    one = torch.ones(())
    first, second = (ClippedSum({"w": Weighted(rows[cut], factors[cut])}, one) for cut in (slice(2), slice(2, 5)))
    expected = torch.tensordot(factors[[0, 2, 3, 4]], rows[[0, 2, 3, 4]], dims=1)
    for a, b in ((first, second), (first.made(), second), (first, second.made())):
        torch.testing.assert_close(a.plus(b).value["w"], expected, rtol=1e-14, atol=1e-14)


def test_a_sum_is_added_to_a_wider_one_without_rounding_it():
    wide = ClippedSum({"w": torch.tensor([1e8 + 1, 1e8 + 3], dtype=torch.float64)}, torch.ones(()))
    narrow = ClippedSum({"w": Weighted(torch.ones(2, 2), torch.ones(2))}, torch.ones(()))
    for both in (wide.plus(narrow), narrow.plus(wide)):
        assert (both.value["w"] - 1e8).tolist() == [3.0, 5.0]


def test_what_was_added_is_let_go_of_on_request_alone():
    one = torch.ones(())
    first, second = (ClippedSum({"v": torch.ones(2), "w": torch.full((3,), i)}, one) for i in (1.0, 2.0))
    kept = first.plus(second)
    assert set(first.value) == set(second.value) == {"v", "w"}
    taken = first.plus(second, release=True)
    assert not first.value
    assert not second.value
    assert taken.value["w"].tolist() == kept.value["w"].tolist() == [3.0] * 3
