"""Damped inverses of Kronecker-factored curvature, with retries if an inversion fails.

    Damping.PI       (L + sqrt(damping) / pi I)^-1 G (R + sqrt(damping) pi I)^-1,   pi^2 = mean_trace(R) / mean_trace(L)
    Damping.PRODUCT  (L (x) R + damping I)^-1 G = Q_L ((Q_L^T G Q_R) / (d_L d_R^T + damping)) Q_R^T

In both the damping is on the scale of the product. PI (Martens and Grosse 2015, arXiv 1503.05671, section 6.3) adds an
extra ``sqrt(damping) (pi L (x) I + I (x) R / pi)``, whose trace this pi minimises, and works for factors that are never
formed. Both are exact if one side is None (the identity), in which case the other gets all the damping, and if a factor
is zero, in which case the damped curvature is ``damping I``. Every group of a convolution and every expert is a product
of its own, with its own pi.

``max_condition`` raises every *damped* eigenvalue to at least ``largest damped eigenvalue / max_condition``, per side
for PI and of the product for PRODUCT. The eigenvalues of a softmax side are not computed; its damping is raised to
``p_max / (max_condition - 1)``, which bounds the same quotient.

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

from fdp import tree
from fdp.gradients.linear_maps import Map, Sides, diagonal_map
from fdp.kfac.factors import CurvatureError, check_factor, diagonal_of, mean_trace, size
from fdp.kfac.foreach import foreach_is_finite
from fdp.kfac.inversion.one_side import (
    Via,
    factor_dtype,
    has_many_tokens,
    invert_groups,
    invert_side,
    least_eigenvalue,
    spectrum,
)
from fdp.kfac.inversion.woodbury import Power, check_damping, damped_power
from fdp.kfac.types import (
    Curvature,
    DenseFactor,
    Factor,
    GroupedFactor,
    Preconditioner,
    Product,
    SoftmaxFactor,
)
from fdp.types import FdpError


class Damping(Enum):
    """The damped quantity: each factor, balanced by pi, or the product of both, exactly."""

    PI = "pi"
    PRODUCT = "product"


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
    """Return ``(L (x) R + damping I)^power``, damped by ``method``; if both sides are None, the identity.

    ``dtype`` is the dtype of the decompositions and of the result (None: that of the factors, at least float32).

    Guarantees:
      - the result is finite, symmetric and positive, or a CurvatureError names the factor that fails;
      - invalid settings raise an FdpError, whatever the factors are.
    """
    check_settings(damping=damping, method=method, via=via, max_condition=max_condition, power=power)
    _check_forms(curvature, method, power)
    left, right = curvature
    for name, factor in zip(curvature._fields, curvature):
        if factor is not None:
            check_factor(factor, name)

    def side(factor: Factor, name: str, share: float) -> Map:
        with _name_in_errors(name):
            return invert_side(factor, damping=share, via=via, max_condition=max_condition, power=power, dtype=dtype)

    if isinstance(left, GroupedFactor) or isinstance(right, GroupedFactor):
        own = invert_groups(left, right, damping=damping, max_condition=max_condition, power=power, dtype=dtype)
        return _check_finite(own)
    if left is None or right is None:
        maps = [None if f is None else side(f, name, damping) for name, f in zip(curvature._fields, curvature)]
        return _check_finite(Sides(*maps))
    traces = torch.stack([mean_trace(left), mean_trace(right)]).tolist()
    if 0.0 in traces:  # pi is undefined, and the curvature is the damping alone
        flat = diagonal_of(left).total.new_full((size(left),), damping**power.value)
        return _check_finite(Sides(diagonal_map(flat if dtype is None else flat.to(dtype)), None))
    if method is Damping.PRODUCT:
        return _check_finite(
            _product(left, right, damping=damping, max_condition=max_condition, power=power, dtype=dtype)
        )
    pi = math.sqrt(traces[1]) / math.sqrt(traces[0])
    root = math.sqrt(damping)
    return _check_finite(Sides(side(left, "left", root / pi), side(right, "right", root * pi)))


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
    """Call :func:`invert`, retry in float64 and then on the CPU, and if all fail return ``(last, False)``.

    If ``last`` is None it is the identity. Invalid settings always raise.
    """
    factors = [factor for factor in curvature if factor is not None]
    home = factors[0].weight.device if factors else torch.device("cpu")
    final = dtype or max((factor_dtype(factor) for factor in factors), key=lambda d: d.itemsize, default=torch.float32)
    for tried, device in dict.fromkeys([(dtype, home), (torch.float64, home), (torch.float64, torch.device("cpu"))]):
        moved = tree.map(lambda x, device=device: x.to(device), curvature)
        try:
            found = invert(
                moved, damping=damping, method=method, via=via, max_condition=max_condition, power=power, dtype=tried
            )
            fitting = all(x.dtype == final for x in tree.leaves(found))  # then invert has checked it
            found = tree.map(lambda x: x.to(device=home, dtype=final), found)
            return (found if fitting else _check_finite(found)), True
        except CurvatureError:
            continue
    return (Sides(None, None) if last is None else last), False


def check_settings(*, damping: float, method: Damping, via: Via, max_condition: float | None, power: Power) -> None:
    """Raise an FdpError for a damping that is not positive, a condition below 1, and what Cholesky cannot compute."""
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
                raise FdpError(f"invert: {what} needs eigenvalues, which Via.CHOLESKY does not compute. Use Via.EIGEN.")


def _check_forms(curvature: Curvature, method: Damping, power: Power) -> None:
    forms = [type(factor).__name__ for factor in curvature if factor is not None]
    if method is Damping.PRODUCT and len(forms) == 2 and set(forms) != {"DenseFactor"}:
        raise FdpError(
            f"invert: expected dense factors on both sides with Damping.PRODUCT, which needs their eigenvectors, got a "
            f"{forms[0]} and a {forms[1]}. Use Damping.PI, or factors.to_dense if n is small."
        )
    for factor in curvature:
        if power is Power.ROOT and isinstance(factor, SoftmaxFactor) and not has_many_tokens(factor):
            raise FdpError(
                f"invert: expected another factor than softmax with Power.ROOT, because its inverse has no root of low "
                f"rank, got {size(factor)} classes and {factor.columns.shape[1]} tokens. Use factors.diagonal_of."
            )


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
    with _name_in_errors("left"):
        d_left, q_left = spectrum(left.total.to(dtype) / left.weight.to(dtype))
    with _name_in_errors("right"):
        d_right, q_right = spectrum(right.total.to(dtype) / right.weight.to(dtype))
    products = torch.outer(d_left, d_right)
    floor = least_eigenvalue(products.max(), damping, max_condition)
    return Product(q_left, q_right, damped_power(products, damping=damping, floor=floor, power=power))


def _check_finite(preconditioner: Preconditioner) -> Preconditioner:
    if not bool(foreach_is_finite(tree.leaves(preconditioner)).all()):
        raise CurvatureError("invert: the inverse is not finite in its dtype. Raise the damping, or use float64.")
    return preconditioner


@contextmanager
def _name_in_errors(name: str) -> Iterator[None]:
    """Prefix CurvatureErrors with the name of the factor."""
    try:
        yield
    except CurvatureError as error:
        raise CurvatureError(f"{name} {error}") from error
