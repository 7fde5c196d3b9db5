"""Stochastic rounding to bfloat16, and the fused update with moments that are stored so."""

from __future__ import annotations

import pytest
import torch
from fdp_kernels import noisy_adamw as kernel
from fdp_kernels.launch_tables import LaunchTables, Leaf
from fdp_kernels.stochastic_rounding import random_bits_reference, round_reference

from tests.kernels.test_noisy_adamw import HYPER, MOMENTUM, SCALARS, clones, keys_of, leaf_of

X = torch.tensor([1.0, -1.0, 1.001, -3.14159, 1e-30, 65504.7, 0.0, 2.0**-130])


def test_over_all_bits_the_mean_is_the_number_itself():
    every = torch.arange(1 << 16).repeat(len(X), 1)
    rounded = round_reference(X[:, None].expand(-1, 1 << 16).contiguous(), every).double()
    torch.testing.assert_close(rounded.mean(1), X.double(), rtol=1e-12, atol=0)
    assert all(len(row.unique()) <= 2 for row in rounded)  # one of its two neighbours


def test_numbers_that_are_bfloat16_already_and_those_that_are_not_finite_stay():
    exact = torch.tensor([1.0, -2.5, 0.0, torch.inf, -torch.inf, torch.nan])
    for bits in (0, 1, (1 << 16) - 1):
        got = round_reference(exact, torch.full((len(exact),), bits))
        assert torch.equal(got.float().nan_to_num(7.0), exact.nan_to_num(7.0))


def test_bits_are_uniform_and_differ_between_steps_streams_and_elements():
    low, high = random_bits_reference(1 << 16, 12345, torch.tensor(3.0))
    other, _ = random_bits_reference(1 << 16, 12345, torch.tensor(4.0))
    for bits in (low, high, other):
        assert 0 <= int(bits.min()) <= int(bits.max()) < 1 << 16
        assert abs(bits.double().mean() / (1 << 16) - 0.5) < 0.01
        assert abs((bits & 1).double().mean() - 0.5) < 0.01
    for a, b in ((low, high), (low, other), (low[1:], low[:-1])):
        assert abs(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1]) < 0.02
    torch.testing.assert_close(random_bits_reference(10, 12350, torch.tensor(3.0))[0], low[5:15])


def narrow(leaf: Leaf) -> Leaf:
    return leaf._replace(mean=leaf.mean.bfloat16(), square=None if leaf.square is None else leaf.square.bfloat16())


def test_a_second_moment_that_the_nearest_bfloat16_would_hold_still_decays():
    leaf = narrow(leaf_of(1, (64, 64), copy=None))
    leaf.rows.zero_()
    assert leaf.square is not None
    assert HYPER.b2 is not None
    leaf.square.fill_(1.0)
    for step in range(200):
        scalars = SCALARS.clone()
        scalars[6] = step
        kernel.update_leaves_([leaf], None, scalars, HYPER, LaunchTables())
    expected = HYPER.b2**200
    assert float(leaf.square.float().mean()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("hyper", [HYPER, MOMENTUM], ids=["adamw", "momentum"])
def test_the_kernel_rounds_as_the_reference_does(hyper):
    leaves = [narrow(leaf_of(1, (36, 16))), narrow(leaf_of(2, (33,), first=37)), narrow(leaf_of(1, (8,), copy=None))]
    if hyper.b2 is None:
        leaves = [leaf._replace(square=None) for leaf in leaves]
    got, want, keys = clones(leaves), clones(leaves), keys_of(leaves)
    kernel.launch_noisy_adamw_(got, keys, SCALARS, hyper, LaunchTables())
    kernel.noisy_adamw_reference_(want, keys, SCALARS, hyper)
    for one, other in zip(got, want):
        torch.testing.assert_close(one.param, other.param, rtol=2e-6, atol=2e-7)
        for a, b in ((one.mean, other.mean), (one.square, other.square)):
            if a is not None and b is not None:
                assert (a.float() == b.float()).float().mean() > 0.98  # float32 may differ in its last bit
                torch.testing.assert_close(a, b, rtol=2.0**-7, atol=1e-6)
