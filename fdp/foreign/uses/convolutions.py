"""Convolutions of samples with parameters, and transposed convolutions.

conv(x, W)              a linear layer on patches          conv_transpose(x, W)    the adjoint of a convolution

>>> conv(2)(trace, x, weight, bias, padding="same")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp import ops
from fdp.foreign.uses.operands import Operand, no_rule_error, path_of, split_bias
from fdp.foreign.uses.tracking import ALWAYS_FIRST, SAMPLES, CallTrace, Tracked


def conv(dims: int) -> Callable[..., Tensor]:
    """Return the handler of ``F.conv1d``, ``2d`` or ``3d``."""
    op = (ops.conv1d, ops.conv2d, ops.conv3d)[dims - 1]
    plain_op = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]

    def convolution(
        trace: CallTrace,
        input: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        input = _batch_of_samples(trace, f"F.conv{dims}d", input, weight, bias)
        x, padding = _resolve_padding(input, weight.shape[2:], padding, dilation)
        options = {
            "stride": _as_tuple(stride),
            "padding": _as_tuple(padding),
            "dilation": _as_tuple(dilation),
            "groups": groups,
        }
        return convolve(x, weight, bias, op=op, plain_op=plain_op, options=options)

    return convolution


def convolve(
    x: Tensor,
    weight: Operand,
    bias: Operand | None,
    *,
    op: Callable[..., Tensor],
    plain_op: Callable[..., Tensor],
    options: Mapping[str, Any],
) -> Tensor:
    """Convolve samples by ``op``, which has a rule, if the weight is a leaf; otherwise with a copy for every sample."""
    by_leaf, own = split_bias(bias)
    if isinstance(weight, Tracked) and (weight.leaf is None or weight.transposed):

        def of_one(x1: Tensor, w1: Tensor) -> Tensor:
            return plain_op(x1.unsqueeze(0), w1, None, **options).squeeze(0)

        y = torch.func.vmap(of_one)(x, weight.copies())
        y = y if by_leaf is None else ops.add(y.movedim(1, -1), by_leaf).movedim(-1, 1)
    else:
        y = op(x, weight.leaf if isinstance(weight, Tracked) else weight, by_leaf, **options)
    return y if own is None else y + own.copies().reshape(*own.copies().shape, *[1] * (x.ndim - 2))


def _as_tuple(extent: Any) -> Any:
    return extent if isinstance(extent, int) else tuple(extent)


def _resolve_padding(x: Tensor, kernel: Sequence[int], padding: Any, dilation: Any) -> tuple[Tensor, Any]:
    """Convert named padding to numbers; padding that differs between the two sides is added to ``x`` itself."""
    if padding == "valid":
        return x, 0
    if padding != "same":
        return x, padding
    every = [dilation] * len(kernel) if isinstance(dilation, int) else list(dilation) * (len(kernel) // len(dilation))
    sides = [(step * (size - 1) // 2, step * (size - 1) - step * (size - 1) // 2) for step, size in zip(every, kernel)]
    if all(before == after for before, after in sides):
        return x, tuple(before for before, _ in sides)
    return F.pad(x, [side for pair in reversed(sides) for side in pair]), 0


def conv_transpose(dims: int) -> Callable[..., Tensor]:
    """Return the handler of ``F.conv_transpose1d``, ``2d`` or ``3d``."""
    op = (ops.conv_transpose1d, ops.conv_transpose2d, ops.conv_transpose3d)[dims - 1]
    plain_op = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]

    def convolution(
        trace: CallTrace,
        input: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        input = _batch_of_samples(trace, f"F.conv_transpose{dims}d", input, weight, bias)
        given = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
        options = {name: extent if isinstance(extent, int) else tuple(extent) for name, extent in given.items()}
        return convolve(input, weight, bias, op=op, plain_op=plain_op, options=options | {"groups": groups})

    return convolution


def _batch_of_samples(trace: CallTrace, name: str, input: Operand, weight: Operand, bias: Operand | None) -> Tensor:
    """Return the input of a convolution; refuse one that is not a batch of samples."""
    path = path_of(weight, bias, input)
    if isinstance(input, Tracked) or trace.find_layout(input, path=path, dims=ALWAYS_FIRST)[0] != SAMPLES:
        raise no_rule_error(f"{name} on an input that is not a batch of samples", (input, weight))
    return input
