"""The price of a search: what its choice costs each of its runs, and the markers that say so.

``search.json``, in the folder above a run of ``fdp search``, says what the price is; the markers of the run repeat it,
for a copy of its folder or of its model:

    RUN/fdp_privacy.json          "runs" at that price; "search": its terms, and the promise of this run alone
    RUN/model/fdp_privacy.json    "runs" at that price

    >>> write_price(Path("runs/search/trial-2"))
    >>> find_search(Path("runs/copy")).epsilon
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fdp.privacy.chain import Chain, compose_chain
from fdp.privacy.guarantee import (
    MARKER,
    RELATION,
    Guarantee,
    guarantee_from_json,
    guarantee_to_json,
    marker_text,
    read_marker,
)
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.run.run_folder import SEARCH_RESULT
from fdp.storage.private_files import disk_errors, write_private

TRIAL = "trial-"
"""The start of the name of a folder of a run of fdp search, before its number."""


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


def model_chain(run: Path, promises: Sequence[Guarantee], *, extends: bool) -> Chain:
    """Return the promise about the model of a run: of all runs that trained it, at the price of a search it is one of.

    ``promises`` are those of the runs in order, its own last.
    """
    *before, last = price_promises(run, promises)
    return compose_chain(tuple(before), last, extends=extends)


def write_price(run: Path) -> None:
    """Write the price that ``search.json`` says into the markers of a run of the search, if it has markers.

    Guarantees:
      - a copy of the run, or of its model, has the price that the run has in its place;
      - a marker does not hold the number of runs, or a score;
      - a marker is replaced at once, or stays as it was.
    """
    search, promises = _read_search(run), own_promises(run)
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


def own_promises(run: Path) -> tuple[Guarantee, ...]:
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
