"""The preparation of a run: every check, the values that stay the same from step to step, and the first state.

    root = key(seed)                                   initial parameters: fold_in(root, "init")
    key  = fold_in(root, settings)                     samples and noise of every step: fdp.keys.step_key(key, ..., t)

Everything is a function of (seed, settings, t). The settings are everything that decides what is computed, including
the data and what is rounded on purpose, and nothing that decides how. Two runs of one seed with different clip norms,
learning rates or datasets share neither samples nor noise: the difference of their sums would reveal the data. Nothing
is written to disk here.

    >>> run, state = prepare(config)                   # every check, before any noise is drawn
    >>> run.key, run.mechanism, run.epsilons           # what fdp.run.training_run.steps makes its steps with
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from fdp import keys
from fdp.attention import fast_attention
from fdp.checks.first_call import REAL_SAMPLES, check_model
from fdp.data.digest import data_digest
from fdp.data.read_counts import read_counts_of
from fdp.data.repeated import digest_and_repeats
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fingerprint import fingerprint
from fdp.foreign.uses.dropout import DROPOUT_KEYS
from fdp.gradients.execution import Execution
from fdp.gradients.plan import Plan
from fdp.kfac.optimizer import Kfac
from fdp.kfac.private.curvature_sources import Feed, KfacOptimizer, make_feed, make_kfac, make_statistics
from fdp.kfac.private.public_data import Public
from fdp.kfac.private.refresh import sides_of
from fdp.model import Model
from fdp.optimizers import Optimizer
from fdp.parallel.dtensors import localize
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharded_init import shared_key
from fdp.parallel.sharding import Sharding, make_sharding, over_tensor_axis
from fdp.privacy import accounting
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.releases import composed_event
from fdp.privacy.sampling import poisson
from fdp.run.equal_sizes import usable_sizes
from fdp.run.rank_agreement import check_ranks_agree, check_ranks_draw_alike
from fdp.run.repeated_samples import warn_of_repeats
from fdp.run.run_config import RunConfig, check_config, check_example, round_only_under_noise
from fdp.run.run_plan import first_examples, local_sizes, make_run_plan, spread_examples
from fdp.run.smaller_microbatches import or_smaller
from fdp.stages import Stages, make_stages
from fdp.step import init_state, join
from fdp.types import FdpError, Key, Path, Step, TrainState


class EarlierNoise(NamedTuple):
    """The sums that a resumed run's noise was drawn for (:mod:`fdp.run.same_noise`); the defaults are of a new run.

    ``slack`` is covered by the noise, ``rounded`` are the leaves whose gradients are stored in 8 bits.
    """

    slack: float = 0.0
    rounded: tuple[Path, ...] | None = None


NEW_RUN = EarlierNoise()


class Run(NamedTuple):
    """A run that passed every check: the values that stay the same from step to step.

    Samples and noise are drawn from ``key``: ``root`` with the settings folded in. ``epsilons`` are spent after 1, 2,
    ... steps; None if the run is not private. If ``in_place``, a step writes the next state into the last one, and an
    interrupted step leaves neither. ``sizes`` are those of microbatches, largest first; ``plan`` says how the norms and
    the sum of every leaf are computed. ``feed`` provides the samples on which the curvature of K-FAC is measured; None:
    the training data.
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
    sizes: tuple[int, ...]
    plan: Plan
    kfac: Kfac | None = None
    feed: Feed | None = None


def prepare(
    config: RunConfig,
    *,
    root: Key | None = None,
    settings: str | None = None,
    earlier: EarlierNoise = NEW_RUN,
    say: Callable[[str], None] = lambda stage: None,
) -> tuple[Run, TrainState]:
    """Return the run and its first state. ``root`` is the key of a run that is resumed; default: from the seed.

    ``settings`` are folded into the key of samples and noise; default: a fingerprint of all that decides the result.
    ``earlier`` is the noise of a run that is resumed. ``say(stage)`` is told what is done, in words.

    Guarantees:
      - nothing is written and no noise is drawn;
      - settings, data, parameters or a model that could not be trained privately are errors here, not later.
    """
    check_config(config)
    say("computing the noise for the budget")
    mechanism, config = _make_mechanism(config)
    check_example(config.model, first_examples(config, config.microbatch_size))
    model, sharding = _shard_model(config)
    say("computing the digest of the data")
    check_ranks_agree(config, mechanism, digest := _read_data(config, mechanism), sharding)
    root = _share_key(keys.key(config.seed) if root is None else root, sharding)
    key = keys.fold_in(root, "init").to("cpu" if config.offload.params else config.device)
    say("drawing or reading the first parameters")
    params = config.values(model, sharding, key)
    execution = _make_execution(config, sharding)
    kfac, in_place = _make_kfac(config, model, execution), _works_in_place(config)
    optimizer = config.optimizer if kfac is None else kfac.optimizer
    assert isinstance(optimizer, Optimizer)
    state = init_state(model, params, optimizer, mechanism, execution=execution, device=config.device)
    with in_one_order(config):
        state, feed = (state, None) if kfac is None else _place_and_feed(config, kfac, state, root)
    say("choosing how the norm of every leaf is computed")
    plan, config = make_run_plan(config, model, sharding, rounded=earlier.rounded)
    say(f"checking that the loss of a sample depends on that sample alone (about 50 forward passes of {model.name})")
    check_model(model, state.params, spread_examples(config, REAL_SAMPLES), plan=plan, execution=execution)
    stages = make_stages(
        model,
        optimizer,
        mechanism=mechanism,
        plan=plan,
        execution=execution,
        donate=("state",) if in_place else (),
        precondition=None if feed is None else sides_of,
        settings=settings,
        least_slack=earlier.slack,
    )
    sizes = usable_sizes(config, stages, state, say=say)
    if settings is None:
        public = feed.digest if isinstance(feed, Public) else None
        settings = fingerprint(model.identity, config.optimizer, mechanism, config.values, digest, public)
        settings += stages.rounded + ("" if kfac is None else f", measured on {measured_samples(kfac, sharding)}")
    key = keys.fold_in(root, f"run {settings}").cpu()
    check_ranks_draw_alike(config, key, plan, sharding)
    step, epsilons = or_smaller(join(stages), sharding, sizes=sizes), _epsilon_curve(config, mechanism)
    run = Run(config, mechanism, stages, step, root, key, epsilons, sharding, digest, in_place, sizes, plan, kfac, feed)
    return run, state


