"""Give your own operation, a function of samples and one parameter, a per-sample rule.

>>> @operation
... def gated(x, weight): ...
>>> @rule(gated, example=(x, weight))             # compared with vmap(grad) at once
... def record(x, g, shape): return Pair(rows(g), rows(x), shape)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode

from fdp.foreign.uses.dispatch import RULES, apply_rule
from fdp.foreign.uses.operands import no_rule_error
from fdp.foreign.uses.watch import WatchMode
from fdp.gradients.rules import Record, Rule, check_rule


def operation(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make ``function(x, weight, **options)`` visible while parameters are watched. It then needs a rule."""
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def visible(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        mode = _get_current_function_mode()
        if not isinstance(mode, WatchMode) or not (x in mode.trace.tracked or weight in mode.trace.tracked):
            return function(x, weight, **options)
        with torch._C.DisableTorchFunction():
            if name not in RULES:
                raise no_rule_error(name, (mode.trace.resolve(x), mode.trace.resolve(weight)))
            return apply_rule(mode.trace, RULES[name], mode.trace.resolve(x), mode.trace.resolve(weight), **options)

    return visible


def rule(
    function: Callable[..., Tensor], *, example: tuple[Tensor, Tensor] | None = None, **options: Any
) -> Callable[[Rule | Callable[..., Record]], Rule]:
    """Register how uses of ``function(x, weight, **options)`` are recorded: a ``Rule``, or its ``record`` function.

    ``function`` was made by :func:`operation`, or is an operator of ``torch.ops``. With an ``example``, an input and a
    weight (and options), the rule is compared with ``vmap(grad)`` at once, and refused if it differs.
    """

    def register(how: Rule | Callable[..., Record]) -> Rule:
        own = getattr(function, "__wrapped__", None)
        made = how if isinstance(how, Rule) else Rule(getattr(function, "__name__", "own"), own or function, how)
        if example is not None:
            check_rule(made, *example, **options)
        RULES[function if own is None else f"{own.__module__}.{own.__qualname__}"] = made
        return made

    return register
