"""Map a torch function that gets a tracked tensor to the operation that records the use.

own rule (RULES) -> handler (HANDLERS) -> kind of function (FUNCTION_KINDS) -> error without a rule

>>> dispatch(trace, F.linear, None, (x, weight), {})
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from fdp import ops
from fdp.foreign.uses.function_table import (
    DETACHES,
    HANDLERS,
    IN_PLACE,
    METADATA_PROPERTIES,
    FunctionKind,
)
from fdp.foreign.uses.lookups import apply_to_selected
from fdp.foreign.uses.operands import no_rule_error
from fdp.foreign.uses.pointwise import (
    apply_in_place,
    apply_to_parameters,
    cast_parameter,
    plain_value,
    pointwise,
    transpose_parameter,
)
from fdp.foreign.uses.tracking import SAMPLES, SHARED, CallTrace, SelectedMatrices, Tracked, tensors_of
from fdp.gradients.rules import Rule
from fdp.types import FdpError

RULES: dict[Callable[..., Any] | str, Rule] = {}
"""Rules of operations that torch does not have: operators of ``torch.ops``, and names of operations."""


def dispatch(
    trace: CallTrace, func: Any, kind: FunctionKind | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Apply a torch function to arguments of which at least one is tracked, and record the use."""
    if func is torch.Tensor.__getitem__ and isinstance(args[1], list):
        args = (args[0], _index_tensor(trace, *args))  # from here on, a list stands for a tuple of indices
    args, kwargs = tuple([trace.resolve(a) for a in args]), {name: trace.resolve(a) for name, a in kwargs.items()}
    if any(isinstance(a, SelectedMatrices) for a in (*args, *kwargs.values())):
        return _dispatch_selected(trace, func, kind, args, kwargs)
    if kind is FunctionKind.METADATA:
        return func(*[plain_value(a) for a in args], **{name: plain_value(a) for name, a in kwargs.items()})
    if kind is FunctionKind.DETACH:
        return _detach(trace, func, args, kwargs)
    if kwargs.get("out") is not None:
        raise no_rule_error(f"{resolve_name(func) or func} with out=", _flatten(args))
    own = func in RULES or func in HANDLERS
    if kind is None and not own and getattr(func, "__name__", "") == "__get__":
        return _read_property(trace, func, args[0])
    if not torch.is_grad_enabled():
        # Inside a torch.autograd.Function a tap would have no derivative: the backward is its author's.
        raise no_rule_error("a torch.autograd.Function, or under torch.no_grad() (write .detach())", _flatten(args))
    if func in RULES:
        return apply_rule(trace, RULES[func], *args, **kwargs)
    if own:
        return HANDLERS[func](trace, *args, **kwargs)
    if kind is FunctionKind.CAST:
        return cast_parameter(trace, func, args, kwargs)
    if kind is FunctionKind.IN_PLACE:
        return apply_in_place(trace, IN_PLACE[func], args, kwargs)
    if kind is FunctionKind.POINTWISE:
        return pointwise(trace, func, args, kwargs)
    if kind is FunctionKind.EXPAND and isinstance(args[0], Tracked):
        return _expand(trace, func, args[0], args, kwargs)
    if kind is FunctionKind.TRANSPOSE and isinstance(args[0], Tracked) and _is_transpose(func, args[0], args[1:]):
        return transpose_parameter(trace, args[0])
    if kind in (FunctionKind.PARAMETERS_ONLY, FunctionKind.TRANSPOSE) and _all_shared(trace, args, kwargs):
        return apply_to_parameters(trace, func, args, kwargs)
    raise no_rule_error(resolve_name(func) or str(func), _flatten(args) + _flatten(tuple(kwargs.values())))


