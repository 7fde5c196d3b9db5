"""Operations that a CPU computes faster in another way than torch's own, with the same numbers up to rounding.

    causal_attention    softmax(q k^T / sqrt(features)) v,   some queries at a time, each with the keys up to its last

    sum_over_tokens     sum_t x_bt,   as a product with ones

    gelu                x s,   s = sigmoid(z),   z = 2 sqrt(2 / pi) (x + 0.044715 x^3)        so 2 s - 1 = tanh(z / 2)
                        gelu'(x) = s + x z' s (1 - s),   found with gelu(x) and stored in the place of x

On other devices, and where a graph is traced or samples are vectorised, they are torch's operations. So are ``gelu``
and the backward of ``causal_attention`` unless their caller says that nothing will be differentiated twice, and a sum
of narrow rows or on another processor than ARM.

    >>> y = causal_attention(q, k, v)                 # by fdp.ops.attention
    >>> with differentiated_once():
    ...     h = gelu(x)                               # F.gelu(x, approximate="tanh"); as fdp.ops.gelu too
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from fdp_kernels import cpu_library
from fdp_kernels.cpu_library import dense
from fdp_kernels.processor import ON_ARM
from jaxtyping import Float
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn.attention import SDPBackend

from fdp.types import FdpError

MAX_TOKENS_AT_ONCE = 64 if ON_ARM else 128
"""With more tokens than this, causal attention takes some queries at a time."""
FEW_TOKENS = 128
"""Up to this many tokens, fewer queries at a time are faster on ARM."""
WIDE = 256
"""Rows of at least so many elements are summed by a product on ARM."""
LINEAR, CUBIC = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
"""``z = LINEAR x + CUBIC x^3``, in GELU."""
MOST, ELEMENTS_AT_ONCE = 30.0, 1 << (20 if ON_ARM else 17)
"""In GELU, inputs beyond the first have a slope of 0 or 1; the second is how many are computed at a time."""
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
    if q.device.type != "cpu" or tokens <= MAX_TOKENS_AT_ONCE or tokens != k.shape[2] or _is_traced(q):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if torch.is_grad_enabled() and _promised.depth == _depth() and _takes_flash(q, k, v):
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
        _refuse_a_second_derivative("attention", "torch.nn.functional.scaled_dot_product_attention")
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


def sum_over_tokens(
    x: Float[Tensor, "batch *tokens features"], dims: tuple[int, ...]
) -> Float[Tensor, "batch features"]:
    """Return ``x.sum(dims)``, some of the dimensions between the first and the last.

    On ARM, wide rows of plain float32 tensors are multiplied by ones: 16 x 128 x 512 elements take 0.5 ms where torch's
    sum takes 1.2, 16 x 512 x 512 take 1.5 where it takes 4.5 (two cores of a Neoverse-N1, nothing in its caches). Such
    a sum is rounded as the product that is the weight's gradient: at 8192 tokens by 4e-6 of it, torch's by 1e-7.
    """
    of_wide_rows = x.ndim == 3 and dims == (1,) and x.shape[2] >= WIDE
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and not _is_traced(x)
    if not (ON_ARM and of_wide_rows and plain) or torch.is_autocast_enabled("cpu"):
        return x.sum(dims)
    ones = torch.ones((), dtype=x.dtype, device=x.device).expand(len(x), 1, x.shape[1])
    return torch.bmm(ones.contiguous(), x).squeeze(1)


def gelu(x: Float[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
    """Return GELU by the hyperbolic tangent, as in GPT-2.

    Inside :func:`differentiated_once`, plain float32 tensors on a CPU take :func:`gelu_and_slope`. For a million
    elements, forward and backward, that takes 4.9 ms where torch takes 8.4 (two cores of a Neoverse-N1), or 2.1 where
    torch takes 2.4 (two of a Xeon). The slope is off by at most 2e-6, torch's by 1e-6.
    """
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and not _is_traced(x) and _promised.depth == _depth()
    if not plain or (not ON_ARM and cpu_library.library() is None):
        return F.gelu(x, approximate="tanh")
    if torch.is_grad_enabled():
        return _Gelu.apply(x)[0]  # pyright: ignore
    return F.gelu(x, approximate="tanh") if is_functorch_wrapped_tensor(x) else gelu_and_slope(x)[0]


def differentiated_once() -> AbstractContextManager[None]:
    """Promise that what is computed inside is differentiated at most once, by autograd or the transform around it.

    Nothing changes while a graph is traced.
    """
    return nullcontext() if torch.compiler.is_compiling() else _promise()


@contextmanager
def _promise() -> Iterator[None]:
    before, _promised.depth = _promised.depth, _depth() if _depth() <= 1 else None
    try:
        yield
    finally:
        _promised.depth = before


def gelu_and_slope(x: Float[Tensor, " *shape"]) -> tuple[Float[Tensor, " *shape"], Float[Tensor, " *shape"]]:
    """Return ``gelu(x) = x s`` and ``gelu'(x) = s + x z' s (1 - s)``, some elements at a time.

    Beyond ``MOST`` the slope is 0 or 1, and ``z'`` would overflow.
    """
    y, slope = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if (loops := cpu_library.library()) is not None:
        loops.gelu_and_slope(dense(x), y, slope, x.numel(), LINEAR, CUBIC, MOST)
        return y, slope
    for some, out, rise in zip(*(leaf.view(-1).split(ELEMENTS_AT_ONCE) for leaf in (x.contiguous(), y, slope))):
        near = some.clamp(-MOST, MOST)
        torch.square(near, out=rise).mul_(CUBIC).add_(LINEAR)
        s = torch.mul(near, rise).sigmoid_()
        torch.mul(some, s, out=out)
        rise.mul_(3).sub_(2 * LINEAR).mul_(near)  # x z'
        torch.ops.aten.sigmoid_backward.grad_input(rise, s, grad_input=rise).add_(s)
    return y, slope


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return gelu_and_slope(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        _refuse_a_second_derivative("gelu", "torch.nn.functional.gelu(x, approximate='tanh')")
        return None if gradients[0] is None else ctx.saved_tensors[0] * gradients[0]


def _refuse_a_second_derivative(operation: str, instead: str) -> None:
    if torch.is_grad_enabled():
        raise FdpError(
            f"{operation}: expected to be differentiated once, as promised by differentiated_once, got a derivative "
            f"that is to be differentiated again; use {instead} there"
        )


class _Promise(local):
    depth: int | None = None
    """The number of transforms of torch.func around a computation that is differentiated once; None: no promise."""


_promised = _Promise()


def _transforms() -> list[Any]:
    """Return the transforms of torch.func that are active."""
    return get_interpreter_stack() or []


def _depth() -> int:
    return len(_transforms())


def _is_traced(x: Tensor) -> bool:
    """Return True if the compiler, a mode, a kind of tensor or torch.func records or changes operations on ``x``.

    ``grad`` and ``vjp`` of torch.func do not count.
    """
    if torch.compiler.is_compiling():
        return True  # first: the compiler cannot ask for the rest
    if torch.jit.is_tracing() or forward_ad._current_level >= 0:
        return True
    if torch._C._len_torch_dispatch_stack() or any(one.key() != TransformType.Grad for one in _transforms()):
        return True
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return type(x) not in (Tensor, Parameter)
