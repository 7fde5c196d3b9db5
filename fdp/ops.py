"""Operations of a model: ordinary tensor functions that also accept watched parameters (``fdp.gradients.tape``).

Every function takes the input first, with samples in dimension 0, and parameters as plain tensors or ``Watched``
values. A use of a watched parameter is recorded.

    >>> h = h + linear(attention(q, k, v), p["out"], p["out_bias"])

Your own operation: a :class:`fdp.gradients.rules.Rule` and ``use(rule, x, weight)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fdp.attention import attention as attention
from fdp.cpu.gelu import gelu as gelu
from fdp.cpu.layer_norm import layer_norm as layer_norm_of_each
from fdp.gradients.rules import OneHot, Pair, Rule, rows
from fdp.gradients.tape import Watched
from fdp.types import FdpError

Weight: TypeAlias = Tensor | Watched
Extent: TypeAlias = int | tuple[int, ...]
"""One number for all dims of a kernel, or one per dim."""


def use(rule: Rule, x: Tensor, weight: Weight, **options: Any) -> Tensor:
    """Return ``rule.forward(x, weight, **options)``; record the use if ``weight`` is watched."""
    if isinstance(weight, Watched):
        return weight.tape.output(rule, x, weight, options)
    return rule.forward(x, weight, **options)


LINEAR = Rule("linear", F.linear, lambda x, g, shape: Pair(rows(g), rows(x), shape))
MATMUL = Rule(
    "matmul",
    lambda x, weight, bias=None: F.linear(x, weight.t(), bias),
    lambda x, g, shape: Pair(rows(x), rows(g), shape),
)
EXPERTS = Rule("experts", torch.matmul, lambda x, g, shape: Pair(x, g, shape))
"""(batch, experts, tokens, inputs) times (experts, inputs, outputs)."""


def _embedding_record(ids: Tensor, g: Tensor, shape: Sequence[int], *, padding_idx: int | None = None) -> Pair:
    if padding_idx is not None:  # its row is not trained
        g = g.masked_fill((ids == padding_idx % shape[0]).unsqueeze(-1), 0.0)
    return Pair(OneHot(ids.reshape(ids.shape[0], -1)), rows(g), tuple(shape))


EMBEDDING = Rule("embedding", F.embedding, _embedding_record)


def linear(
    x: Float[Tensor, " batch *tokens inputs"], weight: Weight, bias: Weight | None = None
) -> Float[Tensor, " batch *tokens outputs"]:
    """``x W^T + b`` on inputs of any rank."""
    if bias is not None and not isinstance(weight, Watched) and not isinstance(bias, Watched):
        return F.linear(x, weight, bias)
    if isinstance(weight, Watched) and isinstance(bias, Watched) and weight.tape.attached:
        return weight.tape.output_with_bias(LINEAR, x, weight, bias)
    y = use(LINEAR, x, weight)
    return y if bias is None else add(y, bias_of(weight, bias))


def matmul(
    x: Float[Tensor, " batch *tokens inputs"], weight: Weight, bias: Weight | None = None
) -> Float[Tensor, " batch *tokens outputs"]:
    """``x W + b`` on inputs of any rank; weight of shape (inputs, outputs)."""
    if bias is not None and not isinstance(weight, Watched) and not isinstance(bias, Watched):
        return MATMUL.forward(x, weight, bias)
    if isinstance(weight, Watched) and isinstance(bias, Watched) and weight.tape.attached:
        return weight.tape.output_with_bias(MATMUL, x, weight, bias)
    y = use(MATMUL, x, weight)
    return y if bias is None else add(y, bias)  # not bias_of, which is for a bias as a further column of W


def embedding(
    ids: Int[Tensor, " batch *tokens"], table: Weight, *, padding_idx: int | None = None
) -> Float[Tensor, " batch *tokens features"]:
    """``table[ids]``; the row ``padding_idx`` gets no gradient."""
    return use(EMBEDDING, ids, table) if padding_idx is None else use(EMBEDDING, ids, table, padding_idx=padding_idx)


def add(x: Float[Tensor, " batch *shape"], bias: Weight) -> Float[Tensor, " batch *shape"]:
    """``x + bias``, the bias aligned with the last dimensions of ``x``."""
    return x + _copies(bias, x)


def bias_of(weight: Weight, bias: Weight) -> Weight:
    """Return ``bias``, and note on the tape that it is added to the output of the latest use of ``weight``.

    K-FAC treats the two as one matrix.
    """
    if isinstance(bias, Watched) and isinstance(weight, Watched):
        own = [use.name for use in weight.tape.uses if use.path == weight.path]  # empty if the use was not recorded
        weight.tape.additions += [(bias.path, name) for name in own[-1:]]
    return bias


def scale(x: Float[Tensor, " batch *shape"], weight: Weight) -> Float[Tensor, " batch *shape"]:
    """``x * weight``, the weight aligned with the last dimensions of ``x``."""
    return x * _copies(weight, x)


def layer_norm(
    x: Float[Tensor, " batch *tokens features"], weight: Weight, bias: Weight | None = None, *, eps: float = 1e-5
) -> Float[Tensor, " batch *tokens features"]:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension."""
    if not isinstance(weight, Watched) and not isinstance(bias, Watched):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if bias is None:
        return F.layer_norm(x, x.shape[-1:], eps=eps) * _copies(weight, x)
    return layer_norm_of_each(x, bias=_copies(bias, x), weight=_copies(weight, x), eps=eps)


