"""Per-sample squared norms from Gram matrices made whole by the library: what ``ghost`` is measured against.

    |G_b|^2 = sum_{t,s} A_ts X_ts,   A = g_b g_b^T,  X = x_b x_b^T    g (B, T, P), x (B, T, D)  ->  n (B,) float64

Both Gram matrices are (B, T, T) float32, 8 B T^2 bytes, and every entry is made twice: 2 B T^2 (P + D) flops. A
kernel reads them once, multiplies and sums in float64, and adds the worst that rounding can have taken, as ``ghost``
does and for its reasons.

    >>> n = stored_gram(g, x)

Guarantees:
  - those of ``ghost``: at least the squared norm of what ``weighted`` adds for the sample before its factor.

Letters: B samples, T tokens, P output features, D input features; R x S a tile of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdp_kernels.ghost import SLACK, UNIT, finished, floors, ghost_reference, launch_token_norms, rounding_steps
from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import check_pair, launchable, tiles

ROWS, COLUMNS = 16, 256
"""The tile of a load."""
SPLITS = 16
"""Parts into which the library may cut a sum: each adds one rounding."""
DEPTH = 1024
"""Features of one product; the bound on rounding grows with it, and not with their number."""


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
        place = (first + t)[:, None] * tokens + s[None, :]
        A_RS = tl.load(A_ptr + place, mask=inside, other=0.0)
        X_RS = tl.load(X_ptr + place, mask=inside, other=0.0)
        a_s = tl.load(a_ptr + first + s, mask=s < tokens, other=0.0)[None, :]
        b_s = tl.load(b_ptr + first + s, mask=s < tokens, other=0.0)[None, :]
        lost = units_p * tl.maximum(a_t * a_s, floor_p) * tl.abs(X_RS)
        lost += units_d * tl.maximum(b_t * b_s, floor_d) * tl.abs(A_RS)
        total += A_RS.to(tl.float64) * X_RS.to(tl.float64) + lost.to(tl.float64)
        column += S
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total))


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
    """``sum_{t,s} A X + units_p a_t a_s |X| + units_d b_t b_s |A|`` per sample and row of tiles: (B, parts) float64.

    ``least`` is what a_t a_s and b_t b_s count at least: see ``ghost.floors``.
    """
    batch, tokens = a_BT.shape
    partial = torch.empty(batch, tiles(tokens, ROWS), dtype=torch.float64, device=A_BTT.device)
    _stored_gram_body[(partial.numel(),)](
        A_BTT, X_BTT, a_BT, b_BT, partial, tokens, partial.shape[1], units_p, units_d, *least,
        R=ROWS, S=COLUMNS, num_warps=4,
    )  # fmt: skip
    return partial


def _gram(z_BTK: Tensor) -> Tensor:
    """``z z^T`` in float32, DEPTH features at a time."""
    wide: dict[str, Any] = {} if z_BTK.dtype == torch.float32 else {"out_dtype": torch.float32}
    parts = z_BTK.split(DEPTH, dim=-1)
    total = torch.bmm(parts[0], parts[0].mT, **wide)
    for part in parts[1:]:
        total += torch.bmm(part, part.mT, **wide)
    return total


def launch_stored_gram(g_BTP: Tensor, x_BTD: Tensor) -> Tensor:
    """By the library's products and the kernel."""
    check_pair(g_BTP, x_BTD)
    if not launchable(g_BTP, x_BTD):
        return ghost_reference(g_BTP, x_BTD)
    g, x, dtype = g_BTP.contiguous(), x_BTD.contiguous(), g_BTP.dtype
    a, b = launch_token_norms(g, x)
    A, X = (_gram(z) for z in (g, x))
    units_p, units_d = (
        SLACK * UNIT * (rounding_steps(min(z.shape[-1], DEPTH), dtype) + SPLITS + tiles(z.shape[-1], DEPTH))
        for z in (g, x)
    )
    least = floors(g.shape[-1], x.shape[-1], units_p, units_d)
    parts = launch_reduce(A, X, a, b, units_p, units_d, least=least)
    return finished(parts, a, b, units_p * units_d, SLACK * UNIT * rounding_steps(g.shape[1], dtype))


stored_gram = define(
    "stored_gram",
    "Tensor g, Tensor x -> Tensor",
    reference=ghost_reference,
    cuda=launch_stored_gram,
    fake=lambda g, x: g.new_empty(g.shape[0], dtype=torch.float64),
)
"""``(g_BTP, x_BTD)``: as ``ghost_reference``, and never below it."""
