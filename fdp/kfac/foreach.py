"""Multi-tensor operations: one launch per device and dtype instead of one per tensor.

    foreach_is_finite       max |x_i| < inf
    foreach_decayed_add     rho old_i + new_i
    foreach_copy            old_i <- new_i

None of them waits for the device.

    >>> foreach_is_finite([x, y])                                          # (2,), bool
    >>> totals = foreach_decayed_add(totals, latest, rho=0.95)
    >>> foreach_copy(state, new)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor


def foreach_is_finite(tensors: Sequence[Tensor]) -> Bool[Tensor, " tensors"]:
    """Return, on the device of the first, whether each tensor is finite everywhere. Empty tensors are."""
    if not tensors:
        return torch.ones(0, dtype=torch.bool)
    full = [x if x.numel() else x.new_zeros(()) for x in tensors]
    groups = _group_alike((x,) for x in full)
    found = [torch.stack(torch._foreach_norm([full[i] for i in group], math.inf)).isfinite() for group in groups]
    if len(groups) == 1:
        return found[0]
    device = tensors[0].device
    order = sorted((i, position) for position, i in enumerate(i for group in groups for i in group))
    index = torch.tensor([position for _, position in order], device=device)
    return torch.cat([each.to(device) for each in found])[index]


def foreach_decayed_add(old: Sequence[Tensor], new: Sequence[Tensor], *, rho: float) -> list[Tensor]:
    """Return ``rho old + new`` for each pair, both of which are on one device and of one dtype."""
    done = [*old]
    for group in _group_alike(zip(old, new)):
        sums = torch._foreach_mul([old[i] for i in group], rho)
        torch._foreach_add_(sums, [new[i] for i in group])
        for i, each in zip(group, sums):
            done[i] = each
    return done


def foreach_copy(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Write each tensor of ``new`` into the one of ``old``."""
    for group in _group_alike(zip(old, new)):
        torch._foreach_copy_([old[i] for i in group], [new[i] for i in group])


def _group_alike(tuples: Iterable[tuple[Tensor, ...]]) -> list[list[int]]:
    """Return the indices of tuples that have the same devices and dtypes, group by group."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, tensors in enumerate(tuples):
        groups.setdefault(tuple((x.device, x.dtype) for x in tensors), []).append(i)
    return list(groups.values())
