"""Squared norms on a CPU are never understated and hardly overstated; weighted sums are the same in any pieces."""

from __future__ import annotations

import math
import platform

import numpy as np
import pytest
import torch
from fdp_kernels import keep_cpu
from fdp_kernels.keep import squared_norms_reference, squared_parts
from fdp_kernels.keep_cpu import (
    COVER,
    EXACT_ELEMENTS,
    SQUARE_BLOCK,
    rounded_up_squared_norms,
    squared_norms_cpu,
    wide_weighted_sum,
)
from torch import Tensor

from tests.kernels.linear_pairs import assert_rounded_up

SIZES = [EXACT_ELEMENTS + 1, 5000, 20 * SQUARE_BLOCK, 66000]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_large_float32_gradients_are_never_understated_and_at_most_2_to_the_minus_14_overstated(size, scale):
    G = randn(64, size) * scale
    G[:32, 1::SQUARE_BLOCK] *= 100  # squares much below the sum so far: each addition rounds
    assert_rounded_up(rounded_up_squared_norms(G), squared_norms_reference(G))
    assert_rounded_up(squared_parts(G).sum(1), squared_norms_reference(G))


def test_the_cover_makes_up_for_the_worst_order_of_summation():
    """One by one, every square after the first is just too small to change a float32 sum."""
    block = np.full(SQUARE_BLOCK, np.sqrt(2.0**-24 * (1 - 2.0**-20)), dtype=np.float32)
    block[0] = 1
    lost = np.sqrt(np.add.accumulate(np.square(block), dtype=np.float32)[-1])
    exact = np.square(block.astype(np.float64)).sum()
    assert float(lost) == 1
    assert exact > 1 + 254 * 2.0**-24
    assert float(lost) ** 2 * COVER >= exact
    assert COVER < 1 + 2.0**-15


@pytest.mark.parametrize("value", [1e-44, 1e-30, 1e-23, 2.0**-63, 2.0**-60, 1e20, 1e30, float("inf"), float("nan")])
def test_a_sample_whose_squares_float32_cannot_hold_is_exact_and_leaves_the_others_alone(value):
    G = randn(5, 5000)
    plain = rounded_up_squared_norms(G)
    G[1], G[3, 7] = value, value
    found, exact = rounded_up_squared_norms(G), squared_norms_cpu(G)
    torch.testing.assert_close(found[1], exact[1], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[[0, 2, 4]], plain[[0, 2, 4]])
    if value < 1:
        assert_rounded_up(found[3], exact[3])  # one tiny element among others
    else:
        torch.testing.assert_close(found[3], exact[3], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("exponent", range(-70, -40))
def test_squares_near_underflow_are_never_understated(exponent):
    G = randn(3, 5000) * 2.0**exponent
    G[1, 10:] = 0
    G[2] = 0
    assert_rounded_up(rounded_up_squared_norms(G), squared_norms_reference(G))


def test_the_cover_is_also_for_the_rest_beside_blocks_that_are_flushed_to_zero():
    G = torch.full((1, EXACT_ELEMENTS + 1), 2.0**-63 * 0.999)
    G[:, -1] = math.sqrt(G.shape[1] * keep_cpu.TINY_SQUARE) * 1.00001
    flushed = torch.set_flush_denormal(True)
    try:
        assert_rounded_up(rounded_up_squared_norms(G), squared_norms_reference(G))
    finally:
        torch.set_flush_denormal(False)
    assert flushed or platform.machine() != "x86_64"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_and_small_gradients_are_exact(dtype):
    for G in (randn(3, 9000).to(dtype), randn(3, EXACT_ELEMENTS)):
        assert torch.equal(rounded_up_squared_norms(G), squared_norms_cpu(G))
        torch.testing.assert_close(squared_norms_cpu(G), squared_norms_reference(G), rtol=1e-14, atol=0)


def test_strides_do_not_matter_and_a_sample_is_measured_alone():
    G = randn(6, 70, 90)
    found = rounded_up_squared_norms(G)
    assert torch.equal(rounded_up_squared_norms(G.mT.contiguous().mT), found)
    assert torch.equal(rounded_up_squared_norms(G.flip(0)), found.flip(0))
    assert torch.equal(torch.cat([rounded_up_squared_norms(G[b : b + 1]) for b in range(6)]), found)
    assert rounded_up_squared_norms(G[:0]).shape == (0,)


def test_squared_norms_stay_exact(monkeypatch):
    G = randn(5, 9000)
    torch.testing.assert_close(torch.ops.fdp_kernels.squared_norms(G), squared_norms_reference(G), rtol=1e-14, atol=0)
    monkeypatch.setattr(keep_cpu, "WIDE_ELEMENTS", 10_000)
    torch.testing.assert_close(torch.ops.fdp_kernels.squared_norms(G), squared_norms_reference(G), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("at_once", "columns"), [(1, 1), (40, 8), (64, 64), (1 << 10, 16), (1 << 16, 512)])
def test_a_weighted_sum_is_the_same_in_any_pieces(at_once, columns, dtype, cpu_loops, monkeypatch):
    G = randn(13, 7, 190).to(dtype)
    factors = randn(13, seed=1).abs().double() / 3  # of which float32 would lose digits
    factors[4] = 0
    G[4] = float("nan")
    G[5, 2, 3] = float("inf")
    whole = factors[factors > 0] @ G.double().flatten(1)[factors > 0]
    monkeypatch.setattr(keep_cpu, "SUM_ELEMENTS", at_once)
    monkeypatch.setattr(keep_cpu, "MIN_COLUMNS", columns)
    found = wide_weighted_sum(G, factors)
    assert found.shape == (7, 190)
    torch.testing.assert_close(found.flatten(), whole, rtol=1e-14, atol=1e-14)
    assert torch.equal(wide_weighted_sum(G.mT.contiguous().mT, factors), found)
    assert torch.equal(wide_weighted_sum(G, torch.zeros_like(factors)), torch.zeros(7, 190, dtype=torch.float64))
