"""What a module holds besides what it is called with: written down before a call, and put back after it.

A call of a module may leave something behind: a table that has grown, an attribute that holds the last activations, a
buffer or a frozen parameter that is averaged over batches. What is left of samples would leave the computer without
noise, and what the next call computes would depend on who was seen before. So every call begins with the same state:

    with as_it_was(module): module(x)              attributes, lists and dictionaries of the module are put back
    tensors are not written into                   refused, by the operation that writes or by their version counters

    >>> kept = Kept(module)
    >>> module(x)
    >>> kept.restore_values()                      # the names of the tensors that were written, now as they were
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import resolve_name

from fdp.foreign.placeholders import Noting, Placeholder
from fdp.types import FdpError

PARTS = ("_parameters", "_buffers", "_modules")
MACHINERY = frozenset(vars(nn.Module())) - {*PARTS, "training"}
"""Attributes of every module that are torch's own: hooks and flags."""
VALUES = (str, bytes, int, float, complex, type, types.ModuleType, torch.dtype, torch.device, functools.partial)
CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
LONG = 4096
"""Entries above which a list or dictionary is written down, and not those in it."""

Holder = dict[Any, Any] | list[Any] | set[Any]


class Place(NamedTuple):
    """Something that can be changed: the attributes of an object, or a list, dictionary or set; and what it held."""

    name: str
    holder: Holder
    held: Holder

    def changed(self) -> list[str]:
        """The names of entries that are other ones now."""
        if isinstance(self.holder, dict):
            now, then = self.holder, self.held
            assert isinstance(then, dict)
            if len(now) == len(then) and all([now.get(key, MISSING) is value for key, value in then.items()]):
                return []
            keys = [key for key in {**then, **now} if now.get(key, MISSING) is not then.get(key, MISSING)]
            return [_joined(self.name, key) for key in keys] or [self.name]
        if isinstance(self.holder, list) and isinstance(self.held, list):
            same = len(self.holder) == len(self.held) and all([a is b for a, b in zip(self.holder, self.held)])
            return [] if same else [self.name]
        return [] if self.holder == self.held else [self.name]

    def restore(self) -> None:
        if isinstance(self.holder, list):
            self.holder[:] = self.held
            return
        self.holder.clear()
        self.holder.update(self.held)  # pyright: ignore[reportArgumentType]


MISSING = object()


class State(NamedTuple):
    """All places that can be reached from a module, and all tensors in them, by name."""

    places: list[Place]
    tensors: dict[str, Tensor]

    def restore(self) -> list[str]:
        """Put back what is in other places now; return its names."""
        names: list[str] = []
        for place in self.places:
            if found := place.changed():
                place.restore()
                names += found
        return names


def state_of(module: nn.Module) -> State:
    """All that a module holds: in itself, in its parts, and in what their attributes refer to."""
    places: list[Place] = []
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", module)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, Tensor):
            tensors.setdefault(name, value)
            continue
        if value is None or isinstance(value, (*VALUES, *CODE)) or id(value) in seen:
            continue
        if isinstance(value, (Placeholder, Noting)):  # ours: what they note is what they are for
            continue
        seen.add(id(value))
        if isinstance(value, tuple):
            inner: Any = enumerate(value)
        elif isinstance(value, (dict, list, set)):
            places.append(Place(name, value, type(value)(value) if type(value) in (dict, list, set) else _copy(value)))
            inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        else:
            own = getattr(value, "__dict__", None)
            if type(own) is not dict:
                continue
            places.append(Place(name, own, dict(own)))
            inner = [(key, item) for key, item in own.items() if key not in MACHINERY]
        if not hasattr(value, "__len__") or isinstance(value, nn.Module) or len(value) <= LONG:
            todo += [(_joined(name, key), item) for key, item in inner]
    return State(places, tensors)


def _copy(value: Holder) -> Holder:
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else set(value)


def _joined(name: str, key: Any) -> str:
    if key in PARTS:
        return name
    return f"{name}.{key}" if name else str(key)


@contextmanager
def as_it_was(module: nn.Module) -> Iterator[State]:
    """Run what follows, then put back whatever of the module's attributes, lists and dictionaries it changed."""
    state = state_of(module)
    try:
        yield state
    finally:
        state.restore()


class Kept:
    """A module's state with the values of all its tensors, which :meth:`restore_values` puts back bit for bit."""

    def __init__(self, module: nn.Module):
        self.state = state_of(module)
        with torch.no_grad():
            real = {name: leaf for name, leaf in self.state.tensors.items() if _has_values(leaf)}
            self.values = [(name, leaf, leaf.detach().clone()) for name, leaf in real.items()]

    def restore_values(self) -> list[str]:
        """Put back attributes and values; return the names of tensors whose values were others."""
        self.state.restore()
        names: list[str] = []
        with torch.no_grad():
            for name, leaf, value in self.values:
                if not _equal(leaf, value):
                    names.append(name)
                    leaf.data = value
        return names


def _has_values(leaf: Tensor) -> bool:
    return not isinstance(leaf, FakeTensor) and leaf.device.type != "meta"


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout != torch.strided or one.is_quantized:
        return torch.equal(one.to_dense(), other.to_dense())
    if bool((one == other).all()):
        return True
    a, b = one.detach().contiguous().flatten(), other.contiguous().flatten()
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class Versions:
    """The version counters of a module's tensors: every write into one, or into a view of it, counts it up."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors
        self.before = {name: _version(leaf) for name, leaf in tensors.items()}

    @functools.cached_property
    def storages(self) -> dict[int, str]:
        """The names of tensors by where their values are."""
        found = {storage_of(leaf): name for name, leaf in self.tensors.items()}
        return {storage: name for storage, name in found.items() if storage is not None}

    def check(self) -> None:
        """Refuse a tensor that was written into."""
        for name, leaf in self.tensors.items():
            if _version(leaf) != self.before[name]:
                raise written(name, "an operation in place")

    def check_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an operation that is about to write into one of them, or into a view of it."""
        into = kwargs["out"] if kwargs.get("out") is not None else args[0] if args else None
        for leaf in into if isinstance(into, (list, tuple)) else (into,):
            if isinstance(leaf, Tensor) and (name := self.storages.get(storage_of(leaf) or 0)) is not None:
                raise written(name, resolve_name(func) or getattr(func, "__name__", "an operation in place"))


def written(name: str, operation: str) -> FdpError:
    """The refusal of a module that keeps something of what it is called with."""
    return FdpError(
        f"{name}: the module changes this tensor when it is called (by {operation}): it would hold what samples were "
        f"seen, without noise, and what is computed would depend on who was seen before. Put the part that does in "
        f"eval(), or take the write out of its forward() and do it between the steps"
    )


def storage_of(leaf: Tensor) -> int | None:
    """Where a tensor's values are; None of one that has no place of its own, inside of a transform."""
    try:
        return leaf.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _version(leaf: Tensor) -> int:
    return -1 if leaf.is_inference() else leaf._version
