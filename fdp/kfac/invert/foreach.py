"""Many tensors at once: a launch for all of a kind, a device and a dtype, where one for each keeps a GPU waiting.

    finite_each     max |x_i| < inf                 for each i; not so where there is NaN or infinity
    decayed_sums    rho old_i + new_i
    copy_into       old_i <- new_i

Nothing here waits for a device.

    >>> finite_each([x, y])                                                # (2,), bool
    >>> totals = decayed_sums(totals, latest, rho=0.95)
    >>> copy_into(state, new)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor


def finite_each(tensors: Sequence[Tensor]) -> Bool[Tensor, " tensors"]:
    """Whether all numbers of each are finite; on the device of the first. An empty tensor is."""
    if not tensors:
        return torch.ones(0, dtype=torch.bool)
    full = [x if x.numel() else x.new_zeros(()) for x in tensors]
    groups = _alike((x,) for x in full)
    found = [torch.stack(torch._foreach_norm([full[i] for i in group], math.inf)).isfinite() for group in groups]
    if len(groups) == 1:
        return found[0]
    device = tensors[0].device
    places = sorted((i, place) for place, i in enumerate(i for group in groups for i in group))
    return torch.cat([each.to(device) for each in found])[torch.tensor([place for _, place in places], device=device)]


def decayed_sums(old: Sequence[Tensor], new: Sequence[Tensor], *, rho: float) -> list[Tensor]:
    """``rho old + new`` of each pair, whose two are on one device and of one dtype."""
    done = [*old]
    for group in _alike(zip(old, new)):
        sums = torch._foreach_mul([old[i] for i in group], rho)
        torch._foreach_add_(sums, [new[i] for i in group])
        for i, each in zip(group, sums):
            done[i] = each
    return done


def copy_into(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Writes each of ``new`` into its ``old``."""
    for group in _alike(zip(old, new)):
        torch._foreach_copy_([old[i] for i in group], [new[i] for i in group])


def _alike(tuples: Iterable[tuple[Tensor, ...]]) -> list[list[int]]:
    """The numbers of those that have the same devices and dtypes."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, tensors in enumerate(tuples):
        groups.setdefault(tuple((x.device, x.dtype) for x in tensors), []).append(i)
    return list(groups.values())
