"""Tell tensors whose operations are only computed from those that something records, changes or differentiates.

>>> if are_plain([x, y]): ...                      # their memory may be read and written by a compiled loop
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_legacy_batchedtensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad
from torch.nn import Parameter


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Return True if operations on these tensors are only computed: nothing records, changes or differentiates them."""
    if is_everything_traced() or transforms():
        return False
    recorded = torch.is_grad_enabled()
    return all(is_plain(x) and not (recorded and x.requires_grad) for x in tensors)


def is_everything_traced() -> bool:
    """Return True if the compiler, a mode, or a transform of torch.func other than ``grad`` sees all operations."""
    if torch.compiler.is_compiling():
        return True  # first: the compiler cannot ask for the rest
    if torch.jit.is_tracing() or forward_ad._current_level >= 0:
        return True
    if torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
        return True
    return any(one.key() != TransformType.Grad for one in transforms())


def is_plain(x: Tensor) -> bool:
    """Return True for tensors and parameters of torch itself, not of a subclass or a batch of the older vmap."""
    return type(x) in (Tensor, Parameter) and not is_legacy_batchedtensor(x)


def transforms() -> list[Any]:
    """Return the transforms of torch.func that are active."""
    return get_interpreter_stack() or []
