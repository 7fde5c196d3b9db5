"""Per-sample squared norms of a linear layer's weight gradient from Gram matrices, never understated.

    |G_b|^2 = sum_{t,s} A_ts X_ts,   A = g_b g_b^T,  X = x_b x_b^T    g (B, T, P), x (B, T, D)  ->  n (B,) float64

(Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679.) A and X are symmetric: only tiles on and below
the diagonal are made, both in registers, float32; multiplied and summed in float64: B T^2 (P + D) (1 + tile/T) flops.

    >>> n = ghost(g, x)                                          # for T below about 2PD / (P + D)
    >>> factors = (C / n.sqrt()).clamp(max=1).float()
    >>> total = weighted(g, x, factors)

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
  3. ``weighted`` sums T products in the same way, without chunks, and so adds not G_b but ``G_b + E_b`` with
     ``|E_b| <= 5/4 T u sum_t a_t b_t``: that is added to the norm.

On independent random tokens with P = D = 1280 the norm is overstated by 0.3 % at T = 512 (0.1 % by 2., 0.2 % by 3.),
0.7 % at T = 1024, 1.8 % at T = 2048, hardly more for a vocabulary of 50257, less where tokens have something in common.

Guarantees:
  - at least the squared norm of what ``weighted`` adds for the sample before its factor, whatever the sample holds;
  - a sample with a NaN or infinite token has a NaN or infinite norm, and no other sample has.

Letters: B samples, T tokens, P output features, D input features; R x S a tile of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import Row, Tile, aligned, check_pair, choose, described, inner, launchable, tiles

TILES = (
    Row(250, Tile(128, 128, 64, warps=8, stages=4)),
    Row(60, Tile(128, 64, 64, warps=4, stages=4)),
    Row(0, Tile(64, 64, 64, warps=4, stages=4)),
)
"""``rows`` is a multiple of ``columns``; counted are tiles on and below the diagonal of all samples."""
UNIT = 2.0**-23
SLACK = 1.001
"""Covers the bound's own float32 rounding and the squares of ``c u`` left out of step 1."""
CHUNK = 1024
"""Features that go into one accumulator."""
TOKENS, WIDTH = 4, 512
"""Tokens of a program of the token norms, and features of a load."""


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


# ---------------------------------------------------------------- bodies


