"""The columns of all ranks on every rank: ``U = [U_0 ... U_R-1]``, though the ranks have different numbers of them.

    lengths   k_r, first, from every rank
    columns   padded to the longest, gathered, the padding dropped
    cap       of k > cap columns those with the numbers  floor(m k / cap), m = 0 .. cap - 1,  in the order of ranks

Columns beyond the cap are never sent. What is dropped follows from the lengths alone, so it is the same on every rank.

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

CAP = 8192
"""Columns of a factor, over all ranks; more would be a small system of more than 0.5 GB in float64."""


class CappedWarning(UserWarning):
    """Columns were left out because there were more than the cap.

    A warning and not a returned flag, which callers drop. Every rank gives it before any column travels: where
    warnings are errors all ranks stop, and none waits for the others.
    """


class Gathered(NamedTuple):
    """The columns of all ranks, in their order, and which share of them was kept."""

    columns: Float[Tensor, "n k"]
    share: float


def check_cap(cap: int) -> None:
    """Refuses a cap that would keep nothing."""
    if cap < 1:
        raise FdpError(f"cap: expected at least 1 column, got {cap}; {CAP} is the default")


def lengths(columns: Float[Tensor, "n k"], sharding: Sharding | None) -> list[int]:
    """How many columns every rank has that holds samples of its own, in the order of ``sharding.rank``."""
    if sharding is None:
        return [columns.shape[1]]  # and no device is waited for
    own = torch.tensor([columns.shape[1]], dtype=torch.int64, device=columns.device)
    return _all_gathered(own, sharding).tolist()


def gather_columns(columns: Float[Tensor, "n k"], sharding: Sharding | None, *, cap: int = CAP) -> Gathered:
    """The columns of all ranks that hold different samples, at most ``cap`` of them; a :class:`CappedWarning` if more.

    Guarantees:
      - all ranks hold the same columns, in the same order, of which none is padding;
      - with one cap, the columns that are kept do not depend on how the samples are divided among the ranks, as long
        as their order is the same.
    """
    check_cap(cap)
    counts = lengths(columns, sharding)
    everyone, rank = sum(counts), 0 if sharding is None else sharding.rank
    share = 1.0
    if everyone > cap:
        warnings.warn(
            CappedWarning(
                f"kept {cap} of {everyone} columns, evenly spaced; raise the cap (--kfac-cap), or "
                "measure fewer tokens (--microbatch)"
            ),
            stacklevel=2,
        )
        kept = torch.arange(cap) * everyone // cap
        ends = torch.tensor(counts).cumsum(0)
        owner = torch.searchsorted(ends, kept, right=True)
        own = kept[owner == rank] - (ends[rank] - counts[rank])
        columns, share = columns[:, own.to(columns.device)], cap / everyone
        counts = torch.bincount(owner, minlength=len(counts)).tolist()
    if len(counts) == 1:
        return Gathered(columns, share)
    longest, n = max(counts), columns.shape[0]
    if longest == 0:
        return Gathered(columns, share)
    rows = columns.mT.contiguous()
    rows = torch.cat([rows, rows.new_zeros(longest - len(rows), n)]) if len(rows) < longest else rows
    everyones = _all_gathered(rows.flatten(), sharding).view(len(counts), longest, n)
    if min(counts) == longest:
        return Gathered(everyones.view(-1, n).mT, share)
    return Gathered(torch.cat([rows[:count] for rows, count in zip(everyones, counts)]).mT, share)


def _all_gathered(x: Float[Tensor, " local"], sharding: Sharding | None) -> Float[Tensor, " ranks*local"]:
    if sharding is None or sharding.ranks == 1:
        return x
    for axis in (sharding.shard, sharding.replicate):
        x = collectives.wait(collectives.all_gather(x, axis)) if axis.size > 1 else x
    return x