def _dispatch_selected(
    trace: CallTrace, func: Any, kind: FunctionKind | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Apply a torch function to matrices that ids of samples selected; metadata can be read from the placeholder."""
    if kind is FunctionKind.METADATA or (
        getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ in METADATA_PROPERTIES
    ):
        return func(*[a.value if isinstance(a, SelectedMatrices) else plain_value(a) for a in args], **kwargs)
    if not torch.is_grad_enabled():
        raise no_rule_error("a torch.autograd.Function, or under torch.no_grad() (write .detach())", _flatten(args))
    return apply_to_selected(trace, func, args, kwargs)


def apply_rule(trace: CallTrace, own: Rule, x: Any, weight: Any, **options: Any) -> Tensor:
    """Record a use by a custom rule."""
    if not isinstance(weight, Tracked) or weight.leaf is None or weight.transposed:
        raise no_rule_error(f"{own.name} with a weight that is not a parameter itself", (x, weight))
    first, back = trace.with_samples_first(x, path=weight.path)
    return back(ops.use(own, first, weight.leaf, **options))


def _index_tensor(trace: CallTrace, x: Tensor, index: list[Any]) -> Tensor:
    """Convert the list in ``w[[0, 2]]`` to a tensor."""
    try:
        made = torch.tensor(index, device=x.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise no_rule_error(f"indexing by a list that holds no numbers ({error})", (trace.resolve(x),)) from error
    trace.constants[made] = True
    return made


def _detach(trace: CallTrace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a result that has no derivative: a new tensor of a parameter's shape, or its detached value."""
    x = args[0]
    if func in DETACHES and isinstance(x, Tracked):
        if x.leaf is None:  # every sample has its own copy, even without a derivative
            return trace.register(Tracked(x.value.detach(), lambda: x.copies().detach(), x.path))
        made = x.leaf.value.t().detach() if x.transposed else x.leaf.value.detach()
    else:
        made = func(*[plain_value(a) for a in args], **{name: plain_value(a) for name, a in kwargs.items()})
    trace.constants[made] = True
    return made


def _all_shared(trace: CallTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if no operand holds samples."""
    held = tensors_of([plain_value(a) for a in args], {name: plain_value(a) for name, a in kwargs.items()})
    return all([tensor in trace.tracked or trace.is_constant(tensor) for tensor in held])


def _read_property(trace: CallTrace, func: Any, x: Tracked) -> Any:
    name = func.__self__.__name__
    if name in METADATA_PROPERTIES:
        return func(x.value)
    turns = name in ("T", "mT") and len(x.shape) == 2
    if turns and trace.tape is not None and trace.tape.compiled:
        raise FdpError(
            f"{x.path}: expected .t(), got the property .{name}, which torch.compile does not show; write .t(), or do "
            f"not compile"
        )
    if turns:
        return transpose_parameter(trace, x, by_property=True)
    raise no_rule_error(f"the property .{name}", (x,))


def _is_transpose(func: Any, x: Tracked, dims: tuple[Any, ...]) -> bool:
    """Return True if the function swaps the dims of a matrix."""
    given = dims[0] if len(dims) == 1 and isinstance(dims[0], list) else list(dims)
    if len(x.shape) != 2 or len(given) not in (0, 2):
        return False
    permutes = func in (torch.permute, torch.Tensor.permute)
    return not given or ([dim % 2 for dim in given] == [1, 0] if permutes else given[0] % 2 != given[1] % 2)


def _expand(trace: CallTrace, func: Any, x: Tracked, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Expand a parameter over samples, one copy each, or over another dim."""
    value = func(*[plain_value(a) for a in args], **{name: plain_value(a) for name, a in kwargs.items()})
    dim = 0 if trace.batch_first or value.ndim < 3 else 1
    wide = [1] * (value.ndim - len(x.shape)) + list(x.shape)
    if value.ndim <= dim or value.shape[dim] != trace.batch_size or wide[dim] != 1:
        trace.note_layout(x.path, SHARED)
        return apply_to_parameters(trace, func, args, kwargs)
    trace.note_layout(x.path, SAMPLES)
    copies = x.copies()
    first = copies.reshape(copies.shape[0], *wide[:dim], *wide[dim + 1 :])
    rest = [*value.shape[:dim], *value.shape[dim + 1 :]]
    times = [new // old for new, old in zip(rest, first.shape[1:])]
    first = first.repeat(1, *times) if func is torch.Tensor.repeat else first.expand(copies.shape[0], *rest)
    return first.movedim(0, dim)


def _flatten(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([entry for value in values for entry in (value if isinstance(value, list) else [value])])
