"""A step between its launch and its record: the device computes it while the host does something else.

>>> flight = take_off(run, t, metrics, state, bound=bound, stop=False, began=began)     # right after run.step
>>> record, any_stops = land(run, flight, landed=0.0)                                   # waits for the step
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import tree
from fdp.gradients.plan import Method
from fdp.parallel import collectives
from fdp.run.overlap import Arrival, send_to_host
from fdp.run.prepare_run import Run
from fdp.run.step_metrics import make_step_record, step_numbers
from fdp.run.step_record import StepRecord
from fdp.types import FdpError, Metrics, Norms, TrainState


class NotFinite(FdpError):
    """A parameter became NaN or infinite."""


class Flight(NamedTuple):
    """A step that was launched: the state after it, its numbers and flags on their way to the host, and its start.

    The flags say for every leaf whether it is not finite and, last, whether a rank wants to stop.
    """

    t: int
    state: TrainState
    arrival: Arrival
    began: float


def take_off(
    run: Run, t: int, metrics: Metrics, state: TrainState, *, bound: Tensor | None, stop: bool, began: float
) -> Flight:
    """Send the numbers of step ``t`` (from 0) to the host; ``state`` is the state after it. Every rank calls it."""
    numbers = step_numbers(run, metrics, state, bound)
    return Flight(t, state, send_to_host((numbers, _flags(run, numbers.squares, stop=stop))), began)


def land(run: Run, flight: Flight, *, landed: float) -> tuple[StepRecord, bool]:
    """Wait for a step; return its record, and whether any rank wants to stop.

    ``landed`` is when the step before it ended: if that was after the launch, the step began then. If a parameter of
    any rank is not finite, raise on every rank.
    """
    numbers, flags = flight.arrival.wait()
    seconds = time.perf_counter() - max(flight.began, landed)
    *counts, stops = flags.tolist()
    if not_finite := [path for path, count in zip(tree.paths(flight.state.params), counts) if count]:
        raise NotFinite(
            f"step {flight.t + 1}: {not_finite[0]} became NaN or infinite; lower the learning rate or the noise"
        )
    return make_step_record(run, flight.t, numbers, seconds=seconds), stops > 0


def read_clip_bound(run: Run, state: TrainState) -> Float[Tensor, ""] | None:
    """Return C of the coming step: the sensitivity of the clipping style, which does not depend on norms."""
    if run.config.method is Method.NONE:
        return None
    there = run.config.device if tree.leaves(state.clip) else torch.device("cpu")
    zero = torch.zeros(1, dtype=torch.float64, device=there)  # the dtype of norms
    zeros = dict.fromkeys(sorted(run.config.model.trainable), zero)
    # A copy, since the step may write the next C over this one.
    return run.mechanism.clip.clip(Norms(zeros), state.clip).sensitivity.clone()


def _flags(run: Run, squares: Float[Tensor, " leaves"], *, stop: bool) -> Int[Tensor, " leaves_and_1"]:
    """Return for every leaf on how many ranks it is not finite and, last, how many ranks want to stop."""
    wants = torch.full((1,), stop, device=squares.device)
    flags = torch.cat([~torch.isfinite(squares), wants]).to(run.config.device).long()
    if run.sharding is not None:
        flags = collectives.wait(collectives.all_reduce(flags, run.sharding.world))
    return flags
