"""What CUDA kernels hold in passing and no operation returns: the memory that a trace of outputs would miss.

vector_norm, sum, mean    x.to(dtype), whole, when they reduce in another dtype (but for half to float32)
attention, backward       the gradient of the queries in float32, while it is added up
truncated normal draws    their bits, and the law in float64; unbounded ones in float32 are one kernel

>>> workspace(torch.ops.aten.linalg_vector_norm.default, (x, 2, [1], False), {"dtype": torch.float64})
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fdp.gradients.rules import HALF

_aten = torch.ops.aten
_REDUCTIONS = {
    _aten.linalg_vector_norm.default,
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.mean.default,
    _aten.mean.dim,
}


def workspace(func: Any, args: Any, kwargs: Any) -> int:
    """Bytes that ``func`` holds on a GPU beside its arguments and results."""
    if func in _REDUCTIONS and (dtype := kwargs.get("dtype")) is not None:
        x = args[0]
        fused = x.dtype == dtype or (x.dtype in HALF and dtype == torch.float32)
        return 0 if fused or _on_host(x) else x.numel() * dtype.itemsize
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        queries = args[1]
        return 4 * (queries.numel() + math.prod(queries.shape[:3])) if queries.dtype in HALF else 0
    if func is torch.ops.fdp_kernels.normal.default and not _on_host(args[0]):
        _, _, _, size, lower, upper, dtype = args
        one_kernel = lower == -math.inf and upper == math.inf and dtype != torch.float64
        return 0 if one_kernel else 32 * math.prod(size)  # else bits, and their law in float64 by torch
    return 0


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"
