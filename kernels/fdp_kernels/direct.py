"""Per-sample squared norms of a linear layer's weight gradient, which is never stored.

    n_b = |G_b|^2,   G_b = sum_t g_bt x_bt^T         g (B, T, P), x (B, T, D)  ->  n (B,) float64

Operands are bfloat16, float16 or float32. Tiles of G_b are summed over tokens in float32, in the order of
``tile_gemm.outer``, then squared and summed in float64. ``weighted`` computes the same tiles in the same order, so it
adds bit for bit what is measured here.

    >>> squared = direct(g, x)                                   # 2 B T P D flops, B * tiles float64 of memory
    >>> factors = (C / squared.sqrt()).clamp(max=1).float()
    >>> total = weighted(g, x, factors)

``foreach_direct`` measures several matrices, four per launch.

    >>> squared = foreach_direct([g, h], [x, y])                 # (2, B)

Guarantees:
  - the result is the squared norm of the numbers that ``weighted`` adds for a sample, to float64 rounding;
  - a sample with a NaN or infinite gradient has a NaN or infinite norm, and no other sample has.

Letters: B samples, T tokens, P output features, D input features.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

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
    num_programs,
    outer,
    outer_options,
    pair_descriptors,
    pick,
    sum_of_squares,
    tile_position,
    widths_and_ends,
)

TILES = (
    TileChoice(96, Tile(128, 128, 64, warps=4, stages=3, per_sm=2)),
    TileChoice(0, Tile(64, 64, 64, warps=4, stages=4)),
)
"""For ``direct`` and ``keep``, large problems first. `python -m benchmarks.kernels --tune` finds the best tiles."""


def direct_reference(g_BTP: Tensor, x_BTD: Tensor) -> Tensor:
    """Return ``|G_b|^2``: (B,), computed in float64."""
    check_pair(g_BTP, x_BTD)
    G_BPD = torch.bmm(g_BTP.double().mT, x_BTD.double())
    return G_BPD.square().sum((1, 2))


def foreach_direct_reference(gs: list[Tensor], xs: list[Tensor]) -> Tensor:
    """Apply :func:`direct_reference` to each pair: (matrices, B)."""
    check_pairs(gs, xs)
    return torch.stack([direct_reference(g, x) for g, x in zip(gs, xs)])


@jit
def _direct_body(
    g0, g1, g2, g3, x0, x1, x2, x3, p0, p1, p2, p3, d0, d1, d2, d3, end0, end1, end2, partial_ptr, count, tokens,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # If every tile has its own program, the loop runs once.
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):  # pyright: ignore
        matrix = matrix_index(index, end0, end1, end2)
        own = index - pick(matrix, 0, end0, end1, end2)
        rows = tl.cdiv(pick(matrix, p0, p1, p2, p3), BLOCK_P)
        columns = tl.cdiv(pick(matrix, d0, d1, d2, d3), BLOCK_D)
        b = own // (rows * columns)
        i, j = tile_position(own % (rows * columns), rows, columns, GROUP)
        g, x = pick(matrix, g0, g1, g2, g3), pick(matrix, x0, x1, x2, x3)
        acc_PD = outer(g, x, b, i, j, tokens, BLOCK_P, BLOCK_D, BLOCK_T)
        tl.store(partial_ptr + index, sum_of_squares(acc_PD))


def launch_direct(g_BTP: Tensor, x_BTD: Tensor, *, tile: Tile | None = None) -> Tensor:
    """Evaluate :func:`direct_reference` with the kernel; ``tile`` overrides the table."""
    return launch_foreach_direct([g_BTP], [x_BTD], tile=tile)[0]


def launch_foreach_direct(gs: list[Tensor], xs: list[Tensor], *, tile: Tile | None = None) -> Tensor:
    """Evaluate :func:`foreach_direct_reference` with the kernel, four matrices per launch."""
    check_pairs(gs, xs)
    if not can_launch(*gs, *xs):
        return foreach_direct_reference(gs, xs)
    return torch.stack(launch_by_four(partial(_launch_four, tile=tile), gs, xs))


def _launch_four(gs: list[Tensor], xs: list[Tensor], tile: Tile | None) -> list[Tensor]:
    (batch, tokens, _), dtype, device = gs[0].shape, gs[0].dtype, gs[0].device
    tile = tile or choose_tile(TILES, dtype, lambda tile: sum(count_tiles(gs, xs, batch, tile)))
    counts = count_tiles(gs, xs, batch, tile)
    total = sum(counts)
    sums = torch.empty(total, dtype=torch.float64, device=device)
    _direct_body[(num_programs(total, tile, device),)](
        *pair_descriptors(gs, xs, tile), *widths_and_ends(gs, xs, counts), sums, total, tokens,
        **outer_options(tile),
    )  # fmt: skip
    return [part.view(batch, -1).sum(1) for part in sums.split(counts)]


def _fake(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], dtype=torch.float64)


direct = define("direct", "Tensor g, Tensor x -> Tensor", reference=direct_reference, cuda=launch_direct, fake=_fake)
"""``(g_BTP, x_BTD)``: as :func:`direct_reference`."""
foreach_direct = define(
    "foreach_direct",
    "Tensor[] gs, Tensor[] xs -> Tensor",
    reference=foreach_direct_reference,
    cuda=launch_foreach_direct,
    fake=lambda gs, xs: gs[0].new_empty(len(gs), len(gs[0]), dtype=torch.float64),
)
"""``(gs, xs)``: as :func:`foreach_direct_reference`; all pairs have equal samples and tokens."""
