"""Per-sample squared norms of a linear layer's weight gradient from Gram matrices, never understated.

    |G_b|^2 = sum_{t,s} A_ts X_ts,   A = g_b g_b^T,  X = x_b x_b^T    g (B, T, P), x (B, T, D)  ->  n (B,) float64

(Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679.) A and X are symmetric: only tiles on and below
the diagonal are made, both in registers, float32, multiplied and summed there: B T^2 (P + D) (1 + tile/T) flops.

    >>> n = ghost(g, x)                                          # for T below about 2PD / (P + D)
    >>> factors = (C / n.sqrt()).clamp(max=1).float()
    >>> total = weighted(g, x, factors)

``many_ghosts`` takes several matrices, four in a launch: on an H200, of a block of GPT-2-Large with 4 x 512 tokens, in
57 us, one by one 145.

    >>> n = many_ghosts([g, h], [x, y])                          # (2, B)

Tokens may cancel: |G_b| can be far below the terms it is the sum of, and what rounding took from a Gram matrix in
float32 can be all of it. So the worst that rounding can do is added. With u = 2^-23, a_t = |g_t|, b_t = |x_t|:

  1. A sum of K products in a tensor core loses at most ``c u sum_k |y_k z_k| <= c u |y| |z|``. It adds m exact
     products and the accumulator at a time, each cut to 24 bits or more at the largest one's exponent, and cuts the
     result (Khattak & Mikaitis 2025, arXiv 2512.07004): m + 2 units a step, c = K (m + 2) / m, so c = 5/4 K, with K
     rounded up to 16, holds for m = 8 and more (Ampere, Hopper). Cut into n chunks of L, each with an accumulator of
     its own: c_K = 5/4 L + n. (Float32 operands are multiplied and added one by one: c = K covers it twice.)
  2. Hence, from the computed A and X, for every t, s
     ``|A X - exact| <= u (c_P a_t a_s |X_ts| + c_D b_t b_s |A_ts|) + c_P c_D u^2 a_t a_s b_t b_s``
     and the sum of that is added to the squared norm. (With Gram matrices in it, it is on ordinary data some sqrt(D)
     times smaller than ``(c_P + c_D) u (sum_t a_t b_t)^2``.)
  3. The squares of a and b are the diagonals of A and X: sums of squares, of which rounding takes a part c u at most. A
     tile that is not on the diagonal does not know them; it leaves the sums of its rows and columns, r_t = sum_s |X_ts|
     and k_s = sum_t |X_ts|, and ``sum a_t a_s |X_ts| <= sqrt(sum_t a_t^2 r_t) sqrt(sum_s a_s^2 k_s)`` (Cauchy and
     Schwarz; no more than the sum itself where tokens are of one size).
  4. ``weighted`` sums T products in the same way, without chunks, and so adds not G_b but ``G_b + E_b`` with
     ``|E_b| <= 5/4 T u sum_t a_t b_t``: that is added to the norm.

Products below 2^-126, which float32 drops, take K 2^-126 from an entry at most: c_K u floor with ``floor = K 2^-126 /
(c_K u)``, and a_t^2 + floor in place of a_t^2 covers it, as ``(a_t^2 + floor) (a_s^2 + floor) >= (a_t a_s + floor)^2``.

On independent random tokens with P = D = 1280 the norm is overstated by 0.3 % at T = 512 (0.1 % by 2., 0.2 % by 4.),
0.7 % at T = 1024, 1.8 % at T = 2048, hardly more for a vocabulary of 50257, less where tokens have something in common.

Guarantees:
  - at least the squared norm of what ``weighted`` adds for the sample before its factor, whatever the sample holds
    (what ``weighted`` itself drops, of products below 2^-126, is not in it);
  - a sample with a NaN or infinite token has a NaN or infinite norm, and no other sample has, but one with a token
    above 1e18, whose products float32 does not hold.

Letters: B samples, T tokens, P output features, D input features; R a tile's tokens on either side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import (
    Row,
    Tile,
    aligned,
    check_pair,
    check_pairs,
    choose,
    chunks_of,
    described,
    filled,
    fours,
    inner,
    launchable,
    pick,
    tiles,
)

TILES = (
    Row(100, Tile(128, 128, 64, warps=8, stages=4)),
    Row(0, Tile(64, 64, 64, warps=4, stages=4)),
)
"""Square ones; counted are tiles on and below the diagonal of all samples and matrices."""
UNIT = 2.0**-23
SLACK = 1.001
"""Covers the bound's own float32 rounding and the squares of ``c u`` left out of step 1."""
CHUNK = 1024
"""Features that go into one accumulator."""
BLOCK = 256
"""Tiles that are added up at a time."""


