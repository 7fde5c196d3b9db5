"""Record the state of a module before a call and restore it afterwards.

A call may leave something behind: a table that has grown, an attribute with the last activations, a buffer or frozen
parameter that averages over batches. It would hold samples without noise, and the next call would depend on who was
seen before. So every call starts from the same state:

    with restore_after(module): module(x)          attributes, lists and dictionaries are restored
    writes into tensors                            are refused, by operation or by version counter

    >>> backup = ModuleBackup(module)
    >>> module(x)
    >>> backup.restore_values()                    # names of the tensors that were written, now restored
"""

from __future__ import annotations

import functools
import logging
import operator
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import resolve_name

from fdp.foreign.placeholders import Placeholder, RecordingHead
from fdp.types import FdpError

REGISTRIES = ("_parameters", "_buffers", "_modules")
TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {*REGISTRIES, "training"}
"""Attributes that torch gives to every module: hooks and flags."""
PLAIN_TYPES = (str, bytes, int, float, complex, type, types.ModuleType, torch.dtype, torch.device, functools.partial)
CODE_TYPES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
MAX_ENTRIES = 4096
"""Containers with more entries are recorded, but their entries are not searched."""

MACHINERY = ("torch._dynamo.", "torch.amp.", "torch.autograd.")
"""Modules of torch whose objects note how functions are called, and nothing of what they are called with."""
CONSTANT_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types whose equal values are the same value."""

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


class ContainerState(NamedTuple):
    """A mutable container (an object's attributes, a list, a dictionary, ...) and a copy of what it ``held``."""

    name: str
    holder: Container
    held: Container

    def changed(self) -> list[str]:
        """Return the names of the entries that have changed."""
        if isinstance(self.holder, dict):
            now, then = self.holder, self.held
            assert isinstance(then, dict)
            if len(now) == len(then) and all([now.get(key, MISSING) is value for key, value in then.items()]):
                return []
            keys = [key for key in {**then, **now} if not same_value(now.get(key, MISSING), then.get(key, MISSING))]
            return [join_names(self.name, key) for key in keys]
        if isinstance(self.holder, (list, deque)) and isinstance(self.held, (list, deque)):
            if len(self.holder) != len(self.held):
                return [self.name]
            same = all(map(operator.is_, self.holder, self.held)) or all(map(same_value, self.holder, self.held))
            return [] if same else [self.name]
        return [] if self.holder == self.held else [self.name]

    def restore(self) -> None:
        if isinstance(self.holder, list):
            self.holder[:] = self.held
            return
        self.holder.clear()
        if isinstance(self.holder, deque):
            self.holder.extend(self.held)
        else:
            self.holder.update(self.held)  # pyright: ignore[reportArgumentType]


MISSING = object()


def same_value(one: Any, other: Any) -> bool:
    """Return True if two values are one object, or equal constants: to assign the same number again changes nothing."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return isinstance(one, CONSTANT_TYPES) and one == other


class ModuleState(NamedTuple):
    """All containers that can be reached from a module, and all tensors and arrays in them, by name."""

    places: list[ContainerState]
    tensors: dict[str, Tensor]
    arrays: dict[str, np.ndarray]

    def restore(self) -> list[str]:
        """Restore the containers that have changed; return the names of the changed entries."""
        names: list[str] = []
        for place in self.places:
            if found := place.changed():
                place.restore()
                names += found
        return names


def state_of(module: nn.Module | dict[str, Any]) -> ModuleState:
    """Record everything that a module holds: in itself, in its parts, and in what their attributes refer to.

    A dictionary stands for the objects in it.
    """
    places: list[ContainerState] = []
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, np.ndarray] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", module)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, Tensor):
            tensors.setdefault(name, value)
            continue
        if isinstance(value, np.ndarray):
            arrays.setdefault(name, value)
            continue
        if value is None or isinstance(value, (*PLAIN_TYPES, *CODE_TYPES)) or id(value) in seen:
            continue
        if is_machinery(value):
            continue
        seen.add(id(value))
        if isinstance(value, tuple):
            inner: Any = enumerate(value)
        elif isinstance(value, (dict, list, set, deque)):
            places.append(ContainerState(name, value, _copy_container(value)))
            inner = value.items() if isinstance(value, dict) else () if isinstance(value, set) else enumerate(value)
        else:
            own = getattr(value, "__dict__", None)
            if type(own) is not dict:
                continue
            places.append(ContainerState(name, own, dict(own)))
            inner = [(key, item) for key, item in own.items() if key not in TORCH_ATTRIBUTES]
        if not hasattr(value, "__len__") or isinstance(value, nn.Module) or len(value) <= MAX_ENTRIES:
            todo += [(join_names(name, key), item) for key, item in inner]
    return ModuleState(places, tensors, arrays)


def is_machinery(value: Any) -> bool:
    """Return True for an object that may change at every call and holds nothing of a sample.

    Placeholders are ours, and meant to record something. A logger remembers which levels are on.
    """
    if isinstance(value, nn.Module):
        return isinstance(value, (Placeholder, RecordingHead))
    return isinstance(value, logging.Logger) or (type(value).__module__ or "").startswith(MACHINERY)


def _copy_container(value: Container) -> Container:
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def join_names(name: str, key: Any) -> str:
    if key in REGISTRIES:
        return name
    return f"{name}.{key}" if name else str(key)


@contextmanager
def restore_after(module: nn.Module) -> Iterator[ModuleState]:
    """Restore all attributes, lists and dictionaries of the module on exit."""
    state = state_of(module)
    try:
        yield state
    finally:
        state.restore()


class ModuleBackup:
    """A module's state with a copy of all its values, which :meth:`restore_values` restores bit for bit."""

    def __init__(self, module: nn.Module | dict[str, Any]):
        self.state = state_of(module)
        with torch.no_grad():
            real = {name: leaf for name, leaf in self.state.tensors.items() if _has_values(leaf)}
            self.values = [(name, leaf, leaf.detach().clone()) for name, leaf in real.items()]
        self.arrays = [(name, array, array.copy()) for name, array in self.state.arrays.items()]

    def restore_values(self) -> list[str]:
        """Restore attributes and values; return the names of the tensors and arrays whose values had changed."""
        self.state.restore()
        names: list[str] = []
        with torch.no_grad():
            for name, leaf, value in self.values:
                if not _bitwise_equal(leaf, value):
                    names.append(name)
                    leaf.data = value
        for name, array, value in self.arrays:
            if array.shape != value.shape or array.tobytes() != value.tobytes():
                names.append(name)
                array[...] = value
        return names


def _has_values(leaf: Tensor) -> bool:
    return not isinstance(leaf, FakeTensor) and leaf.device.type != "meta"


def _bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if all bits are equal, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout != torch.strided or one.is_quantized:
        return torch.equal(one.to_dense(), other.to_dense())
    if bool((one == other).all()):
        return True
    a, b = one.detach().contiguous().flatten(), other.contiguous().flatten()
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class VersionCounters:
    """The version counters of a module's tensors, which every write into a tensor or a view of it increments."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors
        self.before = {name: _version(leaf) for name, leaf in tensors.items()}

    @functools.cached_property
    def storages(self) -> dict[int, str]:
        """The names of tensors by the id of their storage."""
        found = {storage_id(leaf): name for name, leaf in self.tensors.items()}
        return {storage: name for storage, name in found.items() if storage is not None}

    def written(self) -> list[str]:
        """Return the names of the tensors that were written into."""
        return [name for name, leaf in self.tensors.items() if _version(leaf) != self.before[name]]

    def check(self) -> None:
        """Refuse a tensor that was written into."""
        if names := self.written():
            raise write_error(names[0], "an operation in place")

    def check_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an operation that is about to write into one of the tensors, or into a view of one."""
        into = kwargs["out"] if kwargs.get("out") is not None else args[0] if args else None
        for leaf in into if isinstance(into, (list, tuple)) else (into,):
            if isinstance(leaf, Tensor) and (name := self.storages.get(storage_id(leaf) or 0)) is not None:
                raise write_error(name, resolve_name(func) or getattr(func, "__name__", "an operation in place"))


class WriteError(FdpError):
    """A module writes into its own tensors when it is called."""


def write_error(name: str, operation: str) -> WriteError:
    """Return the error for a module that writes into its own tensors when it is called."""
    return WriteError(
        f"{name}: the module changes this tensor when it is called (by {operation}): it would record the samples "
        f"without noise, and results would depend on earlier samples. Put the part that writes in eval(), or move the "
        f"write out of its forward() and do it between the steps"
    )


def storage_id(leaf: Tensor) -> int | None:
    """Return the id of a tensor's storage, or None for a tensor inside a transform, which has no storage of its own."""
    try:
        return leaf.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _version(leaf: Tensor) -> int:
    return -1 if leaf.is_inference() else leaf._version
