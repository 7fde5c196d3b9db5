"""Per-sample gradients of biases and norm scales: sums over tokens, with the squared norm of exactly what is stored.

    sums_b    = sum_t g_bt              a bias                                (B, D) float32
    sums_b    = sum_t g_bt * h_bt       a norm's scale, h the normalised input
    squares_b = |sums_b|^2 in parts, one per 128 columns                      (B, parts) float64, of the float32 numbers

``g_BTD`` and ``h_BTD`` are bfloat16, float16 or float32. (Float64 operands use the reference and give float64 sums.)
Products and sums are float32 within 64 tokens and float64 beyond.

    >>> sums, squares = token_sums(g)                                         # a bias
    >>> sums, squares = token_product_sums(g, (x - mean) * rstd)              # a scale
    >>> squared_norms = squares.sum(1)
    >>> sums = split_token_sums(foreach_token_sums([g1, g2, g3]), [g1, g2, g3])     # biases of a block, two launches

Letters: B samples, T tokens, D width, S splits of the tokens.

There are two launches, for up to four tensors. Programs over (columns, splits, samples) write float64 partial sums;
programs over (columns, samples) add the splits in order, round, store and square. The number of splits is the smallest
that fills the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import MATRICES_PER_LAUNCH, can_launch, cdiv, launch_by_four, pad_to_four

ROWS, COLUMNS, LOADS = 16, 128, 4
"""Tokens and columns of a load, and the loads that the first kernel issues together and adds in float32."""
PROGRAMS = 640
"""Programs of the first kernel that fill the device: four or five per multiprocessor of an H200."""
SPLITS = 16
"""Splits that a program of the second kernel adds at a time."""

# ---------------------------------------------------------------- reference


def token_sums_reference(g_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``sum_t g_t``: (B, D), and its squares by columns: (B, parts) float64."""
    return _round_and_square(g_BTD.double(), g_BTD.dtype)


