"""The metrics of a run, measured: one :class:`fdp.run.step_record.StepRecord` per step, and a summary at the end.

The budget covers the step, the epsilon spent, the norm of the parameters and the failures of K-FAC. All the rest is
computed on private data and **not** covered.

    >>> numbers = send_to_host(step_numbers(run, metrics, state, bound))
    >>> record = make_step_record(run, t, numbers.wait(), seconds=seconds)
    >>> summarise(run, state, records)
"""

from __future__ import annotations

import hashlib
import math
import operator
import resource
import statistics
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import tree
from fdp.data.read_counts import read_counts_of
from fdp.data.units import dataset_unit
from fdp.kfac.private.curvature_sources import describe_feed
from fdp.kfac.state import find_kfac_state
from fdp.parallel.dtensors import full_tensor, localize
from fdp.parallel.sharded_norms import sharded_global_norm
from fdp.privacy.guarantee import RELATION, Guarantee, guarantee_to_json
from fdp.privacy.releases import releases_of
from fdp.privacy.several_runs import compose, training_again
from fdp.run.step_record import StepRecord
from fdp.types import Metrics, TrainState, Tree

if TYPE_CHECKING:
    from fdp.run.prepare_run import Run


class StepNumbers(NamedTuple):
    """Tensors that a record is made of; only ``squares``, ``norm`` and ``failures`` are covered by the budget.

    ``squares`` are sums of squares of this rank's parameters after the step, leaf by leaf. ``norm`` is their norm over
    all ranks, None without ranks: then it follows from ``squares``.
    """

    metrics: Metrics
    squares: Float[Tensor, " leaves"]
    norm: Float[Tensor, ""] | None
    bound: Float[Tensor, ""] | None
    failures: Int[Tensor, ""] | None


def step_numbers(run: Run, metrics: Metrics, state: TrainState, bound: Tensor | None) -> StepNumbers:
    """Return what the record of a step needs, on the device; ``state`` is the state after it. Every rank calls it."""
    params = localize(state.params)
    norm = None if run.sharding is None else sharded_global_norm(tree.flatten(params), run.sharding)
    failures = None if run.kfac is None else find_kfac_state(state.opt).failures
    return StepNumbers(metrics, tree.squared_norms(params), norm, bound, failures)


def make_step_record(run: Run, t: int, numbers: StepNumbers, *, seconds: float) -> StepRecord:
    """Return the metrics of step ``t`` (from 0), given its numbers on the host."""
    metrics = numbers.metrics
    real = metrics.mask > 0
    losses, norms = metrics.losses[real].float(), metrics.norms[real].float()
    losses = losses[torch.isfinite(losses)]
    quantiles: list[float | None] = [None, None, None]
    if finite := norms[torch.isfinite(norms)].tolist():
        quantiles = [float(q) for q in np.quantile(finite, (0.1, 0.5, 0.9))]
    return StepRecord(
        step=t + 1,
        loss=float(losses.mean()) if len(losses) else None,
        epsilon=None if run.epsilons is None else float(run.epsilons[t]),
        clipped_fraction=float((metrics.factors[real] < 1).float().mean()) if finite else None,
        norm_q10=quantiles[0],
        norm_q50=quantiles[1],
        norm_q90=quantiles[2],
        max_norm=None if numbers.bound is None else float(numbers.bound),
        samples=len(norms),
        seconds=seconds,
        parameter_norm=_total_norm(numbers),
        kfac_failures=None if numbers.failures is None else int(numbers.failures),
        peak_memory_bytes=_peak_memory(run.config.device),
    )


def _total_norm(numbers: StepNumbers) -> float:
    if numbers.norm is not None:
        return float(numbers.norm)
    return math.sqrt(reduce(operator.add, numbers.squares.tolist()))  # in order: sum() rounds differently


def summarise(run: Run, state: TrainState, records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the result of a run for ``summary.json``; every rank calls it. ``seconds_per_step`` is the median."""
    losses = [record.loss for record in records if record.loss is not None]
    promised, done = guarantee_of(run), int(state.step)
    curvature = {} if run.kfac is None else _curvature(run, state)
    reading = read_counts_of(run.config.dataset)
    return (
        {
            "loss_first": losses[0] if losses else None,
            "loss_last": losses[-1] if losses else None,
            "private": promised.epsilon is not None,
            # Of all planned steps: stopping early because of the metrics uses the data to decide.
            "epsilon": promised.epsilon,
            # Counted by the state, since an interruption may fall between a step and its record.
            "epsilon_if_stop_was_decided_in_advance": (
                None if run.epsilons is None else float(run.epsilons[done - 1]) if done else 0.0
            ),
            "delta": promised.delta,
            "relation": promised.relation,
            "unit": promised.unit,
            "noise_multiplier": run.mechanism.noise_multiplier,
            "steps": done,
            "steps_planned": run.config.steps,
            "samples": len(run.config.dataset),
            "reading": None if reading is None else reading.as_json(),
            "parameter_count": tree.size(state.params),
            "parameter_norm": float(_norm(run, state.params)),
            "parameter_sha256": parameter_digest(state.params),
            "seconds_per_step": statistics.median(record.seconds for record in records) if records else None,
            "peak_memory_bytes": _peak_memory(run.config.device),
            "method": run.config.method.value,
            "world_size": 1 if run.sharding is None else run.sharding.world.size,
            "seed": "os" if run.config.seed is None else run.config.seed,
        }
        | curvature
        | _before(run, promised)
    )


def guarantee_of(run: Run) -> Guarantee:
    """Return the promise of the run about its data: the epsilon of all planned steps."""
    unit = dataset_unit(run.config.dataset).one
    if run.epsilons is None:
        return Guarantee(None, None, None, unit)
    steps = run.config.steps
    releases = releases_of(run.mechanism, steps=steps)
    return Guarantee(float(run.epsilons[-1]), run.config.delta, RELATION, unit, releases, steps, accountant="PLD")


def _before(run: Run, promised: Guarantee) -> dict[str, Any]:
    """Return the promises about the first parameters, and their composition with this run's on the same data."""
    if not run.config.before:
        return {}
    total = compose([*run.config.before, promised])
    return {
        "trained_before": [guarantee_to_json(guarantee) for guarantee in run.config.before],
        "epsilon_if_on_the_same_data_before": None if total is None else total[0],
        "delta_if_on_the_same_data_before": None if total is None else total[1],
        "warning": training_again(run.config.before, promised),
    }


def _curvature(run: Run, state: TrainState) -> dict[str, Any]:
    """Return the counts of curvature measurements and failures, the source of their data, and their noise."""
    kfac, more = find_kfac_state(state.opt), run.mechanism.statistics
    return {
        "kfac_measured": int(kfac.measured),
        "kfac_failures": int(kfac.failures),
        "kfac_data": "own" if run.feed is None else describe_feed(run.feed),
        "kfac_noise_multiplier": None if more is None else more.noise_multiplier,
    }


def parameter_digest(params: Tree) -> str:
    """Return SHA-256 of the float32 bytes of every leaf, in path order; DTensors are gathered one leaf at a time."""
    digest = hashlib.sha256()
    for leaf in tree.flatten(params).values():
        digest.update(full_tensor(leaf).detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _norm(run: Run, params: Tree) -> Tensor:
    if run.sharding is None:
        return tree.global_norm(params)
    return sharded_global_norm(tree.flatten(localize(params)), run.sharding)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
