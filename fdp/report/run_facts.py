"""The privacy of a run as its folder tells it, in public facts only.

Nothing here is computed on private data: no loss, no count of samples, no path of data, no seed.

A run of ``fdp search`` has the price of the search. ``search.json`` in the folder above says what that is; the markers
of the run repeat it, for a copy of its folder or of its model:

    RUN/fdp_privacy.json          "runs" at that price; "search": its terms, and the promise of this run alone
    RUN/model/fdp_privacy.json    "runs" at that price

    >>> facts = read_facts(read_run_folder(Path("runs/notes")))
    >>> facts.promise.epsilon, facts.status
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from fdp.data.units import A_FOLDER, UnitKind, privacy_unit
from fdp.privacy.chain import Chain, compose_chain
from fdp.privacy.clipping import COUNT_NOISE_SHARE
from fdp.privacy.guarantee import (
    MARKER,
    RELATION,
    Guarantee,
    guarantee_from_json,
    guarantee_to_json,
    marker_text,
    read_marker,
)
from fdp.privacy.releases import GRADIENTS, STATISTICS, Release
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.run.run_folder import SEARCH_RESULT, RunFolder
from fdp.storage.private_files import disk_errors, write_private
from fdp.types import FdpError

TRIAL = "trial-"
"""The start of the name of a folder of a run of fdp search, before its number."""


class Status(Enum):
    """The way a run ended, in words that follow "the run"."""

    FINISHED = "made all its planned steps"
    STOPPED = "stopped before all its planned steps were made"
    DIVERGED = "was ended because its loss diverged, and exported no model"
    UNFINISHED = "has not finished: its folder has no summary.json"


class Search(NamedTuple):
    """The search that a run belongs to: its epsilon, None if the choice is covered by nothing.

    ``ended`` is False if not all of its runs were made. ``chose`` is True if it chose this run, or did not end: then
    whoever saw the scores may have chosen it. ``runs`` are the names of all its runs, whose number is not public, as
    far as they are known. ``name`` is that of its folder.
    """

    epsilon: float | None
    delta: float
    mean_runs: float
    chose: bool
    runs: frozenset[str] = frozenset()
    ended: bool = True
    name: str = ""

    def price(self, promise: Guarantee) -> Guarantee:
        """Return the promise of a run at the price of the search, of which only epsilon and delta are known.

        Guarantees:
          - if no epsilon of the search is known, the run promises nothing.
        """
        if self.epsilon is None:
            return promise._replace(epsilon=None, delta=None, relation=None, releases=None, accountant=None)
        return promise._replace(
            epsilon=self.epsilon,
            delta=self.delta,
            relation=promise.relation or RELATION,  # a marker that was written while the search ran has none
            releases=None,  # those of one run: the choice among runs composes by its epsilon alone
            accountant="rdp, best of a Poisson number of runs",
        )

    def sentence(self) -> str:
        """Return what the choice costs, without the number of runs or a score, which are not covered."""
        if not self.ended:
            return (
                f"One of the runs of fdp search, whose number was random (Poisson) with mean {self.mean_runs:g}. The "
                f"search has not ended, or was interrupted: its epsilon holds only if every run that was drawn is "
                f"made. Whoever saw the scores may have chosen this run by them, and that choice is covered by "
                f"nothing: no epsilon can be stated for the model."
            )
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
        """The promise at the price of the search, if the run is one of a search.

        A run that goes on from here inherits it, also from a run that was not chosen: the search was seen.
        """
        return self.promise if self.search is None else self.search.price(self.promise)

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
    *before, promise = _own_promises(run.path) or _rebuild(run)
    summary, search = run.summary or {}, find_search(run.path)
    return RunFacts(
        # The number of the chosen run would tell how many runs the search made at least.
        name=search.name if search is not None and search.chose else run.path.resolve().name,
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


def find_search(run: Path) -> Search | None:
    """Return the search that the run in a folder is one of; None if it is of none.

    ``search.json`` in the folder above says it; of a copy of the folder, the marker does.
    """
    if (found := _read_search(run)) is not None or (stored := _stored_search(run)) is None:
        return found
    return Search(**{key: value for key, value in stored.items() if key != "alone"})


def price_promises(run: Path, promises: Sequence[Guarantee]) -> tuple[Guarantee, ...]:
    """Return the promises about the model of the run in a folder, its own at the price of the search it is one of."""
    if not promises or (search := find_search(run)) is None:
        return tuple(promises)
    return (*promises[:-1], search.price(promises[-1]))


def write_price(run: Path) -> None:
    """Write the price that ``search.json`` says into the markers of a run of the search, if it has markers.

    Guarantees:
      - a copy of the run, or of its model, has the price that the run has in its place;
      - a marker does not hold the number of runs, or a score;
      - a marker is replaced at once, or stays as it was.
    """
    search, promises = _read_search(run), _own_promises(run)
    if search is None or not promises:
        return
    *before, alone = promises
    priced = marker_text([*before, search.price(alone)])
    # If a run that did not finish is started again, the ledger knows it by the releases in its promise.
    shown = priced if (run / "summary.json").is_file() else marker_text(promises)
    terms = {key: value for key, value in search._asdict().items() if key != "runs"}
    stored = json.loads(shown) | {"search": terms | {"alone": guarantee_to_json(alone)}}
    with disk_errors(run / MARKER):
        write_private(run / MARKER, json.dumps(stored, indent=2, allow_nan=False) + "\n")
        if (exported := run / "model" / MARKER).is_file():
            partial = exported.with_name(f".{MARKER}.partial")
            partial.write_text(priced)
            partial.replace(exported)


def _own_promises(run: Path) -> tuple[Guarantee, ...]:
    """Return the promises in the marker of a run; its own is that of its steps, without the price of a search."""
    promises, stored = read_marker(run), _stored_search(run)
    return promises if stored is None else (*promises[:-1], guarantee_from_json(stored["alone"]))


def _stored_search(run: Path) -> dict[str, Any] | None:
    """Return the terms of the search that :func:`write_price` wrote into the marker of a run; None without them."""
    path = run / MARKER
    return json.loads(path.read_text()).get("search") if path.is_file() else None


def _read_search(run: Path) -> Search | None:
    """Return the search that the run is one of, from ``search.json`` in the folder above.

    Until all runs are made, its ``exit_code`` is None; if a signal ended it, that of the signal.
    """
    folder, name = run.resolve().parent, run.resolve().name
    # A run that is of no search does not depend on what else is in the folder above.
    if not name.startswith(TRIAL) or not (folder / SEARCH_RESULT).is_file():
        return None
    found = json.loads((folder / SEARCH_RESULT).read_text())
    names = {Path(trial["folder"]).name for trial in found["trials"]}
    if name not in names:
        return None
    best, ended = found["best"], found.get("exit_code", 0) == 0
    chose = not ended or (best is not None and name == Path(best["folder"]).name)
    runs = frozenset(one.run for each in names for one in read_marker(folder / each)[-1:] if one.run is not None)
    epsilon = found["epsilon"] if ended else None
    return Search(epsilon, found["delta"], found["trials_mean"], chose, runs, ended, folder.name)


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
