"""Operands of a torch function, plain or tracked, and the error for a use without a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fdp.foreign.uses.tracking import SelectedMatrices, Tracked
from fdp.types import FdpError

Operand = Tensor | Tracked


def no_rule_error(operation: str, operands: Sequence[Any]) -> FdpError:
    """Return the error for a use without a rule: the leaf, the operation, the shapes and the choices."""
    held = [a for a in operands if isinstance(a, (Tensor, Tracked, SelectedMatrices))]
    path = next((a.path for a in held if isinstance(a, Tracked)), "a parameter")
    shapes = ", ".join(str(tuple(a.shape)) if isinstance(a, Tensor) else f"{a.path} {tuple(a.shape)}" for a in held)
    return FdpError(
        f"{path}: used by {operation} on {shapes}, which has no per-sample rule. Freeze the leaf "
        f"(requires_grad_(False)), give the operation a rule (fdp.rule), or materialise the leaf's block, exact but "
        f"slower: from_module(..., materialize=('{path}',)), on the command line --method materialize"
    )


def split_bias(bias: Operand | None) -> tuple[Any, Tracked | None]:
    """Return ``(bias, None)`` if ``fdp.ops`` can take the bias, a leaf or a plain tensor, else ``(None, bias)``."""
    if not isinstance(bias, Tracked):
        return bias, None
    return (bias.leaf, None) if bias.leaf is not None else (None, bias)


def path_of(*operands: Operand | None) -> str:
    """Return the path of the first tracked operand."""
    return next(a.path for a in operands if isinstance(a, Tracked))
