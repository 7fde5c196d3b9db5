"""The weighted sum of per-sample weight gradients of a linear layer, from inputs and output gradients.

    W = sum_b c_b G_b,   G_b = sum_t g_bt x_bt^T     g (B, T, P), x (B, T, D), c (B,) float32  ->  W (P, D) float32

Each sample's tile has its own float32 accumulator, summed in the order of ``tile_gemm.outer``, then multiplied by the
sample's float32 factor and added to a float32 total, rounded once. So g is never copied and scaled, and what is added
is bit for bit what ``direct`` measured. On Hopper ``weighted_hopper`` computes the same numbers.

    >>> squared = direct(g, x)
    >>> factors = (C / squared.sqrt()).clamp(max=1).float()
    >>> total = weighted(g, x, factors)                          # 2 B T P D flops

``foreach_weighted_parts`` takes several matrices, four per launch. It splits the samples into equal parts and returns
the sum of each, (parts, P, D): the slack below is that of one part, and whoever adds the parts does so in float64.

    >>> parts_of_g, parts_of_h = foreach_weighted_parts([g, h], [x, y], [factors, factors], 2)

Guarantees:
  - a sample with factor 0 adds exactly 0, even if its gradient is NaN or infinite;
  - before it is rounded into the total, a sample adds c_b times the matrix whose norm ``direct`` returns;
  - W does not depend on tiles, nor on which other matrices share a launch;
  - slack: with every |c_b G_b| <= C the roundings of products and additions move W by at most 2^-24 (B^2 / 2 + 2 B) C
    in norm, so one sample more or less moves it by at most C + 2^-24 (B + 3)^2 C. (Worst case: all samples equal.)

Letters: B samples, T tokens, P output features, D input features.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fdp_kernels import weighted_hopper
from fdp_kernels.hopper import runs_hopper
from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import (
    Tile,
    TileChoice,
    can_launch,
    check_pair,
    check_pairs,
    choose_tile,
    count_tiles,
    launch_by_four,
    matrix_index,
    outer,
    outer_options,
    pad_to_four,
    pair_descriptors,
    pick,
    tile_position,
    widths_and_ends,
)

TILES = (
    TileChoice(190, Tile(128, 256, 64, warps=8, stages=3)),
    TileChoice(90, Tile(128, 128, 64, warps=8, stages=4)),
    TileChoice(90, Tile(64, 128, 64, warps=4, stages=3)),
    TileChoice(0, Tile(64, 64, 64, warps=4, stages=4)),
)
"""The depth must equal that of ``direct``. Wide tiles, with two accumulators each, pay off only if there are about one
and a half per multiprocessor."""


def weighted_reference(g_BTP: Tensor, x_BTD: Tensor, factors_B: Tensor) -> Tensor:
    """Return ``sum_b c_b G_b``, computed in float64, then rounded to float32 (float64 operands: not rounded)."""
    _check(g_BTP, x_BTD, factors_B)
    zero = factors_B.view(-1, 1, 1) == 0
    G_BPD = torch.bmm(g_BTP.double().mT, x_BTD.double()).masked_fill(zero, 0.0)
    return torch.tensordot(factors_B.double(), G_BPD, dims=1).to(_out_dtype(g_BTP))


def foreach_weighted_parts_reference(
    gs: list[Tensor], xs: list[Tensor], factors: list[Tensor], parts: int
) -> list[Tensor]:
    """Return :func:`weighted_reference` of each of ``parts`` equal parts of the samples: (parts, P, D) per pair."""
    _check_parts(gs, parts)
    split = [[of.chunk(parts) for of in side] for side in (gs, xs, factors)]
    return [torch.stack([weighted_reference(*each) for each in zip(*sides)]) for sides in zip(*split, strict=True)]


@jit
def _weighted_body(
    g0, g1, g2, g3, x0, x1, x2, x3, factor_ptr0, factor_ptr1, factor_ptr2, factor_ptr3,
    out_ptr0, out_ptr1, out_ptr2, out_ptr3, p0, p1, p2, p3, d0, d1, d2, d3, end0, end1, end2, samples, tokens,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    matrix = matrix_index(index, end0, end1, end2)
    g, x = pick(matrix, g0, g1, g2, g3), pick(matrix, x0, x1, x2, x3)
    p, d = pick(matrix, p0, p1, p2, p3), pick(matrix, d0, d1, d2, d3)
    factor_ptr = pick(matrix, factor_ptr0, factor_ptr1, factor_ptr2, factor_ptr3)
    out_ptr = pick(matrix, out_ptr0, out_ptr1, out_ptr2, out_ptr3)
    own, rows, columns = index - pick(matrix, 0, end0, end1, end2), tl.cdiv(p, BLOCK_P), tl.cdiv(d, BLOCK_D)
    part = own // (rows * columns)
    i, j = tile_position(own % (rows * columns), rows, columns, GROUP)
    total_PD = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    # One pipeline through all samples of the part, not one per sample.
    for b in tl.range(part * samples, (part + 1) * samples, flatten=True):
        acc_PD = outer(g, x, b, i, j, tokens, BLOCK_P, BLOCK_D, BLOCK_T)
        factor = tl.load(factor_ptr + b)
        total_PD = tl.where(factor != 0, tl.fma(acc_PD, factor, total_PD), total_PD)
    row = i * BLOCK_P + tl.arange(0, BLOCK_P)
    column = j * BLOCK_D + tl.arange(0, BLOCK_D)
    offset = (part.to(tl.int64) * p + row[:, None]) * d + column[None, :]
    tl.store(out_ptr + offset, total_PD, mask=(row < p)[:, None] & (column < d)[None, :])


def launch_weighted(g_BTP: Tensor, x_BTD: Tensor, factors_B: Tensor, *, tile: Tile | None = None) -> Tensor:
    """Evaluate :func:`weighted_reference` with the kernel; ``tile`` overrides the table."""
    return launch_foreach_weighted([g_BTP], [x_BTD], [factors_B], tile=tile)[0]


def launch_foreach_weighted(
    gs: list[Tensor], xs: list[Tensor], factors: list[Tensor], *, tile: Tile | None = None
) -> list[Tensor]:
    """Return :func:`launch_weighted` of each pair, four matrices per launch."""
    return [total.squeeze(0) for total in launch_foreach_weighted_parts(gs, xs, factors, 1, tile=tile)]


def launch_foreach_weighted_parts(
    gs: list[Tensor], xs: list[Tensor], factors: list[Tensor], parts: int, *, tile: Tile | None = None
) -> list[Tensor]:
    """Evaluate :func:`foreach_weighted_parts_reference` with the kernel, all parts of four matrices per launch."""
    check_pairs(gs, xs)
    _check_parts(gs, parts)
    for g, x, f in zip(gs, xs, factors, strict=True):
        _check(g, x, f)
    if not can_launch(*gs, *xs):
        return foreach_weighted_parts_reference(gs, xs, factors, parts)
    return launch_by_four(partial(_launch_four, parts=parts, tile=tile), gs, xs, factors)


def _launch_four(
    gs: list[Tensor], xs: list[Tensor], factors: list[Tensor], parts: int, tile: Tile | None
) -> list[Tensor]:
    if tile is None and runs_hopper(gs[0]) and weighted_hopper.enough_tiles(gs, xs, parts):
        return weighted_hopper.launch_four(gs, xs, factors, parts)
    (batch, tokens, _), dtype, device = gs[0].shape, gs[0].dtype, gs[0].device
    tile = tile or choose_tile(TILES, dtype, lambda tile: sum(count_tiles(gs, xs, parts, tile)))
    outs = [torch.empty(parts, g.shape[-1], x.shape[-1], dtype=torch.float32, device=device) for g, x in zip(gs, xs)]
    counts = count_tiles(gs, xs, parts, tile)
    _weighted_body[(sum(counts),)](
        *pair_descriptors(gs, xs, tile), *pad_to_four([f.contiguous() for f in factors]), *pad_to_four(outs),
        *widths_and_ends(gs, xs, counts), batch // parts, tokens,
        **outer_options(tile),
    )  # fmt: skip
    return outs


def _check_parts(gs: list[Tensor], parts: int) -> None:
    if parts < 1 or any(len(g) % parts for g in gs):
        raise ValueError(f"parts: expected a divisor of the number of samples, got {parts} of {[len(g) for g in gs]}")


def _out_dtype(g: Tensor) -> torch.dtype:
    return torch.float64 if g.dtype == torch.float64 else torch.float32


def _check(g: Tensor, x: Tensor, factors: Tensor) -> None:
    check_pair(g, x)
    if factors.shape != g.shape[:1] or factors.dtype not in (torch.float32, _out_dtype(g)):
        raise ValueError(
            f"factors: expected {g.shape[0]} float32 numbers, got shape {tuple(factors.shape)} {factors.dtype}; "
            "with a factor rounded to fewer digits, a clipped gradient can exceed its bound"
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
foreach_weighted_parts = define(
    "foreach_weighted_parts",
    "Tensor[] gs, Tensor[] xs, Tensor[] factors, int parts -> Tensor[]",
    reference=foreach_weighted_parts_reference,
    cuda=launch_foreach_weighted_parts,
    fake=lambda gs, xs, factors, parts: [
        _fake(g, x, f).new_empty(parts, g.shape[-1], x.shape[-1]) for g, x, f in zip(gs, xs, factors)
    ],
)
"""``(gs, xs, factors, parts)``: as :func:`foreach_weighted_parts_reference`."""
