"""The weighted sum of per-sample weight gradients of a linear layer, from inputs and output gradients.

    W = sum_b c_b G_b,   G_b = sum_t g_bt x_bt^T     g (B, T, P), x (B, T, D), c (B,) float32  ->  W (P, D) float32

Each sample's tile is summed in a float32 accumulator of its own, in the order of ``tile_gemm.outer``, multiplied by its
float32 factor there and added to a float32 total: no scaled copy of g, and what is added is what ``direct`` measured,
bit for bit.

    >>> squared = direct(g, x)
    >>> factors = (C / squared.sqrt()).clamp(max=1).float()
    >>> total = weighted(g, x, factors)                          # 2 B T P D flops

``many_weighted`` makes the sums of several matrices, four in a launch: on an H200, of a block of GPT-2-Large with 32 x
512 tokens, in 971 us, in four launches 1170, by the library without factors 915.

    >>> totals = many_weighted([g, h], [x, y], [factors, factors])

Guarantees:
  - a sample with factor 0 adds exactly 0, even if its gradient is NaN or infinite;
  - what a sample adds before rounding into the total is c_b times the matrix whose norm ``direct`` returns;
  - slack: with every |c_b G_b| <= C the roundings of products and additions move W by at most 2^-24 (B^2 / 2 + 2 B) C
    in norm, so one sample more or less moves it by at most C + 2^-24 (B + 3)^2 C. (Worst case; all samples alike.)

Letters: B samples, T tokens, P output features, D input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import (
    Row,
    Tile,
    check_pair,
    check_pairs,
    choose,
    described_pairs,
    extents,
    filled,
    fours,
    launchable,
    outer,
    pick,
    place,
    tiles_of,
    which,
)

TILES = (
    Row(190, Tile(128, 256, 64, warps=8, stages=3)),
    Row(90, Tile(128, 128, 64, warps=8, stages=4)),
    Row(90, Tile(64, 128, 64, warps=4, stages=3)),
    Row(0, Tile(64, 64, 64, warps=4, stages=4)),
)
"""The depth must be that of ``direct``. Wide tiles, with two accumulators each, only where there are enough for about
one and a half on a multiprocessor (an H200, 4 x 2048 tokens, 1280 -> 5120: 177 us against 197)."""


def weighted_reference(g_BTP: Tensor, x_BTD: Tensor, factors_B: Tensor) -> Tensor:
    """In float64, then rounded to float32 (float64 operands: not rounded)."""
    _check(g_BTP, x_BTD, factors_B)
    zero = factors_B.view(-1, 1, 1) == 0
    G_BPD = torch.bmm(g_BTP.double().mT, x_BTD.double()).masked_fill(zero, 0.0)
    return torch.tensordot(factors_B.double(), G_BPD, dims=1).to(_out_dtype(g_BTP))


def many_weighted_reference(gs: list[Tensor], xs: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    """:func:`weighted_reference` of each."""
    return [weighted_reference(g, x, f) for g, x, f in zip(gs, xs, factors, strict=True)]


@jit
def _weighted_body(
    g0, g1, g2, g3, x0, x1, x2, x3, factor_ptr0, factor_ptr1, factor_ptr2, factor_ptr3,
    out_ptr0, out_ptr1, out_ptr2, out_ptr3, p0, p1, p2, p3, d0, d1, d2, d3, end0, end1, end2, batch, tokens,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    use = which(index, end0, end1, end2)
    g, x = pick(use, g0, g1, g2, g3), pick(use, x0, x1, x2, x3)
    p, d = pick(use, p0, p1, p2, p3), pick(use, d0, d1, d2, d3)
    factor_ptr = pick(use, factor_ptr0, factor_ptr1, factor_ptr2, factor_ptr3)
    out_ptr = pick(use, out_ptr0, out_ptr1, out_ptr2, out_ptr3)
    i, j = place(index - pick(use, 0, end0, end1, end2), tl.cdiv(p, BLOCK_P), tl.cdiv(d, BLOCK_D), GROUP)
    total_PD = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for b in tl.range(0, batch, flatten=True):  # one pipeline through all samples, not one each
        acc_PD = outer(g, x, b, i, j, tokens, BLOCK_P, BLOCK_D, BLOCK_T)
        factor = tl.load(factor_ptr + b)
        total_PD += tl.where(factor != 0, factor * acc_PD, 0.0)
    row = i * BLOCK_P + tl.arange(0, BLOCK_P)
    column = j * BLOCK_D + tl.arange(0, BLOCK_D)
    offset = row[:, None].to(tl.int64) * d + column[None, :]
    tl.store(out_ptr + offset, total_PD, mask=(row < p)[:, None] & (column < d)[None, :])


def launch_weighted(g_BTP: Tensor, x_BTD: Tensor, factors_B: Tensor, *, tile: Tile | None = None) -> Tensor:
    """As :func:`weighted_reference`, by the kernel; ``tile`` overrides the table."""
    return launch_many_weighted([g_BTP], [x_BTD], [factors_B], tile=tile)[0]


def launch_many_weighted(
    gs: list[Tensor], xs: list[Tensor], factors: list[Tensor], *, tile: Tile | None = None
) -> list[Tensor]:
    """As :func:`many_weighted_reference`, by the kernel, four matrices in a launch."""
    check_pairs(gs, xs)
    for g, x, f in zip(gs, xs, factors, strict=True):
        _check(g, x, f)
    if not launchable(*gs, *xs):
        return many_weighted_reference(gs, xs, factors)
    return [out for four in fours(gs) for out in _of_four(gs[four], xs[four], factors[four], tile)]


def _of_four(gs: list[Tensor], xs: list[Tensor], factors: list[Tensor], tile: Tile | None) -> list[Tensor]:
    (batch, tokens, _), dtype, device = gs[0].shape, gs[0].dtype, gs[0].device
    tile = tile or choose(TILES, dtype, lambda tile: sum(tiles_of(g, x, tile) for g, x in zip(gs, xs)))
    outs = [torch.empty(g.shape[-1], x.shape[-1], dtype=torch.float32, device=device) for g, x in zip(gs, xs)]
    counts = [tiles_of(g, x, tile) for g, x in zip(gs, xs)]
    _weighted_body[(sum(counts),)](
        *described_pairs(gs, xs, tile), *filled([f.contiguous() for f in factors]), *filled(outs),
        *extents(gs, xs, counts), batch, tokens,
        BLOCK_P=tile.rows, BLOCK_D=tile.columns, BLOCK_T=tile.depth, GROUP=tile.group,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return outs


def _out_dtype(g: Tensor) -> torch.dtype:
    return torch.float64 if g.dtype == torch.float64 else torch.float32


def _check(g: Tensor, x: Tensor, factors: Tensor) -> None:
    check_pair(g, x)
    if factors.shape != g.shape[:1] or factors.dtype not in (torch.float32, _out_dtype(g)):
        raise ValueError(
            f"factors: expected {g.shape[0]} float32 numbers, got shape {tuple(factors.shape)} {factors.dtype}; "
            "a factor rounded to fewer digits can leave a clipped gradient above its bound"
        )


def _fake(g: Tensor, x: Tensor, factors: Tensor) -> Tensor:
    return g.new_empty(g.shape[-1], x.shape[-1], dtype=_out_dtype(g))


weighted = define(
    "weighted",
    "Tensor g, Tensor x, Tensor factors -> Tensor",
    reference=weighted_reference,
    cuda=launch_weighted,
    fake=_fake,
)
"""``(g_BTP, x_BTD, factors_B)``: as :func:`weighted_reference`."""
many_weighted = define(
    "many_weighted",
    "Tensor[] gs, Tensor[] xs, Tensor[] factors -> Tensor[]",
    reference=many_weighted_reference,
    cuda=launch_many_weighted,
    fake=lambda gs, xs, factors: [_fake(g, x, f) for g, x, f in zip(gs, xs, factors)],
)
"""``(gs, xs, factors)``: as :func:`many_weighted_reference`; pairs alike in samples and tokens."""
