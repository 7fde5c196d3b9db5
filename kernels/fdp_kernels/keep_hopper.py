"""``keep`` on Hopper: groups of warps multiply 64 rows each of a tile, round, square and store them; another loads.

    G_b[tile] = round(g_b[:, tile]^T x_b[:, tile])

A program goes from matrix to matrix, and in each from tile to tile. While one group rounds, squares and stores its
rows, the tensor cores work for the others, and the next tile is loaded. What is stored is what the body of ``keep``
stores, bit for bit; squares are summed with the same bound on rounding, in one part for each group of 64 rows instead
of one for each tile. With ``INT8`` it is what ``keep_int8`` stores: integers, and an exponent for 128 columns of a row;
their squares are exact.

Letters as in ``keep``; R the rows of a group.
"""

# Bodies are Gluon, which pyright takes for Python.
# pyright: reportInvalidTypeForm=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

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
    hopper,
    load_outer,
    make_ring,
    multiply_outer,
    outer_descriptors,
    pick_hopper,
    ring_descriptor,
    runs_hopper,
    tile_position_hopper,
)
from fdp_kernels.tile_gemm import (
    Tile,
    count_tiles,
    num_programs,
    pad_to_four,
    tiles_per_sample,
    widths_and_ends,
)

TILES = {
    Tile(3 * GROUP_ROWS, 128, DEPTH, warps=4, stages=4, per_sm=1, group=2): 1.5,
    Tile(2 * GROUP_ROWS, 256, DEPTH, warps=4, stages=3, per_sm=1, group=4): 2.06,
}
"""Tiles and the time of one, relative to 128 x 128 in the first."""
INT8_TILE = Tile(2 * GROUP_ROWS, 256, DEPTH, warps=4, stages=4, per_sm=1, group=4)
"""The tile of ``keep_int8``."""
INT8_COLUMNS = 128
"""Columns of a row that share an exponent in ``keep_int8``."""
REGISTERS = {128: 160, 256: 232}
"""Registers of a thread by the columns of a tile: a product of 128 columns takes half as many as one of 256."""
INT8_REGISTERS = 232
MIN_TILES = 100
"""With fewer tiles than this, most multiprocessors would have none."""


@gluon_jit
def _tiles_of(matrix, ends, count):
    """Return the first tile of a matrix that this program computes, and the number of tiles. Programs take turns."""
    begin = pick_hopper(matrix, 0, ends[0], ends[1], ends[2])
    programs = gl.num_programs(0)
    first = (gl.program_id(0) - begin % programs + programs) % programs
    return first, pick_hopper(matrix, ends[0], ends[1], ends[2], count) - begin


@gluon_jit
def _shape_of(matrix, ps, ds, BLOCK_P: gl.constexpr, BLOCK_D: gl.constexpr):
    """Return the widths of a matrix, and its tiles in rows and in columns."""
    p, d = pick_hopper(matrix, ps[0], ps[1], ps[2], ps[3]), pick_hopper(matrix, ds[0], ds[1], ds[2], ds[3])
    return p, d, gl.cdiv(p, BLOCK_P), gl.cdiv(d, BLOCK_D)


