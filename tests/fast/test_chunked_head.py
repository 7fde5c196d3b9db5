"""The fused head against autograd of the plain one, for every chunk size; samples do not mix."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from fdp_kernels.keep_int8 import widen_int8
from torch import Tensor

from fdp.fast import chunked_head
from fdp.fast.chunked_head import (
    chunks,
    fused_head_norms,
    fused_head_plain,
    fused_head_rounded,
    fused_head_stored,
    fused_head_weighted,
)
from tests.conftest import randn

SHAPES = [(3, 5, 7, 4), (1, 1, 3, 2), (4, 13, 101, 6)]
ROWS = [1, 2, 5, 13, 30, 1000]


class Problem(NamedTuple):
    h: Tensor
    w: Tensor
    targets: Tensor
    losses: Tensor
    dh: Tensor
    G: Tensor

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.h, self.w, self.targets


def plain_losses(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(h, w)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def problem(batch: int, tokens: int, vocab: int, width: int, dtype: torch.dtype = torch.float64) -> Problem:
    """With a first target that is ignored, and every sample's gradients by autograd in float64."""
    h, w = randn(batch, tokens, width).to(dtype), randn(vocab, width, seed=2).to(dtype)
    targets = torch.randint(0, vocab, (batch, tokens), generator=torch.Generator().manual_seed(3))
    targets[0, 0] = -100
    losses, dh, G = [], [], []
    for b in range(batch):
        leaves = h[b : b + 1].double().requires_grad_(), w.double().requires_grad_()
        (loss,) = plain_losses(*leaves, targets[b : b + 1])
        d, g = torch.autograd.grad(loss, leaves)
        losses.append(loss.detach())
        dh.append(d[0])
        G.append(g)
    return Problem(h, w, targets, torch.stack(losses), torch.stack(dh), torch.stack(G))


def limit(p: Problem, rows: int) -> int:
    return rows * len(p.w) * p.h.element_size()


@pytest.mark.parametrize(("most", "tokens"), [(40, 20), (20, 13), (4, 4)])  # half, one sample, no more than the most
def test_stored_gradients_leave_half_of_the_memory_for_logits(
    monkeypatch: pytest.MonkeyPatch, most: int, tokens: int
) -> None:
    p, limits = problem(4, 13, 101, 6), []
    inner = chunked_head._logit_gradients

    def watched(*args: Any) -> Any:
        limits.append(args[5])
        return inner(*args)

    monkeypatch.setattr(chunked_head, "MAX_LOGIT_BYTES", limit(p, most))
    monkeypatch.setattr(chunked_head, "_logit_gradients", watched)
    _, _, kept = fused_head_stored(*p.given)
    assert limits == [limit(p, tokens)]
    torch.testing.assert_close(kept, p.G)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_forms_equal_autograd(shape: tuple[int, int, int, int], rows: int) -> None:
    p = problem(*shape)
    start = torch.linspace(0, 2, len(p.h), dtype=torch.float64)
    weighted = torch.einsum("b,bvd->vd", start, p.G)
    losses, dh, total = fused_head_plain(*p.given, start, limit=limit(p, rows))
    torch.testing.assert_close((losses, dh, total), (p.losses, start[:, None, None] * p.dh, weighted))
    losses, dh, kept = fused_head_stored(*p.given, limit=limit(p, rows))
    torch.testing.assert_close((losses, dh, kept), (p.losses, p.dh, p.G))
    losses, dh, squared = fused_head_norms(*p.given, limit=limit(p, rows))
    torch.testing.assert_close((losses, dh, squared), (p.losses, p.dh, p.G.square().sum((1, 2))))
    torch.testing.assert_close(fused_head_weighted(*p.given, start, limit=limit(p, rows)), weighted)


@pytest.mark.parametrize("rows", [1, 26, 1000])
def test_gradients_in_8_bits_are_those_of_every_sample_rounded(rows: int) -> None:
    p = problem(4, 13, 101, 144)
    losses, dh, q, e, parts = fused_head_rounded(*p.given, limit=limit(p, rows))
    torch.testing.assert_close((losses, dh), (p.losses, p.dh))
    G = widen_int8(q, e).double()
    assert float((G - p.G).norm() / p.G.norm()) < 0.012
    torch.testing.assert_close(parts.sum(1), G.square().sum((1, 2)), rtol=1e-14, atol=0.0)
    one = fused_head_rounded(p.h[2:3], p.w, p.targets[2:3])
    assert torch.equal(one[2], q[2:3])
    assert torch.equal(one[3], e[2:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [4, 1000])
def test_narrow_dtypes(dtype: torch.dtype, rows: int) -> None:
    p = problem(3, 9, 51, 8, dtype)
    close: dict[str, Any] = {"rtol": 0.05, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    losses, dh, kept = fused_head_stored(*p.given, limit=limit(p, rows))
    assert (losses.dtype, dh.dtype, kept.dtype) == (torch.float32, dtype, dtype)
    torch.testing.assert_close((losses.double(), dh.double(), kept.double()), (p.losses, p.dh, p.G), **close)
    total = fused_head_plain(*p.given, torch.ones(3), limit=limit(p, rows))[2]
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), p.G.sum(0), **close)
    squared = fused_head_norms(*p.given, limit=limit(p, rows))[2]
    assert squared.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [4, 9, 1000])
