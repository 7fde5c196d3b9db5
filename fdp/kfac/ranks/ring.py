"""Woodbury's inverse of columns that never meet: each rank updates it by its own, passed around, one rank at a time.

    M = diag(b) + s/w sum_r U_r U_r^T,   s = +1: columns, b = damping;   s = -1: softmax, b = total / w + damping

With ``V_r = b^-1/2 U_r`` let ``F_r F_r^T`` be what the ranks up to r make of ``I + s/w sum V V^T``. A root of it is
brought past rank r by a change of rank k_r, from a small matrix only (Potter 1963; Andrews 1968, AIAA J. 6(6)):

    Q_r = F_r-1^-1 V_r,    L L^T = w I + s Q_r^T Q_r,    A_r = (L^T + sqrt(w) I)^-1 L^-1
    E_r = I - s Q_r A_r Q_r^T,    F_r^-1 = E_r F_r-1^-1

    first round     rank r, once it has become Q_r, visits all others; those after it apply E_r
    second round    the same visits in reverse; those after r apply E_r^T, which makes  W_r = b^-1/2 F_r-1^-T Q_r L^-T
    result          M^-1 = diag(1 / b) - s sum_r W_r W_r^T

A rank holds its own block, turned from V into Q into W in place, and one visitor: ``n (k_r + max k)`` numbers and a
small k x k, where a gather holds ``n sum k``. Roots lose half the digits that ``M`` itself would. To apply the inverse
to a ``Y`` that every rank has, each multiplies by its own W and the results, of the size of Y, are summed over ranks.

    >>> inverse = ring(factor, sharding, damping=1e-3)               # factor: this rank's samples
    >>> x = apply_ring(inverse, y, sharding)                         # y: the same on every rank; so is x
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.linear_maps import LowRankMap, Map, Sides, apply_left, apply_right, diagonal_map
from fdp.kfac.factors import CurvatureError, check_factor, size, unclamped_diagonal, widened
from fdp.kfac.invert.inverse import Damping, Via, invert, invert_side
from fdp.kfac.invert.softmax_head import mass_of, row_sums
from fdp.kfac.invert.woodbury import check_damping, gram
from fdp.kfac.ranks.add_factors import sum_totals
from fdp.kfac.ranks.gather_columns import lengths
from fdp.kfac.types import ColumnsFactor, Curvature, Factor, SoftmaxFactor
from fdp.parallel import collectives
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.sharding import Sharding

_ROWS = 1024  # solved at once


class RingMap(NamedTuple):
    """``y -> diagonal * y + sign * sum over ranks of columns columns^T y``; the columns are this rank's own."""

    diagonal: Float[Tensor, " n"]
    columns: Float[Tensor, "n k"]
    sign: int


class RingSides(NamedTuple):
    """``G -> left G right``; None is the identity. Maps that are no ring's are whole on every rank."""

    left: Map | RingMap | None
    right: Map | RingMap | None


class _Small(NamedTuple):
    """``A`` and ``L`` of a rank's own Q."""

    core: Float[Tensor, "k k"]
    lower: Float[Tensor, "k k"]


