"""Tests of gradients stored in 8 bits: the norm is exactly that of what is stored, and that is what the sum adds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fdp_kernels import keep_hopper, sum_hopper
from fdp_kernels.keep_int8 import (
    COLUMNS,
    can_keep_int8,
    foreach_keep_int8,
    foreach_sum_int8,
    foreach_sum_int8_reference,
    keep_int8,
    launch_foreach_sum_int8,
    round_to_int8,
    widen_int8,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.linear_pairs import (
    PAIRS,
    _set_up,  # noqa: F401  an autouse fixture
    factors_of,
    random_pair,
)

SHAPES = [(1, 1, 1, 16), (3, 5, 7, 144), (70, 3, 33, 256), (2, 9, 20, 272)]
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
)


def awkward(shape: tuple[int, ...] = (2, 6, 144)) -> Tensor:
    """Return gradients with rows of zeros, of one size, just below a power of two, and across all of float32."""
    G = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    G[0, 0], G[0, 1], G[0, 2] = 0.0, 1.0, 127.6 / 128
    G[0, 3] *= 1e-38
    G[0, 4] *= 1e37
    G[1, 0, ::2] = 1e-30
    return G


def test_numbers_are_rounded_by_a_127th_of_the_largest_that_shares_their_exponent() -> None:
    for G in (awkward(), torch.randn(3, 40, 300), torch.rand(2, 3, 16)):
        q, e, _ = round_to_int8(G)
        blocks = torch.nn.functional.pad(G, (0, -G.shape[2] % COLUMNS)).unflatten(2, (-1, COLUMNS))
        largest = blocks.abs().amax(-1, keepdim=True).expand_as(blocks).flatten(2)[..., : G.shape[2]]
        assert int(q.abs().max()) <= 127
        assert bool(((widen_int8(q, e) - G).abs() <= largest / 127 + 2.0**-126).all())
    G = torch.randn(8, 500, 1024)
    q, e, _ = round_to_int8(G)
    assert float((widen_int8(q, e) - G).norm() / G.norm()) < 0.01


def test_a_gradient_is_rounded_by_9_percent_of_its_norm_at_most() -> None:
    G = torch.full((1, 2, COLUMNS), 0.499)
    G[..., 0] = 63.51
    for of in (G, torch.randn(1, 9, 144), torch.randn(1, 9, 144) ** 5):
        q, e, _ = round_to_int8(of)
        assert float((widen_int8(q, e) - of).norm() / of.norm()) < 0.09


def test_the_norm_is_exactly_that_of_the_stored_numbers() -> None:
    for G in (awkward(), 1e-17 * torch.randn(3, 40, 300), 1e17 * torch.randn(2, 70, 144)):
        q, e, squares = round_to_int8(G)
        exact = widen_int8(q, e).double().square().sum((1, 2))
        torch.testing.assert_close(squares, exact, rtol=1e-15, atol=0.0)


def test_the_sum_of_the_squares_of_integers_that_share_an_exponent_is_exact_in_float32() -> None:
    assert COLUMNS * 127**2 < 2**24


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_has_a_norm_that_is_not_and_adds_nothing(bad: float) -> None:
    g, x = random_pair((3, 4, 20, 32))
    g[1, 2, 3] = bad
    q, e, parts = keep_int8(g, x)
    assert not parts[1].sum().isfinite()
    assert bool(parts[::2].sum(1).isfinite().all())
    factors = torch.tensor([0.5, 0.0, 2.0])
    expected = 0.5 * widen_int8(q, e)[0] + 2.0 * widen_int8(q, e)[2]
    for sums in (foreach_sum_int8_reference, launch_foreach_sum_int8):
        torch.testing.assert_close(sums([q], [e], [factors], 64)[0][0], expected, rtol=1e-6, atol=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("bad", [3.4e38, -3.4e38, 255 * 2.0**120])
def test_the_largest_numbers_round_to_one_that_float32_has_not_and_add_nothing_without_a_factor(bad: float) -> None:
    G = torch.randn(2, 3, 144)
    G[0, 1, 5] = bad
    q, e, squares = round_to_int8(G)
    wide = widen_int8(q, e, torch.float64)
    assert float(wide[0, 1, 5].abs()) == 2.0**128
    torch.testing.assert_close(squares, wide.square().sum((1, 2)), rtol=1e-15, atol=0.0)
    for sums in (foreach_sum_int8_reference, launch_foreach_sum_int8):
        for factors in (torch.tensor([0.0, 1.0]), torch.tensor([2.0**-100, 0.0])):
            expected = torch.tensordot(factors.double(), wide, dims=1)
            torch.testing.assert_close(sums([q], [e], [factors], 2)[0][0].double(), expected, rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=pytest.mark.long if shape[0] == 70 else ()) for shape in SHAPES]
)
def test_no_sample_adds_more_than_the_norm_that_was_measured(shape: tuple[int, ...], pair) -> None:
    g, x = pair(shape)
    q, e, parts = keep_int8(g, x)
    for b in range(min(shape[0], 3)):
        one = torch.nn.functional.one_hot(torch.tensor(b), shape[0]).float()
        for sums in (foreach_sum_int8_reference, launch_foreach_sum_int8):
            added = sums([q], [e], [one], shape[0])[0].double().square().sum()
            torch.testing.assert_close(added, parts[b].sum(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_kernel_sums_every_part_of_several_matrices(size: int) -> None:
    shapes = [(5, 3, 7, 144), (5, 3, 33, 16), (5, 3, 16, 128), (5, 3, 1, 272), (5, 3, 4, 32)]
    qs, es, factors = [], [], []
    for k, shape in enumerate(shapes):
        q, e, _ = keep_int8(*random_pair(shape))
        qs, es, factors = [*qs, q], [*es, e], [*factors, factors_of(5) * (k + 1)]
    found = launch_foreach_sum_int8(qs, es, factors, size)
    for total, expected in zip(found, foreach_sum_int8_reference(qs, es, factors, size)):
        assert total.shape == expected.shape == (-(-5 // size), *total.shape[1:])
        scale = float(expected.abs().max())
        torch.testing.assert_close(total, expected, rtol=0.0, atol=scale * 5 * 2.0**-23)


def test_what_a_sample_stores_does_not_depend_on_those_beside_it() -> None:
    g, x = random_pair((4, 6, 20, 144))
    q, e, parts = keep_int8(g, x)
    few = keep_int8(g[1:3], x[1:3])
    for whole, part in zip((q, e, parts), few):
        assert torch.equal(whole[1:3], part)


def test_shapes_are_those_that_tracing_expects() -> None:
    pairs = [random_pair(shape) for shape in ((5, 3, 7, 144), (5, 3, 200, 16))]
    gs, xs = [g for g, _ in pairs], [x for _, x in pairs]
    real = foreach_keep_int8(gs, xs)
    with FakeTensorMode() as mode:
        traced = foreach_keep_int8([mode.from_tensor(g) for g in gs], [mode.from_tensor(x) for x in xs])
        sums = foreach_sum_int8(traced[:2], traced[2:4], [mode.from_tensor(factors_of(5))] * 2, 2)
    assert [(out.shape, out.dtype) for out in traced] == [(out.shape, out.dtype) for out in real]
    assert [out.shape for out in sums] == [(3, 7, 144), (3, 200, 16)]


def test_operands_that_do_not_fit_are_refused() -> None:
    q, e, _ = keep_int8(*random_pair((2, 3, 4, 144)))
    factors = torch.ones(2)
    for wrong in (
        ([q], [e[..., :1]], [factors], 2),
        ([q], [e], [factors[:1]], 2),
        ([q.int()], [e], [factors], 2),
        ([q], [e], [factors.double()], 2),
        ([q], [e], [factors], 0),
        ([], [], [], 2),
    ):
        with pytest.raises(ValueError, match="sum_int8"):
            foreach_sum_int8_reference(*wrong)


def wide_ranges(shape: tuple[int, int, int], device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Return integers, exponents and factors of gradients of very different sizes, some of whose factors are 0."""
    generator = torch.Generator().manual_seed(5)
    samples, rows, _ = shape
    sizes = torch.exp(8 * torch.randn(samples, rows, 1, generator=generator))
    q, e, _ = round_to_int8(torch.randn(shape, generator=generator) * sizes)
    factors = factors_of(samples) * torch.exp(3 * torch.randn(samples, generator=generator))
    factors[2::5] = 0
    return q.to(device), e.to(device), factors.to(device)


