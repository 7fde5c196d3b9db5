"""A module without the short cuts of torch's attention layers, whose parameters torch.compile does not show, with the
experts of ``transformers`` computed token by token (``fdp.foreign.stack.experts``), and without recomputation of its
own.

In ``eval()`` an ``nn.TransformerEncoderLayer`` is one fused operation for inference. Outside of torch.compile it is not
taken while functions of torch are watched; inside it would be. In a copy of the module (parameters and buffers are the
same tensors) the flags that allow it are off; what is computed is the same.

    >>> module = without_fast_paths(module)
"""

from __future__ import annotations

from torch import nn

from fdp.foreign.placeholders import copied_with
from fdp.foreign.stack.experts import with_looped_experts, with_routed_experts

ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def without_fast_paths(module: nn.Module) -> nn.Module:
    """The module itself if it has no such part, else a copy that shares its tensors, in train() or eval() as it is."""
    slow = copied_with(module, lambda part: isinstance(part, ATTENTION), _slow)
    return with_routed_experts(_keeping(slow))


def reference(module: nn.Module) -> nn.Module:
    """What the other is compared with: the module itself, but for experts, which are looped over in any dtype, and
    without recomputation."""
    return with_looped_experts(_keeping(module))


def _keeping(module: nn.Module) -> nn.Module:
    """The module without ``gradient_checkpointing_enable()``, which changes nothing but memory and runs parts again
    where nobody watches; fdp recomputes blocks itself."""

    def keep(part: nn.Module) -> None:
        part.__dict__["gradient_checkpointing"] = False

    return copied_with(module, lambda part: part.__dict__.get("gradient_checkpointing") is True, keep)


def _slow(part: nn.Module) -> None:
    if isinstance(part, nn.MultiheadAttention) and not part.training:
        part.dropout, part.training = 0.0, True  # in training there is no short cut; without dropout it is eval()
    elif isinstance(part, nn.TransformerEncoderLayer):
        part.activation_relu_or_gelu = 0
    elif isinstance(part, nn.TransformerEncoder):
        part.enable_nested_tensor = False
