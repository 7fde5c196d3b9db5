"""Tests of embedding norms and sums: kernels against references, on runs within, across and over many chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fdp_kernels import embedding
from fdp_kernels.embedding import (
    add_embedding_sum_,
    add_embedding_sum_reference_,
    embedding_norms,
    embedding_norms_reference,
    embedding_sum,
    embedding_sum_reference,
    launch_add_embedding_sum_,
    launch_embedding_norms,
    launch_embedding_sum,
)

from tests.conftest import randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_ids(batch: int, tokens: int, vocab: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (batch, tokens), generator=draw).to(DEVICE)


def make_rows(batch: int, tokens: int, width: int) -> Tensor:
    return randn(batch, tokens, width).float().to(DEVICE)


@pytest.fixture
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten chunks, so that few tokens fill many."""
    monkeypatch.setattr(embedding, "CHUNK", 4)
    monkeypatch.setattr(embedding, "HEADS", 2)
    monkeypatch.setattr(embedding, "COLUMNS", 8)


SHAPES = [
    (1, 1, 3, 5),
    (3, 21, 5, 3),  # runs over several chunks
    (2, 33, 5, 1),  # all ids equal: one run over all chunks
    (2, 15, 9, 8),  # two programs across the columns
    (2, 12, 4, 1000),  # all distinct, whole chunks
]


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize(("batch", "tokens", "width", "vocab"), SHAPES)
def test_kernels_equal_references(batch: int, tokens: int, width: int, vocab: int) -> None:
    ids, g = make_ids(batch, tokens, vocab), make_rows(batch, tokens, width)
    factors = torch.linspace(0, 1, batch).to(DEVICE)
    norms, total = launch_embedding_norms(ids, g), launch_embedding_sum(ids, g, factors, vocab)
    assert (norms.dtype, total.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(norms, embedding_norms_reference(ids, g), rtol=1e-13, atol=0)
    torch.testing.assert_close(total, embedding_sum_reference(ids, g, factors, vocab), rtol=1e-6, atol=1e-12)


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize(("batch", "tokens", "width", "vocab"), SHAPES)
def test_a_sum_is_added_to_what_is_there_and_rounded_once(batch: int, tokens: int, width: int, vocab: int) -> None:
    ids, g = make_ids(batch, tokens, vocab), make_rows(batch, tokens, width)
    factors, before = torch.linspace(1, 0, batch).to(DEVICE), 1e3 * make_rows(1, vocab, width)[0]
    exact = before.double()
    add_embedding_sum_reference_(exact, ids, g, factors)
    for add_ in (launch_add_embedding_sum_, add_embedding_sum_reference_):
        onto = before.clone()
        add_(onto, ids, g, factors)
        assert bool(((onto - exact).abs() <= 1.0001 * 2.0**-24 * exact.abs()).all())
        untouched = torch.isin(torch.arange(vocab, device=DEVICE), ids, invert=True)
        assert torch.equal(onto[untouched], before[untouched])


@pytest.mark.usefixtures("_short_chunks")
def test_rows_of_a_sample_with_factor_0_and_unknown_ids_leave_what_is_there() -> None:
    ids, g = make_ids(2, 9, 3), make_rows(2, 9, 4)
    g[1], ids[0, 0] = torch.nan, 7
    onto, factors = make_rows(1, 3, 4)[0], torch.tensor([1.0, 0.0], device=DEVICE)
    expected = onto.clone()
    add_embedding_sum_reference_(expected, ids[:1, 1:], g[:1, 1:], factors[:1])
    launch_add_embedding_sum_(onto, ids, g, factors)
    torch.testing.assert_close(onto, expected)


@pytest.mark.parametrize("onto", [torch.zeros(4, 3).mT, torch.zeros(3, 5), torch.zeros(3, 4, dtype=torch.float64)])
def test_a_kernel_refuses_what_it_cannot_add_to(onto: Tensor) -> None:
    ids, g, factors = make_ids(2, 9, 3), make_rows(2, 9, 4), torch.ones(2, device=DEVICE)
    with pytest.raises(ValueError, match="expected a dense float32 matrix of 4 columns"):
        launch_add_embedding_sum_(onto.to(DEVICE), ids, g, factors)


@pytest.mark.usefixtures("_short_chunks")
def test_kernels_repeat_bitwise() -> None:
    ids, g, factors = make_ids(2, 9, 3), make_rows(2, 9, 5), torch.tensor([0.3, 0.7], device=DEVICE)
    assert torch.equal(launch_embedding_norms(ids, g), launch_embedding_norms(ids, g))
    assert torch.equal(launch_embedding_sum(ids, g, factors, 3), launch_embedding_sum(ids, g, factors, 3))


def test_kernels_with_default_chunks() -> None:
    ids, g = make_ids(1, 70, 3), make_rows(1, 70, 300)
    factors = torch.tensor([0.5], device=DEVICE)
    torch.testing.assert_close(launch_embedding_norms(ids, g), embedding_norms_reference(ids, g), rtol=1e-13, atol=0)
    torch.testing.assert_close(
        launch_embedding_sum(ids, g, factors, 9), embedding_sum_reference(ids, g, factors, 9), rtol=1e-6, atol=1e-12
    )


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize("vocab", [1, 3])
def test_norms_of_rows_that_cancel(vocab: int) -> None:
    ids, g = make_ids(2, 18, vocab), 1e4 + make_rows(2, 18, 6)
    for b in range(2):
        for v in range(vocab):
            mine = (ids[b] == v).nonzero().flatten()
            g[b, mine[-1]] -= g[b, mine].double().sum(0).float()
    torch.testing.assert_close(launch_embedding_norms(ids, g), embedding_norms_reference(ids, g), rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("_short_chunks")
def test_norms_of_tiny_rows_do_not_vanish() -> None:
    ids, g = make_ids(1, 9, 2), 1e-30 * make_rows(1, 9, 6)
    assert float(launch_embedding_norms(ids, g)) > 0


@pytest.mark.usefixtures("_short_chunks")
def test_a_nan_sample_shows_in_its_own_norm_only() -> None:
    ids, g = make_ids(3, 13, 4), make_rows(3, 13, 5)
    clean, factors = g.clone(), torch.tensor([0.5, 0.0, 1.0], device=DEVICE)
    g[1, 7:9] = torch.nan
    clean[1] = 0
    norms = launch_embedding_norms(ids, g)
    assert norms.isnan().tolist() == [False, True, False]
    assert torch.equal(norms[[0, 2]], launch_embedding_norms(ids, clean)[[0, 2]])
    for total in (launch_embedding_sum, embedding_sum_reference):
        assert torch.equal(total(ids, g, factors, 4), total(ids, clean, factors, 4))


@pytest.mark.usefixtures("_short_chunks")
def test_rows_need_not_be_dense() -> None:
    ids, wide = make_ids(2, 7, 3), make_rows(7, 2, 14)
    g, spread = wide.transpose(0, 1), wide.transpose(0, 1)[..., ::2]
    factors = torch.tensor([0.3, 0.6], device=DEVICE)
    for rows in (g, spread, g[:, :1].expand(2, 7, 14)):
        torch.testing.assert_close(launch_embedding_norms(ids, rows), embedding_norms_reference(ids, rows))
        torch.testing.assert_close(
            launch_embedding_sum(ids, rows, factors, 3), embedding_sum_reference(ids, rows, factors, 3)
        )


def test_ids_that_never_occur_have_zero_rows() -> None:
    ids = torch.tensor([[1, 3, 3]], device=DEVICE)
    total = launch_embedding_sum(ids, make_rows(1, 3, 4), torch.ones(1, device=DEVICE), 6)
    assert (total != 0).any(1).tolist() == [False, True, False, True, False, False]


def test_ops() -> None:
    ids, g, factors = make_ids(2, 9, 5), make_rows(2, 9, 3), torch.rand(2).to(DEVICE)
    torch.library.opcheck(embedding_norms, (ids, g))
    torch.library.opcheck(embedding_sum, (ids, g, factors, 5))
    torch.library.opcheck(add_embedding_sum_, (torch.zeros(5, 3, device=DEVICE), ids, g, factors))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("batch", "tokens", "width", "vocab"), [(4, 512, 1280, 50257), (4, 2000, 1280, 1), (3, 8192, 1600, 300)]
)
def test_bfloat16_on_the_gpu(batch: int, tokens: int, width: int, vocab: int) -> None:
    ids, g = make_ids(batch, tokens, vocab), torch.randn(batch, tokens, width, device=DEVICE).bfloat16()
    factors = torch.rand(batch, device=DEVICE)
    factors[0] = 0
    norms, total = embedding_norms(ids, g), embedding_sum(ids, g, factors, vocab)
    torch.testing.assert_close(norms, embedding_norms_reference(ids, g), rtol=1e-12, atol=0)
    torch.testing.assert_close(total, embedding_sum_reference(ids, g, factors, vocab), rtol=1e-6, atol=1e-9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = embedding_norms(ids, g), embedding_sum(ids, g, factors, vocab)
    graph.replay()
    assert torch.equal(again[0], norms)
    assert torch.equal(again[1], total)
    assert torch.equal(embedding_sum(ids, g, factors, vocab), total)
