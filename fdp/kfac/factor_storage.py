"""Compressed storage of factors between measurements: columns in half precision, on the device or in CPU memory.

    stored = round(columns * 2^e),   columns = stored * 2^-e,   e per column: its largest entry is in [2^13, 2^14)

Half precision overflows at 65504 and underflows below 6e-8, which gradients of a mean loss often are. Scaling by a
power of two per column is exact, so every column keeps 11 bits (float16) relative to its largest entry. Only columns
are compressed: sums of squares in half precision have wrong eigenvectors.

    >>> device = store_device(Where.AUTO, size, home=device)
    >>> factor, scale = compress(factor, device=device, dtype=torch.float16)        # columns are factor.columns / scale
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.kfac.factors import HALF
from fdp.kfac.types import ColumnsFactor, Factor, SoftmaxFactor
from fdp.types import FdpError

MAX_DEVICE_BYTES = 500 * 10**6
"""If all factors together are larger than this, AUTO stores them in CPU memory."""
COLUMN_EXPONENT = 14
"""A column's largest entry is stored below 2^14, two bits from overflow."""


class Where(Enum):
    """The device that stores factors: that of the parameters, the CPU, or (AUTO) the CPU if they are large."""

    DEVICE = "device"
    CPU = "cpu"
    AUTO = "auto"


class CompressedFactor(NamedTuple):
    """A factor whose columns are multiplied by ``scale``; None if they are not scaled."""

    factor: Factor
    scale: Float[Tensor, " k"] | None


def store_device(where: Where, size: int, *, home: torch.device) -> torch.device:
    """Return the device that stores factors of ``size`` bytes in total; ``home`` is where they are computed."""
    away = where is Where.CPU or (where is Where.AUTO and size > MAX_DEVICE_BYTES)
    return torch.device("cpu") if away else home


def compress(factor: Factor, *, device: torch.device, dtype: torch.dtype | None = torch.float16) -> CompressedFactor:
    """Cast columns to ``dtype`` (None: leave theirs), scaled per column, and move the factor to ``device``.

    Guarantees:
      - every entry comes back within ``eps`` of its column's largest, for columns of any size;
      - NaN and infinity come back as such.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise FdpError(
            f"dtype: expected a floating-point dtype for stored columns, got {dtype}; float16 is the default"
        )
    scale = None
    if dtype in HALF and isinstance(factor, ColumnsFactor | SoftmaxFactor) and factor.columns.dtype not in HALF:
        columns = factor.columns
        largest = columns.abs().amax(0) if len(columns) else columns.new_zeros(columns.shape[1])
        exponent = (COLUMN_EXPONENT - torch.frexp(largest)[1]).clamp(max=126)  # 2^126 is a finite float32
        usable = (largest > 0) & largest.isfinite()
        scale = torch.where(usable, torch.ldexp(torch.ones_like(largest), exponent), 1.0)
        factor = factor._replace(columns=columns * scale)
    if dtype is not None and isinstance(factor, ColumnsFactor | SoftmaxFactor):
        factor = factor._replace(columns=factor.columns.to(dtype))
    moved = tree.map(lambda x: x.to(device), factor)
    return CompressedFactor(moved, None if scale is None else scale.to(device))
