"""The runs beside the one of a statement: those it started from, and all others on the same data, composed.

>>> totals = compose_others(facts, others, ledger_read=True)
>>> others_section(totals)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fdp.data.nouns import count
from fdp.privacy.guarantee import Guarantee, promise_about
from fdp.privacy.several_runs import (
    choices_sentence,
    compose,
    composition_note,
    count_choices,
    linked_data,
    runs_that_share_noise,
    same_data,
    same_unit,
    searches_sentence,
    shared_noise_sentence,
)
from fdp.privacy.shown_numbers import shown_delta
from fdp.report.documents import Section
from fdp.report.privacy_numbers import rounded_up
from fdp.report.run_facts import RunFacts

THEOREM = (
    "Runs are composed by their privacy loss distributions (Zhu, Dong, Wang 2022, arXiv 2106.08567, Theorem 10): the "
    "total holds if later runs depend in any way on the results of earlier ones, as long as the sampling rate, the "
    "noise multiplier and the number of steps of every run were fixed without looking at earlier results. If they "
    "were chosen after looking, the total describes the runs that were made, and the theorem does not cover the choice."
)
NOT_READ = (
    "The ledger of this run was not read, or it was recorded in none: there may be other runs on the same data, which "
    "are not counted here."
)

SEARCH_RUNS = (
    "The other runs of the search are left out here. The guarantee of the search is towards whoever sees its result "
    "and nothing else of it; the number of its runs is not covered, and is not stated. `fdp ledger` states the same "
    "total, or for the owner of the data, who sees every run of the search, a larger one."
)


def compose_beside_search(
    facts: RunFacts,
    others: Sequence[Guarantee],
    *,
    ledger_read: bool,
    links: Sequence[Guarantee] = (),
    searches: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return :func:`compose_others` with the run at the price of the search that chose it, without its other runs."""
    among = frozenset() if facts.search is None else facts.search.runs
    outside = [one for one in others if one.run not in among]
    priced = facts._replace(promise=facts.chosen)
    return compose_others(priced, outside, links=links, ledger_read=ledger_read, searches=searches)


def compose_others(
    facts: RunFacts,
    others: Sequence[Guarantee],
    *,
    ledger_read: bool,
    links: Sequence[Guarantee] = (),
    searches: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the composition with the runs before this one, and with all runs on the same data and unit.

    ``links`` are runs that tell which data is the same, and are not counted: they did not begin. ``searches`` names the
    search of a run, by the name of the run.

    Guarantees:
      - if the total on the data is stated, it holds every private run that the guarantee of the model holds.
    """
    promise = facts.promise
    differing = [one for one in facts.before if not same_unit(one, promise)]
    chain = compose([*facts.before, facts.chosen]) if facts.before and not differing else None
    listed = [one for one in (*facts.before, *others) if one.run != promise.run]
    data = linked_data(promise.data, [promise, *listed, *links])
    known = [about for one in listed if (about := promise_about(one, data)) is not None]
    private = [one for one in known if one.private]
    alike = [one for one in private if same_unit(one, promise)]
    assumed = [one for one in facts.chain.earlier if alike and one.private and not set(one.data) & data]
    counted = [*assumed, *alike, promise_about(promise, data) or promise]
    on_data = compose(counted) if alike else None
    return {
        "runs_before": len(facts.before),
        "same_data_before": bool(facts.before) and all(same_data(one, promise) for one in facts.before),
        "with_runs_before": chain and {"epsilon": chain[0], "delta": chain[1]},
        "runs_before_with_other_units": len(differing),
        "before_not_private": any(not one.private for one in facts.before),
        "other_runs_on_this_data": len({one.run for one in alike}),
        "assumed_on_this_data": len(assumed),
        "on_this_data": on_data and {"epsilon": on_data[0], "delta": on_data[1]},
        "note_on_this_data": composition_note(counted) if on_data else "",
        "searches_by_their_own_noise": list(
            dict.fromkeys(name for one in alike if (name := (searches or {}).get(one.run or "")) is not None)
        ),
        "other_units_on_this_data": len({one.run for one in private if not same_unit(one, promise)}),
        "not_private_on_this_data": len({one.run for one in known if not one.private}),
        "choices_by_held_out_samples": count_choices([*facts.before, *known]),
        "runs_that_share_noise": runs_that_share_noise([promise, *facts.before, *known]),
        "ledger_read": ledger_read,
    }


def others_section(totals: dict[str, Any]) -> Section:
    """Return the totals in words, and the theorem by which they are composed."""
    found = totals_in_words(totals)
    if not totals["ledger_read"]:
        found.append(NOT_READ)
    if not found:
        found = ["No other run on the same data is known. Other data may hold the same people: then the runs compose."]
    return Section("Other runs", (*found, THEOREM))


def totals_in_words(totals: dict[str, Any]) -> list[str]:
    """Return what is known of other runs, a paragraph for each; none if no other run is known."""
    found: list[str] = []
    if shared := shared_noise_sentence(totals["runs_that_share_noise"]):
        found.append(f"{shared[0].upper()}{shared[1:]}.")
    if before := totals["runs_before"]:
        where = "on the same data, by their fingerprint" if totals["same_data_before"] else "if on the same people"
        if totals["before_not_private"]:
            found.append(
                f"The first parameters came from {before} earlier run{'s' * (before > 1)}, not all of them private: "
                f"nothing is promised about the data of those."
            )
        elif other := totals["runs_before_with_other_units"]:
            found.append(
                f"The first parameters came from {before} earlier private run{'s' * (before > 1)}, of which {other} "
                f"protect{'s' * (other == 1)} another unit: their epsilons do not add up with that of this run."
            )
        elif (chain := totals["with_runs_before"]) is not None:
            found.append(
                f"The first parameters came from {before} earlier private run{'s' * (before > 1)}. All of them and "
                f"this run together, {where}: epsilon {rounded_up(chain['epsilon'], 4)} at delta "
                f"{shown_delta(chain['delta'])}."
            )
    if (on_data := totals["on_this_data"]) is not None:
        runs = count(totals["assumed_on_this_data"], "earlier run")
        assumed = f" and with {runs} assumed to be on the same data" if totals["assumed_on_this_data"] else ""
        found.append(
            f"The ledger of the data's owner, or the model, names "
            f"{count(totals['other_runs_on_this_data'], 'other private run')} on the same data with the same unit. For "
            f"whoever sees the results of all of them, together with this one{assumed}: epsilon "
            f"{rounded_up(on_data['epsilon'], 4)} at delta {shown_delta(on_data['delta'])}"
            f"{f' ({note})' if (note := totals['note_on_this_data']) else ''}."
        )
    elif others := totals["other_runs_on_this_data"]:
        found.append(
            f"The ledger of the data's owner, or the model, names {count(others, 'other private run')} on the same "
            f"data with the same unit. No total with {'it' if others == 1 else 'them'} can be stated, since no epsilon "
            f"can be stated for the model."
        )
    if searches := searches_sentence(totals["searches_by_their_own_noise"]):
        found.append(f"{searches[0].upper()}{searches[1:]}.")
    if other := totals["other_units_on_this_data"]:
        found.append(
            f"{count(other, 'other private run')} on the same data protect{'s' * (other == 1)} another unit: such "
            "epsilons do not add up."
        )
    if open_ones := totals["not_private_on_this_data"]:
        were = "was not private: its" if open_ones == 1 else "were not private: their"
        found.append(f"{count(open_ones, 'run')} on the same data {were} results should not be released.")
    if choices := choices_sentence(totals["choices_by_held_out_samples"]):
        found.append(f"{choices[0].upper()}{choices[1:]}.")
    return found
