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
from fdp.privacy.chain import Chain, compose_chain
from fdp.privacy.guarantee import MARKER, Guarantee, marker_text, promise_about, read_marker
from fdp.privacy.releases import EVALUATIONS, Release
from fdp.privacy.several_runs import (
    choices_sentence,
    compose,
    count_choices,
    releases_the_same,
    same_data,
    training_again,
)
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.report.search_price import Search, find_search, model_chain, price_promises
from fdp.run.evaluation import Evaluator
from fdp.run.evaluation_config import Cost
from fdp.run.prepare_run import Run
from fdp.run.step_metrics import guarantee_of
from fdp.run.step_record import StepRecord
from fdp.storage.private_files import disk_errors, write_private
from fdp.types import TrainState

THIS_RUN, SEARCH = "this run", "this search"


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
        self._begun, self._how, self._what = 0, None, THIS_RUN

    def warnings(self) -> list[str]:
        """Return what this run, the model and everything on the same data spend, a line each, if they differ."""
        model, others, now = _model_line(self._chain(), self._what), self.others(), self.promise
        found = others if model is None else [model, *others]
        if not found or now.epsilon is None:
            return found
        alone = "" if self._what == SEARCH else ", of its own steps alone"
        own = f"{self._what}: epsilon {shown_epsilon(now.epsilon)} at delta {shown_delta(now.delta or 0)}{alone}"
        return [own, *found]

    def others(self) -> list[str]:
        """Return what was spent beside the model: on the same data, and by earlier runs that it leaves out."""
        chain, found = self._chain(), [] if self.total is None else self.total.sentences()
        found += [] if self.evaluation_total is None else self.evaluation_total.sentences("the evaluation data")
        left_out = [one for one in chain.left_out if not same_data(one, self.promise)]
        found += [] if (again := training_again(left_out, self.promise)) is None else [again]
        if self.total is None and (choices := choices_sentence(count_choices(chain.earlier))):
            found.append(choices)
        return found

    def at_price(self, price: Search) -> Account:
        """Return the account of a whole search, to look at: this run has the price of the search."""
        totals = (self.total, self.evaluation_total)
        promise = price.price(self.promise)
        mine, held_out = (None if one is None else one.at(promise) for one in totals)
        found = Account(self._options, self._run, self._folder, promise, totals=(mine, held_out), book=None)
        found._what = SEARCH
        return found

    def summary(self) -> dict[str, Any]:
        """Return what ``summary.json`` says of the model, and of all runs on the same data.

        Guarantees:
          - a run of a search states no total until the search ends (:mod:`fdp.cli.search_summary`).
        """
        chain = model_chain(self._folder, self.promises, extends=self._extends)
        of_model = {"run": self.promise.run} | epsilon_of_model(chain) | self._before()
        if (search := find_search(self._folder)) is not None:
            return of_model | {"warning": search.sentence()}
        on_data = {}
        for where, found in (("this_data", self.total), ("evaluation_data", self.evaluation_total)):
            if found is not None and found.total is not None:
                on_data |= {f"epsilon_on_{where}": found.total[0], f"delta_on_{where}": found.total[1]}
        extended = compose(self.promises) if self._extends else None
        of_both = {} if extended is None else {"epsilon_total": extended[0], "delta_total": extended[1]}
        said = " ".join(f"{each[0].upper()}{each[1:]}." for each in self.warnings())
        return of_model | of_both | on_data | ({"warning": said} if said else {})

    def _before(self) -> dict[str, Any]:
        """Return the total with the runs before this one; unlike the run, the account knows the noised evaluations."""
        if not self._run.config.before:
            return {}
        epsilon, delta = compose(price_promises(self._folder, self.promises)) or (None, None)
        return {"epsilon_if_on_the_same_data_before": epsilon, "delta_if_on_the_same_data_before": delta}

    @property
    def _extends(self) -> bool:
        return self._options.ledger.extend is not None

    def _chain(self) -> Chain:
        return compose_chain(self._run.config.before, self.promise, extends=self._extends)

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
            search = find_search(self._folder)
            self._book.start(self.promise, folder=self._folder, search=search and search.name)
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


def epsilon_of_model(chain: Chain) -> dict[str, float | None]:
    """Return epsilon and delta of the model for ``summary.json``; None if no epsilon can be stated for it."""
    return {"epsilon_of_model": chain.total.epsilon, "delta_of_model": chain.total.delta}


def _model_line(chain: Chain, what: str) -> str | None:
    """Return the epsilon of a model that earlier runs trained too; None if this run alone trained it."""
    if not (count := len(chain.earlier)):
        return None
    earlier = f"{count} earlier run{'s' * (count > 1)} whose parameters it starts from"
    assumed = ", if on the same people" if chain.assumed else ""
    if chain.total.epsilon is None:
        return f"this model: no epsilon can be stated, since {earlier} used the same data without privacy"
    return (
        f"this model: epsilon {shown_epsilon(chain.total.epsilon)} at delta {shown_delta(chain.total.delta or 0)}, of "
        f"{what} and {earlier}{assumed}"
    )


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
    search = find_search(folder)
    choice = _held_out_choice(run, search)
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
        None
        if one is None
        else total_on_same_data(one, recorded, before=run.config.before, search=search and search.name)
        for one in (promise, held_out)
    )
    return promise, (totals[0], totals[1]), book


def _held_out_choice(run: Run, search: Search | None) -> bool:
    """Return True if the loss of held-out samples, without noise, decides what is exported: a step, or a run."""
    config = run.config.evaluation
    if config is None or config.cost is not Cost.OUTSIDE:
        return False
    return config.keep_best or config.patience is not None or search is not None


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
