"""A training run as plain functions: values in, one record per step out. What ``fdp train`` calls.

    root    = key(seed)                                initial parameters: fold_in(root, "init")
    step_t  = fold_in(fold_in(root, "step"), t)
    batch_t = sample(fold_in(step_t, "sample"))        noise of step t: fold_in(step_t, "noise")

so that everything is a function of (seed, t). Nothing is written to disk here.

    >>> run, state = prepare(config)                   # every check, before any noise is drawn
    >>> for state, record in steps(run, state): records.append(record)
    >>> summarise(run, state, records)
"""

from __future__ import annotations

import hashlib
import os
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fdp import accounting, audit, keys, tree
from fdp.clipping import ClipStyle
from fdp.mechanism import Mechanism
from fdp.methods import Method, make_plan
from fdp.model import Model, check_params
from fdp.optimizers import Optimizer
from fdp.sampling import Dataset, poisson, sample_batch
from fdp.step import init_state, make_train_step
from fdp.types import FdpError, Key, Metrics, Norms, Step, TrainState, Tree

NORMS_CHECKED_UP_TO = 20_000_000
"""Parameters up to which a run starts by comparing its per-sample norms with ``vmap(grad)``, on two samples."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that decides a run.

    Exactly one of ``noise_multiplier`` and ``epsilon`` is given; with ``Method.NONE``, neither.
    ``batch_size`` is the expected one of Poisson sampling. ``microbatch_size``, ``memory_budget`` (bytes),
    ``compiled`` and ``device`` change how a run computes, not what. ``seed=None``: a key from the system.
    """

    model: Model
    dataset: Dataset
    method: Method
    clip: ClipStyle
    noise_multiplier: float | None
    epsilon: float | None
    delta: float
    batch_size: int
    steps: int
    optimizer: Optimizer
    seed: int | None
    dtype: torch.dtype
    microbatch_size: int
    memory_budget: float | None
    compiled: bool
    device: torch.device


class Run(NamedTuple):
    """A run that passed every check: what does not change from step to step.

    ``epsilons`` is what has been spent after 1, 2, ... steps; None where the run is not private.
    """

    config: RunConfig
    mechanism: Mechanism
    step: Step
    root: Key
    epsilons: Sequence[float] | None


class Record(NamedTuple):
    """What one step saw. All but ``step`` and ``epsilon`` is computed on private data, outside the budget.

    ``loss`` and the norms are over the samples whose own are finite, None where there are none; ``max_norm``
    is the bound C that the step clipped to, None where it did not clip.
    """

    step: int
    loss: float | None
    epsilon: float | None
    clipped_fraction: float | None
    norm_q10: float | None
    norm_q50: float | None
    norm_q90: float | None
    max_norm: float | None
    samples: int
    seconds: float


def default_delta(dataset_size: int) -> float:
    """``min(1e-6, N^-1.1)``: well below 1/N, at which releasing one sample whole would count as private."""
    return min(1e-6, dataset_size**-1.1)


def prepare(config: RunConfig) -> tuple[Run, TrainState]:
    """The run and its first state.

    Guarantees:
      - nothing is written and no noise is drawn;
      - settings, data, parameters or a model that could not be trained privately are errors here, not later.
    """
    _check(config)
    model, size = config.model, len(config.dataset)
    mechanism = _mechanism(config)
    root = keys.key(config.seed)
    params = model.init(keys.fold_in(root, "init").to(config.device))
    check_params(model, params)
    example = _move(config.dataset.fetch(np.arange(config.microbatch_size) % size), config.device)
    _check_example(model, example)
    audit.check_independent(model, params, _move(config.dataset.fetch(np.arange(min(4, size))), config.device))
    plan = make_plan(
        model,
        params,
        example,
        method=config.method,
        memory_budget=config.memory_budget,
        dtype=config.dtype,
    )
    if config.method not in (Method.NONE, Method.MATERIALIZE) and tree.size(params) <= NORMS_CHECKED_UP_TO:
        few = _move(config.dataset.fetch(np.arange(2) % size), config.device)
        audit.check_norms(model, params, few, plan=make_plan(model, params, few, method=config.method))
    step = make_train_step(model, config.optimizer, mechanism=mechanism, plan=plan, compiled=config.compiled)
    epsilons = None
    if mechanism.noise_multiplier > 0:
        counts = range(1, config.steps + 1)
        epsilons = accounting.epsilon_curve(mechanism, steps=counts, delta=config.delta)
    return Run(config, mechanism, step, root, epsilons), init_state(model, params, config.optimizer, mechanism)


def steps(run: Run, state: TrainState) -> Iterator[tuple[TrainState, Record]]:
    """Every step of the run: the state after it and what it saw.

    Guarantees:
      - the same seed gives the same states;
      - parameters that stop being finite end the run at that step, with an error that names the leaf.
    """
    config = run.config
    if config.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(config.device)
    every_step = keys.fold_in(run.root, "step")
    for t in range(config.steps):
        start = time.perf_counter()
        step_key = keys.fold_in(every_step, t)
        sample_key = keys.fold_in(step_key, "sample")
        batch = sample_batch(config.dataset, run.mechanism.sampling, sample_key, microbatch_size=config.microbatch_size)
        bound = _bound(run, state)
        noise_key = keys.fold_in(step_key, "noise").to(config.device)
        state, metrics = run.step(state, _move(batch, config.device), noise_key)
        _check_finite(state.params, step=t + 1)
        yield state, _record(run, t, metrics, bound=bound, start=start)