def rms_norm(
    x: Float[Tensor, " batch *tokens features"], weight: Weight, *, eps: float = 1e-6
) -> Float[Tensor, " batch *tokens features"]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, the mean in float32."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normal.to(x.dtype) * _copies(weight, x)


def conv1d(
    x: Float[Tensor, "batch channels length"],
    weight: Weight,
    bias: Weight | None = None,
    *,
    stride: Extent = 1,
    padding: Extent = 0,
    dilation: Extent = 1,
    groups: int = 1,
) -> Float[Tensor, "batch filters length2"]:
    """``F.conv1d``; weight of shape (filters, channels / groups, kernel)."""
    return _conv(CONV1D, x, weight, bias, stride, padding, dilation, groups)


def conv2d(
    x: Float[Tensor, "batch channels height width"],
    weight: Weight,
    bias: Weight | None = None,
    *,
    stride: Extent = 1,
    padding: Extent = 0,
    dilation: Extent = 1,
    groups: int = 1,
) -> Float[Tensor, "batch filters height2 width2"]:
    """``F.conv2d``; weight of shape (filters, channels / groups, kernel, kernel)."""
    return _conv(CONV2D, x, weight, bias, stride, padding, dilation, groups)


def conv3d(
    x: Float[Tensor, "batch channels depth height width"],
    weight: Weight,
    bias: Weight | None = None,
    *,
    stride: Extent = 1,
    padding: Extent = 0,
    dilation: Extent = 1,
    groups: int = 1,
) -> Float[Tensor, "batch filters depth2 height2 width2"]:
    """``F.conv3d``; weight of shape (filters, channels / groups, kernel, kernel, kernel)."""
    return _conv(CONV3D, x, weight, bias, stride, padding, dilation, groups)


def conv_transpose1d(
    x: Float[Tensor, "batch channels length"],
    weight: Weight,
    bias: Weight | None = None,
    *,
    stride: Extent = 1,
    padding: Extent = 0,
    output_padding: Extent = 0,
    dilation: Extent = 1,
    groups: int = 1,
) -> Float[Tensor, "batch filters length2"]:
    """``F.conv_transpose1d``; weight of shape (channels, filters / groups, kernel)."""
    return _conv(CONV_TRANSPOSE1D, x, weight, bias, stride, padding, dilation, groups, output_padding=output_padding)


def conv_transpose2d(
    x: Float[Tensor, "batch channels height width"],
    weight: Weight,
    bias: Weight | None = None,
    *,
    stride: Extent = 1,
    padding: Extent = 0,
    output_padding: Extent = 0,
    dilation: Extent = 1,
    groups: int = 1,
) -> Float[Tensor, "batch filters height2 width2"]:
    """``F.conv_transpose2d``; weight of shape (channels, filters / groups, kernel, kernel)."""
    return _conv(CONV_TRANSPOSE2D, x, weight, bias, stride, padding, dilation, groups, output_padding=output_padding)


def conv_transpose3d(
    x: Float[Tensor, "batch channels depth height width"],
    weight: Weight,
    bias: Weight | None = None,
    *,
    stride: Extent = 1,
    padding: Extent = 0,
    output_padding: Extent = 0,
    dilation: Extent = 1,
    groups: int = 1,
) -> Float[Tensor, "batch filters depth2 height2 width2"]:
    """``F.conv_transpose3d``; weight of shape (channels, filters / groups, kernel, kernel, kernel)."""
    return _conv(CONV_TRANSPOSE3D, x, weight, bias, stride, padding, dilation, groups, output_padding=output_padding)