def test_the_norm_is_that_of_what_is_scaled_and_added(dtype: torch.dtype, rows: int) -> None:
    p = problem(3, 9, 51, 8, dtype)
    squared = fused_head_norms(*p.given, limit=limit(p, rows))[2]
    for b, unit in enumerate(torch.eye(3)):
        alone = fused_head_weighted(*p.given, unit, limit=limit(p, rows))
        torch.testing.assert_close(alone.double().square().sum(), squared[b], rtol=1e-14, atol=0)


def test_squares_of_kept_gradients_are_the_norms() -> None:
    p = problem(4, 13, 101, 6)
    kept, squared = (f(*p.given, limit=limit(p, 6))[2] for f in (fused_head_stored, fused_head_norms))
    torch.testing.assert_close(kept.square().sum((1, 2)), squared, rtol=1e-13, atol=0)


@pytest.mark.parametrize("rows", [4, 30, 1000])
def test_a_sample_that_is_not_a_number_stays_alone(rows: int) -> None:
    clean = problem(3, 9, 51, 8)
    h = clean.h.clone()
    h[1, 4] = torch.nan
    for head in (fused_head_stored, fused_head_norms):
        bad = head(h, clean.w, clean.targets, limit=limit(clean, rows))
        good = head(*clean.given, limit=limit(clean, rows))
        for a, b in zip(bad, good):
            assert torch.equal(a[[0, 2]], b[[0, 2]])
            assert a[1].isnan().any()
    losses, dh, _ = fused_head_plain(h, clean.w, clean.targets, torch.ones(3), limit=limit(clean, rows))
    assert losses.isnan().tolist() == [False, True, False]
    assert dh.isnan().any(2).any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("factor", [0.0, torch.nan, -1.0])
@pytest.mark.parametrize("rows", [4, 1000])
def test_a_factor_that_is_not_above_zero_adds_exactly_zero(factor: float, rows: int) -> None:
    p = problem(3, 9, 51, 8)
    h = p.h.clone()
    h[1] = torch.inf
    factors = torch.tensor([0.5, factor, 1.0], dtype=torch.float64)
    total = fused_head_weighted(h, p.w, p.targets, factors, limit=limit(p, rows))
    without = fused_head_weighted(p.h[[0, 2]], p.w, p.targets[[0, 2]], factors[[0, 2]], limit=limit(p, min(rows, 9)))
    torch.testing.assert_close(total, without, rtol=1e-13, atol=1e-16)


def test_ignored_targets_leave_the_divisor() -> None:
    p = problem(2, 6, 11, 4)
    targets = torch.full_like(p.targets, -100)
    targets[0, 3] = 5
    losses, dh, kept = fused_head_stored(p.h, p.w, targets)
    torch.testing.assert_close(losses, plain_losses(p.h, p.w, targets))
    assert losses[1] == 0
    assert not kept[1].any()
    assert not dh[1].any()


def test_inputs_stay_as_they_are_and_may_be_views() -> None:
    p = problem(2, 6, 11, 4)
    h = torch.stack([p.h, -p.h], 1)[:, 0].transpose(0, 1).contiguous().transpose(0, 1)
    tokens = torch.cat([p.targets[:, :1], p.targets], 1)
    before = h.clone(), p.w.clone(), tokens.clone()
    result = fused_head_stored(h, p.w.clone().requires_grad_(), tokens[:, 1:])
    torch.testing.assert_close(result, (p.losses, p.dh, p.G))
    assert all(map(torch.equal, before, (h, p.w, tokens)))
    assert not any(x.requires_grad for x in result)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (4, 13), (5, 2048), (3, 1000)])