def ring(factor: ColumnsFactor | SoftmaxFactor, sharding: Sharding | None, *, damping: float) -> RingMap:
    """``(M + damping I)^-1`` for the samples of all ranks, from the factor of this rank's own.

    Guarantees:
      - no rank ever holds the columns of more than one other;
      - equal to the inverse with all columns on one rank, whatever their order and with ranks that have none;
      - if it fails, it fails on every rank.
    """
    check_damping(damping)
    whole = sum_totals(factor, sharding)
    assert isinstance(whole, ColumnsFactor | SoftmaxFactor)
    weight = whole.weight.clamp(min=torch.finfo(whole.weight.dtype).tiny)  # 0 where no rank has a token
    wide = widened(factor.columns)
    sign, base = 1, wide.new_full((wide.shape[0],), damping)
    if isinstance(whole, SoftmaxFactor):
        sign, base = -1, (_mass_of_all(whole, sharding) / weight.double() + damping).to(wide.dtype)
    root = base.rsqrt()
    counts = lengths(factor.columns, sharding)
    rank, holders = 0 if sharding is None else sharding.rank, [r for r, count in enumerate(counts) if count]
    block = (wide * root[:, None]).contiguous()
    del wide
    # one for all visits: a process group may hold on to a buffer for a while after its broadcast
    guest = block.new_empty(block.shape[0] * max((counts[r] for r in holders[:-1] if r != rank), default=0))

    own: _Small | None = None
    for r in holders:
        if r == rank:
            own = _small(block, weight, sign)
        if r != holders[-1]:
            visitor, core = _visit(r, block, own, guest, counts[r], sharding)
            if rank > r:
                block.addmm_(visitor, core @ (visitor.mT @ block), alpha=-sign)
    for r in reversed(holders):
        if r != holders[-1]:
            visitor, core = _visit(r, block, own, guest, counts[r], sharding)
            if rank > r:
                block.addmm_(visitor, core.mT @ (visitor.mT @ block), alpha=-sign)
        if r == rank and own is not None:
            for rows in block.split(_ROWS):  # in place, up to a few rows
                rows.copy_(torch.linalg.solve_triangular(own.lower.mT, rows, upper=True, left=False))
    block *= root[:, None]

    ends = torch.stack(block.aminmax()) if block.numel() else block.new_zeros(2)  # NaN wherever the block has one
    bad = (~ends.isfinite().all()).double().reshape(1)
    if bool(sum_over_samples(sharding, bad)):
        raise _everywhere(
            "ring: expected w I + s Q^T Q of every rank to be positive definite, got one that is not. Raise the "
            "damping, or look for NaN in the statistics."
        )
    return RingMap(base.reciprocal(), block, -sign)


def apply_ring(inverse: RingMap, y: Float[Tensor, "n m"], sharding: Sharding | None) -> Float[Tensor, "n m"]:
    """``M^-1 Y``. Every rank brings the same Y, and has the same result; a sum of the size of Y travels."""
    diagonal, columns, sign = inverse
    dtype = torch.promote_types(y.dtype, columns.dtype)
    wide = y.to(dtype)
    low = columns.to(dtype) @ (columns.to(dtype).mT @ wide)
    return torch.add(diagonal[:, None] * wide, sum_over_samples(sharding, low), alpha=sign).to(y.dtype)


def invert_ring(curvature: Curvature, sharding: Sharding | None, *, damping: float, via: Via) -> RingSides:
    """``invert`` with ``Damping.PI`` of the curvature of all ranks' samples, from that of this rank's own.

    Columns and softmax sides go by the ring, all others are summed and inverted everywhere. Nothing is clipped: a ring
    knows no eigenvalues.

    Guarantees:
      - what ``invert`` refuses is refused on every rank: no tokens at all, and what is not finite.
    """
    check_damping(damping)
    whole = Curvature(*(None if side is None else sum_totals(side, sharding) for side in curvature))
    if not any(isinstance(side, ColumnsFactor | SoftmaxFactor) for side in whole):
        made = invert(whole, damping=damping, method=Damping.PI, via=via)
        assert isinstance(made, Sides)
        return RingSides(*made)
    for name, factor in zip(whole._fields, whole):
        if factor is not None:
            _check_totals(factor, name)
    left, right = curvature
    shares = (damping, damping)
    if left is not None and right is not None:
        traces = float(mean_trace_of_all(left, sharding)), float(mean_trace_of_all(right, sharding))
        if not all(math.isfinite(trace) for trace in traces):
            raise _everywhere(f"ring: expected finite statistics, got traces {traces}; look for NaN in the gradients.")
        if 0.0 in traces:  # no curvature at all, and no pi: as `invert` has it
            return RingSides(_flat(left, 1 / damping), None)
        pi = math.sqrt(traces[1]) / math.sqrt(traces[0])
        shares = (math.sqrt(damping) / pi, math.sqrt(damping) * pi)

    def side(own: Factor | None, summed: Factor | None, share: float) -> Map | RingMap | None:
        if own is None or summed is None:
            return None
        if isinstance(own, ColumnsFactor | SoftmaxFactor):
            return ring(own, sharding, damping=share)
        return invert_side(summed, damping=share, via=via)

    return RingSides(side(left, whole.left, shares[0]), side(right, whole.right, shares[1]))


