"""Second moments of rows, as sums and the weights they are divided by.

    M = total / weight,    total = sum_t rows_t rows_t^T

Sums of parts add up to the sum of the whole however the rows were split, over microbatches, ranks or steps; a mean of
means is wrong as soon as the parts differ in size. A moving average decays sum and weight alike,

    total <- rho total + total_new,    weight <- rho weight + weight_new

so it is the weighted mean of all that was seen, without a bias towards where it began.

    >>> left = add(dense(g, weight=tokens), dense(more, weight=more_tokens))
    >>> left = add(decayed(left, 0.95), dense(latest, weight=latest_tokens))
    >>> matrix(left)                                                    # (n, n); small n only
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fdp.kfac.types import ColumnsFactor, DenseFactor, DiagonalFactor, Factor, GroupedFactor, SoftmaxFactor
from fdp.types import FdpError

HALF = (torch.bfloat16, torch.float16)
ALIGNED = 8
"""Numbers in half precision that a GPU loads at once: products of rows of other widths take several times as long."""


class CurvatureError(FdpError):
    """What was measured cannot be used: not finite, not symmetric, not positive. (A wrong setting is an FdpError.)"""


def wider(dtype: torch.dtype) -> torch.dtype:
    """At least float32: half precision is for storing, never for sums."""
    return torch.float32 if dtype in HALF else dtype


def widened(x: Tensor) -> Tensor:
    """``x`` in at least float32."""
    return x.to(wider(x.dtype))


def dense(rows: Float[Tensor, "*tokens n"], *, weight: float | Tensor, size: int | None = None) -> DenseFactor:
    """``total = rows^T rows``, in float32 for narrower rows; columns from ``size`` on are left out."""
    n = rows.shape[-1] if size is None else size
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.is_cuda and flat.dtype in HALF:
        # Products of half-precision numbers are exact in float32, which is what they are added up in.
        flat = aligned(flat)
        total = torch.mm(flat.mT, flat, out_dtype=torch.float32)
    else:
        wide = widened(flat)
        total = wide.mT @ wide
    return DenseFactor(total[:n, :n].contiguous(), _weight(weight, like=total))


def aligned(rows: Float[Tensor, "tokens n"]) -> Float[Tensor, "tokens wider"]:
    """The rows with zeros at their end, up to a multiple of ``ALIGNED`` numbers."""
    spare = -rows.shape[-1] % ALIGNED
    return F.pad(rows, (0, spare)) if spare else rows


def columns(rows: Float[Tensor, "*tokens n"], *, weight: float | Tensor) -> ColumnsFactor:
    """``columns = rows^T``, in the dtype of the rows: a view, nothing is computed."""
    flat = rows.reshape(-1, rows.shape[-1])
    return ColumnsFactor(flat.mT, _weight(weight, like=flat))


def diagonal(rows: Float[Tensor, "*tokens n"], *, weight: float | Tensor) -> DiagonalFactor:
    """``total_i = sum_t rows_ti^2``: the diagonal of ``rows^T rows``."""
    flat = rows.reshape(-1, rows.shape[-1])
    # One pass over the rows, and nothing wider is stored.
    total = torch.linalg.vector_norm(flat, dim=0, dtype=wider(flat.dtype)).square()
    return DiagonalFactor(total, _weight(weight, like=total))


def one_hot(
    ids: Int[Tensor, " *tokens"],
    size: int,
    *,
    weight: float | Tensor,
    extra: Float[Tensor, " *tokens"] | None = None,
) -> DiagonalFactor:
    """``total_i`` = how often ``i`` occurs: all of ``rows^T rows`` for one-hot rows, which is diagonal.

    ``extra`` multiplies each token's matrix (a mask: 0 leaves the token out).
    """
    flat = ids.reshape(-1).long()
    ones = torch.ones(flat.shape, dtype=torch.float32, device=ids.device)
    counts = ones if extra is None else widened(extra.to(ids.device).reshape(-1))
    total = counts.new_zeros(size).index_add(0, flat, counts)
    return DiagonalFactor(total, _weight(weight, like=total))


def softmax(
    probabilities: Float[Tensor, "*tokens classes"],
    *,
    weight: float | Tensor,
    extra: float | Float[Tensor, " *tokens"] | None = None,
) -> SoftmaxFactor:
    """``sum_t extra_t (diag(p_t) - p_t p_t^T)``: the Fisher information of logits, summed over tokens.

    ``extra`` multiplies each token's matrix: a mask, or the square of what its loss is multiplied by. None: 1.

    Guarantees:
      - ``total = sum_t extra_t p_t`` and the columns are ``sqrt(extra_t) p_t``; classes x classes is never formed.
    """
    flat = widened(probabilities.reshape(-1, probabilities.shape[-1]))
    if extra is None:
        return SoftmaxFactor(flat.sum(0), flat.mT, _weight(weight, like=flat))
    each = torch.as_tensor(extra, dtype=flat.dtype, device=flat.device).expand(probabilities.shape[:-1]).reshape(-1)
    return SoftmaxFactor(each @ flat, flat.mT * each.sqrt(), _weight(weight, like=flat))


def size(factor: Factor) -> int:
    """``n``, of the (n, n) matrix it stands for."""
    if isinstance(factor, GroupedFactor):
        return factor.total.numel()
    return (factor.columns if isinstance(factor, ColumnsFactor) else factor.total).shape[0]


def add(a: Factor, b: Factor) -> Factor:
    """The factor of the rows of both: sums of totals and weights, columns side by side.

    Two of a form stay of that form, and a diagonal joins a softmax; other pairs become dense, the one form that is
    exact for them.
    """
    if size(a) != size(b):
        raise FdpError(
            f"add: expected two factors of the same size, got {size(a)} and {size(b)}. "
            "Add up the factors of the same side of the same layer."
        )
    weight = a.weight + b.weight
    match a, b:
        case (DenseFactor(), DenseFactor()):
            return DenseFactor(a.total + b.total, weight)
        case (ColumnsFactor(), ColumnsFactor()):
            return ColumnsFactor(torch.cat([a.columns, b.columns], 1), weight)
        case (DiagonalFactor(), DiagonalFactor()):
            return DiagonalFactor(a.total + b.total, weight)
        case (GroupedFactor(), GroupedFactor()):
            return GroupedFactor(a.total + b.total, weight)
        case (SoftmaxFactor(), SoftmaxFactor()):
            return SoftmaxFactor(a.total + b.total, torch.cat([a.columns, b.columns], 1), weight)
        case (SoftmaxFactor(), DiagonalFactor()):
            return SoftmaxFactor(a.total + b.total, a.columns, weight)
        case (DiagonalFactor(), SoftmaxFactor()):
            return SoftmaxFactor(a.total + b.total, b.columns, weight)
        case _:
            return DenseFactor(to_dense(a).total + to_dense(b).total, weight)


def decayed(factor: Factor, rho: float) -> Factor:
    """``rho total`` and ``rho weight``: the same mean, counting less beside what is added next.

    Columns are multiplied by ``sqrt(rho)`` in at least float32: rounded to half precision at every step they would
    drift away from their weight.
    """
    if not 0.0 <= rho <= 1.0:
        raise FdpError(f"decayed: expected rho between 0 (forget all) and 1 (keep all), got {rho}.")
    weight = factor.weight * rho
    match factor:
        case DenseFactor():
            return DenseFactor(factor.total * rho, weight)
        case ColumnsFactor():
            return ColumnsFactor(widened(factor.columns) * rho**0.5, weight)
        case DiagonalFactor():
            return DiagonalFactor(factor.total * rho, weight)
        case GroupedFactor():
            return GroupedFactor(factor.total * rho, weight)
        case SoftmaxFactor():
            return SoftmaxFactor(factor.total * rho, widened(factor.columns) * rho**0.5, weight)


def to_dense(factor: Factor) -> DenseFactor:
    """The same matrix, formed."""
    match factor:
        case DenseFactor():
            return factor
        case ColumnsFactor():
            wide = widened(factor.columns)
            return DenseFactor(wide @ wide.mT, factor.weight)
        case DiagonalFactor() | GroupedFactor():
            return DenseFactor(factor.total.flatten().diag(), factor.weight)
        case SoftmaxFactor():
            wide = widened(factor.columns)
            return DenseFactor(factor.total.diag() - wide @ wide.mT, factor.weight)


def matrix(factor: Factor) -> Float[Tensor, "n n"]:
    """The matrix it stands for, ``total / weight``: for tests and for small n."""
    total, weight = to_dense(factor)
    return total / weight


def diagonal_of(factor: Factor) -> DiagonalFactor:
    """The diagonal of the same matrix, the rest dropped; the matrix is not formed."""
    match factor:
        case DenseFactor():
            return DiagonalFactor(factor.total.diagonal(), factor.weight)
        case ColumnsFactor():
            return DiagonalFactor(widened(factor.columns).square().sum(1), factor.weight)
        case DiagonalFactor():
            return factor
        case GroupedFactor():
            return DiagonalFactor(factor.total.flatten(), factor.weight)
        case SoftmaxFactor():
            rest = unclamped_diagonal(factor)
            return DiagonalFactor(rest.clamp(min=0), factor.weight)  # p (1 - p) of a sure class rounds either way


def unclamped_diagonal(factor: Factor) -> Float[Tensor, " n"]:
    """``weight`` times the diagonal of M, as it stands, for sums over ranks.

    A rank's columns beside totals that another rank holds give a softmax's diagonal below 0. Only the sum over all
    ranks may be clamped.
    """
    if isinstance(factor, SoftmaxFactor):
        return factor.total - widened(factor.columns).square().sum(1)
    return diagonal_of(factor).total


def mean_trace(factor: Factor) -> Float[Tensor, ""]:
    """``trace(M) / n`` in float64; the matrix is not formed."""
    return diagonal_of(factor).total.double().mean() / factor.weight


def check_factor(factor: Factor, name: str) -> None:
    """Refuses what no sum of outer products can be: NaN, no weight, an asymmetric matrix, a negative diagonal."""
    where = f"{name} factor ({type(factor).__name__} of size {size(factor)})"
    weight = float(factor.weight)
    if not (math.isfinite(weight) and weight > 0.0):
        raise CurvatureError(
            f"{where}: expected a finite weight above 0, got {weight}. No tokens were counted: gather statistics first."
        )
    for field, value in zip(factor._fields, factor):
        if not bool(value.isfinite().all()):
            raise CurvatureError(
                f"{where}: expected finite numbers, got NaN or infinity in {field}. Look at the loss and its gradients."
            )
    match factor:
        case DenseFactor(total):
            if total.dtype in HALF:
                raise FdpError(
                    f"{where}: expected float32 or float64, got {total.dtype}. Rounded to half precision a covariance "
                    "is not positive any more: store its columns in half precision instead."
                )
            gap, largest = float((total - total.mT).abs().max()), float(total.abs().max())
            if gap > math.sqrt(torch.finfo(total.dtype).eps) * largest:
                raise CurvatureError(
                    f"{where}: expected a symmetric matrix, got one that differs from its transpose by {gap:.3g} "
                    f"(its largest entry: {largest:.3g}). Make it by factors.dense."
                )
            smallest = float(total.diagonal().min())
        case DiagonalFactor(total) | SoftmaxFactor(total) | GroupedFactor(total):
            smallest = float(total.min())
        case ColumnsFactor():
            smallest = 0.0
    if smallest < 0.0:
        raise CurvatureError(f"{where}: expected sums of squares on the diagonal, got {smallest:.3g}.")


def _weight(weight: float | Tensor, *, like: Tensor) -> Float[Tensor, ""]:
    dtype = wider(like.dtype)
    if isinstance(weight, Tensor):
        return weight.to(device=like.device, dtype=dtype)
    return torch.full((), weight, dtype=dtype, device=like.device)  # made there: a copy would wait for the device
