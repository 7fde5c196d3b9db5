"""What the microbatches of a step add up to: one clipped sum, one tally, the metrics of all samples.

total = sum over microbatches of ClippedSum,    of different samples: the sensitivity stays that of one

>>> total, tally, metrics = joined(parts, several=count > 1)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdp.fast.compiled import Blocks
from fdp.gradients.block_loop import Memory
from fdp.gradients.per_sample import plain_sum
from fdp.gradients.plan import Plan
from fdp.model import Model
from fdp.parallel.gather_reduce import gather_samples
from fdp.parallel.sharding import Sharding
from fdp.types import ClippedSum, Metrics, Tree


class Part(NamedTuple):
    """What a microbatch adds: its clipped sum, its tally for adaptive clipping, its metrics."""

    total: ClippedSum
    tally: Tensor
    metrics: Metrics


def plain_part(
    model: Model,
    plan: Plan,
    params: Tree,
    data: Tree,
    mask: Tensor,
    sharding: Sharding | None,
    memory: Memory,
    blocks: Blocks | None,
    *,
    made: bool,
) -> Part:
    """What a microbatch adds in plain training: the sum of its gradients, which nothing bounds."""
    losses, value = plain_sum(
        model, params, data, mask, plan=plan, sharding=sharding, memory=memory, blocks=blocks, made=made
    )
    metrics = Metrics(losses, torch.full_like(losses, torch.nan), torch.ones_like(losses), mask)
    return Part(ClippedSum(value, losses.new_full((), torch.inf)), losses.new_zeros(()), metrics)


def joined(parts: Iterable[Part], *, several: bool) -> Part:
    """The sum of all microbatches, which hold different samples.

    Of ``several`` each sum is made, and what it is made of released, before the next microbatch begins: that may be
    many times its size.
    """
    total, tally, metrics = None, None, []
    for part in parts:
        more = part.total.made() if several and total is None else part.total
        total = more if total is None else total.plus(more, release=True)
        tally = part.tally if tally is None else tally + part.tally
        metrics.append(part.metrics)
        del part, more
    assert total is not None
    assert tally is not None
    return Part(total, tally, Metrics(*(torch.cat(fields) for fields in zip(*metrics))))


def everyones(metrics: Metrics, shape: Sequence[int], sharding: Sharding | None) -> Metrics:
    """The metrics of all ranks' samples, in global order."""
    if sharding is None:
        return metrics
    return Metrics(*(gather_samples(sharding, field.view(*shape)).flatten() for field in metrics))
