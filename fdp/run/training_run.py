"""A training run as plain functions: values in, one record per step out. What ``fdp train`` calls.

    root = key(seed)                                   initial parameters: fold_in(root, "init")
    key  = fold_in(root, settings)                     samples and noise of every step: fdp.keys.step_key(key, ..., t)

so that everything is a function of (seed, settings, t). The settings are all that decides what is computed, the data
included, and nothing that decides how: two runs of one seed with two clip norms, learning rates or datasets share
neither samples nor noise, whose difference would tell the data. Nothing is written to disk here.

    >>> run, state = prepare(config)                   # every check, before any noise is drawn
    >>> for state, record in steps(run, state): records.append(record)
    >>> summarise(run, state, records)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from fdp import keys, tree
from fdp.checks.first_call import REAL_SAMPLES, check_model
from fdp.data.digest import data_digest
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fingerprint import fingerprint
from fdp.gradients import timing
from fdp.gradients.execution import Execution
from fdp.gradients.plan import TIMED_METHODS, Method, Plan, make_plan
from fdp.kfac.optimizer import Kfac
from fdp.kfac.private.curvature_sources import (
    Feed,
    KfacOptimizer,
    check_source,
    make_feed,
    make_kfac,
    make_statistics,
    refresh_from_feed,
)
from fdp.kfac.private.public_data import Public
from fdp.kfac.private.refresh import sides_of
from fdp.model import Model
from fdp.optimizers import Optimizer
from fdp.parallel import collectives, launch
from fdp.parallel.agree import check_agreement
from fdp.parallel.dtensors import localize
from fdp.parallel.mesh import make_mesh
from fdp.parallel.offload import NO_OFFLOAD, Offload
from fdp.parallel.sharded_init import drawn_params, shared_key
from fdp.parallel.sharding import Data, Reduce, Sharding, Zero, abstract_params, make_sharding, over_tensor_axis
from fdp.privacy import accounting
from fdp.privacy.clipping import ClipStyle
from fdp.privacy.guarantee import Guarantee
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.microbatches import Dataset
from fdp.privacy.sampling import TRAINING, Poisson, poisson, sample_batch
from fdp.run.step_metrics import StepRecord, make_step_record
from fdp.stages import Stages, make_stages
from fdp.step import init_state, join
from fdp.types import Batch, FdpError, Key, Norms, Step, TrainState, Tree


class Layout(NamedTuple):
    """How a run lies on several ranks: the sizes of the mesh's axes, and what is cut along them.

    ``timeout``: the seconds that a rank waits for another; None: torch's default.
    """

    axes: Mapping[str, int]
    zero: Zero
    data: Data = Data.SPLIT
    reduce: Reduce | None = None
    reduce_dtype: torch.dtype | None = None
    timeout: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that decides a run.

    Exactly one of ``noise_multiplier`` and ``epsilon`` is given; with ``Method.NONE``, neither.
    ``batch_size`` is the expected one of Poisson sampling; ``population`` the public number of samples that its rate is
    of, None: their number, rounded up. ``microbatch_size``, ``memory_budget`` (bytes), ``compile``,
    ``compile_backend``, ``cuda_graph``, ``device``, ``layout`` (None: one process), ``offload`` and
    ``checkpoint_activations`` change how a run computes, not what. ``seed=None``: a key from the system. ``values``:
    the first parameters; ``before``: what was promised about the data that these were trained on.
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
    optimizer: Optimizer | KfacOptimizer
    seed: int | None
    dtype: torch.dtype
    microbatch_size: int
    memory_budget: float | None
    compile: Compile
    device: torch.device
    layout: Layout | None = None
    offload: Offload = NO_OFFLOAD
    checkpoint_activations: bool = False
    cuda_graph: bool = False
    compile_backend: str = "inductor"
    values: Callable[[Model, Sharding | None, Key], Tree] = drawn_params
    population: int | None = None
    before: tuple[Guarantee, ...] = ()


class Run(NamedTuple):
    """A run that passed every check: what does not change from step to step.

    ``key`` is what samples and noise are drawn by: ``root`` with the settings folded in. ``epsilons`` is what has been
    spent after 1, 2, ... steps; None where the run is not private. ``in_place``: a step writes the next state into the
    last one, so that a step cut short leaves neither. ``feed`` is what the curvature of K-FAC is measured on; None: the
    data itself.
    """

    config: RunConfig
    mechanism: Mechanism
    stages: Stages
    step: Step
    root: Key
    key: Key
    epsilons: Sequence[float] | None
    sharding: Sharding | None
    data_digest: str
    in_place: bool
    kfac: Kfac | None = None
    feed: Feed | None = None


def prepare(config: RunConfig, *, root: Key | None = None, settings: str | None = None) -> tuple[Run, TrainState]:
    """The run and its first state. ``root`` is the key of a run that is taken up again; default: from the seed.

    ``settings`` go into the key of samples and noise: by default all that decides the result.

    Guarantees:
      - nothing is written and no noise is drawn;
      - settings, data, parameters or a model that could not be trained privately are errors here, not later.
    """
    _check(config)
    mechanism = _mechanism(config)
    _check_example(config.model, _examples(config, config.microbatch_size))
    model, sharding = _laid_out(config)
    digest = data_digest(config.dataset)
    if sharding is not None:
        check_agreement(
            {
                "number of samples": len(config.dataset),
                "content of the data": digest,
                "noise multiplier": mechanism.noise_multiplier,
                "population": mechanism.sampling.population,
                "statistics": mechanism.statistics and mechanism.statistics.public(),
                "batch size": config.batch_size,
                "microbatch": config.microbatch_size,
                "steps": config.steps,
            }
        )
    root = _shared(keys.key(config.seed) if root is None else root, sharding)
    key = keys.fold_in(root, "init").to("cpu" if config.offload.params else config.device)
    params = config.values(model, sharding, key)
    share = -(-config.microbatch_size // (1 if sharding is None else sharding.ranks))
    execution = make_execution(
        sharding=sharding,
        offload=config.offload,
        checkpoint_activations=config.checkpoint_activations,
        compile=config.compile,
        cuda_graph=config.cuda_graph,
        backend=config.compile_backend,
    )
    curvature = _kfac(config, model, execution, share)
    optimizer = config.optimizer if curvature is None else curvature.optimizer
    assert isinstance(optimizer, Optimizer)
    state = init_state(model, params, optimizer, mechanism, execution=execution, device=config.device)
    state = state if curvature is None else curvature.place(state)
    feed = None if curvature is None else _feed(config, curvature, state, root)
    plan = _plan(config, model, sharding, share, config.method, config.memory_budget, config.dtype)
    check_model(model, state.params, _examples(config, REAL_SAMPLES), plan=plan, execution=execution)
    # State on the CPU is pinned there, and stays so only if it is written in place; kernels write in place.
    in_place = any(config.offload) or config.compile is Compile.BLOCK or config.cuda_graph
    stages = make_stages(
        model,
        optimizer,
        mechanism=mechanism,
        plan=plan,
        execution=execution,
        donate=("state",) if in_place else (),
        precondition=None if feed is None else sides_of,
        settings=settings,
    )
    epsilons = None
    if mechanism.noise_multiplier > 0:
        counts = range(1, config.steps + 1)
        epsilons = accounting.epsilon_curve(mechanism, steps=counts, delta=config.delta)
        if epsilons[-1] == float("inf"):
            raise FdpError(
                f"noise multiplier: expected enough noise for an epsilon that is a number, got "
                f"{mechanism.noise_multiplier}; raise it, or give 0 for a run that is not private"
            )
    if settings is None:
        public = feed.digest if isinstance(feed, Public) else None
        settings = fingerprint(model.identity, config.optimizer, mechanism, config.values, digest, public)
    key = keys.fold_in(root, f"run {settings}").cpu()
    return Run(
        config, mechanism, stages, join(stages), root, key, epsilons, sharding, digest, in_place, curvature, feed
    ), state


def steps(
    run: Run, state: TrainState, *, stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Every step of the run that ``state`` has not made yet: the state after it and what it saw.

    If the run works in place, the next state is written into the last one: keep a copy of what you want to keep. After
    a step for which ``stop()`` is true on any rank, all ranks end.

    Guarantees:
      - the same seed gives the same states, also when taken up again from one of them;
      - all ranks make the same number of steps;
      - parameters that stop being finite end the run at that step, on every rank, with an error that names the leaf.
    """
    config = run.config
    if config.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(config.device)
    key = run.key.to(config.device)
    for t in range(int(state.step), config.steps):
        start = time.perf_counter()
        batch = draw_batch(run, t)
        state = refreshed(run, state, batch, t)
        bound = _bound(run, state)
        state, metrics = run.step(state, batch, key)
        stopped = _settled(run, state.params, step=t + 1, stop=stop())
        seconds = time.perf_counter() - start
        yield state, make_step_record(run, t, metrics, state=state, bound=bound, seconds=seconds)
        if stopped:
            return


