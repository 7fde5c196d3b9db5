"""Tests of the linear-layer kernels on a GPU, in bfloat16, float16 and float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fdp_kernels.direct import TILES as DIRECT_TILES
from fdp_kernels.direct import direct, direct_reference, launch_direct, launch_foreach_direct
from fdp_kernels.ghost import TILES as GHOST_TILES
from fdp_kernels.ghost import foreach_ghost, ghost, launch_foreach_ghost, launch_ghost
from fdp_kernels.keep import (
    foreach_keep,
    keep,
    keep_by_matmul,
    launch_foreach_keep,
    launch_keep,
    squared_norms,
    squared_norms_reference,
    weighted_sum,
    weighted_sum_reference,
)
from fdp_kernels.tile_gemm import Tile
from fdp_kernels.weighted import TILES as WEIGHTED_TILES
from fdp_kernels.weighted import (
    foreach_weighted_parts,
    launch_foreach_weighted,
    launch_weighted,
    weighted,
    weighted_reference,
)

from tests.kernels.linear_pairs import (
    PAIRS,
    _set_up,  # noqa: F401  an autouse fixture
    assert_rounded_up,
    factors_of,
    random_pair,
    relative,
    sizes,
)

LARGE = [(4, 1000, 1280, 3840), (3, 129, 770, 514), (2, 1, 64, 100), (2, 300, 5003, 256)]
BF16 = torch.bfloat16


def every_tile(table: Any) -> list[Tile]:
    return [row.tile for row in table]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", LARGE)
def test_gpu_kernels_match_float64(shape: tuple[int, ...], pair: Callable, dtype: torch.dtype) -> None:
    g, x = pair(shape, "cuda", dtype)
    expected, size, factors = direct_reference(g, x), sizes(g, x), factors_of(shape[0], "cuda")
    lost = 1.25 * max(16, shape[1]) * 2**-23
    for found in (direct(g, x), direct(g, x)):
        assert bool(((found.sqrt() - expected.sqrt()).abs() <= lost * size + 2.0**-15 * expected.sqrt()).all())
    if pair is random_pair:
        assert relative(direct(g, x), expected) < 1e-4
    found = ghost(g, x)
    assert bool((found >= expected).all())
    assert bool((found >= direct(g, x) * (1 - 2.0**-14)).all())
    if pair is random_pair:
        assert relative(found, expected) < 0.05
    stored, parts = keep(g, x)
    assert_rounded_up(parts.sum(1), squared_norms_reference(stored))
    assert relative(squared_norms(stored), squared_norms_reference(stored)) < 1e-12
    for dtype_out in (torch.float32, torch.float64):
        torch.testing.assert_close(
            weighted_sum(stored, factors, dtype_out), weighted_sum_reference(stored, factors, dtype_out)
        )
    total, exact = weighted(g, x, factors).double(), weighted_reference(g.double(), x.double(), factors)
    assert float((total - exact).norm()) <= float((lost + 2**-20) * (factors * size).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", LARGE)
def test_gpu_what_direct_measures_is_what_weighted_adds(shape: tuple[int, ...], pair: Callable) -> None:
    g, x = pair(shape, "cuda", BF16)
    for measured in every_tile(DIRECT_TILES):
        squared = launch_direct(g, x, tile=measured)
        for added in every_tile(WEIGHTED_TILES):
            for b in range(shape[0]):
                one_hot = torch.zeros(shape[0], device="cuda")
                one_hot[b] = 1
                total = launch_weighted(g, x, one_hot, tile=added).double().square().sum()
                assert_rounded_up(squared[b], total)


@pytest.mark.gpu
def test_gpu_persistent_tiles_are_the_same_numbers() -> None:
    g, x = random_pair(LARGE[0], "cuda", BF16)
    for tile in every_tile(DIRECT_TILES):
        for per_sm in (1, 2):
            found = launch_direct(g, x, tile=tile._replace(per_sm=per_sm))
            assert torch.equal(found, launch_direct(g, x, tile=tile))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sides",
    [((1280, 3840), (1280, 1280), (1280, 5120), (5120, 1280)), ((64, 514), (1, 1), (770, 33)), ((64, 64), (1, 1))],
)
@pytest.mark.parametrize("tokens", [1, 512, 700])
def test_gpu_foreach_kernels_equal_single_calls(sides: tuple[tuple[int, int], ...], tokens: int) -> None:
    pairs = [random_pair((4, tokens, *side), "cuda", BF16) for side in sides]
    gs, xs = [g for g, _ in pairs], [x for _, x in pairs]
    factors = [factors_of(4, "cuda") * (k + 1) for k in range(len(sides))]
    stored = foreach_keep(gs, xs)
    squares, sums = foreach_ghost(gs, xs), foreach_weighted_parts(gs, xs, factors, 2)
    for k, (g, x) in enumerate(pairs):
        tile = DIRECT_TILES[0].tile
        assert torch.equal(launch_foreach_direct(gs, xs, tile=tile)[k], launch_direct(g, x, tile=tile))
        assert torch.equal(launch_foreach_keep(gs, xs, tile=tile)[k], launch_keep(g, x, tile=tile)[0])
        assert_rounded_up(stored[len(sides) + k].sum(1), squared_norms_reference(stored[k]))
        tile = GHOST_TILES[0].tile
        assert torch.equal(launch_foreach_ghost(gs, xs, tile=tile)[k], launch_ghost(g, x, tile=tile))
        assert bool((squares[k] >= direct(g, x) * (1 - 2.0**-14)).all())
        tile = WEIGHTED_TILES[0].tile
        single = launch_weighted(g, x, factors[k], tile=tile)
        assert torch.equal(launch_foreach_weighted(gs, xs, factors, tile=tile)[k], single)
        halves = [launch_weighted(*of) for of in zip(g.chunk(2), x.chunk(2), factors[k].chunk(2))]
        assert torch.equal(sums[k], torch.stack(halves))  # the same with any tile


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gpu_a_nonfinite_sample_shows_in_its_own_norm_only(bad: float) -> None:
    shape = (3, 129, 770, 514)
    g, x = random_pair(shape, "cuda", BF16)
    factors = factors_of(3, "cuda")
    factors[1] = 0
    worse, zero = g.clone(), g.clone()
    worse[1, 128], zero[1] = bad, 0
    for tile in every_tile(WEIGHTED_TILES):
        assert torch.equal(launch_weighted(worse, x, factors, tile=tile), launch_weighted(zero, x, factors, tile=tile))
    stored = [keep(z, x)[0] for z in (worse, zero)]
    assert torch.equal(*(weighted_sum(G, factors, torch.float32) for G in stored))
    for op in (direct, ghost, lambda g, x: keep(g, x)[1].sum(1)):
        good, found = op(g, x), op(worse, x)
        assert not found[1].isfinite()
        assert torch.equal(found[[0, 2]], good[[0, 2]])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 770])
def test_gpu_every_tile_repeats_bitwise_and_in_a_graph(width: int) -> None:
    g, x = random_pair((3, 1000, 1280, width), "cuda", BF16)
    factors = factors_of(3, "cuda")
    runs: list[Callable[[], Any]] = [
        lambda: squared_norms(g),
        lambda: weighted_sum(g, factors, torch.float32),
        lambda: keep_by_matmul(g, x)[1],
        *(lambda tile=tile: launch_direct(g, x, tile=tile) for tile in every_tile(DIRECT_TILES)),
        *(lambda tile=tile: launch_ghost(g, x, tile=tile) for tile in every_tile(GHOST_TILES)),
        *(lambda tile=tile: launch_keep(g, x, tile=tile)[0] for tile in every_tile(DIRECT_TILES)),
        *(lambda tile=tile: launch_weighted(g, x, factors, tile=tile) for tile in every_tile(WEIGHTED_TILES)),
    ]
    eager = [run() for run in runs]
    for run, first in zip(runs, eager):
        assert torch.equal(run(), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run() for run in runs]
    for _ in range(2):
        for out in captured:
            out.zero_()
        graph.replay()
        for out, first in zip(captured, eager):
            assert torch.equal(out, first)
