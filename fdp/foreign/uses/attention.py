"""Attention as torch modules call it: the fused function, and ``F.multi_head_attention_forward`` written out.

    out = softmax(q k^T / sqrt(d) + mask) v W_o^T + b_o                Vaswani et al. 2017, arXiv 1706.03762

``nn.MultiheadAttention`` passes its parameters to one function, tokens first whatever its ``batch_first``. Here its
projections are linear layers with samples first; each use of a part of the packed weight has its own rule.

    >>> multi_head(trace, query, key, value, embed_dim, heads, in_proj_weight, ...)
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp import ops
from fdp.foreign.uses.dropout import draw_dropout
from fdp.foreign.uses.operands import Operand, no_rule_error
from fdp.foreign.uses.products import LINEAR_ROWS
from fdp.foreign.uses.tracking import ALWAYS_FIRST, FLATTENED, SAMPLES, SHARED, CallTrace, Tracked, align_copies


def scaled_dot_product(
    trace: CallTrace,
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` with dropout by the samples' keys; tracked operands are copied per sample."""
    operands: list[Any] = [query, key, value, attn_mask]
    layout = SAMPLES
    if any(isinstance(operand, Tracked) for operand in operands):
        operands, layout = _operands_per_sample(trace, operands)
    q, k, v, mask = operands
    if dropout_p == 0.0:
        options = {"scale": scale, "is_causal": is_causal, "enable_gqa": enable_gqa}
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    else:
        if enable_gqa:
            k, v = (z.repeat_interleave(q.shape[-3] // z.shape[-3], -3) for z in (k, v))
        weights = _attention_weights(q, k, _causal_mask(q, k) if is_causal else mask, scale)
        out = draw_dropout(trace, weights, dropout_p) @ v
    return out.flatten(0, 1) if layout == FLATTENED else out


def multi_head(
    trace: CallTrace,
    query: Operand,
    key: Operand,
    value: Operand,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Operand | None,
    in_proj_bias: Operand | None,
    bias_k: Operand | None,
    bias_v: Operand | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Operand,
    out_proj_bias: Operand | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Operand | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Operand | None = None,
    k_proj_weight: Operand | None = None,
    v_proj_weight: Operand | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` on (tokens, samples, features); masks are True or -inf where not to attend."""
    inputs = (query, key, value)
    q, k, v = _batch_first_inputs(trace, inputs, static_k is not None or static_v is not None, in_proj_weight)
    trace.note_layout("attention", SAMPLES)
    if use_separate_proj_weight:
        separate = (q_proj_weight, k_proj_weight, v_proj_weight)
        q, k, v = (_project(x, w, in_proj_bias, i) for i, (x, w) in enumerate(zip((q, k, v), separate)))
    elif query is key and key is value:
        q, k, v = ops.linear(q, _leaf_or_plain(in_proj_weight), _leaf_or_plain(in_proj_bias)).chunk(3, -1)
    else:
        q, k, v = (_project(x, in_proj_weight, in_proj_bias, i, packed=True) for i, x in enumerate((q, k, v)))
    mask = _merge_masks(_copy_mask(attn_mask), key_padding_mask, q, k, num_heads)
    extra = (bias_k is not None) + add_zero_attn
    if bias_k is not None:
        k, v = torch.cat([k, _learned_token(bias_k, q)], 1), torch.cat([v, _learned_token(bias_v, q)], 1)
    if add_zero_attn:
        k, v = (F.pad(z, (0, 0, 0, 1)) for z in (k, v))
    mask = F.pad(mask, (0, extra)) if mask is not None and extra else mask
    q, k, v = (z.unflatten(-1, (num_heads, -1)).transpose(1, 2) for z in (q, k, v))
    drop = dropout_p if training else 0.0
    weights = _dropped_weights(trace, q, k, mask, drop) if need_weights or drop > 0 else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask) if weights is None else weights @ v
    out = ops.linear(out.transpose(1, 2).flatten(2), _leaf_or_plain(out_proj_weight), _leaf_or_plain(out_proj_bias))
    out = out.transpose(0, 1)
    if weights is None or not need_weights:
        return out, None
    return out, weights.mean(1) if average_attn_weights else weights


def _batch_first_inputs(
    trace: CallTrace, inputs: tuple[Operand, ...], static: bool, weight: Operand | None
) -> tuple[Tensor, ...]:
    """Return inputs (tokens, samples, features) with samples first; refuse any other inputs."""
    if static or any(isinstance(x, Tracked) or x.ndim != 3 or x.shape[1] != trace.batch_size for x in inputs):
        raise no_rule_error(
            "F.multi_head_attention_forward on inputs that are not (tokens, samples, features)", (*inputs, weight)
        )
    return tuple(x.transpose(0, 1) for x in inputs if isinstance(x, Tensor))


def _operands_per_sample(trace: CallTrace, operands: list[Any]) -> tuple[list[Any], str]:
    """Return operands with samples in dim 0, tracked ones as one copy per sample, and how samples were found.

    Dims count from the end, so that an operand with fewer dims has none where the others have their samples.
    """
    path = next(a.path for a in operands if isinstance(a, Tracked))
    ndim = max(len(a.shape) for a in operands if isinstance(a, (Tensor, Tracked)))
    plain = [a for a in operands if isinstance(a, Tensor)]
    found = {trace.find_layout(a, path=path, dims=ALWAYS_FIRST)[0] for a in plain if a.ndim == ndim and a.shape[0] != 1}
    found = found or {SAMPLES} if trace.batch_size == 1 else found
    small = [a for a in plain if a.ndim < ndim and not trace.is_constant(a)]
    if len(found) != 1 or SHARED in found or small:
        raise no_rule_error(
            "F.scaled_dot_product_attention, whose other operands do not all have samples in dim 0", operands
        )
    (layout,) = found

    def first(a: Any) -> Any:
        if isinstance(a, Tracked):
            return align_copies(a.copies(), ndim, layout, 0, path)
        if not isinstance(a, Tensor) or a.ndim < ndim:
            return a
        if a.shape[0] == 1 and layout == FLATTENED:
            return a.unsqueeze(0)
        return trace.samples_first(a, layout, 0)

    return [first(a) for a in operands], layout


def _attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def _dropped_weights(trace: CallTrace, q: Tensor, k: Tensor, mask: Tensor | None, p: float) -> Tensor:
    weights = _attention_weights(q, k, mask, None)
    return draw_dropout(trace, weights, p) if p > 0 else weights


def _causal_mask(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


def _leaf_or_plain(operand: Any) -> Any:
    """Return a leaf or a plain tensor, as ``fdp.ops`` takes it."""
    if not isinstance(operand, Tracked):
        return operand
    if operand.leaf is None or operand.transposed:
        raise no_rule_error("F.multi_head_attention_forward with a weight that is not a parameter itself", (operand,))
    return operand.leaf


def _project(x: Tensor, weight: Any, bias: Any, i: int, *, packed: bool = False) -> Tensor:
    """Compute one of the three projections; their biases are packed, their weights may be."""
    leaf = _leaf_or_plain(weight)
    width = leaf.shape[0] // 3 if packed else leaf.shape[0]
    start, stop = (i * width, (i + 1) * width) if packed else (0, width)
    y = ops.use(LINEAR_ROWS, x, leaf, start=start, stop=stop) if packed else ops.linear(x, leaf)
    if bias is None:
        return y
    if isinstance(bias, Tracked):
        return y + bias.copies()[:, None, i * width : (i + 1) * width]
    return y + bias[i * width : (i + 1) * width]


def _learned_token(bias: Any, like: Tensor) -> Tensor:
    """Return a learned key or value, (1, 1, features), as one more token of every sample."""
    copies = bias.copies() if isinstance(bias, Tracked) else bias.expand(like.shape[0], *bias.shape)
    return copies.reshape(like.shape[0], 1, -1)


def _copy_mask(mask: Operand | None) -> Tensor | None:
    """Return a mask that depends on parameters, (queries, keys), as one per sample: (batch, 1, queries, keys)."""
    if not isinstance(mask, Tracked):
        return mask
    if len(mask.shape) != 2:
        raise no_rule_error("F.multi_head_attention_forward as a mask that is not (queries, keys)", (mask,))
    return mask.copies().unsqueeze(1)


def _merge_masks(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, heads: int) -> Tensor | None:
    """Return both masks as one to add to scores (batch, heads, queries, keys)."""
    total = None
    if attn_mask is not None:
        total = _additive_mask(attn_mask, q.dtype)
        if total.ndim == 3:
            total = total.unflatten(0, (q.shape[0], heads))
    if padding is not None:
        more = _additive_mask(padding, q.dtype).view(q.shape[0], 1, 1, k.shape[1])
        total = more if total is None else total + more
    return None if total is None else total.expand(q.shape[0], heads, q.shape[1], k.shape[1])


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
