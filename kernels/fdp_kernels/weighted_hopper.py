"""``weighted`` on Hopper: two or three groups of warps add 64 rows each of a tile 128 columns wide, another loads.

    total = sum_b c_b acc_b,   acc_b = g_b[:, tile]^T x_b[:, tile]

The same numbers as from the body of ``weighted``, bit for bit. A sample with factor 0 is never read: the loads go past
the last sample, where TMA gives zeros.

On an H200 the sums of a block of gpt2-medium take 0.164 ms at 16 samples of 256 tokens (0.181 with 192 rows), a plain
product over all samples by cuBLAS 0.141 ms; at 64 of 512 tokens 1.31 ms (1.44), cuBLAS 1.37 ms.

Letters as in ``weighted``.
"""

# Bodies are Gluon, which pyright takes for Python.
# pyright: reportInvalidTypeForm=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fdp_kernels.hopper import (
    DEPTH,
    GROUP_ROWS,
    fastest_tile,
    gl,
    gluon_jit,
    load_outer,
    make_ring,
    matrix_index_hopper,
    multiply_outer,
    outer_descriptors,
    pick_hopper,
    tile_position_hopper,
)
from fdp_kernels.tile_gemm import Tile, count_tiles, pad_to_four, widths_and_ends

TILES = {
    Tile(3 * GROUP_ROWS, 128, DEPTH, warps=4, stages=4, group=4): 1.5,
    Tile(2 * GROUP_ROWS, 128, DEPTH, warps=4, stages=6, group=4): 1.08,
}
"""Tiles and the time of one, relative to 128 rows in a tile of 192: two groups wait for each other more often.

With three groups a thread has 160 registers, of which 128 hold total and product. (128 x 256 would not fit.)
"""
REGISTERS = 160
MIN_TILES = 90
"""With fewer tiles than this, most multiprocessors would have none."""


