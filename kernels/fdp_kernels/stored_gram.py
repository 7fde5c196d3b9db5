"""Per-sample squared norms from stored Gram matrices, computed by the library; the alternative to ``ghost``.

    |G_b|^2 = sum_{t,s} A_ts X_ts,   A = g_b g_b^T,  X = x_b x_b^T    g (B, T, P), x (B, T, D)  ->  n (B,) float64

Both Gram matrices are (B, T, T) float32, 8 B T^2 bytes, and every entry is computed twice: 2 B T^2 (P + D) flops. A
kernel reads them once, multiplies and sums in float64, and adds the same rounding bound as ``ghost``. Here the norm of
every token is known, so steps 3 and 4 of the bound are not needed.

    >>> n = stored_gram(g, x)

Guarantees:
  - those of ``ghost``: at least the squared norm of what ``weighted`` adds for the sample before its factor.

Letters: B samples, T tokens, P output features, D input features; R x S a tile of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdp_kernels.ghost import SLACK, UNIT, ghost_reference, rounding_steps
from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import can_launch, cdiv, check_pair

ROWS, COLUMNS = 16, 256
"""Rows and columns of a load."""
SPLITS = 16
"""Parts into which the library may split a sum; each adds one rounding."""
DEPTH = 1024
"""Features per product; the rounding bound grows with it, not with the total number of features."""
TOKENS, WIDTH = 4, 512
"""Tokens per program and features per load of the token norms."""


# ---------------------------------------------------------------- bodies


@jit
def _store_norms(
    z_ptr, out_ptr, block, batch, tokens, width, stride_b, stride_t, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):
    token = block * TOKENS + tl.arange(0, TOKENS)
    inside = token < batch * tokens
    base = (token // tokens).to(tl.int64) * stride_b + (token % tokens).to(tl.int64) * stride_t
    total = tl.zeros((TOKENS, WIDTH), tl.float64)
    for first in tl.range(0, width, WIDTH):
        column = first + tl.arange(0, WIDTH)
        mask = inside[:, None] & (column < width)[None, :]
        value = tl.load(z_ptr + base[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32).to(tl.float64)
        total += value * value
    norm = tl.sqrt(tl.sum(total, 1)) * (1 + 2.0**-20)  # rounded up to float32
    tl.store(out_ptr + token, norm.to(tl.float32), mask=inside)


@jit
def _token_norms_body(
    g_ptr, x_ptr, a_ptr, b_ptr, batch, tokens, p, d, g_stride_b, g_stride_t, x_stride_b, x_stride_t,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    blocks = tl.num_programs(0) // 2
    index = tl.program_id(0)
    if index < blocks:
        _store_norms(g_ptr, a_ptr, index, batch, tokens, p, g_stride_b, g_stride_t, TOKENS, WIDTH)
    else:
        _store_norms(x_ptr, b_ptr, index - blocks, batch, tokens, d, x_stride_b, x_stride_t, TOKENS, WIDTH)


@jit
def _stored_gram_body(
    A_ptr, X_ptr, a_ptr, b_ptr, partial_ptr, tokens, row_tiles, units_p, units_d, floor_p, floor_d,
    R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    sample, row = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    first = sample.to(tl.int64) * tokens
    t = row * R + tl.arange(0, R)
    a_t = tl.load(a_ptr + first + t, mask=t < tokens, other=0.0)[:, None]
    b_t = tl.load(b_ptr + first + t, mask=t < tokens, other=0.0)[:, None]
    total = tl.zeros((R, S), tl.float64)
    column = 0
    while column < tokens:
        s = column + tl.arange(0, S)
        inside = (t < tokens)[:, None] & (s < tokens)[None, :]
        position = (first + t)[:, None] * tokens + s[None, :]
        A_RS = tl.load(A_ptr + position, mask=inside, other=0.0)
        X_RS = tl.load(X_ptr + position, mask=inside, other=0.0)
        a_s = tl.load(a_ptr + first + s, mask=s < tokens, other=0.0)[None, :]
        b_s = tl.load(b_ptr + first + s, mask=s < tokens, other=0.0)[None, :]
        lost = units_p * tl.maximum(a_t * a_s, floor_p) * tl.abs(X_RS)
        lost += units_d * tl.maximum(b_t * b_s, floor_d) * tl.abs(A_RS)
        total += A_RS.to(tl.float64) * X_RS.to(tl.float64) + lost.to(tl.float64)
        column += S
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total))


@jit
def _finish_body(partial_ptr, a_ptr, b_ptr, out_ptr, parts, tokens, units_both, units_t, BLOCK: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    square = tl.zeros((BLOCK,), tl.float64)
    size = tl.zeros((BLOCK,), tl.float64)
    first = 0
    while first < parts:
        i = first + tl.arange(0, BLOCK)
        square += tl.load(partial_ptr + sample * parts + i, mask=i < parts, other=0.0)
        first += BLOCK
    first = 0
    while first < tokens:
        i = first + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + sample * tokens + i, mask=i < tokens, other=0.0).to(tl.float64)
        size += a * tl.load(b_ptr + sample * tokens + i, mask=i < tokens, other=0.0).to(tl.float64)
        first += BLOCK
    total, length = tl.sum(square), tl.sum(size)
    total = tl.where(total < 0.0, 0.0, total) + units_both * length * length  # NaN stays NaN
    norm = tl.sqrt(total) + units_t * length
    tl.store(out_ptr + sample, norm * norm)


# ---------------------------------------------------------------- launches


def launch_token_norms(g_BTP: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``|g_t|`` and ``|x_t|``, (B, T) float32, rounded up; features must be contiguous."""
    (batch, tokens, p), d = g_BTP.shape, x_BTD.shape[-1]
    a, b = (torch.empty(batch, tokens, dtype=torch.float32, device=g_BTP.device) for _ in range(2))
    _token_norms_body[(2 * cdiv(batch * tokens, TOKENS),)](
        g_BTP, x_BTD, a, b, batch, tokens, p, d, *g_BTP.stride()[:2], *x_BTD.stride()[:2],
        TOKENS=TOKENS, WIDTH=WIDTH, num_warps=4,
    )  # fmt: skip
    return a, b


