"""Elementwise functions of samples and parameters, and functions of parameters only.

    y_b = f(x_b, w)  ->  y_b = f(x_b, w_b)            w_b: the copies, aligned with the dims of x as by broadcasting
    v = f(w)         ->  v_b = f(w_b)                 computed only if v is combined with samples

A function of parameters only (``1.0 + weight.float()``, a position table cut to length) holds no samples: the module
sees its value, and its copies are lazy.

    >>> pointwise(trace, torch.mul, (x, weight), {})     # weight: Tracked
    >>> apply_to_parameters(trace, torch.exp, (log_scale,), {})
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fdp.foreign.uses.tracking import SAMPLES, SHARED, CallTrace, Tracked, align_copies
from fdp.gradients.tape import Watched
from fdp.types import FdpError


def pointwise(trace: CallTrace, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply ``func`` to tensors that broadcast, some of which depend on parameters."""
    every = [*args, *kwargs.values()]
    path = next(a.path for a in every if isinstance(a, Tracked))
    ndim = max(len(a.shape) for a in every if isinstance(a, (Tensor, Tracked)))
    layout, dim = _common_layout(trace, every, ndim, path)
    if layout == SHARED:
        trace.note_layout(path, SHARED)

        def make() -> Tensor:
            fitted = {name: _fit(a, ndim, SHARED, 0) for name, a in kwargs.items()}
            return func(*[_fit(a, ndim, SHARED, 0) for a in args], **fitted)

        value = func(*[plain_value(a) for a in args], **{name: plain_value(a) for name, a in kwargs.items()})
        return trace.register(Tracked(value, make, path))

    def first(a: Any) -> Any:
        held = isinstance(a, Tensor) and a.ndim == ndim and _has_samples(trace, a, layout, dim)
        return trace.samples_first(a, layout, dim) if held else _fit(a, ndim, layout, dim)

    y = func(*[first(a) for a in args], **{name: first(a) for name, a in kwargs.items()})
    return trace.restore_layout(y, layout, dim, path)


def apply_in_place(trace: CallTrace, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Apply ``x += w`` and the like: to samples, never to a parameter or a constant."""
    target, *others = args
    if isinstance(target, Tracked) or trace.is_constant(target):
        path = next(a.path for a in args if isinstance(a, Tracked))
        raise FdpError(
            f"{path}: expected in-place changes of samples only, got one of a parameter or constant; write y = x + w"
        )
    # Clone, because the backward may need the old value.
    return target.copy_(pointwise(trace, func, (target.clone(), *others), kwargs))


def apply_to_parameters(
    trace: CallTrace, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Apply a function to parameters and constants; return what the module sees of the result."""
    found: list[Tracked] = []
    _collect_tracked([*args, *kwargs.values()], found)
    path = found[0].path
    value = func(*[plain_value(a) for a in args], **{name: plain_value(a) for name, a in kwargs.items()})

    def of_one(*copies: Tensor) -> Any:
        filled = {name: _fill(a, found, copies) for name, a in kwargs.items()}
        return func(*[_fill(a, found, copies) for a in args], **filled)

    def make() -> Any:
        return torch.func.vmap(of_one)(*[tracked.copies() for tracked in found])

    if isinstance(value, Tensor):
        return value if value in trace.tracked else trace.register(Tracked(value, make, path))
    whole = _Lazy(make)
    return tuple(trace.register(Tracked(part, _entry(whole, i), path)) for i, part in enumerate(value))


def cast_parameter(trace: CallTrace, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the same parameter in another dtype or memory layout."""
    x, *rest = args
    if not isinstance(x, Tracked):
        return func(*[plain_value(a) for a in args], **{name: plain_value(a) for name, a in kwargs.items()})
    others = [plain_value(a) for a in rest]
    value = func(x.value, *others, **kwargs)
    if value in trace.tracked:
        return value
    leaf = x.leaf
    if leaf is not None and value.is_floating_point():
        if type(leaf) is not Watched and value.dtype != leaf.dtype:
            raise FdpError(
                f"{x.path}: expected no cast of an adapted weight, got one from {leaf.dtype} to {value.dtype}"
            )
        leaf = Watched(leaf.value.to(value.dtype), leaf.path, leaf.tape) if value.dtype != leaf.dtype else leaf
    made = Tracked(value, lambda: func(x.copies(), *others, **kwargs), x.path, leaf=leaf, transposed=x.transposed)
    made.by_property = x.by_property
    return trace.register(made)


def transpose_parameter(trace: CallTrace, x: Tracked, *, by_property: bool = False) -> Tensor:
    """Return the transpose of a matrix."""
    made = Tracked(
        x.value.transpose(0, 1), lambda: x.copies().transpose(1, 2), x.path, leaf=x.leaf, transposed=not x.transposed
    )
    made.by_property = by_property or x.by_property
    return trace.register(made)


def plain_value(value: Any) -> Any:
    """Replace tracked tensors in ``value`` by what the module sees."""
    if isinstance(value, Tracked):
        return value.value
    if isinstance(value, list):
        return [plain_value(entry) for entry in value]
    return value


class _Lazy:
    def __init__(self, make: Callable[[], Any]):
        self.make = make
        self.cached: Any = None

    def __call__(self) -> Any:
        if self.cached is None:
            self.cached = self.make()
        return self.cached


def _entry(whole: _Lazy, i: int) -> Callable[[], Tensor]:
    return lambda: whole()[i]


def _collect_tracked(values: list[Any], found: list[Tracked]) -> None:
    for value in values:
        if isinstance(value, Tracked):
            if not any(value is other for other in found):
                found.append(value)
        elif isinstance(value, list):
            _collect_tracked(value, found)


def _fill(value: Any, found: list[Tracked], copies: tuple[Tensor, ...]) -> Any:
    if isinstance(value, Tracked):
        for tracked, own in zip(found, copies):
            if tracked is value:
                return own
    if isinstance(value, list):
        return [_fill(entry, found, copies) for entry in value]
    return value


def _common_layout(trace: CallTrace, every: list[Any], ndim: int, path: str) -> tuple[str, int]:
    """Return where the operands have their samples.

    Only operands with all dims count, since broadcasting adds dims in front of the others.
    """
    layout, dim = SHARED, 0
    place = 0 if trace.batch_first or ndim < 3 else 1
    filled = any(isinstance(a, Tracked) and len(a.shape) == ndim > place and a.shape[place] != 1 for a in every)
    for a in every:
        if isinstance(a, Tensor) and a.ndim == ndim and ndim > 0:
            found, where = trace.find_layout(a, path=path, filled=filled)
            if found != SHARED:
                layout, dim = found, where
        elif isinstance(a, Tensor) and a.ndim > 0 and not trace.is_constant(a):
            raise FdpError(
                f"{path}: expected samples in dim 0 of the result, got a broadcast that puts dims in front of a tensor "
                f"of shape {tuple(a.shape)}, which may hold samples. Add the dims to the tensor itself (x[:, None])"
            )
    return layout, dim


def _has_samples(trace: CallTrace, a: Tensor, layout: str, dim: int) -> bool:
    return a.shape[dim] == trace.batch_size if layout == SAMPLES else a.shape[0] != 1


def _fit(a: Any, ndim: int, layout: str, dim: int) -> Any:
    if isinstance(a, Tracked):
        return align_copies(a.copies(), ndim, layout, dim, a.path)
    if isinstance(a, Tensor) and layout == SAMPLES and a.ndim > 0:  # a constant: drop its batch dim of extent 1
        wide = [1] * (ndim - a.ndim) + list(a.shape)
        return a.reshape(*wide[:dim], *wide[dim + 1 :])
    return a
