"""Tell where an operation may be computed in another way than torch's own: on plain tensors, differentiated once.

>>> with differentiated_once():
...     h = gelu(x)                   # its slope is found with it; a derivative of the slope would be an error
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import local

import torch
from fdp_kernels.plain import is_everything_traced, is_plain, transforms
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from fdp.types import FdpError


def differentiated_once() -> AbstractContextManager[None]:
    """Promise that what is computed inside is differentiated at most once, by autograd or the transform around it.

    Nothing changes while a graph is traced.
    """
    return nullcontext() if torch.compiler.is_compiling() else _promise()


@contextmanager
def _promise() -> Iterator[None]:
    before, _promised.depth = _promised.depth, _depth() if _depth() <= 1 else None
    try:
        yield
    finally:
        _promised.depth = before


def is_promised() -> bool:
    """Return True if what is computed here is promised to be differentiated once."""
    return _promised.depth == _depth()


def refuse_a_second_derivative(operation: str, instead: str) -> None:
    """Refuse a backward that is itself recorded, in an operation that relies on the promise."""
    if torch.is_grad_enabled():
        raise FdpError(
            f"{operation}: expected to be differentiated once, as promised by differentiated_once, got a derivative "
            f"that is to be differentiated again; use {instead} there"
        )


class _Promise(local):
    depth: int | None = None
    """The number of transforms of torch.func around a computation that is differentiated once; None: no promise."""


_promised = _Promise()


def _depth() -> int:
    return len(transforms())


def is_traced(x: Tensor) -> bool:
    """Return True if the compiler, a mode, a kind of tensor or torch.func records or changes operations on ``x``.

    ``grad`` and ``vjp`` of torch.func do not count.
    """
    if is_everything_traced():
        return True
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return not is_plain(x)
