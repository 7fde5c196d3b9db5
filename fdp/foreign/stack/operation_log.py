"""Record every operation of a module as text, to find out whether two modules compute the same function.

    same(a, b)  <=  the logs of a and b are equal:   op_k(names of tensors, numbers), k = 1, 2, ...

Layers carry numbers of their own (their position in the stack, a window, a scale by depth) which may or may not matter.
A log holds every operation on tensors and all numbers that enter it, recorded on shape-only tensors. Layers with equal
logs and equal buffers are one function, and are compiled once.

    >>> log_operations(module, shapes, args, kwargs) == log_operations(other, shapes, args, kwargs)
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
from fdp.foreign.find_stack import NotAStack
from fdp.foreign.module_state import restore_after
from fdp.types import FdpError

MAX_CONSTANT_ELEMENTS = 64
"""Constants up to this size are compared by their values."""


class OperationLog(NamedTuple):
    """The operations of one call, one line each; names of the tensors read and written; the result without values."""

    lines: tuple[str, ...]
    used: frozenset[str]
    out: Any
    written: frozenset[str]


@contextmanager
def refuse_branches(part: str) -> Iterator[None]:
    """Turn errors of a module that cannot run on shape-only tensors, or with placeholders, into ``NotAStack``.

    Error messages of the module may show data, so they are left to the traceback.
    """
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise NotAStack(
            f"{part}: {error} has a shape or a branch that depends on the data (such as skipped experts, or a rotary "
            f"table of rope_type 'dynamic'), so that the layer cannot be part of a stack",
            then=", its leaves in materialize=(...)",
        ) from error
    except FdpError:
        raise
    except Exception as error:
        raise NotAStack(
            f"{part}: expected a module that runs with placeholders for its layers, which return the hidden state "
            f"unchanged, got {type(error).__name__}; its layers may change the shape of the hidden state"
        ) from error


def log_operations(
    module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OperationLog:
    """Return the log of ``module`` called with ``tensors`` (parameters and buffers by name) and its arguments.

    Nothing is computed: only shapes, dtypes and devices of the tensors are read.
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
    lines = _LogMode(inputs, tree.leaves([args, kwargs]))
    with refuse_branches(type(module).__name__), restore_after(module), mode, lines, torch.no_grad():
        out = functional_call(module, inputs, tuple(args), kwargs, tie_weights=False)
    last = f"return {lines.named(out)}"
    return OperationLog((*lines.lines, last), frozenset(inputs) & lines.used, out, frozenset(lines.written))


class _LogMode(TorchDispatchMode):
    """A mode that writes one line per operation, naming tensors by their given name or by the line that made them."""

    def __init__(self, inputs: Mapping[str, Tensor], arguments: list[Any]):
        super().__init__()
        self.lines: list[str] = []
        self.known: list[Tensor] = []  # kept alive, so that no two tensors have the same id
        self.names: dict[int, str] = {}
        self.used: set[str] = set()
        self.written: set[str] = set()
        for name, leaf in inputs.items():
            self._name(leaf, name)
        for i, leaf in enumerate(arguments):
            self._name(leaf, f"argument {i}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = f"{func}({self.named(list(args))}, {self.named(kwargs or {})})"
        schema = getattr(func, "_schema", None)  # higher-order operators have none
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
    """Describe a tensor that no operation made: by its values or, if it has none or many, by a unique name."""
    known = not isinstance(value, FakeTensor) and value.device.type != "meta" and value.numel() <= MAX_CONSTANT_ELEMENTS
    try:
        return f"constant {value.tolist()}" if known else f"constant at {id(value)}"
    except RuntimeError:  # a buffer that shares its storage with a fake tensor has no values either
        return f"constant at {id(value)}"
