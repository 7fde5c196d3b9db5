"""What is refused of a module before anything is tried with it, each by name and with what to do.

>>> check_door(module)
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fdp.foreign.uses.forbidden import max_norm_refusal
from fdp.types import FdpError

WRAPPERS = {
    "DataParallel": "module.module",
    "DistributedDataParallel": "module.module",
    "FullyShardedDataParallel": "module.module",
    "OptimizedModule": "module._orig_mod",
}
"""Classes of torch that wrap a module, and where it is; fdp spreads over ranks and compiles by itself."""


def check_door(module: nn.Module) -> None:
    """Refuse wrapped and scripted modules, lazy and sharded parameters, no parameters, and layers that mix samples."""
    kind = type(module).__name__
    for name, part in module.named_modules():
        where = name or kind
        if isinstance(part, torch.jit.ScriptModule):
            raise FdpError(
                f"{where}: expected an nn.Module in Python, got one of TorchScript, whose operations cannot be seen; "
                f"give the module that was scripted or traced"
            )
        if type(part).__name__ in WRAPPERS and type(part).__module__.startswith("torch."):
            raise FdpError(
                f"{where}: expected the module itself, got it inside of {type(part).__name__}; give "
                f"{WRAPPERS[type(part).__name__]}. fdp spreads batches and parameters over ranks by itself "
                f"(fdp.make_sharding, torchrun) and compiles by itself (--compile)"
            )
        _check_layer(where, part)
    parameters = dict(module.named_parameters())
    if not parameters:
        raise FdpError(
            f"{kind}: expected a module with parameters to train, got one without: neither it nor any part of it has "
            f"one. Give the module that holds them (a list of layers goes in nn.ModuleList, a tensor in nn.Parameter)"
        )
    for name, leaf in parameters.items():
        if is_lazy(leaf):
            raise FdpError(f"{name}: expected a parameter with a shape, got a lazy one; call the module once before")
        if leaf.requires_grad and leaf.numel() == 0:
            raise FdpError(
                f"{name}: expected a parameter with elements, got one of shape {tuple(leaf.shape)}; remove the layer, "
                f"or freeze it (requires_grad_(False))"
            )
        if isinstance(leaf, DTensor):
            raise FdpError(
                f"{name}: expected a plain parameter, got a DTensor; give the module before fully_shard, and shard the "
                f"model that comes of it (fdp.make_sharding)"
            )


def _check_layer(where: str, part: nn.Module) -> None:
    if isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or part.running_mean is None):
        raise FdpError(
            f"{where}: {type(part).__name__} normalises by statistics of the batch, which mix its samples: no bound on "
            f"one sample's gradient would hold. Replace it, by nn.GroupNorm(groups, {part.num_features}) as a rule, or "
            f"put it in eval(), where its statistics are fixed"
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        raise max_norm_refusal(where, part.max_norm)
