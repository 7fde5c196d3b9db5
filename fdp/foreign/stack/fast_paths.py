"""Disable code paths that hide uses of parameters: fused attention, fused experts, the module's own recomputation.

In ``eval()`` an ``nn.TransformerEncoderLayer`` is one fused inference operation, whose parameters torch.compile does
not show. A copy of the module (with the same parameters and buffers) has the flags that allow it switched off,
``transformers`` experts computed token by token (``fdp.foreign.stack.experts``), and no gradient checkpointing. The
result is the same.

    >>> module = without_fast_paths(module)
"""

from __future__ import annotations

from torch import nn

from fdp.foreign.placeholders import copy_with_changes
from fdp.foreign.stack.experts import with_looped_experts, with_routed_experts

ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def without_fast_paths(module: nn.Module) -> nn.Module:
    """Return the module itself if it has no fast path, else a copy that shares its tensors and its mode."""
    slow = copy_with_changes(module, lambda part: isinstance(part, ATTENTION), _disable_fast_path)
    return with_routed_experts(_without_recomputation(slow))


def reference_module(module: nn.Module) -> nn.Module:
    """Return the module to compare with: experts are looped over, nothing is recomputed, all else is unchanged."""
    return with_looped_experts(_without_recomputation(module))


def _without_recomputation(module: nn.Module) -> nn.Module:
    """Undo ``gradient_checkpointing_enable()``, which runs parts again unwatched; fdp recomputes blocks itself."""

    def disable(part: nn.Module) -> None:
        part.__dict__["gradient_checkpointing"] = False

    return copy_with_changes(module, lambda part: part.__dict__.get("gradient_checkpointing") is True, disable)


def _disable_fast_path(part: nn.Module) -> None:
    if isinstance(part, nn.MultiheadAttention) and not part.training:
        part.dropout, part.training = 0.0, True  # training mode has no fast path; without dropout it equals eval()
    elif isinstance(part, nn.TransformerEncoderLayer):
        part.activation_relu_or_gelu = 0
    elif isinstance(part, nn.TransformerEncoder):
        part.enable_nested_tensor = False
