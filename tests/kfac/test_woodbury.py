"""Low-rank inverses equal dense ones, for columns and for the Fisher information of a softmax head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdp.gradients.linear_maps import LowRankMap, MatrixMap, apply_map
from fdp.kfac import factors
from fdp.kfac.factors import CurvatureError
from fdp.kfac.inversion.softmax_head import capacitance, mass, softmax_map
from fdp.kfac.inversion.woodbury import Power, cholesky, eigh, gram, woodbury_cholesky, woodbury_map
from fdp.kfac.types import DiagonalFactor, SoftmaxFactor
from fdp.types import FdpError

N = 7
COUNTS = [0, 1, 3, 6, 7, 8, 20]
"""Columns: none, fewer than rows, as many, more."""


def columns_of(k: int, *, n: int = N, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def power_of(m: torch.Tensor, power: Power, *, max_condition: float | None = None) -> torch.Tensor:
    """Return the power by the eigenvalues of the n x n matrix."""
    values, vectors = torch.linalg.eigh(m)
    if max_condition is not None:
        values = torch.maximum(values, values.max() / max_condition)
    return vectors @ (values**power.value).diag() @ vectors.mT


def formed(map) -> torch.Tensor:
    n = (map.matrix if isinstance(map, MatrixMap) else map.diagonal).shape[0]
    return apply_map(map, torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("k", COUNTS)
@pytest.mark.parametrize("damping", [1e-3, 0.5])
def test_woodbury_equals_the_dense_solve(k, damping):
    u, y = columns_of(k), columns_of(3, seed=1)
    dense = damping * torch.eye(N).double() + u @ u.mT / 5.0
    right = torch.linalg.solve(dense, y)
    for map in (
        woodbury_cholesky(u, weight=5.0, damping=damping),
        woodbury_map(u, weight=5.0, damping=damping, power=Power.INVERSE),
    ):
        assert isinstance(map, LowRankMap if k < N else MatrixMap)
        torch.testing.assert_close(apply_map(map, y), right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("k", COUNTS)
def test_the_root_squared_is_the_inverse(k):
    u = columns_of(k)
    dense = 0.1 * torch.eye(N).double() + u @ u.mT / 5.0
    root = formed(woodbury_map(u, weight=5.0, damping=0.1, power=Power.ROOT))
    torch.testing.assert_close(root, root.mT)
    torch.testing.assert_close(root, power_of(dense, Power.ROOT))
    torch.testing.assert_close(root @ root, torch.linalg.inv(dense))


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 9), k=st.integers(0, 12), m=st.integers(0, 3), log=st.floats(-4, 2), weight=st.floats(0.1, 100))
def test_woodbury_equals_the_dense_solve_for_any_shape(n, k, m, log, weight):
    u, y, damping = columns_of(k, n=n), columns_of(m, n=n, seed=1), 10.0**log
    right = torch.linalg.solve(damping * torch.eye(n).double() + u @ u.mT / weight, y)
    close = {"rtol": 1e-8, "atol": 1e-8 / damping}
    for map in (
        woodbury_cholesky(u, weight=weight, damping=damping),
        woodbury_map(u, weight=weight, damping=damping, power=Power.INVERSE),
    ):
        torch.testing.assert_close(apply_map(map, y), right, **close)


@pytest.mark.parametrize("make", [woodbury_cholesky, lambda u, **a: woodbury_map(u, **a, power=Power.INVERSE)])
@pytest.mark.parametrize("k", [0, 3, 7, 20])
def test_padding_and_order_of_the_columns_change_nothing(k, make):
    u = columns_of(k)
    right = formed(make(u, weight=5.0, damping=0.01))
    padded = torch.cat([u[:, : k // 2], torch.zeros(N, 2).double(), u[:, k // 2 :], torch.zeros(N, 1).double()], 1)
    torch.testing.assert_close(formed(make(padded, weight=5.0, damping=0.01)), right, rtol=1e-9, atol=1e-9)
    shuffled = u[:, torch.randperm(k, generator=torch.Generator().manual_seed(0))]
    torch.testing.assert_close(formed(make(shuffled, weight=5.0, damping=0.01)), right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("power", Power)
@pytest.mark.parametrize("k", COUNTS)
@pytest.mark.parametrize("max_condition", [1e9, 50.0, 3.0, 1.001])
def test_eigenvalues_below_the_largest_over_the_condition_are_raised_to_it(k, max_condition, power):
    u = columns_of(k)
    dense = 0.01 * torch.eye(N).double() + u @ u.mT / 5.0
    map = woodbury_map(u, weight=5.0, damping=0.01, power=power, max_condition=max_condition)
    torch.testing.assert_close(formed(map), power_of(dense, power, max_condition=max_condition), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [0, 3, 20])
def test_half_precision_columns_are_upcast_before_use(dtype, k):
    u = columns_of(k, dtype=dtype)
    dense = 0.1 * torch.eye(N).double() + u.double() @ u.double().mT / 5.0
    for map in (
        woodbury_cholesky(u, weight=5.0, damping=0.1),
        woodbury_map(u, weight=5.0, damping=0.1, power=Power.INVERSE),
    ):
        assert all(part.dtype == torch.float32 for part in map)
        torch.testing.assert_close(formed(map), torch.linalg.inv(dense), rtol=1e-5, atol=1e-5)
    wide = woodbury_cholesky(u, weight=5.0, damping=0.1, dtype=torch.float64)
    torch.testing.assert_close(formed(wide), torch.linalg.inv(dense), rtol=1e-10, atol=1e-10)


def test_the_small_system_is_float64_so_a_float32_map_is_as_good_as_its_rounding():
    """With s_max / damping near 1e8, a small system in float32 would not even be positive."""
    u = columns_of(3, dtype=torch.float32)
    u[:, 2] = u[:, 1] * (1 + 1e-6)
    dense = 1e-7 * torch.eye(N).double() + u.double() @ u.double().mT
    found = formed(woodbury_cholesky(u, weight=1.0, damping=1e-7, dtype=torch.float64))
    assert (found - torch.linalg.inv(dense)).norm() < 1e-7 * torch.linalg.inv(dense).norm()


def test_along_the_columns_a_float32_map_is_off_by_its_condition_and_a_float64_map_is_not():
    u = columns_of(8, n=128, dtype=torch.float32)
    y = u @ columns_of(2, n=8, dtype=torch.float32)
    largest = float(torch.linalg.matrix_norm(u.double(), 2)) ** 2
    for condition in (1e2, 1e4):
        damping = largest / condition
        dense = damping * torch.eye(128, dtype=torch.float64) + u.double() @ u.double().mT
        expected = torch.linalg.solve(dense, y.double())
        for dtype, slack in ((torch.float32, 1e-6 * condition), (torch.float64, 1e-14 * condition)):
            map = woodbury_cholesky(u, weight=1.0, damping=damping, dtype=dtype)
            assert (apply_map(map, y.to(dtype)).double() - expected).norm() < slack * expected.norm()


@pytest.mark.parametrize("k", [5, 20])
def test_eigenvalues_that_rounding_left_below_zero_are_zero(k):
    """Columns of rank one, a damping below float64 rounding: no root of a negative number."""
    for seed in range(5):
        u = columns_of(1, seed=seed) @ columns_of(k, n=1, seed=seed)
        root = woodbury_map(u, weight=1.0, damping=1e-18, power=Power.ROOT)
        assert formed(root).isfinite().all()


def test_the_gram_matrix_is_computed_one_slice_at_a_time(monkeypatch):
    u, scale = columns_of(5, n=11, dtype=torch.float32), torch.arange(1.0, 12.0)
    monkeypatch.setattr("fdp.kfac.inversion.woodbury.SLICE_ENTRIES", 15)
    torch.testing.assert_close(gram(u), u.double().mT @ u.double())
    torch.testing.assert_close(gram(u, scale), u.double().mT @ scale.double().diag() @ u.double())
    factor = factors.softmax(u.mT.softmax(-1), weight=1.0)
    monkeypatch.setattr("fdp.kfac.inversion.softmax_head.SLICE_ENTRIES", 15)
    torch.testing.assert_close(mass(factor), factor.columns.double() @ factor.columns.double().sum(0))


@pytest.mark.parametrize("damping", [0.0, -1e-3, float("nan"), float("inf")])
def test_a_damping_that_is_not_positive_is_refused(damping):
    u, softmax = columns_of(3), factors.softmax(columns_of(3).mT.softmax(-1), weight=3.0)
    for solve in (
        lambda: woodbury_map(u, weight=1.0, damping=damping, power=Power.ROOT),
        lambda: woodbury_cholesky(u, weight=1.0, damping=damping),
        lambda: softmax_map(softmax, damping=damping),
    ):
        with pytest.raises(FdpError, match="damping: expected a finite number above 0, got"):
            solve()


def test_matrices_that_cannot_be_decomposed_are_named():
    nan, negative = torch.full((2, 2), torch.nan), -torch.eye(2)
    for m in (nan, negative):
        with pytest.raises(CurvatureError, match="mine: expected a positive definite"):
            cholesky(m, name="mine")
    with pytest.raises(CurvatureError, match="mine: expected finite numbers"):
        eigh(nan, name="mine")
    with pytest.raises(CurvatureError, match="expected finite numbers"):
        woodbury_map(columns_of(3) * torch.nan, weight=1.0, damping=0.1, power=Power.INVERSE)


def test_a_decomposition_that_fails_says_so(monkeypatch):
    def fails(_):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(CurvatureError, match=r"mine: the eigendecomposition failed \(did not converge\)"):
        eigh(torch.eye(2), name="mine")
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (m[0] * torch.nan, m))
    with pytest.raises(CurvatureError, match="mine: the eigendecomposition gave NaN"):
        eigh(torch.eye(2), name="mine")


def probabilities(tokens: int, classes: int, *, scale: float = 3.0) -> torch.Tensor:
    logits = torch.randn(tokens, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))
    return (logits * scale).softmax(-1)


def dense_head(p: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the matrix, summed token by token in float64."""
    m = sum(row.diag() - torch.outer(row, row) for row in p) / len(p)
    return m + damping * torch.eye(p.shape[1], dtype=torch.float64)


