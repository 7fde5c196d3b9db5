"""Tell where an operation may be computed in another way than torch's own: on plain tensors, differentiated once.

>>> with differentiated_once():
...     h = gelu(x)                   # its slope is found with it; a derivative of the slope would be an error
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)
from torch.autograd import forward_ad
from torch.nn import Parameter

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


def _transforms() -> list[Any]:
    """Return the transforms of torch.func that are active."""
    return get_interpreter_stack() or []


def _depth() -> int:
    return len(_transforms())


def is_traced(x: Tensor) -> bool:
    """Return True if the compiler, a mode, a kind of tensor or torch.func records or changes operations on ``x``.

    ``grad`` and ``vjp`` of torch.func do not count.
    """
    if _is_everything_traced():
        return True
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return not _is_plain(x)


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Return True if operations on these tensors are only computed: nothing records, changes or differentiates them."""
    if _is_everything_traced() or _transforms():
        return False
    recorded = torch.is_grad_enabled()
    return all(_is_plain(x) and not (recorded and x.requires_grad) for x in tensors)


def _is_everything_traced() -> bool:
    if torch.compiler.is_compiling():
        return True  # first: the compiler cannot ask for the rest
    if torch.jit.is_tracing() or forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack():
        return True
    return any(one.key() != TransformType.Grad for one in _transforms())


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, Parameter) and not is_legacy_batchedtensor(x)
