"""Per-sample gradients stored in 8 bits between norm and sum, by ``fdp_kernels.keep_int8``.

    G_b = integers_b 2^exponents_b          128 columns of a row share an exponent

The norm is that of the rounded gradients, which are what the sum adds, so that a sample moves the sum by at most C as
with any other option. Rounding moves a gradient by a few hundredths of its norm, and by 9 % at most; the noise, with
multiplier z, moves the sum in every direction by about z times as much as a whole sample can. Stored in bfloat16 the
same gradients take twice the memory, and the pairs that they come from often more.

    >>> stored = store_rounded(pairs)                            # of single uses of linear layers
    >>> squares = [record.squares.sum(1) for record in stored]
    >>> parts = rounded_parts(stored, factors, size=64)          # float32 sums of 64 samples each
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

from fdp_kernels.keep_int8 import ALIGNED, foreach_keep_int8, foreach_sum_int8, widen_int8
from jaxtyping import Float, Int
from torch import Tensor

from fdp.gradients.sample_gradients import Pair, Record, per_sample_gradient
from fdp.types import FdpError


class Rounded(NamedTuple):
    """``G_b`` as a matrix of integers and, for 128 columns of a row, an exponent. ``squares`` add up to its norm's."""

    integers: Int[Tensor, "batch rows columns"]
    exponents: Int[Tensor, "batch rows blocks"]
    squares: Float[Tensor, "batch parts"]
    shape: tuple[int, ...]


StoredRecord: TypeAlias = Record | Rounded
"""What is stored of a use between norm and sum."""


def can_round(rule: str, columns: int) -> bool:
    """Return True if gradients of a use of this rule, of so many columns, can be stored in 8 bits."""
    return rule in ("linear", "matmul") and columns % ALIGNED == 0


def is_product(record: Record) -> TypeGuard[Pair]:
    """Return True if the record's gradient is one product over tokens: of a linear layer, not of an embedding."""
    return isinstance(record, Pair) and isinstance(record.left, Tensor) and record.left.shape[1] == 1


def store_rounded(pairs: Sequence[Pair]) -> list[Rounded]:
    """Return the per-sample gradients of products, rounded; pairs of equal samples and tokens share launches."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, pair in enumerate(pairs):
        alike.setdefault((pair.right.shape[:3], pair.right.dtype), []).append(i)
    found: dict[int, Rounded] = {}
    for group in alike.values():
        lefts, rights = [_left(pairs[i]) for i in group], [pairs[i].right.squeeze(1) for i in group]
        stored, count = foreach_keep_int8(lefts, rights), len(group)
        fields = zip(group, stored[:count], stored[count : 2 * count], stored[2 * count :])
        found |= {i: Rounded(integers, powers, parts, pairs[i].shape) for i, integers, powers, parts in fields}
    return [found[i] for i in range(len(pairs))]


def _left(pair: Pair) -> Float[Tensor, "batch tokens rows"]:
    assert isinstance(pair.left, Tensor)
    return pair.left.squeeze(1)


def stored_gradient(record: StoredRecord) -> Float[Tensor, " batch *shape"]:
    """Return ``G_b`` of what is stored; of integers exactly, in float32."""
    if isinstance(record, Rounded):
        return widen_int8(record.integers, record.exponents).view(-1, *record.shape)
    return per_sample_gradient(record)


def not_rounded(records: Sequence[StoredRecord]) -> list[Record]:
    """Return the records, none of which may be in 8 bits: these are measured and summed by kernels alone."""
    found = [record for record in records if not isinstance(record, Rounded)]
    if len(found) < len(records):
        raise FdpError("stored_dtype: expected no gradients in 8 bits among other uses of their leaf; give None")
    return found


def rounded_parts(
    records: Sequence[Rounded], factors: Sequence[Float[Tensor, " batch"]], *, size: int
) -> list[Float[Tensor, " parts *shape"]]:
    """Return the weighted sums of every ``size`` samples in float32, still to be added in float64.

    ``factors`` are those of kernels (:func:`fdp.gradients.rules.kernel_factors`).

    Guarantees:
      - a sample whose factor is 0 contributes exactly 0, even if its gradient was NaN or infinite;
      - what is added of a sample is what its squares are of, times its factor.
    """
    integers, exponents = [record.integers for record in records], [record.exponents for record in records]
    sums = foreach_sum_int8(integers, exponents, list(factors), size) if records else []
    return [parts.view(-1, *record.shape) for parts, record in zip(sums, records)]
