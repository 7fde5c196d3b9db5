"""The panels that ``fdp train`` prints before and after a run.

>>> show_header(console, run, state, options)
>>> show_result(console, summary, folder)
"""

from __future__ import annotations

import math
import shlex
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fdp import tree
from fdp.cli.configure import learning_rate
from fdp.cli.covered_files import describe_covered, describe_not_covered
from fdp.cli.evaluation_display import header_words, summary_words
from fdp.cli.train_options import TrainOptions
from fdp.data.read_counts import read_counts_of
from fdp.data.units import UnitKind, dataset_unit, sentence
from fdp.fast.compile_modes import Compile
from fdp.gradients.plan import Method
from fdp.kfac.private.curvature_sources import Feed, describe_feed
from fdp.kfac.state import KfacPlan
from fdp.model import Model
from fdp.parallel.sharded_init import drawn_params
from fdp.privacy.chain import Chain
from fdp.privacy.guarantee import RELATION, delta_advice
from fdp.privacy.shown_numbers import round_up, shown_delta, shown_epsilon
from fdp.run.evaluation import Evaluator
from fdp.run.evaluation_config import Cost
from fdp.run.prepare_run import Run, extra_noise
from fdp.run.smaller_microbatches import RunWarning
from fdp.types import TrainState

Rows: TypeAlias = list[tuple[str, str]]

ROUNDED = ", from the number of samples rounded up; --population announces another"
BUT_NOISED = "but for the noised held-out figures, whose epsilon is that of the evaluation above: "
EARLY_STOP = (
    "after {steps} of {steps_planned} steps. The epsilon{part} is that of all {steps_planned}, since what the run "
    "showed may have led to the stop; it is {less} if the {steps} steps were decided on before the run"
)
BY_PATIENCE = (
    "after {steps} of {steps_planned} steps, by --patience. The epsilon{part} is that of all {steps_planned}: the stop "
    "was not decided on before the run"
)
GUESSABLE = "whoever guesses it can repeat the noise and subtract it"
FIXED_SEED = f"{GUESSABLE}. For a real release leave --seed out"


def show_header(
    console: Console,
    run: Run,
    state: TrainState,
    options: TrainOptions,
    evaluator: Evaluator | None = None,
    *,
    title: str = "fdp train",
    instead: Mapping[str, str] | None = None,
) -> None:
    """Print a description of the run, and warnings, before it starts; ``instead`` replaces rows, or adds them."""
    rows = [
        *_model_rows(run, state, options),
        *_training_rows(run, options),
        *_execution_rows(run),
        *_privacy_rows(run, options),
        *([] if evaluator is None else [("evaluation", header_words(evaluator))]),
    ]
    rows = list((dict(rows) | dict(instead or {})).items())
    console.print(_panel(title, rows))
    if run.config.model.remark is not None:
        console.print(Text(run.config.model.remark, style="yellow"), soft_wrap=True)
    show_warnings(console, _warnings(run))


def show_warnings(console: Console, texts: Sequence[str]) -> None:
    """Print warnings, a paragraph each."""
    for warning in texts:
        console.print(Text(warning, style="yellow"))


