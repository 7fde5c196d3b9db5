"""Slots of fixed shape for factors and preconditioners, so that the training state never changes its structure.

    dense, diagonal    total <- rho total + total_new,   weight <- rho weight + weight_new
    columns, softmax   the columns of the last measurements, newest first; each older one is multiplied by sqrt(rho)

A slot has as many columns as a measurement can have; zero columns fill it up and do not change the matrix. A side with
as many columns as features is stored dense. Preconditioner slots hold the identity at first.

    >>> slot = empty_slot(side, window=1, dtype=torch.float32, column_dtype=torch.float16, device=device)
    >>> slot = add_to_slot(slot, factor, side, rho=0.95)
    >>> factor = read_slot(slot, side, device=device)
    >>> maps = fit_to_slot(invert(curvature, ...), like=identity_slot(left, right, ...))
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.gradients.linear_maps import GroupedMap, LowRankMap, Map, MatrixMap, Sides, diagonal_map
from fdp.kfac import factors
from fdp.kfac.factor_forms import Form
from fdp.kfac.factor_storage import compress
from fdp.kfac.inversion.softmax_head import row_sums
from fdp.kfac.ranks.ring_inverse import RingMap, RingPreconditioner
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


class SideSpec(NamedTuple):
    """The layout of a side's slot: its form, its number of features, and the most columns of one measurement.

    ``groups``: those of a convolution, or experts; their diagonals are concatenated, and ``size`` is the total length.
    """

    form: Form
    size: int
    columns: int
    groups: int = 1


class ColumnWindow(NamedTuple):
    """The columns of the last measurements, multiplied by ``scale``, and one total and weight per measurement."""

    totals: Float[Tensor, "window n"]
    columns: Float[Tensor, "n window*k"]
    scale: Float[Tensor, " window*k"]
    weights: Float[Tensor, " window"]


class RingSlot(NamedTuple):
    """A ``RingMap`` without its sign, which follows from the form; columns are this rank's own."""

    diagonal: Float[Tensor, " n"]
    columns: Float[Tensor, "n k"]


FactorSlot: TypeAlias = DenseFactor | DiagonalFactor | ColumnWindow
PreconditionerSlot: TypeAlias = Sides | Product | RingPreconditioner


def empty_slot(
    side: SideSpec, *, window: int, dtype: torch.dtype, column_dtype: torch.dtype | None, device: torch.device
) -> FactorSlot | None:
    """Return a factor slot of zeros; None for a side that is skipped."""

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
            return ColumnWindow(totals, columns, torch.ones(window * k, dtype=dtype, device=device), zeros(window))


def to_slot_form(factor: Factor, side: SideSpec) -> Factor:
    """Convert a measurement to the form of its slot: dense, if it has at least as many columns as features."""
    if side.form is not Form.DENSE or isinstance(factor, DenseFactor):
        return factor
    if isinstance(factor, SoftmaxFactor):  # a difference, in float64 so that no certain class is below 0
        wide = factor._replace(total=factor.total.double(), columns=factor.columns.double())
        total = factors.to_dense(wide).total
        total.diagonal().clamp_(min=0)
        return DenseFactor(total.to(factor.total.dtype), factor.weight)
    return factors.to_dense(factor)


def add_to_slot(
    slot: FactorSlot, factor: Factor, side: SideSpec, *, rho: float, sharding: Sharding | None = None
) -> FactorSlot:
    """Return the slot, decayed, plus a measurement, with the slot's device and dtypes.

    The columns of a softmax are rounded when they are stored, and its total is corrected so that ``diag(total) - U
    U^T`` is exact for the stored columns. With ``sharding``, columns are this rank's own and totals are all ranks'
    sums.
    """
    if not isinstance(slot, ColumnWindow):
        here = tree.map(lambda x: x.to(device=factor.weight.device), slot)
        both = factors.add(factors.decay(here, rho), factor)
        return tree.map(lambda new, old: new.to(old), both, slot)
    assert isinstance(factor, ColumnsFactor | SoftmaxFactor)
    k = side.columns
    if factor.columns.shape[1] > k:
        raise FdpError(
            f"columns: expected at most {k} in a measurement, the size of its slot, got {factor.columns.shape[1]}"
        )
    wide = factors.upcast(factor.columns)
    full = torch.cat([wide, wide.new_zeros(len(wide), k - wide.shape[1])], 1)
    stored = compress(factor._replace(columns=full), device=slot.weights.device, dtype=slot.columns.dtype)
    assert isinstance(stored.factor, ColumnsFactor | SoftmaxFactor)
    scale = stored.factor.columns.new_ones(k) if stored.scale is None else stored.scale
    total = slot.totals.new_zeros(0)
    if isinstance(factor, SoftmaxFactor):
        total = factor.total
        if slot.columns.dtype != wide.dtype:
            rounded = stored.factor.columns.to(scale.dtype) / scale
            change = row_sums(rounded).to(wide.device) - row_sums(full)
            total = (total.double() + sum_over_samples(sharding, change)).clamp(min=0)
    older = slot.columns.shape[1] - k
    return ColumnWindow(
        torch.cat([total[None].to(slot.totals), slot.totals[:-1] * rho]),
        torch.cat([stored.factor.columns, slot.columns[:, :older]], 1),
        torch.cat([scale.to(slot.scale), slot.scale[:older] / rho**0.5 if rho else slot.scale[:older] * torch.inf]),
        torch.cat([stored.factor.weight[None].to(slot.weights), slot.weights[:-1] * rho]),
    )


