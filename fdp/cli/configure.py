"""The door of ``fdp train``: names and numbers of the command line to the values of a run.

An unknown name is an error that suggests the nearest and lists all. Nothing further in knows a name.

    >>> config = configure(settings)                   # settings: the options of the command, by name
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from fdp import models, optimizers
from fdp.cli.model_and_data import dataset_of, is_folder, promised_before, subject_and_data
from fdp.gradients.plan import Method
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.invert.inverse import Via
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.measure.sums import Sharing
from fdp.kfac.policy import policy_named
from fdp.kfac.private.sources import Noised, Open, Source, Synthetic
from fdp.parallel import launch
from fdp.parallel.mesh import AXES
from fdp.parallel.offload import Offload
from fdp.parallel.sharding import Data, Reduce, Zero
from fdp.privacy import clipping
from fdp.privacy.guarantee import default_delta
from fdp.privacy.microbatches import Dataset
from fdp.privacy.sampling import rounded_population
from fdp.run.training_run import KfacOptimizer, Layout, RunConfig
from fdp.step import Compile
from fdp.types import FdpError

T = TypeVar("T")
DEFAULT_EPSILON = 8.0
DEFAULT_LR = 4e-3
LEARNING_RATES = {"kfac": 0.1, "adagrad": 1e-2, "adadelta": 1.0}
"""Where the default would not train: a step of Adadelta or by a natural gradient is in units of the parameters."""
OPTIMIZERS: dict[str, Callable[..., optimizers.Optimizer]] = {
    "adamw": optimizers.adamw,
    # as in torch.optim, Adam's decay is L2 regularisation: before the moments
    "adam": lambda rate, *, weight_decay=0.0: optimizers.chain(
        optimizers.add_decayed_weights(weight_decay), optimizers.adam(rate)
    ),
    "sgd": optimizers.sgd,
    "lamb": optimizers.lamb,
    "adafactor": optimizers.adafactor,
    "adagrad": optimizers.adagrad,
    "adadelta": optimizers.adadelta,
    "adamax": optimizers.adamax,
}
"""By name, of a learning rate and a weight decay."""
KFAC_OPTIONS = {
    "damping": "--kfac-damping",
    "kl_clip": "--kfac-kl-clip",
    "momentum": "--kfac-momentum",
    "max_condition": "--kfac-max-condition",
    "weight_decay": "--weight-decay",
    "rho": "--kfac-rho",
    "cap": "--kfac-cap",
}
"""What the settings of K-FAC are called on the command line."""


def choose(option: str, name: str, known: Mapping[str, T]) -> T:
    """``known[name]``, or an error that says what could have been meant."""
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise FdpError(f"--{option}: expected one of {', '.join(known)}; got {name!r}.{hint}")


def mesh_axes(text: str) -> dict[str, int]:
    """``shard=4,tensor=2`` as sizes by axis."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not size.isdigit() or name in axes:
            raise FdpError(f"--mesh: expected axes with sizes, such as shard=4 or replicate=2,shard=4, got {text!r}")
        choose("mesh", name, dict.fromkeys(AXES))
        axes[name] = int(size)
    return axes


def offloaded(text: str) -> Offload:
    """``params,optimizer`` as what is kept on the CPU; ``none`` and ``all`` stand alone."""
    if text in ("none", "all"):
        return Offload(*[text == "all"] * 3)
    parts = {part.strip(): True for part in text.split(",")}
    for part in parts:
        choose("offload", part, dict.fromkeys(("none", "all", *Offload._fields)))
    if {"none", "all"} & set(parts):
        raise FdpError(
            f"--offload: expected none or all alone, or a list of {', '.join(Offload._fields)}, got {text!r}"
        )
    return Offload(**parts)


def laid_out(settings: Mapping[str, Any]) -> Layout | None:
    """Where a run of several processes puts what; None for one process."""
    zero = choose("zero", str(settings["zero"]), {str(stage.value): stage for stage in Zero})
    reduce = choose(
        "reduce", settings["reduce"], {"auto": None, "step": Reduce.PER_STEP, "microbatch": Reduce.PER_MICROBATCH}
    )
    dtypes = {"auto": None, "float32": torch.float32, "float64": torch.float64}
    reduce_dtype = choose("reduce-dtype", settings["reduce_dtype"], dtypes)
    spread = Data.REPLICATED if settings["replicate_data"] else Data.SPLIT
    axes = None if settings["mesh"] is None else mesh_axes(settings["mesh"])
    ranks = launch.world_size()
    if axes is None:
        if ranks > 1:
            raise FdpError(f"--mesh: expected the axes for {ranks} processes, such as shard={ranks}, got none")
        return None
    if math.prod(axes.values()) != ranks:
        start = (
            ""
            if launch.started_by_torchrun()
            else f"; start them with torchrun --nproc-per-node {math.prod(axes.values())}"
        )
        raise FdpError(f"--mesh: expected sizes that multiply to the {ranks} processes, got {settings['mesh']}{start}")
    return (
        Layout(axes, zero, spread, reduce, reduce_dtype, settings["timeout"]) if launch.started_by_torchrun() else None
    )


