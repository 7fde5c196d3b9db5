"""Turn the options of ``fdp train`` into a :class:`~fdp.run.run_config.RunConfig`.

Names become values here. Nothing further in knows the name of an option's value.

    >>> config = configure(build(TrainOptions, {"model": "mlp", "data": "digits"}))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from fdp_kernels.hopper import has_hopper

from fdp import optimizers
from fdp.cli.configure_evaluation import make_evaluation, split_data
from fdp.cli.configure_kfac import make_kfac_config, make_kfac_source
from fdp.cli.extend import extend_config
from fdp.cli.fast_defaults import AUTO, MICROBATCH, has_smaller_microbatches, resolve_fast_defaults
from fdp.cli.model_and_data import check_model_name, earlier_guarantees, load_dataset, load_model_and_data
from fdp.cli.names import by_value, choose, choose_dtype, parse_mesh, parse_offload
from fdp.cli.options import check_ranges
from fdp.cli.train_options import ComputeOptions, PrivacyOptions, RankOptions, TrainingOptions, TrainOptions
from fdp.fast.compile_modes import Compile
from fdp.gradients.plan import Method
from fdp.kfac.private.curvature_sources import KfacOptimizer
from fdp.optimizers.by_name import OPTIMIZERS
from fdp.parallel import launch
from fdp.parallel.sharding import Data, Reduce, Zero
from fdp.privacy import clipping
from fdp.privacy.guarantee import default_delta
from fdp.privacy.microbatches import Dataset
from fdp.privacy.sampling import rounded_population
from fdp.run.epochs import steps_of_epochs
from fdp.run.run_config import Layout, RunConfig
from fdp.types import FdpError

DEFAULT_EPSILON = 8.0
DEFAULT_LR = 8e-3
LEARNING_RATES = {"kfac": 0.1, "adagrad": 1e-2, "adadelta": 1.0}
"""Defaults of optimizers that would not train with ``DEFAULT_LR``: their steps are in units of the parameters."""
GIB = 2**30
MOMENTS = {"float32": lambda optimizer: optimizer, "bfloat16": optimizers.narrow_moments}
SUM_DTYPES = {"float64": torch.float64, "float32": torch.float32}
STORED_DTYPES = {"full": None, "int8": torch.int8}


def configure(options: TrainOptions) -> RunConfig:
    """Return the run that the options describe; raise an error that names the option if one is wrong."""
    options = resolve_fast_defaults(options)
    check_ranges(options)
    privacy, training, compute = options.privacy, options.training, options.compute
    _check_names(training)
    check_model_name(options.model.model)
    method = choose("--method", privacy.method, by_value(Method))
    clip = make_clip_style(privacy, batch_size=training.batch_size)
    if training.epochs is None:
        make_schedule(training)  # for its checks, before the data is read
    dtype = choose_dtype(compute.dtype)
    compile = choose("--compile", compute.compile, by_value(Compile))
    device, memory_budget = make_device(compute), _memory_budget_bytes(compute)
    epsilon = privacy.epsilon
    if method is Method.NONE:
        _refuse_a_budget(privacy)
    if epsilon is None and privacy.noise_multiplier is None and method is not Method.NONE:
        epsilon = DEFAULT_EPSILON
    (model, values), dataset = load_model_and_data(options)
    dataset, held_out, shared = split_data(options, dataset, model)
    population = rounded_population(len(dataset)) if privacy.population is None else privacy.population
    training = replace(training, steps=count_steps(training, population))
    options, rate = replace(options, training=training), make_schedule(training)
    delta = default_delta(population) if privacy.delta is None else privacy.delta
    stored_dtype, by_default = _stored_dtype(options, dtype, device)
    config = RunConfig(
        model=model,
        dataset=dataset,
        method=method,
        clip=clip,
        noise_multiplier=privacy.noise_multiplier,
        epsilon=epsilon,
        delta=delta,
        population=privacy.population,
        before=earlier_guarantees(options.model),
        batch_size=training.batch_size,
        steps=training.steps,
        optimizer=make_optimizer(options, rate, lambda source: load_dataset(options, model, source=source)),
        seed=training.seed,
        dtype=dtype,
        sum_dtype=choose("--sum-dtype", compute.sum_dtype, SUM_DTYPES),
        stored_dtype=stored_dtype,
        stored_by_default=by_default,
        microbatch_size=compute.microbatch or MICROBATCH,
        smaller_microbatches=has_smaller_microbatches(device, compile, kfac=training.optimizer == "kfac"),
        memory_budget=memory_budget,
        compile=compile,
        cuda_graph=compute.cuda_graph,
        repeatable=compute.repeatable,
        device=device,
        layout=make_layout(options.ranks),
        offload=parse_offload(options.ranks.offload),
        checkpoint_activations=options.ranks.checkpoint_activations,
        values=values,
        ema=options.evaluation.ema,
        evaluation=make_evaluation(options, held_out, population=population, delta=delta, shared=shared),
    )
    return extend_config(options, config)


def _refuse_a_budget(privacy: PrivacyOptions) -> None:
    if privacy.epsilon is not None or privacy.noise_multiplier:
        flag = "--noise-multiplier" if privacy.epsilon is None else "--epsilon"
        raise FdpError(
            f"--method none: expected no {flag} with it, since it trains without privacy; leave {flag} out, or leave "
            "--method out to train privately"
        )


def check_batch_size(config: RunConfig) -> None:
    """Refuse a batch larger than the data, at a sampling rate above 1, and name one that fits."""
    size, population = config.batch_size, config.population or rounded_population(len(config.dataset))
    if size <= population:
        return
    rounded = ", which is the number of samples rounded up" if config.population is None else ""
    default = ", the default" if size == TrainingOptions.batch_size else ""
    more = "" if config.population is None else ", or check that --population counts samples, not batches"
    raise FdpError(
        f"--batch-size: expected at most the population {population}{rounded}, got {size}{default}. Lower it, for "
        f"example to --batch-size {max(1, population // 4)}, a quarter of the population{more}"
    )


def make_clip_style(privacy: PrivacyOptions, *, batch_size: int) -> clipping.ClipStyle:
    """Return the clipping that ``--clip`` names, with C = ``--max-norm``."""
    c = privacy.max_norm
    known = {
        "flat": lambda: clipping.flat(max_norm=c),
        "per-layer": lambda: clipping.per_layer(max_norm=c),
        "automatic": lambda: clipping.automatic(max_norm=c),
        # as in Andrew et al. 2021: the median, a rate of 0.2, count noise of a twentieth of the batch
        "quantile": lambda: clipping.quantile(
            max_norm=c, target_quantile=0.5, learning_rate=0.2, count_noise=batch_size / clipping.COUNT_NOISE_SHARE
        ),
    }
    if privacy.clip.replace(".", "", 1).isdigit():
        raise FdpError(
            f"--clip: expected one of {', '.join(known)}, got a number; the bound itself is --max-norm {privacy.clip}"
        )
    return choose("--clip", privacy.clip, known)()


def learning_rate(training: TrainingOptions) -> float:
    """Return ``--lr``, or the default of the optimizer."""
    return LEARNING_RATES.get(training.optimizer, DEFAULT_LR) if training.lr is None else training.lr


def count_steps(training: TrainingOptions, population: int) -> int:
    """Return ``--steps``, or the steps of ``--epochs`` over the public population."""
    if training.epochs is None:
        return training.steps
    return steps_of_epochs(training.epochs, population=population, batch_size=training.batch_size)


def make_schedule(training: TrainingOptions) -> optimizers.Schedule:
    """Return the learning rate as a function of the step, after a linear warm-up."""
    lr, warmup = learning_rate(training), _warmup_steps(training)
    if not 0 <= warmup < training.steps:
        raise FdpError(f"--warmup: expected fewer than the {training.steps} steps of the run, got {warmup}")
    make = choose(
        "--schedule",
        training.schedule,
        {
            "constant": lambda: optimizers.constant(lr),
            "cosine": lambda: optimizers.cosine(lr, steps=training.steps - warmup),
            "linear": lambda: optimizers.linear(lr, 0.0, steps=training.steps - warmup),
        },
    )
    return make() if warmup == 0 else optimizers.warmup(make(), steps=warmup)


def make_optimizer(
    options: TrainOptions, rate: optimizers.Schedule, load: Callable[[str], Dataset]
) -> optimizers.Optimizer | KfacOptimizer:
    """Return the optimizer that ``--optimizer`` names; ``load`` reads the public data of ``--kfac-data``."""
    training, limit = options.training, options.training.clip_value
    if training.optimizer == "kfac":
        if options.kfac.data == "noised" and options.kfac.noise is None and options.privacy.noise_multiplier == 0:
            raise FdpError("--noise-multiplier: expected a finite number above 0 with --kfac-data noised, got 0")
        config = make_kfac_config(options.kfac, weight_decay=training.weight_decay)
        return KfacOptimizer(rate, config, make_kfac_source(options.kfac, load))
    if options.kfac.data is not None:
        raise FdpError(f"--kfac-data: expected --optimizer kfac to go with it, got {training.optimizer}")
    optimizer = OPTIMIZERS[training.optimizer](rate, weight_decay=training.weight_decay)
    optimizer = choose("--moments", training.moments, MOMENTS)(optimizer)
    return optimizer if limit is None else optimizers.chain(optimizers.clip_by_value(limit), optimizer)


def make_device(compute: ComputeOptions) -> torch.device:
    """Return the device that ``--device`` names; raise if it is not there, or cannot record a CUDA graph."""
    has_cuda = torch.cuda.is_available()
    name = choose("--device", compute.device, {"auto": "cuda" if has_cuda else "cpu", "cpu": "cpu", "cuda": "cuda"})
    if name == "cuda" and not has_cuda:
        raise FdpError("--device: expected a CUDA device, found none; use --device cpu")
    if compute.cuda_graph and name != "cuda":
        raise FdpError("--cuda-graph: expected a CUDA device to record on, got --device cpu; leave it out")
    return torch.device(name)


def make_layout(ranks: RankOptions) -> Layout | None:
    """Return how a run of several processes is sharded; None for one process."""
    zero = choose("--zero", str(ranks.zero), by_value(Zero))
    reduce = choose(
        "--reduce", ranks.reduce, {"auto": None, "step": Reduce.PER_STEP, "microbatch": Reduce.PER_MICROBATCH}
    )
    dtypes = {"auto": None, "float32": torch.float32, "float64": torch.float64}
    reduce_dtype = choose("--reduce-dtype", ranks.reduce_dtype, dtypes)
    data = Data.REPLICATED if ranks.replicate_data else Data.SPLIT
    axes = None if ranks.mesh is None else parse_mesh(ranks.mesh)
    count = launch.world_size()
    if axes is None:
        if count > 1:
            raise FdpError(f"--mesh: expected the axes for {count} processes, such as shard={count}, got none")
        return None
    if math.prod(axes.values()) != count:
        wanted = math.prod(axes.values())
        start = "" if launch.started_by_torchrun() else f"; add --nproc {wanted} to start {wanted} on this machine"
        raise FdpError(f"--mesh: expected sizes that multiply to the {count} processes, got {ranks.mesh}{start}")
    return Layout(axes, zero, data, reduce, reduce_dtype, ranks.timeout) if launch.started_by_torchrun() else None


def _check_names(training: TrainingOptions) -> None:
    choose("--optimizer", training.optimizer, dict.fromkeys((*OPTIMIZERS, "kfac")))
    if training.clip_value is not None and training.optimizer == "kfac":
        raise FdpError("--clip-value: expected another --optimizer than kfac, whose updates --kfac-kl-clip bounds")


def _warmup_steps(training: TrainingOptions) -> int:
    return training.steps // 10 if training.warmup is None else training.warmup


def _stored_dtype(options: TrainOptions, dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype | None, bool]:
    """Return the dtype of ``--stored-dtype``, and whether it is a default; refuse 8 bits where no kernel stores them.

    A run with a fixed seed is to be repeated, and which leaves are rounded follows from measured times: such a run
    rounds only if it is asked to.
    """
    by_default = options.compute.stored_dtype == AUTO
    can_round = dtype == torch.bfloat16 and has_hopper(device) and options.ranks.mesh is None
    is_of_use = options.privacy.method == Method.AUTO.value and options.training.seed is None
    default = torch.int8 if can_round and is_of_use else None
    stored = choose("--stored-dtype", options.compute.stored_dtype, {AUTO: default, **STORED_DTYPES})
    if stored is not None and not can_round:
        raise FdpError(
            "--stored-dtype int8: expected one process with --dtype bfloat16 on a Hopper GPU (H100, H200), whose "
            "kernels store gradients in 8 bits; leave it out"
        )
    return stored, by_default


def _memory_budget_bytes(compute: ComputeOptions) -> float | None:
    return None if compute.memory_budget is None else compute.memory_budget * GIB
