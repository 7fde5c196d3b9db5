"""The tiles of ``ghost`` on Hopper: two groups of warps multiply 64 rows each of a tile of 128 x 128, a third loads.

A program goes from tile to tile. While one group sums up what the norm needs of its strip of 64 rows, the tensor cores
work for the other, and the next tile is loaded. Products, their order and what is stored are those of ``ghost``, in
strips; so is the bound on rounding. On the diagonal the upper strip has half the columns.

Letters as in ``ghost``; R the rows of a strip, C the tokens on either side of a tile.
"""

# Bodies are Gluon, which pyright takes for Python.
# pyright: reportInvalidTypeForm=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fdp_kernels.ghost_strips import CHUNK, row_and_column, store_strip
from fdp_kernels.hopper import (
    DEPTH,
    GROUP_ROWS,
    gl,
    gluon_jit,
    gluon_jit_of,
    hopper,
    make_ring,
    next_slot,
    pick_hopper,
    ring_descriptor,
)
from fdp_kernels.tile_gemm import Tile, cdiv, num_programs, pad_to_four

TILE = Tile(128, 128, DEPTH, warps=4, stages=6, per_sm=1)
STRIPS = TILE.rows // GROUP_ROWS
REGISTERS = 232
MIN_TILES, MOST_FEATURES = 3, 1 << 15
"""With fewer tiles per sample than this, a program has hardly a tile to go on to; with more features, as those of a
vocabulary, there is little to sum up, and the two groups only wait for each other."""


_row_and_column, _store_strip = gluon_jit_of(row_and_column), gluon_jit_of(store_strip)


@gluon_jit
def _place(index, batch, pairs):
    """Return matrix and sample of a tile, its row and its column."""
    i, j = _row_and_column(index % pairs)
    return index // (batch * pairs), index // pairs % batch, i, j


@gluon_jit
def _load_rows(z, sample, i, j, width, ring, slot, phase, C: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr,
               SLOTS: gl.constexpr):  # fmt: skip
    """Load the rows of a tile, and of its columns unless they are the same, K features at a time."""
    left, right, full, empty = ring
    chunks = gl.cdiv(width, CHUNK)
    for step in range(chunks * gl.cdiv(gl.cdiv(width, K), chunks)):
        hopper.mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        hopper.mbarrier.expect(bar, C * K * 2, pred=i == j)
        hopper.mbarrier.expect(bar, 2 * C * K * 2, pred=i != j)
        hopper.tma.async_copy_global_to_shared(z, [sample, i * C, step * K], bar, left.index(slot))
        hopper.tma.async_copy_global_to_shared(z, [sample, j * C, step * K], bar, right.index(slot), pred=i != j)
        slot, phase = next_slot(slot, phase, SLOTS)
    return slot, phase


@gluon_jit
def _load_tiles(gs, xs, ps, ds, ring, tiles, batch, pairs, C: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr,
                SLOTS: gl.constexpr):  # fmt: skip
    slot = 0
    phase = 1
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        matrix, sample, i, j = _place(index, batch, pairs)
        g, p = pick_hopper(matrix, gs[0], gs[1], gs[2], gs[3]), pick_hopper(matrix, ps[0], ps[1], ps[2], ps[3])
        slot, phase = _load_rows(g, sample, i, j, p, ring, slot, phase, C, K, CHUNK, SLOTS)
        x, d = pick_hopper(matrix, xs[0], xs[1], xs[2], xs[3]), pick_hopper(matrix, ds[0], ds[1], ds[2], ds[3])
        slot, phase = _load_rows(x, sample, i, j, d, ring, slot, phase, C, K, CHUNK, SLOTS)


