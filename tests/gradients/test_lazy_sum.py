"""Sums that are evaluated later: their dtype, their zeros, and adding them up."""

from __future__ import annotations

import pytest
import torch

from fdp.gradients.lazy_sum import LazySum, add_sums, evaluate
from fdp.types import ClippedSum


def test_the_sum_of_two_sums_of_different_samples_keeps_the_sensitivity_of_one():
    a = ClippedSum({"w": torch.tensor([1.0, 2.0])}, torch.tensor(0.5))
    b = ClippedSum({"w": torch.tensor([3.0, 5.0])}, torch.tensor(0.5))
    both = add_sums(a, b)
    assert both.value["w"].tolist() == [4.0, 7.0]
    assert float(both.sensitivity) == 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_whose_factor_is_zero_contributes_exactly_zero(bad):
    rows = torch.tensor([[1.0, 2.0], [bad, bad], [4.0, 8.0]])
    total = LazySum(rows, torch.tensor([0.5, 0.0, 0.25], dtype=torch.float64)).evaluate()
    assert total.tolist() == [1.5, 3.0]


def test_a_sum_is_evaluated_in_the_dtype_of_its_factors():
    rows = torch.full((2, 3), 1.0, dtype=torch.bfloat16)
    factor = 1 - 2.0**-30  # 1 in float32, let alone in bfloat16
    total = LazySum(rows, torch.tensor([factor, 0.0], dtype=torch.float64)).evaluate()
    assert total.dtype == torch.float64
    assert total.tolist() == [factor] * 3
    single = LazySum(torch.tensor([2.0, 3.0]), torch.tensor([0.5, 1.0], dtype=torch.float64)).evaluate()
    assert single.shape == ()
    assert single.item() == 4.0


def test_evaluating_a_sum_keeps_its_sensitivity_and_its_tensors():
    leaf = torch.ones(2, dtype=torch.float64)
    half = LazySum(torch.ones(3, 2), torch.full((3,), 0.5, dtype=torch.float64))
    total = ClippedSum({"a": leaf, "b": half}, torch.tensor(0.5))
    made = evaluate(total)
    assert made.value["a"] is leaf
    assert made.value["b"].tolist() == [1.5, 1.5]
    assert made.sensitivity is total.sensitivity
    both = add_sums(total, total._replace(value=dict(total.value)))
    assert both.value["b"].tolist() == [3.0, 3.0]
    assert float(both.sensitivity) == 0.5


def test_lazy_sums_add_up_to_the_sum_over_all_rows():
    rows = torch.randn(5, 3, 2, dtype=torch.float64)
    factors = torch.tensor([0.5, 0.0, 1.0, 0.25, 1.0], dtype=torch.float64)
    rows[1] = torch.inf
    one = torch.ones(())

    def parts():
        return [ClippedSum({"w": LazySum(rows[cut], factors[cut])}, one) for cut in (slice(2), slice(2, 5))]

    expected = torch.tensordot(factors[[0, 2, 3, 4]], rows[[0, 2, 3, 4]], dims=1)
    for evaluated in ((), (0,), (1,), (0, 1)):
        first, second = (evaluate(part) if i in evaluated else part for i, part in enumerate(parts()))
        torch.testing.assert_close(add_sums(first, second).value["w"], expected, rtol=1e-14, atol=1e-14)


def test_a_sum_is_added_to_a_wider_one_without_rounding_it():
    for wide_first in (True, False):
        wide = ClippedSum({"w": torch.tensor([1e8 + 1, 1e8 + 3], dtype=torch.float64)}, torch.ones(()))
        narrow = ClippedSum({"w": LazySum(torch.ones(2, 2), torch.ones(2))}, torch.ones(()))
        both = add_sums(wide, narrow) if wide_first else add_sums(narrow, wide)
        assert (both.value["w"] - 1e8).tolist() == [3.0, 5.0]


def test_adding_uses_up_both_sums():
    one = torch.ones(())
    first, second = (ClippedSum({"v": torch.ones(2), "w": torch.full((3,), i)}, one) for i in (1.0, 2.0))
    both = add_sums(first, second)
    assert not first.value
    assert not second.value
    assert both.value["w"].tolist() == [3.0] * 3