def precondition_ring(
    sides: RingSides, gradient: Float[Tensor, "rows columns"], sharding: Sharding | None
) -> Float[Tensor, "rows columns"]:
    """``left G right``. Every rank brings the same whole G, and has the same result."""

    left, right = sides
    if isinstance(left, RingMap):
        gradient = apply_ring(left, gradient, sharding)
    elif left is not None:
        gradient = apply_left(left, gradient)
    if isinstance(right, RingMap):
        return apply_ring(right, gradient.mT, sharding).mT
    return gradient if right is None else apply_right(right, gradient)


def mean_trace_of_all(factor: Factor, sharding: Sharding | None) -> Float[Tensor, ""]:
    """``trace(M) / n`` for the samples of all ranks, from this rank's factor; 0 where there are none.

    The diagonal is clamped after it is summed: a rank's columns alone, without the totals, make it negative.
    """
    own = torch.cat([unclamped_diagonal(factor).double(), factor.weight.double().reshape(1)])
    summed = sum_over_samples(sharding, own)
    total, weight = summed[:-1].clamp(min=0).mean(), summed[-1]
    return torch.where(weight > 0, total / weight, 0.0)


def _mass_of_all(whole: SoftmaxFactor, sharding: Sharding | None) -> Float[Tensor, " n"]:
    """``softmax_head.mass`` of all ranks' columns, from this rank's; the totals are summed already."""
    least = sum_over_samples(sharding, row_sums(whole.columns))
    try:
        return mass_of(least, whole.total, whole.columns.dtype)
    except CurvatureError as error:
        raise _everywhere(str(error)) from error


def _check_totals(factor: Factor, name: str) -> None:
    """:func:`fdp.kfac.factors.check_factor` of what all ranks have; the columns of each are looked at in the end."""
    if isinstance(factor, ColumnsFactor | SoftmaxFactor):
        factor = factor._replace(columns=factor.columns[:, :0])
    try:
        check_factor(factor, name)
    except CurvatureError as error:
        raise _everywhere(str(error)) from error


def _flat(factor: Factor, value: float) -> LowRankMap:
    return diagonal_map(factor.weight.new_full((size(factor),), value))


def _everywhere(words: str) -> CurvatureError:
    error = CurvatureError(words)
    error.everywhere = True
    return error


def _small(block: Tensor, weight: Tensor, sign: int) -> _Small:
    """``A`` and ``L`` in float64, then in the dtype of the block; NaN where there is no L."""
    eye = torch.eye(block.shape[1], dtype=torch.float64, device=block.device)
    w = weight.double()
    lower, info = torch.linalg.cholesky_ex(w * eye + sign * gram(block))
    lower = torch.where(info == 0, lower, torch.full_like(lower, torch.nan))
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
    core = torch.linalg.solve_triangular(lower.mT + w.sqrt() * eye, inverse, upper=True)
    return _Small(core.to(block.dtype), lower.to(block.dtype))


def _visit(
    source: int, block: Tensor, own: _Small | None, guest: Tensor, count: int, sharding: Sharding | None
) -> tuple[Tensor, Tensor]:
    """Q and A of the rank ``source``, on every rank: in ``guest``; there, its own block itself, which is only read."""
    assert sharding is not None
    if sharding.rank == source:
        assert own is not None
        visitor, core = block, own.core.contiguous()
    else:
        visitor = guest[: block.shape[0] * count].view(block.shape[0], count)
        core = block.new_empty(count, count)
    row, place = divmod(source, sharding.shard.size)
    for x in (visitor, core):
        if sharding.shard.size > 1 and sharding.replicate.rank == row:
            collectives.wait(collectives.broadcast_into(x, place, sharding.shard))
        if sharding.replicate.size > 1:
            collectives.wait(collectives.broadcast_into(x, row, sharding.replicate))
    return visitor, core
