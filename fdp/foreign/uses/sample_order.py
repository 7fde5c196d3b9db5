"""Notice when the data decide which row a sample is in, from the operations alone.

    order = lengths.argsort();  x[order]                 row b holds sample order[b], which may be another sample

The gradient that is clipped as sample b's is that of row b. A module that sorts its batch by length, encodes it and
restores the order has correct losses, and on samples of equal lengths also correct norms, so a check on those sees
nothing. So an index of samples that depends on data, or a sort over samples, is noted, and so is everything computed
from it. A parameter that is used on such a tensor is refused.

    >>> note_reordering(trace, func, args, kwargs, out)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp.foreign.uses.tracking import CallTrace, tensors_of


def _named(names: str) -> frozenset[Callable[..., Any]]:
    places = (torch, torch.Tensor)
    return frozenset(getattr(place, name) for name in names.split() for place in places if hasattr(place, name))


SORTS = {func: -1 for func in _named("sort argsort msort topk kthvalue median nanmedian mode cummax cummin")}
"""Functions that order along a dim, by default the last one."""
SORTS |= {func: 0 for func in _named("msort")}
PICKS = _named("index_select gather take_along_dim scatter scatter_add index_copy index_add scatter_reduce")
"""Functions that move elements along a dim, their second argument, as an index says."""
_OVER_ALL = _named("take unique unique_consecutive")
_COUNT_FIRST = _named("topk kthvalue")


def note_reordering(trace: CallTrace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Record a function's result in ``trace.reordered`` if data decided which row a sample is in."""
    if not (_reorders_samples(trace, func, args, kwargs) or (trace.reordered and _uses_reordered(trace, args, kwargs))):
        return
    for made in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(made, Tensor):
            trace.reordered[made] = True


def _uses_reordered(trace: CallTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any([tensor in trace.reordered for tensor in tensors_of(args, kwargs)])


def _reorders_samples(trace: CallTrace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is torch.Tensor.__getitem__:
        x, index = args
        return _holds_samples(trace, x) and any(
            [_holds_samples(trace, entry) for entry in _sample_entries(trace, x, index)]
        )
    if func is F.embedding:
        ids, table = kwargs.get("input", args[0] if args else None), kwargs.get("weight", args[-1])
        return _holds_samples(trace, ids) and _holds_samples(trace, table)
    if not args or not (func in SORTS or func in PICKS or func in _OVER_ALL) or not _holds_samples(trace, args[0]):
        return False
    if func in _OVER_ALL:
        return True
    dim = _dim(func, args, kwargs)
    if dim is None or not _is_sample_dim(trace, args[0], dim):
        return False
    return func in SORTS or any([_holds_samples(trace, other) for other in tensors_of(args[1:], kwargs)])


def _dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the dim along which a function moves elements; None means all of them."""
    if "dim" in kwargs:
        return kwargs["dim"]
    numbers = [value for value in args[1:] if isinstance(value, int) and not isinstance(value, bool)]
    if func in PICKS:
        return numbers[0] if numbers else 0
    numbers = numbers[1:] if func in _COUNT_FIRST else numbers
    return numbers[0] if numbers else SORTS[func]


def _sample_entries(trace: CallTrace, x: Tensor, index: Any) -> list[Any]:
    """Return the entries of an index that select samples."""
    entries = list(index) if isinstance(index, tuple) else [index]
    dim, found = 0, []
    for place, entry in enumerate(entries):
        if entry is None or isinstance(entry, bool):
            continue
        if entry is Ellipsis:
            dim = x.ndim - sum([e is not None and e is not Ellipsis for e in entries[place + 1 :]])
            continue
        if isinstance(entry, Tensor) and _is_sample_dim(trace, x, dim):
            found.append(entry)
        dim += entry.ndim if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1
    return found


def _is_sample_dim(trace: CallTrace, x: Tensor, dim: int) -> bool:
    dim = dim % max(1, x.ndim)
    return dim == 0 or (dim == 1 and not trace.batch_first)


def _holds_samples(trace: CallTrace, value: Any) -> bool:
    """Return True if a tensor holds samples or depends on them: it is neither a constant nor a parameter."""
    return isinstance(value, Tensor) and value not in trace.constants and value not in trace.tracked
