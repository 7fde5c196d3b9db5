"""Per-sample squared norms of a linear layer's weight gradient from Gram matrices (ghost norms), never understated.

    |G_b|^2 = sum_{t,s} A_ts X_ts,   A = g_b g_b^T,  X = x_b x_b^T    g (B, T, P), x (B, T, D)  ->  n (B,) float64

(Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679.) A and X are symmetric, so only tiles on and below
the diagonal are computed. Both stay in registers, in float32, and are multiplied and summed there:
B T^2 (P + D) (1 + tile/T) flops, or half of tile/T on Hopper (``ghost_hopper``).

    >>> n = ghost(g, x)                                          # for T below about 2PD / (P + D)
    >>> factors = (C / n.sqrt()).clamp(max=1).float()
    >>> total = weighted(g, x, factors)

``foreach_ghost`` takes several matrices, four per launch.

    >>> n = foreach_ghost([g, h], [x, y])                        # (2, B)

Tokens may cancel: |G_b| can be far below the terms it is the sum of, and then the rounding error of a float32 Gram
matrix can be as large as the norm. So the largest possible rounding error is added. With u = 2^-23, a_t = |g_t|,
b_t = |x_t|:

  1. A sum of K products in a tensor core loses at most ``c u sum_k |y_k z_k| <= c u |y| |z|``. It adds m exact
     products and the accumulator at a time, each truncated to 24 bits or more at the largest one's exponent, and
     truncates the result (Khattak & Mikaitis 2025, arXiv 2512.07004): m + 2 units a step, c = K (m + 2) / m, so
     c = 5/4 K, with K rounded up to 16, holds for m >= 8 (Ampere, Hopper). Split into n chunks of L, each with its own
     accumulator: c_K = 5/4 L + n. (Float32 operands are multiplied and added one by one: c = K covers it twice.)
  2. Hence, from the computed A and X, for every t, s
     ``|A X - exact| <= u (c_P a_t a_s |X_ts| + c_D b_t b_s |A_ts|) + c_P c_D u^2 a_t a_s b_t b_s``
     and the sum of that is added to the squared norm. (Because it uses the Gram matrices, it is on ordinary data about
     sqrt(D) times smaller than ``(c_P + c_D) u (sum_t a_t b_t)^2``.)
  3. The squares of a and b are the diagonals of A and X: sums of squares, of which rounding takes at most a share c u.
     A tile off the diagonal does not know them; it stores the sizes of its rows, and for every row t
     ``sum_s a_s |X_ts| <= min(|X_t| sqrt(sum_s a_s^2), b_t sum_s a_s b_s)`` (Cauchy-Schwarz). If tokens have equal
     norms and X_ts one size, the first is an equality; if X_ts is normally distributed, it is a quarter more. The
     second matters if a few tokens have a large x and a small g.
  4. The products A X of a tile are summed in float32 along its rows, R at a time, and in float64 from there on. That
     loses at most ``R/2 u sum |A_ts X_ts|``. Since |A_ts| <= a_t a_s, R/2 more units in c_P cover it.
  5. ``weighted`` sums T products in the same way, without chunks, so it adds not G_b but ``G_b + E_b`` with
     ``|E_b| <= 5/4 T u sum_t a_t b_t``: that is added to the norm.

Float32 drops products below 2^-126, which takes at most K 2^-126 from an entry: c_K u floor with ``floor = K 2^-126 /
(c_K u)``. Replacing a_t^2 by a_t^2 + floor covers it, because ``(a_t^2 + floor) (a_s^2 + floor) >= (a_t a_s +
floor)^2``.

On independent random tokens with P = D = 1280 the norm is overstated by 0.3 % at T = 512 (a third of it by 2., the rest
by 5.), 0.8 % at T = 1024, 2.0 % at T = 2048, and by 2.4 % more at most if some tokens have an x that is a thousand
times larger and a g that is as much smaller; hardly more for a vocabulary of 50257, less for correlated tokens.

Guarantees:
  - the result is at least the squared norm of what ``weighted`` adds for the sample before its factor, whatever the
    sample holds (products below 2^-126, which ``weighted`` drops, are not included);
  - a sample with a NaN or infinite token has a NaN or infinite norm. No other sample has, except one with a token above
    1e18, whose products float32 cannot hold.

Letters: B samples, T tokens, P output features, D input features; R a tile's tokens on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fdp_kernels import ghost_hopper
from fdp_kernels.ghost_strips import CHUNK, row_and_column, store_strip
from fdp_kernels.hopper import runs_hopper
from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import (
    Tile,
    TileChoice,
    align_rows,
    can_launch,
    cdiv,
    check_pair,
    check_pairs,
    choose_tile,
    chunk_features,
    inner,
    launch_by_four,
    make_descriptor,
    pad_to_four,
    pick,
)

TILES = (
    TileChoice(3, Tile(128, 128, 64, warps=8, stages=5)),
    TileChoice(0, Tile(64, 64, 64, warps=4, stages=4)),
)
"""Square tiles. ``min_tiles`` counts those on and below the diagonal, of one sample: its norm, with the bound on
rounding, must not depend on how many others are in the microbatch."""
UNIT = 2.0**-23
"""``u`` of the bound."""
SLACK = 1.001
"""Factor that covers the bound's own float32 rounding and the squares of ``c u`` left out of step 1."""
BLOCK = 256
"""Tiles that ``_finish_body`` adds at a time."""


