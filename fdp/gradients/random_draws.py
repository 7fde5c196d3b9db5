"""Find the operations of a traced model that draw random numbers.

A second backward computes a model again. If that draws other numbers, the norm of a sample is of one gradient and the
sum adds another one, which nothing bounds. Draws of torch are found in a trace; those of Python or numpy are not, nor
are those of torch in a branch that the trace does not take. So on a CPU, in eager code, the outputs of blocks that run
again are compared with those of the first time.

    >>> with RandomDraws(found): model.loss(params, data)           # found: {"aten.bernoulli_.float"}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import tree
from fdp.cpu.promise import is_traced
from fdp.model import Model
from fdp.types import FdpError, Tree

SAME = 1e-3
"""Largest difference of two outputs of a block, as a share of its largest value: rounding, with or without a graph."""


class RandomDraws(TorchDispatchMode):
    """Adds the names of operations that draw random numbers to ``found``."""

    supports_higher_order_operators = True  # FlexAttention, which draws nothing

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: the mode watches and changes nothing. torch refuses FlexAttention under any other."""
        return True

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        tags = getattr(func, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and not _without_dropout(func, args, kwargs or {}):
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for attention and recurrent layers that could draw random numbers, and do not: no dropout."""
    names = [argument.name for argument in func._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    given = defaults | dict(zip(names, args)) | kwargs
    return any(name in given and given[name] == 0 for name in ("dropout_p", "dropout"))


def check_same_outputs(model: Model, outputs: list[Tree]) -> Callable[[int, Tree], None] | None:
    """Return a function that compares a block's output with that of its first run; None where that is not read.

    Called with the blocks from the last to the first; uses up ``outputs``.
    """
    if any(leaf.device.type != "cpu" or is_traced(leaf) for leaf in tree.leaves(outputs)):
        return None

    def see(i: int, again: Tree) -> None:
        for one, other in zip(tree.leaves(outputs.pop()), tree.leaves(again), strict=True):
            if one.shape != other.shape or not _is_close(one.detach(), other.detach()):
                raise FdpError(
                    f"{model.name}, {model.blocks[i].name}: expected the same output when it is computed again for the "
                    f"sum, got another one: it draws random numbers, or depends on something that changed. A sample's "
                    f"norm would be that of another gradient than the sum adds. Use the method 'auto' without a memory "
                    f"budget, or draw from a key in the data"
                )

    return see


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point() or one.numel() == 0:
        return torch.equal(one, other)
    largest = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(one, other, rtol=SAME, atol=SAME * largest, equal_nan=True)
