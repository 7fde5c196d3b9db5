"""Parameters of a module as leaves of a model: their names, which of them are frozen, and their values.

>>> model = foreign_model(module, blocks)
>>> params = params_of(module, model)                                # the module's own values, not copied
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fdp import tree
from fdp.fingerprint import fingerprint
from fdp.keys import Window
from fdp.model import Block, LeafSpec, Model
from fdp.types import FdpError, Key, Path, Tree


def foreign_model(module: nn.Module, blocks: tuple[Block, ...], **fields: Any) -> Model:
    """Return the model that consists of ``blocks`` of ``module``. Leaves that do not require gradients are frozen.

    Guarantees:
      - a parameter with several names is one leaf, under its first name; a parameter that no block uses is not a leaf.
    """
    paths = leaf_paths(module)
    used = {path for block in blocks for path in tree.leaves(block.params)}
    own = {name: leaf for name, leaf in module.named_parameters() if paths[name] in used}
    odd = [name for name, leaf in own.items() if leaf.requires_grad and not leaf.is_floating_point()]
    if odd:
        raise FdpError(
            f"{odd[0]}: expected a floating-point parameter, got {own[odd[0]].dtype}; hold real and imaginary parts as "
            f"two parameters (torch.view_as_complex), or freeze it (requires_grad_(False))"
        )
    leaves = {name: LeafSpec(tuple(leaf.shape), _refuse_init) for name, leaf in own.items()}
    frozen = frozenset(name for name, leaf in own.items() if not leaf.requires_grad)
    kinds = str([(name, type(part).__name__) for name, part in module.named_modules()])
    return Model(type(module).__name__, leaves, blocks, frozen=frozen, settings=fingerprint(kinds), **fields)


def params_of(module: nn.Module, model: Model, *, dtype: torch.dtype | None = None) -> Tree:
    """Return the module's values of the model's leaves. They share the module's memory unless the dtype changes."""
    own = dict(module.named_parameters())
    if missing := sorted(set(model.leaves) - set(own)):
        raise FdpError(
            f"{type(module).__name__}: expected the module that {model.name} was made from, got one without "
            f"{missing[:4]}"
        )
    empty = [path for path in model.leaves if own[path].device.type == "meta"]
    if empty:
        raise FdpError(f"{empty[0]}: expected a parameter with values, got one on the meta device; load its values")
    return tree.nest({path: own[path].detach().to(dtype or own[path].dtype) for path in model.leaves})


def object_settings(loss: Any) -> Any:
    """Return the settings of a loss that is an object, such as ``label_smoothing``: two losses share no noise."""
    if not isinstance(loss, nn.Module):
        return {} if inspect.isroutine(loss) else dict(getattr(loss, "__dict__", {}))
    parts = {name: part for name, part in loss.named_modules()}
    plain = {
        f"{name}.{key}": value
        for name, part in parts.items()
        for key, value in vars(part).items()
        if not key.startswith("_")
    }
    return {**plain, **loss.state_dict()}


def _refuse_init(key: Key, shape: tuple[int, ...], *, dtype: torch.dtype, window: Window | None = None) -> Tensor:
    raise FdpError(
        "params: expected the values of the module, since a model from elsewhere has no initialisation of its own, got "
        "none; use params_of(module, model), or load them"
    )


def leaf_paths(module: nn.Module) -> dict[str, Path]:
    """Map every parameter name to its leaf, the first name of the same parameter. Tied names map to one leaf."""
    first: dict[int, str] = {}
    paths = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        paths[name] = first.setdefault(id(parameter), name)
    return paths
