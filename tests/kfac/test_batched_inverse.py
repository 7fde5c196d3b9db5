"""Batched inverses equal single ones, and a layer that cannot be inverted does not affect the others."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fdp import tree
from fdp.gradients.linear_maps import Sides
from fdp.kfac import factors
from fdp.kfac.factors import CurvatureError
from fdp.kfac.inversion.batched_inverse import cholesky_inverse_batched, invert_batched
from fdp.kfac.inversion.damped_inverse import Damping, invert
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.preconditioning.one_layer import precondition
from fdp.kfac.types import Curvature, DenseFactor, DiagonalFactor, Layer
from tests.conftest import randn

CPU = torch.device("cpu")
PLAIN: Any = {"method": Damping.PI, "via": Via.CHOLESKY}
PAIRS = [pair for pair in product(["dense", "diagonal", "skip"], repeat=2) if pair != ("skip", "skip")]


def factor_of(form: str, n: int, seed: int, dtype: torch.dtype) -> DenseFactor | DiagonalFactor | None:
    rows = (randn(2 * n, n, seed=seed) * 10.0 ** (seed % 5 - 2)).to(dtype)
    match form:
        case "dense":
            return factors.dense(rows, weight=3.0 + seed)
        case "diagonal":
            return factors.diagonal(rows, weight=3.0 + seed)
        case _:
            return None


def layers_of(left: str, right: str, *, dtype: torch.dtype, many: int = 5) -> dict[Layer, Curvature]:
    """Return layers of two shapes, with curvatures of very different sizes."""
    return {
        Layer(f"{left}.{right}.{i}", None): Curvature(
            factor_of(left, 6 + i % 2, 2 * i, dtype), factor_of(right, 9, 2 * i + 3, dtype)
        )
        for i in range(many)
    }


def everything(dtype: torch.dtype) -> dict[Layer, Curvature]:
    return {layer: c for pair in PAIRS for layer, c in layers_of(*pair, dtype=dtype).items()}


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_batched_inverses_equal_single_ones(dtype: torch.dtype, slack: float) -> None:
    layers = everything(dtype)
    made = invert_batched(layers, damping=1e-2, device=CPU)
    assert list(made) == list(layers)
    for layer, curvature in layers.items():
        alone = invert(curvature, damping=1e-2, **PLAIN)
        found = made[layer]
        assert tree.paths(found) == tree.paths(alone)
        for a, b in zip(tree.leaves(found), tree.leaves(alone)):
            assert a.dtype == b.dtype == dtype
            assert a.shape == b.shape
            assert not a.numel() or (a - b).norm() <= slack * b.norm(), layer


def test_sides_of_two_dtypes_give_an_inverse_in_the_wider_one() -> None:
    left, right = factor_of("dense", 4, 1, torch.float32), factor_of("diagonal", 5, 2, torch.float64)
    layer = Layer("w", None)
    made = invert_batched({layer: Curvature(left, right)}, damping=0.1, device=CPU)[layer]
    assert {x.dtype for x in tree.leaves(made)} == {torch.float64}


def test_a_triangular_solve_and_a_product_invert_as_cholesky_does() -> None:
    rows = randn(4, 60, 30)
    lower = torch.linalg.cholesky(rows.mT @ rows)
    done = cholesky_inverse_batched(lower)
    torch.testing.assert_close(done, torch.cholesky_inverse(lower), rtol=1e-10, atol=1e-12)
    assert torch.equal(done, done.mT)


# One that is broken


def _total(change: Any) -> Any:
    return lambda factor: factor._replace(total=change(factor.total.clone()))


def _weight(value: float) -> Any:
    return lambda factor: factor._replace(weight=torch.full_like(factor.weight, value))


def _entry(value: float, *where: int) -> Any:
    def change(total: Tensor) -> Tensor:
        total[where if total.ndim == 2 else where[:1]] = value
        return total

    return _total(change)


BOTH = {
    "NaN": _entry(math.nan, 1, 1),
    "infinity": _entry(math.inf, 1, 1),
    "negative": _entry(-1e-3, 2, 2),
    "no weight": _weight(0.0),
    "negative weight": _weight(-1.0),
    "weight NaN": _weight(math.nan),
    "weight infinite": _weight(math.inf),
}
DENSE = {
    "NaN aside": _entry(math.nan, 1, 0),
    "asymmetric": _entry(1e3, 2, 0),
    "indefinite": _total(lambda total: total - total.tril(-1) - total.triu(1) + 1e5 * (1 - torch.eye(len(total)))),
}
BROKEN = [
    *((name, side, form) for name in BOTH for side in ("left", "right") for form in ("dense", "diagonal")),
    *((name, side, "dense") for name in DENSE for side in ("left", "right")),
]


@pytest.mark.parametrize(("other", "dtype"), [("dense", torch.float32), ("skip", torch.float64)])
@pytest.mark.parametrize(("name", "side", "form"), BROKEN)
def test_a_broken_layer_fails_alone(name: str, side: str, form: str, other: str, dtype: torch.dtype) -> None:
    layers = layers_of(*((form, other) if side == "left" else (other, form)), dtype=dtype)
    clean = invert_batched(layers, damping=1e-2, device=CPU)
    victim = list(layers)[2]
    spoiled = (BOTH | DENSE)[name](getattr(layers[victim], side))
    layers[victim] = layers[victim]._replace(**{side: spoiled})
    with pytest.raises(CurvatureError):
        invert(layers[victim], damping=1e-2, **PLAIN)
    made = invert_batched(layers, damping=1e-2, device=CPU)
    assert made.pop(victim) is None
    for layer, found in made.items():
        assert found is not None
        torch.testing.assert_close(tree.leaves(found), tree.leaves(clean[layer]), rtol=0, atol=0)


def test_a_singular_layer_does_not_affect_the_others() -> None:
    """The damped matrix is all ones: its Cholesky factor has a zero on the diagonal, for which solvers raise."""
    singular = torch.ones(6, 6, dtype=torch.float64) - torch.eye(6, dtype=torch.float64)
    layers = layers_of("dense", "skip", dtype=torch.float64)
    victim = list(layers)[2]
    layers[victim] = Curvature(DenseFactor(singular, torch.tensor(1.0, dtype=torch.float64)), None)
    made = invert_batched(layers, damping=1.0, device=CPU)
    assert [layer for layer, found in made.items() if found is None] == [victim]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", ["dense", "diagonal"])
def test_a_layer_without_curvature_is_left_to_invert(form: str, side: str) -> None:
    layers = layers_of(form, form, dtype=torch.float64)
    victim = list(layers)[2]
    flat = _total(torch.zeros_like)(getattr(layers[victim], side))
    layers[victim] = layers[victim]._replace(**{side: flat})
    made = invert_batched(layers, damping=1e-2, device=CPU)
    assert [layer for layer, found in made.items() if found is None] == [victim]
    gradient = randn(6, 9)
    torch.testing.assert_close(precondition(invert(layers[victim], damping=1e-2, **PLAIN), gradient), gradient / 1e-2)


@pytest.mark.parametrize("form", ["dense", "diagonal"])
def test_an_inverse_too_large_for_its_dtype_is_none(form: str) -> None:
    layers = layers_of(form, "skip", dtype=torch.float32)
    victim = list(layers)[2]
    layers[victim] = Curvature(_total(torch.zeros_like)(layers[victim].left), None)
    made = invert_batched(layers, damping=1e-39, device=CPU)
    assert [layer for layer, found in made.items() if found is None] == [victim]
    with pytest.raises(CurvatureError):
        invert(layers[victim], damping=1e-39, **PLAIN)


def test_forms_that_cannot_be_batched_are_none() -> None:
    rows = randn(3, 8)
    dense = factors.dense(rows, weight=3.0)
    others = [
        Curvature(None, None),
        Curvature(factors.columns(rows, weight=3.0), dense),
        Curvature(dense, factors.softmax(rows.softmax(-1), weight=3.0)),
        Curvature(DenseFactor(dense.total.half(), dense.weight.half()), None),
    ]
    layers = {Layer(f"w{i}", None): each for i, each in enumerate(others)}
    assert list(invert_batched(layers, damping=0.1, device=CPU).values()) == [None] * 4
    assert invert_batched({}, damping=0.1, device=CPU) == {}


# Memory


def test_batches_are_split_and_inverses_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = everything(torch.float64)
    whole = invert_batched(layers, damping=1e-2, device=CPU)
    stacked: list[int] = []
    real = torch.linalg.cholesky_ex

    def cholesky_ex(m: Tensor) -> Any:
        stacked.append(len(m))
        return real(m)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", cholesky_ex)
    monkeypatch.setattr("fdp.kfac.inversion.batched_inverse.BATCH_ENTRIES", 2 * (36 + 81))
    cut = invert_batched(layers, damping=1e-2, device=CPU)
    assert max(stacked) < 5
    for layer, found in cut.items():
        torch.testing.assert_close(tree.leaves(found), tree.leaves(whole[layer]), rtol=0, atol=0)
    for leaf in tree.leaves(whole):
        assert leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()


@pytest.mark.gpu
def test_on_the_gpu_float32_factors_are_inverted_as_in_float64() -> None:
    layers = everything(torch.float32)
    victim = list(layers)[2]
    layers[victim] = layers[victim]._replace(left=_entry(math.nan, 1, 1)(layers[victim].left))
    right = invert_batched(tree.map(Tensor.double, layers), damping=1e-4, device=CPU)
    for home in ("cpu", "cuda"):  # factors may wait elsewhere
        at = {layer: tree.map(lambda x, home=home: x.to(home), c) for layer, c in layers.items()}
        made = invert_batched(at, damping=1e-4, device=torch.device("cuda"))
        assert [layer for layer, found in made.items() if found is None] == [victim]
        for layer, found in made.items():
            for a, b in zip(tree.leaves(found), tree.leaves(right[layer])):
                assert a.is_cuda
                assert a.dtype == torch.float32
                assert not a.numel() or (a.double().cpu() - b).norm() <= 1e-6 * b.norm()
                assert a.ndim == 1 or torch.equal(a, a.mT) or not a.numel() or a.shape[0] != a.shape[1]


def test_a_single_side_gets_all_the_damping() -> None:
    layer = Layer("w", None)
    factor = factor_of("dense", 5, 1, torch.float64)
    assert factor is not None
    made = invert_batched({layer: Curvature(None, factor)}, damping=0.3, device=CPU)[layer]
    assert isinstance(made, Sides)
    expected = (factors.matrix(factor) + 0.3 * torch.eye(5, dtype=torch.float64)).inverse()
    torch.testing.assert_close(precondition(made, torch.eye(5, dtype=torch.float64)), expected)
