"""Functions for tests of operations of CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def count_calls(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return a list that grows by the arguments of every call of the static method ``name``."""
    real, calls = getattr(owner, name), []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(owner, name, staticmethod(counted))
    return calls


class NoGradient(torch.autograd.Function):
    """The identity, which gives no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # pyright: ignore
        return None