def extra_noise(run: Run) -> float:
    """Return by what fraction the noise is larger than z C, to cover the rounding of sums: a public number."""
    return run.stages.slack(run.config.device)


def in_one_order(config: RunConfig) -> AbstractContextManager[None]:
    """Let a run that is to be repeatable compute in one order of additions what is not part of a step."""
    return fast_attention(config.device, repeatable=True) if config.repeatable else nullcontext()


def measured_samples(k: Kfac, sharding: Sharding | None) -> int:
    """Return the samples of all ranks in one microbatch of K-FAC, which decide its maps of gradients, so the sums."""
    return k.plan.survey.plan.batch_size * (1 if sharding is None else sharding.ranks)


def _works_in_place(config: RunConfig) -> bool:
    """Return True if a step writes into its state: kernels do. Offloaded state stays in pinned memory only then."""
    return any(config.offload) or config.compile is Compile.BLOCK or config.cuda_graph


def _make_execution(config: RunConfig, sharding: Sharding | None) -> Execution:
    return make_execution(
        sharding=sharding,
        offload=config.offload,
        checkpoint_activations=config.checkpoint_activations,
        compile=config.compile,
        cuda_graph=config.cuda_graph,
        repeatable=config.repeatable,
        backend=config.compile_backend,
        sum_dtype=config.sum_dtype,
        microbatch_size=config.microbatch_size,
    )


def _make_kfac(config: RunConfig, model: Model, execution: Execution) -> Kfac | None:
    if not isinstance(config.optimizer, KfacOptimizer):
        return None
    samples = local_sizes(config, execution.sharding)[0]
    return make_kfac(model, first_examples(config, samples), config.optimizer, execution=execution, dtype=config.dtype)


def _place_and_feed(config: RunConfig, k: Kfac, state: TrainState, root: Key) -> tuple[TrainState, Feed | None]:
    assert isinstance(config.optimizer, KfacOptimizer)
    state, key = k.place(state), keys.fold_in(root, "kfac").to(config.device)
    there = {"private": config.dataset, "digest": data_digest, "key": key}
    return state, make_feed(k, config.optimizer, localize(state.params), **there)


def _read_data(config: RunConfig, mechanism: Mechanism) -> str:
    """Return the digest of the data; if something is promised to the people in it, warn of samples that are copies."""
    digest, repeats = digest_and_repeats(config.dataset, own=(DROPOUT_KEYS,))
    if mechanism.noise_multiplier > 0:
        warn_of_repeats(repeats, len(config.dataset), reading=read_counts_of(config.dataset))
    return digest


def _shard_model(config: RunConfig) -> tuple[Model, Sharding | None]:
    if config.layout is None:
        return config.model, None
    axes, zero, data, reduce, reduce_dtype, timeout = config.layout
    mesh = make_mesh(axes, device_type=config.device.type, timeout=timeout)
    model = over_tensor_axis(config.model, mesh)
    return model, make_sharding(model, mesh, zero=zero, data=data, reduce=reduce, reduce_dtype=reduce_dtype)


def _share_key(key: Key, sharding: Sharding | None) -> Key:
    """Return the first rank's key: without a seed every rank draws its own."""
    return key if sharding is None else shared_key(key, sharding)


def _epsilon_curve(config: RunConfig, mechanism: Mechanism) -> Sequence[float] | None:
    """Return epsilon after every step; None if the run is not private."""
    if not mechanism.noise_multiplier > 0:
        return None
    epsilons = accounting.epsilon_curve(mechanism, steps=range(1, config.steps + 1), delta=config.delta)
    if epsilons[-1] == float("inf"):
        raise FdpError(
            f"noise multiplier: expected enough noise for a finite epsilon, got {mechanism.noise_multiplier}; raise "
            f"it, or give 0 for a run that is not private"
        )
    return epsilons


def _make_mechanism(config: RunConfig) -> tuple[Mechanism, RunConfig]:
    """Return the mechanism, and the configuration without gradients in 8 bits that its noise would not hide."""
    expected, population = config.batch_size, config.population
    sampling = poisson(len(config.dataset), expected_batch_size=expected, population=population)
    z, budget = config.noise_multiplier, {"epsilon": config.epsilon, "delta": config.delta, "steps": config.steps}
    more = make_statistics(config.optimizer, sampling, noise_multiplier=z, **budget)
    if config.epsilon is not None:
        spent = composed_event(config.spent) if config.spent else None
        z = accounting.noise_multiplier_for(sampling, config.clip, **budget, statistics=more, before=spent)
    config = round_only_under_noise(config, z or 0.0)
    made = Mechanism(sampling, config.clip, z, more) if z else without_noise(sampling, config.clip, statistics=more)
    return made, config
