"""Where factors wait between updates: on the device or in CPU memory, columns in half precision.

    stored = round(columns * 2^e),   columns = stored * 2^-e,   e per column, its largest entry brought to [2^13, 2^14)

Half precision overflows at 65504 and has nothing below 6e-8, where gradients of a mean loss live. A power of two per
column loses nothing of its own, so every column keeps 11 bits (float16) of its largest entry, whatever its size. Only
columns are narrowed: sums of squares in half precision have wrong eigenvectors.

    >>> stored = keep(factor, device=store_device(Where.AUTO, size, home=device), dtype=torch.float16)
    >>> factor = widen(stored, device=device)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.kfac.factors import HALF
from fdp.kfac.types import ColumnsFactor, Curvature, Factor, Layer, SoftmaxFactor
from fdp.types import FdpError

STORE_BYTES = 500 * 10**6
"""All stored factors together: beyond this AUTO keeps them in CPU memory."""
LARGEST = 14
"""A column's largest entry is stored below 2^14: two bits from overflow."""


class Where(Enum):
    """Where factors are kept: with the parameters, in CPU memory, or there once they are large."""

    DEVICE = "device"
    CPU = "cpu"
    AUTO = "auto"


class Stored(NamedTuple):
    """A factor, its columns times ``scale``; None: nothing was scaled."""

    factor: Factor
    scale: Float[Tensor, " k"] | None


def factor_bytes(curvatures: Mapping[Layer, Curvature]) -> int:
    """What the factors take."""
    return sum(x.numel() * x.element_size() for x in tree.leaves(list(curvatures.values())))


def store_device(where: Where, size: int, *, home: torch.device) -> torch.device:
    """The device to keep factors of ``size`` bytes, all together, on; ``home`` is where they are made."""
    away = where is Where.CPU or (where is Where.AUTO and size > STORE_BYTES)
    return torch.device("cpu") if away else home


def keep(factor: Factor, *, device: torch.device, dtype: torch.dtype | None = torch.float16) -> Stored:
    """The factor as it is kept: columns in ``dtype`` (None: their own), all of it on ``device``.

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
        exponent = (LARGEST - torch.frexp(largest)[1]).clamp(max=126)  # a power of two that float32 has
        usable = (largest > 0) & largest.isfinite()
        scale = torch.where(usable, torch.ldexp(torch.ones_like(largest), exponent), 1.0)
        factor = factor._replace(columns=columns * scale)
    if dtype is not None and isinstance(factor, ColumnsFactor | SoftmaxFactor):
        factor = factor._replace(columns=factor.columns.to(dtype))
    moved = tree.map(lambda x: x.to(device), factor)
    return Stored(moved, None if scale is None else scale.to(device))


def widen(stored: Stored, *, device: torch.device) -> Factor:
    """The factor again, on ``device``, scaled columns in the dtype they were measured in."""
    factor, scale = tree.map(lambda x: x.to(device), stored)
    if scale is None:
        return factor
    return factor._replace(columns=factor.columns.to(scale.dtype) / scale)
