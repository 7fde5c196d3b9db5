"""Fixed places for curvature and preconditioners, so that a training state never changes its shape.

    dense, diagonal    total <- rho total + total_new,   weight <- rho weight + weight_new
    columns, softmax   the columns of the last measurements, the newest first, those of each times sqrt(rho) at the next

Columns have room for as many as a measurement can bring; zero columns fill it up and change nothing. A side whose
columns would be as many as its features is kept dense. A preconditioner in its place is the identity until the first.

    >>> kept = empty(side, window=1, dtype=torch.float32, column_dtype=torch.float16, device=device)
    >>> kept = added(kept, factor, side, rho=0.95)
    >>> factor = factor_of(kept, side, device=device)
    >>> maps = fitted(invert(curvature, ...), like=identity(left, right, ...))
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.gradients.linear_maps import GroupedMap, LowRankMap, Map, MatrixMap, Sides, diagonal_map
from fdp.kfac import factors
from fdp.kfac.forms import Form
from fdp.kfac.invert.softmax_head import row_sums
from fdp.kfac.ranks.ring import RingMap, RingSides
from fdp.kfac.store import keep
from fdp.kfac.types import (
    ColumnsFactor,
    DenseFactor,
    DiagonalFactor,
    Factor,
    GroupedFactor,
    Preconditioner,
    Product,
    SoftmaxFactor,
)
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.sharding import Sharding
from fdp.types import FdpError


class Side(NamedTuple):
    """How a side is kept: its form, its features, and how many columns a measurement brings at most.

    ``groups``: of a convolution, or experts; each has a diagonal of its own, one after the other in ``size``.
    """

    form: Form
    size: int
    columns: int
    groups: int = 1


class Window(NamedTuple):
    """Columns of the last measurements, times ``scale``; ``totals`` and ``weights`` have a row for each of them."""

    totals: Float[Tensor, "window n"]
    columns: Float[Tensor, "n window*k"]
    scale: Float[Tensor, " window*k"]
    weights: Float[Tensor, " window"]


class RingPart(NamedTuple):
    """A ``RingMap`` without its sign, which follows from the form: columns are this rank's own."""

    diagonal: Float[Tensor, " n"]
    columns: Float[Tensor, "n k"]


Kept: TypeAlias = DenseFactor | DiagonalFactor | Window
Placed: TypeAlias = Sides | Product | RingSides


def empty(
    side: Side, *, window: int, dtype: torch.dtype, column_dtype: torch.dtype | None, device: torch.device
) -> Kept | None:
    """Nothing measured yet."""

    def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    n, k = side.size, side.columns
    match side.form:
        case Form.SKIP:
            return None
        case Form.DENSE:
            return DenseFactor(zeros(n, n), zeros())
        case Form.DIAGONAL:
            return DiagonalFactor(zeros(n), zeros())
        case Form.COLUMNS | Form.SOFTMAX:
            totals = zeros(window, n if side.form is Form.SOFTMAX else 0)
            columns = zeros(n, window * k, of=column_dtype or dtype)
            return Window(totals, columns, torch.ones(window * k, dtype=dtype, device=device), zeros(window))


def condensed(factor: Factor, side: Side) -> Factor:
    """The factor in the form it is kept in: dense, where it came as at least as many columns as features."""
    if side.form is not Form.DENSE or isinstance(factor, DenseFactor):
        return factor
    if isinstance(factor, SoftmaxFactor):  # a difference: in float64, so that no sure class is below 0
        wide = factor._replace(total=factor.total.double(), columns=factor.columns.double())
        total = factors.to_dense(wide).total
        total.diagonal().clamp_(min=0)
        return DenseFactor(total.to(factor.total.dtype), factor.weight)
    return factors.to_dense(factor)


def added(kept: Kept, factor: Factor, side: Side, *, rho: float, sharding: Sharding | None = None) -> Kept:
    """What was kept, decayed, and a measurement; on the device and in the dtypes of what was kept.

    Columns of a softmax are rounded as they are stored, and its total moves with them: ``diag(total) - U U^T`` is that
    of the columns that are kept. With ``sharding`` these are this rank's own, beside the total of all ranks.
    """
    if not isinstance(kept, Window):
        here = tree.map(lambda x: x.to(device=factor.weight.device), kept)
        both = factors.add(factors.decayed(here, rho), factor)
        return tree.map(lambda new, old: new.to(old), both, kept)
    assert isinstance(factor, ColumnsFactor | SoftmaxFactor)
    k = side.columns
    if factor.columns.shape[1] > k:
        raise FdpError(f"columns: expected at most {k} of a measurement, got {factor.columns.shape[1]}")
    wide = factors.widened(factor.columns)
    full = torch.cat([wide, wide.new_zeros(len(wide), k - wide.shape[1])], 1)
    stored = keep(factor._replace(columns=full), device=kept.weights.device, dtype=kept.columns.dtype)
    assert isinstance(stored.factor, ColumnsFactor | SoftmaxFactor)
    scale = stored.factor.columns.new_ones(k) if stored.scale is None else stored.scale
    total = kept.totals.new_zeros(0)
    if isinstance(factor, SoftmaxFactor):
        total = factor.total
        if kept.columns.dtype != wide.dtype:
            rounded = stored.factor.columns.to(scale.dtype) / scale
            moved = row_sums(rounded).to(wide.device) - row_sums(full)
            total = (total.double() + sum_over_samples(sharding, moved)).clamp(min=0)
    older = kept.columns.shape[1] - k
    return Window(
        torch.cat([total[None].to(kept.totals), kept.totals[:-1] * rho]),
        torch.cat([stored.factor.columns, kept.columns[:, :older]], 1),
        torch.cat([scale.to(kept.scale), kept.scale[:older] / rho**0.5 if rho else kept.scale[:older] * torch.inf]),
        torch.cat([stored.factor.weight[None].to(kept.weights), kept.weights[:-1] * rho]),
    )