@pytest.mark.parametrize("most", [1, 2, 13, 700, 2671, 100000])
def test_chunks_cover_every_token_once(batch: int, tokens: int, most: int) -> None:
    seen = torch.zeros(batch, tokens, dtype=torch.int64)
    parts = chunks(batch, tokens, most)
    for chunk in parts:
        assert chunk.samples * chunk.tokens <= min(most, parts[0].samples * parts[0].tokens)
        assert chunk.samples == 1 or chunk.tokens == tokens
        seen[chunk.sample : chunk.sample + chunk.samples, chunk.first : chunk.first + chunk.tokens] += 1
    assert (seen == 1).all()
    assert parts == sorted(parts, key=lambda chunk: (chunk.sample, chunk.first))


def test_one_graph() -> None:
    p = problem(2, 5, 7, 4)

    def head(h: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        squared = fused_head_norms(h, w, targets, limit=limit(p, 3))[2]
        return *fused_head_stored(h, w, targets, limit=limit(p, 3)), squared

    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*p.given), head(*p.given))


# ---------------------------------------------------------------- on a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def large(batch: int, tokens: int, vocab: int = 50257, width: int = 1280) -> tuple[Tensor, Tensor, Tensor]:
    h = torch.randn(batch, tokens, width, device="cuda").bfloat16()
    w = (torch.randn(vocab, width, device="cuda") / width**0.5).bfloat16()
    targets = torch.randint(0, vocab, (batch, tokens), device="cuda")
    targets[0, 0] = -100
    return h, w, targets


def error(got: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(got.float() - expected) / torch.linalg.vector_norm(expected))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(("batch", "tokens"), [(2, 300), (2, 3000)])
def test_bfloat16_on_the_gpu(batch: int, tokens: int) -> None:
    """Against autograd in float32, sample by sample, at an odd vocabulary; one chunk a sample, and two."""
    h, w, targets = large(batch, tokens)
    losses, dh, kept = fused_head_stored(h, w, targets)
    _, dh_norms, squared = fused_head_norms(h, w, targets)
    _, dh_plain, total = fused_head_plain(h, w, targets, torch.ones(batch, device="cuda"))
    weighted = fused_head_weighted(h, w, targets, torch.full((batch,), 0.5, device="cuda"))
    assert torch.equal(dh_norms, dh)
    assert torch.equal(dh_plain, dh)
    sum_of_all = torch.zeros_like(total)
    for b in range(batch):
        leaves = h[b : b + 1].float().requires_grad_(), w.float().requires_grad_()
        (loss,) = plain_losses(*leaves, targets[b : b + 1])
        d, g = torch.autograd.grad(loss, leaves)
        torch.testing.assert_close(losses[b], loss.detach(), rtol=2e-3, atol=0)
        assert error(dh[b], d[0]) < 0.01
        assert error(kept[b], g) < 0.01
        torch.testing.assert_close(squared[b], g.double().square().sum(), rtol=0.01, atol=0)
        sum_of_all += g
    assert error(total, sum_of_all) < 0.01
    assert error(weighted, sum_of_all / 2) < 0.01


@pytest.mark.gpu
@gpu
def test_the_logits_are_never_stored_in_full() -> None:
    h, w, targets = large(4, 4096)
    ones = torch.ones(4, device="cuda")
    whole = 4 * 4096 * 50257 * 2
    matrix = w.numel() * 4
    limit = 256 << 20
    for head, outputs in (
        (lambda: fused_head_plain(h, w, targets, ones, limit=limit), matrix),
        (lambda: fused_head_norms(h, w, targets, limit=limit), matrix),
        (lambda: fused_head_weighted(h, w, targets, ones, limit=limit), 2 * matrix),
        (lambda: fused_head_stored(h, w, targets, limit=limit), 3 * matrix),
    ):
        head()  # workspaces of cuBLAS
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        head()
        grown = torch.cuda.max_memory_allocated() - before
        assert grown < outputs + h.numel() * 2 + w.numel() * 2 + (300 << 20)  # and a padded copy of w
        assert grown < whole


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("tokens", [512, 4096])
def test_graph_replay_equals_eager(tokens: int) -> None:
    h, w, targets = large(2, tokens)
    factors = torch.tensor([0.5, 0.0], device="cuda")

    def all_forms() -> tuple[Tensor, ...]:
        return (
            *fused_head_plain(h, w, targets, factors),
            *fused_head_stored(h, w, targets),
            *fused_head_norms(h, w, targets),
            fused_head_weighted(h, w, targets, factors),
        )

    eager, twice = all_forms(), all_forms()
    assert all(map(torch.equal, eager, twice))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = all_forms()
    graph.replay()
    assert all(map(torch.equal, eager, replayed))
