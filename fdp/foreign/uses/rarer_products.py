"""Less common products of samples with parameters: bilinear forms, baddbmm, recurrent cells.

    bilinear(x, z, W)    y_o = x^T W_o z             baddbmm(c, x, W)     c + x_e W_e for every e
    lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell           linear layers of the input and of the state

Each is composed of operations that have a rule.

    >>> lstm_cell(trace, x, (h, c), weight_ih, weight_hh, bias_ih, bias_hh)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp import ops
from fdp.foreign.uses.operands import Operand, no_rule_error, path_of
from fdp.foreign.uses.pointwise import apply_to_parameters, pointwise
from fdp.foreign.uses.products import expert_products, matmul, product, scale_operand
from fdp.foreign.uses.tracking import FLATTENED, CallTrace, Tracked
from fdp.gradients.rules import Pair, Rule, rows
from fdp.types import FdpError

BILINEAR = Rule(
    "bilinear",
    lambda products, weight: F.linear(products, weight.flatten(1)),
    lambda products, g, shape: Pair(rows(g), rows(products), tuple(shape)),
)
"""A linear layer on all products of a feature of one input with one of the other."""


def bilinear(
    trace: CallTrace, input1: Operand, input2: Operand, weight: Operand, bias: Operand | None = None
) -> Tensor:
    """``F.bilinear``: inputs (..., in1) and (..., in2), weight (outputs, in1, in2)."""
    if not isinstance(input1, Tensor) or not isinstance(input2, Tensor):
        raise no_rule_error("F.bilinear on inputs that depend on parameters", (input1, input2, weight))
    products = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
    if isinstance(weight, Tracked) and weight.leaf is not None and not weight.transposed:
        first, back = trace.with_samples_first(products, path=weight.path)
        y = back(ops.use(BILINEAR, first, weight.leaf))
        return y if bias is None else _add(trace, y, bias)
    made = (
        apply_to_parameters(trace, torch.flatten, (weight, 1), {}) if isinstance(weight, Tracked) else weight.flatten(1)
    )
    return product(trace, products, trace.resolve(made), bias, transposed=False)


def baddbmm(
    trace: CallTrace, input: Operand, batch1: Operand, batch2: Operand, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """``beta input + alpha batch1 @ batch2``: experts with biases, or scores with something added."""
    input, batch1 = scale_operand(trace, input, beta), scale_operand(trace, batch1, alpha)
    if isinstance(batch1, Tensor) and isinstance(batch2, Tracked):
        return expert_products(trace, batch1, batch2, input)
    if isinstance(batch1, Tracked):
        return _add(trace, matmul(trace, batch1, batch2), input)
    assert isinstance(batch2, Tensor)
    return pointwise(trace, torch.add, (torch.bmm(batch1, batch2), input), {})


def pad(trace: CallTrace, input: Operand, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
    """``F.pad`` of a parameter."""
    path = path_of(input)
    if trace.tape is not None and trace.tape.compiled:
        raise FdpError(
            f"{path}: expected no F.pad of a parameter, which torch.compile does not show, got one; write torch.cat "
            f"with zeros, or do not compile"
        )
    return apply_to_parameters(trace, F.pad, (input, tuple(pad), mode, value), {})


def lstm_cell(
    trace: CallTrace,
    input: Operand,
    hx: Any,
    w_ih: Operand,
    w_hh: Operand,
    b_ih: Operand | None = None,
    b_hh: Operand | None = None,
) -> tuple[Tensor, Tensor]:
    """``torch.lstm_cell``: returns the new state and the new memory."""
    h, c = hx
    i, f, g, o = _gates(trace, input, h, w_ih, w_hh, b_ih, b_hh, "lstm_cell").chunk(4, -1)
    memory = f.sigmoid() * _state_per_sample(trace, c, w_ih) + i.sigmoid() * g.tanh()
    return o.sigmoid() * memory.tanh(), memory


def gru_cell(
    trace: CallTrace,
    input: Operand,
    hx: Operand,
    w_ih: Operand,
    w_hh: Operand,
    b_ih: Operand | None = None,
    b_hh: Operand | None = None,
) -> Tensor:
    """``torch.gru_cell``."""
    of_x = _check_samples(trace, product(trace, input, w_ih, b_ih, transposed=False), w_ih)
    of_h = _check_samples(trace, product(trace, hx, w_hh, b_hh, transposed=False), w_hh)
    (r, z, n), (hr, hz, hn) = of_x.chunk(3, -1), of_h.chunk(3, -1)
    update, new = (z + hz).sigmoid(), (n + (r + hr).sigmoid() * hn).tanh()
    return new + update * (_state_per_sample(trace, hx, w_hh) - new)


def rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return the handler of ``torch.rnn_tanh_cell`` or ``torch.rnn_relu_cell``."""

    def cell(
        trace: CallTrace,
        input: Operand,
        hx: Operand,
        w_ih: Operand,
        w_hh: Operand,
        b_ih: Operand | None = None,
        b_hh: Operand | None = None,
    ) -> Tensor:
        return activation(_gates(trace, input, hx, w_ih, w_hh, b_ih, b_hh, "rnn_cell"))

    return cell


def _gates(
    trace: CallTrace,
    x: Operand,
    h: Operand,
    w_ih: Operand,
    w_hh: Operand,
    b_ih: Operand | None,
    b_hh: Operand | None,
    name: str,
) -> Tensor:
    one, other = product(trace, x, w_ih, b_ih, transposed=False), product(trace, h, w_hh, b_hh, transposed=False)
    return _check_samples(trace, _add(trace, one, trace.resolve(other)), w_ih, name)


def _add(trace: CallTrace, y: Tensor, more: Operand) -> Tensor:
    known = trace.resolve(y)
    if isinstance(known, Tracked) or isinstance(more, Tracked):
        return pointwise(trace, torch.add, (known, more), {})
    return y + more


def _check_samples(trace: CallTrace, y: Tensor, weight: Operand, name: str = "a recurrent cell") -> Tensor:
    """Refuse a result without samples."""
    if isinstance(trace.resolve(y), Tracked):
        raise no_rule_error(f"{name} on an input without samples", (weight,))
    return y


def _state_per_sample(trace: CallTrace, state: Operand, weight: Operand) -> Tensor:
    """Return a state with samples: one copy per sample if it depends on parameters or is a constant for all."""
    if isinstance(state, Tracked):
        return state.copies()
    layout, _ = trace.find_layout(state, path=path_of(weight))
    if layout == FLATTENED:
        raise no_rule_error("a recurrent cell on a state that does not hold one row per sample", (state, weight))
    return state


def masked_fill(trace: CallTrace, input: Operand, mask: Operand, value: Any) -> Tensor:
    """``torch.masked_fill``, where any argument may depend on parameters."""
    return pointwise(trace, torch.where, (mask, value, input), {})


def inner(trace: CallTrace, input: Operand, other: Operand) -> Tensor:
    """``torch.inner`` with a matrix: a linear layer."""
    if isinstance(other, Tracked) and len(other.shape) == 2 and isinstance(input, Tensor):
        return product(trace, input, other, None, transposed=False)
    raise no_rule_error("torch.inner", (input, other))
