"""Second moments of rows, stored as a sum and the weight that divides it.

    M = total / weight,    total = sum_t rows_t rows_t^T

Sums of parts add up to the sum of the whole, however the rows are split over microbatches, ranks or steps; a mean of
means is wrong if the parts differ in size. A moving average decays sum and weight alike,

    total <- rho total + total_new,    weight <- rho weight + weight_new

so it is the weighted mean of everything it has seen, without a bias towards its start.

    >>> left = add(dense(g, weight=tokens), dense(more, weight=more_tokens))
    >>> left = add(decay(left, 0.95), dense(latest, weight=latest_tokens))
    >>> matrix(left)                                                    # (n, n); small n only
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fdp.kfac.types import ColumnsFactor, DenseFactor, DiagonalFactor, Factor, GroupedFactor, SoftmaxFactor
from fdp.types import FdpError

HALF = (torch.bfloat16, torch.float16)
ALIGNMENT_ELEMENTS = 8
"""Elements in half precision that a GPU loads at once; products of rows of other widths take several times as long."""
ROWS_AT_ONCE = 1024
"""Rows that one product of a GPU adds up; of 8192, sums in float32 were wrong by 4e-5 of them."""
BLOCK_ELEMENTS = 1 << 26
"""Elements of products that wait to be added."""


class CurvatureError(FdpError):
    """A measurement that cannot be used: not finite, symmetric or positive. (An invalid setting is an FdpError.)"""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precision, which is for storage and never for sums; else ``dtype``."""
    return torch.float32 if dtype in HALF else dtype


def upcast(x: Tensor) -> Tensor:
    """Cast half precision to float32."""
    return x.to(sum_dtype(x.dtype))


def dense(rows: Float[Tensor, "*tokens n"], *, weight: float | Tensor, size: int | None = None) -> DenseFactor:
    """Return ``total = rows^T rows``, in at least float32, without the columns from ``size`` on."""
    n = rows.shape[-1] if size is None else size
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.is_cuda and flat.dtype in HALF:
        # Products of half-precision numbers are exact in float32, in which they are added up.
        total = sum_of_blocks(pad_to_alignment(flat), partial(torch.bmm, out_dtype=torch.float32))
    else:
        wide = upcast(flat)
        total = wide.mT @ wide
    return DenseFactor(total[:n, :n].contiguous(), _weight(weight, like=total))


