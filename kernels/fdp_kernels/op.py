"""What every kernel file needs: Triton if it is there, and ops that launch on CUDA and otherwise run the reference.

    >>> from fdp_kernels.op import define, jit, tl, triton
    >>> direct = define("direct", "Tensor g, Tensor x -> Tensor", reference=direct_reference, cuda=_launch, fake=...)

An op is opaque to the compiler: ``Library.define``, not ``custom_op``, which raises inside ``torch.func.grad``, and not
``triton_op``, which a machine without a GPU would trace into. Without Triton (a CPU build of torch) the bodies are
plain functions that nobody calls.
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

_library = torch.library.Library("fdp_kernels", "FRAGMENT")


def jit(body: Callable) -> Any:
    """``triton.jit``, or the function as it is where there is no Triton."""
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

    ``reference`` is the specification and runs wherever nothing better is registered; ``cuda`` launches (used only
    where Triton is installed); ``cpu`` is a faster way on the CPU; ``fake`` gives outputs' shapes and dtypes.
    """
    _library.define(f"{name}({schema.replace(' -> ', ') -> ', 1)}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    if cpu is not None:
        _library.impl(name, cpu, "CPU")
    if cuda is not None and triton is not None:
        _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"fdp_kernels::{name}", fake, lib=_library)
    return getattr(torch.ops.fdp_kernels, name)
