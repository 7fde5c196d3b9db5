"""The Woodbury inverse of columns that stay on their rank: one rank after another passes its block around.

    M = diag(b) + s/w sum_r U_r U_r^T,   s = +1: columns, b = damping;   s = -1: softmax, b = total / w + damping

With ``V_r = b^-1/2 U_r`` let ``F_r F_r^T`` be ``I + s/w sum V V^T`` over the ranks up to r. Its root is updated by a
change of rank k_r, computed from a small matrix only (Potter 1963; Andrews 1968, AIAA J. 6(6)):

    Q_r = F_r-1^-1 V_r,    L L^T = w I + s Q_r^T Q_r,    A_r = (L^T + sqrt(w) I)^-1 L^-1
    E_r = I - s Q_r A_r Q_r^T,    F_r^-1 = E_r F_r-1^-1

    first round     once rank r has Q_r, it broadcasts it; later ranks apply E_r to their blocks
    second round    the same broadcasts in reverse; later ranks apply E_r^T, which gives  W_r = b^-1/2 F_r-1^-T Q_r L^-T
    result          M^-1 = diag(1 / b) - s sum_r W_r W_r^T

A rank holds its own block, which becomes V, Q and W in place, and one block of another rank: ``n (k_r + max k)``
numbers and a small k x k matrix, where a gather holds ``n sum k``. Roots lose half the digits that ``M`` itself would.
To apply the inverse to a ``Y`` that every rank has, each rank multiplies by its own W, and the results are summed over
ranks.

    >>> inverse = ring_inverse(factor, sharding, damping=1e-3)       # factor: of this rank's samples
    >>> x = apply_ring(inverse, y, sharding)                         # x and y: the same on every rank
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.linear_maps import LowRankMap, Map, Sides, apply_left, apply_right, diagonal_map
from fdp.kfac.factors import CurvatureError, check_factor, size, unclamped_diagonal, upcast
from fdp.kfac.inversion.damped_inverse import Damping, invert
from fdp.kfac.inversion.one_side import Via, invert_side
from fdp.kfac.inversion.softmax_head import mass_of, row_sums
from fdp.kfac.inversion.woodbury import check_damping, gram
from fdp.kfac.ranks.gather_columns import column_counts
from fdp.kfac.ranks.sum_factors import sum_totals
from fdp.kfac.types import ColumnsFactor, Curvature, Factor, SoftmaxFactor
from fdp.parallel import collectives
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.sharding import Sharding

_SOLVE_ROWS = 1024  # per triangular solve


class RingMap(NamedTuple):
    """``y -> diagonal * y + sign * sum over ranks of columns columns^T y``, where columns are this rank's own."""

    diagonal: Float[Tensor, " n"]
    columns: Float[Tensor, "n k"]
    sign: int


class RingPreconditioner(NamedTuple):
    """``G -> left G right``; None is the identity. Maps other than a RingMap are the same on every rank."""

    left: Map | RingMap | None
    right: Map | RingMap | None


class _SmallSystem(NamedTuple):
    """``A`` and ``L`` of a rank's own Q."""

    core: Float[Tensor, "k k"]
    lower: Float[Tensor, "k k"]