def _copies(weight: Weight, x: Tensor) -> Tensor:
    """Return the weight shaped to broadcast with ``x``; if watched, one copy per sample."""
    if not isinstance(weight, Watched):
        return weight
    copies = weight.tape.expand(weight)
    gap = x.ndim - copies.ndim
    if gap < 0:
        raise FdpError(
            f"{weight.path} (shape {tuple(weight.shape)}): added to or multiplied with an input of {tuple(x.shape)}; "
            f"expected at most the {x.ndim - 1} dimensions after the samples. Reshape the parameter"
        )
    return copies.reshape(copies.shape[0], *[1] * gap, *copies.shape[1:]) if gap else copies


def _conv(
    rule: Rule,
    x: Tensor,
    weight: Weight,
    bias: Weight | None,
    stride: Extent,
    padding: Extent,
    dilation: Extent,
    groups: int,
    **more: Extent,
) -> Tensor:
    dims = len(weight.shape) - 2
    y = use(
        rule,
        x,
        weight,
        stride=_per_dim(stride, dims),
        padding=_per_dim(padding, dims),
        dilation=_per_dim(dilation, dims),
        groups=groups,
        **{name: _per_dim(extent, dims) for name, extent in more.items()},
    )
    return y if bias is None else add(y.movedim(1, -1), bias_of(weight, bias)).movedim(-1, 1)


def _per_dim(extent: Extent, dims: int) -> tuple[int, ...]:
    if isinstance(extent, int):
        return (extent,) * dims
    return tuple(extent) * dims if len(extent) == 1 else tuple(extent)


def _conv_record(x: Tensor, g: Tensor, shape: Sequence[int], *, groups: int, **options: Extent) -> Pair:
    """Record a convolution as a linear layer on patches: left = g, right = the patch of each position."""
    batch = x.shape[0]
    each = {name: _per_dim(extent, len(shape) - 2) for name, extent in options.items()}
    patches = _unfold(x, shape[2:], **each)  # (batch, channels * kernel, positions)
    right = patches.reshape(batch, groups, -1, patches.shape[-1]).transpose(-1, -2)
    left = _positions_first(g.reshape(batch, groups, g.shape[1] // groups, -1))
    return Pair(left, right, tuple(shape))


def _unfold(
    x: Tensor,
    kernel: Sequence[int],
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Float[Tensor, "batch patch positions"]:
    """Return the patch that every position sees, in any number of dimensions: a view of the input, copied once."""
    dims = len(kernel)
    x = F.pad(x, [side for pad in reversed(padding) for side in (pad, pad)])
    for i, size in enumerate(kernel):  # unfold keeps the dim of positions and appends that of the kernel
        x = x.unfold(2 + i, dilation[i] * (size - 1) + 1, stride[i])[..., :: dilation[i]]
    positions, within = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
    return x.permute(0, 1, *within, *positions).flatten(2 + dims).flatten(1, 1 + dims)


def _conv_transpose_record(
    x: Tensor, g: Tensor, shape: Sequence[int], *, groups: int, output_padding: Extent = 0, **options: Extent
) -> Pair:
    """Record the adjoint of a convolution: left = x, right = the patch of output gradients of each position."""
    batch, each = x.shape[0], {name: _per_dim(extent, len(shape) - 2) for name, extent in options.items()}
    patches = _unfold(g, shape[2:], **each)  # (batch, filters * kernel, positions)
    sizes = [
        (length + 2 * each["padding"][i] - each["dilation"][i] * (shape[2 + i] - 1) - 1) // each["stride"][i] + 1
        for i, length in enumerate(g.shape[2:])
    ]  # an output padded by a stride or more has more positions than x
    patches = patches.reshape(batch, groups, -1, *sizes)
    patches = patches[(slice(None), slice(None), slice(None), *(slice(0, length) for length in x.shape[2:]))]
    right = patches.flatten(3).transpose(-1, -2)
    left = _positions_first(x.reshape(batch, groups, x.shape[1] // groups, -1))
    return Pair(left, right, tuple(shape))


def _positions_first(x: Tensor) -> Tensor:
    """Return the transpose as a copy: a product with it is several times as fast for small images on some CPUs."""
    return x.transpose(-1, -2).contiguous()


CONV1D = Rule("conv1d", F.conv1d, _conv_record)
CONV2D = Rule("conv2d", F.conv2d, _conv_record)
CONV3D = Rule("conv3d", F.conv3d, _conv_record)
CONV_TRANSPOSE1D = Rule("conv_transpose1d", F.conv_transpose1d, _conv_transpose_record)
CONV_TRANSPOSE2D = Rule("conv_transpose2d", F.conv_transpose2d, _conv_transpose_record)
CONV_TRANSPOSE3D = Rule("conv_transpose3d", F.conv_transpose3d, _conv_transpose_record)
