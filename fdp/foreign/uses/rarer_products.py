"""Rarer products of samples with parameters: transposed convolutions, bilinear forms, bags of embeddings, cells.

    conv_transpose(x, W)    the adjoint of a convolution        bilinear(x, z, W)    y_o = x^T W_o z
    embedding_bag(ids, W)   sum, mean or maximum of W_id        baddbmm(c, x, W)     c + x_e W_e for every e
    lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell           linear layers of the input and of the state

Each is made of operations that have a rule.

    >>> lstm_cell(run, x, (h, c), weight_ih, weight_hh, bias_ih, bias_hh)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp import ops
from fdp.foreign.uses.pointwise import alone, pointwise
from fdp.foreign.uses.products import (
    Operand,
    convolve,
    embedding,
    experts,
    matmul,
    path_of,
    product,
    refusal,
    scaled,
)
from fdp.foreign.uses.tracking import ALWAYS_FIRST, FLATTENED, SAMPLES, Run, Tracked
from fdp.gradients.rules import Pair, Rule, rows
from fdp.types import FdpError


def conv_transpose(dims: int) -> Callable[..., Tensor]:
    """``F.conv_transpose1d``, ``2d`` or ``3d``."""
    op = (ops.conv_transpose1d, ops.conv_transpose2d, ops.conv_transpose3d)[dims - 1]
    plain_op = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]

    def convolution(
        run: Run,
        input: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        path = path_of(weight, bias, input)
        if isinstance(input, Tracked) or run.layout(input, path=path, dims=ALWAYS_FIRST)[0] != SAMPLES:
            raise refusal(f"F.conv_transpose{dims}d on other than a batch of samples", (input, weight))
        given = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
        options = {name: extent if isinstance(extent, int) else tuple(extent) for name, extent in given.items()}
        return convolve(input, weight, bias, op=op, plain_op=plain_op, options=options | {"groups": groups})

    return convolution


BILINEAR = Rule(
    "bilinear",
    lambda products, weight: F.linear(products, weight.flatten(1)),
    lambda products, g, shape: Pair(rows(g), rows(products), tuple(shape)),
)
"""A linear layer on all products of a feature of one input with one of the other."""


def bilinear(run: Run, input1: Operand, input2: Operand, weight: Operand, bias: Operand | None = None) -> Tensor:
    """``F.bilinear``: inputs (..., in1) and (..., in2), weight (outputs, in1, in2)."""
    if not isinstance(input1, Tensor) or not isinstance(input2, Tensor):
        raise refusal("F.bilinear on inputs that parameters went into", (input1, input2, weight))
    products = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
    if isinstance(weight, Tracked) and weight.leaf is not None and not weight.turned:
        first, back = run.samples(products, path=weight.path)
        y = back(ops.use(BILINEAR, first, weight.leaf))
        return y if bias is None else _sum(run, y, bias)
    made = alone(run, torch.flatten, (weight, 1), {}) if isinstance(weight, Tracked) else weight.flatten(1)
    return product(run, products, run.known(made), bias, turned=False)


def embedding_bag(
    run: Run,
    input: Operand,
    weight: Operand,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Operand | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``F.embedding_bag`` of (bags, ids of a bag)."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise refusal("F.embedding_bag with max_norm, scale_grad_by_freq or sparse", (input, weight))
    if not isinstance(input, Tensor) or input.ndim != 2 or isinstance(per_sample_weights, Tracked):
        raise refusal("F.embedding_bag by offsets, or with weights that are parameters", (input, weight))
    found = embedding(run, input, weight)
    if isinstance(run.known(found), Tracked):
        raise refusal("F.embedding_bag of ids that hold no samples", (input, weight))
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    there = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        there = input != padding_idx % weight.shape[0]
    if mode == "max":
        most = found.masked_fill(~there.unsqueeze(-1), -torch.inf).max(1).values
        return torch.where(there.any(1, keepdim=True), most, torch.zeros_like(most))
    total = found.masked_fill(~there.unsqueeze(-1), 0.0).sum(1)
    return total / there.sum(1, keepdim=True).clamp_min(1) if mode == "mean" else total


def baddbmm(run: Run, input: Operand, batch1: Operand, batch2: Operand, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta input + alpha batch1 @ batch2``: experts with biases, or scores and what is added to them."""
    input, batch1 = scaled(run, input, beta), scaled(run, batch1, alpha)
    if isinstance(batch1, Tensor) and isinstance(batch2, Tracked):
        return experts(run, batch1, batch2, input)
    if isinstance(batch1, Tracked):
        return _sum(run, matmul(run, batch1, batch2), input)
    assert isinstance(batch2, Tensor)
    return pointwise(run, torch.add, (torch.bmm(batch1, batch2), input), {})


