"""Squared norms and weighted sums of stored per-sample gradients on a CPU, in pieces that stay near its cache.

    squared_norms_cpu           n_b = |G_b|^2             G (B, ...)            -> n (B,)
    rounded_up_squared_norms    n_b >= |G_b|^2            G (B, ...)            -> n (B,)
    wide_weighted_sum           W = sum_b c_b G_b         G (B, ...), c (B,)    -> W (...) in float64

Converting to float64 takes longer than reading. ``rounded_up_squared_norms`` squares and sums large float32 gradients
in float32, in blocks of ``SQUARE_BLOCK`` elements, and adds up the blocks in float64. ``COVER`` makes up for all that
float32 may have lost, in whatever order a block was summed.

Letters: B samples, N elements of a gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fdp_kernels import cpu_library
from fdp_kernels.cpu_library import dense

WIDE_ELEMENTS = 1 << 18
"""Elements held in float64 at a time (2 MiB), but at least one sample's: more would leave the cache, and be fetched
anew from the operating system in every step."""
SUM_ELEMENTS, MIN_COLUMNS = 1 << 20, 512
"""Elements of which a weighted sum holds float64 copies at a time (8 MiB: copies of short rows are slow), and the
fewest columns."""
EXACT_ELEMENTS = 1 << 12
"""Squared norms of gradients of at most this size are not rounded up: they cost little either way."""
SQUARE_BLOCK = 256
"""Elements whose squares are summed in float32."""
COVER = 1 + (SQUARE_BLOCK + 16) * 2.0**-24
"""Factor that makes up for rounding. With u = 2^-24, each square passes its own rounding and at most 255 additions, and
a block's norm one square root, which counts twice when it is squared: what remains is at least ``(1 - u)^258 >= 1 - 258
u``. The other 14 u are for the terms of second order, for float64 (2^-53 per block), and for ``TINY_SQUARE``."""
TINY_SQUARE = 2.0**-102
"""Least mean square of an element that float32 is trusted with. Every square and every addition may lose 2^-126 to
underflow, even if subnormal numbers are flushed to 0: of larger mean squares, at most 2^-23 in all."""


def squared_norms_cpu(G_BN: Tensor) -> Tensor:
    """Return ``|G_b|^2``: (B,), computed in float64, a few samples at a time."""
    flat_BN = G_BN.reshape(len(G_BN), math.prod(G_BN.shape[1:]))
    parts = flat_BN.split(samples_at_once(flat_BN))
    return torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts]).square()


def samples_at_once(G_BN: Tensor) -> int:
    """Return how many samples may be held in float64 at a time, at least one."""
    return max(1, WIDE_ELEMENTS * len(G_BN) // max(1, G_BN.numel()))


def rounded_up_squared_norms(G_BN: Tensor) -> Tensor:
    """Return ``|G_b|^2`` or slightly more: (B,) in float64.

    Guarantees:
      - the result is at least ``|G_b|^2``, to float64 rounding, and at most 2^-14 of it more;
      - it is that of :func:`squared_norms_cpu` if G is not float32, if it is small (``EXACT_ELEMENTS``), and for a
        sample whose squares float32 cannot hold: tiny, huge, infinite or NaN;
      - a sample's result depends on that sample alone.
    """
    size = math.prod(G_BN.shape[1:])
    if G_BN.dtype != torch.float32 or size <= EXACT_ELEMENTS:
        return squared_norms_cpu(G_BN)
    flat_BN = G_BN.reshape(len(G_BN), size)
    whole = size - size % SQUARE_BLOCK
    blocks = torch.linalg.vector_norm(flat_BN[:, :whole].unflatten(1, (-1, SQUARE_BLOCK)), dim=2)
    squared = torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64).square()
    if whole < size:
        squared += squared_norms_cpu(flat_BN[:, whole:])
    squared *= COVER  # all of it: the rest may be large beside blocks that lose to underflow
    least, most = (float(end) for end in squared.aminmax()) if len(squared) else (math.inf, 0.0)
    if size * TINY_SQUARE < least and most < math.inf:  # neither is true of NaN
        return squared
    bad = torch.nonzero(~((squared > size * TINY_SQUARE) & squared.isfinite())).flatten()
    return squared.index_copy(0, bad, squared_norms_cpu(flat_BN[bad]))


def wide_weighted_sum(G_BN: Tensor, factors_B: Tensor) -> Tensor:
    """Return ``sum_b c_b G_b`` in float64; samples with factor 0 are left out, not read.

    Some columns at a time are converted, in one buffer, and summed over all samples, 2048 at a time if there are more.
    """
    G_BN, factors_B = _rows_that_count(G_BN, factors_B)
    flat_BN, factors = G_BN.reshape(len(G_BN), math.prod(G_BN.shape[1:])), dense(factors_B.double())
    if flat_BN.dtype == torch.float32 and (loops := cpu_library.library()) is not None:
        total = torch.empty(flat_BN.shape[1], dtype=torch.float64, device="cpu")
        loops.weighted_sum(dense(flat_BN), factors, total, *flat_BN.shape)
        return total.view(G_BN.shape[1:])
    if flat_BN.dtype == torch.float64 or flat_BN.numel() <= SUM_ELEMENTS:
        return flat_BN.double().t().mv(factors).view(G_BN.shape[1:])
    samples = min(len(flat_BN), max(1, SUM_ELEMENTS // MIN_COLUMNS))
    columns = max(MIN_COLUMNS, SUM_ELEMENTS // samples)
    total = torch.zeros(flat_BN.shape[1], dtype=torch.float64)
    buffer = torch.empty(samples, columns, dtype=torch.float64)
    for some, part in zip(total.split(columns), flat_BN.split(columns, dim=1)):
        for few, rows in zip(factors.split(samples), part.split(samples)):
            wide = buffer if rows.shape == buffer.shape else buffer.view(-1)[: rows.numel()].view(rows.shape)
            some.addmv_(wide.copy_(rows).t(), few)
    return total.view(G_BN.shape[1:])


def _rows_that_count(G_BN: Tensor, factors_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows whose factor is not 0; without a copy if they follow each other, as before a padded end."""
    if bool((factors_B != 0).all()):
        return G_BN, factors_B
    rows = torch.nonzero(factors_B).flatten()
    if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1:
        rows = slice(int(rows[0]), int(rows[-1]) + 1)
    return G_BN[rows], factors_B[rows]