@gluon_jit
def _load_samples(
    g, x, factor_ptr, ring, work, batch,
    BLOCK_P: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_T: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    first, samples, steps, _, i, j = work
    slot = 0
    phase = 1
    for b in range(first, first + samples):
        sample = gl.where(gl.load(factor_ptr + b) != 0, b, batch)  # factor 0: past the last, where all is zero
        slot, phase = load_outer(g, x, sample, i, j, steps, ring, slot, phase, BLOCK_P, BLOCK_D, BLOCK_T, SLOTS)


@gluon_jit
def _add_samples(
    GROUP: gl.constexpr, factor_ptr, out_ptr, ring, work, p, d,
    BLOCK_P: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_T: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Add rows 64 GROUP to 64 GROUP + 63 of the tile over all samples and store them."""
    first, samples, steps, part, i, j = work
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    total = gl.zeros((64, BLOCK_D), gl.float32, MMA)
    acc = gl.zeros((64, BLOCK_D), gl.float32, MMA)
    slot = 0
    phase = 0
    for b in range(first, first + samples):
        factor = gl.load(factor_ptr + b)
        acc, slot, phase = multiply_outer(GROUP, acc, steps, ring, slot, phase, BLOCK_P, BLOCK_D, BLOCK_T, SLOTS)
        total = gl.fma(acc, factor, total)
    row = i * BLOCK_P + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    column = j * BLOCK_D + gl.arange(0, BLOCK_D, gl.SliceLayout(0, MMA))
    offset = (part.to(gl.int64) * p + row[:, None]) * d + column[None, :]
    gl.store(out_ptr + offset, total, mask=(row < p)[:, None] & (column < d)[None, :])


@gluon_jit(do_not_specialize=("samples", "tokens", "batch"))
def _weighted_hopper_body(
    g0, g1, g2, g3, x0, x1, x2, x3, factor_ptr0, factor_ptr1, factor_ptr2, factor_ptr3,
    out_ptr0, out_ptr1, out_ptr2, out_ptr3, p0, p1, p2, p3, d0, d1, d2, d3, end0, end1, end2, samples, tokens, batch,
    BLOCK_P: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_T: gl.constexpr, TILES_DOWN: gl.constexpr,
    SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    index = gl.program_id(0)
    matrix = matrix_index_hopper(index, end0, end1, end2)
    g, x = pick_hopper(matrix, g0, g1, g2, g3), pick_hopper(matrix, x0, x1, x2, x3)
    p, d = pick_hopper(matrix, p0, p1, p2, p3), pick_hopper(matrix, d0, d1, d2, d3)
    factor_ptr = pick_hopper(matrix, factor_ptr0, factor_ptr1, factor_ptr2, factor_ptr3)
    out_ptr = pick_hopper(matrix, out_ptr0, out_ptr1, out_ptr2, out_ptr3)
    own, rows, columns = index - pick_hopper(matrix, 0, end0, end1, end2), gl.cdiv(p, BLOCK_P), gl.cdiv(d, BLOCK_D)
    part = own // (rows * columns)
    i, j = tile_position_hopper(own % (rows * columns), rows, columns, TILES_DOWN)

    GROUPS: gl.constexpr = BLOCK_P // 64
    left = gl.allocate_shared_memory(g0.dtype, [GROUPS * SLOTS, 1, BLOCK_T, 64], g0.layout)
    right = gl.allocate_shared_memory(x0.dtype, [SLOTS, 1, BLOCK_T, BLOCK_D], x0.layout)
    full, empty = make_ring(SLOTS, GROUPS)
    steps, first = gl.cdiv(tokens, BLOCK_T), part * samples
    ring, work = (left, right, full, empty), (first, samples, steps, part, i, j)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_add_samples, (0, factor_ptr, out_ptr, ring, work, p, d, BLOCK_P, BLOCK_D, BLOCK_T, SLOTS)),
                (_add_samples, (1, factor_ptr, out_ptr, ring, work, p, d, BLOCK_P, BLOCK_D, BLOCK_T, SLOTS)),
                (_add_samples, (2, factor_ptr, out_ptr, ring, work, p, d, BLOCK_P, BLOCK_D, BLOCK_T, SLOTS)),
                (_load_samples, (g, x, factor_ptr, ring, work, batch, BLOCK_P, BLOCK_D, BLOCK_T, SLOTS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_add_samples, (0, factor_ptr, out_ptr, ring, work, p, d, BLOCK_P, BLOCK_D, BLOCK_T, SLOTS)),
                (_add_samples, (1, factor_ptr, out_ptr, ring, work, p, d, BLOCK_P, BLOCK_D, BLOCK_T, SLOTS)),
                (_load_samples, (g, x, factor_ptr, ring, work, batch, BLOCK_P, BLOCK_D, BLOCK_T, SLOTS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


def enough_tiles(gs: list[Tensor], xs: list[Tensor], parts: int) -> bool:
    """Return True if there are tiles for most multiprocessors."""
    return sum(count_tiles(gs, xs, parts, next(iter(TILES)))) >= MIN_TILES


def launch_four(
    gs: list[Tensor], xs: list[Tensor], factors: list[Tensor], parts: int, *, tile: Tile | None = None
) -> list[Tensor]:
    """Return the weighted sums of up to four pairs, in ``parts`` parts: (parts, P, D) each."""
    (batch, tokens, _), device = gs[0].shape, gs[0].device
    tile = tile or fastest_tile(TILES, partial(count_tiles, gs, xs, parts), device, beside=True)
    outs = [torch.empty(parts, g.shape[-1], x.shape[-1], dtype=torch.float32, device=device) for g, x in zip(gs, xs)]
    counts = count_tiles(gs, xs, parts, tile)
    _weighted_hopper_body[(sum(counts),)](
        *outer_descriptors(gs, xs, tile), *pad_to_four([f.contiguous() for f in factors]), *pad_to_four(outs),
        *widths_and_ends(gs, xs, counts), batch // parts, tokens, batch,
        BLOCK_P=tile.rows, BLOCK_D=tile.columns, BLOCK_T=tile.depth, TILES_DOWN=tile.group, SLOTS=tile.stages,
        REGISTERS=REGISTERS, num_warps=tile.warps,
    )  # fmt: skip
    return outs
