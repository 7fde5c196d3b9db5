"""Tests of the norm of tied weights: never below what the sum adds, barely above, and every term of the bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fdp_kernels.embedding import add_embedding_sum_reference_
from fdp_kernels.tied import launch_cross, launch_tied_norms, tied_norms, tied_norms_reference
from fdp_kernels.weighted import launch_weighted

from tests.kernels.linear_pairs import (
    PAIRS,
    _set_up,  # noqa: F401  an autouse fixture
    random_pair,
    relative,
    sizes,
)

SHAPES = [(1, 1, 5, 7), (3, 63, 40, 33), (2, 130, 9, 20), (1, 40, 70, 1100)]


def embedding_of(shape: tuple[int, ...], others: int, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    batch, _, p, d = shape
    draw = torch.Generator().manual_seed(11)
    return torch.randint(0, p, (batch, others), generator=draw), scale * torch.randn(batch, others, d, generator=draw)


def gradients(g: Tensor, x: Tensor, ids: Tensor, e: Tensor) -> Tensor:
    """Return every sample's full gradient in float64."""
    head = torch.bmm(g.double().mT, x.double())
    one_hot = torch.nn.functional.one_hot(ids, g.shape[-1]).double()
    return head + torch.bmm(one_hot.mT, e.double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pair", PAIRS)
def test_result_is_never_below_what_the_sum_adds_and_barely_above(shape: tuple[int, ...], pair: Callable) -> None:
    g, x = pair(shape)
    ids, e = embedding_of(shape, shape[1])
    exact = gradients(g, x, ids, e).square().sum((1, 2))
    launched = launch_tied_norms(g, x, ids, e)
    for found in (launched, tied_norms_reference(g, x, ids, e)):
        assert found.dtype == torch.float64
        assert found.shape == shape[:1]
        assert bool((found >= exact).all())
        if pair is random_pair:
            assert relative(found, exact) < 3e-3
    for b, one_hot in enumerate(torch.eye(shape[0]) if shape[1] < 100 else ()):
        added = launch_weighted(g, x, one_hot)
        add_embedding_sum_reference_(added, ids, e, one_hot)
        assert launched[b] >= added.double().square().sum()


def test_head_and_embedding_may_have_different_numbers_of_tokens() -> None:
    shape = (2, 21, 40, 33)
    g, x = random_pair(shape)
    ids, e = embedding_of(shape, 50)
    exact = gradients(g, x, ids, e).square().sum((1, 2))
    assert bool((launch_tied_norms(g, x, ids, e) >= exact).all())
    assert relative(launch_tied_norms(g, x, ids, e), exact) < 3e-3


def test_parts_that_cancel_leave_half_of_their_squares() -> None:
    g = torch.zeros(1, 4, 6)
    ids = torch.tensor([[0, 1, 2, 3]])
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    g.scatter_(2, ids.unsqueeze(-1), 1.0)  # the head's gradient is that of an embedding
    assert gradients(g, x, ids, -x).abs().max() == 0
    square = x.double().square().sum()
    for norms in (launch_tied_norms, tied_norms_reference):
        assert float(norms(g, x, ids, -x)) == pytest.approx(float(square), rel=1e-4)  # (|head|^2 + |embedding|^2) / 2


def test_the_rounding_of_the_products_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 45, 40, 33)
    g, x = random_pair(shape)
    ids, e = embedding_of(shape, 30)
    plain = launch_cross(g, x, ids, e)
    monkeypatch.setattr("fdp_kernels.tied.UNIT", 2.0**-7)
    A = g.gather(2, ids[:, None, :].expand(-1, 45, -1)).double().abs()
    lost = (A * x.double().norm(dim=-1)[:, :, None] * e.double().norm(dim=-1)[:, None, :]).sum((1, 2))
    more = launch_cross(g, x, ids, e) - plain
    assert bool((more >= 0.99 * (33 + 16 + 1) * 2.0**-7 * lost).all())
    assert relative(more, (33 + 16 + 1) * 2.0**-7 * lost) < 5e-3


def test_the_error_of_the_sum_is_added_beside_the_embedding() -> None:
    shape = (1, 40, 30, 20)
    g, x = random_pair(shape)
    g[:, 20:], x[:, 20:] = -g[:, :20], x[:, :20]  # the head cancels, the error of its sum does not
    ids, e = embedding_of(shape, 40, scale=1e-3)
    exact = gradients(g, x, ids, e).square().sum((1, 2)).sqrt()
    error = 40 * 2.0**-23 * sizes(g, x)
    assert bool((launch_tied_norms(g, x, ids, e).sqrt() >= 0.999 * (exact + error)).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_has_no_finite_norm_and_spoils_no_other(bad: float) -> None:
    shape = (3, 20, 12, 9)
    for part in range(3):
        g, x = random_pair(shape)
        ids, e = embedding_of(shape, 20)
        (g, x, e)[part][1, 3, 2] = bad
        found = launch_tied_norms(g, x, ids, e)
        assert not bool(torch.isfinite(found[1]))
        assert bool(torch.isfinite(found[[0, 2]]).all())


def test_the_op_checks_shapes_and_dtypes() -> None:
    g, x = random_pair((2, 5, 6, 7))
    ids, e = embedding_of((2, 5, 6, 7), 5)
    with pytest.raises(ValueError, match="expected ids"):
        tied_norms(g, x, ids[:, :3], e)
    with pytest.raises(ValueError, match="in the dtype of x"):
        tied_norms(g, x, ids, e.double())
    torch.library.opcheck(tied_norms, (g, x, ids, e))
