"""Tests of sums over tokens: kernels against references; the norm is that of the stored numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fdp_kernels import token_sums as module
from fdp_kernels.token_sums import (
    foreach_token_sums,
    foreach_token_sums_reference,
    launch_foreach_token_sums,
    launch_token_product_sums,
    launch_token_sums,
    split_token_sums,
    token_product_sums,
    token_product_sums_reference,
    token_sums,
    token_sums_reference,
)

from tests.conftest import randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows(*shape: int, seed: int = 1) -> Tensor:
    return randn(*shape, seed=seed).float().to(DEVICE)


def check(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], size: Tensor) -> None:
    """Compare with ``expected`` in float64, up to the rounding of float32 sums of 64 terms, at most ``size``."""
    sums, squares = got
    assert (sums.dtype, squares.dtype) == (torch.float32, torch.float64)
    assert squares.shape == expected[1].shape == (len(sums), -(-sums.shape[1] // module.COLUMNS))
    assert ((sums.double() - expected[0]).abs() <= 64 * 2**-24 * size).all()
    for part, columns in zip(squares.T, sums.double().split(module.COLUMNS, dim=1), strict=True):
        torch.testing.assert_close(part, columns.square().sum(1), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("batch", "tokens", "width"), [(1, 1, 3), (3, 63, 130), (2, 100, 515), (1, 300, 257)])
@pytest.mark.parametrize("programs", [1, 640])
def test_kernels_equal_references(
    batch: int, tokens: int, width: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROGRAMS", programs)
    g, h = rows(batch, tokens, width), rows(batch, tokens, width, seed=2)
    first = launch_token_sums(g)
    check(first, token_sums_reference(g.double()), g.abs().sum(1))
    second = launch_token_product_sums(g, h)
    check(second, token_product_sums_reference(g.double(), h.double()), (g * h).abs().sum(1))
    assert all(map(torch.equal, launch_token_sums(g), first))
    assert all(map(torch.equal, launch_token_product_sums(g, h), second))


@pytest.mark.parametrize("programs", [1, 640])
def test_chunks_that_cancel(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large sums cancel around a small one that float32 would lose: within a program, and between programs."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    g = rows(1, 192, 5)
    g[:, :64] = 2.0**20
    g[:, 128:] = -(2.0**20)
    torch.testing.assert_close(launch_token_sums(g)[0], g[:, 64:128].double().sum(1).float(), rtol=0, atol=1e-4)


def test_a_nan_sample_shows_in_its_own_row_only() -> None:
    g = rows(3, 70, 9)
    g[1, 3, 4] = torch.nan
    sums, squares = launch_token_sums(g)
    assert squares.sum(1).isnan().tolist() == [False, True, False]
    assert torch.equal(sums[2], launch_token_sums(g[2:])[0][0])


def test_norms_of_tiny_sums_do_not_vanish() -> None:
    assert float(launch_token_sums(1e-30 * rows(1, 3, 4))[1]) > 0


def test_rows_need_not_be_dense() -> None:
    g, h = rows(20, 2, 14).transpose(0, 1), rows(2, 1, 14, seed=2).expand(2, 20, 14)
    for a, b in ((g, h), (g[..., ::2], h[..., ::2])):
        check(launch_token_product_sums(a, b), token_product_sums_reference(a.double(), b.double()), a.abs().sum(1) * 3)


@pytest.mark.parametrize("widths", [[5], [130, 3], [128, 257, 1], [3, 140, 128, 9], [7, 200, 1, 130, 64, 2]])
def test_foreach_sums_equal_single_sums(widths: list[int]) -> None:
    gs = [rows(2, 150, width, seed=i) for i, width in enumerate(widths)]
    gs[0] = gs[0].transpose(0, 1).contiguous().transpose(0, 1)
    found = launch_foreach_token_sums(gs)
    assert torch.equal(found, launch_foreach_token_sums(gs))
    for sums, g in zip(split_token_sums(found, gs), gs, strict=True):
        assert sums.is_contiguous()
        assert ((sums.double() - g.double().sum(1)).abs() <= 64 * 2**-24 * g.abs().sum(1)).all()
    torch.testing.assert_close(foreach_token_sums_reference(gs), found, rtol=1e-5, atol=1e-4)


def test_foreach_sums_of_unequal_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="differ only in width"):
        foreach_token_sums([rows(2, 5, 3), rows(2, 6, 3)])


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_sums_of_nothing_are_zero(shape: tuple[int, ...]) -> None:
    g = torch.zeros(shape)
    for sums, squares in (launch_token_sums(g), launch_token_product_sums(g, g)):
        assert torch.equal(sums, torch.zeros(shape[0], shape[2]))
        assert torch.equal(squares, torch.zeros(shape[0], min(shape[2], 1), dtype=torch.float64))
    assert torch.equal(launch_foreach_token_sums([g, g]), torch.zeros(2 * shape[0] * shape[2]))


def test_references_keep_float64() -> None:
    g = randn(2, 5, 3)
    assert torch.equal(launch_token_sums(g)[0], g.sum(1))


def test_ops() -> None:
    g, h = rows(2, 5, 3), rows(2, 5, 3, seed=2)
    torch.library.opcheck(token_sums, (g,))
    torch.library.opcheck(token_product_sums, (g, h))
    torch.library.opcheck(foreach_token_sums, ([g, h],))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("batch", "tokens", "width"), [(4, 512, 1280), (4, 8192, 5120), (3, 2000, 1601), (32, 511, 768)]
)
def test_bfloat16_on_the_gpu(batch: int, tokens: int, width: int) -> None:
    g, h = (torch.randn(batch, tokens, width, device=DEVICE).bfloat16() for _ in range(2))
    first, second = token_sums(g), token_product_sums(g, h)
    check(first, token_sums_reference(g.double()), g.float().abs().sum(1))
    check(second, token_product_sums_reference(g.double(), h.double()), (g.float() * h.float()).abs().sum(1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = token_sums(g), token_product_sums(g, h)
    graph.replay()
    assert all(map(torch.equal, again[0], first))
    assert all(map(torch.equal, again[1], second))
    assert all(map(torch.equal, token_sums(g), first))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_foreach_sums_on_the_gpu() -> None:
    widths = [3840, 1280, 5120, 1280, 1601]
    gs = [torch.randn(4, 1000, width, device=DEVICE).bfloat16() for width in widths]
    found = foreach_token_sums(gs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = foreach_token_sums(gs)
    graph.replay()
    assert torch.equal(again, found)
    for sums, g in zip(split_token_sums(found, gs), gs, strict=True):
        assert ((sums.double() - g.double().sum(1)).abs() <= 64 * 2**-24 * g.float().abs().sum(1)).all()
