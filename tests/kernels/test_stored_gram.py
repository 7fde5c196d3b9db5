"""Tests of norms from stored Gram matrices: never below the norm, barely above, and every term of the bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fdp_kernels.direct import direct, direct_reference
from fdp_kernels.ghost import ghost_reference, launch_ghost
from fdp_kernels.stored_gram import launch_finish, launch_reduce, launch_stored_gram, launch_token_norms, stored_gram
from fdp_kernels.weighted import launch_weighted, weighted

from tests.kernels.linear_pairs import (
    PAIRS,
    _set_up,  # noqa: F401  an autouse fixture
    cancelling_pair,
    random_pair,
    relative,
    sizes,
)
from tests.kernels.test_linear_gpu import BF16, LARGE

SHAPES = [(1, 1, 5, 7), (3, 63, 40, 33), (2, 300, 9, 20), (1, 100, 70, 1100)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pair", PAIRS)
def test_result_is_never_below_the_norm_and_barely_above(shape: tuple[int, ...], pair: Callable) -> None:
    g, x = pair(shape)
    found, expected = launch_stored_gram(g, x), direct_reference(g, x)
    assert found.dtype == torch.float64
    assert found.shape == shape[:1]
    assert bool((found >= expected).all())
    for b, one_hot in enumerate(torch.eye(shape[0]) if shape[1] < 100 else ()):
        assert found[b] >= launch_weighted(g, x, one_hot).double().square().sum()
    tokens, width = shape[1], shape[2] + shape[3]
    slack = ((width + 140) * 2**-23) ** 0.5 + 2 * tokens * 2**-23  # of the Gram matrices, and of the sum over tokens
    assert bool((found.sqrt() <= expected.sqrt() * 1.01 + slack * sizes(g, x) + 1e-15).all())  # products below 2^-126
    if pair is random_pair:
        assert relative(found, expected) < 3e-3


def test_result_is_not_below_the_norm_when_a_gram_matrix_underflows() -> None:
    g, x = torch.full((1, 32, 4), 2.0**-75), torch.full((1, 32, 4), 2.0**62)
    assert bool((launch_stored_gram(g, x) >= direct_reference(g, x)).all())


def test_features_are_multiplied_depth_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdp_kernels.stored_gram.DEPTH", 16)
    g, x = random_pair((2, 20, 40, 33))
    found, expected = launch_stored_gram(g, x), direct_reference(g, x)
    assert bool((found >= expected).all())
    assert relative(found, expected) < 3e-3


def test_tokens_that_cancel_exactly_still_cover_the_rounding() -> None:
    g, x = random_pair((2, 32, 40, 33))
    g[:, 16:], x[:, 16:] = -g[:, :16], x[:, :16]
    assert bool((direct_reference(g, x) < 1e-20).all())
    assert bool((launch_stored_gram(g, x).sqrt() >= 40 * 2**-24 * sizes(g, x)).all())


def test_every_term_of_the_bound_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    unit, splits = 2.0**-7, 5  # so large that each term is seen
    monkeypatch.setattr("fdp_kernels.stored_gram.UNIT", unit)
    monkeypatch.setattr("fdp_kernels.stored_gram.SPLITS", splits)
    g, x = random_pair((2, 45, 40, 33))
    steps = (40 + splits + 1, 33 + splits + 1, 45)
    A, X = (torch.bmm(z, z.mT) for z in (g.double(), x.double()))
    aa, bb = (Z.diagonal(dim1=1, dim2=2).sqrt() for Z in (A, X))
    a, b = (z[:, :, None] * z[:, None, :] for z in (aa, bb))
    square = (A * X + unit * (steps[0] * a * X.abs() + steps[1] * b * A.abs())).sum((1, 2))
    square += unit**2 * steps[0] * steps[1] * sizes(g, x).square()
    expected = (square.sqrt() + steps[2] * unit * sizes(g, x)).square()
    found = launch_stored_gram(g, x)
    assert bool((found >= expected).all())
    assert relative(found, expected) < 5e-3


def test_token_norms_are_rounded_up() -> None:
    g, x = random_pair((3, 21, 700, 33))
    for found, z in zip(launch_token_norms(g, x), (g, x)):
        expected = z.double().norm(dim=-1)
        assert bool((found >= expected).all())
        assert relative(found.double(), expected) < 2e-6


@pytest.mark.parametrize("tokens", [1, 16, 17, 257])
def test_the_reduction_is_the_sum_over_all_pairs_of_tokens(tokens: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    A, X = (torch.randn(3, tokens, tokens, generator=draw) for _ in range(2))
    a, b = (torch.rand(3, tokens, generator=draw) for _ in range(2))
    parts = launch_reduce(A, X, a, b, 0.5, 0.25)
    lost = 0.5 * a[:, :, None] * a[:, None] * X.abs() + 0.25 * b[:, :, None] * b[:, None] * A.abs()
    expected = (A.double() * X.double() + lost.double()).sum((1, 2))
    assert parts.dtype == torch.float64
    torch.testing.assert_close(parts.sum(1), expected, rtol=1e-5, atol=1e-5)
    exact = launch_reduce(A, X, a, b, 0.0, 0.0).sum(1)
    torch.testing.assert_close(exact, (A.double() * X.double()).sum((1, 2)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("tokens", "parts"), [(1, 1), (1023, 5), (1500, 1030)])
def test_the_bound_covers_all_parts_and_tokens(tokens: int, parts: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    partial = torch.rand(3, parts, generator=draw, dtype=torch.float64) - 0.3
    partial[1] = -1.0  # rounding left less than nothing of the square
    a, b = (torch.rand(3, tokens, generator=draw) for _ in range(2))
    length = (a.double() * b.double()).sum(1)
    square = partial.sum(1).clamp_min(0) + 0.5 * length.square()
    expected = (square.sqrt() + 0.25 * length).square()
    torch.testing.assert_close(launch_finish(partial, a, b, 0.5, 0.25), expected, rtol=1e-12, atol=0)
    partial[2, -1] = torch.nan
    found = launch_finish(partial, a, b, 0.5, 0.25)
    assert found[2].isnan()
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about what is tested here
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("side", [0, 1])
def test_a_nonfinite_sample_shows_in_its_own_norm_only(bad: float, side: int) -> None:
    pair = random_pair((3, 17, 20, 9))
    worse = [z.clone() for z in pair]
    worse[side][1, 16] = bad  # the token beside the next sample's first
    good, found = launch_stored_gram(*pair), launch_stored_gram(*worse)
    assert not found[1].isfinite()
    assert torch.equal(found[[0, 2]], good[[0, 2]])


def test_odd_strides_float64_and_empty_inputs() -> None:
    g, x = random_pair((3, 20, 24, 17))
    odd = g.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(launch_stored_gram(odd, x), launch_stored_gram(g, x))
    assert torch.equal(launch_stored_gram(g.double(), x.double()), ghost_reference(g.double(), x.double()))
    assert launch_stored_gram(torch.zeros(0, 5, 4), torch.zeros(0, 5, 3)).shape == (0,)


def test_result_agrees_with_ghost_and_repeats() -> None:
    g, x = cancelling_pair((2, 70, 40, 33))
    assert torch.equal(launch_stored_gram(g, x), launch_stored_gram(g, x))
    ours, theirs = launch_stored_gram(g, x), launch_ghost(g, x)
    assert bool((ours.sqrt() - theirs.sqrt()).abs().le(1e-3 * sizes(g, x)).all())
    a, b = launch_token_norms(g, x)
    assert a.shape == b.shape == (2, 70)


def test_the_op() -> None:
    g, x = random_pair((2, 5, 4, 3))
    torch.library.opcheck(stored_gram.default, (g, x))
    assert torch.equal(stored_gram(g, x), ghost_reference(g, x))
    with pytest.raises(ValueError, match="expected g"):
        stored_gram(g, x[:, :4])


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", LARGE)
def test_gpu_result_is_never_below_what_weighted_adds(
    shape: tuple[int, ...], pair: Callable, dtype: torch.dtype
) -> None:
    g, x = pair(shape, "cuda", dtype)
    found, expected = stored_gram(g, x), direct_reference(g, x)
    assert bool((found >= expected).all())
    assert bool((found >= direct(g, x) * (1 - 2.0**-14)).all())
    for b in range(shape[0]):
        one_hot = torch.zeros(shape[0], device="cuda")
        one_hot[b] = 1
        assert found[b] >= weighted(g, x, one_hot).double().square().sum()
    if pair is random_pair:
        assert relative(found, expected) < 0.05


@pytest.mark.gpu
def test_gpu_repeats_bitwise_and_in_a_graph() -> None:
    g, x = random_pair((3, 1000, 1280, 770), "cuda", BF16)
    runs: list[Callable[[], Any]] = [lambda: stored_gram(g, x)]
    eager = [run() for run in runs]
    assert all(torch.equal(run(), first) for run, first in zip(runs, eager))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run() for run in runs]
    for _ in range(2):
        for out in captured:
            out.zero_()
        graph.replay()
        assert all(map(torch.equal, captured, eager))
