"""Per-sample weight gradients of a linear layer, stored in 8 bits; the norms of exactly what is stored; their sum.

    keep_int8   q_b 2^e_b = round(sum_t g_bt x_bt^T)        g (B, T, P), x (B, T, D) -> q (B, P, D), e (B, P, J) int8
                n_b       = |q_b 2^e_b|^2                                             -> (B, parts) float64
    sum_int8    W         = sum_b c_b q_b 2^e_b             q, e, c (B,) float32      -> (parts, P, D) float32

128 neighbouring columns of a row share an exponent, as in microscaling formats. It is the least with which they fit: if
m is the largest of them, ``2^(e + 6) <= (1 + 2^-7) m < 2^(e + 7)``, so that each is rounded by m / 127 at most.
Together they are rounded by about a hundredth of their norm if they are normal, by more if a few are much larger than
the rest, and by 9 % at most. Against ``keep`` in bfloat16, half as much is written and read.

Privacy needs no care for what is rounded away: the norm is that of the numbers that are added. Integers of 8 bits and
powers of two are exact in float32, and so are the squares of 128 of them, so the norm is exact but for float64.

    >>> q, e, parts = keep_int8(g, x)                            # 2 B T P D flops
    >>> factors = (C / parts.sum(1).sqrt()).clamp(max=1).float()
    >>> total = foreach_sum_int8([q], [e], [factors], size=64)[0].double().sum(0)

``foreach_keep_int8`` stores the gradients of several matrices, four per launch.

Guarantees:
  - the norm is that of the stored numbers, to float64 rounding; it is NaN or infinite if a gradient is;
  - a sample with factor 0 adds exactly 0, even if its gradient was NaN or infinite;
  - what a sample stores depends on its own tokens, not on the samples beside it or on what shares a launch;
  - slack: that of ``weighted`` with as many samples as a part has. On Hopper ``sum_hopper`` adds integers, within it.

Letters: B samples, T tokens, P output features, D input features, J blocks of 128 columns.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fdp_kernels import keep_hopper, sum_hopper
from fdp_kernels.hopper import runs_hopper
from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import (
    cdiv,
    check_pairs,
    launch_by_four,
    matrix_index,
    pad_to_four,
    pick,
    slices_of_four,
    widths_and_ends,
)

COLUMNS = keep_hopper.INT8_COLUMNS
"""Columns of a row that share an exponent."""
ROWS, SAMPLES, UNROLL = 8, 2, 4
"""Rows of a tile of ``sum_int8``, samples that are read at a time, and how often in a turn of the loop."""
ALIGNED = 16
"""Rows of q begin at multiples of this many bytes, for TMA and for wide loads."""
LEAST_EXPONENT = -126
"""Smaller numbers count as 0: their powers of two are subnormal."""


# ---------------------------------------------------------------- references


def round_to_int8(G_BPD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers (B, P, D), exponents (B, P, J) and the squared norms of what they stand for (B,).

    Rounds to nearest, ties to even. A sample that is not finite has a norm that is not, and integers without meaning.
    """
    G_BPJC = _blocks(G_BPD.float())
    largest = G_BPJC.abs().amax(-1) * (1 + 2.0**-7)
    exponents = ((largest.view(torch.int32) >> 23) - 127 - 6).clamp_(min=LEAST_EXPONENT)
    rounded = torch.ldexp(G_BPJC, -exponents.unsqueeze(-1)).round()
    squares = torch.ldexp(rounded.double().square().sum(-1), 2 * exponents).sum((1, 2))
    integers = rounded.nan_to_num(0, 0, 0).to(torch.int8).flatten(2)[..., : G_BPD.shape[2]]
    return integers.contiguous(), exponents.to(torch.int8), squares


