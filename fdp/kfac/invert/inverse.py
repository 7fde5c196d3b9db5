"""From curvature to what a gradient is multiplied by: damping, inverting, and what to do when that fails.

    Damping.PI       (L + sqrt(damping) / pi I)^-1 G (R + sqrt(damping) pi I)^-1,   pi^2 = mean_trace(R) / mean_trace(L)
    Damping.PRODUCT  (L (x) R + damping I)^-1 G = Q_L ((Q_L^T G Q_R) / (d_L d_R^T + damping)) Q_R^T

The damping is on the scale of the product in both. PI (Martens and Grosse 2015, arXiv 1503.05671, section 6.3) damps
``sqrt(damping) (pi L (x) I + I (x) R / pi)`` more than it says, whose trace this pi makes least, and works for factors
that are never formed. Both are exact where one side is None, the identity: the other gets all the damping; and
where a factor is zero: the curvature is then ``damping I``. Every group of a convolution, and every expert, is a
product of its own, with a pi of its own.

``max_condition`` raises every *damped* eigenvalue that is below ``largest damped eigenvalue / max_condition`` to it: of
each side for PI, of the product for PRODUCT. A softmax side, whose eigenvalues are not computed, has its damping raised
to ``p_max / (max_condition - 1)``, which bounds the same quotient.

    >>> preconditioner = invert(Curvature(left, right), damping=1e-3, method=Damping.PI, via=Via.CHOLESKY)
    >>> update = precondition(preconditioner, gradient)
    >>> preconditioner, ok = invert_or_keep(curvature, preconditioner, damping=1e-3, method=Damping.PI, via=Via.EIGEN)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.gradients.linear_maps import GroupedMap, Map, MatrixMap, Sides, diagonal_map
from fdp.gradients.linear_maps import apply_map as apply_map
from fdp.gradients.linear_maps import apply_rows as apply_rows
from fdp.kfac.factors import CurvatureError, check_factor, diagonal_of, matrix, mean_trace, size, wider
from fdp.kfac.invert.apply import precondition as precondition
from fdp.kfac.invert.foreach import finite_each
from fdp.kfac.invert.softmax_head import mass, softmax_map
from fdp.kfac.invert.woodbury import Power, check_damping, cholesky, damped_power, eigh, woodbury_cholesky, woodbury_map
from fdp.kfac.types import (
    ColumnsFactor,
    Curvature,
    DenseFactor,
    DiagonalFactor,
    Factor,
    GroupedFactor,
    Preconditioner,
    Product,
    SoftmaxFactor,
)
from fdp.types import FdpError

NEGATIVE = 1e-3
"""How far below 0, relative to the largest, rounding may put an eigenvalue: n = 4096 in float32, with some room."""


class Damping(Enum):
    """Where the damping goes: to each factor, balanced by pi; or to the product of both, exactly."""

    PI = "pi"
    PRODUCT = "product"


class Via(Enum):
    """How a factor is inverted: by its eigenvalues, or by Cholesky, which is faster and shows none."""

    EIGEN = "eigen"
    CHOLESKY = "cholesky"


def invert(
    curvature: Curvature,
    *,
    damping: float,
    method: Damping,
    via: Via,
    max_condition: float | None = None,
    power: Power = Power.INVERSE,
    dtype: torch.dtype | None = None,
) -> Preconditioner:
    """``(L (x) R + damping I)^power``, damped by ``method``; a curvature of None and None is the identity.

    ``dtype`` is what matrices are decomposed in and the result is kept in; None: that of the factors, float32 at least.

    Guarantees:
      - the result is finite, symmetric and positive, or a CurvatureError says which factor is to blame;
      - settings that make no sense are an FdpError, whatever the factors are.
    """
    check_settings(damping=damping, method=method, via=via, max_condition=max_condition, power=power)
    _check_forms(curvature, method, power)
    left, right = curvature
    for name, factor in zip(curvature._fields, curvature):
        if factor is not None:
            check_factor(factor, name)

    def side(factor: Factor, name: str, share: float) -> Map:
        with _blame(name):
            return invert_side(factor, damping=share, via=via, max_condition=max_condition, power=power, dtype=dtype)

    if isinstance(left, GroupedFactor) or isinstance(right, GroupedFactor):
        own = _invert_groups(left, right, damping=damping, max_condition=max_condition, power=power, dtype=dtype)
        return _finite(own)
    if left is None or right is None:
        whole = [None if f is None else side(f, name, damping) for name, f in zip(curvature._fields, curvature)]
        return _finite(Sides(*whole))
    traces = torch.stack([mean_trace(left), mean_trace(right)]).tolist()
    if 0.0 in traces:  # no curvature at all, and no pi
        flat = diagonal_of(left).total.new_full((size(left),), damping**power.value)
        return _finite(Sides(diagonal_map(flat if dtype is None else flat.to(dtype)), None))
    if method is Damping.PRODUCT:
        return _finite(_product(left, right, damping=damping, max_condition=max_condition, power=power, dtype=dtype))
    pi = math.sqrt(traces[1]) / math.sqrt(traces[0])
    root = math.sqrt(damping)
    return _finite(Sides(side(left, "left", root / pi), side(right, "right", root * pi)))


def invert_or_keep(
    curvature: Curvature,
    last: Preconditioner | None,
    *,
    damping: float,
    method: Damping,
    via: Via,
    max_condition: float | None = None,
    power: Power = Power.INVERSE,
    dtype: torch.dtype | None = None,
) -> tuple[Preconditioner, bool]:
    """:func:`invert`, tried again in float64 and then on the CPU; failing that ``(last, False)``: count these.

    With no ``last``, the identity. Wrong settings are not forgiven: they raise, as they would at every step.
    """
    factors = [factor for factor in curvature if factor is not None]
    home = factors[0].weight.device if factors else torch.device("cpu")
    kept = dtype or max((_own_dtype(factor) for factor in factors), key=lambda d: d.itemsize, default=torch.float32)
    for tried, device in dict.fromkeys([(dtype, home), (torch.float64, home), (torch.float64, torch.device("cpu"))]):
        moved = tree.map(lambda x, device=device: x.to(device), curvature)
        try:
            found = invert(
                moved, damping=damping, method=method, via=via, max_condition=max_condition, power=power, dtype=tried
            )
            fitting = all(x.dtype == kept for x in tree.leaves(found))  # then it has been looked at
            found = tree.map(lambda x: x.to(device=home, dtype=kept), found)
            return (found if fitting else _finite(found)), True
        except CurvatureError:
            continue
    return (Sides(None, None) if last is None else last), False


def invert_side(
    factor: Factor,
    *,
    damping: float,
    via: Via,
    max_condition: float | None = None,
    power: Power = Power.INVERSE,
    dtype: torch.dtype | None = None,
) -> Map:
    """``(M + damping I)^power`` of one factor, in the form that its form allows; settings and factor not checked."""
    dtype = dtype or _own_dtype(factor)
    match factor:
        case DenseFactor(total, weight):
            m = total.to(dtype) / weight.to(dtype)
            return MatrixMap(_dense_power(m, damping=damping, via=via, max_condition=max_condition, power=power))
        case DiagonalFactor(total, weight):
            values = total.double() / weight.double()
            floor = _floor(values.max(), damping, max_condition)
            return diagonal_map(damped_power(values, damping=damping, floor=floor, power=power).to(dtype))
        case ColumnsFactor(columns, weight):
            if via is Via.CHOLESKY:
                return woodbury_cholesky(columns, weight=weight, damping=damping, dtype=dtype)
            return woodbury_map(
                columns, weight=weight, damping=damping, power=power, max_condition=max_condition, dtype=dtype
            )
        case SoftmaxFactor(total, columns, weight):
            if _small(factor):
                m = matrix(SoftmaxFactor(mass(factor), columns.double(), weight.double()))
                done = _dense_power(m, damping=damping, via=via, max_condition=max_condition, power=power)
                return MatrixMap(done.to(dtype))
            if max_condition is not None:
                damping = max(damping, float(total.max() / weight) / (max_condition - 1.0))
            return softmax_map(factor, damping=damping, dtype=dtype)
        case GroupedFactor():
            made = _invert_groups(factor, None, damping=damping, max_condition=max_condition, power=power, dtype=dtype)
            assert made.left is not None
            return made.left


def _invert_groups(
    left: Factor | None,
    right: Factor | None,
    *,
    damping: float,
    max_condition: float | None,
    power: Power,
    dtype: torch.dtype | None,
) -> Sides:
    """``(L_g + sqrt(damping) / pi_g)^power`` and ``(R_g + sqrt(damping) pi_g)^power`` of every group g."""
    sides = [_values(left), _values(right)]
    there = [values for values in sides if values is not None]
    shares = [torch.full_like(there[0][:, :1], damping)] * 2
    flat = torch.zeros_like(shares[0], dtype=torch.bool)
    if len(there) == 2:
        traces = [values.mean(1, keepdim=True) for values in there]
        flat = (traces[0] == 0) | (traces[1] == 0)  # no curvature at all, and no pi
        pi = torch.where(flat, 1.0, (traces[1] / traces[0]).sqrt())
        shares = [math.sqrt(damping) / pi, math.sqrt(damping) * pi]
    maps: list[Map | None] = []
    for values, share, alone, factor in zip(sides, shares, (damping**power.value, 1.0), (left, right)):
        if values is None or factor is None:
            maps.append(None)
            continue
        damped = values + share
        if max_condition is not None:
            damped = torch.maximum(damped, damped.amax(1, keepdim=True) / max_condition)
        done = torch.where(flat, alone, damped**power.value)
        maps.append(GroupedMap(done.to(dtype or _own_dtype(factor))))
    return Sides(*maps)


def _values(factor: Factor | None) -> Float[Tensor, "groups n"] | None:
    if factor is None:
        return None
    if not isinstance(factor, GroupedFactor):
        raise FdpError(f"invert: expected both sides of a layer with groups by group, got a {type(factor).__name__}")
    return factor.total.double() / factor.weight.double()


def check_settings(*, damping: float, method: Damping, via: Via, max_condition: float | None, power: Power) -> None:
    """Refuses a damping that is not positive, a condition below 1, and what Cholesky cannot give."""
    check_damping(damping)
    if max_condition is not None and not (math.isfinite(max_condition) and max_condition > 1.0):
        raise FdpError(
            f"max_condition: expected a finite number above 1, or None for no clipping, got {max_condition}. "
            "1e6 is a common choice."
        )
    if via is Via.CHOLESKY:
        for wanted, what in (
            (method is Damping.PRODUCT, "Damping.PRODUCT"),
            (max_condition is not None, "max_condition"),
            (power is Power.ROOT, "Power.ROOT"),
        ):
            if wanted:
                raise FdpError(f"invert: {what} needs eigenvalues, which Via.CHOLESKY has not. Use Via.EIGEN.")


def _check_forms(curvature: Curvature, method: Damping, power: Power) -> None:
    forms = [type(factor).__name__ for factor in curvature if factor is not None]
    if method is Damping.PRODUCT and len(forms) == 2 and set(forms) != {"DenseFactor"}:
        raise FdpError(
            f"invert: Damping.PRODUCT takes the eigenvectors of both sides as matrices, got a {forms[0]} and a "
            f"{forms[1]}, which are never formed. Use Damping.PI, or factors.to_dense where n is small."
        )
    for factor in curvature:
        if power is Power.ROOT and isinstance(factor, SoftmaxFactor) and not _small(factor):
            raise FdpError(
                f"invert: the inverse of a softmax factor has no root of low rank, got one of {size(factor)} classes "
                f"and {factor.columns.shape[1]} tokens. Take factors.diagonal_of(factor) for Power.ROOT."
            )


def _small(factor: SoftmaxFactor) -> bool:
    """At least as many tokens as classes: the matrix is what is smaller."""
    return factor.columns.shape[1] >= size(factor)


def _dense_power(
    m: Float[Tensor, "n n"], *, damping: float, via: Via, max_condition: float | None, power: Power
) -> Float[Tensor, "n n"]:
    if via is Via.CHOLESKY:
        damped = (m + m.mT) / 2 + damping * torch.eye(len(m), dtype=m.dtype, device=m.device)
        return torch.cholesky_inverse(cholesky(damped, name="damped factor"))
    values, vectors = _spectrum(m)
    floor = _floor(values[-1], damping, max_condition)
    done = (vectors * damped_power(values, damping=damping, floor=floor, power=power)) @ vectors.mT
    return (done + done.mT) / 2


def _product(
    left: Factor,
    right: Factor,
    *,
    damping: float,
    max_condition: float | None,
    power: Power,
    dtype: torch.dtype | None,
) -> Product:
    assert isinstance(left, DenseFactor)
    assert isinstance(right, DenseFactor)
    dtype = dtype or torch.promote_types(left.total.dtype, right.total.dtype)
    with _blame("left"):
        d_left, q_left = _spectrum(left.total.to(dtype) / left.weight.to(dtype))
    with _blame("right"):
        d_right, q_right = _spectrum(right.total.to(dtype) / right.weight.to(dtype))
    products = torch.outer(d_left, d_right)
    floor = _floor(products.max(), damping, max_condition)
    return Product(q_left, q_right, damped_power(products, damping=damping, floor=floor, power=power))


def _spectrum(m: Float[Tensor, "n n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"]]:
    """Eigenvalues, ascending, those that rounding left below 0 taken as 0; and eigenvectors."""
    values, vectors = eigh((m + m.mT) / 2, name="factor")
    lowest, highest = torch.stack([values[0], values[-1]]).tolist()
    if lowest < -NEGATIVE * max(abs(lowest), abs(highest)):
        raise CurvatureError(
            f"factor: expected no negative eigenvalue beyond rounding, got {lowest:.3g} (the largest: {highest:.3g}). "
            "It is no sum of outer products: make it by factors.dense."
        )
    return values.clamp(min=0), vectors


def _floor(largest: Tensor, damping: float, max_condition: float | None) -> float:
    """What damped eigenvalues are raised to; no device is waited for where nothing is."""
    return 0.0 if max_condition is None else (float(largest) + damping) / max_condition


def _finite(preconditioner: Preconditioner) -> Preconditioner:
    if not bool(finite_each(tree.leaves(preconditioner)).all()):
        raise CurvatureError("invert: the inverse is not finite in its dtype. Raise the damping, or use float64.")
    return preconditioner


@contextmanager
def _blame(name: str) -> Iterator[None]:
    """Says whose matrix it was."""
    try:
        yield
    except CurvatureError as error:
        raise CurvatureError(f"{name} {error}") from error


def _own_dtype(factor: Factor) -> torch.dtype:
    """That of the factor, float32 at least."""
    held = factor.columns if isinstance(factor, ColumnsFactor | SoftmaxFactor) else factor.total
    return wider(held.dtype)
