"""The numbers of a statement beyond epsilon at one delta: the curve, the trade-off, mu, groups and people.

>>> numbers = privacy_numbers(facts, records_per_person=10)
>>> curve_section(facts, numbers), groups_section(facts, numbers)
"""

from __future__ import annotations

import math
from typing import Any

from fdp.privacy.curves import PrivacyCurve, group_bound, group_epsilon, mu_by_central_limit
from fdp.privacy.guarantee import Guarantee
from fdp.privacy.releases import Opaque, Release, composed_epsilon
from fdp.report.documents import Rows, Section
from fdp.report.run_facts import RunFacts

DELTAS = tuple(10.0**-power for power in range(5, 11))
EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
FALSE_POSITIVES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)
GROUPS = (2, 4, 8)
LARGEST_MU = 10.0
"""The central limit theorem is not quoted beyond this: it is no approximation for few steps with little noise."""
ROW = "one packed row"
"""The start of a unit that no person is a group of."""
ONE_RUN = (
    "These are the figures of the steps of this run alone. No epsilon can be stated for the model: see the first "
    "section."
)
PAIR_ONLY = (
    "Of a search, or of an earlier run, only epsilon and delta are known. The figures are those of the worst mechanism "
    "with that promise: where no bound is known, a closer account might give one."
)
HELD_OUT = {
    "outside": "Nothing is promised to people who were held out for evaluation.",
    "noised": "The table is about units that were trained on. Of held-out units noised evaluations were released; the "
    "epsilon of a person includes them, wherever one is stated.",
}
"""What evaluations on private data mean for people and groups, by their cost."""
EVALUATED_TOO = "Some of the samples that were evaluated are trained on too: no epsilon covers their exact losses."


def privacy_numbers(facts: RunFacts, *, records_per_person: int | None) -> dict[str, Any]:
    """Return the numbers of the model by name, for programs; None stands for no finite bound.

    If no epsilon can be stated for the model, they are those of the steps of the run alone.
    """
    stated, releases, opaque = _stated(facts)
    delta = stated.delta or 1e-6
    curve = _curve(stated, releases, opaque)
    tight = not opaque and all(each.max_batch_size is None for each in releases)
    sizes: list[int] = sorted({*GROUPS, *([records_per_person] if records_per_person else [])})

    def group(size: int, releases: tuple[Release, ...]) -> float:
        if tight:
            return group_epsilon(releases, size=size, delta=delta)
        return group_bound(PrivacyCurve.of(releases, opaque=opaque), size=size, delta=delta)

    groups = {size: group(size, releases) for size in sizes}
    person = None if records_per_person is None else group(records_per_person, releases + stated.evaluations)
    return {
        "epsilon_at_delta": {f"{each:.0e}": _finite(curve.epsilon(each)) for each in DELTAS},
        "delta_at_epsilon": {f"{each:g}": curve.delta(each) for each in EPSILONS},
        "false_negatives_at_false_positives": {f"{each:g}": curve.false_negatives(each) for each in FALSE_POSITIVES},
        "mu_bound": None if opaque else _finite(curve.mu()),
        "mu_central_limit": None if opaque else mu_by_central_limit(releases),
        "group_epsilon": {str(size): _finite(epsilon) for size, epsilon in groups.items()},
        "group_method": "mixture of Gaussians" if tight else "definition",
        "records_per_person": records_per_person,
        "person_epsilon": _person_epsilon(facts, person, records_per_person),
    }


def _person_epsilon(facts: RunFacts, group: float | None, records: int | None) -> float | None:
    """Return the epsilon of a person; ``group`` is that of the person's units, on both sides if some are held out."""
    total = facts.total
    if total.epsilon is None or total.delta is None:
        return None
    if total.unit.startswith("one user") or records == 1:  # trained on, or held out
        return max(total.epsilon, composed_epsilon(total.evaluations, delta=total.delta))
    if group is None or total.unit.startswith(ROW):
        return None
    return _finite(group)


def _stated(facts: RunFacts) -> tuple[Guarantee, tuple[Release, ...], tuple[Opaque, ...]]:
    """Return the promise that the numbers are of, with its releases and the promises without known releases."""
    if facts.total.private:
        return facts.total, facts.chain.releases, facts.chain.opaque
    return facts.promise, facts.promise.releases or (), ()


def _curve(stated: Guarantee, releases: tuple[Release, ...], opaque: tuple[Opaque, ...]) -> PrivacyCurve:
    """Return the curve; if it has no epsilon at small deltas, the stated pair is its one point."""
    curve = PrivacyCurve.of(releases, opaque=opaque)
    pair = (stated.epsilon or 0.0, stated.delta or 1e-6)
    return curve._replace(points=(pair,)) if opaque and not curve.points else curve