def read_slot(slot: FactorSlot, side: SideSpec, *, device: torch.device) -> Factor:
    """Return the factor of a slot, on ``device``."""
    here = tree.map(lambda x: x.to(device), slot)
    if isinstance(here, DiagonalFactor) and side.groups > 1:
        return GroupedFactor(here.total.view(side.groups, -1), here.weight)
    if not isinstance(here, ColumnWindow):
        return here
    columns, weight = here.columns.to(here.scale.dtype) / here.scale, here.weights.sum()
    if side.form is Form.COLUMNS:
        return ColumnsFactor(columns, weight)
    return SoftmaxFactor(here.totals.sum(0), columns, weight)


def identity_slot(
    left: SideSpec, right: SideSpec, *, window: int, product: bool, ring: bool, dtype: torch.dtype, device: torch.device
) -> PreconditionerSlot:
    """Return the slot of a layer's preconditioner, holding the identity."""
    if product:
        rows, columns = (torch.eye(side.size, dtype=dtype, device=device) for side in (left, right))
        return Product(rows, columns, torch.ones(left.size, right.size, dtype=dtype, device=device))

    def make(side: SideSpec) -> Map | RingSlot | None:
        n, k = side.size, side.columns * window
        if side.form is Form.SKIP:
            return None
        if side.form is Form.DENSE:
            return MatrixMap(torch.eye(n, dtype=dtype, device=device))
        ones = torch.ones(n, dtype=dtype, device=device)
        if side.form is Form.DIAGONAL:
            return diagonal_map(ones) if side.groups == 1 else GroupedMap(ones.view(side.groups, -1))
        columns = ones.new_zeros(n, k)
        return RingSlot(ones, columns) if ring else LowRankMap(ones, columns, ones.new_zeros(k, k))

    maps = make(left), make(right)
    return RingPreconditioner(*maps) if ring else Sides(*maps)  # pyright: ignore


def fit_to_slot(inverse: Preconditioner | RingPreconditioner, like: PreconditionerSlot) -> PreconditionerSlot:
    """Return the preconditioner with the structure, shapes, dtypes and devices of the slot ``like``."""
    if isinstance(like, Product):
        if isinstance(inverse, Sides):  # without curvature, a multiple of the identity
            flat = like.scale.new_ones(len(like.scale)) if inverse.left is None else inverse.left[0].to(like.scale)
            rows, columns = (torch.eye(len(q), dtype=q.dtype, device=q.device) for q in like[:2])
            return Product(rows, columns, flat[:, None].expand(like.scale.shape).clone())
        return tree.map(lambda new, old: new.to(old), inverse, like)
    assert not isinstance(inverse, Product)
    maps = (None if slot is None else _fit_map(m, slot) for m, slot in zip(inverse, like))  # pyright: ignore
    return type(like)(*maps)  # pyright: ignore


def read_ring_slot(slot: RingPreconditioner, left: SideSpec, right: SideSpec) -> RingPreconditioner:
    """Return the preconditioner of a slot with the signs that ``precondition_ring`` needs."""

    def with_sign(part: Map | RingSlot | RingMap | None, side: SideSpec) -> Map | RingMap | None:
        return RingMap(*part, 1 if side.form is Form.SOFTMAX else -1) if isinstance(part, RingSlot) else part

    return RingPreconditioner(with_sign(slot.left, left), with_sign(slot.right, right))


def _fit_map(map: Map | RingMap | None, slot: Map | RingSlot) -> Map | RingSlot:
    first = slot[0]
    if isinstance(slot, MatrixMap):
        if map is None:
            return MatrixMap(torch.eye(len(first), dtype=first.dtype, device=first.device))
        if isinstance(map, LowRankMap):
            map = MatrixMap(map.diagonal.diag() + map.columns @ map.core @ map.columns.mT)
        return MatrixMap(map[0].to(first))
    if isinstance(slot, GroupedMap):
        return GroupedMap(torch.ones_like(first) if map is None else map[0].to(first))
    n, k = slot.columns.shape
    if map is None:
        map = diagonal_map(torch.ones_like(first))
    assert not isinstance(map, MatrixMap | GroupedMap)
    count = map.columns.shape[1]
    if count == k:
        return type(slot)(*(part.to(first) for part in map[: len(slot)]))  # pyright: ignore
    if count > k:
        raise FdpError(f"preconditioner: expected at most {k} columns, the size of its slot, got {count}")
    columns = torch.cat([map.columns.to(first), first.new_zeros(n, k - count)], 1)
    if isinstance(slot, RingSlot):
        return RingSlot(map.diagonal.to(first), columns)
    assert isinstance(map, LowRankMap)
    core = first.new_zeros(k, k)
    core[:count, :count] = map.core.to(first)
    return LowRankMap(map.diagonal.to(first), columns, core)
