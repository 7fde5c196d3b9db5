"""Inverses and inverse roots of ``lambda I + U U^T / w`` through the small system of the columns of U (Woodbury).

    (lambda I + U U^T / w)^-1 = (I - U (lambda w I + U^T U)^-1 U^T) / lambda            (Woodbury 1950)
    (lambda I + U U^T / w)^-1/2 = I / sqrt(lambda) + U V f(S) V^T U^T,   U^T U / w = V S V^T

With k < n columns of n entries this takes n k^2 + k^3 work and n k memory; if k >= n, the n x n form is smaller and is
used. Small systems are solved in float64, because they lose ``log10(S_max / lambda)`` digits. When a map is *applied*,
``y / lambda`` and its correction cancel along U: a float32 map has a relative error of about 3e-7 ``S_max / lambda``
there. A ``max_condition`` bounds that quotient; if it must be large, use float64 maps.

    >>> inverse = woodbury_map(u, weight=w, damping=1e-3, power=Power.INVERSE)        # a Map
    >>> x = apply_map(inverse, y)
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.linear_maps import LowRankMap, Map, MatrixMap
from fdp.kfac.factors import CurvatureError, upcast
from fdp.types import FdpError

SLICE_ENTRIES = 1 << 22
"""Entries of U that are cast to float64 at a time."""


class Power(Enum):
    """A power of the damped matrix: its inverse, or the symmetric root of its inverse."""

    INVERSE = -1.0
    ROOT = -0.5


def check_damping(damping: float) -> None:
    """Raise an FdpError if the damping is not a positive finite number."""
    if not (math.isfinite(damping) and damping > 0.0):
        raise FdpError(
            f"damping: expected a finite number above 0, got {damping}. It is added to the curvature before "
            "inversion, in the units of the curvature; 1e-3 is a common start."
        )


def damped_power(
    eigenvalues: Float[Tensor, " n"], *, damping: float, floor: float, power: Power
) -> Float[Tensor, " n"]:
    """Return ``max(d + damping, floor)^power``."""
    return (eigenvalues + damping).clamp(min=floor) ** power.value


def gram(columns: Float[Tensor, "n k"], scale: Float[Tensor, " n"] | None = None) -> Float[Tensor, "k k"]:
    """Return ``U^T diag(scale) U`` in float64, one slice of U at a time."""
    n, k = columns.shape
    total = torch.zeros(k, k, dtype=torch.float64, device=columns.device)
    step = max(1, SLICE_ENTRIES // max(1, k))
    for start in range(0, n, step):
        part = columns[start : start + step].double()
        total += part.mT @ (part if scale is None else part * scale[start : start + step, None].double())
    return total


def cholesky(matrix: Float[Tensor, "k k"], *, name: str) -> Float[Tensor, "k k"]:
    """Return the lower factor, or raise a CurvatureError that names the matrix."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    # The factorisation may not report a NaN.
    if int(info) != 0 or not bool(factor.isfinite().all()):
        raise CurvatureError(
            f"{name}: expected a positive definite {tuple(matrix.shape)} matrix, got one whose Cholesky factorisation "
            f"stops at row {int(info)}. Raise the damping, or look for NaN in the statistics."
        )
    return factor


def eigh(matrix: Float[Tensor, "k k"], *, name: str) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """Return eigenvalues in ascending order and eigenvectors, or raise a CurvatureError."""
    if not bool(matrix.isfinite().all()):  # with a NaN some drivers hang and others lose the device
        raise CurvatureError(f"{name}: expected finite numbers, got NaN or infinity. Check the loss and its gradients.")
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # LinAlgError if it does not converge; GPU solvers raise other errors
        raise CurvatureError(f"{name}: the eigendecomposition failed ({error}). Raise the damping.") from error
    if not bool(values.isfinite().all() & vectors.isfinite().all()):
        raise CurvatureError(f"{name}: the eigendecomposition gave NaN or infinity. Raise the damping.")
    return values, vectors


def woodbury_map(
    columns: Float[Tensor, "n k"],
    *,
    weight: float | Tensor,
    damping: float,
    power: Power,
    max_condition: float | None = None,
    dtype: torch.dtype | None = None,
) -> Map:
    """Return ``(damping I + U U^T / weight)^power`` as a map, of low rank if k < n, else a matrix.

    Its eigenvalues are ``b = damping + s`` on the columns and ``damping`` elsewhere. With a ``max_condition``, those
    below ``c = max b / max_condition`` are raised to c; without one c is the damping. The core is ``V f(S) V^T /
    weight``:

        inverse   f = -(b - c) / s / (b c)                  root   f = -(b - c) / s / ((sqrt b + sqrt c) sqrt(b c))

    Without a condition the first quotient is 1, so nothing is divided by a vanishing s. The map has dtype ``dtype``
    (None: that of the columns, at least float32).
    """
    check_damping(damping)
    n, k = columns.shape
    wide = upcast(columns) if dtype is None else columns.to(dtype)
    weight = torch.as_tensor(weight, dtype=torch.float64, device=columns.device)
    if k >= n and k > 0:
        values, vectors = eigh(gram(columns.mT) / weight, name="U U^T / weight")
        floor = _floor(values[-1], damping, max_condition)  # at least the damping, even if rounding is below 0
        scaled = vectors * damped_power(values, damping=damping, floor=floor, power=power)
        return MatrixMap((scaled @ vectors.mT).to(wide.dtype))
    values, vectors = eigh(gram(columns) / weight, name="U^T U / weight")
    s = values.clamp(min=0)
    b = s + damping
    c = _floor(s[-1], damping, max_condition) if k else damping
    raised = torch.ones_like(s) if c == damping else ((b - c) / s).clamp(min=0)  # b < c where s is 0
    rise = b * c if power is Power.INVERSE else (b.sqrt() + c**0.5) * (b * c).sqrt()
    core = (vectors * (-raised / rise / weight)) @ vectors.mT
    return LowRankMap(wide.new_full((n,), c**power.value), wide, core.to(wide.dtype))


def woodbury_cholesky(
    columns: Float[Tensor, "n k"], *, weight: float | Tensor, damping: float, dtype: torch.dtype | None = None
) -> Map:
    """Return the inverse of :func:`woodbury_map` by Cholesky, which is cheaper but has no ``max_condition``."""
    check_damping(damping)
    n, k = columns.shape
    wide = upcast(columns) if dtype is None else columns.to(dtype)
    ridge = damping * torch.as_tensor(weight, dtype=torch.float64, device=columns.device)
    if k >= n and k > 0:
        lower = cholesky(gram(columns.mT) + ridge * _eye(n, ridge), name="U U^T + damping")
        return MatrixMap((torch.cholesky_inverse(lower) * (ridge / damping)).to(wide.dtype))
    lower = cholesky(gram(columns) + ridge * _eye(k, ridge), name="U^T U + damping") if k else ridge.new_zeros(0, 0)
    core = torch.cholesky_inverse(lower) / -damping if k else lower
    return LowRankMap(wide.new_full((n,), 1.0 / damping), wide, core.to(wide.dtype))


def _floor(largest: Tensor, damping: float, max_condition: float | None) -> float:
    """Return the least eigenvalue: the damping, or the largest eigenvalue over ``max_condition`` if that is more."""
    return damping if max_condition is None else max(damping, (float(largest) + damping) / max_condition)


def _eye(k: int, like: Tensor) -> Float[Tensor, "k k"]:
    return torch.eye(k, dtype=torch.float64, device=like.device)
