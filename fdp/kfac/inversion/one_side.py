"""The damped power of one factor, ``(M + damping I)^power``, as a map of the form that suits the factor.

dense      MatrixMap, by Cholesky or eigenvalues
diagonal   LowRankMap without columns; GroupedMap for groups
columns    LowRankMap, by Woodbury
softmax    LowRankMap, by Woodbury; MatrixMap if there are at least as many tokens as classes

>>> inverse = invert_side(factor, damping=1e-3, via=Via.CHOLESKY)
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.linear_maps import GroupedMap, Map, MatrixMap, Sides, diagonal_map
from fdp.kfac.factors import CurvatureError, matrix, size, sum_dtype
from fdp.kfac.inversion.softmax_head import mass, softmax_map
from fdp.kfac.inversion.woodbury import Power, cholesky, damped_power, eigh, woodbury_cholesky, woodbury_map
from fdp.kfac.types import ColumnsFactor, DenseFactor, DiagonalFactor, Factor, GroupedFactor, SoftmaxFactor
from fdp.types import FdpError

NEGATIVE_TOLERANCE = 1e-3
"""The most negative eigenvalue, relative to the largest, that counts as rounding: n = 4096 in float32, and a margin."""


class Via(Enum):
    """The decomposition used to invert: eigenvalues, or Cholesky, which is faster but has no eigenvalues to clip."""

    EIGEN = "eigen"
    CHOLESKY = "cholesky"


def invert_side(
    factor: Factor,
    *,
    damping: float,
    via: Via,
    max_condition: float | None = None,
    power: Power = Power.INVERSE,
    dtype: torch.dtype | None = None,
) -> Map:
    """Return ``(M + damping I)^power`` of one factor, without checking settings and factor."""
    dtype = dtype or factor_dtype(factor)
    match factor:
        case DenseFactor(total, weight):
            m = total.to(dtype) / weight.to(dtype)
            return MatrixMap(_dense_power(m, damping=damping, via=via, max_condition=max_condition, power=power))
        case DiagonalFactor(total, weight):
            values = total.double() / weight.double()
            floor = least_eigenvalue(values.max(), damping, max_condition)
            return diagonal_map(damped_power(values, damping=damping, floor=floor, power=power).to(dtype))
        case ColumnsFactor(columns, weight):
            if via is Via.CHOLESKY:
                return woodbury_cholesky(columns, weight=weight, damping=damping, dtype=dtype)
            return woodbury_map(
                columns, weight=weight, damping=damping, power=power, max_condition=max_condition, dtype=dtype
            )
        case SoftmaxFactor(total, columns, weight):
            if has_many_tokens(factor):
                m = matrix(SoftmaxFactor(mass(factor), columns.double(), weight.double()))
                done = _dense_power(m, damping=damping, via=via, max_condition=max_condition, power=power)
                return MatrixMap(done.to(dtype))
            if max_condition is not None:
                damping = max(damping, float(total.max() / weight) / (max_condition - 1.0))
            return softmax_map(factor, damping=damping, dtype=dtype)
        case GroupedFactor():
            inverse = invert_groups(
                factor, None, damping=damping, max_condition=max_condition, power=power, dtype=dtype
            )
            assert inverse.left is not None
            return inverse.left


def invert_groups(
    left: Factor | None,
    right: Factor | None,
    *,
    damping: float,
    max_condition: float | None,
    power: Power,
    dtype: torch.dtype | None,
) -> Sides:
    """Return ``(L_g + sqrt(damping) / pi_g)^power`` and ``(R_g + sqrt(damping) pi_g)^power`` for every group g."""
    sides = [_values(left), _values(right)]
    there = [values for values in sides if values is not None]
    shares = [torch.full_like(there[0][:, :1], damping)] * 2
    flat = torch.zeros_like(shares[0], dtype=torch.bool)
    if len(there) == 2:
        traces = [values.mean(1, keepdim=True) for values in there]
        flat = (traces[0] == 0) | (traces[1] == 0)  # pi is undefined
        pi = torch.where(flat, 1.0, (traces[1] / traces[0]).sqrt())
        shares = [math.sqrt(damping) / pi, math.sqrt(damping) * pi]
    maps: list[Map | None] = []
    for values, share, uncurved, factor in zip(sides, shares, (damping**power.value, 1.0), (left, right)):
        if values is None or factor is None:
            maps.append(None)
            continue
        damped = values + share
        if max_condition is not None:
            damped = torch.maximum(damped, damped.amax(1, keepdim=True) / max_condition)
        done = torch.where(flat, uncurved, damped**power.value)
        maps.append(GroupedMap(done.to(dtype or factor_dtype(factor))))
    return Sides(*maps)


def _values(factor: Factor | None) -> Float[Tensor, "groups n"] | None:
    if factor is None:
        return None
    if not isinstance(factor, GroupedFactor):
        raise FdpError(
            f"invert: expected a GroupedFactor on both sides of a layer with groups, got {type(factor).__name__}"
        )
    return factor.total.double() / factor.weight.double()


def _dense_power(
    m: Float[Tensor, "n n"], *, damping: float, via: Via, max_condition: float | None, power: Power
) -> Float[Tensor, "n n"]:
    if via is Via.CHOLESKY:
        damped = (m + m.mT) / 2 + damping * torch.eye(len(m), dtype=m.dtype, device=m.device)
        return torch.cholesky_inverse(cholesky(damped, name="damped factor"))
    values, vectors = spectrum(m)
    floor = least_eigenvalue(values[-1], damping, max_condition)
    done = (vectors * damped_power(values, damping=damping, floor=floor, power=power)) @ vectors.mT
    return (done + done.mT) / 2


def spectrum(m: Float[Tensor, "n n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"]]:
    """Return ascending eigenvalues, clamped at 0 because of rounding, and eigenvectors."""
    values, vectors = eigh((m + m.mT) / 2, name="factor")
    lowest, highest = torch.stack([values[0], values[-1]]).tolist()
    if lowest < -NEGATIVE_TOLERANCE * max(abs(lowest), abs(highest)):
        raise CurvatureError(
            f"factor: expected no negative eigenvalue beyond rounding, got {lowest:.3g} (the largest: {highest:.3g}). "
            "It is no sum of outer products; create it with factors.dense."
        )
    return values.clamp(min=0), vectors


def least_eigenvalue(largest: Tensor, damping: float, max_condition: float | None) -> float:
    """Return the least damped eigenvalue; waits for the device only if there is a ``max_condition``."""
    return 0.0 if max_condition is None else (float(largest) + damping) / max_condition


def has_many_tokens(factor: SoftmaxFactor) -> bool:
    """Return True if there are at least as many tokens as classes, so that the matrix is smaller than the columns."""
    return factor.columns.shape[1] >= size(factor)


def factor_dtype(factor: Factor) -> torch.dtype:
    """Return the factor's dtype, at least float32."""
    held = factor.columns if isinstance(factor, ColumnsFactor | SoftmaxFactor) else factor.total
    return sum_dtype(held.dtype)
