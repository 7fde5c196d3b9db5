"""A foreign module's parameters as leaves: which there are, which are frozen, and their values.

>>> model = foreign_model(module, blocks)
>>> params = params_of(module, model)                                # the module's own values, not copied
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fdp import tree
from fdp.fingerprint import fingerprint
from fdp.foreign.layout import leaf_paths
from fdp.keys import Window
from fdp.model import Block, LeafSpec, Model
from fdp.types import FdpError, Key, Tree


def foreign_model(module: nn.Module, blocks: tuple[Block, ...], **fields: Any) -> Model:
    """The model of ``blocks`` made of ``module``. Leaves that do not require gradients are frozen.

    Guarantees:
      - a parameter with several names is one leaf, under its first; one that no block uses is none.
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
    leaves = {name: LeafSpec(tuple(leaf.shape), _no_draw) for name, leaf in own.items()}
    frozen = frozenset(name for name, leaf in own.items() if not leaf.requires_grad)
    kinds = str([(name, type(part).__name__) for name, part in module.named_modules()])
    return Model(type(module).__name__, leaves, blocks, frozen=frozen, settings=fingerprint(kinds), **fields)


def params_of(module: nn.Module, model: Model, *, dtype: torch.dtype | None = None) -> Tree:
    """The module's values of the model's leaves; the same memory, where the dtype stays."""
    own = dict(module.named_parameters())
    if missing := sorted(set(model.leaves) - set(own)):
        raise FdpError(
            f"{type(module).__name__}: expected the module that {model.name} was made of, got no {missing[:4]}"
        )
    empty = [path for path in model.leaves if own[path].device.type == "meta"]
    if empty:
        raise FdpError(f"{empty[0]}: expected a parameter with values, got one on the device 'meta'; load them")
    return tree.nest({path: own[path].detach().to(dtype or own[path].dtype) for path in model.leaves})


def _no_draw(key: Key, shape: tuple[int, ...], *, dtype: torch.dtype, window: Window | None = None) -> Tensor:
    raise FdpError(
        "params: a model from elsewhere brings its values along; take params_of(module, model), or load them"
    )
