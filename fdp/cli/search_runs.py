"""The runs of ``fdp search``: draw their number and settings, train them, choose the best and export it.

OUT/trial-1 ...        the runs; all but the exported model are for the owner of the data only
OUT/model.safetensors  the best model (a folder of transformers: OUT/model)
OUT/search.json        the statement, the settings and scores of every run; not covered by the budget

``search.json`` is there before the first run, and has no epsilon until all runs are made: if an error ends the search,
no run has the epsilon of a run of its own. A signal ends the search with its run: no model is exported, and the epsilon
of a finished search is not claimed.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from fdp.cli import display, session
from fdp.cli.bookkeeping import Account
from fdp.cli.configure import configure
from fdp.cli.configure_evaluation import OverlapWarning
from fdp.cli.options import build, parse_value
from fdp.cli.run_files import check_free
from fdp.cli.search_options import LISTS, SearchOptions
from fdp.cli.search_promise import NOT_ENDED, Price, find_price, interrupted_statement, score_name, statement
from fdp.cli.search_summary import write_totals
from fdp.cli.signals import stop_on_signals
from fdp.cli.train_options import TrainOptions
from fdp.privacy.guarantee import RELATION
from fdp.privacy.selection import POISSON, Repetitions, draw_repetitions
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.report.search_price import TRIAL, Search, write_price
from fdp.run.flight import NotFinite
from fdp.run.run_folder import SEARCH_RESULT, read_run_folder
from fdp.storage.private_files import write_private
from fdp.types import FdpError

if TYPE_CHECKING:
    from fdp.run.evaluation import Evaluator
    from fdp.run.prepare_run import Run
    from fdp.run.run_config import RunConfig
    from fdp.types import TrainState

NOT_FINITE = 1
"""The exit code of a run whose parameters stop being finite."""
SIGNALLED = 128
"""The exit code of a run that a signal ended is this and the number of the signal."""


def run_search(
    shared: dict[str, Any], lists: dict[str, list[Any]], search: SearchOptions, console: Console
) -> dict[str, Any]:
    """Train the runs of a search, export the best, write ``search.json`` and return its contents.

    Guarantees:
      - from the first run to the last, ``search.json`` lists all runs and states no epsilon;
      - in the end, the markers of every run have the price of the search.
    """
    check_score(shared, search)
    check_free(search.out)
    if (search.out / SEARCH_RESULT).exists():
        raise FdpError(f"--out: {search.out} already holds a search; give another directory")
    repetitions = Repetitions(search.trials, POISSON)
    first = build(TrainOptions, shared | {key: values[0] for key, values in lists.items()} | {"epsilon": 1.0})
    with display.show_run_warnings(console):
        config = _configure(first, search)
    price = find_price(config, repetitions, search)
    rng = np.random.default_rng(search.seed)
    count = draw_repetitions(repetitions, rng)  # once, and before the first run
    search.out.mkdir(parents=True, exist_ok=True)
    planned = [{"folder": str(_trial_folder(search, number)), "score": None} for number in range(1, count + 1)]
    _write_result(search, price, planned, code=None, best=None, said=[NOT_ENDED])
    trials, code = [], 0
    with stop_on_signals() as stop:
        while len(trials) < count and not code:
            drawn = _draw(lists, rng)
            introduce = None if trials else _introduction(shared, lists, price, search, count, console)
            trials.append(_run_trial(shared, drawn, price, search, len(trials) + 1, console, introduce))
            code = stop.exit_code if len(trials) < count or trials[-1]["interrupted"] else 0
    scored = [trial for trial in trials if trial["score"] is not None]
    best = min(scored, key=lambda trial: trial["score"]) if scored and not code else None
    if code:
        said = interrupted_statement(price, config, search, begun=len(trials), count=count)
    else:
        said = statement(price, search, shared, best, count)
    result = _write_result(search, price, trials, code=code, best=best, said=said)
    for trial in trials:
        write_price(Path(trial["folder"]))
        write_totals(Path(trial["folder"]))
    if best is not None:
        _export(Path(best["folder"]), search.out)
    return result


def _write_result(
    search: SearchOptions,
    price: Price,
    trials: list[dict[str, Any]],
    *,
    code: int | None,
    best: dict[str, Any] | None,
    said: list[str],
) -> dict[str, Any]:
    """Write ``search.json`` and return its contents; ``code`` is None until the search ends.

    Guarantees:
      - it has the epsilon of the search only if every run that was drawn is made.
    """
    covered = price.epsilon if code == 0 else None
    result = {
        "private": covered is not None,
        "epsilon": covered,
        "exit_code": code,
        "delta": price.delta,
        "relation": RELATION,
        "noise_multiplier": price.noise_multiplier,
        "trials": trials,
        "trials_mean": search.trials,
        "best": best,
        "statement": said,
    }
    write_private(search.out / SEARCH_RESULT, json.dumps(result, indent=2) + "\n")
    return result


def parse_lists(search: SearchOptions) -> dict[str, list[Any]]:
    """Return the values to draw from, by option; raise if there is nothing to choose or a value is out of range."""
    lists: dict[str, list[Any]] = {}
    for key, kind in LISTS.items():
        flag = f"--{key.replace('_', '-')}"
        if (text := getattr(search, key)) is None:
            continue
        values = [parse_value(word.strip(), kind, where=flag, name=flag) for word in text.split(",")]
        if bad := [value for value in values if not 0 <= value < math.inf]:
            raise FdpError(f"{flag}: expected numbers of 0 or more, separated by commas, got {bad[0]:g}")
        lists[key] = list(dict.fromkeys(values))
    if math.prod(len(values) for values in lists.values()) < 2:
        raise FdpError(
            "expected at least two settings to choose from, such as --lr 2e-3,4e-3, got "
            f"{'one' if lists else 'none'}; for a single one use fdp train"
        )
    return lists


def check_score(shared: dict[str, Any], search: SearchOptions) -> None:
    """Raise unless the score is the loss of people who are not trained on, or the search is not private."""
    held_out = shared["eval_fraction"] is not None or shared["eval_data"] is not None
    if shared["eval_epsilon"] is not None:
        raise FdpError(
            "--eval-epsilon: expected held-out people that are public or outside the guarantee, got noised "
            "evaluations, whose cost over several runs a search does not account for; leave it out"
        )
    if not held_out and not search.not_private:
        raise FdpError(
            "expected --eval-fraction 0.1 or --eval-data to choose by, got neither: the loss on the training data is "
            "not private. With --not-private it is used all the same, and the choice is covered by nothing"
        )


def _introduction(
    shared: dict[str, Any],
    lists: Mapping[str, Sequence[Any]],
    price: Price,
    search: SearchOptions,
    count: int,
    console: Console,
) -> session.Introduce:
    """Return what shows the header of a search, and what was spent on its data before, when its first run is ready."""
    drawn = ", ".join(f"--{key.replace('_', '-')} {','.join(f'{each:g}' for each in lists[key])}" for key in lists)
    runs = (
        f"{count} run{'s' * (count > 1)}, a number drawn at random with mean {search.trials:g} (not covered by the "
        f"budget), each with settings drawn from {drawn}; above are those of run 1. The one with the lowest "
        f"{score_name(shared)} is exported"
    )

    def introduce(
        run: Run, state: TrainState, options: TrainOptions, evaluator: Evaluator | None, account: Account
    ) -> None:
        if price.epsilon is None:
            epsilon = f"epsilon {search.epsilon:g} for each run alone; the choice among them is covered by nothing"
            before = account
        else:
            stated = f"epsilon {shown_epsilon(price.epsilon)} at delta {shown_delta(price.delta)}"
            epsilon = f"{stated} for the model and its settings, chosen from all runs"
            before = account.at_price(Search(price.epsilon, price.delta, search.trials, chose=True))
        rows = {"budget": epsilon, "search": runs}
        display.show_header(console, run, state, options, evaluator, title="fdp search", instead=rows)
        display.show_warnings(console, before.warnings())

    return introduce


def _configure(options: TrainOptions, search: SearchOptions) -> RunConfig:
    """Return the configuration of the first run; refuse to score a private search on samples that are trained on."""
    with warnings.catch_warnings():
        if not search.not_private:
            warnings.simplefilter("error", OverlapWarning)
        try:
            return configure(options)
        except OverlapWarning as found:
            raise FdpError(str(found)) from None


def _draw(lists: dict[str, list[Any]], rng: np.random.Generator) -> dict[str, Any]:
    """Draw one setting, independently of earlier ones: the theorem needs draws with replacement."""
    return {key: values[int(rng.integers(len(values)))] for key, values in lists.items()}


def _trial_folder(search: SearchOptions, number: int) -> Path:
    return search.out / f"{TRIAL}{number}"


def _run_trial(
    shared: dict[str, Any],
    drawn: dict[str, Any],
    price: Price,
    search: SearchOptions,
    number: int,
    console: Console,
    introduce: session.Introduce | None,
) -> dict[str, Any]:
    """Train one run and return its settings and score; a run whose parameters stop being finite has none.

    Guarantees:
      - in a private search, the score depends on the training data only through the private parameters;
      - however the run ends, a copy of it promises nothing until the search ends.
    """
    folder = _trial_folder(search, number)
    budget: dict[str, Any] = {"epsilon": search.epsilon if price.noise_multiplier is None else None}
    budget |= {"noise_multiplier": price.noise_multiplier}
    budget |= {"seed": None if search.seed is None else search.seed + number}  # no two runs share their noise
    if price.epsilon is not None:
        # Losses of private samples would decide whether the run is chosen: it ends by its parameters alone.
        budget |= {"on_divergence": "continue"}
    options = build(TrainOptions, shared | drawn | budget | {"out": folder, "quiet": True})
    try:
        code = session.train(options, introduce=introduce)
    except NotFinite:
        code = NOT_FINITE
    finally:
        write_price(folder)
        write_totals(folder)
    run = read_run_folder(folder)
    losses = [record.evaluation.loss for record in run.records if record.evaluation is not None]
    losses = losses or [record.loss for record in run.records]  # only with --not-private
    score = losses[-1] if code == 0 and losses and losses[-1] is not None and math.isfinite(losses[-1]) else None
    interrupted = code > SIGNALLED
    shown = "interrupted" if interrupted else "diverged" if score is None else f"{score_name(shared)} {score:.4f}"
    settings = ", ".join(f"{key} {value:g}" for key, value in drawn.items())
    console.print(f"run {number}: {settings}: {shown}")
    return {"folder": str(folder), "settings": drawn, "score": score, "interrupted": interrupted}


def _export(source: Path, out: Path) -> None:
    """Copy the best model; the marker in its folder already has the price of the search."""
    if (source / "model.safetensors").exists():
        shutil.copy2(source / "model.safetensors", out / "model.safetensors")
    if (source / "model").is_dir():
        shutil.copytree(source / "model", out / "model")
