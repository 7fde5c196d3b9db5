"""Inverses equal dense solves with the Kronecker product; factors that cannot be inverted are refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdp import tree
from fdp.gradients.linear_maps import LowRankMap, MatrixMap, Sides, apply_map, apply_rows
from fdp.kfac import factors
from fdp.kfac.factors import CurvatureError
from fdp.kfac.inversion.damped_inverse import Damping, invert, invert_or_keep
from fdp.kfac.inversion.one_side import Via, invert_side
from fdp.kfac.inversion.woodbury import Power
from fdp.kfac.preconditioning.one_layer import precondition
from fdp.kfac.types import Curvature, DenseFactor, DiagonalFactor, Preconditioner, Product, SoftmaxFactor
from fdp.types import FdpError

ROWS, COLUMNS = 4, 5
FORMS = ["dense", "columns", "wide columns", "diagonal", "softmax", "wide softmax"]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def factor_of(form: str, n: int, *, seed: int = 0, scale: float = 1.0):
    tokens = 2 * n if form.startswith("wide") or form == "dense" else n - 2
    rows = random(tokens, n, seed=seed) * scale
    match form.split()[-1]:
        case "dense":
            return factors.dense(rows, weight=3.0)
        case "columns":
            return factors.columns(rows, weight=3.0)
        case "diagonal":
            return factors.diagonal(rows, weight=3.0)
        case _:
            return factors.softmax(rows.softmax(-1), weight=3.0, extra=scale**2)


def curvature_of(left: str = "dense", right: str = "dense", *, scale: float = 2.0) -> Curvature:
    return Curvature(factor_of(left, ROWS, seed=1), factor_of(right, COLUMNS, seed=2, scale=scale))


def eye(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=torch.float64)


def power_of(m: torch.Tensor, power: Power, *, max_condition: float | None = None) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(m)
    if max_condition is not None:
        values = torch.maximum(values, values.max() / max_condition)
    return vectors @ (values**power.value).diag() @ vectors.mT


def applied(kronecker: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Apply ``kron(L, R)`` to the rows of the gradient, one after the other."""
    return (kronecker @ gradient.reshape(-1)).reshape(gradient.shape)