def widen_int8(q_BPD: Tensor, e_BPJ: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``q 2^e``, exactly: in float64 always, in float32 below ``2^128``, to which the largest numbers round."""
    exponents = e_BPJ.to(torch.int32).unsqueeze(-1)
    return torch.ldexp(_blocks(q_BPD.to(dtype)), exponents).flatten(2)[..., : q_BPD.shape[2]]


def _blocks(G_BPD: Tensor) -> Tensor:
    """Return the columns in blocks that share an exponent, (B, P, J, 128), zeros behind the last."""
    return torch.nn.functional.pad(G_BPD, (0, -G_BPD.shape[2] % COLUMNS)).unflatten(2, (-1, COLUMNS))


def foreach_keep_int8_reference(gs: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
    """Return the integers of all matrices, then the exponents of all, then the parts of all squared norms."""
    check_pairs(gs, xs)
    wide = torch.float64 if gs[0].dtype == torch.float64 else torch.float32
    found = [round_to_int8(torch.bmm(g.to(wide).mT, x.to(wide))) for g, x in zip(gs, xs)]
    parts = [
        torch.nn.functional.pad(squares.unsqueeze(1), (0, _num_parts(g, x) - 1))
        for (_, _, squares), g, x in zip(found, gs, xs)
    ]
    return [integers for integers, _, _ in found] + [exponents for _, exponents, _ in found] + parts


def keep_int8_reference_(q: Tensor, e: Tensor, parts: Tensor, g_BTP: Tensor, x_BTD: Tensor) -> None:
    """Write integers, exponents and squared norms in parts of one matrix to q, e and parts."""
    for out, found in zip((q, e, parts), foreach_keep_int8_reference([g_BTP], [x_BTD])):
        out.copy_(found)


def foreach_sum_int8_reference(qs: list[Tensor], es: list[Tensor], factors: list[Tensor], size: int) -> list[Tensor]:
    """Return ``sum_b c_b q_b 2^e_b`` of every ``size`` samples, (parts, P, D): in float64, rounded once to float32."""
    _check_sum(qs, es, factors, size)
    sums = []
    for q, e, factor in zip(qs, es, factors):
        parts = zip(q.split(size), e.split(size), factor.double().split(size))
        wide = ((c, widen_int8(few, of, torch.float64)) for few, of, c in parts)
        sums.append(torch.stack([torch.tensordot(c, G, dims=1) for c, G in wide]))
    return [total.float() for total in sums]


# ---------------------------------------------------------------- body


@jit
def _byte(words, K: tl.constexpr):
    """Return byte K of every word as a float32: ``2^23 + 128 + q`` by its bits, faster than a conversion."""
    bits = ((words >> (8 * K)) & 0xFF) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388736.0


@jit
def _sum_body(
    q_ptr0, q_ptr1, q_ptr2, q_ptr3, e_ptr0, e_ptr1, e_ptr2, e_ptr3, factor_ptr0, factor_ptr1, factor_ptr2, factor_ptr3,
    out_ptr0, out_ptr1, out_ptr2, out_ptr3, p0, p1, p2, p3, d0, d1, d2, d3, end0, end1, end2, batch, size,
    R: tl.constexpr, C: tl.constexpr, S: tl.constexpr, UNROLL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum a tile of R rows and C columns over the samples of a part, S at a time, four integers of a word each."""
    index = tl.program_id(0)
    matrix = matrix_index(index, end0, end1, end2)
    own = index - pick(matrix, 0, end0, end1, end2)
    p, d = pick(matrix, p0, p1, p2, p3), pick(matrix, d0, d1, d2, d3)
    rows, columns = tl.cdiv(p, R), tl.cdiv(d, C)
    part = own // (rows * columns)
    i, j = own % (rows * columns) // columns, own % columns
    sample, row, word = tl.arange(0, S), i * R + tl.arange(0, R), j * (C // 4) + tl.arange(0, C // 4)
    first = part * size
    end = first + size
    if end > batch:
        end = batch
    q_ptr = tl.multiple_of(pick(matrix, q_ptr0, q_ptr1, q_ptr2, q_ptr3).to(tl.pointer_type(tl.int32)), ALIGNED)
    words = tl.multiple_of(d // 4, ALIGNED // 4)
    inside = (row < p)[None, :, None] & (word < words)[None, None, :]
    there = (first + sample[:, None]).to(tl.int64) * p + row[None, :]
    here = q_ptr + there[:, :, None] * words + word[None, None, :]
    e_ptr = pick(matrix, e_ptr0, e_ptr1, e_ptr2, e_ptr3) + there * columns + j
    factor_ptr = pick(matrix, factor_ptr0, factor_ptr1, factor_ptr2, factor_ptr3)
    total_0 = tl.zeros((S, R, C // 4), tl.float32)
    total_1 = tl.zeros((S, R, C // 4), tl.float32)
    total_2 = tl.zeros((S, R, C // 4), tl.float32)
    total_3 = tl.zeros((S, R, C // 4), tl.float32)
    for b in tl.range(first, end, S, loop_unroll_factor=UNROLL):
        more = b + sample < end
        four = tl.load(here, mask=inside & more[:, None, None], other=0) ^ -2139062144  # 0x80808080: 128 + q
        exponent = tl.load(e_ptr, mask=(row < p)[None, :] & more[:, None], other=0).to(tl.int32)
        factor = tl.load(factor_ptr + b + sample, mask=more, other=0.0)
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True) * factor[:, None]
        scale = tl.broadcast_to(scale[:, :, None], (S, R, C // 4))
        total_0 = tl.fma(_byte(four, 0), scale, total_0)
        total_1 = tl.fma(_byte(four, 1), scale, total_1)
        total_2 = tl.fma(_byte(four, 2), scale, total_2)
        total_3 = tl.fma(_byte(four, 3), scale, total_3)
        here += S * p.to(tl.int64) * words
        e_ptr += S * p.to(tl.int64) * columns
    even = tl.join(tl.sum(total_0, 0), tl.sum(total_2, 0))
    odd = tl.join(tl.sum(total_1, 0), tl.sum(total_3, 0))
    total_RC = tl.reshape(tl.join(even, odd), (R, C))
    column = j * C + tl.arange(0, C)
    out = pick(matrix, out_ptr0, out_ptr1, out_ptr2, out_ptr3)
    offset = (part.to(tl.int64) * p + row[:, None]) * d + column[None, :]
    tl.store(tl.multiple_of(out, ALIGNED) + offset, total_RC, mask=(row < p)[:, None] & (column < d)[None, :])


# ---------------------------------------------------------------- launches


def empty_int8(gs: list[Tensor], xs: list[Tensor], batch: int | None = None) -> list[Tensor]:
    """Return memory for integers, exponents and parts of such pairs, of ``batch`` samples if that is given."""
    samples = len(gs[0]) if batch is None else batch
    integers = [g.new_empty(samples, g.shape[2], x.shape[2], dtype=torch.int8) for g, x in zip(gs, xs)]
    exponents = [q.new_empty(samples, q.shape[1], cdiv(q.shape[2], COLUMNS)) for q in integers]
    parts = [g.new_empty(samples, _num_parts(g, x), dtype=torch.float64) for g, x in zip(gs, xs)]
    return integers + exponents + parts


def can_keep_int8(g_BTP: Tensor, x_BTD: Tensor) -> bool:
    """Return True if kernels store and sum gradients of such a pair in 8 bits."""
    return runs_hopper(g_BTP) and g_BTP.numel() > 0 and x_BTD.shape[-1] % ALIGNED == 0


def launch_foreach_keep_int8(gs: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
    """Evaluate :func:`foreach_keep_int8_reference` with the kernel, four matrices per launch."""
    check_pairs(gs, xs)
    if not all(can_keep_int8(g, x) for g, x in zip(gs, xs)):
        return foreach_keep_int8_reference(gs, xs)
    found, count = empty_int8(gs, xs), len(gs)
    for four in slices_of_four(gs):
        into = (found[part : part + count][four] for part in (0, count, 2 * count))
        keep_hopper.launch_four_int8(gs[four], xs[four], *into)
    return found


def launch_keep_int8_(q: Tensor, e: Tensor, parts: Tensor, g_BTP: Tensor, x_BTD: Tensor) -> None:
    """Write what :func:`keep_int8` returns of one matrix to q, e and parts."""
    check_pairs([g_BTP], [x_BTD])
    if can_keep_int8(g_BTP, x_BTD):
        keep_hopper.launch_four_int8([g_BTP], [x_BTD], [q], [e], [parts])
    else:
        keep_int8_reference_(q, e, parts, g_BTP, x_BTD)


def launch_foreach_sum_int8(qs: list[Tensor], es: list[Tensor], factors: list[Tensor], size: int) -> list[Tensor]:
    """Evaluate :func:`foreach_sum_int8_reference` with the kernels, four matrices per launch.

    Which kernel sums a matrix does not depend on the others.
    """
    _check_sum(qs, es, factors, size)
    if any(q.numel() == 0 or q.shape[2] % ALIGNED for q in qs):
        return foreach_sum_int8_reference(qs, es, factors, size)
    sums: dict[int, Tensor] = {}
    for launch, on_hopper in ((sum_hopper.launch_four_sums, True), (_sum_four, False)):
        own = [i for i, q in enumerate(qs) if sum_hopper.can_sum(q, size) == on_hopper]
        operands = ([side[i] for i in own] for side in (qs, es, factors))
        sums |= zip(own, launch_by_four(partial(launch, size=size), *operands))
    return [sums[i] for i in range(len(qs))]


def _sum_four(qs: list[Tensor], es: list[Tensor], factors: list[Tensor], size: int) -> list[Tensor]:
    parts = cdiv(len(qs[0]), size)
    outs = [torch.empty(parts, *q.shape[1:], dtype=torch.float32, device=q.device) for q in qs]
    # Blocks of columns follow one another in memory: as rows of their own, they are read from one end to the other.
    qs = [q.reshape(len(q), -1, COLUMNS) if q.shape[2] % COLUMNS == 0 else q for q in qs]
    counts = [parts * cdiv(q.shape[1], ROWS) * cdiv(q.shape[2], COLUMNS) for q in qs]
    operands = ([side.contiguous() for side in sides] for sides in (qs, es, factors))
    _sum_body[(sum(counts),)](
        *(side for sides in operands for side in pad_to_four(sides)), *pad_to_four(outs),
        *widths_and_ends([q.mT for q in qs], qs, counts), len(qs[0]), size,
        R=ROWS, C=COLUMNS, S=SAMPLES, UNROLL=UNROLL, ALIGNED=ALIGNED, num_warps=4,
    )  # fmt: skip
    return outs


def _num_parts(g_BTP: Tensor, x_BTD: Tensor) -> int:
    return keep_hopper.num_parts(g_BTP, x_BTD, keep_hopper.INT8_TILE)


def _check_sum(qs: list[Tensor], es: list[Tensor], factors: list[Tensor], size: int) -> None:
    if not qs or len({len(q) for q in qs}) > 1 or size < 1:
        raise ValueError(f"sum_int8: expected matrices of equal samples, in parts of at least one, got {size}")
    for q, e, factor in zip(qs, es, factors, strict=True):
        blocks = (*q.shape[:2], cdiv(q.shape[2], COLUMNS))
        if (q.dtype, e.dtype, factor.dtype) != (torch.int8, torch.int8, torch.float32):
            raise ValueError(f"sum_int8: expected int8, int8 and float32, got {q.dtype}, {e.dtype} and {factor.dtype}")
        if e.shape != blocks or factor.shape != q.shape[:1]:
            raise ValueError(
                f"sum_int8: expected exponents {blocks} and {len(q)} factors, got {tuple(e.shape)} and "
                f"{tuple(factor.shape)}"
            )


# ---------------------------------------------------------------- ops


foreach_keep_int8 = define(
    "foreach_keep_int8",
    "Tensor[] gs, Tensor[] xs -> Tensor[]",
    reference=foreach_keep_int8_reference,
    cuda=launch_foreach_keep_int8,
    fake=lambda gs, xs: empty_int8(gs, xs),
)
"""``(gs, xs)``: as :func:`foreach_keep_int8_reference`; all pairs have equal samples and tokens."""
keep_int8_ = define(
    "keep_int8_",
    "Tensor(a!) q, Tensor(b!) e, Tensor(c!) parts, Tensor g, Tensor x -> ()",
    reference=keep_int8_reference_,
    cuda=launch_keep_int8_,
    fake=lambda q, e, parts, g, x: None,
)
"""``(q, e, parts, g_BTP, x_BTD)``: as :func:`keep_int8_reference_`, into tensors as :func:`empty_int8` makes them."""
foreach_sum_int8 = define(
    "foreach_sum_int8",
    "Tensor[] qs, Tensor[] es, Tensor[] factors, int size -> Tensor[]",
    reference=foreach_sum_int8_reference,
    cuda=launch_foreach_sum_int8,
    fake=lambda qs, es, factors, size: [q.new_empty(cdiv(len(q), size), *q.shape[1:], dtype=torch.float32) for q in qs],
)
"""``(qs, es, factors, size)``: as :func:`foreach_sum_int8_reference`."""


def keep_int8(g_BTP: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers, exponents and squared norms in parts of one matrix, as ``foreach_keep_int8`` does."""
    q, e, parts = foreach_keep_int8([g_BTP], [x_BTD])
    return q, e, parts