def rounding_steps(depth: int, dtype: torch.dtype) -> float:
    """How many units 2^-23 of the sum of their sizes a float32 sum of ``depth`` products can lose."""
    return float(depth) if dtype == torch.float32 else 1.25 * 16 * tiles(depth, 16)


def ghost_reference(g_BTP: Tensor, x_BTD: Tensor) -> Tensor:
    """In float64, with the bound for float64: ``(T + P + D) eps (sum_t |g_t| |x_t|)^2``."""
    check_pair(g_BTP, x_BTD)
    g, x = g_BTP.double(), x_BTD.double()
    square = (torch.bmm(g, g.mT) * torch.bmm(x, x.mT)).sum((1, 2)).clamp_min(0)
    size = (torch.linalg.vector_norm(g, dim=-1) * torch.linalg.vector_norm(x, dim=-1)).sum(1)
    return square + (g.shape[1] + g.shape[2] + x.shape[2]) * torch.finfo(torch.float64).eps * size.square()


def many_ghosts_reference(gs: list[Tensor], xs: list[Tensor]) -> Tensor:
    """:func:`ghost_reference` of each: (matrices, B)."""
    check_pairs(gs, xs)
    return torch.stack([ghost_reference(g, x) for g, x in zip(gs, xs)])


# ---------------------------------------------------------------- bodies


@jit
def _row_and_column(pair):
    """Of the pair-th tile on or below the diagonal, row by row. The root is within one; integers make it exact."""
    i = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > pair, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= pair, i + 1, i)
    return i, pair - i * (i + 1) // 2


@jit
def _store_sums(z_RR, out_ptr, R: tl.constexpr):
    """Of the sizes in its rows and in its columns."""
    tl.store(out_ptr + tl.arange(0, R), tl.sum(tl.abs(z_RR), 1))
    tl.store(out_ptr + R + tl.arange(0, R), tl.sum(tl.abs(z_RR), 0))