@jit
def _norms_of(
    z_ptr, out_ptr, block, batch, tokens, width, stride_b, stride_t, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):
    token = block * TOKENS + tl.arange(0, TOKENS)
    there = token < batch * tokens
    base = (token // tokens).to(tl.int64) * stride_b + (token % tokens).to(tl.int64) * stride_t
    total = tl.zeros((TOKENS, WIDTH), tl.float64)
    for first in tl.range(0, width, WIDTH):
        column = first + tl.arange(0, WIDTH)
        mask = there[:, None] & (column < width)[None, :]
        value = tl.load(z_ptr + base[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32).to(tl.float64)
        total += value * value
    norm = tl.sqrt(tl.sum(total, 1)) * (1 + 2.0**-20)  # to float32 and not below
    tl.store(out_ptr + token, norm.to(tl.float32), mask=there)


@jit
def _token_norms_body(
    g_ptr, x_ptr, a_ptr, b_ptr, batch, tokens, p, d, g_stride_b, g_stride_t, x_stride_b, x_stride_t,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    blocks = tl.num_programs(0) // 2
    index = tl.program_id(0)
    if index < blocks:
        _norms_of(g_ptr, a_ptr, index, batch, tokens, p, g_stride_b, g_stride_t, TOKENS, WIDTH)
    else:
        _norms_of(x_ptr, b_ptr, index - blocks, batch, tokens, d, x_stride_b, x_stride_t, TOKENS, WIDTH)


@jit
def _ghost_body(
    g_left, g_right, x_left, x_right, a_ptr, b_ptr, partial_ptr, tokens, pairs, chunks_p, steps_p, chunks_d, steps_d,
    units_p, units_d, floor_p, floor_d,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    sample, pair = index // pairs, index % pairs
    # Row i of tiles has RATIO * (i + 1) of them. The root is within one of the row; integers make it exact.
    RATIO: tl.constexpr = BLOCK_R // BLOCK_S
    whole = pair // RATIO
    i = ((tl.sqrt(8.0 * whole.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > whole, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= whole, i + 1, i)
    j = pair - RATIO * (i * (i + 1) // 2)

    A_RS = inner(g_left, g_right, sample, i, j, chunks_p, steps_p, BLOCK_R, BLOCK_S, BLOCK_K)
    X_RS = inner(x_left, x_right, sample, i, j, chunks_d, steps_d, BLOCK_R, BLOCK_S, BLOCK_K)

    t = i * BLOCK_R + tl.arange(0, BLOCK_R)
    s = j * BLOCK_S + tl.arange(0, BLOCK_S)
    first = sample.to(tl.int64) * tokens
    a_t = tl.load(a_ptr + first + t, mask=t < tokens, other=0.0)[:, None]
    b_t = tl.load(b_ptr + first + t, mask=t < tokens, other=0.0)[:, None]
    a_s = tl.load(a_ptr + first + s, mask=s < tokens, other=0.0)[None, :]
    b_s = tl.load(b_ptr + first + s, mask=s < tokens, other=0.0)[None, :]
    times = tl.where(t[:, None] > s[None, :], 2.0, tl.where(t[:, None] == s[None, :], 1.0, 0.0))
    product = (times * A_RS).to(tl.float64) * X_RS.to(tl.float64)  # times is a power of two or 0: exact
    lost = units_p * tl.sum(times * tl.maximum(a_t * a_s, floor_p) * tl.abs(X_RS))
    lost += units_d * tl.sum(times * tl.maximum(b_t * b_s, floor_d) * tl.abs(A_RS))
    tl.store(partial_ptr + index, tl.sum(product) + lost.to(tl.float64))


@jit
def _finish_body(partial_ptr, a_ptr, b_ptr, out_ptr, parts, tokens, units_both, units_t, BLOCK: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    square = tl.zeros((BLOCK,), tl.float64)
    size = tl.zeros((BLOCK,), tl.float64)
    first = 0
    while first < parts:
        i = first + tl.arange(0, BLOCK)
        square += tl.load(partial_ptr + sample * parts + i, mask=i < parts, other=0.0)
        first += BLOCK
    first = 0
    while first < tokens:
        i = first + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + sample * tokens + i, mask=i < tokens, other=0.0).to(tl.float64)
        size += a * tl.load(b_ptr + sample * tokens + i, mask=i < tokens, other=0.0).to(tl.float64)
        first += BLOCK
    total, length = tl.sum(square), tl.sum(size)
    total = tl.where(total < 0.0, 0.0, total) + units_both * length * length  # NaN stays NaN
    norm = tl.sqrt(total) + units_t * length
    tl.store(out_ptr + sample, norm * norm)


# ---------------------------------------------------------------- launches


def _cut(width: int, depth: int) -> tuple[int, int]:
    """Features as (chunks, steps of ``depth`` in a chunk), about CHUNK features each."""
    chunks = tiles(width, CHUNK)
    return chunks, tiles(tiles(width, depth), chunks)


def _pairs(tokens: int, tile: Tile) -> int:
    rows = tiles(tokens, tile.rows)
    return tile.rows // tile.columns * (rows * (rows + 1) // 2)


def launch_token_norms(g_BTP: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """``|g_t|`` and ``|x_t|``, (B, T) float32, rounded up; features side by side in memory."""
    (batch, tokens, p), d = g_BTP.shape, x_BTD.shape[-1]
    a, b = (torch.empty(batch, tokens, dtype=torch.float32, device=g_BTP.device) for _ in range(2))
    _token_norms_body[(2 * tiles(batch * tokens, TOKENS),)](
        g_BTP, x_BTD, a, b, batch, tokens, p, d, *g_BTP.stride()[:2], *x_BTD.stride()[:2],
        TOKENS=TOKENS, WIDTH=WIDTH, num_warps=4,
    )  # fmt: skip
    return a, b


def floors(p: int, d: int, units_p: float, units_d: float) -> tuple[float, float]:
    """What products below 2^-126, which float32 drops, can take from a Gram matrix, in its units."""
    return p * 2.0**-126 / units_p, d * 2.0**-126 / units_d


def finished(partial_BN: Tensor, a_BT: Tensor, b_BT: Tensor, units_both: float, units_t: float) -> Tensor:
    """Steps 2 and 3 of the bound, from the sums of the tiles; in a fixed order, one launch."""
    out = torch.empty(len(a_BT), dtype=torch.float64, device=a_BT.device)
    _finish_body[(len(a_BT),)](
        partial_BN, a_BT, b_BT, out, partial_BN.shape[1], a_BT.shape[1], units_both, units_t, BLOCK=1024, num_warps=4
    )
    return out


def launch_ghost(g_BTP: Tensor, x_BTD: Tensor, *, tile: Tile | None = None) -> Tensor:
    """``|G_b|^2`` and what rounding may have taken, by the kernel; ``tile`` overrides the table."""
    check_pair(g_BTP, x_BTD)
    if not launchable(g_BTP, x_BTD):
        return ghost_reference(g_BTP, x_BTD)
    g, x, dtype = aligned(g_BTP), aligned(x_BTD), g_BTP.dtype
    (batch, tokens, p), d = g.shape, x.shape[-1]
    tile = tile or choose(TILES, dtype, lambda tile: batch * _pairs(tokens, tile))
    if tile.rows % tile.columns:
        raise ValueError(f"ghost: expected a tile whose rows are a multiple of its columns, got {tile}")
    a, b = launch_token_norms(g, x)
    partial = torch.empty(batch, _pairs(tokens, tile), dtype=torch.float64, device=g.device)
    (chunks_p, steps_p), (chunks_d, steps_d) = (_cut(width, tile.depth) for width in (p, d))
    units_p, units_d = (
        SLACK * UNIT * (rounding_steps(min(width, steps * tile.depth), dtype) + chunks)
        for width, chunks, steps in ((p, chunks_p, steps_p), (d, chunks_d, steps_d))
    )
    left, right = (1, tile.rows, tile.depth), (1, tile.columns, tile.depth)
    _ghost_body[(partial.numel(),)](
        described(g, left), described(g, right), described(x, left), described(x, right),
        a, b, partial, tokens, partial.shape[1], chunks_p, steps_p, chunks_d, steps_d, units_p, units_d,
        *floors(p, d, units_p, units_d),
        BLOCK_R=tile.rows, BLOCK_S=tile.columns, BLOCK_K=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return finished(partial, a, b, units_p * units_d, SLACK * UNIT * rounding_steps(tokens, dtype))


def _fake(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], dtype=torch.float64)


ghost = define("ghost", "Tensor g, Tensor x -> Tensor", reference=ghost_reference, cuda=launch_ghost, fake=_fake)
"""``(g_BTP, x_BTD)``: as :func:`ghost_reference`, and never below it."""