def draw_batch(run: Run, t: int, sampling: Poisson | None = None, purpose: str = TRAINING) -> Batch:
    """This rank's samples of step ``t`` (from 0), on the device; by default those that the step trains on."""
    config, by = run.config, run.mechanism.sampling if sampling is None else sampling
    share = {} if run.sharding is None else {"rank": run.sharding.rank, "ranks": run.sharding.ranks}
    options = {"step": t, "microbatch_size": config.microbatch_size, "purpose": purpose, **share}
    return _move(sample_batch(config.dataset, by, run.key, **options), config.device)


def refreshed(run: Run, state: TrainState, batch: Batch, t: int) -> TrainState:
    """The state with the curvature that step ``t`` is due.

    Without privacy it is of the step's first microbatch; else ``batch`` is not looked at, and keys are this step's own.
    """
    if run.kfac is None:
        return state
    key = run.key.to(run.config.device)
    if run.feed is None:
        data = tree.map(lambda leaf: leaf[0], batch.data)
        return run.kfac.refresh(state, data, batch.mask[0], key, t, donate=run.in_place)
    draw, mechanism = partial(draw_batch, run, t), run.mechanism
    return refresh_from_feed(run.feed, run.kfac, state, draw, key, t, mechanism=mechanism, donate=run.in_place)


