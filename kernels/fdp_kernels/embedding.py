"""Squared norms and the weighted sum of an embedding's per-sample gradients, without one-hot rows or host sorts.

    G_b[v]    = sum over t with ids_bt = v of g_bt                            (V, D), never formed
    squared_b = sum_v |G_b[v]|^2 + (2^-28 T sum_t |g_bt|)^2                   float64
    total     = sum_b c_b G_b                                                 float32 (V, D)

``ids_BT`` is int64, ``g_BTD`` bfloat16, float16, float32 or float64, ``factors_B`` float32 or float64; products and
sums are float64. A sample whose factor is not above 0 contributes exactly 0, even if its rows are NaN.

The second term of a squared norm is a floor. ``total`` adds the rows of all samples in one accumulator; if rows of one
sample cancel, they leave rounding errors of their size there. With ``c_b sqrt(squared_b) <= C`` the rows of one sample
have ``c_b sum_t |g_bt| <= 2^28 C / T``, and a partial sum of n samples has n times that. The n T additions of n samples
then round by at most ``n T 2^-53 n 2^28 C / T = n^2 2^-25 C`` in norm. With the last rounding, to float32, that is at
most ``n 2^-24 (n/2 + 1) C``: no more than ``weighted`` rounds for n samples, and counted as such by the caller.

    >>> squared = embedding_norms(ids, g)                                     # (B,) float64
    >>> total = embedding_sum(ids, g, factors, V)                             # (V, D) float32, zero where never used
    >>> add_embedding_sum_(head, ids, g, factors)                             # the same, onto what is there

Letters: B samples, T tokens, D width, V vocabulary, N = B T, C chunks of CHUNK sorted tokens.

Tokens are sorted by id on the device (stable, so the order is fixed), and a row of G is a *run* of equal ids. A program
walks one chunk of sorted tokens. It finishes the runs that lie within the chunk. If a run crosses chunks, each stores
its part: the *tail* of the chunk where the run begins, the *head* of every chunk that it enters. A second kernel, in
the program of the chunk where the run begins, adds tail and heads. So the longest run, with all ids equal, costs no
more than T distinct ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import cdiv

CHUNK = 32
"""Sorted tokens per program, loaded four rows at a time."""
COLUMNS = 256
"""Columns per program: one warp, eight columns per thread."""
HEADS = 16
"""Chunks that the second kernel reads at a time."""

# ---------------------------------------------------------------- reference


def embedding_norms_reference(ids_BT: Tensor, g_BTD: Tensor) -> Tensor:
    """Return ``sum_v |sum_{t: ids_bt = v} g_bt|^2`` plus the floor: (B,) float64."""
    squared = []
    for ids_T, g_TD in zip(ids_BT, g_BTD):
        _, slots_T = ids_T.unique(return_inverse=True)  # a sample has at most T distinct ids
        rows = g_TD.new_zeros(g_TD.shape, dtype=torch.float64).index_add_(0, slots_T, g_TD.double())
        squared.append(rows.square().sum())
    return torch.stack(squared) + _floor(g_BTD)


def _floor(g_BTD: Tensor) -> Tensor:
    """Return ``(2^-28 T sum_t |g_bt|)^2``: negligible, unless the rows cancel."""
    lengths_BT = torch.linalg.vector_norm(g_BTD, dim=-1, dtype=torch.float64)
    return (lengths_BT.sum(1) * (2.0**-28 * g_BTD.shape[1])).square()


def embedding_sum_reference(ids_BT: Tensor, g_BTD: Tensor, factors_B: Tensor, rows: int) -> Tensor:
    """Return ``sum_b factors_b G_b``: (rows, D) float32."""
    total = torch.zeros(rows, g_BTD.shape[-1], dtype=torch.float32, device=g_BTD.device)
    add_embedding_sum_reference_(total, ids_BT, g_BTD, factors_B)
    return total


def add_embedding_sum_reference_(onto_VD: Tensor, ids_BT: Tensor, g_BTD: Tensor, factors_B: Tensor) -> None:
    """Add ``sum_b factors_b G_b`` to ``onto_VD`` in place: in float64, rounded once to its dtype."""
    factors_B11 = factors_B.double()[:, None, None]
    scaled_BTD = torch.where(factors_B11 > 0, factors_B11 * g_BTD.double(), factors_B11.new_zeros(()))
    onto_VD.copy_(onto_VD.double().index_add_(0, ids_BT.flatten(), scaled_BTD.flatten(0, 1)))


# ---------------------------------------------------------------- Triton


@jit
def _advance(acc, head, began, row, starts):
    """Add a row. A new run begins at zero; ``head`` is the run that entered the chunk."""
    acc = tl.where(starts, 0.0, acc) + row
    began = began | starts
    head = tl.where(began, head, acc)
    return acc, head, began


@jit
def _edges(ids_ptr, s, T):
    """Return the id at sorted position s, and whether its run starts there and ends there."""
    own = tl.load(ids_ptr + s, mask=s < T, other=0)
    before = tl.load(ids_ptr + s - 1, mask=(s > 0) & (s < T), other=0)
    after = tl.load(ids_ptr + s + 1, mask=s + 1 < T, other=0)
    starts = (s < T) & ((s == 0) | (own != before))
    ends = (s < T) & ((s + 1 == T) | (own != after))
    return own, starts, ends


@jit
def _row(order_ptr, g_ptr, stride_t, s, T, columns, in_row):
    t = tl.load(order_ptr + s, mask=s < T, other=0)
    return tl.load(g_ptr + t * stride_t + columns, mask=in_row & (s < T), other=0.0).to(tl.float64)


@jit
def _store_ends(ids_ptr, head_ptr, tail_ptr, acc, head, began, first, T, D, columns, in_row, CHUNK: tl.constexpr):
    """Store the parts of runs that cross the chunk: the head if one entered, the tail if one began and continues."""
    last = first + CHUNK - 1
    entered = (first > 0) & (tl.load(ids_ptr + first - 1, mask=first > 0, other=0) == tl.load(ids_ptr + first))
    continues = last + 1 < T
    continues = continues & (
        tl.load(ids_ptr + last, mask=continues, other=0) == tl.load(ids_ptr + last + 1, mask=continues, other=0)
    )
    tl.store(head_ptr + columns, head, mask=in_row & entered)
    tl.store(tail_ptr + columns, acc, mask=in_row & continues & began)


@jit
def _sum_across_chunks(
    ids_ptr, head_ptr, tail_ptr, c, T, D, chunks, columns, in_row, CHUNK: tl.constexpr, HEADS: tl.constexpr
):
    """Return whether a run begins in chunk c and continues beyond it, its id, and its sum."""
    first = c * CHUNK
    last = first + CHUNK - 1
    inside = last + 1 < T
    own = tl.load(ids_ptr + last, mask=inside, other=0)
    continues = inside & (own == tl.load(ids_ptr + last + 1, mask=inside, other=0))
    entered = (c > 0) & (own == tl.load(ids_ptr + first - 1, mask=inside & (c > 0), other=0))
    active = continues & (entered == 0)
    acc = tl.load(tail_ptr + c.to(tl.int64) * D + columns, mask=in_row & active, other=0.0)
    chunk = c + 1 + tl.arange(0, HEADS)
    going = active
    while going:
        # Ids are sorted: the run entered a later chunk if that chunk's first id is the run's.
        here = (chunk < chunks) & (tl.load(ids_ptr + chunk * CHUNK, mask=chunk < chunks, other=0) == own)
        ptr = head_ptr + chunk[:, None].to(tl.int64) * D + columns[None, :]
        acc += tl.sum(tl.load(ptr, mask=here[:, None] & in_row[None, :], other=0.0), 0)
        going = tl.sum(here.to(tl.int32), 0) == HEADS
        chunk += HEADS
    return active, own, acc


@jit
def _norms_within_body(
    ids_ptr, order_ptr, g_ptr, head_ptr, tail_ptr, partial_ptr, T, D, chunks, stride_b, stride_t, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Square the runs that lie within one chunk of one sample; store heads and tails of the others."""
    c = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < D
    ids_ptr += b * T
    order_ptr += b * T
    g_ptr += b * stride_b
    first = c * CHUNK
    acc = tl.zeros((COLUMNS,), tl.float64)
    head = tl.zeros((COLUMNS,), tl.float64)
    total = tl.zeros((COLUMNS,), tl.float64)
    began = first < 0
    for step in range(0, CHUNK, 4):
        s = first + step
        row_0 = _row(order_ptr, g_ptr, stride_t, s, T, columns, in_row)
        row_1 = _row(order_ptr, g_ptr, stride_t, s + 1, T, columns, in_row)
        row_2 = _row(order_ptr, g_ptr, stride_t, s + 2, T, columns, in_row)
        row_3 = _row(order_ptr, g_ptr, stride_t, s + 3, T, columns, in_row)
        _, starts, ends = _edges(ids_ptr, s, T)
        acc, head, began = _advance(acc, head, began, row_0, starts)
        total += tl.where(began & ends, acc * acc, 0.0)
        _, starts, ends = _edges(ids_ptr, s + 1, T)
        acc, head, began = _advance(acc, head, began, row_1, starts)
        total += tl.where(began & ends, acc * acc, 0.0)
        _, starts, ends = _edges(ids_ptr, s + 2, T)
        acc, head, began = _advance(acc, head, began, row_2, starts)
        total += tl.where(began & ends, acc * acc, 0.0)
        _, starts, ends = _edges(ids_ptr, s + 3, T)
        acc, head, began = _advance(acc, head, began, row_3, starts)
        total += tl.where(began & ends, acc * acc, 0.0)
    slot = (b * chunks + c) * D
    _store_ends(ids_ptr, head_ptr + slot, tail_ptr + slot, acc, head, began, first, T, D, columns, in_row, CHUNK)
    tl.store(partial_ptr + (b * 2 * chunks + c) * tl.num_programs(1) + tl.program_id(1), tl.sum(total, 0))


