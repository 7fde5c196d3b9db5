"""Inputs and comparisons shared by the tests of linear-layer kernels, and a fixture that fixes Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def _set_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = request.node.get_closest_marker("gpu") is not None
    if on_gpu != torch.cuda.is_available():
        pytest.skip("needs a GPU" if on_gpu else "bodies run in the interpreter where there is no GPU")
    if on_gpu:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """Convert loop bounds: numpy 2.4 no longer turns the (1,) arrays that hold scalars into an int."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def random_pair(shape: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    batch, tokens, p, d = shape
    draw = torch.Generator(device).manual_seed(sum(shape))
    g = torch.randn(batch, tokens, p, generator=draw, device=device)
    x = torch.randn(batch, tokens, d, generator=draw, device=device)
    return g.to(dtype), x.to(dtype)


def cancelling_pair(
    shape: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Return inputs that are nearly constant over tokens, and output gradients that sum to nearly 0."""
    g, x = random_pair(shape, device)
    g = (g - g.mean(1, keepdim=True)).to(dtype)
    return g, (3 * x[:, :1] + 1e-2 * x).to(dtype)


PAIRS: list[Callable[..., tuple[Tensor, ...]]] = [random_pair, cancelling_pair]


def factors_of(batch: int, device: str = "cpu") -> Tensor:
    return torch.rand(batch, generator=torch.Generator(device).manual_seed(5), device=device) + 0.1


def sizes(g: Tensor, x: Tensor) -> Tensor:
    """Return ``sum_t |g_t| |x_t|``, the scale of a gradient's rounding error."""
    return (g.double().norm(dim=-1) * x.double().norm(dim=-1)).sum(1)


def relative(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).abs() / expected.clamp_min(1e-30)).max())


def assert_rounded_up(found: Tensor, expected: Tensor, *, slack: float = 1e-13) -> None:
    """Assert at least the expected value, and at most 2^-14 of it more."""
    assert bool((found >= expected * (1 - slack)).all())
    assert bool((found <= expected * (1 + 2.0**-14 + slack)).all())
