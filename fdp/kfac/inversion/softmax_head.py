"""The inverse of a softmax head's true Fisher information, through a small system of tokens instead of classes.

    M = diag(p) - U U^T,    p = mean_t p_t,    U = [p_1 ... p_N] / sqrt(N)
    (M + lambda I)^-1 = D^-1 + D^-1 U C^-1 U^T D^-1,    D = diag(p) + lambda I,    C = I - U^T D^-1 U

Because ``U U^T <= diag(p)``, the eigenvalues of the small C are in ``[lambda / (lambda + p_max), 1]`` and its condition
number is at most ``1 + p_max / lambda``, which is checked. C is computed and solved in float64, which is accurate down
to a damping of about 1e-13 ``p_max``; float32 would lose digits from 1e-5 on.

Stored probabilities are rounded, and ``diag(p) - U U^T`` would amplify the rounding. But M is also

    x^T M x = 1/2 sum_t sum_ij u_ti u_tj (x_i - x_j)^2,    that is,    p = U U^T 1

so p is computed from the same columns that are subtracted. Rounding then changes M by the same relative amount in every
direction (1e-7 in float32, 1e-3 in float16, at any damping), and constants stay in its kernel.

The root of the inverse has no such form, because D is no multiple of the identity. If a root is needed, use the
diagonal, ``factors.diagonal_of(factor)``.

    >>> inverse = softmax_map(factor, damping=1e-4)                      # LowRankMap(1 / D, D^-1 U, C^-1)
    >>> x = apply_map(inverse, y)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.linear_maps import LowRankMap
from fdp.kfac.factors import CurvatureError, upcast
from fdp.kfac.inversion.woodbury import SLICE_ENTRIES, check_damping, cholesky, gram
from fdp.kfac.types import SoftmaxFactor


class Capacitance(NamedTuple):
    """The Cholesky factor of C and the diagonal D (``base``), in float64, and a bound on the condition number of C."""

    lower: Float[Tensor, "k k"]
    base: Float[Tensor, " n"]
    condition: float


def capacitance(factor: SoftmaxFactor, *, damping: float) -> Capacitance:
    """Factorise the small matrix C.

    Guarantees:
      - the eigenvalues of C are at most 1 and above ``1 / (2 condition)``, where ``condition = 1 + p_max / damping``
        and the factor 2 allows for rounding; a factor that violates this is not a softmax's and is refused.
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
    """Return ``(M + damping I)^-1`` as a map in ``dtype`` (None: that of the probabilities, at least float32).

    Applying it in float32 to a Y whose columns add up to 0 loses ``log10(p_max / damping)`` digits.
    """
    lower, base, _ = capacitance(factor, damping=damping)
    wide = upcast(factor.columns) if dtype is None else factor.columns.to(dtype)
    core = torch.cholesky_inverse(lower) if len(lower) else lower
    scale = 1.0 / (base * factor.weight.double().sqrt())
    return LowRankMap((1.0 / base).to(wide.dtype), wide * scale[:, None].to(wide.dtype), core.to(wide.dtype))


def mass(factor: SoftmaxFactor) -> Float[Tensor, " n"]:
    """Return ``total`` without its rounding, in float64: ``U U^T 1``, or more if a diagonal was added to it.

    Guarantees:
      - ``diag(mass) - U U^T`` is diagonally dominant, so it has no negative eigenvalue, however U was rounded.
    """
    return mass_of(row_sums(factor.columns), factor.total, factor.columns.dtype)


def row_sums(columns: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """Return ``|U| |U|^T 1`` in float64, one slice at a time. The results of parts of the columns add up."""
    step = max(1, SLICE_ENTRIES // max(1, columns.shape[1]))
    slices = [columns[start : start + step] for start in range(0, len(columns), step)]
    sums = torch.stack([part.double().abs().sum(0) for part in slices]).sum(0)
    return torch.cat([part.double().abs() @ sums for part in slices])


def mass_of(least: Float[Tensor, " n"], total: Float[Tensor, " n"], stored: torch.dtype) -> Float[Tensor, " n"]:
    """Return :func:`mass` from ``least = row_sums(U)``, without U itself; ``stored`` is the dtype U was stored in."""
    slack = max(64 * torch.finfo(total.dtype).eps, 4 * torch.finfo(stored).eps)
    wide = total.double()
    excess, largest = float((least - wide).max()), float(wide.max())
    if not excess <= slack * largest:  # also if something is NaN
        raise CurvatureError(
            f"softmax factor: expected columns with U U^T 1 <= total, as probabilities have that add up to at most 1, "
            f"got an excess of {excess:.3g} over a total of at most {largest:.3g}. Create it with factors.softmax."
        )
    return torch.where(least >= wide * (1.0 - slack), least, wide)
