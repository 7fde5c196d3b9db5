"""Refuse modules that fdp cannot train, by looking at their parts before anything is run.

>>> check_structure(module)
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fdp.foreign.uses.side_effects import max_norm_error
from fdp.types import FdpError

WRAPPERS = {
    "DataParallel": "module.module",
    "DistributedDataParallel": "module.module",
    "FullyShardedDataParallel": "module.module",
    "OptimizedModule": "module._orig_mod",
}
"""Classes of torch that wrap a module, and the attribute that holds it; fdp shards and compiles by itself."""


def check_structure(module: nn.Module) -> None:
    """Refuse wrapped and scripted modules, lazy and sharded parameters, no parameters, and layers that mix samples."""
    kind = type(module).__name__
    for name, part in module.named_modules():
        where = name or kind
        if isinstance(part, torch.jit.ScriptModule):
            raise FdpError(
                f"{where}: expected an nn.Module in Python, got a TorchScript module, whose operations cannot be seen; "
                f"give the module that was scripted or traced"
            )
        if type(part).__name__ in WRAPPERS and type(part).__module__.startswith("torch."):
            raise FdpError(
                f"{where}: expected the module itself, got it wrapped in {type(part).__name__}; give "
                f"{WRAPPERS[type(part).__name__]}. fdp itself distributes batches and parameters over ranks "
                f"(fdp.make_sharding, torchrun) and compiles (--compile)"
            )
        _check_layer(where, part)
    parameters = dict(module.named_parameters())
    if not parameters:
        raise FdpError(
            f"{kind}: expected a module with parameters to train, got none in it or in any of its parts. Give the "
            f"module that holds them (put a list of layers in nn.ModuleList, a tensor in nn.Parameter)"
        )
    for name, leaf in parameters.items():
        if is_lazy(leaf):
            raise FdpError(f"{name}: expected a parameter with a shape, got a lazy one; call the module once first")
        if leaf.requires_grad and leaf.numel() == 0:
            raise FdpError(
                f"{name}: expected a parameter with elements, got one of shape {tuple(leaf.shape)}; remove the layer, "
                f"or freeze it (requires_grad_(False))"
            )
        if isinstance(leaf, DTensor):
            raise FdpError(
                f"{name}: expected a plain parameter, got a DTensor; give the module before fully_shard, and shard the "
                f"resulting model (fdp.make_sharding)"
            )


def _check_layer(where: str, part: nn.Module) -> None:
    if isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or part.running_mean is None):
        raise FdpError(
            f"{where}: {type(part).__name__} normalises by statistics of the batch, which mix its samples: no bound on "
            f"one sample's gradient would hold. Replace it, for example by nn.GroupNorm(groups, {part.num_features}), "
            f"or put it in eval(), where its statistics are fixed"
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        raise max_norm_error(where, part.max_norm)
