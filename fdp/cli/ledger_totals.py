"""The total of the runs on the same data, as ``fdp ledger`` states it, with searches at their price.

A run of a search counts twice over, and the larger total is stated:

    by its own noise      every run that was made: for whoever sees all of them, and how many they were
    at the price          one run, of which only epsilon and delta of the search are known: what ``fdp statement`` says
                          of the model that was chosen, for whoever does not know the number of runs

Both are upper bounds. The first follows from the number of runs that happened to be drawn; the guarantee of the search
holds for all numbers, and needs that this one stays secret.

    >>> searches = find_searches(entries)
    >>> total_in_words(total_of(group, searches))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fdp.data.nouns import count
from fdp.ledger.book import Entry
from fdp.privacy.guarantee import Guarantee
from fdp.privacy.several_runs import (
    choices_sentence,
    compose,
    composition_note,
    count_choices,
    runs_that_share_noise,
    shared_noise_sentence,
    unit_kind,
)
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.report.search_price import Search, find_search, own_promises
from fdp.types import FdpError

Total = tuple[float, float]


class KnownSearch(NamedTuple):
    """A search that runs of the ledger belong to, the same for all of them; ``terms`` is None if its folder is gone."""

    folder: Path
    name: str
    terms: Search | None

    def without_total(self) -> str:
        """Return why no total can be stated for a model of this search; empty if one can."""
        if self.terms is None:
            return f'the folder of the search "{self.name}" is gone, and with it the price of the choice'
        if not self.terms.ended:
            return (
                f'the search "{self.name}" has not ended, or was interrupted: its search.json says what it spent with '
                f"the runs that were drawn and did not begin"
            )
        if self.terms.epsilon is None:
            return f'the choice of the search "{self.name}" used data and is covered by nothing'
        return ""


def find_searches(entries: Iterable[Entry]) -> dict[str, KnownSearch]:
    """Return the search of every run that is one of a search, by the name of the run."""
    found: dict[str, KnownSearch] = {}
    for entry in entries:
        if entry.promise.run is None:
            continue
        folder = Path(entry.folder)
        terms = _terms_of(folder, entry.promise.run)
        if terms is not None or entry.search is not None:
            alike = None if terms is None else terms._replace(chose=False, runs=frozenset())
            found[entry.promise.run] = KnownSearch(folder.parent, entry.search or folder.parent.name, alike)
    return found


def total_of(group: Sequence[Entry], searches: Mapping[str, KnownSearch]) -> dict[str, Any]:
    """Return the total of a group of runs on the same data, for ``--json`` and :func:`total_in_words`.

    Guarantees:
      - with a search on this data, epsilon is at least what the statement of its chosen run says of all runs together;
      - it is None if no epsilon can be stated for a model of a search on this data.
    """
    units = list(dict.fromkeys(entry.promise.unit for entry in group if entry.promise.private))
    began = [entry.promise for entry in group if entry.began]
    counted = [promise for promise in began if promise.private]
    every_run = (compose(counted) if counted else None) or (0.0, 0.0)
    by_search = _runs_by_search(counted, searches)
    found: dict[str, Any] = {
        "data": short_fingerprint(group[0].promise),
        "unit": units[0] if len(units) == 1 else unit_kind(units[0]),
        "relation": group[0].promise.relation,
        "runs": len(counted),
        "epsilon": every_run[0],
        "delta": every_run[1],
        "not_private": len(began) - len(counted),
        "choices_by_held_out_samples": count_choices(began),
        "runs_that_share_noise": runs_that_share_noise(began),
        "note": composition_note(counted),
    }
    return found | (_with_searches(counted, by_search, every_run) if by_search else {})


def total_in_words(total: Mapping[str, Any]) -> str:
    """Return the line of a total: what is known of searches comes before a number that leaves it out."""
    runs = count(total["runs"], "run")
    searches = total.get("searches", [])
    if total["epsilon"] is None:
        why = "; ".join(dict.fromkeys(each["no_total"] for each in searches if each["no_total"]))
        said = (
            f"no total can be stated for whoever sees a model of a search: {why}. {runs} by their own noise, without "
            f"the choice: epsilon {_shown(total, '_of_every_run')} ({total['relation']})"
        )
    else:
        said = f"{runs}, together epsilon {_shown(total)} ({total['relation']})"
        said += "".join(f"; {each}" for each in (*_search_clauses(total), total["note"]) if each)
    return (
        f"data {total['data']}, {total['unit']}: {said}"
        + (f"; besides {count(more, 'run')} without privacy" if (more := total["not_private"]) else "")
        + (f"; {choices}" if (choices := choices_sentence(total["choices_by_held_out_samples"])) else "")
        + (f"; {shared}" if (shared := shared_noise_sentence(total["runs_that_share_noise"])) else "")
    )


def short_fingerprint(promise: Guarantee) -> str:
    """Return enough of a fingerprint to tell data sets of one ledger apart: of the files, if it is known."""
    return promise.data[-1].split("-")[-1][:8] if promise.data else "unknown"


def _terms_of(folder: Path, run: str) -> Search | None:
    """Return the search that the run in a folder is of; None if it is of none, or the folder holds another run."""
    try:
        there = own_promises(folder)
        return None if there and there[-1].run != run else find_search(folder)
    except (OSError, ValueError, KeyError, TypeError, FdpError):
        return None


def _runs_by_search(
    counted: Sequence[Guarantee], searches: Mapping[str, KnownSearch]
) -> dict[KnownSearch, list[Guarantee]]:
    found: dict[KnownSearch, list[Guarantee]] = {}
    for promise in counted:
        if (search := searches.get(promise.run or "")) is not None:
            found.setdefault(search, []).append(promise)
    return found


def _with_searches(
    counted: Sequence[Guarantee], by_search: Mapping[KnownSearch, list[Guarantee]], every_run: Total
) -> dict[str, Any]:
    """Return the entries of a total that depend on searches; they replace those without."""
    open_ones = any(search.without_total() for search in by_search)
    at_price = [] if open_ones else _at_price(counted, by_search, by_search)
    priced = _total(at_price) if at_price else None
    # A statement has the search of its own run at the price, and the runs of other searches by their own noise.
    stated = [] if open_ones else [_total(_at_price(counted, by_search, [search])) for search in by_search]
    largest = None if priced is None else max([every_run, priced, *stated])
    rows = [
        {
            "search": search.name,
            "folder": str(search.folder),
            "runs": len(runs),
            "epsilon": search.terms and search.terms.epsilon,
            "delta": search.terms and search.terms.delta,
            "no_total": search.without_total(),
        }
        for search, runs in by_search.items()
    ]
    return {
        "epsilon": largest and largest[0],
        "delta": largest and largest[1],
        "epsilon_of_every_run": every_run[0],
        "delta_of_every_run": every_run[1],
        "epsilon_with_chosen_models": priced and priced[0],
        "delta_with_chosen_models": priced and priced[1],
        "searches": rows,
        "note": composition_note(counted if largest == every_run else at_price),
    }


def _at_price(
    counted: Sequence[Guarantee], by_search: Mapping[KnownSearch, list[Guarantee]], at_price: Iterable[KnownSearch]
) -> list[Guarantee]:
    """Return the runs with one at the price of each of the searches ``at_price``, without its other runs."""
    others, priced = list(counted), []
    for search in at_price:
        runs = by_search[search]
        assert search.terms is not None
        others = [one for one in others if one not in runs]
        priced.append(search.terms.price(runs[0]))
    return [*others, *priced]


def _total(promises: Sequence[Guarantee]) -> Total:
    total = compose(promises)
    assert total is not None, "all of them are private"
    return total


def _search_clauses(total: Mapping[str, Any]) -> list[str]:
    """Return how a total counts searches, and the one that the statement states if that is less."""
    searches = total.get("searches", [])
    if not searches:
        return []
    names = " and ".join(f'{count(each["runs"], "run")} of the search "{each["search"]}"' for each in searches)
    if total["epsilon"] <= total["epsilon_with_chosen_models"]:
        prices = " and ".join(f"epsilon {_shown(each)}" for each in searches)
        if len(searches) > 1:
            return [f"{names} counted at the price of each search, {prices}: the statement of no chosen model has more"]
        return [f"{names} counted at the price of the search, {prices}, as in the statement of the model that it chose"]
    return [
        f"for whoever sees every run, {names} among them. For whoever sees of a search only the model that it chose: "
        f"epsilon {_shown(total, '_with_chosen_models')}, as in the statement of that model"
    ]


def _shown(total: Mapping[str, Any], which: str = "") -> str:
    return f"{shown_epsilon(total[f'epsilon{which}'])} at delta {shown_delta(total[f'delta{which}'])}"