@jit
def _ghost_body(
    g0, g1, g2, g3, x0, x1, x2, x3, p0, p1, p2, p3, d0, d1, d2, d3,
    units_p0, units_p1, units_p2, units_p3, units_d0, units_d1, units_d2, units_d3,
    tile_ptr, sum_ptr, token_ptr, row_ptr, batch, tokens, pairs,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    use, sample = index // (batch * pairs), index // pairs % batch
    i, j = _row_and_column(index % pairs)
    p, d = pick(use, p0, p1, p2, p3), pick(use, d0, d1, d2, d3)
    A_RR = inner(pick(use, g0, g1, g2, g3), sample, i, j, p, BLOCK_R, BLOCK_K, CHUNK)
    X_RR = inner(pick(use, x0, x1, x2, x3), sample, i, j, d, BLOCK_R, BLOCK_K, CHUNK)

    t = i * BLOCK_R + tl.arange(0, BLOCK_R)
    s = j * BLOCK_R + tl.arange(0, BLOCK_R)
    if i == j:
        units_p = pick(use, units_p0, units_p1, units_p2, units_p3)
        units_d = pick(use, units_d0, units_d1, units_d2, units_d3)
        A_R = tl.sum(tl.where(t[:, None] == s[None, :], A_RR, 0.0), 1).to(tl.float64)
        X_R = tl.sum(tl.where(t[:, None] == s[None, :], X_RR, 0.0), 1).to(tl.float64)
        # The squares of the tokens' sizes, and not below: twice the bound's share makes up for 1 / (1 - share).
        a_R = tl.where(t < tokens, A_R * (1 + 2 * units_p) + 2 * (p * 2.0**-126 / units_p), 0.0)
        b_R = tl.where(t < tokens, X_R * (1 + 2 * units_d) + 2 * (d * 2.0**-126 / units_d), 0.0)
        row = (use * batch + sample).to(tl.int64) * tl.cdiv(tokens, BLOCK_R) + i
        tl.store(token_ptr + row * (2 * BLOCK_R) + tl.arange(0, BLOCK_R), a_R)
        tl.store(token_ptr + row * (2 * BLOCK_R) + BLOCK_R + tl.arange(0, BLOCK_R), b_R)
        tl.store(row_ptr + row * 2, tl.sum(A_R * X_R + units_p * (a_R * X_R) + units_d * (b_R * A_R)))
        tl.store(row_ptr + row * 2 + 1, tl.sum(tl.sqrt(a_R * b_R)))

    A_RR = tl.where(t[:, None] > s[None, :], A_RR, 0.0)
    X_RR = tl.where(t[:, None] > s[None, :], X_RR, 0.0)
    tl.store(tile_ptr + index, tl.sum(A_RR.to(tl.float64) * X_RR.to(tl.float64)))
    sums = sum_ptr + index.to(tl.int64) * (4 * BLOCK_R)
    _store_sums(A_RR, sums, BLOCK_R)
    _store_sums(X_RR, sums + 2 * BLOCK_R, BLOCK_R)


@jit
def _weighed(token_ptr, sum_ptr, R: tl.constexpr):
    """``sum_t a_t^2 r_t``."""
    element = tl.arange(0, R)
    return tl.sum(tl.load(token_ptr + element) * tl.load(sum_ptr + element).to(tl.float64))


@jit
def _bound_body(
    tile_ptr, sum_ptr, token_ptr, units_p0, units_p1, units_p2, units_p3, units_d0, units_d1, units_d2, units_d3,
    batch, rows, pairs, R: tl.constexpr,
):  # fmt: skip
    """What rounding may have taken from a tile, added to it."""
    index = tl.program_id(0)
    use, sample = index // (batch * pairs), index // pairs
    i, j = _row_and_column(index % pairs)
    sums = sum_ptr + index.to(tl.int64) * (4 * R)
    left = token_ptr + (sample.to(tl.int64) * rows + i) * (2 * R)
    right = token_ptr + (sample.to(tl.int64) * rows + j) * (2 * R)
    of_X = tl.sqrt(_weighed(left, sums + 2 * R, R) * _weighed(right, sums + 3 * R, R))
    of_A = tl.sqrt(_weighed(left + R, sums, R) * _weighed(right + R, sums + R, R))
    lost = pick(use, units_p0, units_p1, units_p2, units_p3).to(tl.float64) * of_X
    lost += pick(use, units_d0, units_d1, units_d2, units_d3).to(tl.float64) * of_A
    tl.store(tile_ptr + index, tl.load(tile_ptr + index) + lost)


@jit
def _finish_body(
    tile_ptr, row_ptr, out_ptr, row0, row1, row2, row3,
    units_p0, units_p1, units_p2, units_p3, units_d0, units_d1, units_d2, units_d3, units_t, batch, rows, pairs,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    use = index // batch
    below = tl.zeros((BLOCK,), tl.float64)
    first = 0
    while first < pairs:
        pair = first + tl.arange(0, BLOCK)
        below += tl.load(tile_ptr + index.to(tl.int64) * pairs + pair, mask=pair < pairs, other=0.0)
        first += BLOCK
    diagonal = tl.zeros((BLOCK,), tl.float64)
    length = tl.zeros((BLOCK,), tl.float64)
    first = 0
    while first < rows:
        i = first + tl.arange(0, BLOCK)
        row = row_ptr + (index.to(tl.int64) * rows + i) * 2
        diagonal += tl.load(row, mask=i < rows, other=0.0)
        length += tl.load(row + 1, mask=i < rows, other=0.0)
        first += BLOCK
    size = tl.sum(length)
    total = 2 * tl.sum(below) + tl.sum(diagonal)
    units = pick(use, units_p0, units_p1, units_p2, units_p3).to(tl.float64)
    units *= pick(use, units_d0, units_d1, units_d2, units_d3).to(tl.float64)
    total = tl.where(total < 0.0, 0.0, total) + units * size * size  # NaN stays NaN
    norm = tl.sqrt(total) + units_t * size
    tl.store(out_ptr + pick(use, row0, row1, row2, row3) * batch + index % batch, norm * norm)


# ---------------------------------------------------------------- launches


def launch_ghost(g_BTP: Tensor, x_BTD: Tensor, *, tile: Tile | None = None) -> Tensor:
    """``|G_b|^2`` and what rounding may have taken, by the kernel; ``tile`` overrides the table."""
    return launch_many_ghosts([g_BTP], [x_BTD], tile=tile)[0]


def launch_many_ghosts(gs: list[Tensor], xs: list[Tensor], *, tile: Tile | None = None) -> Tensor:
    """As :func:`many_ghosts_reference`, by the kernel, four matrices in a launch."""
    check_pairs(gs, xs)
    if not launchable(*gs, *xs):
        return many_ghosts_reference(gs, xs)
    out = torch.empty(len(gs), len(gs[0]), dtype=torch.float64, device=gs[0].device)
    for four in fours(gs):
        _of_four(gs[four], xs[four], out[four], tile)
    return out


def _of_four(gs: list[Tensor], xs: list[Tensor], out: Tensor, tile: Tile | None) -> None:
    # The longest sums first: what is left at the end is then shared by all multiprocessors.
    order = sorted(range(len(gs)), key=lambda k: -(gs[k].shape[-1] + xs[k].shape[-1]))
    gs, xs = [aligned(gs[k]) for k in order], [aligned(xs[k]) for k in order]
    (batch, tokens, _), dtype, device = gs[0].shape, gs[0].dtype, gs[0].device
    tile = tile or choose(TILES, dtype, lambda tile: len(gs) * batch * _pairs(tokens, tile))
    if tile.rows != tile.columns:
        raise ValueError(f"ghost: expected a square tile, got {tile}")
    rows, pairs = tiles(tokens, tile.rows), _pairs(tokens, tile)
    widths = [[z.shape[-1] for z in zs] for zs in (gs, xs)]
    units_p, units_d = ([_units(width, tile, dtype) for width in side] for side in widths)
    of_tiles = torch.empty(len(gs) * batch * pairs, dtype=torch.float64, device=device)
    sums = torch.empty(len(of_tiles), 4, tile.rows, dtype=torch.float32, device=device)
    of_tokens = torch.empty(len(gs) * batch * rows, 2, tile.rows, dtype=torch.float64, device=device)
    of_rows = torch.empty(len(of_tokens), 2, dtype=torch.float64, device=device)
    _ghost_body[(len(of_tiles),)](
        *filled([described(g, (1, tile.rows, tile.depth)) for g in gs]),
        *filled([described(x, (1, tile.rows, tile.depth)) for x in xs]),
        *filled(widths[0]), *filled(widths[1]), *filled(units_p), *filled(units_d),
        of_tiles, sums, of_tokens, of_rows, batch, tokens, pairs,
        BLOCK_R=tile.rows, BLOCK_K=tile.depth, CHUNK=CHUNK, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    units = (*filled(units_p), *filled(units_d))
    _bound_body[(len(of_tiles),)](
        of_tiles, sums, of_tokens, *units, batch, rows, pairs, R=tile.rows, num_warps=1
    )  # fmt: skip
    _finish_body[(len(gs) * batch,)](
        of_tiles, of_rows, out, *filled(order), *units, SLACK * UNIT * rounding_steps(tokens, dtype),
        batch, rows, pairs, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def _pairs(tokens: int, tile: Tile) -> int:
    rows = tiles(tokens, tile.rows)
    return rows * (rows + 1) // 2


def _units(width: int, tile: Tile, dtype: torch.dtype) -> float:
    """``c u`` of a sum over ``width`` features, chunk by chunk."""
    chunks, features = chunks_of(width, tile.depth, CHUNK)
    return SLACK * UNIT * (rounding_steps(features, dtype) + chunks)


# ---------------------------------------------------------------- ops


def _fake(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], dtype=torch.float64)


ghost = define("ghost", "Tensor g, Tensor x -> Tensor", reference=ghost_reference, cuda=launch_ghost, fake=_fake)
"""``(g_BTP, x_BTD)``: as :func:`ghost_reference`, and never below it."""
many_ghosts = define(
    "many_ghosts",
    "Tensor[] gs, Tensor[] xs -> Tensor",
    reference=many_ghosts_reference,
    cuda=launch_many_ghosts,
    fake=lambda gs, xs: gs[0].new_empty(len(gs), len(gs[0]), dtype=torch.float64),
)
"""``(gs, xs)``: as :func:`many_ghosts_reference`; pairs alike in samples and tokens."""