def learning_rate(settings: Mapping[str, Any]) -> float:
    """The one that was asked for, or the optimizer's own."""
    return LEARNING_RATES.get(settings["optimizer"], DEFAULT_LR) if settings["lr"] is None else settings["lr"]


def optimizer_of(settings: Mapping[str, Any], rate: optimizers.Schedule) -> optimizers.Optimizer:
    """The optimizer, other than K-FAC, that was asked for; after a clip by value, if there is one."""
    found = OPTIMIZERS[settings["optimizer"]](rate, weight_decay=settings["weight_decay"])
    limit = settings["clip_value"]
    if limit is None:
        return found
    if not 0 < limit < math.inf:
        raise FdpError(f"--clip-value: expected a positive number, got {limit}")
    return optimizers.chain(optimizers.clip_by_value(limit), found)


def kfac_config(settings: Mapping[str, Any]) -> KfacConfig:
    """The settings of K-FAC; what has no option is by default. Errors speak of options."""
    try:
        return _kfac_config(settings)
    except FdpError as error:
        name, colon, rest = str(error).partition(":")
        raise FdpError(f"{KFAC_OPTIONS[name]}{colon}{rest}") if name in KFAC_OPTIONS else error from None


def _kfac_config(settings: Mapping[str, Any]) -> KfacConfig:

    def chosen_by(option: str, known: Mapping[str, T]) -> T:
        return choose(option, settings[option.replace("-", "_")], known)

    policy = chosen_by("kfac-policy", {name: name for name in ("auto", "all")})
    if settings["kfac_period"] < 1:
        raise FdpError(f"--kfac-period: expected at least 1 step, got {settings['kfac_period']}; 10 is a common choice")
    kl_clip, most = settings["kfac_kl_clip"], settings["kfac_max_condition"]
    fisher = chosen_by("kfac-fisher", {fisher.value: fisher for fisher in Fisher})
    sharing = chosen_by("kfac-sharing", {one.value: one for one in Sharing})
    distribution = chosen_by("kfac-distribution", {one.value: one for one in Distribution})
    if distribution is Distribution.RING and settings["kfac_data"] is not None:
        raise FdpError(
            "--kfac-distribution: expected gather or owner with --kfac-data: a private run takes the roots of "
            "inverses, by eigenvalues, which no rank has in a ring; got ring"
        )
    if distribution is Distribution.RING and most is not None:
        raise FdpError(
            "--kfac-distribution: expected gather or owner with --kfac-max-condition, which takes eigenvalues, and no "
            "rank has them in a ring; got ring. Leave --kfac-max-condition out, or raise --kfac-damping instead"
        )
    if settings["kfac_data"] == "noised" and sharing is not Sharing.EXPAND:
        raise FdpError(
            f"--kfac-sharing: expected expand with --kfac-data noised, a row for every token of a sample, got "
            f"{sharing.value}"
        )
    if settings["kfac_data"] == "noised" and fisher is Fisher.EXACT:
        raise FdpError("--kfac-fisher: expected sampled or empirical with --kfac-data noised, got exact")
    return KfacConfig(
        damping=settings["kfac_damping"],
        kl_clip=None if kl_clip == 0 else kl_clip,
        momentum=settings["kfac_momentum"],
        factor_period=settings["kfac_period"],
        inverse_period=settings["kfac_period"],
        policy=policy_named(policy, rho=settings["kfac_rho"], cap=settings["kfac_cap"]),
        fisher=fisher,
        sharing=sharing,
        distribution=distribution,
        via=Via.CHOLESKY if most is None else Via.EIGEN,
        max_condition=most,
        cap=settings["kfac_cap"],
        weight_decay=settings["weight_decay"],
    )


def kfac_source(settings: Mapping[str, Any], load: Callable[[str], Dataset]) -> Source | None:
    """What the curvature of a private run is measured on; None: nothing was asked for."""
    name, noise = settings["kfac_data"], settings["kfac_noise"]
    if noise is not None and name != "noised":
        raise FdpError(f"--kfac-noise: expected --kfac-data noised to go with it, got {name or 'none'}")
    if name == "noised":
        return Noised(settings["kfac_max_norm"], noise)
    return None if name is None else Synthetic() if name == "synthetic" else Open(load(name))