@pytest.mark.parametrize("damping", [1.0, 1e-2, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("tokens", [1, 24, 100, 130])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_softmax_head_equals_the_dense_one(damping, tokens, dtype):
    """They agree to 1e-6, also for float32 probabilities and for gradients of logits, which add up to 0."""
    p = probabilities(tokens, 100)
    factor, y = factors.softmax(p.to(dtype), weight=float(tokens)), columns_of(4, n=100)
    for right in (y, y - y.mean(0)):
        expected = torch.linalg.solve(dense_head(p, damping), right)
        map = softmax_map(factor, damping=damping, dtype=torch.float64)
        assert (apply_map(map, right) - expected).norm() < 1e-6 * expected.norm()


def test_the_softmax_head_kept_in_float32():
    p, y = probabilities(24, 100), columns_of(4, n=100)
    map = softmax_map(factors.softmax(p.float(), weight=24.0), damping=1e-4)
    assert all(part.dtype == torch.float32 for part in map)
    expected = torch.linalg.solve(dense_head(p, 1e-4), y)
    assert (apply_map(map, y.float()).double() - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_in_half_precision_the_head_is_off_by_its_rounding_at_any_damping(dtype):
    """Without the correction the error would be rounding / damping, and the matrix negative."""
    p, y = probabilities(24, 100), columns_of(4, n=100)
    made = factors.softmax(p.float(), weight=24.0)
    factor = made._replace(columns=made.columns.to(dtype))
    for damping in (1e-2, 1e-4, 1e-6, 1e-8):
        expected = torch.linalg.solve(dense_head(p, damping), y - y.mean(0))
        found = apply_map(softmax_map(factor, damping=damping, dtype=torch.float64), y - y.mean(0))
        assert (found - expected).norm() < torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("damping", [1e-1, 1e-3, 1e-6])
def test_the_capacitance_keeps_its_bound(damping, scale):
    p = probabilities(24, 50, scale=scale)
    lower, base, condition = capacitance(factors.softmax(p, weight=24.0), damping=damping)
    values = torch.linalg.eigvalsh(lower @ lower.mT)
    p_max = float(p.mean(0).max())
    assert condition == pytest.approx(1 + p_max / damping)
    assert values.min() >= damping / (damping + p_max) * (1 - 1e-6)
    assert values.max() <= 1 + 1e-12
    torch.testing.assert_close(base, p.mean(0) + damping)


def test_a_capacitance_below_its_bound_is_refused(monkeypatch):
    """Without diagonal dominance a matrix that is barely positive violates the bound."""
    p = probabilities(24, 50)
    factor = factors.softmax(p, weight=24.0)
    monkeypatch.setattr("fdp.kfac.inversion.softmax_head.mass", lambda f: f.total.double() - 0.9e-3 * 24.0)
    with pytest.raises(CurvatureError, match=r"softmax head: C - 1 / \(2 \* "):
        capacitance(factor, damping=1e-3)


def test_the_bound_of_the_capacitance_is_attained():
    """With one class C is damping / (damping + 1), which equals the bound."""
    p = torch.zeros(1, 5).double()
    p[0, 2] = 1.0
    lower, _, condition = capacitance(factors.softmax(p, weight=1.0), damping=1e-3)
    assert float(lower[0, 0] ** 2) == pytest.approx(1 / condition, rel=1e-9)


def test_masked_tokens_and_an_added_diagonal_are_part_of_the_head():
    p, mask = probabilities(24, 50), (torch.arange(24) % 3 > 0).double()
    factor = factors.softmax(p, weight=mask.sum(), extra=mask)
    torch.testing.assert_close(formed(softmax_map(factor, damping=1e-3)), dense_head(p[mask > 0], 1e-3).inverse())
    counts = DiagonalFactor((torch.arange(50) % 4).double(), torch.tensor(8.0).double())
    both = factors.add(factor, counts)
    assert isinstance(both, SoftmaxFactor)
    dense = factors.matrix(both) + 1e-3 * torch.eye(50).double()
    torch.testing.assert_close(formed(softmax_map(both, damping=1e-3)), dense.inverse())


def test_a_head_without_tokens_is_its_damping():
    factor = factors.softmax(torch.zeros(0, 5).double(), weight=1.0)
    torch.testing.assert_close(formed(softmax_map(factor, damping=0.5)), 2.0 * torch.eye(5).double())


@pytest.mark.parametrize("spoil", [lambda u: u * 2, lambda u: -u * 1.2, lambda u: u * torch.nan])
def test_columns_that_are_no_softmax_are_refused(spoil):
    factor = factors.softmax(probabilities(6, 20), weight=6.0)
    with pytest.raises(CurvatureError, match="expected columns with U U"):
        softmax_map(factor._replace(columns=spoil(factor.columns)), damping=1e-3)