def _caveat(facts: RunFacts) -> tuple[str, ...]:
    if not facts.total.private:
        return (ONE_RUN,)
    return (PAIR_ONLY,) if facts.chain.opaque else ()


def curve_section(facts: RunFacts, numbers: dict[str, Any]) -> Section:
    """Return the tables of the curve, in words for readers who know epsilon and delta."""

    def cell(value: float | None, digits: int = 4) -> str:
        return "no bound known" if value is None else rounded_up(value, digits)

    epsilons = tuple((key, cell(value)) for key, value in numbers["epsilon_at_delta"].items())
    deltas = tuple((key, f"{_round_up(value, 3):.2e}") for key, value in numbers["delta_at_epsilon"].items())
    errors = tuple(
        (key, f"{math.floor(value * 1e4) / 1e4:.4f}")
        for key, value in numbers["false_negatives_at_false_positives"].items()
    )
    return Section(
        "The whole curve",
        (
            *_caveat(facts),
            "The same mechanism satisfies (epsilon, delta) for every pair on a curve:",
            Rows(("delta", "epsilon"), epsilons),
            Rows(("epsilon", "delta"), deltas),
            "Trade-off curve: suppose a test decides from the model whether a unit was in the data. At the rate of "
            "false positives on the left, its rate of false negatives is at least the one on the right.",
            Rows(("false positives", "false negatives, at least"), errors),
            _mu_words(numbers, cell(numbers["mu_bound"])),
        ),
    )


def _mu_words(numbers: dict[str, Any], bound: str) -> str:
    if numbers["mu_central_limit"] is None:
        return "Gaussian differential privacy: no mu can be stated."
    limit = f" The central limit theorem gives mu = {numbers['mu_central_limit']:.4g}: an approximation for many steps"
    limit = f"{limit}, not a bound." if numbers["mu_central_limit"] <= LARGEST_MU else ""
    return (
        f"Gaussian differential privacy: mu = {bound} bounds this curve at 200 values of epsilon, for deltas down to "
        f"1e-10: a fit from above, not a proof of mu-GDP, which speaks of all deltas.{limit}"
    )


def groups_section(facts: RunFacts, numbers: dict[str, Any]) -> Section:
    """Return the epsilon of several units together, and of a person."""
    unit, records, person = facts.promise.unit, numbers["records_per_person"], numbers["person_epsilon"]
    method = (
        "computed for Poisson sampling as a mixture of Gaussians (Ganesh 2024, arXiv 2401.10294)"
        if numbers["group_method"] == "mixture of Gaussians"
        else "by the definition of differential privacy, a looser bound"
    )
    rows = tuple(
        (size, "no bound known" if value is None else rounded_up(value, 4))
        for size, value in numbers["group_epsilon"].items()
    )
    if unit.startswith("one user") and facts.total.private:
        who = f"a person{_trained_on(facts)}"
        said = f"The unit is a user: the stated epsilon holds for {who}, provided that nobody appears as two users."
    elif unit.startswith(ROW):
        said = (
            "A person is no group of rows: one record more or less can change many rows. No epsilon of a person, or "
            "of a record, can be stated for this run."
        )
    elif not facts.total.private:
        said = "No epsilon of a person can be stated for the model of this run."
    elif facts.search is not None and facts.search.chose:
        said = "No epsilon of a person with several units can be stated for a run that a search chose."
    elif records is not None:
        bound = "no bound is known at this delta" if person is None else f"epsilon is {rounded_up(person, 4)}"
        said = (
            f"For a person with at most {records} units (a number that the author of this statement gave, and that fdp "
            f"did not check), {bound}, at the same delta."
        )
    else:
        said = (
            "For a person with several units, read the table. How many units one person has at most: not known to "
            "fdp: please state, with fdp statement --records-per-person."
        )
    return Section(
        "Groups and people",
        (
            f"Epsilon of k units that are added or removed together, at the same delta, {method}:",
            Rows(("k", "epsilon"), rows),
            *_caveat(facts),
            said,
            *(HELD_OUT[cost] for cost in sorted(facts.evaluation_costs) if cost in HELD_OUT),
            *((EVALUATED_TOO,) if facts.evaluated_too and "outside" in facts.evaluation_costs else ()),
        ),
    )


def _trained_on(facts: RunFacts) -> str:
    return " who was trained on" if facts.evaluation_costs & set(HELD_OUT) else ""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def rounded_up(value: float, digits: int) -> str:
    """Return ``value`` rounded up to so many digits: a printed bound holds."""
    return f"{_round_up(value, digits):.{digits}g}"


def _round_up(value: float, digits: int) -> float:
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return math.ceil(value / unit * (1 - 1e-12)) * unit
