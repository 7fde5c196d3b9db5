"""The privacy of a run as its folder tells it, in public facts only.

Nothing here is computed on private data: no loss, no count of samples, no path of data, no seed.

    >>> facts = read_facts(read_run_folder(Path("runs/notes")))
    >>> facts.promise.epsilon, facts.status
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from fdp.data.units import A_FOLDER, UnitKind, privacy_unit
from fdp.privacy.chain import Chain, compose_chain
from fdp.privacy.guarantee import MARKER, RELATION, Guarantee, read_marker
from fdp.privacy.releases import GRADIENTS, STATISTICS, Release
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.run.run_folder import SEARCH_RESULT, RunFolder
from fdp.types import FdpError

COUNT_NOISE_SHARE = 20
"""Quantile clipping of fdp train: the noise on its count is the batch size over this."""


class Status(Enum):
    """The way a run ended, in words that follow "the run"."""

    FINISHED = "made all its planned steps"
    STOPPED = "stopped before all its planned steps were made"
    DIVERGED = "was ended because its loss diverged, and exported no model"
    UNFINISHED = "has not finished: its folder has no summary.json"


class Search(NamedTuple):
    """The search that a run belongs to: its epsilon, None if the choice is covered by nothing.

    ``chose`` is True if it chose this run; ``runs`` are the names of all its runs, whose number is not public.
    """

    epsilon: float | None
    delta: float
    mean_runs: float
    chose: bool
    runs: frozenset[str] = frozenset()

    def sentence(self) -> str:
        """Return what the choice costs, without the number of runs or a score, which are not covered."""
        if not self.chose:
            return (
                f"One of the runs of fdp search, whose number was random (Poisson) with mean {self.mean_runs:g}, and "
                f"not the run that was chosen. The stated epsilon is that of its own steps. Whoever sees this model, "
                f"or this statement, besides the result of the search sees more than the guarantee of the search "
                f"covers."
            )
        said = f"Chosen by fdp search from a random (Poisson) number of runs with mean {self.mean_runs:g}. "
        if self.epsilon is None:
            return (
                said + "The choice used data and is covered by nothing: no epsilon can be stated for the chosen model."
            )
        return said + (
            f"The choice is paid for (Papernot and Steinke 2022, arXiv 2110.03620): the chosen model has epsilon "
            f"{shown_epsilon(self.epsilon)} at delta {shown_delta(self.delta)}, which takes the place of the epsilon "
            f"of one run."
        )


class RunFacts(NamedTuple):
    """The public facts of a run. ``before`` are the promises of the runs whose parameters it started from."""

    name: str
    status: Status
    promise: Guarantee
    before: tuple[Guarantee, ...]
    settings: dict[str, Any]
    config: dict[str, Any]
    steps_made: int | None
    epsilon_as_made: float | None
    evaluation_costs: frozenset[str]
    search: Search | None = None

    @property
    def private(self) -> bool:
        """True if the run promises anything."""
        return self.promise.private

    @property
    def chosen(self) -> Guarantee:
        """The promise, with the price of the choice if a search chose the run."""
        return self.priced if self.search is not None and self.search.chose else self.promise

    @property
    def chain(self) -> Chain:
        """The promise about the parameters in the folder, which earlier runs and a search are part of."""
        return compose_chain(self.before, self.chosen, extends=self.settings.get("extend") is not None)

    @property
    def total(self) -> Guarantee:
        """The promise that is stated first: that of the model, not of the steps of this run."""
        return self.chain.total

    @property
    def priced(self) -> Guarantee:
        """The promise with the price of the search, if the run is one of a search: of that, only epsilon is known.

        A run that goes on from here inherits it, also from a run that was not chosen: the search was seen.
        """
        if self.search is None:
            return self.promise
        epsilon = self.search.epsilon
        terms = (None, None, None) if epsilon is None else (epsilon, self.search.delta, self.promise.relation)
        return self.promise._replace(epsilon=terms[0], delta=terms[1], relation=terms[2], releases=None)

    @property
    def unit_note(self) -> str:
        """The meaning of the unit for a person or a longer text."""
        return unit_note(self.promise.unit)

    @property
    def seeded(self) -> bool:
        """True if the noise comes from a seed that was given."""
        return self.settings.get("seed") is not None


def read_facts(run: RunFolder) -> RunFacts:
    """Return the public facts of a run, also of one that an older fdp made or that did not finish."""
    promises = read_marker(run.path) or _rebuild(run)
    *before, promise = promises
    summary, search, folder = run.summary or {}, _read_search(run), run.path.resolve()
    return RunFacts(
        # The number of the chosen run would tell how many runs the search made at least.
        name=folder.parent.name if search is not None and search.chose else folder.name,
        status=_status(run),
        promise=promise,
        before=tuple(before),
        settings=run.settings,
        config=run.config,
        steps_made=summary.get("steps"),
        epsilon_as_made=summary.get("epsilon_if_stop_was_decided_in_advance"),
        evaluation_costs=frozenset(record.evaluation.cost for record in run.records if record.evaluation is not None),
        search=search,
    )


def unit_note(one: str) -> str:
    """Return what a unit, such as "one record (its first 128 tokens)", means for a person."""
    kinds = {
        "one window": UnitKind.WINDOW,
        "one record": UnitKind.RECORD,
        "one file": UnitKind.FILE,
        "one user": UnitKind.USER,
        "one packed row": UnitKind.ROW,
        "one labelled image": UnitKind.IMAGE,
    }
    found = next((kind for start, kind in kinds.items() if one.startswith(start)), UnitKind.SAMPLE)
    note = privacy_unit(found, windows=1, which=A_FOLDER if A_FOLDER in one else "").note
    return f"{note}; the public data is not protected" if one.endswith("of the private data") else note


def _read_search(run: RunFolder) -> Search | None:
    """Return the search that the run is one of, from ``search.json`` in the folder above."""
    folder, name = run.path.resolve().parent, run.path.resolve().name
    if not (folder / SEARCH_RESULT).is_file():
        return None
    found = json.loads((folder / SEARCH_RESULT).read_text())
    names = {Path(trial["folder"]).name for trial in found["trials"]}
    if name not in names:
        return None
    best = None if found["best"] is None else Path(found["best"]["folder"]).name
    runs = frozenset(one.run for each in names for one in read_marker(folder / each)[-1:] if one.run is not None)
    return Search(found["epsilon"], found["delta"], found["trials_mean"], name == best, runs)


def _status(run: RunFolder) -> Status:
    if run.summary is None:
        return Status.UNFINISHED
    if run.summary.get("diverged"):
        return Status.DIVERGED
    return Status.FINISHED if run.summary["steps"] >= run.summary["steps_planned"] else Status.STOPPED


def _rebuild(run: RunFolder) -> tuple[Guarantee, ...]:
    """Return the promises of a run of an older fdp, which wrote no file of them."""
    if run.summary is None:
        raise FdpError(
            f"{run.path}: expected the promise of the run in {MARKER}, or a summary.json, got neither: an older fdp "
            f"made it and it did not finish. Finish it with the command that began it"
        )
    config, summary = run.config, run.summary
    before = tuple(Guarantee(**one) for one in summary.get("trained_before", ()))
    if summary["epsilon"] is None:
        return (*before, Guarantee(None, None, None, summary["unit"]))
    steps, z = summary["steps_planned"], config["noise_multiplier"]
    if run.settings["clip"] == "quantile":
        z = (z**-2 + (2 * run.settings["batch_size"] / COUNT_NOISE_SHARE) ** -2) ** -0.5
    releases = [Release(GRADIENTS, config["sampling_rate"], z, steps)]
    if (more := config.get("statistics")) is not None:
        period = int(more["period"])
        releases.append(
            Release(STATISTICS, more["sampling_rate"], more["noise_multiplier"], -(-steps // period), period)
        )
    promise = Guarantee(summary["epsilon"], summary["delta"], RELATION, summary["unit"], tuple(releases), steps)
    return (*before, promise._replace(fdp=config["versions"]["fdp"], accountant="PLD"))
