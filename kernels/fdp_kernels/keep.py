"""Per-sample weight gradients of a linear layer, kept; the norms of exactly the kept numbers; their weighted sum.

    keep           G_b = round(sum_t g_bt x_bt^T), n_b in parts     g (B, T, P), x (B, T, D) -> G (B, P, D), (B, parts)
    squared_norms  n_b = |G_b|^2                                    G (B, ...)               -> n (B,)
    squared_parts  n_b in parts                                     G (B, ...)               -> (B, parts)
    weighted_sum   W = sum_b c_b G_b (+ V)                          G (B, ...), c (B,)       -> W (...)

G is kept in the dtype of g (summed in float32); norms are float64, and so are squares and weighted sums until they are
done. Parts add up to n_b: who has many leaves adds them all in one go. ``keep_by_matmul`` is ``torch.bmm`` and a pass
over G where ``keep`` is one kernel; the measured best wins.

    >>> G, parts = keep(g, x)                                    # 2 B T P D flops
    >>> factors = (C / parts.sum(1).sqrt()).clamp(max=1).float()
    >>> total = weighted_sum(G, factors, torch.float32)          # bandwidth only

``many_kept`` keeps the gradients of several matrices, four in a launch.

    >>> G, H, parts_of_G, parts_of_H = many_kept([g, h], [x, y])

Guarantees:
  - the norm is that of the stored, rounded numbers, to float64 rounding; from ``keep``, at least that, and at most
    2^-14 of its square more (elements below 1e-19 count as 0 there);
  - a sample with factor 0 adds exactly 0 (it is not read), even if its gradient is NaN or infinite;
  - factors are float32 or float64; the sum, with what it is added to, is formed in float64 and rounded once.

Letters: B samples, T tokens, P output features, D input features, N elements of a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdp_kernels.direct import TILES
from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import (
    Tile,
    check_pair,
    check_pairs,
    choose,
    described,
    described_pairs,
    extents,
    filled,
    fours,
    launchable,
    outer,
    pick,
    place,
    programs,
    sum_of_squares,
    tiles,
    tiles_of,
    which,
)

CHUNK, STEPS = 4096, 8
"""Elements of a load and loads of a program of ``squared_norms``."""
BLOCK = 1024
"""Elements of a program of ``weighted_sum``."""


# ---------------------------------------------------------------- references


def keep_reference(g_BTP: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    G_BPD, parts = many_kept_reference([g_BTP], [x_BTD])
    return G_BPD, parts


def many_kept_reference(gs: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
    """The gradients of all, then the parts of all."""
    check_pairs(gs, xs)
    wide = torch.float64 if gs[0].dtype == torch.float64 else torch.float32
    made = [torch.bmm(g.to(wide).mT, x.to(wide)).to(g.dtype) for g, x in zip(gs, xs)]
    return [*made, *(_in_parts(squared_norms_reference(G), size) for G, size in zip(made, _keep_parts(gs, xs)))]


def squared_norms_reference(G_BN: Tensor) -> Tensor:
    return torch.linalg.vector_norm(G_BN.reshape(len(G_BN), -1), dim=1, dtype=torch.float64).square()


def squared_parts_reference(G_BN: Tensor) -> Tensor:
    """All of it in the first part."""
    return _in_parts(squared_norms_reference(G_BN), _parts(G_BN))


def _in_parts(squared_B: Tensor, parts: int) -> Tensor:
    return torch.nn.functional.pad(squared_B.unsqueeze(1), (0, parts - 1))


def _parts(G_BN: Tensor) -> int:
    return tiles(G_BN.numel() // len(G_BN), CHUNK * STEPS)


def _tile_of(gs: list[Tensor], xs: list[Tensor]) -> Tile:
    """The tile of one launch."""
    return choose(TILES, gs[0].dtype, lambda tile: sum(len(g) * tiles_of(g, x, tile) for g, x in zip(gs, xs)))


def _keep_parts(gs: list[Tensor], xs: list[Tensor]) -> list[int]:
    """In how many parts the kernel leaves each one's squares: one for a tile, of which every launch has its own."""
    launches = [(gs[four], xs[four], _tile_of(gs[four], xs[four])) for four in fours(gs)]
    return [tiles_of(g, x, tile) for lefts, rights, tile in launches for g, x in zip(lefts, rights)]


