"""GELU whose slope is found with its value, and stored in the place of the input.

gelu                x s,   s = sigmoid(z),   z = 2 sqrt(2 / pi) (x + 0.044715 x^3)        so 2 s - 1 = tanh(z / 2)
                    gelu'(x) = s + x z' s (1 - s)

>>> with differentiated_once():
...     h = gelu(x)                               # F.gelu(x, approximate="tanh"); as fdp.ops.gelu too
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from fdp_kernels import cpu_library
from fdp_kernels.cpu_library import dense
from fdp_kernels.processor import ON_ARM
from jaxtyping import Float
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from fdp.cpu.promise import is_promised, is_traced, refuse_a_second_derivative

LINEAR, CUBIC = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
"""``z = LINEAR x + CUBIC x^3``, in GELU."""
MOST, ELEMENTS_AT_ONCE = 30.0, 1 << (20 if ON_ARM else 17)
"""In GELU, inputs beyond the first have a slope of 0 or 1; the second is how many are computed at a time."""


def gelu(x: Float[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
    """Return GELU by the hyperbolic tangent, as in GPT-2.

    Inside :func:`differentiated_once`, plain float32 tensors on a CPU take :func:`gelu_and_slope`. For a million
    elements, forward and backward, that takes 4.9 ms where torch takes 8.4 (two cores of a Neoverse-N1), or 2.1 where
    torch takes 2.4 (two of a Xeon). The slope is off by at most 2e-6, torch's by 1e-6.
    """
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and not is_traced(x) and is_promised()
    if not plain or (not ON_ARM and cpu_library.library() is None):
        return F.gelu(x, approximate="tanh")
    if torch.is_grad_enabled():
        return _Gelu.apply(x)[0]  # pyright: ignore
    return F.gelu(x, approximate="tanh") if is_functorch_wrapped_tensor(x) else gelu_and_slope(x)[0]


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
        refuse_a_second_derivative("gelu", "torch.nn.functional.gelu(x, approximate='tanh')")
        return None if gradients[0] is None else ctx.saved_tensors[0] * gradients[0]
