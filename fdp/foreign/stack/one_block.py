"""Treat a module as one block: the fallback for modules that are no stack of layers.

    losses = finish(call(module, inputs of data), data)

>>> block = one_block(module, call=call, finish=losses, example=data)               # Block("module", ...)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fdp import tree
from fdp.foreign.find_stack import NotAStack
from fdp.foreign.leaves import leaf_paths
from fdp.foreign.placeholders import meta_copy
from fdp.foreign.stack.block_functions import Caller, Constants, module_inputs
from fdp.foreign.stack.dependencies import Weights, needed_parameters
from fdp.foreign.uses.dropout import keys_of
from fdp.foreign.uses.watch import watched_call
from fdp.gradients.taps import batch_size_of
from fdp.model import Block
from fdp.types import FdpError, Tree

Finish: TypeAlias = Callable[[Any, Tree], Float[Tensor, " batch"]]
"""``finish(outputs, data)``: returns the loss of every sample, given what the module returned."""


@dataclass(frozen=True, eq=False)
class ModuleLoss:
    """A whole module as the function of one block: returns the loss of every sample."""

    module: nn.Module
    call: Caller
    finish: Finish
    constants: Constants
    batch_first: bool
    modes: tuple[bool, ...]

    def __call__(self, params: Weights, carry: Tree, data: Tree) -> Float[Tensor, " batch"]:
        if not torch.compiler.is_compiling() and training_modes(self.module) != self.modes:
            raise FdpError(
                f"{type(self.module).__name__}: expected its parts in the train() or eval() mode they had when the "
                f"model was made and checked, got other modes; set them back, or make the model again"
            )
        dtype = next(iter(params.values())).dtype
        tensors = self.constants.on(tree.leaves(data)[0].device, dtype) | dict(params)

        def module(*args: Any, **kwargs: Any) -> Any:
            return watched_call(
                self.module,
                tensors,
                args,
                kwargs,
                batch_size=batch_size_of(data),
                dropout=keys_of(data),
                batch_first=self.batch_first,
            )

        return self.finish(self.call(module, module_inputs(data, dtype)), data)


def module_loss(module: nn.Module, *, call: Caller, finish: Finish, batch_first: bool = True) -> ModuleLoss:
    """Return the loss function of a module, in the train() or eval() mode it is in."""
    return ModuleLoss(module, call, finish, Constants(module, {}), batch_first, training_modes(module))


def one_block(module: nn.Module, *, call: Caller, finish: Finish, example: Tree) -> Block:
    """Return the module as one block, without the parameters that no loss depends on; no parameter value is read."""
    paths, apply = leaf_paths(module), module_loss(module, call=call, finish=finish)
    shapes = {name: tuple(leaf.shape) for name, leaf in module.named_parameters(remove_duplicate=False)}
    on_shapes = replace(apply, module=meta_copy(module))
    try:
        used = needed_parameters(
            lambda given, data: [on_shapes(given, (), data)], shapes, tree.map(Tensor.cpu, example)
        )[0]
    except (DynamicOutputShapeException, DataDependentOutputException):
        used = list(shapes)  # the computation depends on the data: any of them may be used
    except FdpError:
        raise
    except Exception as error:  # its message may show the data, and is left to the traceback
        raise FdpError(
            f"{type(module).__name__}: expected a forward that accepts the example, got {type(error).__name__} "
            f"from it; give an example of entries and lengths that it takes (--context for a shorter one)"
        ) from error
    unused = {name: shape for name, shape in shapes.items() if name not in used}
    return Block("module", {name: paths[name] for name in used}, replace(apply, constants=Constants(module, unused)))


def one_block_remark(module: nn.Module, error: NotAStack) -> str:
    """Say why a module is computed as one block."""
    return f"{type(module).__name__} is computed as one block, not layer by layer: {error.reason}"


def training_modes(module: nn.Module) -> tuple[bool, ...]:
    """Return the ``training`` flag of every part of a module."""
    return tuple(part.training for part in module.modules())