def configure(settings: Mapping[str, Any]) -> RunConfig:
    """The run that was asked for."""

    def chosen_by(option: str, known: Mapping[str, T]) -> T:
        return choose(option, settings[option], known)

    max_norm, batch_size, steps = settings["max_norm"], settings["batch_size"], settings["steps"]
    lr = learning_rate(settings)
    warmup = steps // 10 if settings["warmup"] is None else settings["warmup"]
    if not is_folder(settings["model"]):
        chosen_by("model", {name: name for name in models.PRESETS})
    method = chosen_by("method", {method.value: method for method in Method})
    clip = chosen_by(
        "clip",
        {
            "flat": lambda: clipping.flat(max_norm=max_norm),
            "per-layer": lambda: clipping.per_layer(max_norm=max_norm),
            "automatic": lambda: clipping.automatic(max_norm=max_norm),
            # as in Andrew et al. 2021: the median, a rate of 0.2, count noise of a twentieth of the batch
            "quantile": lambda: clipping.quantile(
                max_norm=max_norm, target_quantile=0.5, learning_rate=0.2, count_noise=batch_size / 20
            ),
        },
    )
    schedule = chosen_by(
        "schedule",
        {
            "constant": lambda: optimizers.constant(lr),
            "cosine": lambda: optimizers.cosine(lr, steps=steps - warmup),
        },
    )
    chosen_by("optimizer", dict.fromkeys((*OPTIMIZERS, "kfac")))
    if settings["clip_value"] is not None and settings["optimizer"] == "kfac":
        raise FdpError("--clip-value: expected another --optimizer than kfac, whose updates --kfac-kl-clip bounds")
    dtype = chosen_by("dtype", {"float32": torch.float32, "bfloat16": torch.bfloat16})
    compile = chosen_by("compile", {choice.value: choice for choice in Compile})
    has_cuda = torch.cuda.is_available()
    device = chosen_by("device", {"auto": "cuda" if has_cuda else "cpu", "cpu": "cpu", "cuda": "cuda"})

    if device == "cuda" and not has_cuda:
        raise FdpError("--device: expected a CUDA device, found none; use --device cpu")
    if settings["cuda_graph"] and device != "cuda":
        raise FdpError("--cuda-graph: expected a CUDA device to record on, got --device cpu; leave it out")
    if batch_size < 1 or steps < 1:
        raise FdpError(f"expected --batch-size and --steps of at least 1, got {batch_size} and {steps}")
    if not 0 <= warmup < steps:
        raise FdpError(f"--warmup: expected fewer than the {steps} steps of the run, got {warmup}")
    epsilon, budget = settings["epsilon"], settings["memory_budget"]
    if epsilon is None and settings["noise_multiplier"] is None and method is not Method.NONE:
        epsilon = DEFAULT_EPSILON
    if budget is not None and not 0 < budget < math.inf:
        raise FdpError(f"--memory-budget: expected a positive number of GiB, got {budget}")
    rate = schedule() if warmup == 0 else optimizers.warmup(schedule(), steps=warmup)
    (model, values), dataset = subject_and_data(settings)

    def loaded(source: str) -> Dataset:
        return dataset_of(settings, model, source=source)

    if settings["kfac_data"] is not None and settings["optimizer"] != "kfac":
        raise FdpError(f"--kfac-data: expected --optimizer kfac to go with it, got {settings['optimizer']}")
    style = clip()
    if settings["optimizer"] == "kfac":
        chosen = KfacOptimizer(rate, kfac_config(settings), kfac_source(settings, loaded))
    else:
        chosen = optimizer_of(settings, rate)
    announced = settings["population"]
    population = rounded_population(len(dataset)) if announced is None else announced
    if population < 1:
        raise FdpError(f"--population: expected about the number of samples, 1 or more, got {population}")
    return RunConfig(
        model=model,
        dataset=dataset,
        method=method,
        clip=style,
        noise_multiplier=settings["noise_multiplier"],
        epsilon=epsilon,
        delta=default_delta(population) if settings["delta"] is None else settings["delta"],
        population=announced,
        before=promised_before(settings),
        batch_size=batch_size,
        steps=steps,
        optimizer=chosen,
        seed=settings["seed"],
        dtype=dtype,
        microbatch_size=settings["microbatch"],
        memory_budget=None if budget is None else budget * 2**30,
        compile=compile,
        cuda_graph=settings["cuda_graph"],
        device=torch.device(device),
        layout=laid_out(settings),
        offload=offloaded(settings["offload"]),
        checkpoint_activations=settings["checkpoint_activations"],
        values=values,
    )