def rounding_steps(depth: int, dtype: torch.dtype) -> float:
    """Return the largest error of a float32 sum of ``depth`` products, in units of 2^-23 of the sum of their sizes."""
    return float(depth) if dtype == torch.float32 else 1.25 * 16 * cdiv(depth, 16)


def ghost_reference(g_BTP: Tensor, x_BTD: Tensor) -> Tensor:
    """Return ``|G_b|^2`` in float64 plus the bound for float64: ``(T + P + D) eps (sum_t |g_t| |x_t|)^2``."""
    check_pair(g_BTP, x_BTD)
    g, x = g_BTP.double(), x_BTD.double()
    square = (torch.bmm(g, g.mT) * torch.bmm(x, x.mT)).sum((1, 2)).clamp_min(0)
    size = (torch.linalg.vector_norm(g, dim=-1) * torch.linalg.vector_norm(x, dim=-1)).sum(1)
    return square + (g.shape[1] + g.shape[2] + x.shape[2]) * torch.finfo(torch.float64).eps * size.square()


def foreach_ghost_reference(gs: list[Tensor], xs: list[Tensor]) -> Tensor:
    """Apply :func:`ghost_reference` to each pair: (matrices, B)."""
    check_pairs(gs, xs)
    return torch.stack([ghost_reference(g, x) for g, x in zip(gs, xs)])


# ---------------------------------------------------------------- bodies


