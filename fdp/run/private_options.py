"""The arguments of :func:`fdp.private` and the run that they describe.

>>> config, subject = configure(options)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fdp.arguments import nonnegative_number, positive_number, probability, whole_number
from fdp.fast.compile_modes import Compile
from fdp.gradients.plan import Method
from fdp.model import Model
from fdp.parallel.sharded_init import drawn_params
from fdp.parallel.sharding import Zero
from fdp.privacy import clipping
from fdp.privacy.clipping import ClipStyle
from fdp.privacy.guarantee import default_delta, delta_advice
from fdp.privacy.microbatches import Dataset, one_microbatch
from fdp.privacy.sampling import rounded_population
from fdp.run.collated_samples import Collate
from fdp.run.module_model import Subject, make_subject
from fdp.run.own_samples import as_samples
from fdp.run.run_config import Layout, RunConfig
from fdp.run.sample_losses import Loss
from fdp.run.save_module import earlier_guarantees
from fdp.run.torch_optimizer import as_optimizer
from fdp.types import FdpError

MICROBATCHES = {"cpu": 64, "cuda": 256}
"""Samples computed at once with ``microbatch="auto"``; halved if they do not fit into the memory of the GPU."""
_WHOLE_STEP = (Compile.STEP, Compile.STEP.value)
"""A whole step takes minutes to compile for every size of microbatches, so it has one."""
DEFAULT_BATCH_SIZE = 256
CLIPPING: dict[str, Callable[..., ClipStyle]] = {
    "flat": clipping.flat,
    "per-layer": clipping.per_layer,
    "automatic": clipping.automatic,
}
WITHOUT_NOISE = (
    "; without noise nothing is private: train with torch alone, or compose the step yourself (fdp.make_train_step)"
)
NUMBERS: Mapping[str, Callable[[str, Any], float]] = {
    "epsilon": positive_number,
    "delta": partial(probability, advice="; below 1 / samples is usual"),
    "noise_multiplier": partial(positive_number, advice=WITHOUT_NOISE),
    "epochs": positive_number,
    "steps": whole_number,
    "batch_size": whole_number,
    "weight_decay": nonnegative_number,
    "max_norm": positive_number,
    "population": partial(whole_number, of=" of samples"),
    "microbatch": partial(whole_number, advice="; or leave it to 'auto'"),
    "seed": partial(whole_number, least=0),
}
"""Checks of the arguments that are numbers; a learning rate is checked by its optimizer."""


@dataclass(frozen=True, kw_only=True)
class PrivateOptions:
    """The arguments of :func:`fdp.private`, by name."""

    module: nn.Module | Model
    dataset: Any
    loss: Loss | None
    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    epochs: float | None
    steps: int | None
    batch_size: int | None
    lr: float | Callable[[Tensor], Tensor] | None
    optimizer: Any
    weight_decay: float | None
    max_norm: float
    clip: str | ClipStyle
    collate_fn: Collate | None
    population: int | None
    microbatch: int | str
    materialize: Sequence[str]
    compile: str | Compile
    dtype: torch.dtype
    device: torch.device | str | None
    mesh: Mapping[str, int] | None
    seed: int | None


class Sizes(NamedTuple):
    """The public numbers of a run: the announced number of samples, the expected batch size, the steps."""

    population: int
    batch_size: int
    steps: int


def configure(options: PrivateOptions) -> tuple[RunConfig, Subject]:
    """Return the run that the arguments describe, and what is trained."""
    _check_one("epsilon", options.epsilon, "noise_multiplier", options.noise_multiplier)
    _check_one("epochs", options.epochs, "steps", options.steps)
    options = _check_numbers(options)
    samples = as_samples(options.dataset, collate_fn=options.collate_fn)
    sizes = make_sizes(options, len(samples))
    subject = _make_subject(options, samples)
    device = _device(options)
    config = RunConfig(
        model=subject.model,
        dataset=subject.dataset,
        method=Method.AUTO,
        clip=_clip_style(options.clip, options.max_norm),
        noise_multiplier=options.noise_multiplier,
        epsilon=options.epsilon,
        delta=_delta(options.delta, sizes.population),
        batch_size=sizes.batch_size,
        steps=sizes.steps,
        optimizer=as_optimizer(options.optimizer, lr=options.lr, weight_decay=options.weight_decay),
        seed=options.seed,
        dtype=options.dtype,
        microbatch_size=_microbatch_size(options.microbatch, sizes.batch_size, device),
        smaller_microbatches=device.type == "cuda" and options.compile not in _WHOLE_STEP,
        memory_budget=None,
        compile=_compile_mode(options.compile),
        device=device,
        layout=None if options.mesh is None else Layout(dict(options.mesh), Zero.THREE),
        values=subject.values,
        population=sizes.population,
        before=earlier_guarantees(options.module),
    )
    return config, subject


def make_sizes(options: PrivateOptions, samples: int) -> Sizes:
    """Return the public numbers. One epoch is as many steps as draw the population once, on average."""
    population = rounded_population(samples) if options.population is None else options.population
    batch_size = options.batch_size
    if batch_size is None and isinstance(options.dataset, DataLoader):
        batch_size = options.dataset.batch_size
        if batch_size is not None:
            warnings.warn(
                f"dataset: a DataLoader's batch size, {batch_size}, is taken as the expected batch size; its sampler, "
                f"shuffle and drop_last are not used: fdp draws every step by Poisson sampling. Give "
                f"loader.dataset, batch_size= and collate_fn= to say the same without this warning",
                stacklevel=5,
            )
    if batch_size is None:
        batch_size = default_batch_size(population)
    if batch_size > population:
        rounded = "" if options.population is not None else ", which is the number of samples rounded up"
        raise FdpError(
            f"batch_size: expected at most the population {population}{rounded}, got {batch_size}: a sampling rate "
            f"above 1. Leave batch_size out for {default_batch_size(population)}, or give a smaller one"
        )
    steps = options.steps
    if steps is None:
        assert options.epochs is not None
        steps = max(1, math.ceil(options.epochs * population / batch_size))
    return Sizes(population, batch_size, steps)


def default_batch_size(population: int) -> int:
    """Return the expected batch size if none is given: a quarter of the population, at most ``DEFAULT_BATCH_SIZE``."""
    return max(1, min(DEFAULT_BATCH_SIZE, population // 4))


def _make_subject(options: PrivateOptions, samples: Dataset) -> Subject:
    if isinstance(options.module, nn.Module):
        return make_subject(options.module, samples, loss=options.loss, materialize=tuple(options.materialize))
    if not isinstance(options.module, Model):
        raise FdpError(
            f"module: expected an nn.Module, or a model of fdp, got {type(options.module).__name__}; give the module "
            f"itself, not its class or its parameters"
        )
    if options.loss is not None:
        raise FdpError("loss: expected none beside a model of fdp, which has its own, got one; leave it out")
    return Subject(options.module, drawn_params, samples, None)


def _check_one(first: str, one: float | None, second: str, other: float | None) -> None:
    if (one is None) == (other is None):
        got = "neither" if one is None else "both"
        raise FdpError(f"{first}: expected either {first} or {second}, got {got}; the one follows from the other")


def _check_numbers(options: PrivateOptions) -> PrivateOptions:
    """Return the options with numbers of Python, each checked; those that are left out stay so."""
    given = {name: getattr(options, name) for name in NUMBERS}
    left = [name for name, value in given.items() if value is None or (name, value) == ("microbatch", "auto")]
    return replace(options, **{name: NUMBERS[name](name, given[name]) for name in NUMBERS if name not in left})


def _delta(delta: float | None, population: int) -> float:
    if delta is None:
        return default_delta(population)
    if (advice := delta_advice(population, delta)) is not None:
        warnings.warn(advice, stacklevel=5)
    return delta


def _clip_style(clip: str | ClipStyle, max_norm: float) -> ClipStyle:
    if isinstance(clip, ClipStyle):
        return clip
    if clip not in CLIPPING:
        raise FdpError(
            f"clip: expected one of {', '.join(CLIPPING)}, or a style of fdp.privacy.clipping, such as quantile(...); "
            f"got {clip!r}"
        )
    return CLIPPING[clip](max_norm=max_norm)


def _microbatch_size(microbatch: int | str, batch_size: int, device: torch.device) -> int:
    if microbatch == "auto":
        most = MICROBATCHES.get(device.type, MICROBATCHES["cpu"])
        if batch_size > most:
            return most
        return one_microbatch(batch_size) if device.type == "cuda" else batch_size
    assert not isinstance(microbatch, str)
    return microbatch


def _compile_mode(mode: str | Compile) -> Compile:
    known = {member.value: member for member in Compile}
    if isinstance(mode, Compile):
        return mode
    if mode not in known:
        raise FdpError(f"compile: expected one of {', '.join(map(repr, known))}, got {mode!r}")
    return known[mode]


def _device(options: PrivateOptions) -> torch.device:
    if options.device is not None:
        device = torch.device(options.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise FdpError("device: expected a CUDA device, found none; use device='cpu'")
        return device
    if isinstance(options.module, nn.Module):
        return next((leaf.device for leaf in options.module.parameters()), torch.device("cpu"))
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
