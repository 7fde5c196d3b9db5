"""Two published checklists for reporting differential privacy, answered item by item from the facts of a run.

- Ponomareva et al. 2023, "How to DP-fy ML" (arXiv 2303.00654), section on reporting privacy guarantees
- NIST SP 800-226 (2025), "Guidelines for Evaluating Differential Privacy Guarantees": its pyramid, from the parameters
  at the top to the collection of the data at the base

The questions are in our own words. What fdp cannot know says so, and asks.

    >>> for item in dpfy_ml(facts, tuning=None): print(item.question, item.answer, item.known)
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fdp.report.headline import formal_terms, short_terms
from fdp.report.run_facts import RunFacts

ASK = "Not known to fdp: please state."
ASK_TUNING = (
    "Not known to fdp: please state how they were chosen and how many runs were tried, with fdp statement --tuning."
)
DPFY_ML = 'Ponomareva et al. 2023, "How to DP-fy ML" (arXiv 2303.00654), reporting privacy guarantees'
NIST = "NIST SP 800-226 (2025), Guidelines for Evaluating Differential Privacy Guarantees"


class Item(NamedTuple):
    """A question of a checklist. ``known`` is False if the user must answer, or add to, it."""

    topic: str
    question: str
    answer: str
    known: bool = True


def dpfy_ml(facts: RunFacts, *, tuning: str | None) -> tuple[Item, ...]:
    """Return the reporting items of "How to DP-fy ML"."""
    promise = facts.promise
    return (
        Item(
            "DP setting",
            "Who is trusted with the raw data: a central trainer, nobody (local), or something between?",
            "Central: whoever runs fdp reads all samples, and noise is added during training. "
            "The guarantee is towards whoever sees the model.",
        ),
        Item(
            "Data accesses",
            "Which uses of the data does the guarantee cover: this run only, or tuning, evaluation and earlier runs "
            "too?",
            f"The steps of this run{_composed(facts)}, with everything that they release. Not: its metrics, "
            f"{_evaluation(facts)}, tuning{_beyond(facts)} (see below), data preparation. Other runs on the same data "
            f"are composed in this statement as far as they are known.",
        ),
        Item(
            "Output",
            "What is released: predictions, the final model, or every intermediate one?",
            "The guarantee covers the parameters after every step, and so the final model, any checkpoint's parameters "
            "and all predictions. It does not cover checkpoint files, which hold the key of the noise.",
        ),
        Item("Unit of privacy", "What is added or removed: an example, a user, a group?", _unit(facts)),
        Item("Adjacency", "Add or remove, replace, or zero out?", f"{promise.relation}."),
        Item(
            "Type of accounting",
            "By which method are the steps composed?",
            f"Privacy loss distributions, rounded to an upper bound ({promise.accountant or 'PLD, dp-accounting'}).",
        ),
        Item(
            "Accounting assumptions",
            "Does training do what the accountant assumes, in particular the sampling?",
            "Yes: samples are drawn by Poisson sampling, not by shuffling; sampler, step and accountant read the same "
            "values; noise does not depend on the number of ranks.",
        ),
        Item(
            "Formal statement",
            "What exactly is guaranteed, with epsilon and delta?",
            formal_terms(facts),
        ),
        Item(
            "Hyper-parameter tuning",
            "Were hyper-parameters chosen on the private data, and is that in epsilon?",
            tuning or f"{ASK_TUNING} It is not in epsilon unless you say how.",
            tuning is not None,
        ),
        Item(
            "Transparency",
            "Is the implementation open and verifiable?",
            f"fdp is open source (Apache-2.0), version {promise.fdp or facts.config['versions']['fdp']}; its "
            f"guarantees are tests, and each test of clipping and noise must fail on planted mistakes.",
        ),
    )


def nist_sp_800_226(facts: RunFacts, *, tuning: str | None) -> tuple[Item, ...]:
    """Return the questions of NIST SP 800-226, from the top of its pyramid to its base."""
    return (*_nist_parameters(facts), *_nist_algorithm(facts, tuning), *_nist_base())


def _nist_parameters(facts: RunFacts) -> tuple[Item, ...]:
    promise = facts.promise
    return (
        Item(
            "Privacy parameters",
            "What are epsilon and delta, and is delta far below one over the number of people?",
            f"{short_terms(facts)}. {_delta_beside(facts)} "
            f"Whether this epsilon is strong enough for the harm at stake: {ASK[0].lower()}{ASK[1:]}",
            False,
        ),
        Item("Unit of privacy", "Whom or what does epsilon protect?", _unit(facts)),
        Item(
            "Bounded contributions",
            "Can one person contribute more than one unit, and what then?",
            "A person is one unit, with a bounded number of windows."
            if promise.unit.startswith("one user")
            else "Yes, unless you know otherwise. Section 'Groups and people' gives the epsilon of several units.",
        ),
        Item(
            "Composition",
            "What else was released about the same people, and what is the total?",
            "See section 'Other runs'. Releases by other software are not known to fdp: please state.",
            False,
        ),
    )


def _nist_algorithm(facts: RunFacts, tuning: str | None) -> tuple[Item, ...]:
    return (
        Item(
            "Algorithm and correctness",
            "Which mechanism is used, is its sensitivity bounded, and was the implementation tested or audited?",
            "The Poisson-subsampled Gaussian mechanism (DP-SGD). The bound on one sample's influence is tested with "
            "adversarial samples, for every method and clipping style. An audit by a third party: "
            + ASK[0].lower()
            + ASK[1:],
            False,
        ),
        Item(
            "Tuning and selection",
            "Do choices made on the private data leak, or are they paid for?",
            tuning or ASK_TUNING,
            tuning is not None,
        ),
        Item("Utility", "Is the result accurate enough for its purpose?", ASK, False),
        Item(
            "Bias",
            "Are small or unusual groups served worse? Clipping and noise hurt them first.",
            f"fdp does not measure it. {ASK}",
            False,
        ),
        Item(
            "Implementation: randomness and floating point",
            "Where do random bits come from, and can low bits of the output reveal the noise?",
            "ChaCha20, keyed with "
            + ("a seed that was given: see 'Not covered'" if facts.seeded else "256 bits of the operating system")
            + ". Every draw uses 64 bits; noisy values are rounded to a public grid. An error of about one part in "
            "2^30 in the distribution of the noise is not accounted for.",
        ),
        Item(
            "Implementation: side channels",
            "Can timing or memory reveal the data?",
            "The time of a step depends on how many samples were drawn. Nobody but the trainer should be able to time "
            "it.",
        ),
    )


def _nist_base() -> tuple[Item, ...]:
    return (
        Item(
            "Query model",
            "Is there one release, or do analysts ask further questions of the data?",
            "This run releases parameters, and noised evaluations if it makes any. The data answers nothing else "
            "through it.",
        ),
        Item(
            "Threat and trust model",
            "Against whom does the guarantee hold, and who must be trusted?",
            "Against whoever sees the model, whatever else they know. Trusted: whoever holds the data, the machines "
            "that train, the noise key, and the metrics.",
        ),
        Item(
            "Security and access",
            "Who can read the raw data, the noise key and intermediate results?",
            "fdp writes metrics, summaries, checkpoints and the ledger readable by their owner only. Access to the raw "
            f"data and machines: {ASK[0].lower()}{ASK[1:]}",
            False,
        ),
        Item(
            "Data collection",
            "How was the data collected, with what consent, and how long is it kept?",
            ASK,
            False,
        ),
    )


def _beyond(facts: RunFacts) -> str:
    return (
        " beyond the search, which is paid for" if facts.search is not None and facts.search.epsilon is not None else ""
    )


def _delta_beside(facts: RunFacts) -> str:
    """Return whether delta is far below one over the public number of samples."""
    share, delta = 1 / facts.config["population"], facts.total.delta
    if delta is None:
        return f"One over the public number of samples is {share:.2g}."
    said = f"one over the public number of samples is {share:.2g}, and delta is"
    if delta >= share:
        return f"No: {said} not below it; publishing one sample outright would pass."
    times = math.floor(share / delta)
    return f"Yes: {said} {times} times smaller." if times >= 10 else f"No: {said} not far below it."


def _unit(facts: RunFacts) -> str:
    return f"{facts.promise.unit}; {facts.unit_note}."


def _composed(facts: RunFacts) -> str:
    return " and of the earlier runs that it started from, on the same data" if facts.chain.earlier else ""


def _evaluation(facts: RunFacts) -> str:
    costs = facts.evaluation_costs
    if not costs:
        return "evaluation (this run made none that is recorded)"
    words = {
        "public": "evaluation on public data, which costs nothing",
        "outside": "evaluation on private data of people who were held out, to whom nothing is promised",
        "noised": "evaluation on held-out people, released with noise within a budget of its own",
    }
    too = ", some of whose samples are trained on too" * facts.evaluated_too
    return "; ".join(words.get(cost, cost) + too * (cost != "noised") for cost in sorted(costs))