@contextmanager
def show_run_warnings(console: Console) -> Iterator[None]:
    """Print in one line what the user should read: other sizes of microbatches, samples that are not held out."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RunWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, RunWarning):
                show_warnings(console, [str(message)])
            else:
                others(message, category, *where)

        warnings.showwarning = show
        yield


def show_result(
    console: Console,
    summary: Mapping[str, Any],
    folder: Path,
    *,
    chain: Chain | None = None,
    others: Sequence[str] = (),
) -> None:
    """Print the result, and which outputs the budget covers; ``chain`` is the promise about the model.

    ``others`` say what other runs on the same data spent, in a line each.
    """
    first, last = loss_text(summary["loss_first"]), loss_text(summary["loss_last"])
    rows = [("loss", f"{first} → {last} in {summary['steps']} steps")]
    if "evaluation" in summary:
        rows.append(("evaluation", summary_words(summary["evaluation"])))
    if "exported" in summary:
        rows.append(("exported", summary["exported"]["in_words"]))
    if failures := summary.get("kfac_failures"):
        rows.append(
            (
                "curvature",
                f"{failures} times a layer kept its last curvature: the new one was not finite or not invertible",
            )
        )
    if summary["private"]:
        rows += _result_rows(summary, chain)
        if summary["seed"] != "os":
            rows.append(("seed", f"{summary['seed']}: {GUESSABLE}"))
        if summary["steps"] < summary["steps_planned"]:
            less = shown_epsilon(summary["epsilon_if_stop_was_decided_in_advance"])
            by_patience = summary.get("exported", {}).get("stopped_early", False)
            part = " of this run" if chain is not None and chain.earlier else ""
            words = BY_PATIENCE if by_patience else EARLY_STOP
            rows.append(("early stop", words.format(**summary, less=less, part=part)))
        covered = chain is None or chain.total.private
        noised = summary.get("evaluation", {}).get("cost") == Cost.NOISED.value
        rows += [("covered", describe_covered(folder))] if covered else []
        rows.append(("not covered", f"{BUT_NOISED * noised}{describe_not_covered(folder)}"))
    else:
        rows.append(("privacy", "none: the parameters may reveal the data they were trained on"))
    if others:
        rows.append(("trained before", "\n".join(others)))
    rows.append(("files", str(folder)))
    console.print(_panel("done", rows))


def _result_rows(summary: Mapping[str, Any], chain: Chain | None) -> Rows:
    """Return the privacy of the model, and of this run alone where earlier runs on the same data are part of it."""
    alone, relation = shown_epsilon(summary["epsilon"]), summary["relation"]
    own = f"epsilon {alone} at delta {shown_delta(summary['delta'])}"
    unit = ("unit of privacy", _unit_words(summary))
    if chain is None or not chain.earlier:
        only = " for the steps of this run only" if chain is not None and chain.left_out else ""
        return [("privacy", f"{own}{only} ({relation})"), unit]
    runs = f"{len(chain.earlier)} earlier run{'s' * (len(chain.earlier) > 1)}"
    if chain.total.epsilon is None:
        return [("privacy", f"none for the model: {runs} that it started from used the same data without privacy")]
    total = f"epsilon {shown_epsilon(chain.total.epsilon)} at delta {shown_delta(chain.total.delta or 0)}"
    return [
        ("privacy", f"{total} ({relation}), of this run and {runs} whose parameters it started from"),
        unit,
        ("this run", f"{own}, of its own steps alone"),
    ]


def _unit_words(summary: Mapping[str, Any]) -> str:
    """Return what epsilon is about, and a reminder where that is less than a person whom a field seems to name."""
    reading = summary.get("reading") or {}
    if reading.get("person_field") is None or reading["kind"] == UnitKind.USER.value:
        return summary["unit"]
    field = shlex.quote(reading["person_field"]["field"])
    return f"{summary['unit']}, not a person: for that, --unit user --user-field {field}"


def show_hints(console: Console, hints: Sequence[str]) -> None:
    """Print hints about a run; they are for its owner, and in no file."""
    for hint in hints:
        console.print(Text(hint if hint.startswith("hint: ") else f"hint: {hint}", style="cyan"), soft_wrap=True)


def show_diverged(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Print the result of a run that diverged: no model, and what was spent all the same."""
    rows = [("result", f"diverged after {summary['steps']} of {summary['steps_planned']} steps; no model was exported")]
    if summary["private"]:
        epsilon = shown_epsilon(summary["epsilon"])
        rows.append(
            (
                "spent",
                f"epsilon {epsilon} at delta {shown_delta(summary['delta'])}: that of all steps, as the data led to "
                f"the stop",
            )
        )
    console.print(_panel("diverged", [*rows, ("files", str(folder))]))


def loss_text(loss: float | None) -> str:
    """Return a loss in four decimals, ``n/a`` for a step without samples."""
    return "n/a" if loss is None else f"{loss:.4f}"


def _model_rows(run: Run, state: TrainState, options: TrainOptions) -> Rows:
    model, reading = run.config.model, read_counts_of(run.config.dataset)
    context = f", context {model.context}" if model.context else ""
    samples = f"{len(run.config.dataset):,} samples" if reading is None else reading.line()
    start = ", from random parameters" if run.config.values is drawn_params else ""
    return [
        ("model", f"{model.name}, {_count_parameters(model, state)}{context}{start}"),
        ("data", f"{options.data.data}, {samples} (counts are private)"),
    ]


def _count_parameters(model: Model, state: TrainState) -> str:
    """Return the number of parameters, and of those that are trained if some are frozen."""
    every = f"{tree.size(state.params):,} parameters"
    if not model.frozen:
        return every
    trained = sum(math.prod(model.leaves[path].shape) for path in model.trainable)
    return f"{trained:,} of {every} trained"