@jit
def _norms_across_body(
    ids_ptr, head_ptr, tail_ptr, partial_ptr, T, D, chunks, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, HEADS:
    tl.constexpr,
):  # fmt: skip
    """Square the run, if any, that begins in this chunk and continues beyond it."""
    c = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < D
    slot = b * chunks * D
    ids_ptr += b * T
    _, _, acc = _sum_across_chunks(
        ids_ptr, head_ptr + slot, tail_ptr + slot, c, T, D, chunks, columns, in_row, CHUNK, HEADS
    )  # zero if there is none
    tl.store(partial_ptr + ((b * 2 + 1) * chunks + c) * tl.num_programs(1) + tl.program_id(1), tl.sum(acc * acc, 0))


@jit
def _weighted_row(order_ptr, g_ptr, factors_ptr, tokens, stride_b, stride_t, s, N, columns, in_row):
    """Return a token's row times its sample's factor; the row is not read if the factor is not above 0."""
    n = tl.load(order_ptr + s, mask=s < N, other=0)
    b = n // tokens
    factor = tl.load(factors_ptr + b, mask=s < N, other=0.0).to(tl.float64)
    counts = (s < N) & (factor > 0)
    ptr = g_ptr + b * stride_b + (n - b * tokens) * stride_t + columns
    row = tl.load(ptr, mask=in_row & counts, other=0.0).to(tl.float64)
    return row * tl.where(counts, factor, 0.0)