def pad(run: Run, input: Operand, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
    """``F.pad`` of a parameter."""
    path = path_of(input)
    if run.tape is not None and run.tape.attached:
        raise FdpError(
            f"{path}: used by F.pad, which torch.compile does not show; write torch.cat with zeros, or compile nothing"
        )
    return alone(run, F.pad, (input, tuple(pad), mode, value), {})


def lstm_cell(
    run: Run,
    input: Operand,
    hx: Any,
    w_ih: Operand,
    w_hh: Operand,
    b_ih: Operand | None = None,
    b_hh: Operand | None = None,
) -> tuple[Tensor, Tensor]:
    """``torch.lstm_cell``: the new state and the new memory."""
    h, c = hx
    i, f, g, o = _gates(run, input, h, w_ih, w_hh, b_ih, b_hh, "lstm_cell").chunk(4, -1)
    memory = f.sigmoid() * _samples(run, c, w_ih) + i.sigmoid() * g.tanh()
    return o.sigmoid() * memory.tanh(), memory


def gru_cell(
    run: Run,
    input: Operand,
    hx: Operand,
    w_ih: Operand,
    w_hh: Operand,
    b_ih: Operand | None = None,
    b_hh: Operand | None = None,
) -> Tensor:
    """``torch.gru_cell``."""
    of_x = _tensor(run, product(run, input, w_ih, b_ih, turned=False), w_ih)
    of_h = _tensor(run, product(run, hx, w_hh, b_hh, turned=False), w_hh)
    (r, z, n), (hr, hz, hn) = of_x.chunk(3, -1), of_h.chunk(3, -1)
    update, new = (z + hz).sigmoid(), (n + (r + hr).sigmoid() * hn).tanh()
    return new + update * (_samples(run, hx, w_hh) - new)


def rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """``torch.rnn_tanh_cell`` or ``torch.rnn_relu_cell``."""

    def cell(
        run: Run,
        input: Operand,
        hx: Operand,
        w_ih: Operand,
        w_hh: Operand,
        b_ih: Operand | None = None,
        b_hh: Operand | None = None,
    ) -> Tensor:
        return activation(_gates(run, input, hx, w_ih, w_hh, b_ih, b_hh, "rnn_cell"))

    return cell


def aten_embedding(
    run: Run,
    weight: Operand,
    indices: Operand,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``torch.ops.aten.embedding``: the table first, and -1 for no padding."""
    padding = None if padding_idx < 0 else padding_idx
    return embedding(run, indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _gates(
    run: Run,
    x: Operand,
    h: Operand,
    w_ih: Operand,
    w_hh: Operand,
    b_ih: Operand | None,
    b_hh: Operand | None,
    name: str,
) -> Tensor:
    one, other = product(run, x, w_ih, b_ih, turned=False), product(run, h, w_hh, b_hh, turned=False)
    return _tensor(run, _sum(run, one, run.known(other)), w_ih, name)


def _sum(run: Run, y: Tensor, more: Operand) -> Tensor:
    known = run.known(y)
    if isinstance(known, Tracked) or isinstance(more, Tracked):
        return pointwise(run, torch.add, (known, more), {})
    return y + more


def _tensor(run: Run, y: Tensor, weight: Operand, name: str = "a recurrent cell") -> Tensor:
    """A result that holds samples."""
    if isinstance(run.known(y), Tracked):
        raise refusal(f"{name} on an input without samples", (weight,))
    return y


def _samples(run: Run, state: Operand, weight: Operand) -> Tensor:
    """A state with samples in it: one per sample, where it is made of parameters or a constant for all."""
    if isinstance(state, Tracked):
        return state.copies()
    layout, _ = run.layout(state, path=path_of(weight))
    if layout == FLATTENED:
        raise refusal("a recurrent cell on a state of other than samples", (state, weight))
    return state
