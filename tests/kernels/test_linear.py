"""Tests of the linear-layer kernels: the bodies in Triton's interpreter, in float32."""

from __future__ import annotations

from collections.abc import Callable

import fdp_kernels.keep_cpu
import pytest
import torch

pytest.importorskip("triton")

from fdp_kernels.direct import direct, direct_reference, foreach_direct, launch_direct, launch_foreach_direct
from fdp_kernels.ghost import foreach_ghost, ghost, ghost_reference, launch_foreach_ghost, launch_ghost
from fdp_kernels.keep import (
    add_weighted_sum_,
    add_weighted_sum_reference_,
    foreach_keep,
    keep,
    keep_by_matmul,
    keep_reference,
    launch_add_weighted_sum_,
    launch_foreach_keep,
    launch_keep,
    launch_squared_norms,
    launch_weighted_sum,
    squared_norms,
    squared_norms_reference,
    squared_parts,
    weighted_sum,
    weighted_sum_cpu,
    weighted_sum_reference,
)
from fdp_kernels.tile_gemm import Tile, align_rows, widths_and_ends
from fdp_kernels.weighted import (
    foreach_weighted_parts,
    foreach_weighted_parts_reference,
    launch_foreach_weighted,
    launch_foreach_weighted_parts,
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

SHAPES = [(1, 1, 5, 7), (3, 63, 40, 33), (1, 100, 70, 50)]
SMALL = Tile(16, 32, 32, warps=4, stages=2, group=2)
TILES = [None, SMALL, SMALL._replace(per_sm=1)]
GHOST = [None, Tile(16, 16, 32, warps=4, stages=2), Tile(32, 32, 16, warps=4, stages=2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("tile", TILES)
def test_direct_is_the_reference(shape: tuple[int, ...], pair: Callable, tile: Tile | None) -> None:
    g, x = pair(shape)
    found, expected = launch_direct(g, x, tile=tile), direct_reference(g, x)
    assert found.dtype == torch.float64
    rounding = shape[1] * 2.0**-24 * sizes(g, x)  # of a float32 sum over tokens
    assert bool((found.sqrt() >= expected.sqrt() - rounding).all())
    assert bool((found.sqrt() <= expected.sqrt() * (1 + 2.0**-15) + rounding).all())
    if pair is random_pair:
        assert torch.equal(found, launch_direct(g, x, tile=tile))
        assert_rounded_up(found, expected, slack=1e-6)


def test_a_sum_of_squares_is_never_understated() -> None:
    """The float32 sum of equal terms is rounded down at every step, so a norm without the margin fails here."""
    g = torch.ones(1, 1, 64)
    x = torch.full((1, 1, 64), 1 + 2**-12)
    assert_rounded_up(launch_direct(g, x, tile=SMALL), direct_reference(g, x))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", TILES[:2])
def test_weighted_is_the_reference(shape: tuple[int, ...], tile: Tile | None) -> None:
    g, x = random_pair(shape)
    factors = factors_of(shape[0])
    found = launch_weighted(g, x, factors, tile=tile)
    torch.testing.assert_close(found, weighted_reference(g, x, factors), rtol=1e-5, atol=1e-4)
    assert torch.equal(found, launch_weighted(g, x, factors, tile=tile))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("tile", TILES[:2])
def test_what_direct_measures_is_what_weighted_adds(pair: Callable, tile: Tile | None) -> None:
    g, x = pair((3, 63, 40, 33))
    squared = launch_direct(g, x, tile=tile)
    for b, one_hot in enumerate(torch.eye(3)):
        assert_rounded_up(squared[b], launch_weighted(g, x, one_hot, tile=tile).double().square().sum())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about what is tested here
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_with_factor_zero_adds_exactly_zero(bad: float) -> None:
    g, x = random_pair((3, 17, 20, 9))
    factors = factors_of(3)
    factors[1] = 0
    zero, worse = g.clone(), g.clone()
    zero[1], worse[1, 3] = 0, bad
    assert torch.equal(launch_weighted(worse, x, factors), launch_weighted(zero, x, factors))
    assert torch.equal(weighted_reference(worse, x, factors), weighted_reference(zero, x, factors))
    G, G_zero = keep_reference(worse, x)[0], keep_reference(zero, x)[0]
    for sum_by in (launch_weighted_sum, weighted_sum_reference, weighted_sum_cpu):
        assert torch.equal(sum_by(G, factors, torch.float32), sum_by(G_zero, factors, torch.float32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about what is tested here
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nonfinite_sample_shows_in_its_own_norm_only(bad: float) -> None:
    g, x = random_pair((3, 17, 20, 9))
    worse = g.clone()
    worse[1, 16] = bad  # the token beside the next sample's first
    for launch in (launch_direct, launch_ghost, lambda g, x: launch_keep(g, x)[1]):
        good, found = launch(g, x), launch(worse, x)
        assert not found[1].isfinite()
        assert torch.equal(found[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("shape", "tile"), [((1, 1, 5, 7), None), ((1, 70, 40, 1100), None), *(((2, 45, 40, 33), tile) for tile in GHOST)]
)
def test_ghost_is_never_below_what_weighted_adds_and_barely_above(
    shape: tuple[int, ...], pair: Callable, tile: Tile | None
) -> None:
    g, x = pair(shape)
    found, expected = launch_ghost(g, x, tile=tile), direct_reference(g, x)
    assert bool((found >= expected).all())
    assert bool((found >= launch_direct(g, x) / (1 + 2.0**-14)).all())
    slack = 1.1 * 4 / 3 * (shape[-1] + shape[-2] + 10) * 2**-23 * sizes(g, x).square()  # 4/3: half a tile
    assert bool((found <= expected * 1.01 + slack + 1e-30).all())  # 1e-30 for products below 2^-126
    if pair is random_pair:
        assert torch.equal(found, launch_ghost(g, x, tile=tile))
        assert relative(found, expected) < 2e-3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about sums beyond float32, which are infinite
def test_ghost_is_not_below_the_norm_where_a_gram_matrix_underflows() -> None:
    tiny, huge = torch.full((1, 32, 4), 2.0**-75), torch.full((1, 32, 4), 2.0**62)  # tiny tiny^T is 0, tiny^T huge not
    for g, x in ((tiny, huge), (huge, tiny)):
        assert float(launch_direct(g, x)) > 1e-4
        assert bool((launch_ghost(g, x) >= direct_reference(g, x)).all())


def test_ghost_of_tokens_that_cancel_exactly_still_covers_the_rounding() -> None:
    g, x = random_pair((2, 32, 40, 33))
    g[:, 16:], x[:, 16:] = -g[:, :16], x[:, :16]
    found = launch_ghost(g, x)
    assert bool((direct_reference(g, x) < 1e-20).all())
    assert bool((found.sqrt() >= 40 * 2**-24 * sizes(g, x)).all())


@pytest.mark.parametrize("scale", [30.0, 1000.0, 30000.0])
def test_ghost_hardly_overstates_tokens_with_a_large_input_and_a_small_gradient(scale: float) -> None:
    """A first token to which all others attend has such inputs; its own gradient is small."""
    g, x = random_pair((1, 130, 300, 300))
    x[:, 0] *= scale
    g[:, 0] /= scale
    found, expected = launch_ghost(g, x, tile=GHOST[0]), direct_reference(g, x)
    assert bool((found >= expected).all())
    assert relative(found.sqrt(), expected.sqrt()) < 0.01


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ghost_is_infinite_where_the_sum_exceeds_float32() -> None:
    g = torch.zeros(2, 2, 4)
    g[0, :, 1] = 1.5e19
    assert launch_direct(g, g)[0].isinf()
    found = launch_ghost(g, g)
    assert found[0].isinf()
    assert found[1] < 1e-30


def test_ghost_adds_every_term_of_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = 2.0**-9  # so large that every term shows
    monkeypatch.setattr("fdp_kernels.ghost.UNIT", unit)
    g, x = random_pair((2, 45, 40, 33))
    g[:, 30:] *= 5
    A, X = (torch.bmm(z, z.mT) for z in (g.double(), x.double()))
    in_A, in_X = A.diagonal(dim1=1, dim2=2), X.diagonal(dim1=1, dim2=2)
    for tile, rows in zip(GHOST[:2], (64, 16)):
        steps = (40 + 1 + rows // 2, 33 + 1, 45)
        a, b = in_A * (1 + 2 * unit * steps[0]), in_X * (1 + 2 * unit * steps[1])
        size = (a * b).sqrt().sum(1)
        square = (A * X).sum((1, 2)) + unit * (steps[0] * a * in_X + steps[1] * b * in_A).sum(1)
        blocks = [slice(i, i + rows) for i in range(0, 45, rows)]
        for R, S in ((R, S) for R in blocks for S in blocks if R.start >= S.start):  # below the diagonal, twice
            for squares, Z, count in ((a, X, steps[0]), (b, A, steps[1])):
                below = Z.tril(-1)[:, R, S].abs()
                by_rows = squares[:, R].sqrt() * below.norm(dim=2) * squares[:, S].sum(1, keepdim=True).sqrt()
                by_tokens = (a * b)[:, R].sqrt() * (a * b)[:, S].sqrt().sum(1, keepdim=True)
                square += 2 * unit * count * torch.minimum(by_rows, by_tokens).sum(1)
        square += unit**2 * steps[0] * steps[1] * size.square()
        expected = (square.sqrt() + steps[2] * unit * size).square()
        found = launch_ghost(g, x, tile=tile)
        assert bool((found >= expected).all())
        assert relative(found, expected) < 5e-3


@pytest.mark.parametrize("tokens", [1, 45])
def test_ghost_is_never_below_the_norm_when_few_tokens_dominate(tokens: int) -> None:
    """Token norms vary widely within and between tiles, some are zero, and samples have any scale."""
    draw = torch.Generator().manual_seed(tokens)
    for power in (-30, -18, 0, 14):
        g, x = random_pair((4, tokens, 24, 40))
        g *= torch.exp(3 * torch.randn(4, tokens, 1, generator=draw)) * 10.0**power
        x *= torch.exp(3 * torch.randn(4, tokens, 1, generator=draw))
        g[1, tokens // 2 :], g[2, : tokens // 2], x[3, ::2] = 0.0, 0.0, 0.0
        for tile in GHOST if power == 0 else GHOST[2:]:
            found, expected = launch_ghost(g, x, tile=tile).sqrt(), direct_reference(g, x).sqrt()
            assert bool((found >= expected).all())
            least = 1e-30 + 1e-15 * sum(z.double().norm(dim=-1).sum(1) for z in (g, x))  # for products below 2^-126
            assert bool((found <= 1.001 * expected + 1e-4 * sizes(g, x) + least).all())


@pytest.mark.parametrize(
    ("matrices", "expected"),
    [
        (1, [5, 5, 5, 5, 7, 7, 7, 7, 3, 3, 3]),
        (2, [5, 6, 5, 5, 7, 8, 7, 7, 3, 7, 7]),
        (4, [5, 6, 7, 8, 7, 8, 9, 10, 3, 7, 12]),
    ],
)
def test_padded_matrices_have_no_programs(matrices: int, expected: list[int]) -> None:
    gs, xs = ([torch.zeros(1, 1, first + k) for k in range(matrices)] for first in (5, 7))
    assert widths_and_ends(gs, xs, [3 + k for k in range(matrices)]) == expected


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about what is tested here
def test_foreach_kernels_equal_single_calls() -> None:
    """Five matrices, so that one launch is not enough, in no order of size."""
    pairs = [random_pair((2, 20, p, d)) for p, d in ((20, 33), (7, 40), (40, 36), (33, 20), (1, 1))]
    gs, xs = [g for g, _ in pairs], [x for _, x in pairs]
    factors = [factors_of(2) * (k + 1) for k in range(5)]
    factors[2][1] = 0.0
    xs[2][1] = torch.nan
    for tile in (None, SMALL._replace(columns=16)):
        many = launch_foreach_ghost(gs, xs, tile=tile)
        assert many.shape == (5, 2)
        for n, g, x in zip(many, gs, xs):
            torch.testing.assert_close(n, launch_ghost(g, x, tile=tile), rtol=0, atol=0, equal_nan=True)
    for tile in TILES:
        for n, g, x in zip(launch_foreach_direct(gs, xs, tile=tile), gs, xs, strict=True):
            torch.testing.assert_close(n, launch_direct(g, x, tile=tile), rtol=1e-14, atol=0, equal_nan=True)
        stored = launch_foreach_keep(gs, xs, tile=tile)
        assert len(stored) == 10
        for G, parts, g, x in zip(stored[:5], stored[5:], gs, xs):
            single, squares = launch_keep(g, x, tile=tile)
            torch.testing.assert_close(G, single, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(parts.sum(1), squares.sum(1), rtol=1e-12, atol=0, equal_nan=True)
    for tile in TILES[:2]:
        for total, g, x, f in zip(launch_foreach_weighted(gs, xs, factors, tile=tile), gs, xs, factors):
            assert torch.equal(total, launch_weighted(g, x, f, tile=tile))
            torch.testing.assert_close(total, weighted_reference(g, x, f), rtol=1e-5, atol=1e-5)


def test_parts_of_a_weighted_sum_are_the_sums_of_their_samples() -> None:
    pairs = [random_pair((6, 20, *side)) for side in ((40, 33), (17, 70))]
    gs, xs = [g for g, _ in pairs], [x for _, x in pairs]
    factors = [factors_of(6) * (k + 1) for k in range(2)]
    factors[1][4] = 0.0
    gs[1][4] = torch.nan
    for parts in (1, 2, 3):
        found = launch_foreach_weighted_parts(gs, xs, factors, parts, tile=TILES[0])
        for total, g, x, f in zip(found, gs, xs, factors, strict=True):
            alone = [launch_weighted(*of, tile=TILES[0]) for of in zip(g.chunk(parts), x.chunk(parts), f.chunk(parts))]
            assert torch.equal(total, torch.stack(alone))
        for total, expected in zip(found, foreach_weighted_parts_reference(gs, xs, factors, parts), strict=True):
            torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="expected a divisor of the number of samples, got 4"):
        launch_foreach_weighted_parts(gs, xs, factors, 4)


def test_ghost_reference_is_the_squared_norm() -> None:
    g, x = random_pair((3, 63, 40, 33))
    assert relative(ghost_reference(g, x), direct_reference(g, x)) < 1e-9
    assert bool((ghost_reference(g, x) >= direct_reference(g, x) * (1 - 1e-15)).all())


@pytest.mark.parametrize("shape", [*SHAPES, (3, 40, 33, 40)])  # the last has rows that a descriptor can store
@pytest.mark.parametrize("tile", TILES)
def test_keep_is_the_reference_and_measures_the_stored_numbers(shape: tuple[int, ...], tile: Tile | None) -> None:
    for pair in PAIRS:
        g, x = pair(shape)
        (G, parts), expected = launch_keep(g, x, tile=tile), keep_reference(g.double(), x.double())[0]
        assert bool(((G - expected).flatten(1).norm(dim=1) <= 1e-5 * sizes(g, x)).all())
        assert_rounded_up(parts.sum(1), squared_norms_reference(G))
        assert torch.equal(G, launch_keep(g, x, tile=tile)[0])


def test_keep_measures_after_rounding() -> None:
    g, x = random_pair((2, 20, 40, 33), dtype=torch.float16)  # the interpreter has no bfloat16
    G, parts = launch_keep(g, x, tile=SMALL)
    assert G.dtype == torch.float16
    assert_rounded_up(parts.sum(1), squared_norms_reference(G))
    # Every sum is 1 + 3/4 ulp and is stored as 1 + 1 ulp: the norm before rounding is 2^-12 lower.
    x = torch.tensor([1.0, 0.75 * 2**-10], dtype=torch.float16).view(1, 2, 1).expand(1, 2, 33).contiguous()
    G, parts = launch_keep(torch.ones(1, 2, 40, dtype=torch.float16), x, tile=SMALL)
    assert bool((G == 1 + 2**-10).all())
    assert_rounded_up(parts.sum(1), squared_norms_reference(G))


@pytest.mark.parametrize("shape", [(1, 1), (3, 33000), (2, 7, 11), (5, 64, 32), (130, 70)])
def test_norms_and_weighted_sums_of_stored_gradients(shape: tuple[int, ...]) -> None:
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    factors = factors_of(shape[0])
    assert relative(launch_squared_norms(G), squared_norms_reference(G)) < 1e-13
    for dtype in (torch.float32, torch.float64):
        expected = weighted_sum_reference(G, factors.to(dtype), dtype)
        torch.testing.assert_close(launch_weighted_sum(G, factors.to(dtype), dtype), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("samples", [1, 2, 63, 64, 65, 128, 129])
def test_a_weighted_sum_of_small_gradients_has_every_sample_once(samples: int) -> None:
    # Many samples are read at a time: each element must get 2^b of sample b alone, and nothing of a sample left out.
    exponents = torch.arange(samples, dtype=torch.float64) % 32
    G, factors = torch.ones(samples, 37), 2.0**exponents
    left_out = samples // 2
    G[left_out], factors[left_out] = torch.nan, 0.0
    onto = torch.full((37,), 3.0, dtype=torch.float64)
    launch_add_weighted_sum_(onto, G, factors)
    assert torch.equal(onto, torch.full_like(onto, 3.0 + float(factors.sum())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weighted_sum_is_added_in_place(dtype: torch.dtype) -> None:
    G, factors = torch.randn(3, 37), torch.tensor([0.5, 0.0, 1.5], dtype=torch.float64)
    G[1] = torch.nan  # not read
    before = torch.randn(37, dtype=dtype)
    expected = weighted_sum_reference(G, factors, dtype, before)
    for add in (launch_add_weighted_sum_, add_weighted_sum_reference_, add_weighted_sum_):
        onto = before.clone()
        add(onto, G, factors)
        torch.testing.assert_close(onto, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("padding", [[], [4, 5], [0], [0, 1, 5], [2], [0, 2, 5], list(range(6))])
def test_a_cpu_leaves_out_rows_with_factor_zero_wherever_they_are(padding: list[int]) -> None:
    G, factors = torch.randn(6, 3, 5), factors_of(6)
    factors[padding] = 0
    expected = torch.tensordot(factors.double(), G.double(), dims=1)
    G[padding] = float("nan")
    torch.testing.assert_close(weighted_sum_cpu(G, factors, torch.float64), expected, rtol=1e-14, atol=1e-14)


def test_a_weighted_sum_is_added_to_another_and_rounded_once() -> None:
    G, factors = torch.randn(3, 2000, generator=torch.Generator().manual_seed(0)), factors_of(3)
    G[1], factors[1] = torch.nan, 0.0
    before = torch.full((2000,), 1e6, dtype=torch.float64)
    for sum_by in (launch_weighted_sum, weighted_sum_reference, weighted_sum_cpu):
        wide, single = sum_by(G, factors, torch.float64, before), sum_by(G, factors, torch.float64)
        torch.testing.assert_close(wide - before, single, rtol=0, atol=1e-9)
        # At 1e6 a float32 ulp is 1/16: a sum rounded before it is added would be off by more than half an ulp.
        narrow = sum_by(G, factors, torch.float32, before.float())
        assert torch.equal(narrow, (before + single).float())
    with pytest.raises(ValueError, match="to add to"):
        weighted_sum(G, factors, torch.float64, before[:5])


def test_keep_in_bfloat16_measures_the_rounded_gradients() -> None:
    g, x = random_pair((2, 9, 8, 8), dtype=torch.bfloat16)
    G, parts = keep(g, x)
    assert G.dtype == torch.bfloat16
    assert relative(parts.sum(1), G.double().square().sum((1, 2))) < 1e-14
    assert relative(keep_by_matmul(g, x)[1].sum(1), parts.sum(1)) < 2e-2


def test_views_of_larger_tensors_and_odd_widths() -> None:
    g, x = random_pair((3, 20, 24, 17))
    wide_g, wide_x = g.new_full((3, 25, 40), 7.0), x.new_full((3, 25, 24), 7.0)
    wide_g[:, :20, 4:28], wide_x[:, :20, :17] = g, x
    views = wide_g[:, :20, 4:28], wide_x[:, :20, :17]
    assert align_rows(views[0]) is views[0]
    assert align_rows(x).stride(1) == 20  # a descriptor cannot address rows of 17 floats, but can address a padded copy
    assert torch.equal(launch_direct(*views), launch_direct(g, x))
    for odd in (g.transpose(0, 1).contiguous().transpose(0, 1), g[:, :1].expand(3, 20, 24), g.mT.contiguous().mT):
        assert torch.equal(launch_direct(odd, x), launch_direct(odd.contiguous(), x))
    assert torch.equal(launch_ghost(*views), launch_ghost(g, x))


def test_float64_is_the_reference_and_empty_is_zero() -> None:
    g, x = (z.double() for z in random_pair((2, 5, 4, 3)))
    assert torch.equal(launch_direct(g, x), direct_reference(g, x))
    assert launch_weighted(g, x, factors_of(2)).dtype == torch.float64
    g, x = torch.zeros(0, 5, 4), torch.zeros(0, 5, 3)
    assert launch_direct(g, x).shape == (0,)
    assert torch.equal(launch_weighted(g, x, torch.zeros(0)), torch.zeros(4, 3))


def test_bad_arguments_are_named() -> None:
    g, x = random_pair((2, 5, 4, 3))
    with pytest.raises(ValueError, match="expected g"):
        direct(g, x[:, :4])
    with pytest.raises(ValueError, match="factors"):
        weighted(g, x, torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="equal samples"):
        foreach_ghost([g, g[:, :4]], [x, x[:, :4]])
    with pytest.raises(ValueError, match="as many g as x"):
        launch_foreach_keep([g], [])
    with pytest.raises(ValueError, match="square tile"):
        launch_ghost(g, x, tile=SMALL)
    with pytest.raises(ValueError, match="weighted_sum"):
        weighted_sum(g, torch.ones(2), torch.bfloat16)


def test_ops() -> None:
    g, x = random_pair((2, 5, 4, 3))
    factors = factors_of(2)
    for op, arguments in (
        (direct, (g, x)),
        (ghost, (g, x)),
        (keep, (g, x)),
        (squared_norms, (g,)),
        (weighted_sum, (g, factors, torch.float64)),
        (weighted_sum, (g, factors, torch.float64, g[0].double())),
        (weighted, (g, x, factors)),
        (foreach_direct, ([g, x], [x, g])),
        (foreach_ghost, ([g, x], [x, g])),
        (foreach_keep, ([g, x], [x, g])),
        (foreach_weighted_parts, ([g, x], [x, g], [factors, factors], 1)),
    ):
        torch.library.opcheck(op.default, arguments)


def test_stored_gradients_measured_and_summed_a_few_samples_at_a_time_give_the_same(monkeypatch) -> None:
    G, factors = torch.randn(7, 5, 11), factors_of(7).double()
    G[2], factors[2] = float("nan"), 0
    onto = torch.randn(5, 11, dtype=torch.float64)
    norms, parts = squared_norms_reference(G), squared_parts(G)
    sums = [weighted_sum_reference(G, factors, torch.float64, before) for before in (None, onto)]
    for at_once in (1, 110, 10_000):  # one sample, two, all
        for limit in ("WIDE_ELEMENTS", "SUM_ELEMENTS"):
            monkeypatch.setattr(fdp_kernels.keep_cpu, limit, at_once)
        assert torch.equal(squared_norms(G).isnan(), norms.isnan())
        torch.testing.assert_close(squared_norms(G), norms, rtol=1e-14, atol=0, equal_nan=True)
        torch.testing.assert_close(squared_parts(G), parts, rtol=1e-14, atol=0, equal_nan=True)
        for before, expected in zip((None, onto), sums):
            torch.testing.assert_close(
                weighted_sum(G, factors, torch.float64, before), expected, rtol=1e-13, atol=1e-14
            )
