"""``fdp advise``: a recipe for a private run on this machine, with the reasons, and the command to copy.

    fdp advise --model gpt-nano --data stdlib --epsilon 8 --hours 0.5
    fdp advise --model models/gpt2 --data notes.jsonl --unit user --user-field author --epsilon 3 --batch-size 512

Settings that you give stay as they are. A few steps are timed on this machine; no loss or gradient is used.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Context

from fdp.cli.options import Flag, expand_groups, options_of, to_dict
from fdp.cli.train_options import (
    ComputeOptions,
    DataOptions,
    ModelOptions,
    PrivacyOptions,
    TrainingOptions,
    TrainOptions,
    train_flag,
)
from fdp.privacy.shown_numbers import round_up, shown_delta

if TYPE_CHECKING:
    from fdp.advice.table import Row
    from fdp.cli.recipe import Advice

GIB = 2**30
PRIVATE = (
    "The number of samples is private. The recipe uses the public population of {population:,}{rounded} and the shapes "
    "of samples; epochs, noise and time follow from these. No loss, gradient or text was used, so the recipe costs no "
    "privacy; a choice by the results of a run does (fdp search)."
)
ASSUMED = (
    "Signal-to-noise is a prediction to compare settings, not a measurement: the mean clipped gradient is assumed to "
    "have norm {alignment:.2g} x C, and the noise to matter in {dimension:,.0f} directions, the square root of the "
    "{parameters:,} trained parameters. Progress is in steps without noise; the recipe has most of it in the time "
    "given (docs/choosing_settings.md)."
)
SUGGESTED = (
    "These suggestions, unlike the recipe, follow from how many windows each user has: they are computed from private "
    "data and covered by no budget, for your eyes. They change the time of a step: give them to fdp advise again."
)


@dataclass(frozen=True)
class AdviseOptions:
    """The time for the run, and the form of the result."""

    hours: Annotated[float | None, train_flag("hours")] = None
    as_json: Annotated[bool, Flag("Print the result as one JSON object, last.", name="--json")] = False


@expand_groups
def advise_command(
    call: Context,
    model: ModelOptions,
    data: DataOptions,
    privacy: PrivacyOptions,
    training: TrainingOptions,
    compute: ComputeOptions,
    advise: AdviseOptions,
) -> None:
    """Advise on batch size, steps, learning rate, clipping and adapters for a budget, a time and this machine."""
    # torch takes seconds to import; --help and mistakes on the command line should not wait for it.
    from fdp.advice.table import make_rows
    from fdp.cli import recipe
    from fdp.cli.progress import tell_stages

    options = TrainOptions(model=model, data=data, privacy=privacy, training=training, compute=compute)
    given = {key: value for key, value in to_dict(options).items() if is_given(call, key)}
    console = Console(highlight=False)
    with tell_stages(console) as say:
        say("timing a few steps on this machine")
        filled, found = recipe.advise(options, given=given, hours=advise.hours)
        say("computing the noise of other settings")
        rows = make_rows(found.situation, found.recipe.choice, seconds=3600 * found.hours)
    command = command_line(named(filled), ["model", "data", "epsilon", *given, *found.recipe.settings])
    show_recipe(console, found)
    console.print(_table(rows, found))
    for paragraph in _remarks(found, given):
        console.print(Text(paragraph, style="dim"), soft_wrap=True)
    for suggestion in found.suggestions:
        console.print(Text(f"suggestion: {suggestion}", style="cyan"), soft_wrap=True)
    if found.suggestions:
        console.print(Text(SUGGESTED, style="yellow"), soft_wrap=True)
    console.print(Text(command, style="bold"), soft_wrap=True)
    if advise.as_json:
        print(json.dumps(_result(found, rows, command)))


def fill_in_recipe(options: TrainOptions, given: Mapping[str, Any]) -> TrainOptions:
    """Return the options, with ``--recipe auto`` those of the advice for all that is not given, which are printed."""
    from fdp.cli.names import choose
    from fdp.cli.progress import tell_stages
    from fdp.cli.recipe import apply_recipe
    from fdp.parallel import launch

    if not choose("--recipe", options.advice.recipe, {"none": False, "auto": True}):
        return options
    console = Console(highlight=False, quiet=options.output.quiet or launch.rank() > 0)
    with tell_stages(console) as say:
        say("--recipe auto: timing a few steps on this machine")
        filled, found = apply_recipe(options, given=given)
    if found is None:
        console.print("--recipe auto: the settings are those that the run began with", soft_wrap=True)
    else:
        show_recipe(console, found)
    return filled


def is_given(call: Context, key: str) -> bool:
    """Return True if an option was given on the command line."""
    source = call.get_parameter_source(key)
    return source is not None and source.name == "COMMANDLINE"


def named(options: TrainOptions) -> TrainOptions:
    """Return the options with the default epsilon as a number, so that a command states it."""
    from fdp.cli.configure import DEFAULT_EPSILON

    privacy = options.privacy
    if privacy.epsilon is None and privacy.noise_multiplier is None:
        return replace(options, privacy=replace(privacy, epsilon=DEFAULT_EPSILON))
    return options


def command_line(options: TrainOptions, keys: list[str]) -> str:
    """Return the command of ``fdp train`` with the options that ``keys`` name, in the order of ``--help``."""
    words, values = ["fdp", "train"], to_dict(options)
    for key, option in options_of(TrainOptions).items():
        value = values[key]
        if key not in keys or value is None or value is False:
            continue
        text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
        words += [option.name] if value is True else [option.name, text]
    return shlex.join(words)


def show_recipe(console: Console, found: Advice) -> None:
    """Print what was measured, and each setting of the recipe with its reason."""
    speed, problem = found.situation.speed, found.situation.problem
    budget = f"noise {problem.noise_multiplier:g}" if problem.epsilon is None else f"epsilon {problem.epsilon:g}"
    console.print(
        f"{budget} at delta {shown_delta(problem.delta)}; {problem.parameters:,} trained parameters; "
        f"{found.hours:g} hour{'' if found.hours == 1 else 's'}",
        soft_wrap=True,
    )
    console.print(
        f"measured on this machine ({found.device}): {1 / speed.per_sample:,.3g} samples/s and {speed.per_step:.2g} s "
        f"per step besides; estimated: {found.memory.bytes(found.situation.microbatch) / GIB:.2g} GiB for a microbatch "
        f"of {found.situation.microbatch}, {found.free / GIB:.3g} GiB are free",
        soft_wrap=True,
    )
    table = Table.grid(padding=(0, 2))
    for style in ("bold", "", "dim"):
        table.add_column(style=style, overflow="fold", no_wrap=style != "dim")
    names = options_of(TrainOptions)
    for key, value in found.recipe.settings.items():
        table.add_row(
            names[key].name, f"{value:g}" if isinstance(value, float) else str(value), found.recipe.reasons[key]
        )
    console.print(table)
    console.print(f"expected duration: {duration(found.recipe.seconds)}, and the start of the program")


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


HEADINGS = (
    "batch",
    "steps",
    "epochs",
    "noise",
    "noise\n/batch",
    "signal\n/noise",
    "in all",
    "pro-\ngress",
    "time",
    "fits",
)
"""The columns of the table, narrow enough for a terminal of 80 columns."""


def fits_words(row: Row, *, fits_memory: bool) -> str:
    """Return the last column of a row: the reason why it is not the recipe's to choose, "yes", or "recipe"."""
    if not fits_memory or not row.fits:
        return "no time" if fits_memory else "no memory"
    if row.is_recipe:
        return "recipe"
    return "high rate" if row.high_rate else "yes"


