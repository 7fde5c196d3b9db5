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

from fdp_kernels.direct import tile_of
from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import (
    Tile,
    aligned,
    check_pair,
    described,
    launchable,
    outer,
    place,
    programs,
    sum_of_squares,
    tiles,
)

CHUNK, STEPS = 4096, 8
"""Elements of a load and loads of a program of ``squared_norms``."""
BLOCK = 1024
"""Elements of a program of ``weighted_sum``."""


# ---------------------------------------------------------------- references


def keep_reference(g_BTP: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    check_pair(g_BTP, x_BTD)
    wide = torch.float64 if g_BTP.dtype == torch.float64 else torch.float32
    G_BPD = torch.bmm(g_BTP.to(wide).mT, x_BTD.to(wide)).to(g_BTP.dtype)
    return G_BPD, _in_parts(squared_norms_reference(G_BPD), _keep_parts(g_BTP, x_BTD))


def squared_norms_reference(G_BN: Tensor) -> Tensor:
    return torch.linalg.vector_norm(G_BN.reshape(len(G_BN), -1), dim=1, dtype=torch.float64).square()


def squared_parts_reference(G_BN: Tensor) -> Tensor:
    """All of it in the first part."""
    return _in_parts(squared_norms_reference(G_BN), _parts(G_BN))


def _in_parts(squared_B: Tensor, parts: int) -> Tensor:
    return torch.nn.functional.pad(squared_B.unsqueeze(1), (0, parts - 1))


def _parts(G_BN: Tensor) -> int:
    return tiles(G_BN.numel() // len(G_BN), CHUNK * STEPS)


def _keep_parts(g_BTP: Tensor, x_BTD: Tensor) -> int:
    tile = tile_of(g_BTP, x_BTD)
    return tiles(g_BTP.shape[-1], tile.rows) * tiles(x_BTD.shape[-1], tile.columns)


def weighted_sum_reference(G_BN: Tensor, factors_B: Tensor, dtype: torch.dtype, onto_N: Tensor | None = None) -> Tensor:
    _check_sum(G_BN, factors_B, dtype, onto_N)
    zero = factors_B.view(-1, *[1] * (G_BN.ndim - 1)) == 0
    total = torch.tensordot(factors_B.double(), G_BN.double().masked_fill(zero, 0.0), dims=1)
    return (total if onto_N is None else onto_N + total).to(dtype)


# ---------------------------------------------------------------- bodies


@jit
def _keep_body(
    g, x, out, partial_ptr, batch, tokens, p, d,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        count = batch * tl.cdiv(p, BLOCK_P) * tl.cdiv(d, BLOCK_D)
        for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):  # pyright: ignore
            _keep_one(g, x, out, partial_ptr, index, tokens, p, d, BLOCK_P, BLOCK_D, BLOCK_T, GROUP, DESCRIBED)
    else:
        _keep_one(
            g, x, out, partial_ptr, tl.program_id(0), tokens, p, d, BLOCK_P, BLOCK_D, BLOCK_T, GROUP, DESCRIBED
        )  # fmt: skip


@jit
def _keep_one(
    g, x, out, partial_ptr, index, tokens, p, d,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.cdiv(p, BLOCK_P), tl.cdiv(d, BLOCK_D)
    b = index // (rows * columns)
    i, j = place(index % (rows * columns), rows, columns, GROUP)
    acc_PD = outer(g, x, b, i, j, tokens, BLOCK_P, BLOCK_D, BLOCK_T)
    # Half a tile at a time: one is on its way to memory while the other is rounded and squared.
    HALF: tl.constexpr = BLOCK_D // 2
    left_PH, right_PH = tl.split(tl.permute(tl.reshape(acc_PD, (BLOCK_P, 2, HALF)), (0, 2, 1)))
    squares = _store(out, left_PH, b, i * BLOCK_P, j * BLOCK_D, p, d, BLOCK_P, HALF, DESCRIBED)
    squares += _store(out, right_PH, b, i * BLOCK_P, j * BLOCK_D + HALF, p, d, BLOCK_P, HALF, DESCRIBED)
    tl.store(partial_ptr + index, squares)


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
    check_pair(g_BTP, x_BTD)
    if not launchable(g_BTP, x_BTD):
        return keep_reference(g_BTP, x_BTD)
    (batch, tokens, p), d = g_BTP.shape, x_BTD.shape[-1]
    tile = tile or tile_of(g_BTP, x_BTD)
    G = torch.empty(batch, p, d, dtype=g_BTP.dtype, device=g_BTP.device)
    partial = torch.empty(batch, tiles(p, tile.rows) * tiles(d, tile.columns), dtype=torch.float64, device=g_BTP.device)
    addressable = G.stride(1) * G.element_size() % 16 == 0
    _keep_body[(programs(partial.numel(), tile, g_BTP.device),)](
        described(aligned(g_BTP), (1, tile.depth, tile.rows)),
        described(aligned(x_BTD), (1, tile.depth, tile.columns)),
        described(G, (1, tile.rows, tile.columns // 2)) if addressable else G,
        partial, batch, tokens, p, d,
        BLOCK_P=tile.rows, BLOCK_D=tile.columns, BLOCK_T=tile.depth, GROUP=tile.group,
        PERSISTENT=tile.per_sm > 0, DESCRIBED=addressable,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return G, partial


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
    parts = g.new_empty(g.shape[0], _keep_parts(g, x), dtype=torch.float64)
    return g.new_empty(g.shape[0], g.shape[2], x.shape[2]), parts


keep = define(
    "keep",
    "Tensor g, Tensor x -> (Tensor, Tensor)",
    reference=keep_reference,
    cuda=launch_keep,
    fake=_keep_fake,
)
"""``(g_BTP, x_BTD)``: as :func:`keep_reference`."""
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
