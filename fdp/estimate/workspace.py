"""Temporary memory inside CUDA kernels, which a trace of inputs and outputs does not see.

vector_norm, sum, mean    a full x.to(dtype) when they reduce in another dtype (except from half to float32)
attention, backward       the gradient of the queries in float32, while it is accumulated
truncated normal draws    their bits, and the values in float64; unbounded float32 draws are one kernel

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
    """Return the bytes that ``func`` allocates on a GPU besides its arguments and results."""
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
        return 0 if one_kernel else 32 * math.prod(size)  # bits, and float64 values computed by torch
    return 0


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"