def weighted_sum_reference(G_BN: Tensor, factors_B: Tensor, dtype: torch.dtype, onto_N: Tensor | None = None) -> Tensor:
    _check_sum(G_BN, factors_B, dtype, onto_N)
    zero = factors_B.view(-1, *[1] * (G_BN.ndim - 1)) == 0
    total = torch.tensordot(factors_B.double(), G_BN.double().masked_fill(zero, 0.0), dims=1)
    return (total if onto_N is None else onto_N + total).to(dtype)


# ---------------------------------------------------------------- bodies


@jit
def _keep_body(
    g0, g1, g2, g3, x0, x1, x2, x3, out0, out1, out2, out3, partial_ptr0, partial_ptr1, partial_ptr2, partial_ptr3,
    p0, p1, p2, p3, d0, d1, d2, d3, end0, end1, end2, count, tokens,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK_D // 2
    # One turn of the loop where there is a program for every tile.
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):  # pyright: ignore
        use = which(index, end0, end1, end2)
        own = index - pick(use, 0, end0, end1, end2)
        p, d = pick(use, p0, p1, p2, p3), pick(use, d0, d1, d2, d3)
        rows, columns = tl.cdiv(p, BLOCK_P), tl.cdiv(d, BLOCK_D)
        b = own // (rows * columns)
        i, j = place(own % (rows * columns), rows, columns, GROUP)
        g, x, out = pick(use, g0, g1, g2, g3), pick(use, x0, x1, x2, x3), pick(use, out0, out1, out2, out3)
        acc_PD = outer(g, x, b, i, j, tokens, BLOCK_P, BLOCK_D, BLOCK_T)
        # Half a tile at a time: one is on its way to memory while the other is rounded and squared.
        left_PH, right_PH = tl.split(tl.permute(tl.reshape(acc_PD, (BLOCK_P, 2, HALF)), (0, 2, 1)))
        squares = _store(out, left_PH, b, i * BLOCK_P, j * BLOCK_D, p, d, BLOCK_P, HALF, DESCRIBED)
        squares += _store(out, right_PH, b, i * BLOCK_P, j * BLOCK_D + HALF, p, d, BLOCK_P, HALF, DESCRIBED)
        tl.store(pick(use, partial_ptr0, partial_ptr1, partial_ptr2, partial_ptr3) + own, squares)


@jit
def _store(
    out, acc_PH, b, row, column, p, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIBED: tl.constexpr
):  # fmt: skip
    """Round, store, and square what was stored; ``out`` is described, or a pointer where rows are not aligned."""
    if DESCRIBED:
        kept_PH = acc_PH.to(out.dtype)
        out.store([b, row, column], kept_PH.reshape(1, ROWS, COLUMNS))
    else:
        kept_PH = acc_PH.to(out.dtype.element_ty)
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        offset = (b.to(tl.int64) * p + rows[:, None]) * d + columns[None, :]
        tl.store(out + offset, kept_PH, mask=(rows < p)[:, None] & (columns < d)[None, :])
    return sum_of_squares(kept_PH)


@jit
def _squares_body(G_ptr, partial_ptr, n, chunks, CHUNK: tl.constexpr, STEPS: tl.constexpr):
    index = tl.program_id(0)
    b, first = index // chunks, (index % chunks).to(tl.int64) * (CHUNK * STEPS)
    total = tl.zeros((CHUNK,), tl.float64)
    for step in tl.static_range(STEPS):
        element = first + step * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(G_ptr + b.to(tl.int64) * n + element, mask=element < n, other=0.0)
        wide = value.to(tl.float32).to(tl.float64)
        total += wide * wide
    tl.store(partial_ptr + index, tl.sum(total))


