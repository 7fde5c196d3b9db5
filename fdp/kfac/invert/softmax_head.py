"""The true Fisher information of a softmax head, inverted through the tokens: classes x classes is never formed.

    M = diag(p) - U U^T,    p = mean_t p_t,    U = [p_1 ... p_N] / sqrt(N)
    (M + lambda I)^-1 = D^-1 + D^-1 U C^-1 U^T D^-1,    D = diag(p) + lambda I,    C = I - U^T D^-1 U

As ``U U^T <= diag(p)``, the eigenvalues of the small C lie in ``[lambda / (lambda + p_max), 1]``: its condition number
is at most ``1 + p_max / lambda``, known before anything is computed, and checked. C is made and solved in float64
always, so no damping is too small for it that is above float64 rounding (1e-13 of ``p_max``, say); in float32 digits
would be gone from 1e-5 on.

Stored probabilities are rounded, which in ``diag(p) - U U^T`` would be a difference of roundings. But M is also

    x^T M x = 1/2 sum_t sum_ij u_ti u_tj (x_i - x_j)^2,    that is,    p = U U^T 1

so p is taken from the very columns that are subtracted: then rounding the probabilities moves M by the same relative
amount in every direction, float32 gives M to 1e-7 and float16 to 1e-3 at any damping, and constants stay in its kernel.

The root of the inverse has no such form, as D is no multiple of the identity: where a root is needed, take the
diagonal, ``factors.diagonal_of(factor)``.

    >>> apply = softmax_map(factor, damping=1e-4)                        # LowRankMap(1 / D, D^-1 U, C^-1)
    >>> x = softmax_solve(factor, y, damping=1e-4)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.linear_maps import LowRankMap
from fdp.kfac.factors import CurvatureError, widened
from fdp.kfac.invert.woodbury import SLICE, check_damping, cholesky, gram
from fdp.kfac.types import SoftmaxFactor


class Capacitance(NamedTuple):
    """``lower`` is the Cholesky factor of C, ``base`` is D, both float64; ``condition`` bounds the condition of C."""

    lower: Float[Tensor, "k k"]
    base: Float[Tensor, " n"]
    condition: float


def capacitance(factor: SoftmaxFactor, *, damping: float) -> Capacitance:
    """C of the small system, factorised.

    Guarantees:
      - the eigenvalues of C are at most 1, and above half of ``1 / condition``, ``condition = 1 + p_max / damping``:
        half, because of rounding. A factor that breaks this is no softmax's, and is refused.
    """
    check_damping(damping)
    p = mass(factor) / factor.weight.double()
    base = p + damping
    k = factor.columns.shape[1]
    eye = torch.eye(k, dtype=torch.float64, device=p.device)
    small = eye - gram(factor.columns, 1.0 / (base * factor.weight.double()))
    condition = 1.0 + float(p.max()) / damping
    if k:
        cholesky(small - eye * (0.5 / condition), name=f"softmax head: C - 1 / (2 * {condition:.3g})")
    return Capacitance(cholesky(small, name="softmax head: C") if k else small, base, condition)


def softmax_map(factor: SoftmaxFactor, *, damping: float, dtype: torch.dtype | None = None) -> LowRankMap:
    """``(M + damping I)^-1`` as a map, kept in ``dtype``; None: that of the probabilities, at least float32.

    Applied in float32, a Y whose columns add up to 0 loses ``log10(p_max / damping)`` digits; in float64 none matter.
    """
    lower, base, _ = capacitance(factor, damping=damping)
    wide = widened(factor.columns) if dtype is None else factor.columns.to(dtype)
    core = torch.cholesky_inverse(lower) if len(lower) else lower
    scale = 1.0 / (base * factor.weight.double().sqrt())
    return LowRankMap((1.0 / base).to(wide.dtype), wide * scale[:, None].to(wide.dtype), core.to(wide.dtype))


def softmax_solve(factor: SoftmaxFactor, y: Float[Tensor, "n m"], *, damping: float) -> Float[Tensor, "n m"]:
    """``(M + damping I)^-1 Y``, in float64, in the dtype of ``y``."""
    lower, base, _ = capacitance(factor, damping=damping)
    u = factor.columns.double() / factor.weight.double().sqrt()
    scaled = y.double() / base[:, None]
    if u.shape[1]:
        scaled = scaled + (u @ torch.cholesky_solve(u.mT @ scaled, lower)) / base[:, None]
    return scaled.to(y.dtype)


def mass(factor: SoftmaxFactor) -> Float[Tensor, " n"]:
    """``total`` without its rounding, float64: ``U U^T 1`` where it is that, more where a diagonal was added to it.

    Guarantees:
      - ``diag(mass) - U U^T`` is diagonally dominant, so it has no negative eigenvalue, whatever U was rounded to.
    """
    return mass_of(row_sums(factor.columns), factor.total, factor.columns.dtype)


def row_sums(columns: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """``|U| |U|^T 1`` in float64, a slice at a time; those of parts of the columns add up to that of all."""
    step = max(1, SLICE // max(1, columns.shape[1]))
    slices = [columns[start : start + step] for start in range(0, len(columns), step)]
    sums = torch.stack([part.double().abs().sum(0) for part in slices]).sum(0)
    return torch.cat([part.double().abs() @ sums for part in slices])


def mass_of(least: Float[Tensor, " n"], total: Float[Tensor, " n"], stored: torch.dtype) -> Float[Tensor, " n"]:
    """:func:`mass` from ``least = row_sums(U)``, where all of U need not be at hand; U was stored in ``stored``."""
    slack = max(64 * torch.finfo(total.dtype).eps, 4 * torch.finfo(stored).eps)
    wide = total.double()
    excess, largest = float((least - wide).max()), float(wide.max())
    if not excess <= slack * largest:  # also where something is NaN
        raise CurvatureError(
            f"softmax factor: expected columns with U U^T 1 <= total, as of probabilities that add up to at most 1, "
            f"got an excess of {excess:.3g} over a total of at most {largest:.3g}. Make it by factors.softmax."
        )
    return torch.where(least >= wide * (1.0 - slack), least, wide)
