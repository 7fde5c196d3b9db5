"""Preconditioning compiled by kind of layer equals preconditioning layer by layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fdp import tree
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.linear_maps import LowRankMap, MatrixMap, Sides
from fdp.kfac.layers import to_leaves, to_matrix
from fdp.kfac.preconditioning.compiled import precondition_compiled
from fdp.kfac.preconditioning.one_layer import precondition
from fdp.kfac.types import Layer, Preconditioner, Product
from tests.conftest import randn

ROWS, COLUMNS = 5, 4  # the weight's; a bias is one column more


def matrix(n: int, seed: int) -> MatrixMap:
    m = randn(n, n, seed=seed)
    return MatrixMap(m + m.mT)


def low_rank(n: int, k: int, seed: int) -> LowRankMap:
    core = randn(k, k, seed=seed + 1)
    return LowRankMap(randn(n, seed=seed), randn(n, k, seed=seed + 2), core + core.mT)


def forms(n: int) -> dict[str, Preconditioner]:
    """Return preconditioners of every form for n columns, with or without a bias."""
    return {
        "dense, dense": Sides(matrix(ROWS, 1), matrix(n, 2)),
        "diagonal, dense": Sides(low_rank(ROWS, 0, 3), matrix(n, 4)),
        "columns, skip": Sides(low_rank(ROWS, 2, 5), None),
        "skip, columns": Sides(None, low_rank(n, 3, 6)),
        "skip, skip": Sides(None, None),
        "product": Product(matrix(ROWS, 7).matrix, matrix(n, 8).matrix, randn(ROWS, n, seed=9)),
    }


def layers_of(bias: bool) -> tuple[dict[Layer, Preconditioner], dict[str, Tensor], dict[Layer, tuple[int, int]]]:
    """Return two layers of every form, so that the second reuses the first's function."""
    maps, gradients, shapes = {}, {"alone": randn(3, seed=50)}, {}
    n = COLUMNS + bias
    for i, (name, made) in enumerate((name, made) for name, made in forms(n).items() for _ in range(2)):
        layer = Layer(f"{i} {name}", f"{i} {name} bias" if bias else None)
        maps[layer], shapes[layer] = made, (ROWS, n)
        gradients[layer.weight] = randn(ROWS, COLUMNS, seed=100 + i)
        if layer.bias is not None:
            gradients[layer.bias] = randn(ROWS, seed=200 + i)
    return maps, gradients, shapes


def check(blocks: CompiledRunner, *, bias: bool, root: bool, rounded: bool) -> None:
    maps, gradients, shapes = layers_of(bias)
    got, dots = precondition_compiled(maps, gradients, shapes=shapes, rounded=rounded, root=root, runner=blocks)
    assert torch.equal(got["alone"], gradients["alone"])
    for (layer, made), dot in zip(maps.items(), dots):
        gradient = to_matrix(layer, shapes[layer], gradients)
        want = precondition(made, gradient)
        torch.testing.assert_close(dot, (gradient * (gradient if root else want)).sum().double(), rtol=1e-5, atol=1e-5)
        for path, leaf in to_leaves(layer, want, gradients).items():
            assert got[path].is_contiguous()
            torch.testing.assert_close(got[path], leaf, rtol=1e-5, atol=1e-5)
    assert len(blocks.kinds) == len(forms(1))


@pytest.mark.parametrize(
    ("bias", "root"),
    [(False, False), (True, True), *(pytest.param(bias, not bias, marks=pytest.mark.slow) for bias in (False, True))],
)
def test_compiled_preconditioning_equals_layer_by_layer(bias, root):
    check(CompiledRunner(backend="aot_eager"), bias=bias, root=root, rounded=True)


def test_kinds_do_not_share_a_function():
    """Compile separately for another side, precision or power, even if the sizes are the same."""
    blocks, layer = CompiledRunner(backend="eager"), Layer("w", None)
    gradients, shapes = {"w": randn(4, 4)}, {layer: (4, 4)}
    m = matrix(4, 1)
    for made in (Sides(m, None), Sides(None, m)):
        for root in (False, True):
            got, (dot,) = precondition_compiled(
                {layer: made}, gradients, shapes=shapes, rounded=False, root=root, runner=blocks
            )
            want = precondition(made, gradients["w"])
            torch.testing.assert_close(got["w"], want)
            torch.testing.assert_close(dot, (gradients["w"] * (gradients["w"] if root else want)).sum().double())
    assert len(blocks.kinds) == 4


@pytest.mark.slow
def test_inductor_compiles_preconditioning():
    check(CompiledRunner(), bias=True, root=False, rounded=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_compiled_gpu_result_equals_plain_products_on_the_cpu(bias):
    maps, gradients, shapes = layers_of(bias)
    there = torch.device("cuda")

    def move(value):
        return tree.map(lambda x: x.to(there), value)

    on_gpu = {layer: move(made) for layer, made in maps.items()}
    got, _ = precondition_compiled(
        on_gpu, move(gradients), shapes=shapes, rounded=True, root=False, runner=CompiledRunner()
    )
    for layer, made in maps.items():
        want = to_leaves(layer, precondition(made, to_matrix(layer, shapes[layer], gradients)), gradients)
        for path, leaf in want.items():
            torch.testing.assert_close(got[path].cpu(), leaf, rtol=2e-2, atol=2e-2 * float(leaf.abs().max()))