@pytest.mark.parametrize("samples", [1, 2, 3, 8, 64])
def test_weights_of_the_body_for_hopper_are_rounded_within_the_slack(samples: int) -> None:
    q, e, factors = wide_ranges((samples, 40, 256))
    scaled = factors[:, None, None].double() * widen_int8(q, e, torch.float64)
    bound = float(scaled.flatten(1).norm(dim=1).max())
    moved = float((sum_hopper.sum_reference(q, e, factors).double() - scaled.sum(0)).norm())
    assert moved <= 2.0**-24 * (0.4 * samples**1.5 + samples) * bound
    assert moved <= 2.0**-24 * (samples**2 / 2 + 2 * samples) * bound  # the slack that the accounting knows


def test_the_slack_of_weights_holds_for_the_worst_block() -> None:
    """A sample of one large integer makes the unit coarse for others, of which all integers are large."""
    q = torch.full((64, 1, COLUMNS), 127, dtype=torch.int8)
    q[0] = 0
    q[0, 0, 0] = 63
    e = torch.zeros(64, 1, 1, dtype=torch.int8)
    weights = torch.full((64,), (1 + 0.5) * 2.0**-29)  # a half, always rounded up
    weights[0] = 1.0
    exact = torch.tensordot(weights.double(), q.double(), dims=1)
    moved = float((sum_hopper.sum_reference(q, e, weights).double() - exact).norm())
    assert 63 * 127 * COLUMNS**0.5 * 2.0**-30 * 0.9 < moved < 2.0**-24 * (0.4 * 64**1.5 + 64) * 63