@jit
def _sum_body(G_ptr, factor_ptr, onto_ptr, out_ptr, batch, n, ONTO: tl.constexpr, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = G_ptr + element  # moves on by one sample: offsets of all samples may pass 2^31
    total = tl.zeros((BLOCK,), tl.float64)
    if ONTO:
        total += tl.load(onto_ptr + element, mask=element < n, other=0.0).to(tl.float64)
    for b in tl.range(0, batch, loop_unroll_factor=4):
        factor = tl.load(factor_ptr + b).to(tl.float64)
        value = tl.load(here, mask=element < tl.where(factor != 0, n, 0), other=0.0)
        here += n
        total += tl.where(factor != 0, factor * value.to(tl.float32).to(tl.float64), 0.0)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=element < n)


# ---------------------------------------------------------------- launches


def launch_keep(g_BTP: Tensor, x_BTD: Tensor, *, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """As :func:`keep_reference`, by one kernel; ``tile`` overrides the table."""
    G, parts = launch_many_kept([g_BTP], [x_BTD], tile=tile)
    return G, parts


def launch_many_kept(gs: list[Tensor], xs: list[Tensor], *, tile: Tile | None = None) -> list[Tensor]:
    """As :func:`many_kept_reference`, by the kernel, four matrices in a launch."""
    check_pairs(gs, xs)
    if not launchable(*gs, *xs):
        return many_kept_reference(gs, xs)
    made = [_of_four(gs[four], xs[four], tile or _tile_of(gs[four], xs[four])) for four in fours(gs)]
    return [G for gradients, _ in made for G in gradients] + [part for _, parts in made for part in parts]


def _of_four(gs: list[Tensor], xs: list[Tensor], tile: Tile) -> tuple[list[Tensor], list[Tensor]]:
    (batch, tokens, _), dtype, device = gs[0].shape, gs[0].dtype, gs[0].device
    outs = [torch.empty(batch, g.shape[-1], x.shape[-1], dtype=dtype, device=device) for g, x in zip(gs, xs)]
    parts = [tiles_of(g, x, tile) for g, x in zip(gs, xs)]
    partials = [torch.empty(batch, size, dtype=torch.float64, device=device) for size in parts]
    addressable = all(x.shape[-1] * dtype.itemsize % 16 == 0 for x in xs)
    half = (1, tile.rows, tile.columns // 2)
    total = batch * sum(parts)
    _keep_body[(programs(total, tile, device),)](
        *described_pairs(gs, xs, tile), *filled([described(G, half) if addressable else G for G in outs]),
        *filled(partials), *extents(gs, xs, [batch * size for size in parts]), total, tokens,
        BLOCK_P=tile.rows, BLOCK_D=tile.columns, BLOCK_T=tile.depth, GROUP=tile.group,
        DESCRIBED=addressable, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return outs, partials


def launch_squared_norms(G_BN: Tensor) -> Tensor:
    """As :func:`squared_norms_reference`, reading G once."""
    return launch_squared_parts(G_BN).sum(1)


def launch_squared_parts(G_BN: Tensor) -> Tensor:
    """``n_b`` as a sum yet to be made, over dim 1."""
    if not launchable(G_BN):
        return squared_parts_reference(G_BN)
    batch, n = len(G_BN), G_BN[0].numel()
    partial = torch.empty(batch, _parts(G_BN), dtype=torch.float64, device=G_BN.device)
    _squares_body[(partial.numel(),)](
        G_BN.contiguous(), partial, n, partial.shape[1], CHUNK=CHUNK, STEPS=STEPS, num_warps=8
    )
    return partial


def launch_weighted_sum(G_BN: Tensor, factors_B: Tensor, dtype: torch.dtype, onto_N: Tensor | None = None) -> Tensor:
    """As :func:`weighted_sum_reference`, reading G once."""
    _check_sum(G_BN, factors_B, dtype, onto_N)
    if not launchable(G_BN):
        return weighted_sum_reference(G_BN, factors_B, dtype, onto_N)
    out = torch.empty(G_BN.shape[1:], dtype=dtype, device=G_BN.device)
    n, before = out.numel(), out if onto_N is None else onto_N.contiguous()
    _sum_body[(tiles(n, BLOCK),)](
        G_BN.contiguous(), factors_B.contiguous(), before, out, len(G_BN), n,
        ONTO=onto_N is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def _check_sum(G: Tensor, factors: Tensor, dtype: torch.dtype, onto: Tensor | None) -> None:
    wide = (torch.float32, torch.float64)
    if factors.shape != G.shape[:1] or factors.dtype not in wide or dtype not in wide:
        raise ValueError(
            f"weighted_sum: expected {len(G)} factors and a sum in float32 or float64, got factors of shape "
            f"{tuple(factors.shape)} in {factors.dtype} and a sum in {dtype}"
        )
    if onto is not None and (onto.shape != G.shape[1:] or onto.dtype not in wide):
        raise ValueError(
            f"weighted_sum: expected to add to {tuple(G.shape[1:])} in float32 or float64, got {tuple(onto.shape)} in "
            f"{onto.dtype}"
        )


# ---------------------------------------------------------------- ops


def _keep_fake(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    G, parts = _many_kept_fake([g], [x])
    return G, parts


def _many_kept_fake(gs: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
    kept = [g.new_empty(g.shape[0], g.shape[2], x.shape[2]) for g, x in zip(gs, xs)]
    return kept + [g.new_empty(g.shape[0], size, dtype=torch.float64) for g, size in zip(gs, _keep_parts(gs, xs))]


keep = define(
    "keep",
    "Tensor g, Tensor x -> (Tensor, Tensor)",
    reference=keep_reference,
    cuda=launch_keep,
    fake=_keep_fake,
)
"""``(g_BTP, x_BTD)``: as :func:`keep_reference`."""
many_kept = define(
    "many_kept",
    "Tensor[] gs, Tensor[] xs -> Tensor[]",
    reference=many_kept_reference,
    cuda=launch_many_kept,
    fake=_many_kept_fake,
)
"""``(gs, xs)``: as :func:`many_kept_reference`; pairs alike in samples and tokens."""
squared_norms = define(
    "squared_norms",
    "Tensor G -> Tensor",
    reference=squared_norms_reference,
    cuda=launch_squared_norms,
    fake=lambda G: G.new_empty(G.shape[0], dtype=torch.float64),
)
"""``(G_BN)``: as :func:`squared_norms_reference`."""
squared_parts = define(
    "squared_parts",
    "Tensor G -> Tensor",
    reference=squared_parts_reference,
    cuda=launch_squared_parts,
    fake=lambda G: G.new_empty(G.shape[0], _parts(G), dtype=torch.float64),
)
"""``(G_BN)``: as :func:`squared_parts_reference`; the sum over parts is :func:`squared_norms`."""
weighted_sum = define(
    "weighted_sum",
    "Tensor G, Tensor factors, ScalarType dtype, Tensor? onto=None -> Tensor",
    reference=weighted_sum_reference,
    cuda=launch_weighted_sum,
    fake=lambda G, factors, dtype, onto=None: G.new_empty(G.shape[1:], dtype=dtype),
)
"""``(G_BN, factors_B, dtype, onto_N=None)``: as :func:`weighted_sum_reference`."""


def keep_by_matmul(g_BTP: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`keep`, by ``torch.bmm`` and :func:`squared_parts`."""
    check_pair(g_BTP, x_BTD)
    G_BPD = torch.bmm(g_BTP.mT, x_BTD)
    return G_BPD, squared_parts(G_BPD)
