"""Samples that data put in another row: known from the operations, whatever the values at hand.

    order = lengths.argsort();  x[order]                 row b holds the sample order[b], which is b or is not

What is clipped as sample b's is what row b holds. A module that sorts its batch by length, encodes it and puts it back
has losses that are right, and on samples of equal lengths norms that are right, too; a check on those sees nothing. So
an index of samples that is made of data, or a sort over samples, is noted, and so is all that is computed of it; a
parameter that meets it is refused.

    >>> note_order(run, func, args, kwargs, out)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp.foreign.uses.tracking import Run, tensors_of


def _named(names: str) -> frozenset[Callable[..., Any]]:
    places = (torch, torch.Tensor)
    return frozenset(getattr(place, name) for name in names.split() for place in places if hasattr(place, name))


SORTS = {func: -1 for func in _named("sort argsort msort topk kthvalue median nanmedian mode cummax cummin")}
"""Functions that look for an order along a dim, by default the last one."""
SORTS |= {func: 0 for func in _named("msort")}
PICKS = _named("index_select gather take_along_dim scatter scatter_add index_copy index_add scatter_reduce")
"""Functions that move what an index says along a dim, their second argument."""
_WHOLE = _named("take unique unique_consecutive")
_MIDDLE = _named("topk kthvalue")


def note_order(run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Note in ``run.moved`` what a function returned if data decided in which row a sample is."""
    if not (_orders(run, func, args, kwargs) or (run.moved and _of_moved(run, args, kwargs))):
        return
    for made in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(made, Tensor):
            run.moved[made] = True


def _of_moved(run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any([tensor in run.moved for tensor in tensors_of(args, kwargs)])


def _orders(run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is torch.Tensor.__getitem__:
        x, index = args
        return _holds(run, x) and any([_holds(run, entry) for entry in _at_samples(run, x, index)])
    if func is F.embedding:
        ids, table = kwargs.get("input", args[0] if args else None), kwargs.get("weight", args[-1])
        return _holds(run, ids) and _holds(run, table)
    if not args or not (func in SORTS or func in PICKS or func in _WHOLE) or not _holds(run, args[0]):
        return False
    if func in _WHOLE:
        return True
    dim = _dim(func, args, kwargs)
    if dim is None or not _of_samples(run, args[0], dim):
        return False
    return func in SORTS or any([_holds(run, other) for other in tensors_of(args[1:], kwargs)])


def _dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The dim along which a function moves things; None for all of them."""
    if "dim" in kwargs:
        return kwargs["dim"]
    numbers = [value for value in args[1:] if isinstance(value, int) and not isinstance(value, bool)]
    if func in PICKS:
        return numbers[0] if numbers else 0
    numbers = numbers[1:] if func in _MIDDLE else numbers
    return numbers[0] if numbers else SORTS[func]


def _at_samples(run: Run, x: Tensor, index: Any) -> list[Any]:
    """The entries of an index that say which samples."""
    entries = list(index) if isinstance(index, tuple) else [index]
    dim, found = 0, []
    for place, entry in enumerate(entries):
        if entry is None or isinstance(entry, bool):
            continue
        if entry is Ellipsis:
            dim = x.ndim - sum([e is not None and e is not Ellipsis for e in entries[place + 1 :]])
            continue
        if isinstance(entry, Tensor) and _of_samples(run, x, dim):
            found.append(entry)
        dim += entry.ndim if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1
    return found


def _of_samples(run: Run, x: Tensor, dim: int) -> bool:
    dim = dim % max(1, x.ndim)
    return dim == 0 or (dim == 1 and not run.batch_first)


def _holds(run: Run, value: Any) -> bool:
    """Whether a tensor holds samples, or something made of them: neither a constant nor a parameter."""
    return isinstance(value, Tensor) and value not in run.constants and value not in run.tracked