@jit
def _add_row(out_ptr, own, V, D, acc, columns, mask):
    """Add a finished run to its row, which no other program touches."""
    mask = mask & (own >= 0) & (own < V)
    row = out_ptr + own.to(tl.int64) * D + columns
    before = tl.load(row, mask=mask, other=0.0).to(tl.float64)
    tl.store(row, (before + acc).to(tl.float32), mask=mask)


@jit
def _sum_within_body(
    ids_ptr, order_ptr, g_ptr, factors_ptr, head_ptr, tail_ptr, out_ptr, N, D, V, tokens, stride_b, stride_t, CHUNK:
    tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add to the rows of the total whose run lies within one chunk; store heads and tails of the others."""
    c = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < D
    first = c * CHUNK
    acc = tl.zeros((COLUMNS,), tl.float64)
    head = tl.zeros((COLUMNS,), tl.float64)
    began = first < 0
    for step in range(0, CHUNK, 4):
        s = first + step
        row_0 = _weighted_row(order_ptr, g_ptr, factors_ptr, tokens, stride_b, stride_t, s, N, columns, in_row)
        row_1 = _weighted_row(order_ptr, g_ptr, factors_ptr, tokens, stride_b, stride_t, s + 1, N, columns, in_row)
        row_2 = _weighted_row(order_ptr, g_ptr, factors_ptr, tokens, stride_b, stride_t, s + 2, N, columns, in_row)
        row_3 = _weighted_row(order_ptr, g_ptr, factors_ptr, tokens, stride_b, stride_t, s + 3, N, columns, in_row)
        own, starts, ends = _edges(ids_ptr, s, N)
        acc, head, began = _advance(acc, head, began, row_0, starts)
        _add_row(out_ptr, own, V, D, acc, columns, in_row & began & ends)
        own, starts, ends = _edges(ids_ptr, s + 1, N)
        acc, head, began = _advance(acc, head, began, row_1, starts)
        _add_row(out_ptr, own, V, D, acc, columns, in_row & began & ends)
        own, starts, ends = _edges(ids_ptr, s + 2, N)
        acc, head, began = _advance(acc, head, began, row_2, starts)
        _add_row(out_ptr, own, V, D, acc, columns, in_row & began & ends)
        own, starts, ends = _edges(ids_ptr, s + 3, N)
        acc, head, began = _advance(acc, head, began, row_3, starts)
        _add_row(out_ptr, own, V, D, acc, columns, in_row & began & ends)
    slot = c.to(tl.int64) * D
    _store_ends(ids_ptr, head_ptr + slot, tail_ptr + slot, acc, head, began, first, N, D, columns, in_row, CHUNK)


@jit
def _sum_across_body(
    ids_ptr, head_ptr, tail_ptr, out_ptr, N, D, V, chunks, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, HEADS:
    tl.constexpr,
):  # fmt: skip
    """Add to the row of the total, if any, whose run begins in this chunk and continues beyond it."""
    c = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < D
    active, own, acc = _sum_across_chunks(ids_ptr, head_ptr, tail_ptr, c, N, D, chunks, columns, in_row, CHUNK, HEADS)
    _add_row(out_ptr, own, V, D, acc, columns, in_row & active)


def _sort_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return sorted ids within each row, and their original positions. 32 bits take half the passes of the sort."""
    values, order = torch.sort(ids.to(torch.int32), dim=-1, stable=True)
    return values, order


def launch_embedding_norms(ids_BT: Tensor, g_BTD: Tensor) -> Tensor:
    """Evaluate :func:`embedding_norms_reference` on the device."""
    batch, tokens, width = g_BTD.shape
    chunks, blocks = cdiv(tokens, CHUNK), cdiv(width, COLUMNS)
    g_BTD = g_BTD if g_BTD.stride(2) == 1 else g_BTD.contiguous()
    ids, order = _sort_ids(ids_BT)
    head, tail = torch.empty((2, batch, chunks, width), dtype=torch.float64, device=g_BTD.device)
    partial = torch.empty((batch, 2 * chunks * blocks), dtype=torch.float64, device=g_BTD.device)
    grid = (chunks, blocks, batch)
    _norms_within_body[grid](
        ids, order, g_BTD, head, tail, partial, tokens, width, chunks, g_BTD.stride(0), g_BTD.stride(1), CHUNK=CHUNK,
        COLUMNS=COLUMNS, num_warps=1,
    )  # fmt: skip
    _norms_across_body[grid](
        ids, head, tail, partial, tokens, width, chunks, CHUNK=CHUNK, COLUMNS=COLUMNS, HEADS=HEADS, num_warps=4
    )
    return partial.sum(1) + _floor(g_BTD)


def launch_embedding_sum(ids_BT: Tensor, g_BTD: Tensor, factors_B: Tensor, rows: int) -> Tensor:
    """Evaluate :func:`embedding_sum_reference` on the device."""
    total = torch.zeros((rows, g_BTD.shape[-1]), dtype=torch.float32, device=g_BTD.device)
    launch_add_embedding_sum_(total, ids_BT, g_BTD, factors_B)
    return total


def launch_add_embedding_sum_(onto_VD: Tensor, ids_BT: Tensor, g_BTD: Tensor, factors_B: Tensor) -> None:
    """Evaluate :func:`add_embedding_sum_reference_` on the device; rows whose id never occurs are not read."""
    _check_onto(onto_VD, g_BTD)
    batch, tokens, width = g_BTD.shape
    chunks, blocks = cdiv(batch * tokens, CHUNK), cdiv(width, COLUMNS)
    g_BTD = g_BTD if g_BTD.stride(2) == 1 else g_BTD.contiguous()
    ids, order = _sort_ids(ids_BT.reshape(-1))
    head, tail = torch.empty((2, chunks, width), dtype=torch.float64, device=g_BTD.device)
    grid = (chunks, blocks)
    _sum_within_body[grid](
        ids, order, g_BTD, factors_B.contiguous(), head, tail, onto_VD, batch * tokens, width, len(onto_VD), tokens,
        g_BTD.stride(0), g_BTD.stride(1), CHUNK=CHUNK, COLUMNS=COLUMNS, num_warps=1,
    )  # fmt: skip
    _sum_across_body[grid](
        ids, head, tail, onto_VD, batch * tokens, width, len(onto_VD), chunks, CHUNK=CHUNK, COLUMNS=COLUMNS,
        HEADS=HEADS, num_warps=4,
    )  # fmt: skip


def _check_onto(onto: Tensor, g: Tensor) -> None:
    if onto.dtype != torch.float32 or onto.ndim != 2 or onto.shape[1] != g.shape[2] or not onto.is_contiguous():
        raise ValueError(
            f"add_embedding_sum_: expected a dense float32 matrix of {g.shape[2]} columns to add to, got "
            f"{tuple(onto.shape)} in {onto.dtype} with strides {onto.stride()}"
        )


# ---------------------------------------------------------------- ops

embedding_norms = define(
    "embedding_norms",
    "Tensor ids, Tensor g -> Tensor",
    reference=embedding_norms_reference,
    cuda=launch_embedding_norms,
    fake=lambda ids, g: g.new_empty(g.shape[0], dtype=torch.float64),
)
"""``(ids_BT, g_BTD)``: as :func:`embedding_norms_reference`."""

embedding_sum = define(
    "embedding_sum",
    "Tensor ids, Tensor g, Tensor factors, SymInt rows -> Tensor",
    reference=embedding_sum_reference,
    cuda=launch_embedding_sum,
    fake=lambda ids, g, factors, rows: g.new_empty((rows, g.shape[-1]), dtype=torch.float32),
)
"""``(ids_BT, g_BTD, factors_B, rows)``: as :func:`embedding_sum_reference`."""

add_embedding_sum_ = define(
    "add_embedding_sum_",
    "Tensor(a!) onto, Tensor ids, Tensor g, Tensor factors -> ()",
    reference=add_embedding_sum_reference_,
    cuda=launch_add_embedding_sum_,
    fake=lambda onto, ids, g, factors: None,
)
"""``(onto_VD, ids_BT, g_BTD, factors_B)``: as :func:`add_embedding_sum_reference_`."""
