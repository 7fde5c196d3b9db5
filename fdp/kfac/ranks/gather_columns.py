"""An all-gather of columns, ``U = [U_0 ... U_R-1]``, where ranks may have different numbers of them.

    counts    k_r of every rank are gathered first
    columns   are padded to the largest count, gathered, and the padding is dropped
    cap       if there are k > cap columns, only those numbered  floor(m k / cap), m = 0 .. cap - 1,  are gathered

Columns beyond the cap are never sent. The choice depends on the counts alone, so it is the same on every rank.

    >>> gathered = gather_columns(columns, sharding, cap=8192)
    >>> gathered.columns, gathered.share                       # (n, kept), kept / k
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.parallel import collectives
from fdp.parallel.sharding import Sharding
from fdp.types import FdpError

CAP_COLUMNS = 8192
"""Columns of a factor, over all ranks; more would make a small system of more than 0.5 GB in float64."""


class CappedWarning(UserWarning):
    """Columns were dropped because there were more than the cap.

    Every rank warns before any column is sent: if warnings are errors, all ranks stop and none waits for the others.
    """


class GatheredColumns(NamedTuple):
    """The columns of all ranks in order of rank, and the share of them that was kept."""

    columns: Float[Tensor, "n k"]
    share: float


def check_cap(cap: int) -> None:
    """Raise an FdpError if the cap would keep no column."""
    if cap < 1:
        raise FdpError(f"cap: expected at least 1 column, got {cap}; {CAP_COLUMNS} is the default")


def column_counts(columns: Float[Tensor, "n k"], sharding: Sharding | None) -> list[int]:
    """Return the number of columns of each rank that holds samples of its own, in the order of ``sharding.rank``."""
    if sharding is None:
        return [columns.shape[1]]  # without waiting for the device
    own = torch.tensor([columns.shape[1]], dtype=torch.int64, device=columns.device)
    return _all_gather(own, sharding).tolist()


def gather_columns(
    columns: Float[Tensor, "n k"], sharding: Sharding | None, *, cap: int = CAP_COLUMNS
) -> GatheredColumns:
    """Gather at most ``cap`` columns of all ranks that hold different samples; warn (CappedWarning) if there are more.

    Guarantees:
      - all ranks hold the same columns, in the same order, of which none is padding;
      - for a given cap, the columns kept depend on the order of the samples, but not on how ranks divide them.
    """
    check_cap(cap)
    counts = column_counts(columns, sharding)
    total, rank = sum(counts), 0 if sharding is None else sharding.rank
    share = 1.0
    if total > cap:
        warnings.warn(
            CappedWarning(
                f"kept {cap} of {total} columns, evenly spaced; raise the cap (--kfac-cap), or "
                "measure fewer tokens (--microbatch)"
            ),
            stacklevel=2,
        )
        kept = torch.arange(cap) * total // cap
        ends = torch.tensor(counts).cumsum(0)
        owner = torch.searchsorted(ends, kept, right=True)
        own = kept[owner == rank] - (ends[rank] - counts[rank])
        columns, share = columns[:, own.to(columns.device)], cap / total
        counts = torch.bincount(owner, minlength=len(counts)).tolist()
    if len(counts) == 1:
        return GatheredColumns(columns, share)
    longest, n = max(counts), columns.shape[0]
    if longest == 0:
        return GatheredColumns(columns, share)
    rows = columns.mT.contiguous()
    rows = torch.cat([rows, rows.new_zeros(longest - len(rows), n)]) if len(rows) < longest else rows
    gathered = _all_gather(rows.flatten(), sharding).view(len(counts), longest, n)
    if min(counts) == longest:
        return GatheredColumns(gathered.view(-1, n).mT, share)
    return GatheredColumns(torch.cat([rows[:count] for rows, count in zip(gathered, counts)]).mT, share)


def _all_gather(x: Float[Tensor, " local"], sharding: Sharding | None) -> Float[Tensor, " ranks*local"]:
    if sharding is None or sharding.ranks == 1:
        return x
    for axis in (sharding.shard, sharding.replicate):
        x = collectives.wait(collectives.all_gather(x, axis)) if axis.size > 1 else x
    return x
