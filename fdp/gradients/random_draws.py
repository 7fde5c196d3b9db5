"""Find the operations of a traced model that draw random numbers.

A second backward computes a model again. If that draws other numbers, the norm of a sample is of one gradient and the
sum adds another one, which nothing bounds. Draws of torch are found in a trace, also in branches and loops of
``torch.cond`` and its like; those of Python or numpy are not, nor are those of torch in a branch of Python that the
trace does not take. So on a CPU, in eager code, the outputs of blocks that run again are compared with those of the
first time, sample by sample.

    >>> with RandomDraws(found): model.loss(params, data)           # found: {"aten.bernoulli_.float"}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import tree
from fdp.cpu.promise import is_traced
from fdp.model import Model
from fdp.types import FdpError, Tree

SAME = 1e-3
"""Largest difference of a sample's two outputs, as a share of the largest value: rounding, with or without a graph."""
NEAR_ZERO = 1e-5
"""Differences of this size are rounding, however small the values: of a loss near 0."""


class RandomDraws(TorchDispatchMode):
    """Adds the names of operations that draw random numbers to ``found``."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: the mode watches and changes nothing. torch refuses FlexAttention under any other."""
        return True

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._look_inside(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs):
            self.found.add(str(func))
        return func(*args, **kwargs)

    def _look_inside(self, operator: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that calls functions, and look at what they do; one that it does not call is a draw."""
        inner: list[_Watching] = []

        def watch(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) or not callable(leaf):
                return leaf
            inner.append(_Watching(leaf, self.found))
            return inner[-1]

        args, kwargs = tree.map(watch, (args, kwargs))  # pyright: ignore
        result = operator(*args, **kwargs)
        if operator.name() == "flex_attention":
            _call_on_a_score(*args)
        if not inner or not all(each.called for each in inner):
            self.found.add(operator.name())
        return result


class _Watching:
    """A function of an operator; what it draws is added to ``found``."""

    def __init__(self, function: Callable[..., Any], found: set[str]) -> None:
        self.function, self.found, self.called = function, found, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        with RandomDraws(self.found):
            return self.function(*args, **kwargs)


def _call_on_a_score(
    query: Tensor, _key: Any, _value: Any, score_mod: Any, mask: Any, _scale: Any, _options: Any, *buffers: Any
) -> None:
    """Call the functions of FlexAttention, which it does not call in a trace, on the score of a query and a key."""
    of_score, of_mask = (*buffers, (), ())[:2]
    place = [torch.zeros((), dtype=torch.int32, device=query.device) for _ in range(4)]  # batch, head, query, key
    score_mod(query.new_zeros(()), *place, *of_score)
    mask[-1](*place, *of_mask)


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
    size = one.nan_to_num(0.0, 0.0, 0.0).abs()
    largest = size.flatten(1).amax(1).view(-1, *[1] * (one.ndim - 1)) if one.ndim > 1 else size
    close = (one - other).abs() <= SAME * largest + NEAR_ZERO
    return bool((close | (one == other) | (one.isnan() & other.isnan())).all())
