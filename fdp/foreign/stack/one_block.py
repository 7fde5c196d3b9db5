"""A module as one block: whatever cannot be treated layer by layer, and what need not be.

    losses = finish(call(module, inputs of data), data)

>>> blocks = one_block(module, call=call, finish=losses, example=data)               # (Block("module", ...),)
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
from fdp.foreign.layout import NotAStack, leaf_paths
from fdp.foreign.placeholders import hollow
from fdp.foreign.stack.parts import Caller, Constants, Weights, inputs_of
from fdp.foreign.stack.skeleton import needed_names
from fdp.foreign.uses.dropout import keys_of
from fdp.foreign.uses.watch import watched_call
from fdp.gradients.taps import batch_size_of
from fdp.model import Block
from fdp.types import FdpError, Tree

Finish: TypeAlias = Callable[[Any, Tree], Float[Tensor, " batch"]]
"""``finish(outputs, data)``: the loss of every sample, of what the module returned."""


@dataclass(frozen=True, eq=False)
class Whole:
    """A module as one block: its losses."""

    module: nn.Module
    call: Caller
    finish: Finish
    constants: Constants
    batch_first: bool
    modes: tuple[bool, ...]

    def __call__(self, params: Weights, carry: Tree, data: Tree) -> Float[Tensor, " batch"]:
        if not torch.compiler.is_compiling() and modes_of(self.module) != self.modes:
            raise FdpError(
                f"{type(self.module).__name__}: expected its parts in train() or eval() as they were when the model "
                f"was made and checked, got others; put them back, or make the model anew"
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

        return self.finish(self.call(module, inputs_of(data, dtype)), data)


def whole(module: nn.Module, *, call: Caller, finish: Finish, batch_first: bool = True) -> Whole:
    """The function of a module, in train() or eval() as it is."""
    return Whole(module, call, finish, Constants(module, {}), batch_first, modes_of(module))


def one_block(module: nn.Module, *, call: Caller, finish: Finish, example: Tree) -> Block:
    """The module as one block, without parameters that no loss depends on; values of parameters are never read."""
    paths, apply = leaf_paths(module), whole(module, call=call, finish=finish)
    shapes = {name: tuple(leaf.shape) for name, leaf in module.named_parameters(remove_duplicate=False)}
    hollowed = replace(apply, module=hollow(module))
    try:
        used = needed_names(lambda given, data: [hollowed(given, (), data)], shapes, tree.map(Tensor.cpu, example))
    except (DynamicOutputShapeException, DataDependentOutputException):
        used = list(shapes)  # what it does depends on the data: all of them may count
    except FdpError:
        raise
    except Exception as error:  # what it says may show the data, and is left to the traceback
        raise FdpError(
            f"{type(module).__name__}: expected to be called with the example, got {type(error).__name__} "
            f"from its forward; give an example of entries and lengths that it takes (--context for a shorter one)"
        ) from error
    unused = {name: shape for name, shape in shapes.items() if name not in used}
    return Block("module", {name: paths[name] for name in used}, replace(apply, constants=Constants(module, unused)))


def remark_of(module: nn.Module, error: NotAStack) -> str:
    """Why a module is one block."""
    return f"{type(module).__name__} is computed as one block, not layer by layer: {error.reason}"


def modes_of(module: nn.Module) -> tuple[bool, ...]:
    """Whether each part of a module is in train()."""
    return tuple(part.training for part in module.modules())
