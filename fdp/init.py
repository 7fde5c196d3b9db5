"""Initialisers: ``value = f(key, path, global element index)``, for any order of leaves and any number of ranks.

An initialiser can draw any window of a leaf without the rest, so a rank fills its own shard, and the bits are the same
for every sharding.

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
Initialiser: TypeAlias = Callable[..., Tensor]
"""``init(key, shape, *, dtype, window=None) -> Tensor``; window = (start, length) per dimension."""


def constant(value: float) -> Initialiser:
    """Return an initialiser that sets every element to ``value``."""

    def init(key: Key, shape: Shape, *, dtype: torch.dtype, window: Window | None = None) -> Tensor:
        size = shape if window is None else tuple(length for _, length in window)
        return torch.full(size, value, dtype=dtype, device=key.device)

    return init


def normal(std: float) -> Initialiser:
    """Return an initialiser that draws ``N(0, std^2)``."""

    def init(key: Key, shape: Shape, *, dtype: torch.dtype, window: Window | None = None) -> Tensor:
        return keys.normal(key, shape, dtype=dtype, window=window) * std

    return init


def truncated_normal(std: float) -> Initialiser:
    """Return an initialiser that draws ``N(0, std^2)`` within two standard deviations, by inverse CDF."""

    def init(key: Key, shape: Shape, *, dtype: torch.dtype, window: Window | None = None) -> Tensor:
        return keys.truncated_normal(key, shape, lower=-2.0, upper=2.0, dtype=dtype, window=window) * std

    return init


def uniform(bound: float) -> Initialiser:
    """Return an initialiser that draws uniformly from ``[-bound, bound)``."""

    def init(key: Key, shape: Shape, *, dtype: torch.dtype, window: Window | None = None) -> Tensor:
        return (keys.uniform(key, shape, dtype=dtype, window=window) * 2 - 1) * bound

    return init
