"""``--recipe auto``: fill in every setting of ``fdp train`` that was not given, from the advice of :mod:`fdp.advice`.

    options, found = apply_recipe(options, given={"epsilon": 3.0}, hours=1.0)

What is given always wins. The settings that are filled in are saved in ``config.json`` like any others: a run that is
resumed takes them from there, since timing the machine again would give others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fdp.advice import machine
from fdp.advice.batch_and_steps import Problem
from fdp.advice.machine import Memory
from fdp.advice.recipe import Recipe, Situation, advise_lora, make_recipe, model_width
from fdp.advice.signal import trained_parameters
from fdp.cli.configure import configure
from fdp.cli.model_and_data import is_folder
from fdp.cli.options import build, to_dict
from fdp.cli.train_options import TrainOptions
from fdp.cli.user_advice import suggest_for_users
from fdp.gradients.plan import Method
from fdp.parallel import launch
from fdp.parallel.agree import gather_values, run_in_unison
from fdp.privacy.sampling import rounded_population
from fdp.run.run_config import RunConfig
from fdp.types import FdpError

DEFAULT_HOURS = 1.0
FILLED = ("lora", "batch_size", "steps", "lr", "clip", "max_norm", "schedule", "microbatch")
"""The settings that a recipe fills in."""


class Advice(NamedTuple):
    """A recipe with what it was made from; ``free`` is the memory that was free, in bytes.

    ``suggestions`` about users follow from private numbers of windows; the recipe does not use them.
    """

    recipe: Recipe
    situation: Situation
    memory: Memory
    free: float
    device: str
    hours: float
    suggestions: tuple[str, ...]


def advise(options: TrainOptions, *, given: Mapping[str, Any], hours: float | None) -> tuple[TrainOptions, Advice]:
    """Return the options with a recipe for what is not given, and the recipe. It times a few steps on this machine."""
    hours = DEFAULT_HOURS if hours is None else hours
    if not 0 < hours < float("inf"):
        raise FdpError(f"--hours: expected a positive number, got {hours:g}")
    if options.privacy.method == Method.NONE.value:
        raise FdpError("--method none: expected a private run, since the advice is about noise; leave it out")
    config = configure(options)
    lora = None
    if not {"lora", "prefix", "train_only"} & set(given):
        lora = advise_lora(config.model, pretrained=is_folder(options.model.model))
    if lora is not None:
        options = replace(options, model=replace(options.model, lora=lora[0]))
        config = configure(options)
    memory, free = machine.estimate_memory(config), machine.free_memory(config.device)
    microbatch = given.get("microbatch") or machine.choose_microbatch(
        memory, free, most=largest_batch(config, given), device=config.device
    )
    speed = machine.time_steps(config, microbatch=microbatch)
    situation = Situation(_problem(config, options), speed, model_width(config.model), microbatch)
    recipe = make_recipe(situation, given=given, seconds=3600 * hours)
    if lora is not None:
        settings, reasons = {"lora": lora[0]} | recipe.settings, {"lora": lora[1]} | recipe.reasons
        recipe = recipe._replace(settings=settings, reasons=reasons)
    filled = build(TrainOptions, to_dict(options) | recipe.settings)
    users = suggest_for_users(config.dataset, most=options.data.windows_per_user)
    suggestions = tuple(said for key, said in users.items() if key not in given)
    return filled, Advice(recipe, situation, memory, free, _device_name(config), hours, suggestions)


def apply_recipe(options: TrainOptions, *, given: Mapping[str, Any]) -> tuple[TrainOptions, Advice | None]:
    """Return the options of ``--recipe auto``; the advice is None if the run in ``--out`` already has its recipe.

    Every rank calls it; the first one decides.
    """
    if {key for key in FILLED if key != "lora"} <= set(given) | ({"steps"} if "epochs" in given else set()):
        return options, None  # as from the config.toml of a run: there is nothing to fill in
    saved = run_in_unison(lambda: _saved_recipe(options) if launch.rank() == 0 else None, None)
    if (saved := gather_values(saved, None)[0]) is not None:
        return build(TrainOptions, to_dict(options) | {k: v for k, v in saved.items() if k not in given}), None
    hours = options.advice.hours
    made = run_in_unison(lambda: advise(options, given=given, hours=hours) if launch.rank() == 0 else None, None)
    decided = gather_values(made, None)[0]
    assert decided is not None
    return decided


def _saved_recipe(options: TrainOptions) -> dict[str, Any] | None:
    """Return the filled-in settings of the run in ``--out``, None if there is none with a recipe."""
    out = options.output.out
    if out is None or not (out / "config.json").exists():
        return None
    try:
        saved = json.loads((out / "config.json").read_text())["settings"]
    except (OSError, ValueError, KeyError):
        return None  # resuming will say what is wrong with it
    return {key: saved[key] for key in FILLED if key in saved} if saved.get("recipe") == "auto" else None


def _problem(config: RunConfig, options: TrainOptions) -> Problem:
    return Problem(
        parameters=trained_parameters(config.model),
        pretrained=is_folder(options.model.model),
        population=_population(config),
        epsilon=config.epsilon,
        delta=config.delta,
        noise_multiplier=config.noise_multiplier,
    )


def _population(config: RunConfig) -> int:
    return rounded_population(len(config.dataset)) if config.population is None else config.population


def largest_batch(config: RunConfig, given: Mapping[str, Any]) -> int:
    """Return the largest batch of use, from public numbers: the microbatch that follows from it is published."""
    return int(given.get("batch_size", _population(config)))


def _device_name(config: RunConfig) -> str:
    import torch

    if config.device.type == "cuda":
        return torch.cuda.get_device_name(config.device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'' if threads == 1 else 's'}"