@jit
def _ghost_body(
    g0, g1, g2, g3, x0, x1, x2, x3, p0, p1, p2, p3, d0, d1, d2, d3,
    units_p0, units_p1, units_p2, units_p3, units_d0, units_d1, units_d2, units_d3,
    tile_ptr, size_ptr, token_ptr, row_ptr, batch, tokens, pairs,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    matrix, sample = index // (batch * pairs), index // pairs % batch
    i, j = row_and_column(index % pairs)
    p, d = pick(matrix, p0, p1, p2, p3), pick(matrix, d0, d1, d2, d3)
    A_RR = inner(pick(matrix, g0, g1, g2, g3), sample, i, j, p, BLOCK_R, BLOCK_K, CHUNK)
    X_RR = inner(pick(matrix, x0, x1, x2, x3), sample, i, j, d, BLOCK_R, BLOCK_K, CHUNK)
    units_p = pick(matrix, units_p0, units_p1, units_p2, units_p3)
    units_d = pick(matrix, units_d0, units_d1, units_d2, units_d3)
    row = (matrix * batch + sample).to(tl.int64) * tl.cdiv(tokens, BLOCK_R) + i
    element = tl.arange(0, BLOCK_R)
    store_strip(
        A_RR, X_RR, element, element, index, row, i, j, p, d, units_p, units_d,
        tile_ptr, size_ptr, token_ptr, row_ptr, tokens, BLOCK_R, BLOCK_R,
    )  # fmt: skip


@jit
def _bound_body(
    tile_ptr, size_ptr, token_ptr, units_p0, units_p1, units_p2, units_p3, units_d0, units_d1, units_d2, units_d3,
    batch, rows, pairs, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add to each strip its largest possible rounding error."""
    index = tl.program_id(0)
    tile, part = index // (C // R), index % (C // R)
    matrix, sample = tile // (batch * pairs), tile // pairs
    i, j = row_and_column(tile % pairs)
    sizes = size_ptr + index.to(tl.int64) * (2 * R)
    # Squared norms of tokens are stored in blocks of R, those of g before those of x.
    first = token_ptr + sample.to(tl.int64) * rows * (2 * C)
    t, s = tl.arange(0, R), tl.arange(0, C)
    left, right = first + i * (2 * C) + part * (2 * R) + t, first + j * (2 * C) + s // R * (2 * R) + s % R
    a_t, b_t = tl.sqrt(tl.load(left)), tl.sqrt(tl.load(left + R))
    a_s, b_s = tl.load(right), tl.load(right + R)  # squares
    both = a_t * b_t * tl.sum(tl.sqrt(a_s * b_s))
    sizes_A, sizes_X = tl.load(sizes + t).to(tl.float64), tl.load(sizes + R + t).to(tl.float64)
    bound_X = tl.sum(tl.minimum(a_t * sizes_X * tl.sqrt(tl.sum(a_s)), both))
    bound_A = tl.sum(tl.minimum(b_t * sizes_A * tl.sqrt(tl.sum(b_s)), both))
    lost = pick(matrix, units_p0, units_p1, units_p2, units_p3).to(tl.float64) * bound_X
    lost += pick(matrix, units_d0, units_d1, units_d2, units_d3).to(tl.float64) * bound_A
    tl.store(tile_ptr + index, tl.load(tile_ptr + index) + lost)


@jit
def _finish_body(
    tile_ptr, row_ptr, out_ptr, size_ptr, row0, row1, row2, row3,
    units_p0, units_p1, units_p2, units_p3, units_d0, units_d1, units_d2, units_d3, units_t, batch, rows, pairs,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    matrix = index // batch
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
    units = pick(matrix, units_p0, units_p1, units_p2, units_p3).to(tl.float64)
    units *= pick(matrix, units_d0, units_d1, units_d2, units_d3).to(tl.float64)
    total = tl.where(total < 0.0, 0.0, total) + units * size * size  # NaN stays NaN
    norm = tl.sqrt(total) + units_t * size
    norm = tl.where(size > 3e38, float("inf"), norm)  # what ``weighted`` adds may exceed float32
    position = pick(matrix, row0, row1, row2, row3) * batch + index % batch
    tl.store(out_ptr + position, norm * norm)
    tl.store(size_ptr + position, units_t * size)


# ---------------------------------------------------------------- launches


def launch_ghost(g_BTP: Tensor, x_BTD: Tensor, *, tile: Tile | None = None) -> Tensor:
    """Return ``|G_b|^2`` plus the rounding bound with the kernel; ``tile`` overrides the table."""
    return launch_foreach_ghost([g_BTP], [x_BTD], tile=tile)[0]


def launch_foreach_ghost(gs: list[Tensor], xs: list[Tensor], *, tile: Tile | None = None) -> Tensor:
    """Return :func:`launch_ghost` of each pair: (matrices, B), four matrices per launch."""
    check_pairs(gs, xs)
    if not can_launch(*gs, *xs):
        return foreach_ghost_reference(gs, xs)
    return launch_norms_and_errors(gs, xs, tile=tile)[0]


def launch_norms_and_errors(gs: list[Tensor], xs: list[Tensor], *, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Return the squared norms of each pair, and the bound ``|E_b|`` of step 5 that they include: (matrices, B)."""
    out = torch.empty(len(gs), len(gs[0]), dtype=torch.float64, device=gs[0].device)
    errors = torch.empty_like(out)
    launch_by_four(partial(_launch_four, tile=tile), gs, xs, out, errors)
    return out, errors


def _launch_four(gs: list[Tensor], xs: list[Tensor], out: Tensor, errors: Tensor, tile: Tile | None) -> Tensor:
    # The longest sums go first, so that all multiprocessors share the short ones at the end.
    order = sorted(range(len(gs)), key=lambda k: -(gs[k].shape[-1] + xs[k].shape[-1]))
    gs, xs = [align_rows(gs[k]) for k in order], [align_rows(xs[k]) for k in order]
    (batch, tokens, _), dtype, device = gs[0].shape, gs[0].dtype, gs[0].device
    strips, launch_body = 1, _launch_body
    if tile is None and runs_hopper(gs[0]) and all(map(ghost_hopper.pays_off, gs)):
        tile, strips, launch_body = ghost_hopper.TILE, ghost_hopper.STRIPS, ghost_hopper.launch_body
    tile = tile or choose_tile(TILES, dtype, partial(_pairs, tokens))
    if tile.rows != tile.columns:
        raise ValueError(f"ghost: expected a square tile, got {tile}")
    rows, pairs, height = cdiv(tokens, tile.rows), _pairs(tokens, tile), tile.rows // strips
    widths = [[z.shape[-1] for z in zs] for zs in (gs, xs)]
    units_p, units_d = ([_units(width, tile, dtype) for width in side] for side in widths)
    units_p = [units + SLACK * UNIT * (tile.rows // 2) for units in units_p]
    units = (*pad_to_four(units_p), *pad_to_four(units_d))
    tile_sums = torch.empty(len(gs) * batch * pairs * strips, dtype=torch.float64, device=device)
    sizes = torch.empty(len(tile_sums), 2, height, dtype=torch.float32, device=device)
    token_sizes = torch.empty(len(gs) * batch * rows * strips, 2, height, dtype=torch.float64, device=device)
    row_sums = torch.empty(len(token_sizes), 2, dtype=torch.float64, device=device)
    launch_body(gs, xs, tile, (tile_sums, sizes, token_sizes, row_sums), widths, units, pairs)
    _bound_body[(len(tile_sums),)](
        tile_sums, sizes, token_sizes, *units, batch, rows, pairs, R=height, C=tile.columns, num_warps=1
    )  # fmt: skip
    _finish_body[(len(gs) * batch,)](
        tile_sums, row_sums, out, errors, *pad_to_four(order), *units, SLACK * UNIT * rounding_steps(tokens, dtype),
        batch, rows * strips, pairs * strips, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def _launch_body(
    gs: list[Tensor], xs: list[Tensor], tile: Tile, stores: Sequence[Tensor], widths: list[list[int]],
    units: Sequence[float], pairs: int,
) -> None:  # fmt: skip
    batch, tokens, _ = gs[0].shape
    _ghost_body[(len(stores[0]),)](
        *pad_to_four([make_descriptor(g, (1, tile.rows, tile.depth)) for g in gs]),
        *pad_to_four([make_descriptor(x, (1, tile.rows, tile.depth)) for x in xs]),
        *pad_to_four(widths[0]), *pad_to_four(widths[1]), *units, *stores, batch, tokens, pairs,
        BLOCK_R=tile.rows, BLOCK_K=tile.depth, CHUNK=CHUNK, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _pairs(tokens: int, tile: Tile) -> int:
    """Return the number of tiles on and below the diagonal."""
    rows = cdiv(tokens, tile.rows)
    return rows * (rows + 1) // 2


def _units(width: int, tile: Tile, dtype: torch.dtype) -> float:
    """Return ``c u`` of a sum over ``width`` features, in chunks."""
    chunks, features = chunk_features(width, tile.depth, CHUNK)
    return SLACK * UNIT * (rounding_steps(features, dtype) + chunks)


# ---------------------------------------------------------------- ops


def _fake(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], dtype=torch.float64)


ghost = define("ghost", "Tensor g, Tensor x -> Tensor", reference=ghost_reference, cuda=launch_ghost, fake=_fake)
"""``(g_BTP, x_BTD)``: as :func:`ghost_reference`, and never below it."""
foreach_ghost = define(
    "foreach_ghost",
    "Tensor[] gs, Tensor[] xs -> Tensor",
    reference=foreach_ghost_reference,
    cuda=launch_foreach_ghost,
    fake=lambda gs, xs: gs[0].new_empty(len(gs), len(gs[0]), dtype=torch.float64),
)
"""``(gs, xs)``: as :func:`foreach_ghost_reference`; all pairs have equal samples and tokens."""
