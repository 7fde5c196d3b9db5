"""Causal attention without most of what the mask hides.

causal_attention    softmax(q k^T / sqrt(features)) v,   some queries at a time, each with the keys up to its last

>>> y = causal_attention(q, k, v)                 # by fdp.ops.attention
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from fdp_kernels.processor import ON_ARM
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend

from fdp.cpu.promise import is_promised, is_traced, refuse_a_second_derivative

MAX_TOKENS_AT_ONCE = 64 if ON_ARM else 128
"""With more tokens than this, causal attention takes some queries at a time."""
FEW_TOKENS = 128
"""Up to this many tokens, fewer queries at a time are faster on ARM."""
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_attention(
    q: Float[Tensor, "batch heads tokens features"],
    k: Float[Tensor, "batch heads tokens features"],
    v: Float[Tensor, "batch heads tokens features"],
) -> Float[Tensor, "batch heads tokens features"]:
    """``softmax(q k^T / sqrt(features)) v`` with the keys up to a token's own.

    torch's kernel for CPUs computes most of what the mask hides: at 512 tokens this takes a third less time. A key that
    is not finite spoils some of the queries before it, too, all in the same sample; torch's spoils those after it.
    """
    tokens = q.shape[2]
    if q.device.type != "cpu" or tokens <= MAX_TOKENS_AT_ONCE or tokens != k.shape[2] or is_traced(q):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if torch.is_grad_enabled() and is_promised() and _takes_flash(q, k, v):
        return _CausalAttention.apply(q, k, v)[0]  # pyright: ignore
    parts = []
    for rows in _queries(tokens):
        keys, values = k[:, :, : rows.stop], v[:, :, : rows.stop]
        parts.append(F.scaled_dot_product_attention(q[:, :, rows], keys, values, attn_mask=_hidden(rows, q)))
    return torch.cat(parts, dim=2)


def _queries(tokens: int) -> list[slice]:
    """Return the queries that are taken at a time."""
    at_once = queries_at_once(tokens)
    return [slice(start, min(start + at_once, tokens)) for start in range(0, tokens, at_once)]


def _hidden(rows: slice, like: Tensor) -> Float[Tensor, "queries keys"]:
    """Return what is added to the scores of some queries: minus infinity where a key is later, else 0."""
    mask = torch.full((rows.stop - rows.start, rows.stop), -math.inf, dtype=like.dtype, device=like.device)
    return mask.triu_(rows.start + 1)


def _takes_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if torch would take its flash kernel, in the dtype of ``q``."""
    if torch.is_autocast_enabled("cpu"):
        return False
    return torch._fused_sdp_choice(q, k, v) == SDPBackend.FLASH_ATTENTION.value


class _CausalAttention(torch.autograd.Function):
    """Attention in the same parts, and its gradient without a tensor of zeros around that of every slice.

    The numbers are autograd's, up to the order in which parts of a key's gradient are added. On two cores of a
    Neoverse-N1, forward and backward of a layer at 512 tokens take 129 ms instead of 142, at 128 tokens 14.4 instead of
    15.4. The results are the output, as (batch, tokens, heads, features) in memory, and the logarithms of the sums of
    exponentials, which are not differentiable.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y, sums = _by_tokens(q), []
        for rows in _queries(q.shape[2]):
            keys, values = k[:, :, : rows.stop], v[:, :, : rows.stop]
            y[:, :, rows], log_sums = _FLASH(q[:, :, rows], keys, values, 0.0, False, attn_mask=_hidden(rows, q))
            sums.append(log_sums)
        return y, *sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_a_second_derivative("attention", "torch.nn.functional.scaled_dot_product_attention")
        (slope, *_), (q, k, v, y, *sums) = gradients, ctx.saved_tensors
        if slope is None:
            return None, None, None
        of_q, of_keys = _by_tokens(q), []
        for rows, log_sums in reversed(list(zip(_queries(q.shape[2]), sums))):  # the last part has all keys
            keys, values = k[:, :, : rows.stop], v[:, :, : rows.stop]
            given = slope[:, :, rows], q[:, :, rows], keys, values, y[:, :, rows], log_sums
            of_q[:, :, rows], *parts = _FLASH_BACKWARD(*given, 0.0, False, attn_mask=_hidden(rows, q))
            for total, part in zip(of_keys, parts):
                total[:, :, : rows.stop].add_(part)
            of_keys = of_keys or parts
        return of_q, *of_keys


def _by_tokens(q: Tensor) -> Tensor:
    """Return an empty tensor of ``q``'s shape that lies in memory as (batch, tokens, heads, features)."""
    batch, heads, tokens, features = q.shape
    return torch.empty(batch, tokens, heads, features, dtype=q.dtype, device=q.device).transpose(1, 2)


def queries_at_once(tokens: int) -> int:
    """Return how many queries are fastest, forward and backward, for 16 samples and 4 heads on two cores.

    On a Neoverse-N1, 128 tokens take 13.9 ms with 32 and 14.8 with 64, 512 take 154 and 139. On a Xeon, 512 take 46.9
    with 64 and 42.9 with 128.
    """
    if not ON_ARM:
        return 128
    return 32 if tokens <= FEW_TOKENS else 64
