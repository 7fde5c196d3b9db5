"""Several records at a time: pairs that are alike go through a kernel in one launch, all others one by one.

A block's matrices are often too small to fill a GPU each; together they do. What is made of a record is the same, bit
for bit, with any others or alone.

    >>> gradients = kept_gradients(records)                      # rules.kept of each
    >>> squares = symmetric_squared_norms(records)               # rules.symmetric_squared_norm of each; direct ones too
    >>> sums = weighted_gradients(records, factors)              # rules.weighted_gradient of each, its own factors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from fdp_kernels.direct import foreach_direct
from fdp_kernels.ghost import foreach_ghost
from fdp_kernels.keep import foreach_keep
from fdp_kernels.weighted import foreach_weighted
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.rules import (
    TOGETHER,
    Dense,
    OneHot,
    Pair,
    Record,
    direct_squared_norm,
    has_kernels,
    kept,
    kept_by_kernel,
    kernel_factors,
    symmetric_squared_norm,
    weighted_gradient,
)


def kept_gradients(records: Sequence[Record]) -> list[Dense]:
    """:func:`fdp.gradients.rules.kept` of each."""

    def many(pairs: list[Pair], places: list[int]) -> list[Dense]:
        made = foreach_keep(*_sides(pairs))
        gradients, squares = made[: len(pairs)], made[len(pairs) :]
        return [Dense(G.view(-1, *pair.shape), s) for G, s, pair in zip(gradients, squares, pairs)]

    return _each(records, kept_by_kernel, many, lambda i: kept(records[i]))


def symmetric_squared_norms(records: Sequence[Record]) -> list[Float[Tensor, " batch"]]:
    """:func:`fdp.gradients.rules.symmetric_squared_norm` of each."""
    return _norms(records, foreach_ghost, symmetric_squared_norm)


def direct_squared_norms(records: Sequence[Record]) -> list[Float[Tensor, " batch"]]:
    """:func:`fdp.gradients.rules.direct_squared_norm` of each."""
    return _norms(records, foreach_direct, direct_squared_norm)


def weighted_gradients(
    records: Sequence[Record], factors: Sequence[Float[Tensor, " batch"]]
) -> list[Float[Tensor, " *shape"]]:
    """:func:`fdp.gradients.rules.weighted_gradient` of each, with the guarantees it gives."""

    def many(pairs: list[Pair], places: list[int]) -> list[Tensor]:
        weights = [kernel_factors(factors[i]) for i in places]
        sums = foreach_weighted(*_sides(pairs), weights)
        return [total.view(pair.shape) for total, pair in zip(sums, pairs)]

    def few(pair: Pair) -> bool:
        return _single_group(pair) and len(pair.right) <= TOGETHER

    return _each(records, few, many, lambda i: weighted_gradient(records[i], factors[i]))


def _norms(records: Sequence[Record], kernel: Callable[..., Tensor], one: Callable[[Record], Tensor]) -> list[Tensor]:
    def many(pairs: list[Pair], places: list[int]) -> list[Tensor]:
        return list(kernel(*_sides(pairs)).unbind())

    return _each(records, _single_group, many, lambda i: one(records[i]))


def _single_group(pair: Pair) -> bool:
    return has_kernels(pair) and not isinstance(pair.left, OneHot) and pair.left.shape[1] == 1


def _sides(pairs: list[Pair]) -> tuple[list[Tensor], list[Tensor]]:
    return [_one_group(pair.left) for pair in pairs], [_one_group(pair.right) for pair in pairs]


def _one_group(side: Tensor | OneHot) -> Tensor:
    assert isinstance(side, Tensor)
    return side.squeeze(1)


def _each(
    records: Sequence[Record],
    shared: Callable[[Pair], bool],
    many: Callable[[list[Pair], list[int]], list[Any]],
    one: Callable[[int], Any],
) -> list[Any]:
    """Of every record, in order: of those that a kernel can share ``many``, alike in samples, tokens and dtype."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], dict[int, Pair]] = {}
    found: dict[int, Any] = {}
    for i, record in enumerate(records):
        if isinstance(record, Pair) and shared(record):
            right = record.right
            alike.setdefault((right.shape[:3], right.dtype, right.device), {})[i] = record
        else:
            found[i] = one(i)
    for pairs in alike.values():
        found |= zip(pairs, many(list(pairs.values()), list(pairs)), strict=True)
    return [found[i] for i in range(len(records))]