@gluon_jit
def _load_tiles(
    operands, work,
    BLOCK_P: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_T: gl.constexpr, TILES_DOWN: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    gs, xs = operands
    ps, ds, ends, ring, count, steps = work
    slot = 0
    phase = 1
    for matrix in range(4):
        _, _, rows, columns = _shape_of(matrix, ps, ds, BLOCK_P, BLOCK_D)
        g, x = pick_hopper(matrix, gs[0], gs[1], gs[2], gs[3]), pick_hopper(matrix, xs[0], xs[1], xs[2], xs[3])
        first, tiles = _tiles_of(matrix, ends, count)
        for own in range(first, tiles, gl.num_programs(0)):
            i, j = tile_position_hopper(own % (rows * columns), rows, columns, TILES_DOWN)
            b = own // (rows * columns)
            slot, phase = load_outer(g, x, b, i, j, steps, ring, slot, phase, BLOCK_P, BLOCK_D, BLOCK_T, SLOTS)


@gluon_jit
def _round_to_int8(acc_RD):
    """Return integers q, a row's exponent e, and ``sum (q 2^e)^2`` of every row: ``keep_int8.round_to_int8``."""
    largest_R = gl.max(gl.abs(acc_RD), 1) * (1 + 2.0**-7)  # rounds to 127 at most
    exponent_R = gl.maximum(((largest_R.to(gl.int32, bitcast=True) >> 23) & 255) - 133, -126)
    scale_R = ((127 - exponent_R) << 23).to(gl.float32, bitcast=True)  # 2^-e
    # Added to 1.5 * 2^23, a number is rounded to an integer, whose last eight bits are q. NaN and infinity stay.
    shifted_RD = gl.fma(acc_RD, gl.expand_dims(scale_R, 1), gl.full_like(acc_RD, 12582912.0))
    q_RD = shifted_RD - 12582912.0
    unit_R = ((2 * exponent_R + 1023).to(gl.int64) << 52).to(gl.float64, bitcast=True)  # 4^e
    squares_R = gl.sum(q_RD * q_RD, 1).to(gl.float64) * unit_R  # 128 squares below 2^14: exact in float32
    return shifted_RD.to(gl.int32, bitcast=True).to(gl.int8), exponent_R, squares_R


@gluon_jit
def _store_int8(half_RC, out, buffer, exponent_ptr, b, row, block, p, blocks):
    """Round and store rows of 128 columns that share exponents; return the sum of their squares."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    stored_RC, exponent_R, squares_R = _round_to_int8(gl.convert_layout(half_RC, LAYOUT, assert_trivial=True))
    buffer.reshape((64, 128)).store(stored_RC)
    hopper.fence_async_shared()
    hopper.tma.async_copy_shared_to_global(out, [b, row, block * 128], buffer)
    rows_R = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    place_R = (b.to(gl.int64) * p + rows_R) * blocks + block
    gl.store(exponent_ptr + place_R, exponent_R.to(gl.int8), mask=(rows_R < p) & (block < blocks))
    return gl.sum(squares_R, 0)


@gluon_jit
def _store_rows(
    GROUP: gl.constexpr, stores, work,
    BLOCK_P: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_T: gl.constexpr, TILES_DOWN: gl.constexpr, SLOTS: gl.constexpr,
    INT8: gl.constexpr,
):  # fmt: skip
    """Multiply, round, square and store rows 64 GROUP to 64 GROUP + 63 of every tile."""
    GROUPS: gl.constexpr = BLOCK_P // 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    outs, partials, exponents, buffers = stores
    ps, ds, ends, ring, count, steps = work
    acc = gl.zeros((64, BLOCK_D), gl.float32, MMA)
    slot = 0
    phase = 0
    for matrix in range(4):
        p, d, rows, columns = _shape_of(matrix, ps, ds, BLOCK_P, BLOCK_D)
        out = pick_hopper(matrix, outs[0], outs[1], outs[2], outs[3])
        partial_ptr = pick_hopper(matrix, partials[0], partials[1], partials[2], partials[3]) + GROUP
        exponent_ptr = pick_hopper(matrix, exponents[0], exponents[1], exponents[2], exponents[3])
        first, tiles = _tiles_of(matrix, ends, count)
        for own in range(first, tiles, gl.num_programs(0)):
            i, j = tile_position_hopper(own % (rows * columns), rows, columns, TILES_DOWN)
            b, row = own // (rows * columns), i * BLOCK_P + 64 * GROUP
            acc, slot, phase = multiply_outer(GROUP, acc, steps, ring, slot, phase, BLOCK_P, BLOCK_D, BLOCK_T, SLOTS)
            hopper.tma.store_wait(0)  # of the tile before this one
            if INT8:
                left_RC, right_RC = acc.reshape((64, 2, 128)).permute((0, 2, 1)).split()
                blocks = gl.cdiv(d, 128)
                squares = _store_int8(left_RC, out, buffers.index(2 * GROUP), exponent_ptr, b, row, 2 * j, p, blocks)
                squares += _store_int8(
                    right_RC, out, buffers.index(2 * GROUP + 1), exponent_ptr, b, row, 2 * j + 1, p, blocks
                )
            else:
                stored_RD = acc.to(buffers.dtype)
                buffer = buffers.index(GROUP)
                buffer.reshape((64, BLOCK_D)).store(stored_RD)
                hopper.fence_async_shared()
                hopper.tma.async_copy_shared_to_global(out, [b, row, j * BLOCK_D], buffer)
                # As tile_gemm.sum_of_squares does; rows past the last are zeros.
                wide_RD = stored_RD.to(gl.float32)
                squares = gl.sum(gl.sum(wide_RD * wide_RD, 1).to(gl.float64), 0) * (1 + 2.0**-15)
            gl.store(partial_ptr + own * GROUPS, squares)
    hopper.tma.store_wait(0)


@gluon_jit(do_not_specialize=("count", "tokens"))
def _keep_hopper_body(
    g0, g1, g2, g3, x0, x1, x2, x3, out0, out1, out2, out3, partial_ptr0, partial_ptr1, partial_ptr2, partial_ptr3,
    exponent_ptr0, exponent_ptr1, exponent_ptr2, exponent_ptr3,
    p0, p1, p2, p3, d0, d1, d2, d3, end0, end1, end2, count, tokens,
    BLOCK_P: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_T: gl.constexpr, TILES_DOWN: gl.constexpr,
    SLOTS: gl.constexpr, INT8: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = BLOCK_P // 64
    left = gl.allocate_shared_memory(g0.dtype, [GROUPS * SLOTS, 1, BLOCK_T, 64], g0.layout)
    right = gl.allocate_shared_memory(x0.dtype, [SLOTS, 1, BLOCK_T, BLOCK_D], x0.layout)
    COLUMNS: gl.constexpr = 128 if INT8 else BLOCK_D
    buffers = gl.allocate_shared_memory(out0.dtype, [GROUPS * (BLOCK_D // COLUMNS), 1, 64, COLUMNS], out0.layout)
    full, empty = make_ring(SLOTS, GROUPS)
    ring, steps = (left, right, full, empty), gl.cdiv(tokens, BLOCK_T)
    ps, ds, ends = (p0, p1, p2, p3), (d0, d1, d2, d3), (end0, end1, end2)
    outs, partials = (out0, out1, out2, out3), (partial_ptr0, partial_ptr1, partial_ptr2, partial_ptr3)
    exponents = (exponent_ptr0, exponent_ptr1, exponent_ptr2, exponent_ptr3)
    stores = (outs, partials, exponents, buffers)
    work, operands = (ps, ds, ends, ring, count, steps), ((g0, g1, g2, g3), (x0, x1, x2, x3))
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_store_rows, (0, stores, work, BLOCK_P, BLOCK_D, BLOCK_T, TILES_DOWN, SLOTS, INT8)),
                (_store_rows, (1, stores, work, BLOCK_P, BLOCK_D, BLOCK_T, TILES_DOWN, SLOTS, INT8)),
                (_store_rows, (2, stores, work, BLOCK_P, BLOCK_D, BLOCK_T, TILES_DOWN, SLOTS, INT8)),
                (_load_tiles, (operands, work, BLOCK_P, BLOCK_D, BLOCK_T, TILES_DOWN, SLOTS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_store_rows, (0, stores, work, BLOCK_P, BLOCK_D, BLOCK_T, TILES_DOWN, SLOTS, INT8)),
                (_store_rows, (1, stores, work, BLOCK_P, BLOCK_D, BLOCK_T, TILES_DOWN, SLOTS, INT8)),
                (_load_tiles, (operands, work, BLOCK_P, BLOCK_D, BLOCK_T, TILES_DOWN, SLOTS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


def choose_tile(gs: list[Tensor], xs: list[Tensor]) -> Tile | None:
    """Return the tile of one launch; None if the body of ``keep`` should run instead.

    TMA stores rows that start at multiples of 16 bytes only.
    """
    stores = all(x.shape[-1] * x.element_size() % 16 == 0 for x in xs)
    if not (stores and runs_hopper(gs[0])):
        return None
    tile = fastest_tile(TILES, partial(count_tiles, gs, xs, len(gs[0])), gs[0].device)
    return tile if sum(count_tiles(gs, xs, len(gs[0]), tile)) >= MIN_TILES else None


def num_parts(g_BTP: Tensor, x_BTD: Tensor, tile: Tile) -> int:
    """Return the number of parts of a sample's squared norm."""
    return tiles_per_sample(g_BTP, x_BTD, tile) * (tile.rows // GROUP_ROWS)


def launch_four(gs: list[Tensor], xs: list[Tensor], tile: Tile) -> list[tuple[Tensor, Tensor]]:
    """Return gradients and squared norms in parts, (B, P, D) and (B, parts), of up to four pairs."""
    batch, dtype, device = len(gs[0]), gs[0].dtype, gs[0].device
    outs = [torch.empty(batch, g.shape[-1], x.shape[-1], dtype=dtype, device=device) for g, x in zip(gs, xs)]
    partials = [torch.empty(batch, num_parts(g, x, tile), dtype=torch.float64, device=device) for g, x in zip(gs, xs)]
    _launch_body(gs, xs, outs, None, partials, tile)
    return list(zip(outs, partials))


def launch_four_int8(
    gs: list[Tensor], xs: list[Tensor], outs: list[Tensor], exponents: list[Tensor], partials: list[Tensor]
) -> None:
    """Fill integers (B, P, D), exponents (B, P, J) and squared norms in parts (B, parts) of up to four pairs."""
    _launch_body(gs, xs, outs, exponents, partials, INT8_TILE)


def _launch_body(
    gs: list[Tensor],
    xs: list[Tensor],
    outs: list[Tensor],
    exponents: list[Tensor] | None,
    partials: list[Tensor],
    tile: Tile,
) -> None:
    """Fill ``outs``, squared norms in parts and, if ``outs`` are integers, ``exponents``."""
    (batch, tokens, _), device = gs[0].shape, gs[0].device
    counts = count_tiles(gs, xs, batch, tile)
    columns = tile.columns if exponents is None else INT8_COLUMNS
    stores = [ring_descriptor(G, (1, GROUP_ROWS, columns)) for G in outs]
    _keep_hopper_body[(num_programs(sum(counts), tile, device),)](
        *outer_descriptors(gs, xs, tile), *pad_to_four(stores), *pad_to_four(partials),
        *pad_to_four(partials if exponents is None else exponents), *widths_and_ends(gs, xs, counts), sum(counts),
        tokens, BLOCK_P=tile.rows, BLOCK_D=tile.columns, BLOCK_T=tile.depth, TILES_DOWN=tile.group, SLOTS=tile.stages,
        INT8=exponents is not None, REGISTERS=REGISTERS[tile.columns] if exponents is None else INT8_REGISTERS,
        num_warps=tile.warps,
    )  # fmt: skip
