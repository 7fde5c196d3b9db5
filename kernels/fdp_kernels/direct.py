"""Per-sample squared norms of a linear layer's weight gradient, which is never stored.

    n_b = |G_b|^2,   G_b = sum_t g_bt x_bt^T         g (B, T, P), x (B, T, D)  ->  n (B,) float64

Operands bfloat16, float16 or float32; G_b is summed over tokens in float32, in tiles, in the order of
``tile_gemm.outer``, and squared and summed in float64. ``weighted`` forms the same tiles in the same order: what is
measured here is, bit for bit, what it adds.

    >>> squared = direct(g, x)                                   # 2 B T P D flops, B * tiles float64 of memory
    >>> factors = (C / squared.sqrt()).clamp(max=1).float()
    >>> total = weighted(g, x, factors)

``many_direct`` measures several matrices, four in a launch.

    >>> squared = many_direct([g, h], [x, y])                    # (2, B)

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
    check_pair,
    check_pairs,
    choose,
    described_pairs,
    extents,
    fours,
    launchable,
    outer,
    pick,
    place,
    programs,
    sum_of_squares,
    tiles_of,
    which,
)

TILES = (
    Row(96, Tile(128, 128, 64, warps=4, stages=3, per_sm=2)),
    Row(0, Tile(64, 64, 64, warps=4, stages=4)),
)
"""Here and in ``keep``. Large problems first; `python benchmarks/kernels.py --tune` prints what is best on a device."""


def direct_reference(g_BTP: Tensor, x_BTD: Tensor) -> Tensor:
    """In float64 throughout."""
    check_pair(g_BTP, x_BTD)
    G_BPD = torch.bmm(g_BTP.double().mT, x_BTD.double())
    return G_BPD.square().sum((1, 2))


def many_direct_reference(gs: list[Tensor], xs: list[Tensor]) -> Tensor:
    """:func:`direct_reference` of each: (matrices, B)."""
    check_pairs(gs, xs)
    return torch.stack([direct_reference(g, x) for g, x in zip(gs, xs)])


@jit
def _direct_body(
    g0, g1, g2, g3, x0, x1, x2, x3, p0, p1, p2, p3, d0, d1, d2, d3, end0, end1, end2, partial_ptr, count, tokens,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # One turn of the loop where there is a program for every tile.
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):  # pyright: ignore
        use = which(index, end0, end1, end2)
        own = index - pick(use, 0, end0, end1, end2)
        rows = tl.cdiv(pick(use, p0, p1, p2, p3), BLOCK_P)
        columns = tl.cdiv(pick(use, d0, d1, d2, d3), BLOCK_D)
        b = own // (rows * columns)
        i, j = place(own % (rows * columns), rows, columns, GROUP)
        g, x = pick(use, g0, g1, g2, g3), pick(use, x0, x1, x2, x3)
        acc_PD = outer(g, x, b, i, j, tokens, BLOCK_P, BLOCK_D, BLOCK_T)
        tl.store(partial_ptr + index, sum_of_squares(acc_PD))


def launch_direct(g_BTP: Tensor, x_BTD: Tensor, *, tile: Tile | None = None) -> Tensor:
    """As :func:`direct_reference`, by the kernel; ``tile`` overrides the table."""
    return launch_many_direct([g_BTP], [x_BTD], tile=tile)[0]


def launch_many_direct(gs: list[Tensor], xs: list[Tensor], *, tile: Tile | None = None) -> Tensor:
    """As :func:`many_direct_reference`, by the kernel, four matrices in a launch."""
    check_pairs(gs, xs)
    if not launchable(*gs, *xs):
        return many_direct_reference(gs, xs)
    return torch.stack([norm for four in fours(gs) for norm in _of_four(gs[four], xs[four], tile)])


def _of_four(gs: list[Tensor], xs: list[Tensor], tile: Tile | None) -> list[Tensor]:
    (batch, tokens, _), dtype, device = gs[0].shape, gs[0].dtype, gs[0].device
    tile = tile or choose(TILES, dtype, lambda tile: batch * sum(tiles_of(g, x, tile) for g, x in zip(gs, xs)))
    counts = [batch * tiles_of(g, x, tile) for g, x in zip(gs, xs)]
    total = sum(counts)
    partial = torch.empty(total, dtype=torch.float64, device=device)
    _direct_body[(programs(total, tile, device),)](
        *described_pairs(gs, xs, tile), *extents(gs, xs, counts), partial, total, tokens,
        BLOCK_P=tile.rows, BLOCK_D=tile.columns, BLOCK_T=tile.depth, GROUP=tile.group,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return [part.view(batch, -1).sum(1) for part in partial.split(counts)]


def _fake(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], dtype=torch.float64)


direct = define("direct", "Tensor g, Tensor x -> Tensor", reference=direct_reference, cuda=launch_direct, fake=_fake)
"""``(g_BTP, x_BTD)``: as :func:`direct_reference`."""
many_direct = define(
    "many_direct",
    "Tensor[] gs, Tensor[] xs -> Tensor",
    reference=many_direct_reference,
    cuda=launch_many_direct,
    fake=lambda gs, xs: gs[0].new_empty(len(gs), len(gs[0]), dtype=torch.float64),
)
"""``(gs, xs)``: as :func:`many_direct_reference`; pairs alike in samples and tokens."""
