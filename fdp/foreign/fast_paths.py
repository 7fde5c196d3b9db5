"""A module without the short cuts of torch's attention layers, whose parameters torch.compile does not show.

In ``eval()`` an ``nn.TransformerEncoderLayer`` is one fused operation for inference. Outside of torch.compile it is not
taken while functions of torch are watched; inside it would be. In a copy of the module (parameters and buffers are the
same tensors) the flags that allow it are off; what is computed is the same.

    >>> module = without_fast_paths(module)
"""

from __future__ import annotations

from torch import nn

from fdp.foreign.placeholders import shallow

ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def without_fast_paths(module: nn.Module) -> nn.Module:
    """The module itself if it has no such layer, else a copy that shares its tensors, in train() or eval() as it is."""
    if not any(isinstance(part, ATTENTION) for part in module.modules()):
        return module
    copies: dict[int, nn.Module] = {}

    def copied(part: nn.Module) -> nn.Module:
        if id(part) not in copies:
            new = copies[id(part)] = shallow(part)
            new.__dict__["_parameters"] = dict(part._parameters)
            new.__dict__["_buffers"] = dict(part._buffers)
            new.__dict__["_modules"] = {n: None if m is None else copied(m) for n, m in part._modules.items()}
            _slow(new)
        return copies[id(part)]

    return copied(module)


def _slow(part: nn.Module) -> None:
    if isinstance(part, nn.MultiheadAttention) and not part.training:
        part.dropout, part.training = 0.0, True  # in training there is no short cut; without dropout it is eval()
    elif isinstance(part, nn.TransformerEncoderLayer):
        part.activation_relu_or_gelu = 0
    elif isinstance(part, nn.TransformerEncoder):
        part.enable_nested_tensor = False
