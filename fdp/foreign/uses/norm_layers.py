"""Normalisation layers: normalise without parameters, then scale and shift each sample by its own copies.

y = (x - mean) / sqrt(var + eps) * w + b        over features (layer, rms), groups of channels, or each channel

>>> layer_norm(trace, x, (768,), weight, bias)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp.cpu.layer_norm import layer_norm as layer_norm_of_each
from fdp.foreign.uses.operands import Operand, no_rule_error
from fdp.foreign.uses.pointwise import apply_to_parameters, pointwise
from fdp.foreign.uses.tracking import CallTrace, Tracked


def layer_norm(
    trace: CallTrace,
    input: Operand,
    normalized_shape: Sequence[int],
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """``F.layer_norm`` and ``torch.layer_norm``."""
    own = isinstance(weight, Tracked) and isinstance(bias, Tracked) and len(normalized_shape) == 1
    if own and not isinstance(input, Tracked) and input not in trace.constants:
        return pointwise(trace, partial(layer_norm_of_each, eps=eps), (input, weight, bias), {})
    return _affine(trace, _normalise(trace, F.layer_norm, input, tuple(normalized_shape), eps=eps), weight, bias)


def rms_norm(
    trace: CallTrace,
    input: Operand,
    normalized_shape: Sequence[int],
    weight: Operand | None = None,
    eps: float | None = None,
) -> Tensor:
    """``F.rms_norm``."""
    return _affine(trace, _normalise(trace, F.rms_norm, input, tuple(normalized_shape), eps=eps), weight, None)


def group_norm(
    trace: CallTrace,
    input: Tensor,
    num_groups: int,
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """``F.group_norm`` and ``torch.group_norm``: channels in dim 1."""
    normal = _normalise(trace, F.group_norm, input, num_groups, eps=eps)
    return _affine(trace, normal, *(_over_channels(trace, p, len(input.shape)) for p in (weight, bias)))


def instance_norm(
    trace: CallTrace,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Operand | None = None,
    bias: Operand | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.instance_norm`` by the sample's own statistics, or by fixed ones."""
    if use_input_stats and running_mean is not None:
        raise no_rule_error(
            "F.instance_norm that keeps running statistics (put the module in eval())", (input, weight, bias)
        )
    options = {"use_input_stats": use_input_stats, "eps": eps}
    normal = F.instance_norm(input, running_mean, running_var, **options)
    return _affine(trace, normal, *(_over_channels(trace, p, len(input.shape)) for p in (weight, bias)))


def batch_norm(
    trace: CallTrace,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Operand | None = None,
    bias: Operand | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm`` by fixed statistics; those of the batch would mix its samples."""
    if training or running_mean is None:
        raise no_rule_error(
            "F.batch_norm by statistics of the batch (use nn.GroupNorm, or eval())", (input, weight, bias)
        )
    normal = F.batch_norm(input, running_mean, running_var, eps=eps)
    return _affine(trace, normal, *(_over_channels(trace, p, len(input.shape)) for p in (weight, bias)))


def prelu(trace: CallTrace, input: Tensor, weight: Tracked) -> Tensor:
    """``F.prelu``: one slope for the negative side, or one per channel."""
    slope = weight if weight.shape == (1,) else _over_channels(trace, weight, len(input.shape))
    assert slope is not None
    return input.clamp_min(0) + _apply(trace, torch.mul, input.clamp_max(0), slope)


def weight_norm(trace: CallTrace, v: Operand, g: Operand, dim: int = 0) -> Tensor:
    """``g v / |v|``, the norm over all dims but one: Salimans and Kingma 2016, arXiv 1602.07868."""
    return apply_to_parameters(trace, _weight_norm, (v, g, dim), {})


def _weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    others = [d for d in range(v.ndim) if d != dim % v.ndim]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))


def _normalise(trace: CallTrace, func: Any, x: Operand, *args: Any, eps: float | None) -> Operand:
    if isinstance(x, Tracked):
        return trace.resolve(apply_to_parameters(trace, func, (x, *args), {"eps": eps}))
    return func(x, *args, eps=eps)


def _affine(trace: CallTrace, normal: Operand, weight: Operand | None, bias: Operand | None) -> Tensor:
    if bias is None:
        return _apply(trace, torch.clone, normal) if weight is None else _apply(trace, torch.mul, normal, weight)
    return (
        _apply(trace, torch.add, normal, bias) if weight is None else _apply(trace, torch.addcmul, bias, normal, weight)
    )


def _apply(trace: CallTrace, func: Any, *operands: Operand) -> Tensor:
    held = any(isinstance(a, Tracked) for a in operands)
    return pointwise(trace, func, operands, {}) if held else func(*operands)


def _over_channels(trace: CallTrace, parameter: Operand | None, dims: int) -> Operand | None:
    """Reshape a parameter of channels so that it broadcasts over the dims after them."""
    if parameter is None:
        return None
    shape = (-1, *[1] * (dims - 2))
    if isinstance(parameter, Tracked):
        return trace.resolve(apply_to_parameters(trace, torch.reshape, (parameter, shape), {}))
    made = parameter.reshape(shape)
    trace.constants[made] = True
    return made