def _kfac(config: RunConfig, model: Model, execution: Execution, share: int) -> Kfac | None:
    if not isinstance(config.optimizer, KfacOptimizer):
        return None
    return make_kfac(model, _examples(config, share), config.optimizer, execution=execution, dtype=config.dtype)


def _feed(config: RunConfig, k: Kfac, state: TrainState, root: Key) -> Feed | None:
    assert isinstance(config.optimizer, KfacOptimizer)
    there = {"private": config.dataset, "digest": data_digest, "key": keys.fold_in(root, "kfac").to(config.device)}
    return make_feed(k, config.optimizer, localize(state.params), **there)


def _laid_out(config: RunConfig) -> tuple[Model, Sharding | None]:
    if config.layout is None:
        return config.model, None
    axes, zero, data, reduce, reduce_dtype, timeout = config.layout
    mesh = make_mesh(axes, device_type=config.device.type, timeout=timeout)
    model = over_tensor_axis(config.model, mesh)
    return model, make_sharding(model, mesh, zero=zero, data=data, reduce=reduce, reduce_dtype=reduce_dtype)


def _shared(key: Key, sharding: Sharding | None) -> Key:
    """The first rank's key: without a seed every rank would draw its own."""
    return key if sharding is None else shared_key(key, sharding)


def _plan(
    config: RunConfig,
    model: Model,
    sharding: Sharding | None,
    samples: int,
    method: Method,
    memory_budget: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Plan:
    params = abstract_params(model, sharding, device=config.device)
    example = _examples(config, samples)
    plan = make_plan(model, params, example, method=method, memory_budget=memory_budget, dtype=dtype)
    if sharding is not None or not timing.is_worth_timing(config.device, dtype) or method not in TIMED_METHODS:
        return plan  # ranks must not choose by times of their own
    uses = [use for block in plan.uses for use in block]
    times = timing.measure(uses, dtype=dtype, device=config.device, store=timing.default_store())
    return make_plan(model, params, example, method=method, memory_budget=memory_budget, dtype=dtype, timings=times)


def _examples(config: RunConfig, count: int) -> Tree:
    """The first samples on the device, for their shapes and for checks."""
    return _move(config.dataset.fetch(np.arange(count) % len(config.dataset)), config.device)


def _mechanism(config: RunConfig) -> Mechanism:
    expected, population = config.batch_size, config.population
    sampling = poisson(len(config.dataset), expected_batch_size=expected, population=population)
    z, budget = config.noise_multiplier, {"epsilon": config.epsilon, "delta": config.delta, "steps": config.steps}
    more = make_statistics(config.optimizer, sampling, noise_multiplier=z, **budget)
    if config.epsilon is not None:
        z = accounting.noise_multiplier_for(sampling, config.clip, **budget, statistics=more)
    return Mechanism(sampling, config.clip, z, more) if z else without_noise(sampling, config.clip, statistics=more)


def _bound(run: Run, state: TrainState) -> float | None:
    """C of the coming step: the sensitivity that the style states, whatever the norms."""
    if run.config.method is Method.NONE:
        return None
    zero = torch.zeros(1, dtype=torch.float64, device=run.config.device)  # as norms are: any C fits
    zeros = dict.fromkeys(sorted(run.config.model.trainable), zero)
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
    if isinstance(config.optimizer, KfacOptimizer):
        check_source(config.optimizer, private=config.method is not Method.NONE)
    if config.layout is None and launch.world_size() > 1:
        raise FdpError(
            f"mesh: expected the axes of a mesh for {launch.world_size()} processes, such as "
            f"shard={launch.world_size()}, got none; each would train, and spend, on its own"
        )


def _check_example(model: Model, example: Tree) -> None:
    tokens = example.get("tokens") if isinstance(example, dict) else None
    if tokens is not None and model.context is not None and tokens.shape[-1] - 1 > model.context:
        raise FdpError(
            f"data: expected sequences of at most the {model.context} tokens of {model.name}'s context, "
            f"got {tokens.shape[-1] - 1}; cut the data into shorter windows"
        )
    for path, leaf in tree.flatten(example).items():
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise FdpError(f"data {path}: holds NaN or infinity; repair or drop those samples")


def _settled(run: Run, params: Tree, *, step: int, stop: bool) -> bool:
    """Whether any rank wishes to stop; raises on all of them if a parameter of any is not finite."""
    flat = tree.flatten(localize(params))
    bad = [(~torch.isfinite(leaf.detach())).any().to(run.config.device) for leaf in flat.values()]
    told = torch.stack([*bad, torch.tensor(stop, device=run.config.device)]).long()
    if run.sharding is not None:
        told = collectives.wait(collectives.all_reduce(told, run.sharding.world))
    *counts, wishes = told.tolist()
    if odd := [path for path, count in zip(flat, counts) if count]:
        raise FdpError(f"step {step}: {odd[0]} became NaN or infinite; lower the learning rate or the noise")
    return wishes > 0


def _move(data: Tree, device: torch.device) -> Tree:
    return tree.map(lambda leaf: leaf.to(device), data)
