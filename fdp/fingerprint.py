"""A fingerprint of settings, folded into keys so that two runs whose fingerprints differ share no noise.

    fingerprint = SHA-256 of every number, name and text in the settings, through tuples, dataclasses and functions

Adding the same noise to two different sums reveals their difference. A root key that is used twice, such as a fixed
seed, must not do that, so everything that changes a sum (clipping, noise, optimizer, model) is folded into the key of
its noise. Optimizers, schedules and clipping styles are functions, told apart by the values they have captured. What a
fingerprint cannot see (docs/guarantees.md) is not told apart: a run without a seed has a key of its own.

**Names are part of the fingerprint**: renaming a function, a captured variable, a class or a field in ``optimizers``,
``privacy``, ``models`` or K-FAC's config changes the noise of a given seed.

    >>> fingerprint(sgd(0.1), flat(max_norm=1.0)) == fingerprint(sgd(0.1), flat(max_norm=2.0))      # False
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, PurePath)
_HASHED_ELEMENTS = 4096
"""Elements of a tensor that are hashed, about, spread all over it; a difference elsewhere is not seen."""


def fingerprint(*settings: Any) -> str:
    """Return 32 hexadecimal digits of SHA-256 of settings: numbers, texts, tensors, containers of them, functions.

    A function is hashed by its name, captured values and defaults; one that is not fdp's also by the names and
    constants in its code and by the plain globals it reads. An object with a field ``settings`` other than None is
    hashed by that alone; any other object by its type.

    Guarantees:
      - a function of the settings alone: the same in every process, on every rank and device.
    """
    digest = hashlib.sha256()
    for word in _words(settings, ()):
        digest.update(f"{len(word)}:{word}".encode())
    return digest.hexdigest()[:32]


def _words(value: Any, inside: tuple[int, ...]) -> Iterator[str]:
    """Yield a value as words; ``inside`` are the enclosing functions, which may hold each other."""
    value = _plain_scalar(value)
    name = type(value).__name__
    known = getattr(value, "settings", None) if isinstance(value, tuple) or is_dataclass(value) else None
    if known is not None:
        yield name
        yield from _words(known, inside)
    elif isinstance(value, _PLAIN):
        yield f"{name} {value!r}" if not isinstance(value, PurePath) else str(value)
    elif isinstance(value, Enum):
        yield f"{name} {value.name}"
    elif isinstance(value, np.generic | Number):  # a long double, a fraction, a decimal, a date
        yield f"{name} {value!r}"
    elif isinstance(value, Tensor | np.ndarray):
        yield from _elements(value)
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}"
        for key in sorted(value, key=str):
            yield str(key)
            yield from _words(value[key], inside)
    elif isinstance(value, Set):
        yield f"set {sorted(map(str, value))}"
    elif isinstance(value, tuple | list):
        yield f"{name} {len(value)}"
        for part in value:
            yield from _words(part, inside)
    elif is_dataclass(value) and not isinstance(value, type):
        yield name
        for field in fields(value):
            yield field.name
            yield from _words(getattr(value, field.name), inside)
    elif isinstance(value, functools.partial):
        yield "partial"
        yield from _words((value.func, value.args, value.keywords), inside)
    elif isinstance(value, MethodType):
        yield "method"
        yield from _words((value.__func__, value.__self__), inside)
    elif isinstance(value, FunctionType):
        yield from _function(value, inside)
    else:
        yield getattr(value, "__qualname__", name)


def _function(function: FunctionType, inside: tuple[int, ...]) -> Iterator[str]:
    yield f"function {function.__qualname__}"
    if id(function) in inside:
        return
    inside = (*inside, id(function))
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    for name, value in [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]:
        yield name
        yield from _words(value, inside)
    yield from _words((function.__defaults__, function.__kwdefaults__), inside)
    if not (function.__module__ or "").startswith("fdp."):
        yield from _code(function.__code__, function.__globals__)


def _code(code: CodeType, read: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names, constants and plain globals of a function's code, independent of the Python version."""
    yield f"names {sorted(code.co_names)}"
    for name in sorted(code.co_names):
        if name in read and isinstance(value := _plain_scalar(read[name]), (*_PLAIN, np.generic, Number)):
            yield f"{name} = {value!r}"
    yield f"constants {sorted(repr(each) for each in code.co_consts if isinstance(each, int | float | str))}"
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _code(each, read)


def _elements(values: Tensor | np.ndarray) -> Iterator[str]:
    yield f"{values.dtype} {tuple(values.shape)}"
    if isinstance(values, DTensor | FakeTensor) or (isinstance(values, Tensor) and values.is_meta):
        return  # no values, or not all of them on this rank
    flat = values.detach().flatten() if isinstance(values, Tensor) else values.reshape(-1)
    some = flat[:: max(1, len(flat) // _HASHED_ELEMENTS)]
    raw = some.cpu().contiguous().view(torch.uint8).numpy() if isinstance(some, Tensor) else np.asarray(some)
    yield hashlib.sha256(raw.tobytes()).hexdigest()


def _plain_scalar(value: Any) -> Any:
    """Return the number of Python that a numpy scalar is, so that 1 and ``np.int64(1)`` are the same setting."""
    if not isinstance(value, np.generic):
        return value
    plain = value.item()
    return plain if isinstance(plain, _PLAIN) else value


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not Ellipsis
    except ValueError:
        return False
