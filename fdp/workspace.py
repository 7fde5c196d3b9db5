"""What CUDA kernels hold in passing and no operation returns: the memory that a trace of outputs would miss.

vector_norm, sum, mean    x.to(dtype), whole, when they reduce in another dtype (but for half to float32)
attention, backward       the gradient of the queries in float32, while it is added up
normal noise              the rounds of ChaCha20 in int64, unless a CUDA kernel draws it

>>> workspace(torch.ops.aten.linalg_vector_norm.default, (x, 2, [1], False), {"dtype": torch.float64}, measure=...)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from fdp_kernels import chacha20
from torch import Tensor

_aten = torch.ops.aten
_REDUCTIONS = {
    _aten.linalg_vector_norm.default,
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.mean.default,
    _aten.mean.dim,
}
_HALF = (torch.bfloat16, torch.float16)
_DRAWS = {
    torch.ops.fdp_kernels.normal.default: chacha20.normal_reference,
    torch.ops.fdp_kernels.bits.default: chacha20.bits_reference,
}


def workspace(func: Any, args: Any, kwargs: Any, *, measure: Callable[..., int]) -> int:
    """Bytes that ``func`` holds on a GPU beside its arguments and results.

    ``measure(draw, shape, size, *rest)`` is the same of a draw in plain torch, which depends on the sizes only.
    """
    if func in _REDUCTIONS and (dtype := kwargs.get("dtype")) is not None:
        x = args[0]
        fused = x.dtype == dtype or (x.dtype in _HALF and dtype == torch.float32)
        return 0 if fused or _on_host(x) else x.numel() * dtype.itemsize
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        queries = args[1]
        return 4 * (queries.numel() + math.prod(queries.shape[:3])) if queries.dtype in _HALF else 0
    if func in _DRAWS and not _on_host(args[0]) and not _has_kernel(func):
        _, shape, _, size, *rest = args
        return measure(_DRAWS[func], tuple(shape), tuple(size), *rest)
    return 0


def _has_kernel(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func._schema.name, "CUDA")


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"