def token_product_sums_reference(g_BTD: Tensor, h_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``sum_t g_t h_t``: (B, D), and its squares by columns: (B, parts) float64."""
    return _round_and_square(g_BTD.double() * h_BTD.double(), g_BTD.dtype)


def foreach_token_sums_reference(gs: list[Tensor]) -> Tensor:
    """Return ``sum_t g_t`` of tensors that differ only in width: (B, D) each, flattened and concatenated."""
    _check_equal_tokens(gs)
    return torch.cat([token_sums_reference(g)[0].flatten() for g in gs])


def _round_and_square(terms_BTD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    sums_BD = terms_BTD.sum(1).to(torch.promote_types(dtype, torch.float32))
    parts = cdiv(sums_BD.shape[1], COLUMNS)
    squares_BD = torch.nn.functional.pad(sums_BD.double().square(), (0, parts * COLUMNS - sums_BD.shape[1]))
    return sums_BD, squares_BD.unflatten(1, (parts, COLUMNS)).sum(2)


# ---------------------------------------------------------------- Triton


@jit
def _sum_columns(
    g_ptr, h_ptr, partial_ptr, block, T, D, width, g_stride_b, g_stride_t, h_stride_b, h_stride_t,
    PRODUCT: tl.constexpr, STEPS: tl.constexpr, LOADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum STEPS * LOADS * ROWS tokens of one sample over COLUMNS columns: partial (B, S, width) in float64."""
    split = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < D
    first = split * (STEPS * LOADS * ROWS)
    # Offsets within a tile are small; the pointers advance tile by tile, so no element needs a 64-bit offset.
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
    tl.store(partial_ptr + (b * tl.num_programs(1) + split) * width + columns, tl.sum(acc, 0), mask=in_row)


@jit
def _partial_sums_body(
    g_ptr, h_ptr, partial_ptr, T, D, g_stride_b, g_stride_t, h_stride_b, h_stride_t,
    PRODUCT: tl.constexpr, STEPS: tl.constexpr, LOADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    _sum_columns(
        g_ptr, h_ptr, partial_ptr, tl.program_id(0), T, D, D, g_stride_b, g_stride_t, h_stride_b, h_stride_t,
        PRODUCT, STEPS, LOADS, ROWS, COLUMNS,
    )  # fmt: skip


@jit
def _partial_sums_of_four_body(
    g0, g1, g2, g3, partial_ptr, T, D0, D1, D2, D3,
    stride_b0, stride_b1, stride_b2, stride_b3, stride_t0, stride_t1, stride_t2, stride_t3,
    STEPS: tl.constexpr, LOADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the columns of four tensors side by side; a block of columns belongs to one tensor."""
    block, width = tl.program_id(0), D0 + D1 + D2 + D3
    end0 = tl.cdiv(D0, COLUMNS)
    end1 = end0 + tl.cdiv(D1, COLUMNS)
    end2 = end1 + tl.cdiv(D2, COLUMNS)
    if block < end0:
        _sum_columns(
            g0, g0, partial_ptr, block, T, D0, width, stride_b0, stride_t0, stride_b0, stride_t0,
            False, STEPS, LOADS, ROWS, COLUMNS,
        )  # fmt: skip
    elif block < end1:
        _sum_columns(
            g1, g1, partial_ptr + D0, block - end0, T, D1, width, stride_b1, stride_t1, stride_b1, stride_t1,
            False, STEPS, LOADS, ROWS, COLUMNS,
        )  # fmt: skip
    elif block < end2:
        _sum_columns(
            g2, g2, partial_ptr + D0 + D1, block - end1, T, D2, width, stride_b2, stride_t2, stride_b2, stride_t2,
            False, STEPS, LOADS, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _sum_columns(
            g3, g3, partial_ptr + D0 + D1 + D2, block - end2, T, D3, width, stride_b3, stride_t3, stride_b3, stride_t3,
            False, STEPS, LOADS, ROWS, COLUMNS,
        )  # fmt: skip


@jit
def _finish_body(
    partial_ptr, sums_ptr, squares_ptr, D0, D1, D2, D3,
    S: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the splits of COLUMNS columns of one sample, round to float32, store, and square what was stored.

    Columns are those of four tensors side by side. Each tensor's sums are stored as its own (B, D), one after the
    other.
    """
    b, batch, width = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64), D0 + D1 + D2 + D3
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < width
    here = partial_ptr + b * S * width + columns[None, :]
    acc = tl.zeros((COLUMNS,), tl.float64)
    for start in range(0, S, SPLITS):
        s = start + tl.arange(0, SPLITS)
        acc += tl.sum(tl.load(here + s[:, None] * width, mask=(s < S)[:, None] & in_row[None, :], other=0.0), 0)
    sums = acc.to(tl.float32)
    first = tl.where(
        columns < D0, 0, tl.where(columns < D0 + D1, D0, tl.where(columns < width - D3, D0 + D1, width - D3))
    )
    own = tl.where(columns < D0, D0, tl.where(columns < D0 + D1, D1, tl.where(columns < width - D3, D2, D3)))
    tl.store(sums_ptr + first * batch + b * own + (columns - first), sums, mask=in_row)
    wide = sums.to(tl.float64)
    tl.store(squares_ptr + b * tl.num_programs(0) + tl.program_id(0), tl.sum(wide * wide, 0))


def _launch_one(g_BTD: Tensor, h_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens, width = g_BTD.shape
    g_BTD = _dense_columns(g_BTD)
    other = g_BTD if h_BTD is None else _dense_columns(h_BTD)
    blocks = cdiv(width, COLUMNS)
    splits, steps = _split_tokens(tokens, batch * blocks)
    partial = torch.empty((batch, splits, width), dtype=torch.float64, device=g_BTD.device)
    _partial_sums_body[(blocks, splits, batch)](
        g_BTD, other, partial, tokens, width, *g_BTD.stride()[:2], *other.stride()[:2],
        PRODUCT=h_BTD is not None, STEPS=steps, LOADS=LOADS, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    sums, squares = _launch_finish(partial, [width, 0, 0, 0])
    return sums.view(batch, width), squares


def _launch_finish(partial_BSD: Tensor, widths: list[int]) -> tuple[Tensor, Tensor]:
    (batch, splits, width), device = partial_BSD.shape, partial_BSD.device
    blocks = cdiv(width, COLUMNS)
    sums = torch.empty(batch * width, dtype=torch.float32, device=device)
    squares = torch.empty((batch, blocks), dtype=torch.float64, device=device)
    _finish_body[(blocks, batch)](
        partial_BSD, sums, squares, *widths, S=splits, SPLITS=SPLITS, COLUMNS=COLUMNS, num_warps=4
    )
    return sums, squares


def _split_tokens(tokens: int, programs: int) -> tuple[int, int]:
    """Return the number of splits and the steps of each, if ``programs`` programs cover the columns of all samples."""
    steps = cdiv(tokens, LOADS * ROWS)
    per_split = cdiv(steps, min(steps, cdiv(PROGRAMS, programs)))
    return cdiv(steps, per_split), per_split


def _dense_columns(g_BTD: Tensor) -> Tensor:
    return g_BTD if g_BTD.stride(2) == 1 else g_BTD.contiguous()


def launch_token_sums(g_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Evaluate :func:`token_sums_reference` on the device."""
    return _launch_one(g_BTD, None) if can_launch(g_BTD) else token_sums_reference(g_BTD)


def launch_token_product_sums(g_BTD: Tensor, h_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Evaluate :func:`token_product_sums_reference` on the device."""
    return _launch_one(g_BTD, h_BTD) if can_launch(g_BTD, h_BTD) else token_product_sums_reference(g_BTD, h_BTD)


def launch_foreach_token_sums(gs: list[Tensor]) -> Tensor:
    """Evaluate :func:`foreach_token_sums_reference` on the device, four tensors at a time."""
    _check_equal_tokens(gs)
    if not can_launch(*gs):
        return foreach_token_sums_reference(gs)
    sums = launch_by_four(_launch_four, gs)
    return torch.cat(sums) if len(sums) > 1 else sums[0]


def _launch_four(gs: list[Tensor]) -> list[Tensor]:
    (batch, tokens), device = gs[0].shape[:2], gs[0].device
    widths = [g.shape[2] for g in gs] + [0] * (MATRICES_PER_LAUNCH - len(gs))
    gs = pad_to_four([_dense_columns(g) for g in gs])
    blocks = sum(cdiv(width, COLUMNS) for width in widths)
    splits, steps = _split_tokens(tokens, batch * blocks)
    partial = torch.empty((batch, splits, sum(widths)), dtype=torch.float64, device=device)
    _partial_sums_of_four_body[(blocks, splits, batch)](
        *gs, partial, tokens, *widths, *(g.stride(0) for g in gs), *(g.stride(1) for g in gs),
        STEPS=steps, LOADS=LOADS, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return [_launch_finish(partial, widths)[0]]


def _check_equal_tokens(gs: list[Tensor]) -> None:
    kinds = {(g.shape[:2], g.dtype, g.device) for g in gs}
    if len(kinds) != 1 or any(g.ndim != 3 for g in gs):
        raise ValueError(
            "foreach_token_sums: expected one or more tensors (batch, tokens, width) that differ only in width, got "
            f"{[(tuple(g.shape), g.dtype, g.device) for g in gs]}"
        )


# ---------------------------------------------------------------- ops


def _fake(g: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
    sums = g.new_empty((g.shape[0], g.shape[2]), dtype=torch.promote_types(g.dtype, torch.float32))
    return sums, g.new_empty((g.shape[0], cdiv(g.shape[2], COLUMNS)), dtype=torch.float64)


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


def _foreach_fake(gs: list[Tensor]) -> Tensor:
    dtype = torch.promote_types(gs[0].dtype, torch.float32)
    return gs[0].new_empty(len(gs[0]) * sum(g.shape[2] for g in gs), dtype=dtype)


foreach_token_sums = define(
    "foreach_token_sums",
    "Tensor[] gs -> Tensor",
    reference=foreach_token_sums_reference,
    cuda=launch_foreach_token_sums,
    fake=_foreach_fake,
)
"""``(gs,)``: as :func:`foreach_token_sums_reference`; see :func:`split_token_sums`."""


def split_token_sums(sums: Tensor, gs: list[Tensor]) -> list[Tensor]:
    """Split the result of :func:`foreach_token_sums` into one dense (B, D) per tensor."""
    parts = sums.split([len(g) * g.shape[2] for g in gs])
    return [part.view(len(g), g.shape[2]) for part, g in zip(parts, gs)]