def sum_of_blocks(rows: Float[Tensor, "tokens n"], product: Callable[[Tensor, Tensor], Tensor]) -> Float[Tensor, "n n"]:
    """Return ``sum_b rows_b^T rows_b`` over blocks of ``ROWS_AT_ONCE`` rows; ``product`` is ``bmm`` with a wide result.

    A GPU loses digits along a product of many rows, and a narrow one keeps few multiprocessors busy.
    """
    n, blocks = rows.shape[1], len(rows) // ROWS_AT_ONCE
    full, rest = rows[: blocks * ROWS_AT_ONCE].unflatten(0, (blocks, ROWS_AT_ONCE)), rows[blocks * ROWS_AT_ONCE :]
    at_once = full.split(max(1, BLOCK_ELEMENTS // max(1, n**2))) if blocks else ()
    parts = [product(some.mT, some).sum(0) for some in at_once]
    if len(rest) or not parts:
        parts.append(product(rest.mT[None], rest[None])[0])
    return sum(parts[1:], start=parts[0])


def pad_to_alignment(rows: Float[Tensor, "tokens n"]) -> Float[Tensor, "tokens wider"]:
    """Append columns of zeros, up to a multiple of ``ALIGNMENT_ELEMENTS``."""
    spare = -rows.shape[-1] % ALIGNMENT_ELEMENTS
    return F.pad(rows, (0, spare)) if spare else rows


def columns(rows: Float[Tensor, "*tokens n"], *, weight: float | Tensor) -> ColumnsFactor:
    """Return ``columns = rows^T``, a view in the dtype of the rows."""
    flat = rows.reshape(-1, rows.shape[-1])
    return ColumnsFactor(flat.mT, _weight(weight, like=flat))


def diagonal(rows: Float[Tensor, "*tokens n"], *, weight: float | Tensor) -> DiagonalFactor:
    """Return ``total_i = sum_t rows_ti^2``, the diagonal of ``rows^T rows``."""
    flat = rows.reshape(-1, rows.shape[-1])
    # One pass over the rows, without an upcast copy.
    total = torch.linalg.vector_norm(flat, dim=0, dtype=sum_dtype(flat.dtype)).square()
    return DiagonalFactor(total, _weight(weight, like=total))


def one_hot(
    ids: Int[Tensor, " *tokens"],
    size: int,
    *,
    weight: float | Tensor,
    extra: Float[Tensor, " *tokens"] | None = None,
) -> DiagonalFactor:
    """Return how often each id occurs: ``rows^T rows`` of one-hot rows, which is diagonal.

    ``extra`` multiplies each token's matrix; 0 leaves the token out.
    """
    flat = ids.reshape(-1).long()
    ones = torch.ones(flat.shape, dtype=torch.float32, device=ids.device)
    counts = ones if extra is None else upcast(extra.to(ids.device).reshape(-1))
    total = counts.new_zeros(size).index_add(0, flat, counts)
    return DiagonalFactor(total, _weight(weight, like=total))


def softmax(
    probabilities: Float[Tensor, "*tokens classes"],
    *,
    weight: float | Tensor,
    extra: float | Float[Tensor, " *tokens"] | None = None,
) -> SoftmaxFactor:
    """Return ``sum_t extra_t (diag(p_t) - p_t p_t^T)``, the Fisher information of logits summed over tokens.

    ``extra`` multiplies each token's matrix: a mask, or the square of the weight of its loss. None means 1.

    Guarantees:
      - ``total = sum_t extra_t p_t`` and the columns are ``sqrt(extra_t) p_t``; classes x classes is never formed.
    """
    flat = upcast(probabilities.reshape(-1, probabilities.shape[-1]))
    if extra is None:
        return SoftmaxFactor(flat.sum(0), flat.mT, _weight(weight, like=flat))
    each = torch.as_tensor(extra, dtype=flat.dtype, device=flat.device).expand(probabilities.shape[:-1]).reshape(-1)
    return SoftmaxFactor(each @ flat, flat.mT * each.sqrt(), _weight(weight, like=flat))


def size(factor: Factor) -> int:
    """Return ``n`` of the (n, n) matrix."""
    if isinstance(factor, GroupedFactor):
        return factor.total.numel()
    return (factor.columns if isinstance(factor, ColumnsFactor) else factor.total).shape[0]


def add(a: Factor, b: Factor) -> Factor:
    """Return the factor of the rows of both: add totals and weights, concatenate columns.

    Two factors of one form keep that form, and a softmax absorbs a diagonal. All other pairs become dense, the only
    form that is exact for them.
    """
    if size(a) != size(b):
        raise FdpError(
            f"add: expected two factors of the same size, got {size(a)} and {size(b)}. "
            "Add factors of the same side of the same layer."
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


def decay(factor: Factor, rho: float) -> Factor:
    """Return ``rho total`` and ``rho weight``: the same mean, with less weight beside later measurements.

    Columns are multiplied by ``sqrt(rho)`` in at least float32. If they were rounded to half precision at every step,
    they would drift away from their weight.
    """
    if not 0.0 <= rho <= 1.0:
        raise FdpError(f"decay: expected rho between 0 (forget all) and 1 (keep all), got {rho}.")
    weight = factor.weight * rho
    match factor:
        case DenseFactor():
            return DenseFactor(factor.total * rho, weight)
        case ColumnsFactor():
            return ColumnsFactor(upcast(factor.columns) * rho**0.5, weight)
        case DiagonalFactor():
            return DiagonalFactor(factor.total * rho, weight)
        case GroupedFactor():
            return GroupedFactor(factor.total * rho, weight)
        case SoftmaxFactor():
            return SoftmaxFactor(factor.total * rho, upcast(factor.columns) * rho**0.5, weight)


def to_dense(factor: Factor) -> DenseFactor:
    """Form the matrix."""
    match factor:
        case DenseFactor():
            return factor
        case ColumnsFactor():
            wide = upcast(factor.columns)
            return DenseFactor(wide @ wide.mT, factor.weight)
        case DiagonalFactor() | GroupedFactor():
            return DenseFactor(factor.total.flatten().diag(), factor.weight)
        case SoftmaxFactor():
            wide = upcast(factor.columns)
            return DenseFactor(factor.total.diag() - wide @ wide.mT, factor.weight)


def matrix(factor: Factor) -> Float[Tensor, "n n"]:
    """Return the matrix ``total / weight``, for tests and small n."""
    total, weight = to_dense(factor)
    return total / weight


def diagonal_of(factor: Factor) -> DiagonalFactor:
    """Return the diagonal of the matrix without forming it."""
    match factor:
        case DenseFactor():
            return DiagonalFactor(factor.total.diagonal(), factor.weight)
        case ColumnsFactor():
            return DiagonalFactor(upcast(factor.columns).square().sum(1), factor.weight)
        case DiagonalFactor():
            return factor
        case GroupedFactor():
            return DiagonalFactor(factor.total.flatten(), factor.weight)
        case SoftmaxFactor():
            rest = unclamped_diagonal(factor)
            return DiagonalFactor(rest.clamp(min=0), factor.weight)  # p (1 - p) of a certain class may round below 0


def unclamped_diagonal(factor: Factor) -> Float[Tensor, " n"]:
    """Return ``weight`` times the diagonal of M, to be summed over ranks before it is clamped.

    The diagonal of a softmax can be negative on a rank that holds columns while another rank holds their totals.
    """
    if isinstance(factor, SoftmaxFactor):
        return factor.total - upcast(factor.columns).square().sum(1)
    return diagonal_of(factor).total


def mean_trace(factor: Factor) -> Float[Tensor, ""]:
    """Return ``trace(M) / n`` in float64 without forming M."""
    return diagonal_of(factor).total.double().mean() / factor.weight


def check_factor(factor: Factor, name: str) -> None:
    """Raise if the factor is no sum of outer products: NaN, no weight, an asymmetric matrix, a negative diagonal."""
    where = f"{name} factor ({type(factor).__name__} of size {size(factor)})"
    weight = float(factor.weight)
    if not (math.isfinite(weight) and weight > 0.0):
        raise CurvatureError(
            f"{where}: expected a finite weight above 0, got {weight}. No tokens were counted; measure a batch first."
        )
    for field, value in zip(factor._fields, factor):
        if not bool(value.isfinite().all()):
            raise CurvatureError(
                f"{where}: expected finite numbers, got NaN or infinity in {field}. Check the loss and its gradients."
            )
    match factor:
        case DenseFactor(total):
            if total.dtype in HALF:
                raise FdpError(
                    f"{where}: expected float32 or float64, got {total.dtype}. A covariance that is rounded to half "
                    "precision is no longer positive; store its columns in half precision instead."
                )
            gap, largest = float((total - total.mT).abs().max()), float(total.abs().max())
            if gap > math.sqrt(torch.finfo(total.dtype).eps) * largest:
                raise CurvatureError(
                    f"{where}: expected a symmetric matrix, got one that differs from its transpose by {gap:.3g} "
                    f"(its largest entry is {largest:.3g}). Create it with factors.dense."
                )
            smallest = float(total.diagonal().min())
        case DiagonalFactor(total) | SoftmaxFactor(total) | GroupedFactor(total):
            smallest = float(total.min())
        case ColumnsFactor():
            smallest = 0.0
    if smallest < 0.0:
        raise CurvatureError(f"{where}: expected sums of squares on the diagonal, got {smallest:.3g}.")


def _weight(weight: float | Tensor, *, like: Tensor) -> Float[Tensor, ""]:
    dtype = sum_dtype(like.dtype)
    if isinstance(weight, Tensor):
        return weight.to(device=like.device, dtype=dtype)
    return torch.full((), weight, dtype=dtype, device=like.device)  # a copy from the host would wait for the device
