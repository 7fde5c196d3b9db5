"""Per-sample squared norms of a linear layer's weight gradient, which is never stored.

    n_b = |G_b|^2,   G_b = sum_t g_bt x_bt^T         g (B, T, P), x (B, T, D)  ->  n (B,) float64

Operands bfloat16, float16 or float32; G_b is summed over tokens in float32, in tiles, in the order of
``tile_gemm.outer``, and squared and summed in float64. ``weighted`` forms the same tiles in the same order: what is
measured here is, bit for bit, what it adds.

    >>> squared = direct(g, x)                                   # 2 B T P D flops, B * tiles float64 of memory
    >>> factors = (C / squared.sqrt()).clamp(max=1).float()
    >>> total = weighted(g, x, factors)

Guarantees:
  - the squared norm of the numbers that ``weighted`` adds for a sample, to float64 rounding;
  - a sample with a NaN or infinite gradient has a NaN or infinite norm, and no other sample has.

Letters: B samples, T tokens, P output features, D input features.
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
    choose,
    described,
    launchable,
    outer,
    place,
    programs,
    sum_of_squares,
    tiles,
)

TILES = (
    Row(96, Tile(128, 128, 64, warps=4, stages=3, per_sm=2)),
    Row(0, Tile(64, 64, 64, warps=4, stages=4)),
)
"""Large problems first; `python benchmarks/kernels.py --tune` prints what is best on a device."""


def tile_of(g_BTP: Tensor, x_BTD: Tensor) -> Tile:
    """The tile in which the gradients of all samples are multiplied out, here and in ``keep``."""
    batch, p, d = len(g_BTP), g_BTP.shape[-1], x_BTD.shape[-1]
    return choose(TILES, g_BTP.dtype, lambda tile: batch * tiles(p, tile.rows) * tiles(d, tile.columns))


def direct_reference(g_BTP: Tensor, x_BTD: Tensor) -> Tensor:
    """In float64 throughout."""
    check_pair(g_BTP, x_BTD)
    G_BPD = torch.bmm(g_BTP.double().mT, x_BTD.double())
    return G_BPD.square().sum((1, 2))


@jit
def _one_tile(
    g, x, partial_ptr, index, tokens, rows, columns,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    b = index // (rows * columns)
    i, j = place(index % (rows * columns), rows, columns, GROUP)
    acc_PD = outer(g, x, b, i, j, tokens, BLOCK_P, BLOCK_D, BLOCK_T)
    tl.store(partial_ptr + index, sum_of_squares(acc_PD))


@jit
def _direct_body(
    g, x, partial_ptr, batch, tokens, rows, columns,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        count = batch * rows * columns
        for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):  # pyright: ignore
            _one_tile(g, x, partial_ptr, index, tokens, rows, columns, BLOCK_P, BLOCK_D, BLOCK_T, GROUP)
    else:
        _one_tile(g, x, partial_ptr, tl.program_id(0), tokens, rows, columns, BLOCK_P, BLOCK_D, BLOCK_T, GROUP)


def launch_direct(g_BTP: Tensor, x_BTD: Tensor, *, tile: Tile | None = None) -> Tensor:
    """As :func:`direct_reference`, by the kernel; ``tile`` overrides the table."""
    check_pair(g_BTP, x_BTD)
    if not launchable(g_BTP, x_BTD):
        return direct_reference(g_BTP, x_BTD)
    (batch, tokens, p), d = g_BTP.shape, x_BTD.shape[-1]
    tile = tile or tile_of(g_BTP, x_BTD)
    rows, columns = tiles(p, tile.rows), tiles(d, tile.columns)
    partial = torch.empty(batch, rows * columns, dtype=torch.float64, device=g_BTP.device)
    _direct_body[(programs(partial.numel(), tile, g_BTP.device),)](
        described(aligned(g_BTP), (1, tile.depth, tile.rows)),
        described(aligned(x_BTD), (1, tile.depth, tile.columns)),
        partial, batch, tokens, rows, columns,
        BLOCK_P=tile.rows, BLOCK_D=tile.columns, BLOCK_T=tile.depth, GROUP=tile.group, PERSISTENT=tile.per_sm > 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return partial.sum(1)


def _fake(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], dtype=torch.float64)


direct = define("direct", "Tensor g, Tensor x -> Tensor", reference=direct_reference, cuda=launch_direct, fake=_fake)
"""``(g_BTP, x_BTD)``: as :func:`direct_reference`."""
