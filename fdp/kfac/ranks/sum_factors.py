"""Sums of factors over ranks, so that every rank has the factors of all samples.

    total = sum_r total_r,   weight = sum_r weight_r,   M = total / weight             (dense, diagonal)
    U = [U_0 ... U_R-1],                                M = U U^T / weight             (columns, softmax)

Ranks exchange sums and weights, never means: a mean of means is wrong if ranks have different numbers of tokens.
Columns are gathered (:mod:`fdp.kfac.ranks.gather_columns`) or stay on their rank (:mod:`fdp.kfac.ranks.ring_inverse`).
Adding up the small matrices ``U_r^T U_r`` of the ranks would be wrong: columns of different ranks belong to different
tokens, so the small matrix of all columns has every ``U_r^T U_s`` as a block.

Ranks along the axes ``replicate`` and ``shard`` hold different samples, those along ``tensor`` the same ones.

    >>> left = sum_totals(left, sharding)                            # columns are still this rank's own, for a ring
    >>> left = gather_factor_columns(left, sharding)                 # equal on every rank
"""

from __future__ import annotations

import math

from fdp.kfac.factors import upcast
from fdp.kfac.ranks.gather_columns import CAP_COLUMNS, gather_columns
from fdp.kfac.types import ColumnsFactor, DenseFactor, DiagonalFactor, Factor, GroupedFactor, SoftmaxFactor
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.sharding import Sharding


def sum_totals(factor: Factor, sharding: Sharding | None) -> Factor:
    """Sum totals and weights over the ranks that hold different samples; columns stay this rank's own."""
    weight = sum_over_samples(sharding, factor.weight)
    match factor:
        case DenseFactor() | DiagonalFactor() | SoftmaxFactor() | GroupedFactor():
            return factor._replace(total=sum_over_samples(sharding, upcast(factor.total)), weight=weight)
        case ColumnsFactor():
            return factor._replace(weight=weight)


def gather_factor_columns(factor: Factor, sharding: Sharding | None, *, cap: int = CAP_COLUMNS) -> Factor:
    """Gather the columns of all ranks into a factor whose totals and weights are summed (:func:`sum_totals`).

    If there are more columns than the cap, those of a columns factor are multiplied by ``sqrt(k / kept)``, which
    preserves the trace if all columns have the same norm. Those of a softmax are not: larger ones could exceed
    ``diag(total)``, while fewer ones only make the curvature larger and the steps smaller.

    Guarantees:
      - equal to the factor of all samples on one rank, up to the rounding of sums, while columns are within the cap;
      - equal on every rank;
      - a softmax factor stays positive semidefinite, whatever is dropped.
    """
    if not isinstance(factor, ColumnsFactor | SoftmaxFactor):
        return factor
    columns, share = gather_columns(factor.columns, sharding, cap=cap)
    if share < 1.0 and isinstance(factor, ColumnsFactor):
        columns = upcast(columns) / math.sqrt(share)
    return factor._replace(columns=columns)
