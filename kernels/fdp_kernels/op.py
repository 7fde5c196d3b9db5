"""Register kernels as torch ops: a launch on CUDA, the plain-torch reference everywhere else.

    >>> from fdp_kernels.op import define, jit, tl, triton
    >>> direct = define("direct", "Tensor g, Tensor x -> Tensor", reference=direct_reference, cuda=_launch, fake=...)

An op is opaque to the compiler. It is registered with ``Library.define`` because ``custom_op`` raises inside
``torch.func.grad`` and ``triton_op`` would be traced into on a machine without a GPU. Without Triton (a CPU build of
torch) the bodies are plain functions that nobody calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton: Any = None
    tl: Any = None

INTERPRETED: bool = triton is not None and triton.knobs.runtime.interpret  # pyright: ignore
"""True if bodies run on the CPU, in Triton's interpreter."""

_library = torch.library.Library("fdp_kernels", "FRAGMENT")


def jit(body: Callable) -> Any:
    """Apply ``triton.jit``; return the function unchanged if Triton is not installed."""
    return body if triton is None else triton.jit(body)


def define(
    name: str,
    schema: str,
    *,
    reference: Callable,
    fake: Callable,
    cuda: Callable | None = None,
    cpu: Callable | None = None,
) -> Any:
    """Register ``fdp_kernels::name(schema)`` and return it.

    ``reference`` is the specification and the fallback on every device. ``cuda`` launches (used only if Triton is
    installed), ``cpu`` is a faster implementation on the CPU, and ``fake`` gives the outputs' shapes and dtypes.
    """
    _library.define(f"{name}({schema.replace(' -> ', ') -> ', 1)}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    if cpu is not None:
        _library.impl(name, cpu, "CPU")
    if cuda is not None and triton is not None:
        _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"fdp_kernels::{name}", fake, lib=_library)
    return getattr(torch.ops.fdp_kernels, name)
