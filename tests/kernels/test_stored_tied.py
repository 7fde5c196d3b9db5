"""Tests of the norm of a stored head and its embedding: that of what the sum adds, cross term and bound included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fdp_kernels.embedding import add_embedding_sum_reference_
from fdp_kernels.keep import squared_norms, weighted_sum_reference
from fdp_kernels.keep_int8 import foreach_sum_int8_reference, round_to_int8, widen_int8
from fdp_kernels.tied import launch_stored_tied_norms, stored_tied_norms, stored_tied_norms_reference

from tests.kernels.linear_pairs import (
    _set_up,  # noqa: F401  an autouse fixture
    relative,
)

SHAPES = [(1, 1, 5, 7), (3, 63, 40, 33), (2, 130, 9, 300)]
DTYPES = [torch.float32, torch.bfloat16]
WAYS = [launch_stored_tied_norms, stored_tied_norms_reference]


def uses(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return stored gradients of a head (B, P, D), and ids (B, S) and rows (B, S, D) of an embedding."""
    (batch, tokens, p, d), draw = shape, torch.Generator().manual_seed(5)
    H = torch.randn(batch, p, d, generator=draw).to(dtype)
    return (
        H,
        torch.randint(0, p, (batch, tokens), generator=draw),
        torch.randn(batch, tokens, d, generator=draw).to(dtype),
    )


def gradients(H: Tensor, ids: Tensor, e: Tensor) -> Tensor:
    """Return every sample's full gradient in float64."""
    return H.double() + torch.bmm(torch.nn.functional.one_hot(ids, H.shape[1]).double().mT, e.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_result_is_that_of_what_the_sum_adds(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    H, ids, e = uses(shape, dtype)
    exact = gradients(H, ids, e).square().sum((1, 2))
    for norms in WAYS:
        found = norms(H, squared_norms(H), ids, e)
        assert found.dtype == torch.float64
        assert bool((found >= exact * (1 - 1e-12)).all())
        assert relative(found, exact) < 1e-9
        for b, one_hot in enumerate(torch.eye(shape[0])):
            added = weighted_sum_reference(H, one_hot, torch.float32)
            add_embedding_sum_reference_(added, ids, e, one_hot)
            assert found[b] >= added.double().square().sum() * (1 - 2.0**-23)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
@pytest.mark.parametrize(
    "shape", [(1, 1, 5, 16), (3, 63, 40, 144), pytest.param((2, 130, 9, 304), marks=pytest.mark.long)]
)
def test_a_head_in_8_bits_is_measured_as_what_the_sum_adds(
    shape: tuple[int, ...], size: float, dtype: torch.dtype
) -> None:
    H, ids, e = uses(shape, dtype)
    scales = torch.linspace(0.1, 8.0, shape[3])  # so that blocks of columns have other exponents
    q, exponents, squares = round_to_int8(size * scales * H.float())
    e = (size * scales * e.float()).to(dtype)
    exact = gradients(widen_int8(q, exponents), ids, e).square().sum((1, 2))
    for norms in WAYS:
        found = norms(q, squares, ids, e, exponents)
        assert bool((found >= exact * (1 - 1e-12)).all())
        assert relative(found / size**2, exact / size**2) < 1e-9
        for b, one_hot in enumerate(torch.eye(shape[0])):
            (added,) = foreach_sum_int8_reference([q], [exponents], [one_hot], shape[0])
            add_embedding_sum_reference_(added[0], ids, e, one_hot)
            assert found[b] >= added.double().square().sum() * (1 - 2.0**-23)


def test_the_largest_numbers_of_a_head_in_8_bits_have_a_finite_norm() -> None:
    H, ids, e = uses((2, 9, 4, 16))
    H[0, 2] = 3.4e38
    q, exponents, squares = round_to_int8(H)
    exact = gradients(widen_int8(q, exponents, torch.float64), ids, e).square().sum((1, 2))
    for norms in WAYS:
        assert relative(norms(q, squares, ids, e, exponents), exact) < 1e-9


def test_parts_that_cancel_leave_half_of_their_squares() -> None:
    H, _, _ = uses((1, 6, 6, 8))
    ids = torch.arange(6).unsqueeze(0)
    square = H.double().square().sum()
    for norms in WAYS:
        assert float(norms(H, squared_norms(H), ids, -H)) == pytest.approx(float(square), rel=1e-6)


def test_the_rounding_of_the_products_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of one word that cancel: their products with the head do too, but for rounding."""
    H, ids, e = uses((1, 40, 6, 8))
    ids = torch.zeros_like(ids)
    e[:, 20:] = -e[:, :20]
    lengths = H.double()[:, 0].norm(dim=-1) * e.double().norm(dim=-1).sum(1)
    plain = [norms(H, squared_norms(H), ids, e) for norms in WAYS]
    eps = torch.finfo(torch.float64).eps
    monkeypatch.setattr("fdp_kernels.tied.torch.finfo", lambda _: type("Info", (), {"eps": 1.0}))
    for norms, before in zip(WAYS, plain):
        more = norms(H, squared_norms(H), ids, e) - before
        assert float(more) == pytest.approx(float(2 * (40 + 8) * (1 - eps) * lengths), rel=1e-9)


def test_words_of_another_rank_have_no_cross_term() -> None:
    H, ids, e = uses((2, 9, 12, 5))
    here = ids < 7
    only = torch.where(here[:, :, None], e, 0.0)
    cross = (gradients(H, torch.where(here, ids, 0), only) - H.double()) * H.double()
    rows = launch_stored_tied_norms(torch.zeros_like(H[:, :7]), torch.zeros(2).double(), ids, e)
    expected = squared_norms(H[:, :7]) + rows + 2 * cross[:, :7].sum((1, 2))
    for norms in WAYS:
        found = norms(H[:, :7].contiguous(), squared_norms(H[:, :7]), ids, e)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_has_no_finite_norm_and_spoils_no_other(bad: float) -> None:
    for part in range(2):
        H, ids, e = uses((3, 20, 12, 9))
        (H, e)[part][1, 3, 2] = bad
        for norms in WAYS:
            found = norms(H, squared_norms(H), ids, e)
            assert not bool(torch.isfinite(found[1]))
            assert bool(torch.isfinite(found[[0, 2]]).all())


def test_the_op_checks_shapes_and_dtypes() -> None:
    H, ids, e = uses((2, 5, 6, 7))
    squares = squared_norms(H)
    for bad in ((H, squares[:1], ids, e), (H, squares, ids[:, :3], e), (H, squares, ids, e.double())):
        with pytest.raises(ValueError, match="stored_tied_norms: expected H"):
            stored_tied_norms(*bad)
    torch.library.opcheck(stored_tied_norms, (H, squares, ids, e))
    q, exponents, squares = round_to_int8(uses((2, 5, 6, 144))[0])
    _, ids, e = uses((2, 5, 6, 144))
    for bad in ((q, squares, ids, e, exponents[..., :1]), (q.short(), squares, ids, e, exponents)):
        with pytest.raises(ValueError, match="stored_tied_norms: expected H in int8"):
            stored_tied_norms(*bad)
    torch.library.opcheck(stored_tied_norms, (q, squares, ids, e, exponents))
