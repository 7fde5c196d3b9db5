"""The first sentences of a statement: epsilon of the model in the folder, then that of the steps of this run.

The model depends on every run whose parameters it started from, and on the search that chose it. The stated epsilon is
that of all of these together (:mod:`fdp.privacy.chain`); what this run alone spent comes second.

    >>> headline(facts)
    ('Training the model was (epsilon, delta)-differentially private with epsilon = 3.154 ...', ...)
"""

from __future__ import annotations

from fdp.privacy.guarantee import Guarantee
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.report.run_facts import RunFacts, read_facts
from fdp.run.run_folder import RunFolder
from fdp.types import FdpError


def headline(facts: RunFacts) -> tuple[str, ...]:
    """Return the guarantee of the model in sentences, a paragraph each."""
    total, chain = facts.total, facts.chain
    subject = "Training the model was" if not chain.left_out else f"{_steps(facts)} were"
    terms = "for the unit and the neighbours below."
    if not total.private:
        said = (f"No epsilon can be stated for the model: {reason(facts)}.", _alone(facts, terms))
    else:
        said = (f"{subject} (epsilon, delta)-differentially private with {_pair(total)}, {terms}",)
    if chain.earlier and total.private:
        said += (
            f"This is the composition of this run and of {_earlier(len(chain.earlier))} whose parameters it started "
            f"from, on the same data{_assumed(facts)}. {_alone(facts)}",
        )
    elif total.private and total != facts.promise:
        said += (_alone(facts),)
    if chain.left_out:
        said += (
            f"The figure is for {_steps(facts, start='the')} only. The first parameters came from "
            f"{_earlier(len(chain.left_out), more=bool(chain.earlier))} on other data, with another unit or without "
            f"privacy, which it does not include: see section 'Other runs' of the statement.",
        )
    return said


def held_out_choice(facts: RunFacts) -> str | None:
    """Return the choices that depend on held-out people without noise, and so are not covered.

    None if nothing was chosen by them, or if they are public or their evaluations were noised.
    """
    settings = facts.settings
    held_out = settings.get("eval_fraction") is not None or settings.get("eval_data") is not None
    if not held_out or settings.get("eval_public") or settings.get("eval_epsilon") is not None:
        return None
    chosen = ["which step is exported"] if settings.get("keep_best") else []
    chosen += ["when training stops"] if settings.get("patience") is not None else []
    chosen += ["which run of the search is chosen"] if facts.search is not None and facts.search.chose else []
    if not chosen:
        return None
    return (
        f"the people who were held out for evaluation: their loss, without noise, decided {' and '.join(chosen)}. The "
        f"exported parameters depend on them through this choice, and no epsilon covers them"
    )


def reason(facts: RunFacts) -> str:
    """Return why no epsilon covers the model of a run whose steps are private."""
    if facts.search is not None and facts.search.chose and facts.search.epsilon is None:
        if not facts.search.ended:
            return "it may have been chosen among the runs of a search that did not end, which is covered by nothing"
        return "it was chosen among several runs by data, and the choice is covered by nothing"
    return "its first parameters were trained on the same data without privacy"


def model_total(run: RunFolder) -> tuple[Guarantee, str] | None:
    """Return the promise about the model and what it covers in words; None if it is that of the run alone."""
    try:
        facts = read_facts(run)
    except (FdpError, KeyError):  # a folder of an older version
        return None
    total, earlier = facts.total, len(facts.chain.earlier)
    if total == facts.promise:
        return None
    if not total.private:
        return total, reason(facts)
    parts = [f"with {_earlier(earlier)} whose parameters it started from"] if earlier else []
    parts += ["with the choice by fdp search"] if facts.chosen != facts.promise else []
    return total, " and ".join(parts)


def formal_terms(facts: RunFacts) -> str:
    """Return the formal statement of the guarantee, for the unit and adjacency that are stated beside it."""
    total, chain, promise = facts.total, facts.chain, facts.promise
    if not total.private:
        return (
            f"None for the model: {reason(facts)}. For the {promise.steps} planned steps of this run alone: "
            f"{_tuple(promise)}."
        )
    said = f"{_tuple(total)} for the unit and adjacency above, at all {total.steps or promise.steps} planned steps"
    if chain.earlier:
        return f"{said} of this run and of {_earlier(len(chain.earlier))} that it started from."
    return f"{said} of this run, not of the earlier runs that it started from." if chain.left_out else f"{said}."


def short_terms(facts: RunFacts) -> str:
    """Return epsilon and delta of the model in a few words."""
    total, promise = facts.total, facts.promise
    if total.private:
        return f"epsilon {shown_epsilon(total.epsilon or 0)}, delta {shown_delta(total.delta or 0)}"
    alone = f"epsilon {shown_epsilon(promise.epsilon or 0)}, delta {shown_delta(promise.delta or 0)}"
    return f"none can be stated for the model; {alone} for the steps of this run alone"


def _steps(facts: RunFacts, start: str = "The") -> str:
    count = len(facts.chain.earlier)
    return f"{start} steps of this run" + (f" and of {_earlier(count)} on the same data" if count else "")


def _earlier(count: int, *, more: bool = False) -> str:
    return f"{count}{' more' * more} earlier run{'s' * (count > 1)}"


def _assumed(facts: RunFacts) -> str:
    return " (this is assumed: it is not on record for all of them)" if facts.chain.assumed else ""


def _alone(facts: RunFacts, terms: str = "") -> str:
    promise, more = facts.promise, f", {terms.rstrip('.')}" if terms else ""
    return (
        f"The steps of this run alone have epsilon {shown_epsilon(promise.epsilon or 0)} at delta "
        f"{shown_delta(promise.delta or 0)}{more}."
    )


def _pair(promise: Guarantee) -> str:
    return f"epsilon = {shown_epsilon(promise.epsilon or 0)} and delta = {shown_delta(promise.delta or 0)}"


def _tuple(promise: Guarantee) -> str:
    return f"({shown_epsilon(promise.epsilon or 0)}, {shown_delta(promise.delta or 0)})-differential privacy"