def underflow_floors(p: int, d: int, units_p: float, units_d: float) -> tuple[float, float]:
    """Return what products below 2^-126, which float32 drops, can take from a Gram matrix, in its units."""
    return p * 2.0**-126 / units_p, d * 2.0**-126 / units_d


def launch_finish(partial_BN: Tensor, a_BT: Tensor, b_BT: Tensor, units_both: float, units_t: float) -> Tensor:
    """Add the u^2 term of step 2 and step 5 of the bound to the sums of the tiles; one launch, in a fixed order."""
    out = torch.empty(len(a_BT), dtype=torch.float64, device=a_BT.device)
    _finish_body[(len(a_BT),)](
        partial_BN, a_BT, b_BT, out, partial_BN.shape[1], a_BT.shape[1], units_both, units_t, BLOCK=1024, num_warps=4
    )
    return out


def launch_reduce(
    A_BTT: Tensor,
    X_BTT: Tensor,
    a_BT: Tensor,
    b_BT: Tensor,
    units_p: float,
    units_d: float,
    *,
    least: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """Return ``sum_{t,s} A X + units_p a_t a_s |X| + units_d b_t b_s |A|`` per sample and row of tiles: (B, parts).

    ``least`` are lower limits for a_t a_s and b_t b_s: see :func:`underflow_floors`.
    """
    batch, tokens = a_BT.shape
    partial = torch.empty(batch, cdiv(tokens, ROWS), dtype=torch.float64, device=A_BTT.device)
    _stored_gram_body[(partial.numel(),)](
        A_BTT, X_BTT, a_BT, b_BT, partial, tokens, partial.shape[1], units_p, units_d, *least,
        R=ROWS, S=COLUMNS, num_warps=4,
    )  # fmt: skip
    return partial


def _gram(z_BTK: Tensor) -> Tensor:
    """Return ``z z^T`` in float32, DEPTH features at a time."""
    wide: dict[str, Any] = {} if z_BTK.dtype == torch.float32 else {"out_dtype": torch.float32}
    parts = z_BTK.split(DEPTH, dim=-1)
    total = torch.bmm(parts[0], parts[0].mT, **wide)
    for part in parts[1:]:
        total += torch.bmm(part, part.mT, **wide)
    return total


def launch_stored_gram(g_BTP: Tensor, x_BTD: Tensor) -> Tensor:
    """Return ``|G_b|^2`` plus the rounding bound, from the library's products and the kernel."""
    check_pair(g_BTP, x_BTD)
    if not can_launch(g_BTP, x_BTD):
        return ghost_reference(g_BTP, x_BTD)
    g, x, dtype = g_BTP.contiguous(), x_BTD.contiguous(), g_BTP.dtype
    a, b = launch_token_norms(g, x)
    A, X = (_gram(z) for z in (g, x))
    units_p, units_d = (
        SLACK * UNIT * (rounding_steps(min(z.shape[-1], DEPTH), dtype) + SPLITS + cdiv(z.shape[-1], DEPTH))
        for z in (g, x)
    )
    least = underflow_floors(g.shape[-1], x.shape[-1], units_p, units_d)
    parts = launch_reduce(A, X, a, b, units_p, units_d, least=least)
    return launch_finish(parts, a, b, units_p * units_d, SLACK * UNIT * rounding_steps(g.shape[1], dtype))


stored_gram = define(
    "stored_gram",
    "Tensor g, Tensor x -> Tensor",
    reference=ghost_reference,
    cuda=launch_stored_gram,
    fake=lambda g, x: g.new_empty(g.shape[0], dtype=torch.float64),
)
"""``(g_BTP, x_BTD)``: as ``ghost_reference``, and never below it."""
