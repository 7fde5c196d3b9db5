"""Operations that a CPU computes faster in another way than torch's own, with the same numbers up to rounding.

    causal_attention    softmax(q k^T / sqrt(features)) v,   some queries at a time, each with the keys up to its last

    gelu                x s,   s = sigmoid(z),   z = 2 sqrt(2 / pi) (x + 0.044715 x^3)        so 2 s - 1 = tanh(z / 2)
                        gelu'(x) = s + x z' s (1 - s)

On other devices, and where a graph is traced or samples are vectorised, they are torch's operations.

    >>> y = causal_attention(q, k, v)                 # by fdp.ops.attention
    >>> h = gelu(x)                                   # F.gelu(x, approximate="tanh"); as fdp.ops.gelu too
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from fdp_kernels.processor import ON_ARM
from jaxtyping import Float
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor

MAX_TOKENS_AT_ONCE = 64 if ON_ARM else 128
"""With more tokens than this, causal attention takes some queries at a time."""
FEW_TOKENS = 128
"""Up to this many tokens, fewer queries at a time are faster."""
LINEAR, CUBIC = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
"""Of GELU: ``z = LINEAR x + CUBIC x^3``."""
MOST, ELEMENTS_AT_ONCE = 30.0, 1 << 20
"""Inputs beyond the first have a slope of 0 or 1; slopes of the second are computed at a time, in little memory."""


def causal_attention(
    q: Float[Tensor, "batch heads tokens features"],
    k: Float[Tensor, "batch heads tokens features"],
    v: Float[Tensor, "batch heads tokens features"],
) -> Float[Tensor, "batch heads tokens features"]:
    """``softmax(q k^T / sqrt(features)) v`` with the keys up to a token's own.

    torch's kernel for CPUs computes most of what the mask hides: at 512 tokens this takes a third less time.
    """
    tokens = q.shape[2]
    if q.device.type != "cpu" or tokens <= MAX_TOKENS_AT_ONCE or tokens != k.shape[2] or _is_traced(q):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    parts, at_once = [], queries_at_once(tokens)
    for start in range(0, tokens, at_once):
        end = min(start + at_once, tokens)
        seen = torch.ones(end - start, end, dtype=torch.bool).tril(start)
        parts.append(F.scaled_dot_product_attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end], attn_mask=seen))
    return torch.cat(parts, dim=2)


def queries_at_once(tokens: int) -> int:
    """Return how many queries are fastest: 128 tokens take 13.9 ms with 32 and 14.8 with 64, 512 take 154 and 139.

    (Forward and backward of 16 samples and 4 heads on two cores of a Neoverse-N1.)
    """
    return 32 if tokens <= FEW_TOKENS else 64


def gelu(x: Float[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
    """GELU by the hyperbolic tangent, as in GPT-2; on ARM its derivative is :func:`gelu_slope`.

    For a million elements that takes 4.2 ms, torch's derivative 6.6, on two cores of a Neoverse-N1. It is off by at
    most 2e-6, torch's by 1e-6.
    """
    if ON_ARM and x.device.type == "cpu" and x.dtype == torch.float32 and not _is_traced(x):
        return _Gelu.apply(x)  # pyright: ignore[reportReturnType]
    return F.gelu(x, approximate="tanh")


def gelu_slope(x: Float[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
    """Return ``gelu'(x) = s + x z' s (1 - s)``; beyond ``MOST`` that is 0 or 1, and ``z'`` would overflow."""
    if not torch.is_grad_enabled():
        out = torch.empty(x.shape, dtype=x.dtype)
        for some, slope in zip(x.reshape(-1).split(ELEMENTS_AT_ONCE), out.view(-1).split(ELEMENTS_AT_ONCE)):
            _write_slope(some, slope)
        return out
    x = x.clamp(-MOST, MOST)
    s = torch.sigmoid(x * (LINEAR + CUBIC * x.square()))
    return s + x * (LINEAR + 3 * CUBIC * x.square()) * s * (1 - s)


def _write_slope(x: Tensor, out: Tensor) -> None:
    """Write :func:`gelu_slope` into ``out``, in as few passes over memory as possible."""
    x = x.clamp(-MOST, MOST)
    torch.square(x, out=out).mul_(CUBIC).add_(LINEAR)
    s = torch.mul(x, out).sigmoid_()
    out.mul_(3).sub_(2 * LINEAR).mul_(x)  # x z'
    torch.ops.aten.sigmoid_backward.grad_input(out, s, grad_input=out).add_(s)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        ((x,), (g,)) = ctx.saved_tensors, gradients
        return gelu_slope(x) * g if torch.is_grad_enabled() else gelu_slope(x).mul_(g)


def _is_traced(x: Tensor) -> bool:
    """Return True if an operation on ``x`` is recorded, or transformed by torch.func beyond ``grad`` and ``vjp``."""
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return True  # first: the compiler cannot ask for transforms
    return any(one.key() != TransformType.Grad for one in get_interpreter_stack() or ())