def ring_inverse(factor: ColumnsFactor | SoftmaxFactor, sharding: Sharding | None, *, damping: float) -> RingMap:
    """Return ``(M + damping I)^-1`` for the samples of all ranks, from the factor of this rank's samples.

    Guarantees:
      - no rank ever holds the columns of more than one other rank;
      - equal to the inverse with all columns on one rank, in any order, also if some ranks have none;
      - if it fails, it fails on every rank.
    """
    check_damping(damping)
    summed = sum_totals(factor, sharding)
    assert isinstance(summed, ColumnsFactor | SoftmaxFactor)
    weight = summed.weight.clamp(min=torch.finfo(summed.weight.dtype).tiny)  # 0 if no rank has a token
    wide = upcast(factor.columns)
    sign, base = 1, wide.new_full((wide.shape[0],), damping)
    if isinstance(summed, SoftmaxFactor):
        sign, base = -1, (_summed_mass(summed, sharding) / weight.double() + damping).to(wide.dtype)
    root = base.rsqrt()
    counts = column_counts(factor.columns, sharding)
    rank, holders = 0 if sharding is None else sharding.rank, [r for r, count in enumerate(counts) if count]
    block = (wide * root[:, None]).contiguous()
    del wide
    # One buffer for all broadcasts, because a process group may hold on to a buffer for a while after each.
    buffer = block.new_empty(block.shape[0] * max((counts[r] for r in holders[:-1] if r != rank), default=0))

    own: _SmallSystem | None = None
    for r in holders:
        if r == rank:
            own = _small_system(block, weight, sign)
        if r != holders[-1]:
            other, core = _broadcast_block(r, block, own, buffer, counts[r], sharding)
            if rank > r:
                block.addmm_(other, core @ (other.mT @ block), alpha=-sign)
    for r in reversed(holders):
        if r != holders[-1]:
            other, core = _broadcast_block(r, block, own, buffer, counts[r], sharding)
            if rank > r:
                block.addmm_(other, core.mT @ (other.mT @ block), alpha=-sign)
        if r == rank and own is not None:
            for rows in block.split(_SOLVE_ROWS):  # in place, except for a few rows
                rows.copy_(torch.linalg.solve_triangular(own.lower.mT, rows, upper=True, left=False))
    block *= root[:, None]

    ends = torch.stack(block.aminmax()) if block.numel() else block.new_zeros(2)  # NaN if the block has one
    bad = (~ends.isfinite().all()).double().reshape(1)
    if bool(sum_over_samples(sharding, bad)):
        raise _error_on_all_ranks(
            "ring: expected w I + s Q^T Q to be positive definite on every rank, got one that is not. Raise the "
            "damping, or look for NaN in the statistics."
        )
    return RingMap(base.reciprocal(), block, -sign)


def apply_ring(inverse: RingMap, y: Float[Tensor, "n m"], sharding: Sharding | None) -> Float[Tensor, "n m"]:
    """Return ``M^-1 Y`` for a Y that is the same on every rank, by one all-reduce of the size of Y."""
    diagonal, columns, sign = inverse
    dtype = torch.promote_types(y.dtype, columns.dtype)
    wide = y.to(dtype)
    low = columns.to(dtype) @ (columns.to(dtype).mT @ wide)
    return torch.add(diagonal[:, None] * wide, sum_over_samples(sharding, low), alpha=sign).to(y.dtype)


def invert_ring(curvature: Curvature, sharding: Sharding | None, *, damping: float, via: Via) -> RingPreconditioner:
    """Invert the curvature of all ranks' samples with ``Damping.PI``, from the curvature of this rank's samples.

    Columns and softmax sides use the ring; other sides are summed and inverted on every rank. There is no
    ``max_condition``, because a ring computes no eigenvalues.

    Guarantees:
      - what ``invert`` refuses is refused on every rank: no tokens at all, and numbers that are not finite.
    """
    check_damping(damping)
    summed = Curvature(*(None if side is None else sum_totals(side, sharding) for side in curvature))
    if not any(isinstance(side, ColumnsFactor | SoftmaxFactor) for side in summed):
        inverse = invert(summed, damping=damping, method=Damping.PI, via=via)
        assert isinstance(inverse, Sides)
        return RingPreconditioner(*inverse)
    for name, factor in zip(summed._fields, summed):
        if factor is not None:
            _check_totals(factor, name)
    left, right = curvature
    shares = (damping, damping)
    if left is not None and right is not None:
        traces = float(summed_mean_trace(left, sharding)), float(summed_mean_trace(right, sharding))
        if not all(math.isfinite(trace) for trace in traces):
            raise _error_on_all_ranks(
                f"ring: expected finite statistics, got traces {traces}; look for NaN in the gradients."
            )
        if 0.0 in traces:  # pi is undefined; the inverse is 1 / damping, as in `invert`
            return RingPreconditioner(_constant_map(left, 1 / damping), None)
        pi = math.sqrt(traces[1]) / math.sqrt(traces[0])
        shares = (math.sqrt(damping) / pi, math.sqrt(damping) * pi)

    def side(own: Factor | None, everything: Factor | None, share: float) -> Map | RingMap | None:
        if own is None or everything is None:
            return None
        if isinstance(own, ColumnsFactor | SoftmaxFactor):
            return ring_inverse(own, sharding, damping=share)
        return invert_side(everything, damping=share, via=via)

    return RingPreconditioner(side(left, summed.left, shares[0]), side(right, summed.right, shares[1]))