def factor_of(kept: Kept, side: Side, *, device: torch.device) -> Factor:
    """The factor again, on ``device``."""
    here = tree.map(lambda x: x.to(device), kept)
    if isinstance(here, DiagonalFactor) and side.groups > 1:
        return GroupedFactor(here.total.view(side.groups, -1), here.weight)
    if not isinstance(here, Window):
        return here
    columns, weight = here.columns.to(here.scale.dtype) / here.scale, here.weights.sum()
    if side.form is Form.COLUMNS:
        return ColumnsFactor(columns, weight)
    return SoftmaxFactor(here.totals.sum(0), columns, weight)


def identity(
    left: Side, right: Side, *, window: int, product: bool, ring: bool, dtype: torch.dtype, device: torch.device
) -> Placed:
    """The place of a layer's preconditioner, holding the identity."""
    if product:
        rows, columns = (torch.eye(side.size, dtype=dtype, device=device) for side in (left, right))
        return Product(rows, columns, torch.ones(left.size, right.size, dtype=dtype, device=device))

    def place(side: Side) -> Map | RingPart | None:
        n, k = side.size, side.columns * window
        if side.form is Form.SKIP:
            return None
        if side.form is Form.DENSE:
            return MatrixMap(torch.eye(n, dtype=dtype, device=device))
        ones = torch.ones(n, dtype=dtype, device=device)
        if side.form is Form.DIAGONAL:
            return diagonal_map(ones) if side.groups == 1 else GroupedMap(ones.view(side.groups, -1))
        return (
            RingPart(ones, ones.new_zeros(n, k)) if ring else LowRankMap(ones, ones.new_zeros(n, k), _square(ones, k))
        )

    maps = place(left), place(right)
    return RingSides(*maps) if ring else Sides(*maps)  # pyright: ignore


def fitted(made: Preconditioner | RingSides, like: Placed) -> Placed:
    """The same preconditioner in the structure, shapes, dtypes and on the devices of ``like``."""
    if isinstance(like, Product):
        if isinstance(made, Sides):  # no curvature: a multiple of the identity
            flat = like.scale.new_ones(len(like.scale)) if made.left is None else made.left[0].to(like.scale)
            rows, columns = (torch.eye(len(q), dtype=q.dtype, device=q.device) for q in like[:2])
            return Product(rows, columns, flat[:, None].expand(like.scale.shape).clone())
        return tree.map(lambda new, old: new.to(old), made, like)
    assert not isinstance(made, Product)
    maps = (None if place is None else _fitted_map(m, place) for m, place in zip(made, like))  # pyright: ignore
    return type(like)(*maps)  # pyright: ignore


def ring_sides(placed: RingSides, left: Side, right: Side) -> RingSides:
    """What ``precondition_ring`` takes, of what is in its place."""

    def with_sign(part: Map | RingPart | RingMap | None, side: Side) -> Map | RingMap | None:
        return RingMap(*part, 1 if side.form is Form.SOFTMAX else -1) if isinstance(part, RingPart) else part

    return RingSides(with_sign(placed.left, left), with_sign(placed.right, right))


def _fitted_map(made: Map | RingMap | None, place: Map | RingPart) -> Map | RingPart:
    first = place[0]
    if isinstance(place, MatrixMap):
        if made is None:
            return MatrixMap(torch.eye(len(first), dtype=first.dtype, device=first.device))
        if isinstance(made, LowRankMap):
            made = MatrixMap(made.diagonal.diag() + made.columns @ made.core @ made.columns.mT)
        return MatrixMap(made[0].to(first))
    if isinstance(place, GroupedMap):
        return GroupedMap(torch.ones_like(first) if made is None else made[0].to(first))
    n, k = place.columns.shape
    if made is None:
        made = diagonal_map(torch.ones_like(first))
    assert not isinstance(made, MatrixMap | GroupedMap)
    some = made.columns.shape[1]
    if some == k:
        return type(place)(*(part.to(first) for part in made[: len(place)]))  # pyright: ignore
    if some > k:
        raise FdpError(f"preconditioner: expected at most {k} columns, got {some}")
    columns = torch.cat([made.columns.to(first), first.new_zeros(n, k - some)], 1)
    if isinstance(place, RingPart):
        return RingPart(made.diagonal.to(first), columns)
    assert isinstance(made, LowRankMap)
    core = _square(first, k)
    core[:some, :some] = made.core.to(first)
    return LowRankMap(made.diagonal.to(first), columns, core)


def _square(like: Tensor, k: int) -> Tensor:
    return like.new_zeros(k, k)