@gluon_jit
def _inner(
    GROUP: gl.constexpr, DIAGONAL: gl.constexpr, width, ring, slot, phase,
    C: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Return 64 rows of ``z_b[tile i] z_b[tile j]^T``, summed as ``tile_gemm.inner`` does, and the next slot.

    On the diagonal the columns are rows of the same tile, and those after a strip's own are left out.
    """
    left, right, full, empty = ring
    N: gl.constexpr = 64 * (GROUP + 1) if DIAGONAL else C
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    chunks = gl.cdiv(width, CHUNK)
    steps = gl.cdiv(gl.cdiv(width, K), chunks)
    total = gl.zeros((64, N), gl.float32, MMA)
    acc = gl.zeros((64, N), gl.float32, MMA)
    last = slot
    for _ in range(chunks):
        for step in range(steps):
            hopper.mbarrier.wait(full.index(slot), phase)
            z_CK = left.index(slot).reshape((C, K))
            z_NK = z_CK.slice(0, N, 0) if DIAGONAL else right.index(slot).reshape((C, K))
            z_RK = z_CK.slice(GROUP * 64, 64, 0)
            token = hopper.warpgroup_mma(z_RK, z_NK.permute((1, 0)), acc, use_acc=step > 0, is_async=True)
            acc = hopper.warpgroup_mma_wait(1, deps=[token])  # the step before this one is done
            if step > 0:
                hopper.mbarrier.arrive(empty.index(last), count=1)
            last = slot
            slot, phase = next_slot(slot, phase, SLOTS)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(empty.index(last), count=1)
        total += acc
    return total, slot, phase


@gluon_jit
def _sum_strip(
    GROUP: gl.constexpr, DIAGONAL: gl.constexpr, place, widths, units, ring, stores, slot, phase, batch, tokens,
    C: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Multiply and store one strip; return the next slot."""
    STRIPS: gl.constexpr = C // 64
    N: gl.constexpr = 64 * (GROUP + 1) if DIAGONAL else C
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    index, matrix, sample, i, j = place
    A_RN, slot, phase = _inner(GROUP, DIAGONAL, widths[0], ring, slot, phase, C, K, CHUNK, SLOTS)
    X_RN, slot, phase = _inner(GROUP, DIAGONAL, widths[1], ring, slot, phase, C, K, CHUNK, SLOTS)
    row = ((matrix * batch + sample).to(gl.int64) * gl.cdiv(tokens, C) + i) * STRIPS + GROUP
    _store_strip(
        A_RN, X_RN, gl.arange(0, 64, gl.SliceLayout(1, MMA)), gl.arange(0, N, gl.SliceLayout(0, MMA)),
        index * STRIPS + GROUP, row, i, j, widths[0], widths[1], units[0], units[1],
        stores[0], stores[1], stores[2], stores[3], tokens, 64, C,
    )  # fmt: skip
    return slot, phase


@gluon_jit
def _sum_strips(
    GROUP: gl.constexpr, ps, ds, units_ps, units_ds, ring, stores, tiles, batch, tokens, pairs,
    C: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        matrix, sample, i, j = _place(index, batch, pairs)
        place = (index, matrix, sample, i, j)
        widths = (pick_hopper(matrix, ps[0], ps[1], ps[2], ps[3]), pick_hopper(matrix, ds[0], ds[1], ds[2], ds[3]))
        units = (
            pick_hopper(matrix, units_ps[0], units_ps[1], units_ps[2], units_ps[3]),
            pick_hopper(matrix, units_ds[0], units_ds[1], units_ds[2], units_ds[3]),
        )
        if i == j:
            slot, phase = _sum_strip(
                GROUP, True, place, widths, units, ring, stores, slot, phase, batch, tokens, C, K, CHUNK, SLOTS
            )
        else:
            slot, phase = _sum_strip(
                GROUP, False, place, widths, units, ring, stores, slot, phase, batch, tokens, C, K, CHUNK, SLOTS
            )


@gluon_jit(do_not_specialize=("tiles", "batch", "tokens", "pairs"))
def _ghost_hopper_body(
    g0, g1, g2, g3, x0, x1, x2, x3, p0, p1, p2, p3, d0, d1, d2, d3,
    units_p0, units_p1, units_p2, units_p3, units_d0, units_d1, units_d2, units_d3,
    tile_ptr, size_ptr, token_ptr, row_ptr, tiles, batch, tokens, pairs,
    C: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr, SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    left = gl.allocate_shared_memory(g0.dtype, [SLOTS, 1, C, K], g0.layout)
    right = gl.allocate_shared_memory(g0.dtype, [SLOTS, 1, C, K], g0.layout)
    full, empty = make_ring(SLOTS, 2)
    ring, stores = (left, right, full, empty), (tile_ptr, size_ptr, token_ptr, row_ptr)
    ps, ds = (p0, p1, p2, p3), (d0, d1, d2, d3)
    units_ps = (units_p0, units_p1, units_p2, units_p3)
    units_ds = (units_d0, units_d1, units_d2, units_d3)
    gl.warp_specialize(
        [
            (_sum_strips, (0, ps, ds, units_ps, units_ds, ring, stores, tiles, batch, tokens, pairs,
                           C, K, CHUNK, SLOTS)),
            (_sum_strips, (1, ps, ds, units_ps, units_ds, ring, stores, tiles, batch, tokens, pairs,
                           C, K, CHUNK, SLOTS)),
            (_load_tiles, ((g0, g1, g2, g3), (x0, x1, x2, x3), ps, ds, ring, tiles, batch, pairs, C, K, CHUNK, SLOTS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def pays_off(g_BTP: Tensor) -> bool:
    """Return True if this is faster than the body of ``ghost``; a launch takes this body if it is for all its pairs.

    That must not depend on the number of samples: the bodies differ in their bound on rounding.
    """
    _, tokens, features = g_BTP.shape
    rows = cdiv(tokens, TILE.rows)
    return features <= MOST_FEATURES and rows * (rows + 1) // 2 >= MIN_TILES


def launch_body(
    gs: list[Tensor], xs: list[Tensor], tile: Tile, stores: Sequence[Tensor], widths: list[list[int]],
    units: Sequence[float], pairs: int,
) -> None:  # fmt: skip
    """Fill ``stores`` as the body of ``ghost`` does, in strips."""
    batch, tokens, _ = gs[0].shape
    tiles = len(stores[0]) // STRIPS
    _ghost_hopper_body[(num_programs(tiles, tile, gs[0].device),)](
        *pad_to_four([ring_descriptor(g, (1, tile.rows, tile.depth)) for g in gs]),
        *pad_to_four([ring_descriptor(x, (1, tile.rows, tile.depth)) for x in xs]),
        *pad_to_four(widths[0]), *pad_to_four(widths[1]), *units, *stores, tiles, batch, tokens, pairs,
        C=tile.rows, K=tile.depth, CHUNK=CHUNK, SLOTS=tile.stages, REGISTERS=REGISTERS, num_warps=tile.warps,
    )  # fmt: skip
