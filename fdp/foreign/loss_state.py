"""Refuse a loss that remembers the samples it is called with.

A loss may be an object with buffers, or a function with variables of its own. What it writes there would hold samples
without noise, and later losses would depend on who was seen before:

    loss.seen += one_hot(targets).sum(0)            a tensor, an attribute, a list or a variable that has changed
                                                    when the loss returns is restored, if it can be, and refused

    >>> finish = without_memory(loss)               # the same function; an error if it changes something
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fdp.foreign.module_state import VersionCounters, state_of
from fdp.types import FdpError


class Variable(NamedTuple):
    """A variable that a function shares with the function around it."""

    name: str
    cell: types.CellType


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
        state, held = state_of(objects), [variable.cell.cell_contents for variable in variables]
        versions = VersionCounters(state.tensors)
        result = call(*args, **kwargs)
        changed = [*versions.written(), *state.restore()]
        for (name, cell), value in zip(variables, held):
            if cell.cell_contents is not value:
                cell.cell_contents = value
                changed.append(name)
        if changed:
            raise FdpError(
                f"loss: expected one that depends on the outputs and the targets alone, got one that changes "
                f"{sorted(set(changed))[:3]} when it is called: it would record the samples without noise, and later "
                f"losses would depend on earlier samples. Compute it anew at every call, or give it as an entry of "
                f"the data"
            )
        return result

    return checked


def reach_of(call: Callable[..., Any]) -> Reach:
    """Return what a function reaches through its variables, its defaults and, outside torch and fdp, its globals."""
    found = Reach({}, [])
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("loss", call)]
    while todo:
        name, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            cells = [Variable(*each) for each in zip(value.__code__.co_freevars, value.__closure__ or ())]
            filled = [variable for variable in cells if _is_filled(variable.cell)]
            found.variables.extend(filled)
            todo += [(variable.name, variable.cell.cell_contents) for variable in filled]
            todo += [(name, default) for default in value.__defaults__ or ()]
            todo += list((value.__kwdefaults__ or {}).items())
            todo += _globals_of(value)
        elif isinstance(value, types.MethodType):
            todo += [(name, value.__self__), (name, value.__func__)]
        elif isinstance(value, functools.partial):
            todo += [(name, value.func), *((name, part) for part in value.args), *value.keywords.items()]
        elif isinstance(value, (Tensor, dict, list, set, tuple)) or (
            hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType))
        ):
            found.objects[_free_name(name, found.objects)] = value
            todo += [(key, part) for key, part in getattr(value, "__dict__", {}).items() if callable(part)]
    return found


def _globals_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the global tensors, containers, modules and functions that a function names."""
    if function.__module__ is None or function.__module__.split(".")[0] in ("torch", "fdp"):
        return []
    kinds = (Tensor, dict, list, set, nn.Module, types.FunctionType)
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return [(name, value) for name, value in named.items() if isinstance(value, kinds)]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that has no value yet
        return False


def _free_name(name: str, taken: dict[str, Any]) -> str:
    return name if name not in taken else f"{name} {len(taken) + 1}"
