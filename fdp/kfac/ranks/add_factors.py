"""Curvature over all ranks: what each measured on its own samples, added up to what one would measure on all of them.

    total = sum_r total_r,   weight = sum_r weight_r,   M = total / weight             (dense, diagonal)
    U = [U_0 ... U_R-1],                                M = U U^T / weight             (columns, softmax)

Sums and weights travel, never means: the mean of means is wrong wherever ranks have different numbers of tokens.
Columns are gathered (:mod:`fdp.kfac.ranks.gather_columns`) or never leave their rank (:mod:`fdp.kfac.ranks.ring`).
There is no third way, by adding up the small matrices ``U_r^T U_r`` of the ranks: the columns of different ranks are
different tokens, so the small matrix of them all has every ``U_r^T U_s`` as a block, and a sum of its diagonal blocks
means nothing.

Over axes ``replicate`` and ``shard`` ranks hold different samples, over ``tensor`` the same ones.

    >>> curvatures = exchange(curvatures, sharding)                  # equal on every rank, whole
    >>> left = sum_totals(left, sharding)                            # columns still this rank's own: for a ring
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fdp.kfac.factors import widened
from fdp.kfac.ranks.gather_columns import CAP, check_cap, gather_columns
from fdp.kfac.types import (
    ColumnsFactor,
    Curvature,
    DenseFactor,
    DiagonalFactor,
    Factor,
    GroupedFactor,
    Layer,
    SoftmaxFactor,
)
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.sharding import Sharding


def exchange(
    curvatures: Mapping[Layer, Curvature], sharding: Sharding | None, *, cap: int = CAP
) -> dict[Layer, Curvature]:
    """The curvature of the samples of all ranks, from that of each rank's own; columns gathered.

    Every rank must bring the same layers in the same forms; how many columns it has is its own affair.

    Guarantees:
      - equal to the curvature of all samples on one rank, up to the rounding of sums, while columns are within the cap;
      - equal on every rank.
    """
    check_cap(cap)
    return {
        layer: Curvature(
            None if left is None else gather(left, sharding, cap=cap),
            None if right is None else gather(right, sharding, cap=cap),
        )
        for layer, (left, right) in curvatures.items()
    }


def gather(factor: Factor, sharding: Sharding | None, *, cap: int = CAP) -> Factor:
    """The factor of the samples of all ranks, whole on every rank.

    Guarantees:
      - a softmax factor stays positive semidefinite, whatever is left out.
    """
    check_cap(cap)
    return with_all_columns(sum_totals(factor, sharding), sharding, cap=cap)


def with_all_columns(factor: Factor, sharding: Sharding | None, *, cap: int = CAP) -> Factor:
    """The columns of all ranks beside totals and weights that are summed already (:func:`sum_totals`).

    Beyond the cap a columns factor keeps its columns times ``sqrt(k / kept)``, so that its trace stays about what it
    was: exactly, where columns are of one length. A softmax factor keeps them as they are: more weight on some could
    outweigh ``diag(total)``, while leaving some out only makes the curvature larger, and steps smaller.
    """
    if not isinstance(factor, ColumnsFactor | SoftmaxFactor):
        return factor
    columns, share = gather_columns(factor.columns, sharding, cap=cap)
    if share < 1.0 and isinstance(factor, ColumnsFactor):
        columns = widened(columns) / math.sqrt(share)
    return factor._replace(columns=columns)


def sum_totals(factor: Factor, sharding: Sharding | None) -> Factor:
    """Totals and weights **summed** over the ranks that hold different samples; columns stay this rank's own."""
    weight = sum_over_samples(sharding, factor.weight)
    match factor:
        case DenseFactor() | DiagonalFactor() | SoftmaxFactor() | GroupedFactor():
            return factor._replace(total=sum_over_samples(sharding, widened(factor.total)), weight=weight)
        case ColumnsFactor():
            return factor._replace(weight=weight)
