"""Clipped gradients of microbatches, added up over a step.

total = sum over microbatches of ClippedSum                 different samples: the sensitivity stays that of one

>>> gradient = clipped_gradient(model, mechanism, plan)      # microbatch, sum before -> sum after
>>> total, tally, metrics = add_microbatches(lambda i, onto: gradient(..., onto=onto), count)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.gradients.clipped_sum import clipped_sum, plain_sum
from fdp.gradients.execution import LOCAL, Execution
from fdp.gradients.lazy_sum import add_onto, with_bound_of
from fdp.gradients.linear_maps import Sides
from fdp.gradients.per_sample import Stash, identity, per_sample_norms
from fdp.gradients.plan import Plan
from fdp.gradients.precondition import map_record
from fdp.model import Model
from fdp.parallel.gather_reduce import gather_samples
from fdp.parallel.sharding import Sharding
from fdp.privacy.clipping import ClipStyle
from fdp.privacy.mechanism import Mechanism
from fdp.types import NO_SAMPLES, Clip, ClippedSum, FdpError, Metrics, Norms, Path, Tree

Preconditioners: TypeAlias = Mapping[Path, Sides]
"""The linear maps that per-sample gradients go through before they are clipped; leaves without one stay as they are."""

NO_PRECONDITIONERS: Preconditioners = {}


class MicrobatchSum(NamedTuple):
    """The contribution of a microbatch to a step: its clipped sum, its tally for adaptive clipping, its metrics."""

    total: ClippedSum
    tally: Tensor
    metrics: Metrics


Gradient: TypeAlias = Callable[..., MicrobatchSum]
"""``gradient(weights, clip_state, data, mask, preconditioners={}, onto=None)``: the work on one microbatch.

``onto`` is the sum over earlier microbatches, to whose tensors this one is added; ``NO_SAMPLES`` for the first of
several, None for the only one.
"""


def clipped_gradient(
    model: Model,
    mechanism: Mechanism,
    plan: Plan,
    execution: Execution = LOCAL,
    sum_records: Callable[[Stash, Clip, ClippedSum | None], ClippedSum] = clipped_sum,
) -> Gradient:
    """Return the private work on a microbatch: per-sample norms, clip factors, clipped sum."""

    def gradient(
        weights: Tree,
        clip_state: Tree,
        data: Tree,
        mask: Float[Tensor, " batch"],
        preconditioners: Preconditioners = NO_PRECONDITIONERS,
        onto: ClippedSum | None = None,
    ) -> MicrobatchSum:
        transform = partial(map_record, preconditioners) if preconditioners else identity
        own = plan.of_size(len(mask))
        losses, norms, stash = per_sample_norms(
            model, weights, data, plan=own, execution=execution, transform=transform
        )
        clip = _vouched(mechanism.clip, norms, clip_state).masked(mask)
        total = sum_records(stash, clip, onto)
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
        onto: ClippedSum | None = None,
    ) -> MicrobatchSum:
        own = plan.of_size(len(mask))
        before = None if onto is None else onto.value
        losses, value = sum_gradients(model, weights, data, mask, plan=own, execution=execution, onto=before)
        metrics = Metrics(losses, torch.full_like(losses, torch.nan), torch.ones_like(losses), mask)
        return MicrobatchSum(ClippedSum(value, losses.new_full((), torch.inf)), losses.new_zeros(()), metrics)

    return gradient


def add_outside(gradient: Gradient, dtype: torch.dtype) -> Gradient:
    """Return the same work on a microbatch for a ``gradient`` that knows no ``onto``: its sum is added afterwards."""

    def added(*args: Any, onto: ClippedSum | None = None) -> MicrobatchSum:
        part = gradient(*args)
        return part if onto is None else part._replace(total=_add_total(part.total, onto, dtype))

    return added


def _add_total(total: ClippedSum, onto: ClippedSum, dtype: torch.dtype) -> ClippedSum:
    return with_bound_of(onto, total._replace(value=add_onto(onto.value, total.value, dtype)))


def _vouched(style: ClipStyle, norms: Norms, state: Tree) -> Clip:
    clip = style.clip(norms, state)
    if clip.bound is None:
        raise FdpError(
            f"clip style {style.name!r}: expected a Clip that somebody vouches for, got one made by hand: its "
            "sensitivity scales the noise. Return fdp.privacy.clipping.declare_clip(factors, sensitivity)"
        )
    return clip


def add_microbatches(work: Callable[[int, ClippedSum | None], MicrobatchSum], count: int) -> MicrobatchSum:
    """Return the sum of ``count`` microbatches of different samples; ``work(i, onto)`` adds number i and its bound.

    If there are several, each lazy sum is evaluated and its rows are freed before the next microbatch begins: the rows
    may be many times larger than the sum.

    Guarantees:
      - the sensitivity is that of one microbatch: a sample is in one of them only;
      - nobody vouches for the sum if nobody does for one of them.
    """
    total, tally, metrics = None, None, []
    for i in range(count):
        each = work(i, None if count == 1 else NO_SAMPLES if total is None else total)
        total = each.total
        tally = each.tally if tally is None else tally + each.tally
        metrics.append(each.metrics)
        del each
    assert total is not None
    assert tally is not None
    return MicrobatchSum(total, tally, join_metrics(metrics))


def make_running_sum(first: MicrobatchSum) -> tuple[ClippedSum, Tensor]:
    """Return the sum and the tally of the first of several microbatches, to which :func:`add_microbatch_` adds."""
    total = first.total
    value = {path: leaf.contiguous() for path, leaf in total.value.items()}
    return total._replace(value=value, sensitivity=total.sensitivity.clone()), first.tally.clone()


def clear_running_sum_(running: tuple[ClippedSum, Tensor]) -> None:
    """Write 0 into the sum, its sensitivity and the tally: no sample has been added."""
    for leaf in tree.leaves(running):
        leaf.zero_()


def add_microbatch_(running: tuple[ClippedSum, Tensor], work: Callable[[ClippedSum], MicrobatchSum]) -> Metrics:
    """Add a microbatch to a running sum and its tally, in place, and return its metrics.

    ``work(onto)`` returns the sum with the microbatch added. Every tensor of the running sum keeps its place.
    """
    total, tally = running
    after = work(total)
    if after.total.bound is None and total.bound is not None:
        raise FdpError(
            "add_microbatch_: expected a sum with a bound, as that of the microbatches before, got one without"
        )
    for path, leaf in total.value.items():
        if after.total.value[path] is not leaf:
            leaf.copy_(after.total.value[path])
    total.sensitivity.copy_(after.total.sensitivity)
    tally.add_(after.tally)
    return after.metrics


def join_metrics(metrics: Sequence[Metrics]) -> Metrics:
    """Return the metrics of all microbatches, in order."""
    return Metrics(*(torch.cat(fields) for fields in zip(*metrics)))


def gather_metrics(metrics: Metrics, shape: Sequence[int], sharding: Sharding | None) -> Metrics:
    """Gather the metrics of all ranks' samples, in global order."""
    if sharding is None:
        return metrics
    return Metrics(*(gather_samples(sharding, field.view(*shape)).flatten() for field in metrics))
