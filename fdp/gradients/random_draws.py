"""Find the operations of a traced model that draw random numbers.

A second backward computes a model again. If that draws other numbers, the norm of a sample is of one gradient and the
sum adds another one, which nothing bounds.

    >>> with RandomDraws(found): model.loss(params, data)           # found: {"aten.bernoulli_.float"}
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RandomDraws(TorchDispatchMode):
    """Adds the names of operations that draw random numbers to ``found``."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs or {}):
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for attention that could draw random numbers, and does not: its ``dropout_p`` is 0."""
    names = [argument.name for argument in func._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    return "dropout_p" in names and (defaults | dict(zip(names, args)) | kwargs)["dropout_p"] == 0