def _table(rows: list[Row], found: Advice) -> Table:
    gib = found.memory.bytes(found.situation.microbatch) / GIB
    fits_memory = gib <= found.free / GIB
    table = Table(
        title="settings around the recipe", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.batch_size:,}",
            f"{row.steps:,}",
            f"{row.epochs:.3g}",
            round_up(row.noise_multiplier, 4),
            f"{row.noise_to_batch:.2g}",
            f"{row.signal.per_step:.2g}",
            f"{row.signal.in_total:.3g}",
            f"{row.progress:.3g}",
            duration(row.seconds),
            fits_words(row, fits_memory=fits_memory),
            style="bold" if row.is_recipe else None,
        )
    return table


def _remarks(found: Advice, given: Mapping[str, Any]) -> list[str]:
    from fdp.advice.signal import alignment_of, effective_dimension

    problem, choice = found.situation.problem, found.recipe.choice
    aligned = alignment_of(pretrained=problem.pretrained, steps=choice.steps)
    dimension = effective_dimension(problem.parameters)
    rounded = "" if "population" in given else " (the number of samples, rounded up; --population announces another)"
    return [
        PRIVATE.format(population=problem.population, rounded=rounded),
        ASSUMED.format(alignment=aligned, dimension=dimension, parameters=problem.parameters),
    ]


def _result(found: Advice, rows: list[Row], command: str) -> dict[str, Any]:
    problem, choice = found.situation.problem, found.recipe.choice
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in found.recipe.settings.items()}
    return {
        "settings": settings,
        "reasons": found.recipe.reasons,
        "command": command,
        "seconds": found.recipe.seconds,
        "noise_multiplier": choice.noise_multiplier,
        "epsilon": problem.epsilon,
        "delta": problem.delta,
        "population": problem.population,
        "parameters": problem.parameters,
        "pretrained": problem.pretrained,
        "measured": {"device": found.device, **found.situation.speed._asdict()},
        "memory_bytes": found.memory.bytes(found.situation.microbatch),
        "free_bytes": found.free,
        "hours": found.hours,
        "private_suggestions": list(found.suggestions),
        "table": [row._asdict() | {"signal": row.signal._asdict()} for row in rows],
    }
