"""Per-sample gradients of biases and norm scales: sums over tokens, with the squared norm of exactly what is stored.

    sums_b    = sum_t g_bt              a bias                                (B, D) float32
    sums_b    = sum_t g_bt * h_bt       a norm's scale, h the normalised input
    squares_b = |sums_b|^2 in parts, one for 128 columns                      (B, parts) float64, of the float32 numbers

``g_BTD`` and ``h_BTD`` are bfloat16, float16 or float32 (float64 by the reference, sums float64 then). Products and
sums are float32 within 64 tokens and float64 beyond.

    >>> sums, squares = token_sums(g)                                         # a bias
    >>> sums, squares = token_product_sums(g, (x - mean) * rstd)              # a scale
    >>> squared_norms = squares.sum(1)

Letters: B samples, T tokens, D width, S splits of the tokens.

Two launches: programs over (columns, splits, samples) write float64 partial sums; programs over (columns, samples) add
the splits in order, round, store and square. There are as many splits as fill the device and no more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdp_kernels.op import define, jit, tl

ROWS, COLUMNS, LOADS = 16, 128, 4
"""Tokens and columns of a load of the first kernel, and loads that are on their way together and added in float32."""
PROGRAMS = 640
"""Programs of the first kernel that fill the device: four or five on each multiprocessor of an H200."""
SPLITS = 16
"""Splits that a program of the second kernel adds at a time."""

# ---------------------------------------------------------------- reference


def token_sums_reference(g_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """``sum_t g_t``: (B, D), and its squares by columns: (B, parts) float64."""
    return _stored(g_BTD.double(), g_BTD.dtype)


def token_product_sums_reference(g_BTD: Tensor, h_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """``sum_t g_t h_t``: (B, D), and its squares by columns: (B, parts) float64."""
    return _stored(g_BTD.double() * h_BTD.double(), g_BTD.dtype)


def _stored(terms_BTD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    sums_BD = terms_BTD.sum(1).to(torch.promote_types(dtype, torch.float32))
    parts = _parts(sums_BD.shape[1], COLUMNS)
    squares_BD = torch.nn.functional.pad(sums_BD.double().square(), (0, parts * COLUMNS - sums_BD.shape[1]))
    return sums_BD, squares_BD.unflatten(1, (parts, COLUMNS)).sum(2)


# ---------------------------------------------------------------- Triton


@jit
def _partial_sums(
    g_ptr,
    h_ptr,
    partial_ptr,
    T,
    D,
    g_stride_b,
    g_stride_t,
    h_stride_b,
    h_stride_t,
    PRODUCT: tl.constexpr,
    STEPS: tl.constexpr,
    LOADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """STEPS times LOADS times ROWS tokens of one sample, COLUMNS columns of it: partial (B, S, D) in float64."""
    split = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < D
    first = split * (STEPS * LOADS * ROWS)
    # Offsets of a tile are small; the pointers move on by a tile, so that no element needs an offset of 64 bits.
    g_here = g_ptr + b * g_stride_b + first.to(tl.int64) * g_stride_t + (row[:, None] * g_stride_t + columns[None, :])
    h_here = h_ptr + b * h_stride_b + first.to(tl.int64) * h_stride_t + (row[:, None] * h_stride_t + columns[None, :])
    acc = tl.zeros((ROWS, COLUMNS), tl.float64)
    for step in range(0, STEPS):
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for load in tl.static_range(LOADS):
            mask = (first + (step * LOADS + load) * ROWS + row < T)[:, None] & in_row[None, :]
            terms = tl.load(g_here, mask=mask, other=0.0).to(tl.float32)
            if PRODUCT:
                terms *= tl.load(h_here, mask=mask, other=0.0).to(tl.float32)
            sums += terms
            g_here += ROWS * g_stride_t
            h_here += ROWS * h_stride_t
        acc += sums.to(tl.float64)
    tl.store(partial_ptr + (b * tl.num_programs(1) + split) * D + columns, tl.sum(acc, 0), mask=in_row)


@jit
def _finish(
    partial_ptr,
    sums_ptr,
    squares_ptr,
    D: tl.constexpr,
    S: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of one sample: add the splits, round to float32, store, and square what was stored."""
    b = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < D
    here = partial_ptr + b * S * D + columns[None, :]
    acc = tl.zeros((COLUMNS,), tl.float64)
    for start in range(0, S, SPLITS):
        s = start + tl.arange(0, SPLITS)
        acc += tl.sum(tl.load(here + s[:, None] * D, mask=(s < S)[:, None] & in_row[None, :], other=0.0), 0)
    sums = acc.to(tl.float32)
    tl.store(sums_ptr + b * D + columns, sums, mask=in_row)
    wide = sums.to(tl.float64)
    tl.store(squares_ptr + b * tl.num_programs(0) + tl.program_id(0), tl.sum(wide * wide, 0))


def _launch(g_BTD: Tensor, h_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens, width = g_BTD.shape
    g_BTD = g_BTD if g_BTD.stride(2) == 1 else g_BTD.contiguous()
    other = g_BTD if h_BTD is None else h_BTD
    other = other if other.stride(2) == 1 else other.contiguous()
    blocks, steps = _parts(width, COLUMNS), _parts(tokens, LOADS * ROWS)
    each = _parts(steps, min(steps, _parts(PROGRAMS, batch * blocks)))
    splits = _parts(steps, each)
    partial = torch.empty((batch, splits, width), dtype=torch.float64, device=g_BTD.device)
    sums = torch.empty((batch, width), dtype=torch.float32, device=g_BTD.device)
    squares = torch.empty((batch, blocks), dtype=torch.float64, device=g_BTD.device)
    _partial_sums[(blocks, splits, batch)](
        g_BTD,
        other,
        partial,
        tokens,
        width,
        g_BTD.stride(0),
        g_BTD.stride(1),
        other.stride(0),
        other.stride(1),
        PRODUCT=h_BTD is not None,
        STEPS=each,
        LOADS=LOADS,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    _finish[(blocks, batch)](partial, sums, squares, D=width, S=splits, SPLITS=SPLITS, COLUMNS=COLUMNS, num_warps=4)
    return sums, squares


def _parts(total: int, size: int) -> int:
    return -(-total // size)


def launch_token_sums(g_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`token_sums_reference` on the device."""
    return token_sums_reference(g_BTD) if g_BTD.dtype == torch.float64 else _launch(g_BTD, None)


def launch_token_product_sums(g_BTD: Tensor, h_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`token_product_sums_reference` on the device."""
    if torch.float64 in (g_BTD.dtype, h_BTD.dtype):
        return token_product_sums_reference(g_BTD, h_BTD)
    return _launch(g_BTD, h_BTD)


# ---------------------------------------------------------------- ops


def _fake(g: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
    sums = g.new_empty((g.shape[0], g.shape[2]), dtype=torch.promote_types(g.dtype, torch.float32))
    return sums, g.new_empty((g.shape[0], _parts(g.shape[2], COLUMNS)), dtype=torch.float64)


token_sums = define(
    "token_sums",
    "Tensor g -> (Tensor, Tensor)",
    reference=token_sums_reference,
    cuda=launch_token_sums,
    fake=_fake,
)
"""``(g_BTD,)``: as :func:`token_sums_reference`."""

token_product_sums = define(
    "token_product_sums",
    "Tensor g, Tensor h -> (Tensor, Tensor)",
    reference=token_product_sums_reference,
    cuda=launch_token_product_sums,
    fake=_fake,
)
"""``(g_BTD, h_BTD)``: as :func:`token_product_sums_reference`."""