def summarise(run: Run, state: TrainState, records: Sequence[Record]) -> dict[str, Any]:
    """The result of a run, as ``summary.json`` holds it; ``seconds_per_step`` is the median."""
    losses = [record.loss for record in records if record.loss is not None]
    private, done = run.epsilons is not None, int(state.step)
    return {
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "private": private,
        # by the state itself: an interruption may fall between a step and its record
        "epsilon": None if run.epsilons is None else (float(run.epsilons[done - 1]) if done else 0.0),
        "delta": run.config.delta if private else None,
        "noise_multiplier": run.mechanism.noise_multiplier,
        "steps": done,
        "parameter_count": tree.size(state.params),
        "parameter_norm": float(tree.global_norm(state.params)),
        "parameter_sha256": fingerprint(state.params),
        "seconds_per_step": statistics.median(record.seconds for record in records) if records else None,
        "peak_memory_bytes": _peak_memory(run.config.device),
        "method": run.config.method.value,
        "world_size": 1,
        "seed": "os" if run.config.seed is None else run.config.seed,
    }


def fingerprint(params: Tree) -> str:
    """SHA-256 of the float32 bytes of every leaf, in path order."""
    digest = hashlib.sha256()
    for leaf in tree.flatten(params).values():
        digest.update(leaf.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _record(run: Run, t: int, metrics: Metrics, *, bound: float | None, start: float) -> Record:
    real = metrics.mask > 0
    losses, norms = metrics.losses[real].float(), metrics.norms[real].float()
    losses = losses[torch.isfinite(losses)]
    quantiles: list[float | None] = [None, None, None]
    if finite := norms[torch.isfinite(norms)].tolist():
        quantiles = [float(q) for q in np.quantile(finite, (0.1, 0.5, 0.9))]
    return Record(
        step=t + 1,
        loss=float(losses.mean()) if len(losses) else None,
        epsilon=None if run.epsilons is None else float(run.epsilons[t]),
        clipped_fraction=float((metrics.factors[real] < 1).float().mean()) if finite else None,
        norm_q10=quantiles[0],
        norm_q50=quantiles[1],
        norm_q90=quantiles[2],
        max_norm=bound,
        samples=len(norms),
        seconds=time.perf_counter() - start,
    )


def _mechanism(config: RunConfig) -> Mechanism:
    sampling = poisson(len(config.dataset), expected_batch_size=config.batch_size)
    if config.epsilon is None:
        return Mechanism(sampling, config.clip, config.noise_multiplier or 0.0)
    noise_multiplier = accounting.noise_multiplier_for(
        sampling, config.clip, epsilon=config.epsilon, delta=config.delta, steps=config.steps
    )
    return Mechanism(sampling, config.clip, noise_multiplier)


def _bound(run: Run, state: TrainState) -> float | None:
    """C of the coming step: the sensitivity that the style states, whatever the norms."""
    if run.config.method is Method.NONE:
        return None
    zeros = {path: torch.zeros(1, device=run.config.device) for path in sorted(run.config.model.trainable)}
    return float(run.mechanism.clip.clip(Norms(zeros), state.clip).sensitivity)


def _check(config: RunConfig) -> None:
    """What nothing further down checks: counts, and privacy asked for in exactly one way."""
    for name in ("steps", "microbatch_size"):
        if getattr(config, name) < 1:
            raise FdpError(f"{name}: expected at least 1, got {getattr(config, name)}")
    if not 0 < config.delta < 1:
        raise FdpError(f"delta: expected a number in (0, 1), got {config.delta}; below 1 / samples is usual")
    if config.noise_multiplier is not None and not 0 <= config.noise_multiplier < float("inf"):
        raise FdpError(f"noise multiplier: expected a finite number, 0 or more, got {config.noise_multiplier}")
    if config.method is Method.NONE and (config.epsilon is not None or config.noise_multiplier):
        raise FdpError("method none trains without privacy: expected no epsilon and no noise; leave them out")
    if config.method is not Method.NONE and (config.epsilon is None) == (config.noise_multiplier is None):
        raise FdpError("privacy: expected either an epsilon or a noise multiplier, got both or neither")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise FdpError("run: expected one process, got several; each would train, and spend, on its own")


def _check_example(model: Model, example: Tree) -> None:
    tokens = example.get("tokens") if isinstance(example, dict) else None
    if tokens is not None and model.context is not None and tokens.shape[1] - 1 > model.context:
        raise FdpError(
            f"data: expected sequences of at most the {model.context} tokens of {model.name}'s context, "
            f"got {tokens.shape[1] - 1}; cut the data into shorter windows"
        )
    for path, leaf in tree.flatten(example).items():
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise FdpError(f"data {path}: holds NaN or infinity; repair or drop those samples")


def _check_finite(params: Tree, *, step: int) -> None:
    flat = tree.flatten(params)
    largest = torch.stack([leaf.detach().abs().max().float() for leaf in flat.values()])
    if not bool(torch.isfinite(largest).all()):
        path = list(flat)[int((~torch.isfinite(largest)).int().argmax())]
        raise FdpError(f"step {step}: {path} became NaN or infinite; lower the learning rate or the noise")


def _move(data: Tree, device: torch.device) -> Tree:
    return tree.map(lambda leaf: leaf.to(device), data)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
