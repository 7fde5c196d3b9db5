"""The bodies for Hopper: compiled for it anywhere, run on one, against the Triton bodies and the references."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from fdp_kernels import ghost_hopper, hopper, keep_hopper, sum_hopper, weighted_hopper
from fdp_kernels.direct import direct, direct_reference
from fdp_kernels.ghost import TILES as GHOST_TILES
from fdp_kernels.ghost import launch_foreach_ghost, launch_ghost
from fdp_kernels.hopper import TESTED, runs_hopper
from fdp_kernels.keep import TILES as KEEP_TILES
from fdp_kernels.keep import foreach_keep, launch_foreach_keep
from fdp_kernels.tile_gemm import count_tiles
from fdp_kernels.weighted import TILES as WEIGHTED_TILES
from fdp_kernels.weighted import launch_foreach_weighted_parts, weighted_reference
from torch._subclasses.fake_tensor import FakeTensorMode

from fdp.gradients.rules import Pair, kernel_stores_faster, store_gradient
from tests.kernels.linear_pairs import factors_of, random_pair

BODIES = (
    ghost_hopper._ghost_hopper_body,
    weighted_hopper._weighted_hopper_body,
    keep_hopper._keep_hopper_body,
    sum_hopper._sum_hopper_body,
)
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
)


@pytest.mark.long
@pytest.mark.skipif(not TESTED, reason="no version of Gluon that these bodies were tested with")
@pytest.mark.parametrize(
    ("body", "groups"),
    [
        ("weighted_192", 3),
        ("weighted_128", 2),
        ("keep_192", 3),
        ("keep_128", 2),
        ("keep_int8", 2),
        ("ghost", 2 * 2 * 2),
        ("sum_int8", 8),
        *((f"sum_stored_{elements}_{samples}", 0) for elements in (1, 5) for samples in (1, 5)),
    ],
)
def test_bodies_compile_for_hopper(body: str, groups: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("compile_hopper.py")
    run = subprocess.run([sys.executable, str(script), body], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    instructions, fused, spilled, shared = map(int, run.stdout.split())
    # Four a step for each group of warps; of ghost also g and x, diagonal and not; of sum_int8 also four blocks.
    assert instructions == 4 * groups
    assert shared <= 227 << 10
    if body.startswith("weighted"):
        assert fused >= groups * 64  # multiplied and added with one rounding, as in the Triton body
    if body != "ghost":
        # Bytes of a thread: arguments, which a group of warps reads once; of keep_128 also values of every tile.
        assert spilled <= {"keep_192": 16, "keep_128": 112, "keep_int8": 64}.get(body, 0)


@pytest.mark.parametrize(
    ("sides", "rows", "beside"),
    [
        ([(2304, 768), (3072, 768), (768, 3072)], 192, 192),  # 264 tiles: two for each; of 128 rows 396: three
        ([(2304, 768), (768, 768), (3072, 768), (768, 3072)], 128, 192),  # 288: three for some; 432: four
        ([(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)], 128, 128),  # 544: five for some; 768: six
    ],
)
def test_the_tile_is_the_one_with_which_the_last_multiprocessor_is_done_first(
    monkeypatch: pytest.MonkeyPatch, sides: list[tuple[int, int]], rows: int, beside: int
) -> None:
    monkeypatch.setattr(hopper, "multiprocessors", lambda _: 132)
    gs, xs = ([torch.empty(1, 1, side[k], device="meta") for side in sides] for k in (0, 1))
    count = partial(count_tiles, gs, xs, 1)
    assert hopper.fastest_tile(weighted_hopper.TILES, count, gs[0].device).rows == rows
    assert hopper.fastest_tile(weighted_hopper.TILES, count, gs[0].device, beside=True).rows == beside


@pytest.mark.skipif(not TESTED, reason="no version of Gluon that these bodies were tested with")
def test_numbers_that_may_be_one_are_not_compiled_into_a_body() -> None:
    """One tile per sample, up to 128 tokens, made the compiler crash: ``pairs`` was the constant 1."""
    for body in BODIES:
        names = ("pairs", "tiles", "batch", "tokens", "count", "size")
        numbers = [parameter for parameter in body.params if parameter.name in names]
        assert len(numbers) >= 2
        assert all(parameter.do_not_specialize for parameter in numbers)


def test_only_half_precision_on_a_hopper_gpu_uses_these_bodies() -> None:
    assert not runs_hopper(torch.zeros(1, 1, 8, dtype=torch.bfloat16))
    if torch.cuda.is_available():
        assert not runs_hopper(torch.zeros(1, 1, 8, device="cuda"))


SHAPES = [(6, 256, 2304, 768), (5, 100, 1000, 2056), (7, 65, 50264, 96), (3, 1, 1536, 1536), (4, 700, 1280, 1288)]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_gpu_weighted_on_hopper_is_bit_for_bit_that_of_triton(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    g, x = random_pair(shape, "cuda", dtype)
    factors = factors_of(shape[0], "cuda")
    factors[1], g[1, 0] = 0, float("nan")
    for parts in (1, shape[0]):
        for tile in weighted_hopper.TILES:
            found = weighted_hopper.launch_four([g], [x], [factors], parts, tile=tile)[0]
            for choice in WEIGHTED_TILES:
                other = launch_foreach_weighted_parts([g], [x], [factors], parts, tile=choice.tile)[0]
                assert torch.equal(found, other)
    total, exact = found.double().sum(0), weighted_reference(g.double(), x.double(), factors)
    assert float((total - exact).norm() / exact.norm()) < 1e-4


@pytest.mark.gpu
@needs_hopper
def test_gpu_four_matrices_on_hopper_equal_single_ones() -> None:
    pairs = [random_pair((6, 200, p, d), "cuda", torch.bfloat16) for p, d in ((2304, 768), (768, 768), (8, 3000))]
    factors = [factors_of(6, "cuda") * (k + 1) for k in range(3)]
    together = weighted_hopper.launch_four([g for g, _ in pairs], [x for _, x in pairs], factors, 2)
    for total, (g, x), f in zip(together, pairs, factors):
        assert torch.equal(total, weighted_hopper.launch_four([g], [x], [f], 2)[0])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_gpu_keep_on_hopper_stores_bit_for_bit_what_triton_stores(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    g, x = random_pair(shape, "cuda", dtype)
    g[1, 0] = float("nan")
    other = launch_foreach_keep([g], [x], tile=KEEP_TILES[0].tile)[0]
    exact = other.double().flatten(1).square().sum(1)
    finite = torch.arange(shape[0], device="cuda") != 1
    for tile in keep_hopper.TILES:
        stored, parts = keep_hopper.launch_four([g], [x], tile)[0]
        squares = parts.sum(1)
        assert torch.equal(stored[finite], other[finite])
        assert bool(stored[1].isnan().all())
        assert bool(squares[1].isnan())
        assert bool((squares[finite] >= exact[finite]).all())
        assert bool((squares[finite] <= exact[finite] * (1 + 2.0**-14)).all())


@pytest.mark.gpu
@needs_hopper
def test_gpu_keep_of_four_matrices_on_hopper_is_that_of_each_and_has_the_parts_that_tracing_expects() -> None:
    sides = ((2304, 768), (768, 768), (1000, 3072), (50257, 8))
    pairs = [random_pair((6, 200, p, d), "cuda", torch.bfloat16) for p, d in sides]
    gs, xs = [g for g, _ in pairs], [x for _, x in pairs]
    assert keep_hopper.choose_tile(gs, xs) is not None
    together = foreach_keep(gs, xs)
    for stored, parts, g, x in zip(together[:4], together[4:], gs, xs):
        alone = launch_foreach_keep([g], [x], tile=KEEP_TILES[0].tile)
        assert torch.equal(stored, alone[0])
        torch.testing.assert_close(parts.sum(1), alone[1].sum(1), rtol=2.0**-14, atol=0.0)
    with FakeTensorMode() as mode:
        traced = foreach_keep([mode.from_tensor(g) for g in gs], [mode.from_tensor(x) for x in xs])
    assert [out.shape for out in traced] == [out.shape for out in together]


@pytest.mark.gpu
@needs_hopper
def test_gpu_the_gradients_of_a_padded_vocabulary_of_odd_size_and_long_sequences_are_stored_on_hopper() -> None:
    vocabulary, width = 8193, 1024  # 2^23 elements
    g, x = random_pair((2, 2100, vocabulary + 63, width), "cuda", torch.bfloat16)
    g = g[..., :vocabulary]
    record = Pair(g.unsqueeze(1), x.unsqueeze(1), (vocabulary, width))
    assert kernel_stores_faster(record)
    stored = store_gradient(record)
    assert stored.squares is not None
    assert torch.equal(stored.gradient, launch_foreach_keep([g], [x], tile=KEEP_TILES[0].tile)[0])
    exact = stored.gradient.double().flatten(1).square().sum(1)
    assert bool((stored.squares.sum(1) >= exact).all())


@pytest.mark.parametrize(("features", "bytes_per_row"), [(768, 1536), (770, 1540)])
def test_rows_that_tma_cannot_address_are_stored_by_triton(
    monkeypatch: pytest.MonkeyPatch, features: int, bytes_per_row: int
) -> None:
    monkeypatch.setattr(keep_hopper, "runs_hopper", lambda _: True)
    g, x = (torch.empty(200, 1, width, device="meta", dtype=torch.bfloat16) for width in (1024, features))
    assert (keep_hopper.choose_tile([g], [x]) is not None) == (bytes_per_row % 16 == 0)
    assert keep_hopper.choose_tile([g[:2]], [x[:2]]) is None  # too few tiles


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "shape", [(60, 130, 200, 1000), (30, 256, 2304, 768), (20, 500, 768, 3072), (6, 1000, 8, 2056)]
)
def test_gpu_ghost_on_hopper_is_never_below_the_norm_and_near_that_of_triton(shape: tuple[int, ...]) -> None:
    assert ghost_hopper.pays_off(torch.empty(shape[:3], device="meta"))
    g, x = random_pair(shape, "cuda", torch.bfloat16)
    found, other = launch_ghost(g, x), launch_ghost(g, x, tile=GHOST_TILES[0].tile)
    assert bool((found >= direct_reference(g, x)).all())
    assert bool((found >= direct(g, x) * (1 - 2.0**-14)).all())
    torch.testing.assert_close(found, other, rtol=1e-3, atol=0.0)
    worse = g.clone()
    worse[1, shape[1] - 1, 3] = float("nan")
    alone = launch_ghost(worse, x)
    assert alone[1].isnan()
    assert torch.equal(alone[2:], found[2:])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tokens", [1, 127, 129, 257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_ghost_of_several_matrices_on_hopper_is_that_of_each(tokens: int, dtype: torch.dtype) -> None:
    pairs = [random_pair((60, tokens, p, d), "cuda", dtype) for p, d in ((768, 96), (8, 1032), (1280, 1))]
    together = launch_foreach_ghost([g for g, _ in pairs], [x for _, x in pairs])
    for square, (g, x) in zip(together, pairs):
        assert torch.equal(square, launch_ghost(g, x))
        assert bool((square >= direct_reference(g, x)).all())


@pytest.mark.gpu
@needs_hopper
def test_gpu_cancelling_tokens_do_not_understate_the_norm_on_hopper() -> None:
    g, x = random_pair((60, 256, 512, 512), "cuda", torch.bfloat16)
    g[:, 128:], x[:, 128:] = -g[:, :128], x[:, :128]  # the gradient is 0; what is left is rounding
    one_hot = torch.zeros(60, device="cuda")
    found = launch_ghost(g, x)
    for b in range(0, 60, 7):
        one_hot.zero_()[b] = 1
        added = weighted_hopper.launch_four([g], [x], [one_hot], 1)[0].double().square().sum()
        assert found[b] >= added


@pytest.mark.gpu
@needs_hopper
def test_gpu_bodies_for_hopper_repeat_bitwise_and_in_a_graph() -> None:
    g, x = random_pair((60, 256, 2304, 768), "cuda", torch.bfloat16)
    factors = factors_of(60, "cuda")
    runs = [
        lambda: weighted_hopper.launch_four([g], [x], [factors], 2)[0],
        lambda: launch_ghost(g, x),
        lambda: foreach_keep([g], [x])[0],
    ]
    eager = [run() for run in runs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run() for run in runs]
    for _ in range(3):
        for out in captured:
            out.zero_()
        graph.replay()
        for out, first in zip(captured, eager):
            assert torch.equal(out, first)
