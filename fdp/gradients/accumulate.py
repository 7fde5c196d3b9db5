"""Clipped gradients of microbatches, added up over a step.

total = sum over microbatches of ClippedSum                 different samples: the sensitivity stays that of one

>>> gradient = clipped_gradient(model, mechanism, plan)      # microbatch -> its clipped sum
>>> total, tally, metrics = add_microbatches(gradient(...) for i in range(count))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.gradients.clipped_sum import clipped_sum, plain_sum
from fdp.gradients.execution import LOCAL, Execution
from fdp.gradients.lazy_sum import add_sums, add_sums_, evaluate
from fdp.gradients.linear_maps import Sides
from fdp.gradients.per_sample import Stash, identity, per_sample_norms
from fdp.gradients.plan import Plan
from fdp.gradients.precondition import map_record
from fdp.model import Model
from fdp.parallel.gather_reduce import gather_samples
from fdp.parallel.sharding import Sharding
from fdp.privacy.mechanism import Mechanism
from fdp.types import Clip, ClippedSum, Metrics, Path, Tree

Preconditioners: TypeAlias = Mapping[Path, Sides]
"""The linear maps that per-sample gradients go through before they are clipped; leaves without one stay as they are."""

NO_PRECONDITIONERS: Preconditioners = {}


class MicrobatchSum(NamedTuple):
    """The contribution of a microbatch to a step: its clipped sum, its tally for adaptive clipping, its metrics."""

    total: ClippedSum
    tally: Tensor
    metrics: Metrics


Gradient: TypeAlias = Callable[..., MicrobatchSum]
"""``gradient(weights, clip_state, data, mask, preconditioners={})``: the work on one microbatch."""


def clipped_gradient(
    model: Model,
    mechanism: Mechanism,
    plan: Plan,
    execution: Execution = LOCAL,
    sum_records: Callable[[Stash, Clip], ClippedSum] = clipped_sum,
) -> Gradient:
    """Return the private work on a microbatch: per-sample norms, clip factors, clipped sum."""

    def gradient(
        weights: Tree,
        clip_state: Tree,
        data: Tree,
        mask: Float[Tensor, " batch"],
        preconditioners: Preconditioners = NO_PRECONDITIONERS,
    ) -> MicrobatchSum:
        transform = partial(map_record, preconditioners) if preconditioners else identity
        own = plan.of_size(len(mask))
        losses, norms, stash = per_sample_norms(
            model, weights, data, plan=own, execution=execution, transform=transform
        )
        clip = mechanism.clip.clip(norms, clip_state).masked(mask)
        total = sum_records(stash, clip)
        tally = mechanism.clip.tally(norms, mask, clip_state)
        return MicrobatchSum(total, tally, Metrics(losses, norms.total(), clip.smallest(), mask))

    return gradient


def plain_gradient(
    model: Model, plan: Plan, execution: Execution = LOCAL, sum_gradients: Callable[..., Any] = plain_sum
) -> Gradient:
    """Return the work on a microbatch of plain training: the sum of its gradients, which nothing bounds."""

    def gradient(
        weights: Tree,
        clip_state: Tree,
        data: Tree,
        mask: Float[Tensor, " batch"],
        preconditioners: Preconditioners = NO_PRECONDITIONERS,
    ) -> MicrobatchSum:
        own = plan.of_size(len(mask))
        losses, value = sum_gradients(model, weights, data, mask, plan=own, execution=execution)
        metrics = Metrics(losses, torch.full_like(losses, torch.nan), torch.ones_like(losses), mask)
        return MicrobatchSum(ClippedSum(value, losses.new_full((), torch.inf)), losses.new_zeros(()), metrics)

    return gradient


def add_microbatches(sums: Iterable[MicrobatchSum], count: int) -> MicrobatchSum:
    """Return the sum of ``count`` microbatches, which hold different samples.

    If there are several, each lazy sum is evaluated and its rows are freed before the next microbatch begins: the rows
    may be many times larger than the sum.
    """
    total, tally, metrics = None, None, []
    for each in sums:
        more = evaluate(each.total) if count > 1 and total is None else each.total
        total = more if total is None else add_sums(total, more)
        tally = each.tally if tally is None else tally + each.tally
        metrics.append(each.metrics)
        del each, more
    assert total is not None
    assert tally is not None
    return MicrobatchSum(total, tally, join_metrics(metrics))


def make_running_sum(first: MicrobatchSum) -> tuple[ClippedSum, Tensor]:
    """Return ``first`` as a sum and a tally in tensors of their own, which :func:`add_microbatch_` adds to."""
    total = evaluate(first.total)
    value = {path: leaf.contiguous() for path, leaf in total.value.items()}
    return total._replace(value=value, sensitivity=total.sensitivity.clone()), first.tally.clone()


def clear_running_sum_(running: tuple[ClippedSum, Tensor]) -> None:
    """Write 0 into the sum, its sensitivity and the tally: no sample has been added."""
    for leaf in tree.leaves(running):
        leaf.zero_()


def add_microbatch_(running: tuple[ClippedSum, Tensor], more: MicrobatchSum) -> Metrics:
    """Add a microbatch to a running sum and its tally, in place, and return its metrics.

    Guarantees:
      - the numbers of :func:`add_microbatches`, up to rounding; every tensor of the running sum keeps its place.
    """
    total, tally = running
    add_sums_(total, more.total)
    tally.add_(more.tally)
    return more.metrics


def join_metrics(metrics: Sequence[Metrics]) -> Metrics:
    """Return the metrics of all microbatches, in order."""
    return Metrics(*(torch.cat(fields) for fields in zip(*metrics)))


def gather_metrics(metrics: Metrics, shape: Sequence[int], sharding: Sharding | None) -> Metrics:
    """Gather the metrics of all ranks' samples, in global order."""
    if sharding is None:
        return metrics
    return Metrics(*(gather_samples(sharding, field.view(*shape)).flatten() for field in metrics))
