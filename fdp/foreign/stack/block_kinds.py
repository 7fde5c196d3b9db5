"""Whether two modules compute the same function of their parameters, found by writing down every operation.

    same(a, b)  <=  the tapes of a and b are equal:   op_k(names of tensors, numbers), k = 1, 2, ...

Layers of a model carry numbers of their own (their place in the stack, a window, a scale by depth) which may or may
not matter. A tape holds what they do to tensors and all numbers that enter, on tensors without memory, so that layers
with equal tapes and equal buffers are one function, and are compiled once.

    >>> tape(module, shapes, args, kwargs) == tape(other, shapes, args, kwargs)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import tree
from fdp.foreign.layout import NotAStack
from fdp.foreign.module_state import as_it_was
from fdp.types import FdpError

FEW = 64
"""Elements up to which a constant is compared by its values."""


class Tape(NamedTuple):
    """Every operation of a run as a line; the names of the tensors used, and of those written into; what was returned,
    without values."""

    lines: tuple[str, ...]
    used: frozenset[str]
    out: Any
    written: frozenset[str]


@contextmanager
def refusing_branches(part: str) -> Iterator[None]:
    """Refuse a module that looks at values to decide what to do: without values nothing is known of it.

    So also one that fails without its layers; what it says may show the data, and is left to the traceback.
    """
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise NotAStack(
            f"{part}: {error} has a shape or a branch that depends on the data (such as experts that are skipped, or a "
            f"rotary table of rope_type 'dynamic'), so that the layer cannot be one of a stack",
            then=", its leaves in materialize=(...)",
        ) from error
    except FdpError:
        raise
    except Exception as error:
        raise NotAStack(
            f"{part}: expected a module that runs with placeholders for its layers, which hand on the hidden state as "
            f"it is, got {type(error).__name__}; its layers may change the shape of the hidden state"
        ) from error


def tape(module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tape:
    """What ``module`` does with ``tensors`` (parameters and buffers, by name) and its arguments.

    Nothing is computed: of tensors only shapes, dtypes and devices are read.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faked: dict[int, Tensor] = {}

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in faked:
            with mode:
                faked[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return faked[id(leaf)]

    inputs = {name: fake(leaf) for name, leaf in tensors.items()}
    args, kwargs = tree.map(fake, list(args)), tree.map(fake, kwargs)
    lines = _Lines(inputs, tree.leaves([args, kwargs]))
    with refusing_branches(type(module).__name__), as_it_was(module), mode, lines, torch.no_grad():
        out = functional_call(module, inputs, tuple(args), kwargs, tie_weights=False)
    last = f"return {lines.named(out)}"
    return Tape((*lines.lines, last), frozenset(inputs) & lines.used, out, frozenset(lines.written))


class _Lines(TorchDispatchMode):
    """One line per operation; tensors are called by the name they were given or the number of the line they are of."""

    def __init__(self, inputs: Mapping[str, Tensor], arguments: list[Any]):
        super().__init__()
        self.lines: list[str] = []
        self.known: list[Tensor] = []  # kept alive, so that no name is given twice
        self.names: dict[int, str] = {}
        self.used: set[str] = set()
        self.written: set[str] = set()
        for name, leaf in inputs.items():
            self._name(leaf, name)
        for i, leaf in enumerate(arguments):
            self._name(leaf, f"argument {i}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = f"{func}({self.named(list(args))}, {self.named(kwargs or {})})"
        schema = getattr(func, "_schema", None)  # operators of higher order have none
        for argument, value in zip([] if schema is None else schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self.written.add(self.named(value))
        out = func(*args, **(kwargs or {}))
        for i, leaf in enumerate(out if isinstance(out, tuple | list) else [out]):
            self._name(leaf, f"{len(self.lines)}:{i}")
        self.lines.append(called)
        return out

    def named(self, value: Any) -> str:
        if isinstance(value, Tensor):
            name = self.names.get(id(value)) or _constant(value)
            self.used.add(name)
            return name
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {self.named(item)}" for key, item in value.items()) + "}"
        if isinstance(value, tuple | list):
            return "[" + ", ".join(self.named(item) for item in value) + "]"
        return repr(value)

    def _name(self, leaf: Any, name: str) -> None:
        if isinstance(leaf, Tensor):
            self.known.append(leaf)
            self.names.setdefault(id(leaf), name)


def _constant(value: Tensor) -> str:
    """A tensor from nowhere: by its values or, if it has none or many, by a name that no other has."""
    known = not isinstance(value, FakeTensor) and value.device.type != "meta" and value.numel() <= FEW
    try:
        return f"constant {value.tolist()}" if known else f"constant at {id(value)}"
    except RuntimeError:  # a buffer that a fake tensor shares its storage with has no values either
        return f"constant at {id(value)}"
