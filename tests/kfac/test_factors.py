"""Second moments as sums and weights: one matrix in every form, whatever the split."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdp.kfac import factors
from fdp.kfac.types import ColumnsFactor, DenseFactor, DiagonalFactor, SoftmaxFactor
from fdp.types import FdpError

MAKERS = {"dense": factors.dense, "columns": factors.columns, "diagonal": factors.diagonal, "softmax": factors.softmax}


def rows_of(tokens: int, n: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return rows of probabilities, which every form accepts."""
    logits = torch.randn(tokens, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return logits.softmax(-1).to(dtype)


def expected(form: str, rows: torch.Tensor, weight: float) -> torch.Tensor:
    total = sum((torch.outer(row, row) for row in rows.double()), torch.zeros(rows.shape[1], rows.shape[1]).double())
    if form == "diagonal":
        total = total.diag().diag()
    if form == "softmax":
        total = rows.double().sum(0).diag() - total
    return total / weight


@pytest.mark.parametrize("form", MAKERS)
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (1, 5), (0, 5), (2, 0, 5)])
def test_a_factor_stands_for_the_mean_of_outer_products(form, shape):
    rows = rows_of(math.prod(shape[:-1]), shape[-1]).reshape(shape)
    factor = MAKERS[form](rows, weight=3.0)
    torch.testing.assert_close(factors.matrix(factor), expected(form, rows.reshape(-1, 5), 3.0))
    assert factors.size(factor) == 5


@pytest.mark.parametrize("form", MAKERS)
def test_the_trace_and_the_diagonal_need_no_matrix(form):
    factor = MAKERS[form](rows_of(7, 5), weight=3.0)
    m = factors.matrix(factor)
    torch.testing.assert_close(factors.mean_trace(factor), m.trace() / 5)
    torch.testing.assert_close(factors.matrix(factors.diagonal_of(factor)), m.diag().diag())


@settings(deadline=None, max_examples=25)
@given(cuts=st.lists(st.integers(0, 12), max_size=4), form=st.sampled_from(sorted(MAKERS)))
def test_any_split_of_the_batch_adds_up_to_the_whole(cuts, form):
    rows = rows_of(12, 4)
    edges = [0, *sorted(cuts), 12]
    parts = [MAKERS[form](rows[a:b], weight=float(b - a)) for a, b in pairwise(edges)]
    total = parts[0]
    for part in parts[1:]:
        total = factors.add(total, part)
    whole = MAKERS[form](rows, weight=12.0)
    assert type(total) is type(whole)
    torch.testing.assert_close(total.weight, whole.weight)
    torch.testing.assert_close(factors.matrix(total), factors.matrix(whole))


@pytest.mark.parametrize("a", MAKERS)
@pytest.mark.parametrize("b", MAKERS)
def test_forms_can_be_mixed_and_stay_exact(a, b):
    x, y = rows_of(6, 4, seed=1), rows_of(3, 4, seed=2)
    total = factors.add(MAKERS[a](x, weight=6.0), MAKERS[b](y, weight=3.0))
    torch.testing.assert_close(factors.matrix(total), (expected(a, x, 1.0) + expected(b, y, 1.0)) / 9.0)
    cheap = {frozenset({"softmax", "diagonal"}): SoftmaxFactor, frozenset({a}): type(MAKERS[a](x, weight=1.0))}
    assert isinstance(total, cheap.get(frozenset({a, b}), DenseFactor))


@pytest.mark.parametrize("form", MAKERS)
def test_a_moving_average_is_the_weighted_mean_of_all_it_saw(form):
    """It is unbiased from the first step on: sum and weight decay alike, and old tokens have weight rho^age."""
    rho, batches = 0.9, [rows_of(tokens, 4, seed=tokens) for tokens in (5, 9, 3, 1)]
    average = MAKERS[form](batches[0], weight=5.0)
    torch.testing.assert_close(factors.matrix(average), expected(form, batches[0], 5.0))
    for rows in batches[1:]:
        average = factors.add(factors.decay(average, rho), MAKERS[form](rows, weight=float(len(rows))))
    ages = [rho**age for age in (3, 2, 1, 0)]
    by_hand = sum(w * expected(form, rows, 1.0) for w, rows in zip(ages, batches))
    torch.testing.assert_close(factors.matrix(average), by_hand / sum(w * len(r) for w, r in zip(ages, batches)))


