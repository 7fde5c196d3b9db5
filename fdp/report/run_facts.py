"""The privacy of a run as its folder tells it, in public facts only.

Nothing here is computed on private data: no loss, no count of samples, no path of data, no seed. What is said of how
the run ended, and of samples that are both trained on and evaluated, is the exception, and the statement says so.

    >>> facts = read_facts(read_run_folder(Path("runs/notes")))
    >>> facts.promise.epsilon, facts.status
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from fdp.data.units import A_FOLDER, UnitKind, privacy_unit
from fdp.privacy.chain import Chain, compose_chain
from fdp.privacy.clipping import COUNT_NOISE_SHARE
from fdp.privacy.guarantee import MARKER, RELATION, Guarantee
from fdp.privacy.releases import GRADIENTS, STATISTICS, Release
from fdp.report.search_price import Search, find_search, own_promises
from fdp.run.run_folder import RunFolder
from fdp.types import FdpError


class Status(Enum):
    """The way a run ended, in words that follow "the run"."""

    FINISHED = "made all its planned steps"
    STOPPED = "stopped before all its planned steps were made"
    DIVERGED = "was ended because its loss diverged, and exported no model"
    UNFINISHED = "has not finished: its folder has no summary.json"


class RunFacts(NamedTuple):
    """The public facts of a run. ``before`` are the promises of the runs whose parameters it started from.

    ``evaluated_too`` is True if samples that are trained on are among those of the evaluations. It follows from the
    data, and is told all the same: without it the statement of the evaluations would not be true. ``file_digests`` are
    the SHA-256 of the files of parameters that the run exported, by name.
    """

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
    parameter_digest: str | None = None
    evaluated_too: bool = False
    file_digests: tuple[tuple[str, str], ...] = ()

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
    *before, promise = own_promises(run.path) or _rebuild(run)
    summary, search = run.summary or {}, find_search(run.path)
    evaluations = [record.evaluation for record in run.records if record.evaluation is not None]
    kept = run.settings.get("ema") is not None or bool(run.settings.get("keep_best"))  # others than the last ones
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
        evaluation_costs=frozenset(evaluation.cost for evaluation in evaluations),
        search=search,
        parameter_digest=None if kept else summary.get("parameter_sha256"),
        evaluated_too=any(evaluation.shared for evaluation in evaluations),
        file_digests=tuple(summary.get("file_sha256", {}).items()),
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
            f"{run.path}: expected the promise of the run in {MARKER}, or a summary.json, got neither: it ended before "
            f"its first step and spent nothing, so that you can train again with another --out; or an older fdp made "
            f"it, and the command that began it can finish it"
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
