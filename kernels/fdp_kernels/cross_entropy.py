"""Cross-entropy and its gradient in one kernel; the gradient overwrites the logits.

    lse_n    = log sum_v exp(logits_nv)                                       online, in float32
    loss_n   = lse_n - logits[n, target_n]
    logits_nv <- (exp(logits_nv - lse_n) - [v = target_n]) * scale_n

Logits and gradient are bfloat16, float16 or float32, and losses float32. (Float64 logits use the reference and give
float64 losses.) A negative target is ignored: loss 0 and gradient 0, whatever the logits. A scale of 0 gives a gradient
of exactly 0.

    >>> logits = h @ w.T                                                      # (N, V)
    >>> losses = softmax_gradient_(logits, targets, 1 / tokens)               # logits now hold their gradient
    >>> dh, dw = logits @ w, logits.T @ h

Letters: N rows (tokens), V vocabulary; a = elements before a row's first 16-byte boundary.

A row is read twice, the second time from L2 or L1: a program is one row with 16 or 32 warps, so few rows are in flight
per multiprocessor. With an odd vocabulary rows are not aligned: the full 16-byte groups after the first boundary are
loaded as such, and the up to 14 elements around them one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdp_kernels.op import define, jit, tl, triton

LONG_ROW_BYTES = 1 << 17
"""Longer rows take 32 warps per program, so that the rows in flight still fit into L2."""

# ---------------------------------------------------------------- reference


def softmax_gradient_reference(logits_NV: Tensor, targets_N: Tensor, scales_N: Tensor | None, scale: float) -> Tensor:
    """Return losses (N,); overwrite ``logits_NV`` with its gradient times ``scales_N``, or ``scale`` if None."""
    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    lse_N = torch.logsumexp(wide, dim=1)
    counted_N = targets_N >= 0
    losses_N = lse_N - wide.gather(1, targets_N.clamp_min(0)[:, None])[:, 0]
    factor_N = (torch.full_like(lse_N, scale) if scales_N is None else scales_N.to(wide.dtype)) * counted_N
    onehot_NV = torch.arange(wide.shape[1], device=wide.device) == targets_N[:, None]
    gradient_NV = torch.exp(wide - lse_N[:, None]) - onehot_NV.to(wide.dtype)
    nonzero_N1 = (factor_N != 0)[:, None]
    logits_NV.copy_(torch.where(nonzero_N1, gradient_NV * factor_N[:, None], gradient_NV.new_zeros(())))
    return torch.where(counted_N, losses_N, losses_N.new_zeros(()))


# ---------------------------------------------------------------- Triton


@jit
def _softmax_gradient_body(
    logits_ptr,
    targets_ptr,
    scales_ptr,
    losses_ptr,
    scale,
    row_stride,
    V: tl.constexpr,
    SCALES: tl.constexpr,
    VEC: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Process one row, GROUPS groups of VEC elements (16 bytes) at a time; a thread holds full groups."""
    n = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + n)
    factor = tl.load(scales_ptr + n) if SCALES else scale
    # The first boundary lies a elements into the row. offset + a is a multiple of VEC; the compiler cannot see that.
    offset = n * row_stride
    a = ((VEC - offset % VEC) % VEC).to(tl.int32)
    a = tl.minimum(a, V)
    row_ptr = logits_ptr + offset
    main_ptr = logits_ptr + tl.multiple_of(offset + a, VEC)
    groups = (V - a) // VEC
    lane = tl.arange(0, VEC)[None, :]
    own = tl.arange(0, GROUPS)
    e = tl.arange(0, 2 * VEC)
    edge = tl.where(e < a, e, e + groups * VEC)
    in_edge = edge < V
    edge_x = tl.load(row_ptr + edge, mask=in_edge, other=float("-inf")).to(tl.float32)
    counted = target >= 0
    at_target = tl.load(row_ptr + target, mask=counted & (target < V), other=float("nan")).to(tl.float32)

    peak = tl.full((GROUPS,), float("-inf"), tl.float32)
    mass = tl.zeros((GROUPS,), tl.float32)
    for first in range(0, V // VEC, GROUPS):
        group = first + own
        ptr = main_ptr + group[:, None] * VEC + lane
        x = tl.load(ptr, mask=(group < groups)[:, None], other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is not a number
        mass = mass * tl.exp(peak - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
        peak = higher
    top = tl.maximum(tl.max(peak, 0), tl.max(edge_x, 0))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(mass * tl.exp(peak - top), 0) + tl.sum(tl.exp(edge_x - top), 0)
    lse = top + tl.log(total)
    tl.debug_barrier()  # every thread must have read the row before any thread writes to it

    tl.store(losses_ptr + n, tl.where(counted, lse - at_target, 0.0))
    nonzero = counted & (factor != 0)
    # An id outside the vocabulary gives NaN, so the clipping drops the sample.
    factor = tl.where(target < V, factor, float("nan"))
    for first in range(0, V // VEC, GROUPS):
        group = first + own
        ptr = main_ptr + group[:, None] * VEC + lane
        inside = (group < groups)[:, None]
        x = tl.load(ptr, mask=inside, other=float("-inf")).to(tl.float32)
        column = a + group[:, None] * VEC + lane
        d = (tl.exp(x - lse) - tl.where(column == target, 1.0, 0.0)) * factor
        tl.store(ptr, tl.where(nonzero, d, 0.0).to(logits_ptr.dtype.element_ty), mask=inside)
    d = (tl.exp(edge_x - lse) - tl.where(edge == target, 1.0, 0.0)) * factor
    tl.store(row_ptr + edge, tl.where(nonzero, d, 0.0).to(logits_ptr.dtype.element_ty), mask=in_edge)


def launch_softmax_gradient(logits_NV: Tensor, targets_N: Tensor, scales_N: Tensor | None, scale: float) -> Tensor:
    """Evaluate :func:`softmax_gradient_reference` on the device; float64 and strided rows use the reference."""
    if logits_NV.dtype == torch.float64 or logits_NV.stride(1) != 1:
        return softmax_gradient_reference(logits_NV, targets_N, scales_N, scale)
    rows, vocab = logits_NV.shape
    losses_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    if rows == 0:
        return losses_N
    vec = 16 // logits_NV.element_size()
    warps = 32 if vocab * logits_NV.element_size() > LONG_ROW_BYTES else 16
    groups = min(64 * warps, max(32, triton.next_power_of_2(vocab // vec)))
    scales_N = None if scales_N is None else scales_N.float().contiguous()
    _softmax_gradient_body[(rows,)](
        logits_NV,
        targets_N.contiguous(),
        losses_N if scales_N is None else scales_N,
        losses_N,
        scale,
        logits_NV.stride(0),
        V=vocab,
        SCALES=scales_N is not None,
        VEC=vec,
        GROUPS=groups,
        num_warps=min(warps, max(1, groups // 32)),
    )
    return losses_N


# ---------------------------------------------------------------- op


def _fake(logits: Tensor, targets: Tensor, scales: Tensor | None, scale: float) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))


_op = define(
    "softmax_gradient_",
    "Tensor(a!) logits, Tensor targets, Tensor? scales, float scale -> Tensor",
    reference=softmax_gradient_reference,
    cuda=launch_softmax_gradient,
    fake=_fake,
)


def softmax_gradient_(logits_NV: Tensor, targets_N: Tensor, scale: float | Tensor) -> Tensor:
    """Return losses (N,); overwrite ``logits_NV`` with its gradient times ``scale``, a number or (N,)."""
    if isinstance(scale, Tensor):
        return _op(logits_NV, targets_N, scale, 1.0)
    return _op(logits_NV, targets_N, None, scale)
