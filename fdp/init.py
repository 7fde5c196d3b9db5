"""Initial values: ``value = f(key, path, global element index)``, whatever the order or the number of ranks.

An initialiser draws any window of a leaf without the rest, so a rank can fill its own shard alone, and the same bits
come out for every way of sharding.

    >>> init = truncated_normal(std=0.02)
    >>> init(keys.fold_in(key, path), (50257, 768), dtype=torch.float32)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from fdp import keys
from fdp.keys import Window
from fdp.types import Key

Shape: TypeAlias = tuple[int, ...]
Init: TypeAlias = Callable[..., Tensor]
"""``init(key, shape, *, dtype, window=None) -> Tensor``; window = (start, length) per dimension."""


def constant(value: float) -> Init:
    """Every element ``value``."""

    def init(key: Key, shape: Shape, *, dtype: torch.dtype, window: Window | None = None) -> Tensor:
        size = shape if window is None else tuple(length for _, length in window)
        return torch.full(size, value, dtype=dtype, device=key.device)

    return init


def normal(std: float) -> Init:
    """``N(0, std^2)``."""

    def init(key: Key, shape: Shape, *, dtype: torch.dtype, window: Window | None = None) -> Tensor:
        return keys.normal(key, shape, dtype=dtype, window=window) * std

    return init


def truncated_normal(std: float) -> Init:
    """``N(0, std^2)`` conditioned on two standard deviations, by inverse CDF."""

    def init(key: Key, shape: Shape, *, dtype: torch.dtype, window: Window | None = None) -> Tensor:
        return keys.truncated_normal(key, shape, lower=-2.0, upper=2.0, dtype=dtype, window=window) * std

    return init


def uniform(bound: float) -> Init:
    """Uniform in ``[-bound, bound)``."""

    def init(key: Key, shape: Shape, *, dtype: torch.dtype, window: Window | None = None) -> Tensor:
        return (keys.uniform(key, shape, dtype=dtype, window=window) * 2 - 1) * bound

    return init
