"""The record of what a run spends: in the ledger of the data's owner, and beside the model.

    DIR/fdp_privacy.json     the promises of all runs that trained the parameters, this one last, before its first step
    DIR/model/fdp_privacy.json                                                          the same, for a folder
    ledger.jsonl             the start of the run, before its first step, and how it ended (fdp.ledger.book)

Rank 0 reads and writes; all ranks hold the same promise.

    >>> account = open_account(options, run, folder)
    >>> with account: ...                                   # its end is recorded however the block ends
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from fdp.cli.configure_evaluation import DIGITS_TEST
from fdp.cli.formatting import package_version
from fdp.cli.train_options import TrainOptions
from fdp.data import datasets
from fdp.data.files import RecordForm, find_source
from fdp.ledger.book import LEDGER_FILE, Book, now
from fdp.ledger.data_key import VARIABLE, DataKey, check_writable, files_digest, ledger_folder, load_key
from fdp.ledger.totals import DataTotal, total_on_same_data
from fdp.parallel import launch
from fdp.parallel.agree import gather_values, run_in_unison
from fdp.privacy.guarantee import (
    MARKER,
    Guarantee,
    compose,
    marker_text,
    promise_about,
    read_marker,
    releases_the_same,
    same_data,
    training_again,
)
from fdp.privacy.releases import EVALUATIONS, Release
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.report.search_price import find_search
from fdp.run.evaluation import Evaluator
from fdp.run.evaluation_config import Cost
from fdp.run.step_metrics import StepRecord, guarantee_of
from fdp.run.training_run import Run
from fdp.storage.private_files import disk_errors, write_private
from fdp.types import TrainState


class Account:
    """The promise of a run, and its line in the ledger. ``book`` is None on other ranks than 0 and without a ledger."""

    def __init__(
        self,
        options: TrainOptions,
        run: Run,
        folder: Path,
        promise: Guarantee,
        *,
        totals: tuple[DataTotal | None, DataTotal | None],
        book: Book | None,
    ) -> None:
        self.promise, self.promises = promise, (*run.config.before, promise)
        (self.total, self.evaluation_total), self._book = totals, book
        self._options, self._run, self._folder = options, run, folder
        self._begun, self._how = 0, None

    def warnings(self) -> list[str]:
        """Return what was spent before on the same data, and by the model on other data."""
        found = []
        if (extended := self._extended()) is not None and self.promise.epsilon is not None:
            before = compose(self._run.config.before) or (0.0, 0.0)
            found.append(
                f"this run extends {self._options.ledger.extend}, which spent epsilon {shown_epsilon(before[0])} at "
                f"delta {shown_delta(before[1])}; with the {shown_epsilon(self.promise.epsilon)} of this run, together "
                f"epsilon {shown_epsilon(extended[0])} at delta {shown_delta(extended[1])}"
            )
        found += [] if self.total is None else [self.total.sentence()]
        found += [] if self.evaluation_total is None else [self.evaluation_total.sentence("the evaluation data")]
        others = [one for one in self._run.config.before if not same_data(one, self.promise)]
        if self._options.ledger.extend is not None and compose(others) is not None:
            others = []  # stated above, and the data is the same
        again = training_again(others, self.promise)
        return [*found, *([] if again is None else [again])]

    def summary(self) -> dict[str, Any]:
        """Return what ``summary.json`` says of all runs on the same data."""
        on_data = {}
        for where, found in (("this_data", self.total), ("evaluation_data", self.evaluation_total)):
            if found is not None and found.total is not None:
                on_data |= {f"epsilon_on_{where}": found.total[0], f"delta_on_{where}": found.total[1]}
        said, extended = self.warnings(), self._extended()
        of_both = {} if extended is None else {"epsilon_total": extended[0], "delta_total": extended[1]}
        return (
            {"run": self.promise.run}
            | self._before()
            | of_both
            | on_data
            | ({"warning": ". ".join(said)} if said else {})
        )

    def _before(self) -> dict[str, Any]:
        """Return the total with the runs before this one; unlike the run, the account knows the noised evaluations."""
        if not self._run.config.before:
            return {}
        epsilon, delta = compose(self.promises) or (None, None)
        return {"epsilon_if_on_the_same_data_before": epsilon, "delta_if_on_the_same_data_before": delta}

    def _extended(self) -> tuple[float, float] | None:
        """Return what the extended runs and this one spend together; None if this one extends none."""
        return compose(self.promises) if self._options.ledger.extend is not None else None

    def follow(
        self, stream: Iterable[tuple[TrainState, StepRecord]], *, done: int
    ) -> Iterator[tuple[TrainState, StepRecord]]:
        """Pass the stream on, and count the steps that were begun; ``done`` were made before."""
        steps = iter(stream)
        while True:
            self.begin(min(done + 1, self._run.config.steps))
            try:
                state, record = next(steps)
            except StopIteration:
                self._begun = done
                return
            done = record.step
            yield state, record

    def begin(self, step: int) -> None:
        """Count a step that is launched, perhaps before the record of the one before it is passed on."""
        self._begun = max(self._begun, step)

    def end_as(self, how: str) -> None:
        """Say how the run ends, if it does not finish."""
        self._how = how

    def resume_at(self, step: int) -> None:
        """Say how many steps were made before: they count, even if the run breaks off before it makes another."""
        self._begun = step

    def __enter__(self) -> Account:
        if self._book is not None:
            self._book.start(self.promise, folder=self._folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._book is None or self.promise.run is None:
            return
        planned = self._run.config.steps
        how = "finished" if self._begun >= planned else "interrupted"
        if kind is not None:
            how = "interrupted" if issubclass(kind, KeyboardInterrupt | SystemExit) else "failed"
        self._book.end(self.promise.run, steps=self._begun, how=self._how or how)


def check_ledger(options: TrainOptions) -> None:
    """Raise if the ledger is damaged, its key lost, or its folder read-only: before anything is written or spent."""
    if (place := _ledger_folder(options)) is None:
        return
    check_writable(place)
    if (place / LEDGER_FILE).exists():
        Book(place, load_key(place, create=False)).runs()


def open_account(
    options: TrainOptions,
    run: Run,
    folder: Path,
    evaluator: Evaluator | None = None,
    *,
    goes_on: bool = True,
    write: bool = True,
) -> Account:
    """Return the account of a run, and write its promise into its folder; every rank calls it.

    ``goes_on`` is False if an earlier attempt in the folder drew noise of its own, from a key that is lost. If not
    ``write``, the account is only to look at: nothing is written, and the folder need not exist.

    Guarantees:
      - attempts with the same data, releases and noise are one run in the ledger; any other attempts are several.
    """
    first, evaluations = launch.rank() == 0, _evaluations(evaluator)
    opened = run_in_unison(lambda: _open(options, run, folder, evaluations, goes_on, write) if first else None, None)
    promise, totals = gather_values(opened and opened[:2], None)[0] or (guarantee_of(run), (None, None))
    return Account(options, run, folder, promise, totals=totals, book=opened and opened[2])


def data_fingerprints(key: DataKey, data: str, digest: str | None = None) -> tuple[str, ...]:
    """Return the keyed fingerprints of ``--data``: of its samples, by their ``digest``, and of its files."""
    samples = () if digest is None else (key.fingerprint("samples", digest),)
    if data in datasets.NAMES:
        return (*samples, key.fingerprint("name", data))
    if not Path(data).exists():
        return samples
    return (*samples, key.fingerprint("files", files_digest(find_source(data, form=RecordForm.FILE).files)))


def _evaluations(evaluator: Evaluator | None) -> tuple[Release, ...]:
    """Return the evaluations that a run releases with noise, about samples that it holds out."""
    if evaluator is None or (release := evaluator.release) is None:
        return ()
    return (Release(EVALUATIONS, 1.0, release.noise_multiplier, len(release.planned)),)


def _open(
    options: TrainOptions, run: Run, folder: Path, evaluations: tuple[Release, ...], goes_on: bool, write: bool
) -> tuple[Guarantee, tuple[DataTotal | None, DataTotal | None], Book | None]:
    place = _ledger_folder(options)
    if place is not None and not write and not (place / LEDGER_FILE).exists():
        place = None  # a key would be drawn, and written
    key = None if place is None else load_key(place)
    book = None if place is None or key is None else Book(place, key)
    recorded = [] if book is None else book.runs()  # a damaged ledger is an error before anything is spent
    choice = _held_out_choice(run, folder)
    promise = guarantee_of(run)._replace(
        run=secrets.token_hex(8),
        data=() if key is None else data_fingerprints(key, options.data.data, run.data_digest),
        date=now(),
        fdp=package_version("fdp"),
        evaluations=evaluations,
        evaluated=() if key is None or not (evaluations or choice) else _evaluated(key, options, run),
        accountant=f"PLD, dp-accounting {package_version('dp-accounting')}" if run.epsilons is not None else None,
        noise=None if key is None else key.fingerprint("noise", f"{run.key.tolist()}{run.stages.rounded}"),
        held_out_choice=choice,
    )
    earlier = _earlier_promise(folder, run) if goes_on else None
    if earlier is not None and releases_the_same(earlier, promise):
        promise = promise._replace(run=earlier.run, date=earlier.date)
    if write:
        with disk_errors(folder / MARKER):
            write_private(folder / MARKER, marker_text([*run.config.before, promise]))
    held_out = promise_about(promise, promise.evaluated) if evaluations else None
    totals = tuple(
        None if one is None else total_on_same_data(one, recorded, before=run.config.before)
        for one in (promise, held_out)
    )
    return promise, (totals[0], totals[1]), book


def _held_out_choice(run: Run, folder: Path) -> bool:
    """Return True if the loss of held-out samples, without noise, decides what is exported: a step, or a run."""
    config = run.config.evaluation
    if config is None or config.cost is not Cost.OUTSIDE:
        return False
    return config.keep_best or config.patience is not None or find_search(folder) is not None


def _evaluated(key: DataKey, options: TrainOptions, run: Run) -> tuple[str, ...]:
    """Return the fingerprints of ``--eval-data``; none if a part of ``--data`` is held out."""
    source, config = options.evaluation.eval_data, run.config.evaluation
    return () if source is None or config is None else data_fingerprints(key, source, config.digest)


def _ledger_folder(options: TrainOptions) -> Path | None:
    """Return the folder of the ledger; None if there is none, as by default for data that comes with fdp."""
    unnamed = options.ledger.ledger is None and VARIABLE not in os.environ
    given = options.evaluation
    used = given.eval_epsilon is not None or given.keep_best or given.patience is not None
    held_out = given.eval_data if used and not given.eval_public else None
    public = {options.data.data, held_out} <= {None, DIGITS_TEST, *datasets.NAMES}
    return None if unnamed and public else ledger_folder(options.ledger.ledger)


def _earlier_promise(folder: Path, run: Run) -> Guarantee | None:
    """Return the promise that the run made before it was interrupted; None if it is new."""
    found = read_marker(folder)
    return found[-1] if len(found) == len(run.config.before) + 1 else None
