"""Products of samples with parameters: linear layers with either weight layout, experts, einsum.

    F.linear(x, W, b)    x W^T + b        addmm, mm, matmul, @    x W + b
    einsum(s, x, W)      any of them      bmm                     x_e W_e for every expert e

Each is an operation of ``fdp.ops`` with its rule. A weight that depends on parameters (normalised, masked, a slice) is
multiplied with each sample as that sample's own copy.

    >>> linear(trace, x, weight, bias)         # weight, bias: Tracked or plain
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp import ops
from fdp.foreign.uses.einsum import EINSUM, parse
from fdp.foreign.uses.operands import Operand, no_rule_error, path_of, split_bias
from fdp.foreign.uses.pointwise import apply_to_parameters, pointwise
from fdp.foreign.uses.tracking import ALWAYS_FIRST, FLATTENED, SAMPLES, CallTrace, Tracked
from fdp.gradients.rules import Pair, Rule, rows


def _rows_record(x: Tensor, g: Tensor, shape: Sequence[int], *, start: int, stop: int) -> Pair:
    return Pair(F.pad(rows(g), (start, shape[0] - stop)), rows(x), tuple(shape))


LINEAR_ROWS = Rule("linear rows", lambda x, weight, *, start, stop: F.linear(x, weight[start:stop]), _rows_record)
"""``x W[start:stop]^T``: one part of a packed projection."""


def linear(trace: CallTrace, input: Operand, weight: Operand, bias: Operand | None = None) -> Tensor:
    """``F.linear``."""
    return product(trace, input, weight, bias, transposed=False)


def addmm(
    trace: CallTrace, input: Operand, mat1: Operand, mat2: Operand, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """``beta input + alpha mat1 mat2``."""
    input, mat1 = scale_operand(trace, input, beta), scale_operand(trace, mat1, alpha)
    if len(input.shape) == 1:
        return product(trace, mat1, mat2, input, transposed=True)
    y = product(trace, mat1, mat2, None, transposed=True)
    if isinstance(trace.resolve(y), Tracked) or isinstance(input, Tracked):
        return pointwise(trace, torch.add, (trace.resolve(y), input), {})
    return y + input


def scale_operand(trace: CallTrace, x: Operand, factor: float) -> Operand:
    """``factor x``."""
    if factor == 1:
        return x
    if isinstance(x, Tracked):
        return trace.resolve(apply_to_parameters(trace, torch.mul, (x, factor), {}))
    made = x * factor
    if x in trace.constants:
        trace.constants[made] = True
    return made


def matmul(trace: CallTrace, a: Operand, b: Operand) -> Tensor:
    """``a @ b``, where either operand may depend on parameters."""
    if isinstance(a, Tracked) and (isinstance(b, Tracked) or trace.is_constant(b)):
        return apply_to_parameters(trace, torch.matmul, (a, b), {})
    if isinstance(b, Tracked):
        if len(b.shape) == 1:
            y = trace.resolve(pointwise(trace, torch.mul, (a, b), {}))
            return apply_to_parameters(trace, torch.sum, (y, -1), {}) if isinstance(y, Tracked) else y.sum(-1)
        if len(b.shape) == 2 and len(a.shape) >= 2:
            return product(trace, a, b, None, transposed=True)
        if len(b.shape) == 3 and isinstance(a, Tensor) and len(a.shape) in (3, 4):
            return expert_products(trace, a, b)
    elif (
        isinstance(a, Tracked)
        and len(a.shape) == 2
        and b.ndim >= 3
        and trace.find_layout(b, path=a.path) == (SAMPLES, 0)
    ):
        return product(trace, b.transpose(-1, -2), a, None, transposed=False).transpose(-1, -2)
    raise no_rule_error("matmul", (a, b))


def reversed_matmul(trace: CallTrace, a: Operand, b: Operand) -> Tensor:
    """``b @ a``."""
    return matmul(trace, b, a)


def product(trace: CallTrace, x: Operand, weight: Operand, bias: Operand | None, *, transposed: bool) -> Tensor:
    """``x W^T + b`` or, if ``transposed``, ``x W + b``."""
    path = path_of(weight, bias, x)
    first, back = trace.with_samples_first(x, path=path)
    by_leaf, own = split_bias(bias)
    if not isinstance(weight, Tracked):
        y = (ops.matmul if transposed else ops.linear)(first, weight, by_leaf)
    elif weight.leaf is not None:
        y = (ops.matmul if transposed != weight.transposed else ops.linear)(first, weight.leaf, by_leaf)
    else:
        copies = weight.copies() if transposed else weight.copies().transpose(1, 2)
        y = (first.reshape(first.shape[0], -1, first.shape[-1]) @ copies).reshape(*first.shape[:-1], copies.shape[-1])
        y = y if by_leaf is None else ops.add(y, by_leaf)
    y = y if own is None else y + own.copies().reshape(y.shape[0], *[1] * (y.ndim - 2), -1)
    return back(y)


def expert_products(trace: CallTrace, x: Tensor, weight: Tracked, added: Operand | None = None) -> Tensor:
    """``x_e W_e`` for every expert e, with W (experts, inputs, outputs).

    ``x`` is (experts, samples * tokens, inputs) or (samples, experts, tokens, inputs). ``added`` (experts, 1, outputs)
    is added to every expert's result.
    """
    path, size = weight.path, trace.batch_size
    if x.ndim == 4 and trace.find_layout(x, path=path, dims=ALWAYS_FIRST)[0] == SAMPLES:
        first = x.expand(-1, weight.shape[0], -1, -1)
        return _add_to_experts(trace, _multiply_experts(first, weight), added, weight)
    if x.ndim == 4 or x.shape[1] % size:
        raise no_rule_error("a product over experts whose number of tokens differs between samples", (x, weight))
    trace.note_layout(path, FLATTENED)
    parts = (size, -1) if trace.batch_first else (-1, size)
    sample = 1 if trace.batch_first else 2
    y = _add_to_experts(trace, _multiply_experts(x.unflatten(1, parts).movedim(sample, 0), weight), added, weight)
    return y.movedim(0, sample).flatten(1, 2)


def _add_to_experts(trace: CallTrace, y: Tensor, added: Operand | None, weight: Tracked) -> Tensor:
    """Add what is the same for all tokens of an expert to a result (samples, experts, tokens, outputs)."""
    if added is None:
        return y
    experts, outputs = y.shape[1], y.shape[3]
    fits = len(added.shape) <= 3 and (1, 1, 1, *added.shape)[-3] in (1, experts) and (1, *added.shape)[-2:-1] == (1,)
    if not fits or (isinstance(added, Tensor) and not trace.is_constant(added)):
        raise no_rule_error("torch.baddbmm that adds something other than one row per expert", (added, weight))
    if isinstance(added, Tracked):
        copies = added.copies()
        return y + copies.reshape(len(copies), *[1] * (3 - len(added.shape)), *added.shape)
    return y + added.expand(experts, 1, outputs)


def einsum(trace: CallTrace, equation: Any, *operands: Any) -> Tensor:
    """``torch.einsum`` of one tensor with samples and one parameter."""
    given = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list) else list(operands)
    if not isinstance(equation, str) or len(given) != 2:
        raise no_rule_error("torch.einsum of a number of operands other than two", tuple(given))
    if all([isinstance(operand, Tracked) or trace.is_constant(operand) for operand in given]):
        return apply_to_parameters(trace, torch.einsum, (equation, *given), {})
    swapped = isinstance(given[0], Tracked)
    x, weight = reversed(given) if swapped else given
    if not isinstance(weight, Tracked) or not isinstance(x, Tensor):
        raise no_rule_error(f"torch.einsum({equation!r})", tuple(given))
    layout, dim = trace.find_layout(x, path=weight.path, dims=ALWAYS_FIRST)
    letters = parse(equation, len(x.shape), len(weight.shape), swapped=swapped, flattened=layout == FLATTENED)
    if letters is None or weight.leaf is None or weight.transposed:
        raise no_rule_error(f"torch.einsum({equation!r})", tuple(given))
    y = ops.use(
        EINSUM, trace.samples_first(x, layout, dim), weight.leaf, x_of=letters.x, w_of=letters.w, y_of=letters.y
    )
    return (y.flatten(0, 1) if layout == FLATTENED else y).movedim(0, letters.place)


def _multiply_experts(x: Tensor, weight: Tracked) -> Tensor:
    if weight.leaf is not None and not weight.transposed:
        return ops.use(ops.EXPERTS, x, weight.leaf)
    return x @ weight.copies()
