"""``fdp train``: a private run from names and numbers.

    fdp train --model gpt-nano --data stdlib --epsilon 8 --steps 300 --out runs/first

Checks come first; files are written only once all of them have passed. The defaults are the arguments below.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from rich.console import Console
from typer import Exit, Option

if TYPE_CHECKING:
    from fdp.run import RunConfig

T = TypeVar("T")
DEFAULT_EPSILON = 8.0
INTERRUPTED = 130
WHAT, PRIVACY, TRAINING, HOW = "What to train", "Privacy", "Training", "How to run"


def train_command(
    model: Annotated[str, Option(help="A preset, such as gpt-nano or mlp.", rich_help_panel=WHAT)] = "gpt-nano",
    data: Annotated[
        str,
        Option(
            help="stdlib, digits, or a path: text file or folder, .jsonl, .npy or .bin tokens.",
            rich_help_panel=WHAT,
        ),
    ] = "stdlib",
    field: Annotated[str, Option(help="The field of a .jsonl record that is read.", rich_help_panel=WHAT)] = "text",
    context: Annotated[
        int | None,
        Option(help="Tokens a language model sees; default: the model's own.", rich_help_panel=WHAT),
    ] = None,
    epsilon: Annotated[
        float | None,
        Option(help="Budget; the noise follows. 8 unless --noise-multiplier.", rich_help_panel=PRIVACY),
    ] = None,
    noise_multiplier: Annotated[
        float | None, Option(help="Noise as a multiple of C, instead of --epsilon.", rich_help_panel=PRIVACY)
    ] = None,
    delta: Annotated[
        float | None, Option(help="Default: min(1e-6, N^-1.1) of N samples.", rich_help_panel=PRIVACY)
    ] = None,
    clip: Annotated[str, Option(help="flat, per-layer, automatic or quantile.", rich_help_panel=PRIVACY)] = "flat",
    max_norm: Annotated[
        float, Option(help="C: the most one sample can add to the sum.", rich_help_panel=PRIVACY)
    ] = 1.0,
    method: Annotated[
        str,
        Option(
            help="How clipped sums are made: auto, ghost, ghost_bk, materialize; none: without privacy.",
            rich_help_panel=PRIVACY,
        ),
    ] = "auto",
    batch_size: Annotated[int, Option(help="Expected samples per step (Poisson).", rich_help_panel=TRAINING)] = 64,
    steps: Annotated[int, Option(help="Steps.", rich_help_panel=TRAINING)] = 40,
    lr: Annotated[float, Option(help="Peak learning rate.", rich_help_panel=TRAINING)] = 4e-3,
    optimizer: Annotated[str, Option(help="adamw, adam, sgd, lamb or adafactor.", rich_help_panel=TRAINING)] = "adamw",
    weight_decay: Annotated[float, Option(help="Weight decay.", rich_help_panel=TRAINING)] = 0.0,
    schedule: Annotated[str, Option(help="constant or cosine.", rich_help_panel=TRAINING)] = "cosine",
    warmup: Annotated[
        int | None, Option(help="Steps of linear warm-up; default: a tenth of the steps.", rich_help_panel=TRAINING)
    ] = None,
    seed: Annotated[
        int | None,
        Option(
            help="For repeatable experiments; default: entropy of the operating system.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    microbatch: Annotated[
        int, Option(help="Samples computed at once; changes speed and memory only.", rich_help_panel=HOW)
    ] = 32,
    dtype: Annotated[str, Option(help="float32 or bfloat16.", rich_help_panel=HOW)] = "float32",
    compile: Annotated[
        str,
        Option(
            help="none, or step: torch.compile, one graph per microbatch and one for the update.", rich_help_panel=HOW
        ),
    ] = "none",
    device: Annotated[str, Option(help="auto, cpu or cuda.", rich_help_panel=HOW)] = "auto",
    memory_budget: Annotated[
        float | None,
        Option(help="GiB that --method auto may keep between norms and sum.", rich_help_panel=HOW),
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="Where the run's files go; default: runs/<model>-<data>-<n>.", rich_help_panel=HOW),
    ] = None,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.", rich_help_panel=HOW)] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print the summary as one JSON object, last.", rich_help_panel=HOW)
    ] = False,
) -> None:
    """Train a model privately. The budget covers the parameters, not the metrics shown on the way."""
    settings = dict(locals())
    # On a CPU without bfloat16 torch says so with a stack trace of its own for a warning, and goes on.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    # torch takes seconds to import, and --help and mistakes on the command line should not.
    from fdp import run as runs
    from fdp.cli import display, report

    if out is not None:
        report.check_free(out)  # before the data is loaded, and once more before the first file
    console = Console(quiet=quiet, highlight=False)
    with console.status("checking the data, the model and the budget"):
        run, state = runs.prepare(configure(settings))
    folder = report.claim(out, model=model, data=data)
    report.write_config(folder, settings, run)
    display.show_header(console, run, state, settings)
    records: list[runs.Record] = []
    stream = report.write_metrics(runs.steps(run, state), folder)
    try:
        for state, record in display.follow(stream, run, console):  # noqa: B007
            records.append(record)
    except KeyboardInterrupt:
        console.print(f"interrupted after {len(records)} steps; what they gave is kept")
    summary = runs.summarise(run, state, records)
    report.write_model(folder, state.params)
    report.write_summary(folder, summary)
    report.write_report(folder, run, records, title=f"{model} on {data}")
    display.show_closing(console, summary, folder)
    if as_json:
        print(json.dumps(summary | {"out": str(folder)}))
    if len(records) < steps:
        raise Exit(INTERRUPTED)


def configure(settings: Mapping[str, Any]) -> RunConfig:
    """The door: names to values. An unknown name is an error that suggests the nearest and lists all."""
    import torch

    from fdp import clipping, data, models, optimizers
    from fdp.methods import Method
    from fdp.run import RunConfig, default_delta
    from fdp.types import FdpError

    def choose(option: str, known: Mapping[str, T]) -> T:
        name = settings[option]
        if name in known:
            return known[name]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise FdpError(f"--{option}: expected one of {', '.join(known)}; got {name!r}.{hint}")

    max_norm, batch_size, steps = settings["max_norm"], settings["batch_size"], settings["steps"]
    lr, decay = settings["lr"], settings["weight_decay"]
    warmup = steps // 10 if settings["warmup"] is None else settings["warmup"]
    name = choose("model", {name: name for name in models.PRESETS})
    method = choose("method", {method.value: method for method in Method})
    clip = choose(
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
    schedule = choose(
        "schedule",
        {
            "constant": lambda: optimizers.constant(lr),
            "cosine": lambda: optimizers.cosine(lr, steps=steps - warmup),
        },
    )
    optimizer = choose(
        "optimizer",
        {
            "adamw": lambda rate: optimizers.adamw(rate, weight_decay=decay),
            # as in torch.optim, Adam's decay is L2 regularisation: before the moments
            "adam": lambda rate: optimizers.chain(optimizers.add_decayed_weights(decay), optimizers.adam(rate)),
            "sgd": lambda rate: optimizers.sgd(rate, weight_decay=decay),
            "lamb": lambda rate: optimizers.lamb(rate, weight_decay=decay),
            "adafactor": lambda rate: optimizers.adafactor(rate, weight_decay=decay),
        },
    )
    dtype = choose("dtype", {"float32": torch.float32, "bfloat16": torch.bfloat16})
    compiled = choose("compile", {"none": False, "step": True})
    has_cuda = torch.cuda.is_available()
    device = choose("device", {"auto": "cuda" if has_cuda else "cpu", "cpu": "cpu", "cuda": "cuda"})

    if device == "cuda" and not has_cuda:
        raise FdpError("--device: expected a CUDA device, found none; use --device cpu")
    if batch_size < 1 or steps < 1:
        raise FdpError(f"expected --batch-size and --steps of at least 1, got {batch_size} and {steps}")
    if not 0 <= warmup < steps:
        raise FdpError(f"--warmup: expected fewer than the {steps} steps of the run, got {warmup}")
    epsilon, budget = settings["epsilon"], settings["memory_budget"]
    if epsilon is None and settings["noise_multiplier"] is None and method is not Method.NONE:
        epsilon = DEFAULT_EPSILON
    if budget is not None and not budget > 0:
        raise FdpError(f"--memory-budget: expected a positive number of GiB, got {budget}")
    rate = schedule() if warmup == 0 else optimizers.warmup(schedule(), steps=warmup)
    style, chosen = clip(), optimizer(rate)

    model = models.build(name, context=settings["context"])
    vocab_size = data.BYTES if model.vocab_size is None else model.vocab_size
    dataset = data.load(settings["data"], context=model.context, field=settings["field"], vocab_size=vocab_size)
    return RunConfig(
        model=model,
        dataset=dataset,
        method=method,
        clip=style,
        noise_multiplier=settings["noise_multiplier"],
        epsilon=epsilon,
        delta=default_delta(len(dataset)) if settings["delta"] is None else settings["delta"],
        batch_size=batch_size,
        steps=steps,
        optimizer=chosen,
        seed=settings["seed"],
        dtype=dtype,
        microbatch_size=settings["microbatch"],
        memory_budget=None if budget is None else budget * 2**30,
        compiled=compiled,
        device=torch.device(device),
    )