@pytest.mark.parametrize("form", MAKERS)
def test_a_decayed_factor_is_the_same_mean_with_less_weight(form):
    factor = MAKERS[form](rows_of(7, 5), weight=3.0)
    less = factors.decay(factor, 0.25)
    torch.testing.assert_close(factors.matrix(less), factors.matrix(factor))
    assert float(less.weight) == 0.75


def test_one_hot_rows_have_their_counts_as_second_moment():
    ids = torch.tensor([[3, 0, 3], [1, 3, 0]])
    rows = torch.nn.functional.one_hot(ids, 5).double()
    factor = factors.one_hot(ids, 5, weight=6.0)
    assert isinstance(factor, DiagonalFactor)
    torch.testing.assert_close(factors.matrix(factor).double(), factors.matrix(factors.dense(rows, weight=6.0)))
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    masked = factors.one_hot(ids, 5, weight=4.0, extra=mask)
    again = factors.dense(rows * mask[..., None], weight=4.0)
    torch.testing.assert_close(factors.matrix(masked).double(), factors.matrix(again))


def test_extra_multiplies_the_matrix_of_each_token():
    p, extra = rows_of(6, 4).reshape(2, 3, 4), torch.tensor([[1.0, 0.0, 2.0], [0.5, 1.0, 0.0]], dtype=torch.float64)
    by_hand = sum(e * (row.diag() - torch.outer(row, row)) for e, row in zip(extra.reshape(-1), p.reshape(-1, 4)))
    torch.testing.assert_close(factors.matrix(factors.softmax(p, weight=3.0, extra=extra)), by_hand / 3.0)
    scalar = factors.matrix(factors.softmax(p, weight=3.0, extra=0.25))
    torch.testing.assert_close(scalar, factors.matrix(factors.softmax(p, weight=12.0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_are_summed_in_float32(dtype):
    rows = rows_of(3000, 4, dtype=dtype)  # as many tokens of one sign: sums in half precision stop growing
    for form, maker in MAKERS.items():
        factor = maker(rows, weight=3000.0)
        assert factor.weight.dtype == torch.float32
        assert factors.matrix(factor).dtype == torch.float32
        torch.testing.assert_close(factors.matrix(factor).double(), expected(form, rows, 3000.0), rtol=1e-5, atol=1e-7)
    columns = factors.columns(rows, weight=3000.0)
    assert columns.columns.dtype == dtype
    decayed = factors.decay(columns, 0.9)
    torch.testing.assert_close(factors.matrix(decayed).double(), expected("columns", rows, 3000.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 100])
def test_padding_rows_to_the_alignment_keeps_the_matrix(n):
    rows = rows_of(5, n)
    wide = factors.pad_to_alignment(rows)
    assert wide.shape[1] % factors.ALIGNMENT_ELEMENTS == 0
    assert wide.shape[1] < n + factors.ALIGNMENT_ELEMENTS
    cut = factors.dense(wide, weight=5.0, size=n)
    assert cut.total.is_contiguous()
    torch.testing.assert_close(factors.matrix(cut), expected("dense", rows, 5.0))


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 8, 23])
@pytest.mark.parametrize("elements", [1, 40, 1 << 26])
def test_sums_of_blocks_are_the_sum_of_all_rows(tokens, elements, monkeypatch):
    """Blocks of four rows, one, two or all of them in a product."""
    monkeypatch.setattr(factors, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(factors, "BLOCK_ELEMENTS", elements)
    rows = rows_of(tokens, 5)
    for same in (rows, rows.mT.contiguous().mT):
        products: list[int] = []

        def product(a: torch.Tensor, b: torch.Tensor, sizes: list[int] = products) -> torch.Tensor:
            sizes.append(a.numel())
            return torch.bmm(a, b)

        torch.testing.assert_close(factors.sum_of_blocks(same, product), rows.mT @ rows)
        assert sum(products) == rows.numel()
        assert max(products) <= max(4 * 5, 4 * elements // 5)


def test_weights_may_be_tensors():
    mask = torch.tensor([1.0, 0.0, 1.0])
    factor = factors.dense(rows_of(3, 4) * mask[:, None], weight=mask.sum())
    torch.testing.assert_close(factors.matrix(factor), expected("dense", rows_of(3, 4)[[0, 2]], 2.0))


def test_factors_are_made_inside_a_compiled_function():
    def build(rows, rho):
        made = [maker(rows, weight=3.0) for maker in MAKERS.values()]
        return [factors.add(factors.decay(a, rho), a) for a in made]

    rows = rows_of(3, 4)
    compiled = torch.compile(build, fullgraph=True, backend="eager")(rows, 0.5)
    for one, other in zip(compiled, build(rows, 0.5)):
        assert type(one) is type(other)
        torch.testing.assert_close(factors.matrix(one), factors.matrix(other))


def test_factors_of_different_sizes_are_refused():
    with pytest.raises(FdpError, match="same size, got 4 and 5"):
        factors.add(factors.dense(rows_of(3, 4), weight=3.0), factors.columns(rows_of(3, 5), weight=3.0))


@pytest.mark.parametrize("rho", [-0.1, 1.1, math.nan])
def test_a_decay_outside_0_and_1_is_refused(rho):
    with pytest.raises(FdpError, match="rho between 0"):
        factors.decay(factors.dense(rows_of(3, 4), weight=3.0), rho)


def bad(factor, **fields):
    return factor._replace(**fields)


DENSE = factors.dense(rows_of(7, 3), weight=7.0)
SOFTMAX = factors.softmax(rows_of(2, 3), weight=2.0)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (bad(DENSE, weight=torch.tensor(0.0)), "finite weight above 0, got 0.0"),
        (bad(DENSE, weight=torch.tensor(-1.0)), "finite weight above 0, got -1.0"),
        (bad(DENSE, weight=torch.tensor(torch.nan)), "finite weight above 0, got nan"),
        (bad(DENSE, total=DENSE.total / 0), "left factor .DenseFactor of size 3.: expected finite.* in total"),
        (bad(SOFTMAX, columns=SOFTMAX.columns * torch.nan), "expected finite numbers.* in columns"),
        (bad(DENSE, total=DENSE.total + torch.ones(3, 3).triu(1)), "expected a symmetric matrix"),
        (bad(DENSE, total=-DENSE.total), "sums of squares on the diagonal"),
        (bad(SOFTMAX, total=-SOFTMAX.total), "sums of squares on the diagonal"),
        (DiagonalFactor(torch.tensor([1.0, -1.0]), torch.tensor(1.0)), "sums of squares on the diagonal, got -1"),
        (ColumnsFactor(torch.full((3, 2), torch.inf), torch.tensor(1.0)), "expected finite numbers"),
    ],
)
def test_factors_that_are_no_sum_of_outer_products_are_refused(factor, words):
    with pytest.raises(factors.CurvatureError, match=words):
        factors.check_factor(factor, "left")


def test_a_covariance_in_half_precision_is_refused():
    with pytest.raises(FdpError, match=r"expected float32 or float64, got torch\.bfloat16"):
        factors.check_factor(bad(DENSE, total=DENSE.total.bfloat16()), "right")


@pytest.mark.parametrize("form", MAKERS)
def test_good_factors_pass(form):
    factors.check_factor(MAKERS[form](rows_of(7, 5, dtype=torch.float32), weight=3.0), "left")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_the_gpu_sums_are_float32_too(dtype):
    rows = rows_of(8192, 257, dtype=dtype).cuda()
    factor = factors.dense(rows, weight=8192.0)
    assert factor.total.dtype == torch.float32
    torch.testing.assert_close(factor.total.double(), rows.double().mT @ rows.double(), rtol=1e-5, atol=1e-6)