def _training_rows(run: Run, options: TrainOptions) -> Rows:
    config, training, sampling = run.config, options.training, run.mechanism.sampling
    compiled = "" if config.compile is Compile.NONE else f", compiled by {config.compile.value}"
    replayed = ", replayed as a CUDA graph" if config.cuda_graph else ""
    repeatable = ", in one order of additions" if config.repeatable else ""
    rounded_gradients = ", gradients stored in 8 bits" if run.plan.rounded else ""
    rounded = ROUNDED if config.population is None else ""
    return [
        (
            "training",
            f"{config.steps} steps of {training.optimizer}, learning rate {learning_rate(training):g} "
            f"({training.schedule}), {options.compute.dtype} on {config.device.type}{compiled}{replayed}{repeatable}"
            f"{rounded_gradients}",
        ),
        (
            "sampling",
            f"Poisson, {config.batch_size} of {sampling.population:,} expected per step (public rate "
            f"{sampling.rate:.3g}{rounded}), {config.microbatch_size} at a time",
        ),
    ]


def _execution_rows(run: Run) -> Rows:
    config, rows = run.config, []
    if run.kfac is not None:
        rows.append(("curvature", _describe_curvature(run.kfac.plan, run.feed)))
    if run.sharding is not None and config.layout is not None:
        axes = ", ".join(f"{axis}={size}" for axis, size in config.layout.axes.items())
        rows.append(("ranks", f"{run.sharding.world.size}: {axes}, ZeRO-{config.layout.zero.value}"))
    if offloaded := [name for name, on_cpu in config.offload._asdict().items() if on_cpu]:
        rows.append(("on the CPU", ", ".join(offloaded)))
    return rows


def _privacy_rows(run: Run, options: TrainOptions) -> Rows:
    config, rows = run.config, []
    if config.method is not Method.NONE:
        start = "C = " if config.clip.count_noise is None else "adapting from C = "
        noise = round_up(run.mechanism.noise_multiplier, 4)
        rows += [
            ("clipping", f"{config.clip.name}, {start}{options.privacy.max_norm:g}, method {config.method.value}"),
            ("noise", f"{noise} x C on the sum of the clipped gradients{_describe_extra_noise(run)}"),
        ]
    if (statistics := run.mechanism.statistics) is not None:
        rows.append(
            (
                "statistics",
                f"curvature from a separate draw every {statistics.period} steps, clipped to {statistics.max_norm:g}, "
                f"noise {round_up(statistics.noise_multiplier, 4)} x that; the budget includes it",
            )
        )
    if run.epsilons is None:
        return [*rows, ("privacy", "none: this run is not private")]
    epsilon = shown_epsilon(run.epsilons[-1])
    return [
        *rows,
        ("unit of privacy", sentence(dataset_unit(config.dataset), change="added or removed")),
        ("neighbours", RELATION),
        ("budget", f"epsilon {epsilon} at delta {shown_delta(config.delta)} after {config.steps} steps"),
    ]


def _describe_extra_noise(run: Run) -> str:
    if not (extra := extra_noise(run)):
        return ""
    return f", and {round_up(100 * extra, 2)} % more, which covers the rounding of float32 sums"


def _warnings(run: Run) -> list[str]:
    config, reading = run.config, read_counts_of(run.config.dataset)
    found = (
        []
        if reading is None
        else [f"{each} (counts of private data: covered by no budget)" for each in reading.warnings()]
    )
    if run.epsilons is not None:
        if advice := delta_advice(max(run.mechanism.sampling.population, len(config.dataset)), config.delta):
            found.append(advice)
        if config.seed is not None:
            found.append(f"seed {config.seed}: {FIXED_SEED}")
    return found


def _describe_curvature(plan: KfacPlan, feed: Feed | None) -> str:
    """Return the forms of the layers, and when and on what data the curvature is measured."""
    on = "" if feed is None else f" on {describe_feed(feed)} data"
    forms = Counter(f"{row.left.value} x {row.right.value}" for row in plan.rows)
    layers = ", ".join(f"{count} {form}" for form, count in forms.items())
    config = plan.config
    return (
        f"{config.fisher.value} Fisher information, damping {config.damping:g}, every {config.factor_period} "
        f"steps{on}; layers: {layers}"
    )


def _panel(title: str, rows: Rows) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return Panel(table, title=title, title_align="left", border_style="cyan", expand=False)