def precondition_ring(
    preconditioner: RingPreconditioner, gradient: Float[Tensor, "rows columns"], sharding: Sharding | None
) -> Float[Tensor, "rows columns"]:
    """Return ``left G right`` for a full G that is the same on every rank."""
    left, right = preconditioner
    if isinstance(left, RingMap):
        gradient = apply_ring(left, gradient, sharding)
    elif left is not None:
        gradient = apply_left(left, gradient)
    if isinstance(right, RingMap):
        return apply_ring(right, gradient.mT, sharding).mT
    return gradient if right is None else apply_right(right, gradient)


def summed_mean_trace(factor: Factor, sharding: Sharding | None) -> Float[Tensor, ""]:
    """Return ``trace(M) / n`` for the samples of all ranks, from this rank's factor; 0 if there are none.

    The diagonal is clamped after the sum, because it can be negative on a rank that has columns but no totals.
    """
    own = torch.cat([unclamped_diagonal(factor).double(), factor.weight.double().reshape(1)])
    summed = sum_over_samples(sharding, own)
    total, weight = summed[:-1].clamp(min=0).mean(), summed[-1]
    return torch.where(weight > 0, total / weight, 0.0)


def _summed_mass(summed: SoftmaxFactor, sharding: Sharding | None) -> Float[Tensor, " n"]:
    """Return ``softmax_head.mass`` of all ranks' columns, from this rank's columns and the summed totals."""
    least = sum_over_samples(sharding, row_sums(summed.columns))
    try:
        return mass_of(least, summed.total, summed.columns.dtype)
    except CurvatureError as error:
        raise _error_on_all_ranks(str(error)) from error


def _check_totals(factor: Factor, name: str) -> None:
    """Check the summed totals (:func:`fdp.kfac.factors.check_factor`); columns are checked at the end of the ring."""
    if isinstance(factor, ColumnsFactor | SoftmaxFactor):
        factor = factor._replace(columns=factor.columns[:, :0])
    try:
        check_factor(factor, name)
    except CurvatureError as error:
        raise _error_on_all_ranks(str(error)) from error


def _constant_map(factor: Factor, value: float) -> LowRankMap:
    return diagonal_map(factor.weight.new_full((size(factor),), value))


def _error_on_all_ranks(message: str) -> CurvatureError:
    error = CurvatureError(message)
    error.everywhere = True
    return error


def _small_system(block: Tensor, weight: Tensor, sign: int) -> _SmallSystem:
    """Compute ``A`` and ``L`` in float64 and cast them to the block's dtype; NaN if there is no L."""
    eye = torch.eye(block.shape[1], dtype=torch.float64, device=block.device)
    w = weight.double()
    lower, info = torch.linalg.cholesky_ex(w * eye + sign * gram(block))
    lower = torch.where(info == 0, lower, torch.full_like(lower, torch.nan))
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
    core = torch.linalg.solve_triangular(lower.mT + w.sqrt() * eye, inverse, upper=True)
    return _SmallSystem(core.to(block.dtype), lower.to(block.dtype))


def _broadcast_block(
    source: int, block: Tensor, own: _SmallSystem | None, buffer: Tensor, count: int, sharding: Sharding | None
) -> tuple[Tensor, Tensor]:
    """Broadcast Q and A of the rank ``source``; other ranks receive Q in ``buffer``."""
    assert sharding is not None
    if sharding.rank == source:
        assert own is not None
        other, core = block, own.core.contiguous()
    else:
        other = buffer[: block.shape[0] * count].view(block.shape[0], count)
        core = block.new_empty(count, count)
    row, column = divmod(source, sharding.shard.size)
    for x in (other, core):
        if sharding.shard.size > 1 and sharding.replicate.rank == row:
            collectives.wait(collectives.broadcast_into(x, column, sharding.shard))
        if sharding.replicate.size > 1:
            collectives.wait(collectives.broadcast_into(x, row, sharding.replicate))
    return other, core