def formed(curvature: Curvature) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices of both sides."""
    assert curvature.left is not None
    assert curvature.right is not None
    return factors.matrix(curvature.left), factors.matrix(curvature.right)


def pi_damped(curvature: Curvature, damping: float) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = formed(curvature)
    pi = math.sqrt((right.trace() / len(right)) / (left.trace() / len(left)))
    return left + math.sqrt(damping) / pi * eye(len(left)), right + math.sqrt(damping) * pi * eye(len(right))


GRADIENT = random(ROWS, COLUMNS, seed=9)


@pytest.mark.parametrize("power", Power)
@pytest.mark.parametrize("damping", [1e-4, 0.3])
def test_product_damping_equals_the_dense_solve(damping, power):
    curvature = curvature_of()
    found = invert(curvature, damping=damping, method=Damping.PRODUCT, via=Via.EIGEN, power=power)
    assert isinstance(found, Product)
    dense = torch.kron(*formed(curvature)) + damping * eye(ROWS * COLUMNS)
    torch.testing.assert_close(precondition(found, GRADIENT), applied(power_of(dense, power), GRADIENT))
    if power is Power.INVERSE:
        solved = torch.linalg.solve(dense, GRADIENT.reshape(-1)).reshape(GRADIENT.shape)
        torch.testing.assert_close(precondition(found, GRADIENT), solved)


@pytest.mark.parametrize("via", Via)
@pytest.mark.parametrize("right", FORMS)
@pytest.mark.parametrize("left", FORMS)
def test_factored_damping_equals_the_dense_solve_in_every_form(left, right, via):
    curvature = curvature_of(left, right)
    found = invert(curvature, damping=0.01, method=Damping.PI, via=via)
    dense = torch.kron(*pi_damped(curvature, 0.01))
    solved = torch.linalg.solve(dense, GRADIENT.reshape(-1)).reshape(GRADIENT.shape)
    torch.testing.assert_close(precondition(found, GRADIENT), solved, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("left", [form for form in FORMS if form != "softmax"])
def test_the_root_twice_is_the_inverse(left):
    curvature = curvature_of(left, "columns")
    root = invert(curvature, damping=0.01, method=Damping.PI, via=Via.EIGEN, power=Power.ROOT)
    inverse = invert(curvature, damping=0.01, method=Damping.PI, via=Via.EIGEN)
    torch.testing.assert_close(precondition(root, precondition(root, GRADIENT)), precondition(inverse, GRADIENT))
    for map in root:
        assert isinstance(map, MatrixMap | LowRankMap)
        n = ROWS if map is root[0] else COLUMNS
        torch.testing.assert_close(apply_map(map, eye(n)), apply_map(map, eye(n)).mT)


@pytest.mark.parametrize("method", Damping)
@pytest.mark.parametrize("form", FORMS)
def test_a_missing_side_is_the_identity_and_the_other_gets_all_the_damping(form, method):
    for curvature in (Curvature(factor_of(form, ROWS), None), Curvature(None, factor_of(form, COLUMNS))):
        left, right = (eye(n) if f is None else factors.matrix(f) for f, n in zip(curvature, (ROWS, COLUMNS)))
        found = invert(curvature, damping=0.01, method=method, via=Via.EIGEN)
        dense = torch.kron(left, right) + 0.01 * eye(ROWS * COLUMNS)
        torch.testing.assert_close(precondition(found, GRADIENT), applied(dense.inverse(), GRADIENT))
    assert invert(Curvature(None, None), damping=0.01, method=method, via=Via.EIGEN) == Sides(None, None)
    torch.testing.assert_close(precondition(Sides(None, None), GRADIENT), GRADIENT, rtol=0, atol=0)


@pytest.mark.parametrize("power", Power)
@pytest.mark.parametrize("method", Damping)
@pytest.mark.parametrize("zero", [0, 1])
def test_where_a_factor_is_zero_the_curvature_is_the_damping(zero, method, power):
    sides = list(curvature_of())
    sides[zero] = sides[zero]._replace(total=torch.zeros_like(sides[zero].total))
    found = invert(Curvature(*sides), damping=0.04, method=method, via=Via.EIGEN, power=power)
    torch.testing.assert_close(precondition(found, GRADIENT), GRADIENT * 0.04**power.value)


def test_pi_does_not_depend_on_how_the_scale_is_shared_and_damps_no_less_than_product():
    a = curvature_of(scale=2.0)
    assert isinstance(a.left, DenseFactor)
    assert isinstance(a.right, DenseFactor)
    b = Curvature(a.left._replace(total=a.left.total * 64), a.right._replace(total=a.right.total / 64))
    one, other = (invert(c, damping=0.01, method=Damping.PI, via=Via.EIGEN) for c in (a, b))
    torch.testing.assert_close(precondition(one, GRADIENT), precondition(other, GRADIENT))
    product = torch.kron(factors.matrix(a.left), factors.matrix(a.right)) + 0.01 * eye(ROWS * COLUMNS)
    assert torch.linalg.eigvalsh(torch.kron(*pi_damped(a, 0.01)) - product).min() > -1e-12


def test_pi_and_product_agree_when_the_damping_is_small():
    curvature = curvature_of()
    pi, product = (invert(curvature, damping=1e-12, method=method, via=Via.EIGEN) for method in Damping)
    left, right = formed(curvature)
    expected = torch.linalg.solve(left, GRADIENT) @ right.inverse()
    torch.testing.assert_close(precondition(product, GRADIENT), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(precondition(pi, GRADIENT), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("power", Power)
@pytest.mark.parametrize("form", ["dense", "columns", "wide columns", "diagonal", "wide softmax"])
@pytest.mark.parametrize("max_condition", [1e8, 20.0, 1.5])
def test_the_condition_of_each_side_is_clipped(form, max_condition, power):
    curvature = curvature_of(form, form)
    settings = {"damping": 1e-3, "method": Damping.PI, "via": Via.EIGEN, "power": power}
    found = invert(curvature, **settings, max_condition=max_condition)
    sides = [power_of(m, power, max_condition=max_condition) for m in pi_damped(curvature, 1e-3)]
    torch.testing.assert_close(precondition(found, GRADIENT), applied(torch.kron(*sides), GRADIENT))
    for side in sides:
        assert torch.linalg.cond(side) <= max_condition ** abs(power.value) * (1 + 1e-9)


@pytest.mark.parametrize("max_condition", [1e8, 20.0, 1.5])
def test_the_condition_of_the_product_is_clipped(max_condition):
    curvature = curvature_of()
    found = invert(curvature, damping=1e-3, method=Damping.PRODUCT, via=Via.EIGEN, max_condition=max_condition)
    dense = torch.kron(*formed(curvature)) + 1e-3 * eye(ROWS * COLUMNS)
    expected = applied(power_of(dense, Power.INVERSE, max_condition=max_condition), GRADIENT)
    torch.testing.assert_close(precondition(found, GRADIENT), expected)


def test_the_condition_of_a_softmax_side_is_bounded_by_its_damping():
    factor = factor_of("softmax", COLUMNS)
    assert isinstance(factor, SoftmaxFactor)
    found = invert_side(factor, damping=1e-6, via=Via.EIGEN, max_condition=20.0)
    assert torch.linalg.cond(apply_map(found, eye(COLUMNS))) <= 20.0
    raised = float((factor.total / factor.weight).max()) / 19.0
    expected = (factors.matrix(factor) + raised * eye(COLUMNS)).inverse()
    torch.testing.assert_close(apply_map(found, eye(COLUMNS)), expected)


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 5), columns=st.integers(1, 5), tokens=st.integers(1, 9), log=st.floats(-4, 1))
def test_inverses_equal_dense_solves_for_any_shape(rows, columns, tokens, log):
    damping, gradient = 10.0**log, random(rows, columns, seed=3)
    left, right = random(tokens, rows, seed=1), random(tokens, columns, seed=2)
    dense = Curvature(factors.dense(left, weight=tokens), factors.dense(right, weight=tokens))
    thin = Curvature(factors.columns(left, weight=tokens), factors.columns(right, weight=tokens))
    close = {"rtol": 1e-7, "atol": 1e-7 / damping}
    exact = torch.kron(*formed(dense)) + damping * eye(rows * columns)
    product = invert(dense, damping=damping, method=Damping.PRODUCT, via=Via.EIGEN)
    torch.testing.assert_close(precondition(product, gradient), applied(exact.inverse(), gradient), **close)
    expected = applied(torch.kron(*pi_damped(dense, damping)).inverse(), gradient)
    for curvature in (dense, thin):
        for via in Via:
            found = invert(curvature, damping=damping, method=Damping.PI, via=via)
            torch.testing.assert_close(precondition(found, gradient), expected, **close)


def test_the_result_is_kept_in_the_dtype_asked_for():
    curvature = tree.map(lambda x: x.float(), curvature_of("columns", "softmax"))
    half = curvature._replace(left=curvature.left._replace(columns=curvature.left.columns.bfloat16()))
    for given_, asked, kept in (
        (curvature, None, torch.float32),
        (curvature, torch.float64, torch.float64),
        (half, None, torch.float32),
        (curvature_of("columns", "softmax"), None, torch.float64),
    ):
        found = invert(given_, damping=0.01, method=Damping.PI, via=Via.EIGEN, dtype=asked)
        assert {part.dtype for part in tree.leaves(found)} == {kept}
        again, ok = invert_or_keep(given_, None, damping=0.01, method=Damping.PI, via=Via.EIGEN, dtype=asked)
        assert ok
        for one, other in zip(tree.leaves(found), tree.leaves(again)):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("method", Damping)
def test_a_gradient_keeps_its_dtype_and_maps_may_be_stored_narrow(method):
    found = invert(curvature_of(), damping=0.1, method=method, via=Via.EIGEN)
    exact = precondition(found, GRADIENT)
    for dtype, slack in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        done = precondition(found, GRADIENT.to(dtype))
        assert done.dtype == dtype
        torch.testing.assert_close(done.double(), exact, rtol=slack, atol=slack * float(exact.abs().max()))
    narrow = tree.map(lambda x: x.bfloat16(), found)
    done = precondition(narrow, GRADIENT.bfloat16())
    torch.testing.assert_close(done.double(), exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))


@pytest.mark.parametrize("form", ["dense", "columns", "diagonal"])
def test_rows_of_any_rank_can_be_mapped(form):
    map = invert_side(factor_of(form, COLUMNS), damping=0.1, via=Via.EIGEN)
    x = random(2, 3, COLUMNS)
    expected = x @ (factors.matrix(factor_of(form, COLUMNS)) + 0.1 * eye(COLUMNS)).inverse()
    torch.testing.assert_close(apply_rows(map, x), expected)
    torch.testing.assert_close(apply_map(map, x[0].mT), expected[0].mT)


@pytest.mark.parametrize("form", ["dense", "columns"])
def test_preconditioning_runs_inside_a_compiled_function(form):
    for method in Damping:
        if method is Damping.PI or form == "dense":
            found = invert(curvature_of(form, form), damping=0.1, method=method, via=Via.EIGEN)
            compiled = torch.compile(precondition, fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(found, GRADIENT), precondition(found, GRADIENT))


# Bad input.


@pytest.mark.parametrize("damping", [0.0, -1e-3, math.nan, math.inf])
def test_a_damping_that_is_not_positive_is_refused(damping):
    for call in (invert, lambda c, **rest: invert_or_keep(c, None, **rest)):
        with pytest.raises(FdpError, match="damping: expected a finite number above 0, got"):
            call(curvature_of(), damping=damping, method=Damping.PI, via=Via.EIGEN)


@pytest.mark.parametrize("max_condition", [1.0, 0.0, -5.0, math.nan, math.inf])
def test_a_condition_of_1_or_less_is_refused(max_condition):
    with pytest.raises(FdpError, match="max_condition: expected a finite number above 1"):
        invert(curvature_of(), damping=0.1, method=Damping.PI, via=Via.EIGEN, max_condition=max_condition)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": Damping.PRODUCT}, "Damping.PRODUCT needs eigenvalues"),
        ({"method": Damping.PI, "max_condition": 10.0}, "max_condition needs eigenvalues"),
        ({"method": Damping.PI, "power": Power.ROOT}, "Power.ROOT needs eigenvalues"),
    ],
)
def test_settings_that_need_eigenvalues_are_refused_with_cholesky(settings, words):
    for call in (invert, lambda c, **rest: invert_or_keep(c, None, **rest)):
        with pytest.raises(FdpError, match=words):
            call(curvature_of(), damping=0.1, via=Via.CHOLESKY, **settings)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "dense"])
def test_product_damping_is_refused_where_no_matrix_is_formed(form):
    with pytest.raises(FdpError, match=r"expected dense factors on both sides.* got a DenseFactor and a"):
        invert(curvature_of("dense", form), damping=0.1, method=Damping.PRODUCT, via=Via.EIGEN)


def test_a_root_of_the_softmax_head_is_refused_and_its_diagonal_offered():
    curvature = curvature_of("softmax", "dense")
    with pytest.raises(FdpError, match=r"no root of low rank, got 4 classes and 2 tokens\. Use factors\.diag"):
        invert(curvature, damping=0.1, method=Damping.PI, via=Via.EIGEN, power=Power.ROOT)
    assert curvature.left is not None
    fallback = curvature._replace(left=factors.diagonal_of(curvature.left))
    root = invert(fallback, damping=0.1, method=Damping.PI, via=Via.EIGEN, power=Power.ROOT)
    sides = [power_of(m, Power.ROOT) for m in pi_damped(fallback, 0.1)]
    torch.testing.assert_close(precondition(root, GRADIENT), applied(torch.kron(*sides), GRADIENT))


def spoiled(value: float, side: str = "left", form: str = "dense") -> Curvature:
    curvature = curvature_of(form, form)
    factor = getattr(curvature, side)
    field = factor._fields[0]
    wrong = getattr(factor, field).clone()
    wrong[(0,) * wrong.ndim] = value
    return curvature._replace(**{side: factor._replace(**{field: wrong})})


@pytest.mark.parametrize("form", ["dense", "columns", "diagonal", "softmax"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_factor_that_is_not_finite_is_refused_by_name(value, side, form):
    with pytest.raises(CurvatureError, match=rf"{side} factor \(.*: expected finite numbers, got NaN or infinity"):
        invert(spoiled(value, side, form), damping=0.1, method=Damping.PI, via=Via.EIGEN)


@pytest.mark.parametrize(("method", "via"), [(Damping.PI, Via.EIGEN), (Damping.PRODUCT, Via.EIGEN)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_negative_eigenvalue_is_refused_by_name(method, via, side):
    indefinite = DenseFactor(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor(1.0))
    curvature = Curvature(indefinite, indefinite)._replace(
        **{"right" if side == "left" else "left": factors.dense(torch.eye(2), weight=1.0)}
    )
    with pytest.raises(CurvatureError, match=f"{side} factor: expected no negative eigenvalue beyond rounding, got -1"):
        invert(curvature, damping=0.1, method=method, via=via)
    with pytest.raises(CurvatureError, match=f"{side} damped factor: expected a positive definite"):
        invert(curvature, damping=0.1, method=Damping.PI, via=Via.CHOLESKY)


@pytest.mark.parametrize("method", Damping)
def test_eigenvalues_that_rounding_left_below_zero_are_zero(method):
    """They are further below zero than the damping is above it: unless clamped, the inverse would be negative."""
    basis = torch.tensor([[0.6, 0.8], [-0.8, 0.6]], dtype=torch.float64)
    done = []
    for lowest in (-5e-4, 0.0):
        m = basis @ torch.diag(torch.tensor([1.0, lowest], dtype=torch.float64)) @ basis.mT
        factor = DenseFactor(m, torch.tensor(1.0))
        other = None if method is Damping.PI else factor
        found = invert(Curvature(factor, other), damping=1e-5, method=method, via=Via.EIGEN)
        done.append(precondition(found, eye(2)))
    torch.testing.assert_close(*done)


def test_an_inverse_that_overflows_is_refused():
    curvature = tree.map(lambda x: x.float(), curvature_of("diagonal", "diagonal"))
    zero = curvature._replace(right=None, left=DiagonalFactor(torch.zeros(ROWS), torch.tensor(1.0)))
    with pytest.raises(CurvatureError, match="inverse is not finite in its dtype"):
        invert(zero, damping=1e-300, method=Damping.PI, via=Via.EIGEN)


# Keeping the last good one.


@pytest.mark.parametrize("form", ["dense", "columns", "diagonal", "softmax"])
def test_the_last_good_preconditioner_is_kept(form):
    settings = {"damping": 0.1, "method": Damping.PI, "via": Via.EIGEN}
    last = invert(curvature_of(form, form), **settings)
    kept, ok = invert_or_keep(spoiled(math.nan, "right", form), last, **settings)
    assert not ok
    assert kept is last
    first, ok = invert_or_keep(spoiled(math.nan, "right", form), None, **settings)
    assert not ok
    assert first == Sides(None, None)
    fresh, ok = invert_or_keep(curvature_of(form, form), kept, **settings)
    assert ok
    torch.testing.assert_close(precondition(fresh, GRADIENT), precondition(last, GRADIENT), rtol=0, atol=0)


def test_no_tokens_at_all_keep_the_last_good_preconditioner():
    empty = Curvature(factors.columns(torch.zeros(0, ROWS), weight=0.0), None)
    kept, ok = invert_or_keep(empty, None, damping=0.1, method=Damping.PI, via=Via.EIGEN)
    assert (kept, ok) == (Sides(None, None), False)


def test_failures_are_tried_again_in_float64_and_the_result_is_kept_in_float32(monkeypatch):
    """If the float32 eigendecomposition fails, the result is that of float64."""
    tried: list[torch.dtype] = []
    real = torch.linalg.eigh

    def eigh(m: torch.Tensor):
        tried.append(m.dtype)
        if m.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return real(m)

    curvature = tree.map(lambda x: x.float(), curvature_of())
    settings = {"damping": 0.1, "method": Damping.PRODUCT, "via": Via.EIGEN}
    expected = invert(curvature, **settings, dtype=torch.float64)
    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    found, ok = invert_or_keep(curvature, None, **settings)
    assert ok
    assert tried == [torch.float32, torch.float64, torch.float64]
    assert {part.dtype for part in tree.leaves(found)} == {torch.float32}
    done, right = precondition(found, GRADIENT.float()), precondition(expected, GRADIENT)
    torch.testing.assert_close(done.double(), right, rtol=1e-4, atol=1e-4)


def test_cholesky_below_float32_rounding_is_done_in_float64():
    """Damping far below the rounding of a rank-one float32 matrix: float32 has no Cholesky factor, float64 has."""
    x = torch.ones(1, 3)
    factor = factors.dense(x * 1e4, weight=1.0)
    curvature = Curvature(factor, None)
    settings = {"damping": 1e-2, "method": Damping.PI, "via": Via.CHOLESKY}
    with pytest.raises(CurvatureError, match="left damped factor"):
        invert(curvature, **settings)
    found, ok = invert_or_keep(curvature, None, **settings)
    assert ok
    expected = (factors.matrix(factor).double() + 1e-2 * eye(3)).inverse()
    torch.testing.assert_close(precondition(found, eye(3)), expected, rtol=1e-5, atol=1e-5)


def test_invalid_settings_always_raise():
    with pytest.raises(FdpError, match="needs eigenvalues"):
        invert_or_keep(spoiled(math.nan), None, damping=0.1, method=Damping.PRODUCT, via=Via.CHOLESKY)
    with pytest.raises(FdpError, match="expected dense factors on both sides"):
        invert_or_keep(curvature_of("columns"), None, damping=0.1, method=Damping.PRODUCT, via=Via.EIGEN)


@pytest.mark.gpu
def test_on_the_gpu_and_when_only_the_cpu_can(monkeypatch):
    curvature = tree.map(lambda x: x.cuda(), curvature_of("dense", "columns"))
    settings = {"damping": 0.1, "method": Damping.PI, "via": Via.EIGEN}
    right = precondition(invert(curvature_of("dense", "columns"), **settings), GRADIENT)
    found = invert(curvature, **settings)
    torch.testing.assert_close(precondition(found, GRADIENT.cuda()).cpu(), right)
    real = torch.linalg.eigh

    def eigh(m: torch.Tensor):
        if m.is_cuda:
            raise RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED")
        return real(m)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    again, ok = invert_or_keep(curvature, None, **settings)
    assert ok
    assert all(part.is_cuda for part in tree.leaves(again))
    torch.testing.assert_close(precondition(again, GRADIENT.cuda()).cpu(), right)


def symmetric(preconditioner: Preconditioner) -> bool:
    """Return True if ``<A, P B> = <P A, B>`` and ``<A, P A> > 0``, as for a symmetric positive map of gradients."""
    a, b = GRADIENT, random(ROWS, COLUMNS, seed=10)
    gap = (a * precondition(preconditioner, b)).sum() - (precondition(preconditioner, a) * b).sum()
    return bool(gap.abs() < 1e-10) and bool((a * precondition(preconditioner, a)).sum() > 0)


@pytest.mark.parametrize("form", FORMS)
def test_every_inverse_is_symmetric_and_positive(form):
    assert symmetric(invert(curvature_of(form, form), damping=0.1, method=Damping.PI, via=Via.EIGEN))
    assert symmetric(invert(curvature_of(), damping=0.1, method=Damping.PRODUCT, via=Via.EIGEN))
