"""Refuse a loss that remembers the samples it is called with.

A loss may be an object with buffers, or a function with variables of its own. What it writes there would hold samples
without noise, and later losses would depend on who was seen before:

    loss.seen += one_hot(targets).sum(0)            a tensor, an attribute, a list or a variable that has changed
                                                    when the loss returns is restored, if it can be, and refused

The search follows the code of the user, into the functions, methods and globals that it names, and stops at libraries.

    >>> finish = without_memory(loss)               # the same function; an error if it changes something
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdp.foreign.module_state import (
    MAX_ENTRIES,
    MISSING,
    TORCH_ATTRIBUTES,
    ModuleBackup,
    VersionCounters,
    is_machinery,
    join_names,
    same_value,
    state_of,
)
from fdp.types import FdpError

LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "fdp"}
"""Packages whose globals and classes are not searched; nor are the classes of other packages that are installed."""
CONTAINERS = (dict, list, set, tuple, deque)


class Variable(NamedTuple):
    """A variable that a call may assign to: of the function around it, of a class, in a slot, or a global one."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


class Reach(NamedTuple):
    """The objects that a function can reach by itself, by name, and the variables that it may assign to."""

    objects: dict[str, Any]
    variables: list[Variable]


def without_memory(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, a loss or a function that calls a module; a call that changes what it can reach is an error.

    Guarantees:
      - attributes, lists, dictionaries and variables have their old values after every call;
      - a tensor that was written into is an error. (What torch.compile runs was called without it before.)
    """
    objects, variables = reach_of(call)
    if not objects and not variables:
        return call

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        state, held = state_of(objects), [variable.read() for variable in variables]
        versions = VersionCounters(state.tensors)
        result = call(*args, **kwargs)
        changed = [*versions.written(), *state.restore()]
        for variable, value in zip(variables, held):
            if not same_value(variable.read(), value):
                variable.write(value)
                changed.append(variable.name)
        if changed:
            raise _memory_error(changed)
        return result

    return checked


@contextmanager
def refuse_writes(*calls: Callable[..., Any]) -> Iterator[None]:
    """Compare all values that the calls can reach before and after: writes that torch does not count are refused too.

    Such are writes through ``tensor.data``, and those into arrays of NumPy.
    """
    reached = [reach_of(call).objects.items() for call in calls]
    backup = ModuleBackup({f"{number} {name}": each for number, one in enumerate(reached) for name, each in one})
    try:
        yield
    except BaseException:
        backup.restore_values()
        raise
    if changed := backup.restore_values():
        raise _memory_error([name.partition(" ")[2] for name in changed])


class Rewind:
    """The state of everything that a function can reach, as it is now; a call puts it back."""

    def __init__(self, call: Callable[..., Any]):
        reach = reach_of(call)
        self._backup = ModuleBackup(reach.objects)
        self._variables = [(variable, variable.read()) for variable in reach.variables]

    def __call__(self) -> None:
        self._backup.restore_values()
        for variable, value in self._variables:
            if not same_value(variable.read(), value):
                variable.write(value)


def _memory_error(changed: list[str]) -> FdpError:
    return FdpError(
        f"loss: expected one that depends on the outputs and the targets alone, got one that changes "
        f"{sorted(set(changed))[:3]} when it is called: it would record the samples without noise, and later losses "
        f"would depend on earlier samples. Compute it anew at every call, or give it as an entry of the data. (If it "
        f"is a constant that the first call computes, compute it before training)"
    )


def reach_of(call: Callable[..., Any]) -> Reach:
    """Return what a call reaches through variables, defaults, attributes and methods, and through the globals it names.

    Of libraries, only what their objects hold is searched.
    """
    found = Reach({}, [])
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("loss", call)]
    held: set[int] = set()  # parts of objects, which are searched, and whose state is that of the object
    while todo:
        name, value = todo.pop()
        if id(value) in seen or not _may_hold(value):
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            todo += _search_function(name, value, found)
        elif isinstance(value, types.MethodType):
            todo += [(name, value.__self__), (name, value.__func__)]
        elif isinstance(value, functools.partial):
            todo += [(name, value.func), *((name, part) for part in value.args), *value.keywords.items()]
        else:
            if id(value) not in held:
                found.objects[_free_name(name, found.objects)] = value
            for slot in _slots_of(type(value)):
                read = functools.partial(getattr, value, slot, MISSING)
                found.variables.append(
                    Variable(join_names(name, slot), read, functools.partial(_set_attribute, value, slot))
                )
                todo.append((join_names(name, slot), read()))
            parts = [(join_names(name, key), part) for key, part in _parts(value)]
            held.update(id(part) for _, part in parts)
            todo += parts
            todo += _search_class(type(value), found)
    return found


def _may_hold(value: Any) -> bool:
    """Return True if a value may hold something that a call can change."""
    if isinstance(value, (Tensor, np.ndarray, functools.partial, types.MethodType, *CONTAINERS)):
        return True
    if isinstance(value, (type, types.ModuleType)) or is_machinery(value):
        return False
    return hasattr(value, "__dict__") or bool(_slots_of(type(value)))


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """Return the attributes or entries of an object, by name or number; not what it holds in slots."""
    if isinstance(value, (Tensor, np.ndarray)):
        return []
    if not isinstance(value, CONTAINERS):
        own = getattr(value, "__dict__", {})
        return [(key, part) for key, part in own.items() if key not in TORCH_ATTRIBUTES]
    entries = value.items() if isinstance(value, dict) else enumerate(() if isinstance(value, set) else value)
    return list(entries) if len(value) <= MAX_ENTRIES else []


def _search_function(name: str, function: types.FunctionType, found: Reach) -> list[tuple[str, Any]]:
    """Return what a function names, and add the variables that it may assign to."""
    todo: list[tuple[str, Any]] = []
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if _is_filled(cell):
            write = functools.partial(setattr, cell, "cell_contents")
            found.variables.append(Variable(variable, functools.partial(getattr, cell, "cell_contents"), write))
            todo.append((variable, cell.cell_contents))
    todo += [(name, default) for default in function.__defaults__ or ()]
    todo += list((function.__kwdefaults__ or {}).items())
    if _in_libraries(function.__globals__.get("__name__")):  # a wrapper has the name of what it wraps
        return todo
    space, names = function.__globals__, _names_in(function.__code__)
    for variable in sorted(names["STORE_GLOBAL"]):
        read = functools.partial(space.get, variable, MISSING)
        found.variables.append(Variable(variable, read, functools.partial(_assign, space, variable)))
    for variable in sorted(names["LOAD_GLOBAL"] & space.keys()):
        value = space[variable]
        if isinstance(value, types.ModuleType) and not _in_libraries(value.__name__):
            attributes = (names["LOAD_ATTR"] | names["LOAD_METHOD"]) & vars(value).keys()
            todo += [(f"{variable}.{key}", vars(value)[key]) for key in sorted(attributes)]
        elif isinstance(value, type):
            todo += _search_class(value, found)
        else:
            todo.append((variable, value))
    return [*todo, (function.__name__, vars(function))]


def _search_class(kind: type, found: Reach) -> list[tuple[str, Any]]:
    """Return the methods of a class and what it holds for all of its objects; add the variables among it."""
    todo: list[tuple[str, Any]] = []
    bases = _own_bases(kind)
    known, held = {variable.name for variable in found.variables}, set[str]()
    for base in bases:
        for key, part in vars(base).items():
            if (method := _function_of(part)) is not None:
                todo.append((f"{base.__qualname__}.{key}", method))
            elif not key.startswith("__"):
                held.add(key)
                todo.append((f"{base.__qualname__}.{key}", part))
    for base, key in itertools.product(bases, sorted(held)):  # a class may be given what it inherits so far
        if (name := f"{base.__qualname__}.{key}") not in known:
            read = functools.partial(vars(base).get, key, MISSING)
            found.variables.append(Variable(name, read, functools.partial(_set_attribute, base, key)))
    return todo


def _own_bases(kind: type) -> list[type]:
    """Return the class and its bases, without those of libraries."""
    return [base for base in kind.__mro__ if not (_in_libraries(base.__module__) or _is_installed(base))]


def _slots_of(kind: type) -> list[str]:
    """Return the attributes that objects of a class hold in ``__slots__``."""
    members = (vars(base).items() for base in _own_bases(kind))
    return [name for name, part in itertools.chain(*members) if isinstance(part, types.MemberDescriptorType)]


def _function_of(part: Any) -> types.FunctionType | None:
    """Return the function of a method of any kind; None for another attribute of a class."""
    part = part.fget if isinstance(part, property) else getattr(part, "__func__", part)
    return part if isinstance(part, types.FunctionType) else None


def _names_in(code: types.CodeType) -> defaultdict[str, set[str]]:
    """Return the names that code, and the functions in it, load and store, by the operation of Python."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for each in dis.get_instructions(code):
        if isinstance(each.argval, str):
            names[each.opname].add(each.argval)
        elif isinstance(each.argval, types.CodeType):
            for operation, more in _names_in(each.argval).items():
                names[operation] |= more
    return names


def _in_libraries(module: str | None) -> bool:
    return (module or "torch").partition(".")[0] in LIBRARIES


def _is_installed(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _set_attribute(holder: Any, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


def _assign(space: dict[str, Any], name: str, value: Any) -> None:
    space[name] = value


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that has no value yet
        return False


def _free_name(name: str, taken: dict[str, Any]) -> str:
    return name if name not in taken else f"{name} {len(taken) + 1}"
