"""The privacy statement of a run, for a review board or beside a published model.

It is made from public facts only (:mod:`fdp.report.run_facts`): it may be published. Every figure is an upper bound,
except where it says otherwise.

    >>> statement = make_statement(facts, tuning="none: the defaults", records_per_person=10)
    >>> as_text(statement.document), json.dumps(statement.facts)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fdp.privacy.curves import LARGEST_GROUP
from fdp.privacy.guarantee import LARGE_EPSILON, Guarantee, delta_advice, guarantee_to_json, held_out_epsilon
from fdp.privacy.shown_numbers import round_up, shown_epsilon
from fdp.report.checklists import ASK_TUNING, DPFY_ML, NIST, Item, dpfy_ml, nist_sp_800_226
from fdp.report.documents import Bullets, Document, Rows, Section
from fdp.report.headline import headline, held_out_choice
from fdp.report.mechanism_words import describe_mechanism
from fdp.report.other_runs import SEARCH_RUNS, THEOREM, compose_beside_search, others_section
from fdp.report.privacy_numbers import curve_section, groups_section, privacy_numbers
from fdp.report.run_facts import RunFacts, Status
from fdp.report.scope import SEEDED, covered, not_covered, scope_section
from fdp.types import FdpError

DEFINITION = (
    "A randomised algorithm M is (epsilon, delta)-differentially private if, for any two neighbouring data sets D and "
    "D' and any set S of results, P[M(D) in S] <= exp(epsilon) P[M(D') in S] + delta. In words: seeing the result "
    "changes anyone's odds that a given unit was in the data by at most a factor of exp(epsilon), whatever else they "
    "know. Smaller is stronger; delta is roughly the probability that the bound may fail."
)
NUMBER_LEFT_OUT = (
    "The statement does not say which run of the search it is: the number would tell how many runs there were at "
    "least, which is not covered."
)
PRICE = (
    "That is the account of one run. The epsilon of the search, which the guarantee states, follows from the Renyi "
    "differential privacy (RDP) of one run by Theorem 6 of Papernot and Steinke, and so is no sum of the table below."
)


class Statement(NamedTuple):
    """A statement: ``document`` to read, ``facts`` for programs."""

    document: Document
    facts: dict[str, Any]


def make_statement(
    facts: RunFacts,
    *,
    tuning: str | None = None,
    records_per_person: int | None = None,
    others: Sequence[Guarantee] = (),
    links: Sequence[Guarantee] = (),
    ledger_read: bool = True,
    searches: Mapping[str, str] | None = None,
) -> Statement:
    """Return the statement of a run; ``others`` are further runs of the ledger, ``links`` those that did not begin.

    ``searches`` names the search of a run, by the name of the run. ``ledger_read`` is False if they are not from the
    ledger in which the run was recorded: there may be more.
    """
    title = f"Privacy statement for {describe_run(facts)}"
    if not facts.private:
        return _not_private(facts, title)
    assert facts.promise.releases is not None, "read_facts rebuilds them for older runs"
    if records_per_person is not None and not 1 <= records_per_person <= LARGEST_GROUP:
        raise FdpError(
            f"--records-per-person: expected 1 to {LARGEST_GROUP}, got {records_per_person}; cap the records of a "
            f"person, or train with --unit user"
        )
    if tuning is None and facts.search is not None:
        tuning = facts.search.sentence()
    numbers = privacy_numbers(facts, records_per_person=records_per_person)
    totals = compose_beside_search(facts, others, links=links, ledger_read=ledger_read, searches=searches)
    lists = {DPFY_ML: dpfy_ml(facts, tuning=tuning), NIST: nist_sp_800_226(facts, tuning=tuning)}
    sections = (
        guarantee_section(facts),
        Section("Mechanism", (Bullets(describe_mechanism(facts)),)),
        _accounting_section(facts),
        scope_section(facts),
        Section("Hyper-parameters", (tuning or f"{ASK_TUNING} Choosing them on the private data costs privacy, too.",)),
        curve_section(facts, numbers),
        groups_section(facts, numbers),
        _others_section(facts, totals),
        *(_checklist_section(source, items) for source, items in lists.items()),
    )
    return Statement(
        Document(title, sections), _as_json(facts, numbers, totals, tuning) | {"checklists": _lists_json(lists)}
    )


def describe_run(facts: RunFacts) -> str:
    """Return which run a statement is about, without the number of a run that a search chose, or may have chosen."""
    search = facts.search
    if search is None:
        return f"the run {facts.name}"
    if not search.ended:
        return f'a run of the search "{search.name}", which has not ended, or was interrupted'
    if search.chose:
        return f'the run that the search "{search.name}" chose'
    return f'the run {facts.name} of the search "{search.name}", which did not choose it'


def _not_private(facts: RunFacts, title: str) -> Statement:
    said = (
        "This run is not differentially private: no noise was added. The model may reveal the data it was trained on, "
        "to whoever can query it. Nothing in this folder should leave the place where the data may be read.",
        f"The run {facts.status.value}.",
    )
    document = Document(title, (Section("No guarantee", said),))
    return Statement(document, {"run": facts.name, "private": False, "status": facts.status.value})


def guarantee_section(facts: RunFacts) -> Section:
    """Return the guarantee of the model of a private run in words: epsilon, delta, unit, neighbours, definition."""
    first, *more = headline(facts)
    released = (
        ""
        if facts.status is not Status.UNFINISHED
        else (
            "The run has not finished. This is the guarantee of all its planned steps; it also holds for the "
            "parameters after any step so far. "
        )
    )
    return Section(
        "Guarantee",
        (
            released + first,
            *more,
            *_held_out_sentence(facts.total),
            *(() if facts.search is None else (facts.search.sentence(),)),
            *((NUMBER_LEFT_OUT,) if facts.search is not None and facts.search.chose else ()),
            *(() if (choice := held_out_choice(facts)) is None else (f"Not covered: {choice}.",)),
            *_cautions(facts),
            Bullets(
                (
                    f"Unit: {facts.promise.unit}. For people: {facts.unit_note}.",
                    f"Neighbours: {facts.promise.relation}.",
                    DEFINITION,
                )
            ),
        ),
    )


def _cautions(facts: RunFacts) -> tuple[str, ...]:
    """Return what makes the stated epsilon or delta weak, whatever the mechanism."""
    epsilon, delta = facts.total.epsilon, facts.total.delta
    found = []
    if epsilon is not None and epsilon >= LARGE_EPSILON:
        found.append(
            f"Caution: an epsilon of {LARGE_EPSILON:g} or more promises little by itself; section 'The whole curve' "
            f"says what an attacker may find out."
        )
    if delta is not None and (advice := delta_advice(facts.config["population"], delta)) is not None:
        found.append(f"Caution: {advice}.")
    return (*found, *((f"Not covered: {SEEDED}.",) if facts.seeded else ()))


def _which_model(facts: RunFacts) -> tuple[str, ...]:
    """Return what ties the statement to a run and to the parameters that it exported."""
    begun = () if facts.promise.date is None else (f"The run began at {facts.promise.date}.",)
    digest = facts.parameter_digest
    parameters = () if digest is None else (f"The SHA-256 of its parameters, as in summary.json, is {digest}.",)
    files = tuple(f"The SHA-256 of {name}, as sha256sum prints it, is {it}." for name, it in facts.file_digests)
    return (*begun, *(files or parameters))


def _held_out_sentence(promise: Guarantee) -> tuple[str, ...]:
    """Return the epsilon of held-out units, if noised evaluations of them were released."""
    if (epsilon := held_out_epsilon(promise)) is None:
        return ()
    return (
        f"This is for units that were trained on. Units that were held out have epsilon = {shown_epsilon(epsilon)} at "
        f"the same delta instead, by the noised evaluations.",
    )


def _accounting_section(facts: RunFacts) -> Section:
    promise, chain = facts.promise, facts.chain
    assert promise.releases is not None
    rows = tuple(
        (each.what, f"{each.sampling_rate:.6g}", round_up(each.noise_multiplier, 6), str(each.count))
        for each in (chain.releases if facts.total.releases is not None else promise.releases)
    )
    if not chain.earlier:  # with earlier runs they are in the releases of the chain
        rows += tuple(
            (
                f"{each.what}, of held-out units",
                f"{each.sampling_rate:.6g}",
                round_up(each.noise_multiplier, 6),
                str(each.count),
            )
            for each in promise.evaluations
        )
    if chain.earlier and facts.total.releases is not None:
        said = ("The table is of all runs that the guarantee covers, this one and the earlier ones.",)
    elif facts.total != promise:
        said = ("The table is of this run. Whatever else the guarantee covers is composed by its epsilon and delta.",)
    else:
        said = ()
    return Section(
        "Accounting",
        (
            f"Accountant: privacy loss distributions by Google's dp_accounting ({promise.accountant}), rounded so that "
            f"epsilon is an upper bound. fdp {promise.fdp}.",
            *((PRICE,) if facts.search is not None and facts.search.epsilon is not None else ()),
            *_which_model(facts),
            Rows(("what is released", "sampling rate", "noise multiplier", "times"), rows),
            *said,
            "If the run was interrupted and resumed, steps that were repeated drew the same samples and the same noise "
            "and released nothing new.",
        ),
    )


def _others_section(facts: RunFacts, totals: dict[str, Any]) -> Section:
    """Return the section on other runs, without the number of the runs of a search, which is not covered."""
    found = others_section(totals)
    return found if facts.search is None else found._replace(blocks=(SEARCH_RUNS, *found.blocks))


def _checklist_section(source: str, items: Sequence[Item]) -> Section:
    mark = {True: "", False: " [to be stated or confirmed by the author]"}
    return Section(
        source, (Bullets(tuple(f"{each.topic}. {each.question} -- {each.answer}{mark[each.known]}" for each in items)),)
    )


def _as_json(facts: RunFacts, numbers: dict[str, Any], totals: dict[str, Any], tuning: str | None) -> dict[str, Any]:
    config, settings, promise = facts.config, facts.settings, facts.promise
    return {
        "run": facts.name,
        "parameter_sha256": facts.parameter_digest,
        "file_sha256": dict(facts.file_digests),
        "private": facts.total.private,
        "status": facts.status.value,
        "guarantee": guarantee_to_json(facts.total)
        | {"epsilon_held_out": held_out_epsilon(facts.total), "unit_note": facts.unit_note, "definition": DEFINITION},
        "this_run": guarantee_to_json(promise),
        "mechanism": {
            "algorithm": "DP-SGD",
            "sampling": "Poisson",
            "sampling_rate": config["sampling_rate"],
            "population": config["population"],
            "population_announced": settings.get("population") is not None,
            "clip": settings["clip"],
            "max_norm": settings["max_norm"],
            "noise_multiplier": config["noise_multiplier"],
            "steps_planned": promise.steps,
            "steps_made": facts.steps_made,
            "optimizer": settings["optimizer"],
            "words": list(describe_mechanism(facts)),
        },
        "covered": list(covered(facts)),
        "not_covered": list(not_covered(facts)),
        "tuning": tuning,
        **numbers,
        "other_runs": totals | {"theorem": THEOREM},
        "versions": config["versions"],
    }


def _lists_json(lists: dict[str, tuple[Item, ...]]) -> list[dict[str, Any]]:
    return [{"source": source, "items": [item._asdict() for item in items]} for source, items in lists.items()]