def test_the_body_for_hopper_adds_a_sample_without_factor_as_zero_and_hides_no_factor_that_is_not_finite() -> None:
    q, e, factors = wide_ranges((6, 40, 256))
    factors[1] = 0
    without = [b for b in range(6) if b != 1]
    alone = sum_hopper.sum_reference(q[without], e[without], factors[without])
    assert torch.equal(sum_hopper.sum_reference(q, e, factors), alone)
    for bad in (float("nan"), float("inf")):
        factors[1] = bad
        assert not bool(sum_hopper.sum_reference(q, e, factors).isfinite().any())


GPU_SHAPES = [(6, 256, 2304, 768), (5, 100, 1000, 2064), (7, 65, 50264, 96), (3, 1, 1536, 1536), (70, 130, 200, 144)]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_gpu_body_stores_rounded_what_keep_computes_and_measures_it_exactly(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    g, x = random_pair(shape, "cuda", dtype)
    g[2] *= 1e-3
    g[1, 0] = float("nan")
    assert can_keep_int8(g, x)
    q, e, parts = keep_int8(g, x)
    stored, finite = widen_int8(q, e).double(), torch.arange(shape[0], device="cuda") != 1
    exact = torch.bmm(g.double().mT, x.double())
    error = (stored - exact)[finite].flatten(1).norm(dim=1) / exact[finite].flatten(1).norm(dim=1)
    assert float(error.max()) < 0.012
    squares = parts.sum(1)
    torch.testing.assert_close(squares[finite], stored[finite].flatten(1).square().sum(1), rtol=1e-12, atol=0.0)
    assert bool(squares[1].isnan())
    blocks = torch.nn.functional.pad(stored, (0, -shape[3] % COLUMNS)).unflatten(2, (-1, COLUMNS))
    largest = torch.ldexp(torch.full_like(e, 127.5, dtype=torch.float64), e.int())
    assert bool((blocks.abs().amax(-1) < largest)[finite].all())
    factors = factors_of(shape[0], "cuda")
    factors[1] = 0
    for size in (64, shape[0], 2):
        total = launch_foreach_sum_int8([q], [e], [factors], size)[0].double().sum(0)
        expected = torch.tensordot(factors.double(), stored * finite[:, None, None], dims=1)
        assert float((total - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("samples", [1, 7, 8, 13, 64, 150])
def test_gpu_sum_is_the_one_of_integer_weights_bit_for_bit(samples: int) -> None:
    shapes = [(samples, 768, 768), (samples, 1, 512), (samples, 37, 128), (samples, 50, 3072), (samples, 9, 128)]
    qs, es, factors = zip(*(wide_ranges(shape, "cuda") for shape in shapes))
    for size in (64, 24, 5):
        assert all(sum_hopper.can_sum(q, size) for q in qs)
        found = launch_foreach_sum_int8(list(qs), list(es), list(factors), size)
        for total, q, e, factor in zip(found, qs, es, factors):
            parts = zip(q.split(size), e.split(size), factor.split(size))
            assert torch.equal(total, torch.stack([sum_hopper.sum_reference(*part) for part in parts]))


@pytest.mark.gpu
@needs_hopper
def test_gpu_sum_takes_other_matrices_with_the_triton_body_and_hides_no_factor_that_is_not_finite() -> None:
    q, e, factors = wide_ranges((70, 20, 256), "cuda")
    assert not sum_hopper.can_sum(q, 70)
    assert not sum_hopper.can_sum(q[:, :, :144], 64)
    assert not sum_hopper.can_sum(q[:, :1, :128], 64)
    exact = torch.tensordot(factors.double(), widen_int8(q, e, torch.float64), dims=1)
    for size in (70, 64):
        total = launch_foreach_sum_int8([q], [e], [factors], size)[0].double().sum(0)
        assert float((total - exact).norm() / exact.norm()) < 1e-6
    factors[3] = float("nan")
    for size in (70, 64):
        assert not bool(launch_foreach_sum_int8([q], [e], [factors], size)[0][0].isfinite().any())


@pytest.mark.gpu
@needs_hopper
def test_gpu_several_matrices_store_what_each_stores_alone_and_in_a_graph() -> None:
    sides = ((2304, 768), (768, 768), (1000, 3072), (50257, 16), (768, 3072))
    pairs = [random_pair((6, 200, p, d), "cuda", torch.bfloat16) for p, d in sides]
    gs, xs, count = [g for g, _ in pairs], [x for _, x in pairs], len(sides)
    together = foreach_keep_int8(gs, xs)
    factors = [factors_of(6, "cuda")] * count
    sums = foreach_sum_int8(together[:count], together[count : 2 * count], factors, 64)
    for k in range(count):
        alone = keep_int8(gs[k], xs[k])
        for one, of in zip(alone, together[k::count]):
            assert torch.equal(one, of)
        assert torch.equal(foreach_sum_int8([alone[0]], [alone[1]], factors[:1], 64)[0], sums[k])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = foreach_keep_int8(gs, xs)
        again = foreach_sum_int8(captured[:count], captured[count : 2 * count], factors, 64)
    for out in (*captured, *again):
        out.zero_()
    graph.replay()
    for out, first in zip((*captured, *again), (*together, *sums)):
        assert torch.equal(out, first)


@pytest.mark.gpu
@needs_hopper
def test_gpu_few_samples_store_what_many_store() -> None:
    """Check that what a sample adds does not depend on the size of its microbatch."""
    g, x = random_pair((40, 130, 768, 768), "cuda", torch.bfloat16)
    whole = keep_int8(g, x)
    for few in (1, 2, 5):
        for one, of in zip(keep_int8(g[:few], x[:few]), whole):
            assert torch.equal(one, of[:few])


def test_only_aligned_rows_in_half_precision_on_a_hopper_gpu_are_stored_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g, x = random_pair((2, 3, 4, 144))
    assert not can_keep_int8(g, x)
    monkeypatch.setattr("fdp_kernels.keep_int8.runs_hopper", lambda _: True)
    assert can_keep_int8(g, x)
    assert not can_keep_int8(g, x[..., :136])
    assert not can_keep_int8(g[:0], x[:0])


def test_a_tile_has_two_blocks_of_columns_that_share_an_exponent() -> None:
    assert keep_hopper.INT8_TILE.columns == 2 * COLUMNS
