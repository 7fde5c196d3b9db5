"""Functions of several records that share kernel launches.

Pairs that agree in samples, tokens and dtype go through a kernel in one launch, all others one by one: a block's
matrices are often too small to fill a GPU each. Gradients and sums are the same, bit for bit, whichever records share a
launch; on a CPU, sums of small gradients are, to float64 rounding. Norms by Gram matrices are upper bounds that may
differ by a few parts in ten thousand.

    >>> gradients = store_gradients(records)                      # rules.store_gradient of each
    >>> squares = symmetric_squared_norms(records)               # rules.symmetric_squared_norm of each
    >>> parts = weighted_parts(records, factors)                 # rules.weighted_gradient of each, still to be added up
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fdp_kernels.direct import foreach_direct
from fdp_kernels.ghost import foreach_ghost
from fdp_kernels.keep import foreach_keep
from fdp_kernels.weighted import foreach_weighted_parts
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.eight_bits import Rounded, StoredRecord, rounded_parts
from fdp.gradients.rules import (
    SAMPLES_PER_FLOAT32_SUM,
    Dense,
    OneHot,
    Pair,
    Record,
    direct_squared_norm,
    has_kernels,
    kernel_factors,
    kernel_stores_faster,
    split_samples,
    store_gradient,
    symmetric_squared_norm,
    weighted_gradient,
)

SMALL_SUM_ELEMENTS, SMALL_SUM_MULTIPLE = 1 << 10, 64
"""Dense gradients of at most this size are summed together on a CPU, if they fill whole vectors: then a product on one
thread rounds their columns as it does alone."""


def store_gradients(records: Sequence[Record]) -> list[Dense]:
    """Apply :func:`fdp.gradients.rules.store_gradient` to every record."""

    def store_many(pairs: list[Pair], indices: list[int]) -> list[Dense]:
        results = foreach_keep(*_sides(pairs))
        gradients, squares = results[: len(pairs)], results[len(pairs) :]
        return [Dense(G.view(-1, *pair.shape), s) for G, s, pair in zip(gradients, squares, pairs)]

    return _foreach(records, kernel_stores_faster, store_many, lambda i: store_gradient(records[i]))


def symmetric_squared_norms(records: Sequence[Record]) -> list[Float[Tensor, " batch"]]:
    """Apply :func:`fdp.gradients.rules.symmetric_squared_norm` to every record."""
    return _norms(records, foreach_ghost, symmetric_squared_norm)


def direct_squared_norms(records: Sequence[Record]) -> list[Float[Tensor, " batch"]]:
    """Apply :func:`fdp.gradients.rules.direct_squared_norm` to every record."""
    return _norms(records, foreach_direct, direct_squared_norm)


def weighted_parts(
    records: Sequence[StoredRecord], factors: Sequence[Float[Tensor, " batch"]]
) -> list[Float[Tensor, " parts *shape"]]:
    """Return :func:`fdp.gradients.rules.weighted_gradient` of every record in parts, which :func:`add_parts` adds up.

    A kernel sums few samples in float32; whoever adds its parts does so in float64.
    """
    narrow = _kernel_factors(factors)
    together = _small_sums(records, factors) | _rounded_sums(records, narrow)

    def sum_many(pairs: list[Pair], indices: list[int]) -> list[Tensor]:
        count = _count_parts(len(pairs[0].right))
        assert count is not None
        sums = foreach_weighted_parts(*_sides(pairs), [narrow[i] for i in indices], count)
        return [parts.view(count, *pair.shape) for parts, pair in zip(sums, pairs)]

    def can_share(pair: Pair) -> bool:
        return _single_group(pair) and _count_parts(len(pair.right)) is not None

    def sum_one(i: int) -> Tensor:
        record = records[i]
        return together[i] if i in together or isinstance(record, Rounded) else _sum_in_parts(record, factors[i])

    return _foreach(records, can_share, sum_many, sum_one)


def _rounded_sums(records: Sequence[StoredRecord], narrow: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the sums of gradients stored in 8 bits, in as many parts as those of pairs."""
    rounded = {i: record for i, record in enumerate(records) if isinstance(record, Rounded)}
    if not rounded:
        return {}
    samples = len(narrow[0])
    size = part_size(samples, max(1, -(-samples // SAMPLES_PER_FLOAT32_SUM)))
    return dict(zip(rounded, rounded_parts(list(rounded.values()), [narrow[i] for i in rounded], size=size)))


def _small_sums(records: Sequence[StoredRecord], factors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the weighted sums of small dense gradients on a CPU, side by side in one sum for equal factors."""
    dense = {i: of.gradient for i, of in enumerate(records) if isinstance(of, Dense) and _is_small(of.gradient)}
    found: dict[int, Tensor] = {}
    while dense:
        first = next(iter(dense))
        group = [i for i in dense if factors[i] is factors[first] and dense[i].dtype == dense[first].dtype]
        gradients = [dense.pop(i) for i in group]
        if len(group) > 1:
            rows = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)
            sums = _sum_in_parts(Dense(rows), factors[first]).split(
                [math.prod(of.shape[1:]) for of in gradients], dim=1
            )
            found |= {i: part.view(1, *of.shape[1:]) for i, part, of in zip(group, sums, gradients)}
    return found


def _is_small(gradient: Tensor) -> bool:
    """Return True if gradients of this size are summed together: on a CPU, calls take longer than the sums."""
    size = math.prod(gradient.shape[1:])
    return gradient.device.type == "cpu" and 0 < size <= SMALL_SUM_ELEMENTS and size % SMALL_SUM_MULTIPLE == 0


def _sum_in_parts(record: Record, factors: Tensor) -> Tensor:
    if not has_kernels(record) or len(record.right) <= SAMPLES_PER_FLOAT32_SUM:
        return weighted_gradient(record, factors).unsqueeze(0)
    parts = zip(split_samples(record), factors.split(SAMPLES_PER_FLOAT32_SUM))
    return torch.stack([weighted_gradient(part, of) for part, of in parts])


def _kernel_factors(factors: Sequence[Tensor]) -> list[Tensor]:
    """Return the factors of every leaf for kernels; flat clipping has one tensor for all leaves, which is cast once."""
    if all(of is factors[0] for of in factors):
        return [kernel_factors(factors[0])] * len(factors) if factors else []
    return [kernel_factors(of) for of in factors]


def _count_parts(samples: int) -> int | None:
    """Return in how many equal parts that a kernel sums in float32 samples can be split; None if in too many."""
    least = max(1, -(-samples // SAMPLES_PER_FLOAT32_SUM))
    return next((parts for parts in range(least, 2 * least) if samples % parts == 0), None)


def part_size(samples: int, parts: int) -> int:
    """Return the samples of each part of :func:`weighted_parts`; the last part may have fewer."""
    return samples // parts if samples % parts == 0 else SAMPLES_PER_FLOAT32_SUM


def add_parts(parts: Float[Tensor, " parts *shape"]) -> Float[Tensor, " *shape"]:
    """Return the sum of the parts, in float64 if there are several."""
    return parts.squeeze(0) if len(parts) == 1 else parts.double().sum(0)


def _norms(records: Sequence[Record], kernel: Callable[..., Tensor], one: Callable[[Record], Tensor]) -> list[Tensor]:
    def norms_of_many(pairs: list[Pair], indices: list[int]) -> list[Tensor]:
        return list(kernel(*_sides(pairs)).unbind())

    return _foreach(records, _single_group, norms_of_many, lambda i: one(records[i]))


def _single_group(pair: Pair) -> bool:
    return has_kernels(pair) and not isinstance(pair.left, OneHot) and pair.left.shape[1] == 1


def _sides(pairs: list[Pair]) -> tuple[list[Tensor], list[Tensor]]:
    return [_one_group(pair.left) for pair in pairs], [_one_group(pair.right) for pair in pairs]


def _one_group(side: Tensor | OneHot) -> Tensor:
    assert isinstance(side, Tensor)
    return side.squeeze(1)


def _foreach(
    records: Sequence[StoredRecord],
    can_share: Callable[[Pair], bool],
    many: Callable[[list[Pair], list[int]], list[Any]],
    one: Callable[[int], Any],
) -> list[Any]:
    """Apply ``many`` to groups of records that can share a launch and ``one`` to the rest; keep the order.

    A group has equal numbers of samples and tokens, and one dtype and device.
    """
    groups: dict[tuple[torch.Size, torch.dtype, torch.device], dict[int, Pair]] = {}
    found: dict[int, Any] = {}
    for i, record in enumerate(records):
        if isinstance(record, Pair) and can_share(record):
            right = record.right
            groups.setdefault((right.shape[:3], right.dtype, right.device), {})[i] = record
        else:
            found[i] = one(i)
    for pairs in groups.values():
        found |= zip(pairs, many(list(pairs.values()), list(pairs)), strict=True)
    return [found[i] for i in range(len(records))]
