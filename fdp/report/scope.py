"""The scope of a guarantee: what of a run epsilon covers, and what it does not.

covered        the parameters after every step, and everything that is computed from them without the data
not covered    all that is computed on the data without noise, and choices that depend on the data
evaluations    free on public data; with noise, within a budget of their own; else not covered

>>> scope_section(facts)
>>> covered(facts), not_covered(facts)
"""

from __future__ import annotations

from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.report.documents import Bullets, Section
from fdp.report.headline import held_out_choice
from fdp.report.run_facts import RunFacts

COVERED = (
    "the parameters of the model after every step, and everything that is computed from them without the data: "
    "exported files, predictions, generated text, further training on other data",
    "the settings of the run, the number of planned steps, and this statement, except for what it says of how the run "
    "ended",
)
AND_EVALUATED = ", and of samples that are evaluated and trained on"
NOT_COVERED = (
    "losses, gradient norms, clipped fractions, counts of samples, times and plots of the run: they are computed on "
    "the private data without noise, and are for the owner of the data only",
    "checkpoints, which hold the key of the noise",
    "whether a run ended before its planned steps, and when: losses on the private data may have led to it",
    "the preparation of the data: what was left out, cut or cleaned",
    "the checks of the model that precede the first step, whose outcome is that training starts",
    "the time and the memory of a step, which depend on how many samples were drawn",
    "an error of about one part in 2^30 in the distribution of the noise, which is computed in floating point",
    "data that the first parameters were trained on before, unless it is composed in section 'Other runs'",
)
CHOICES = (
    "the choice of hyper-parameters, of the model and of the moment to stop, as far as they depend on the private data"
)
PAID_CHOICES = (
    "choices on the private data outside the search, whose own choice is paid for: of the settings that it tried, of "
    "the model and of the moment to stop"
)
ANY_ORDER = (
    "the rounding of attention, if the model has it: on a GPU its gradients are added in any order, so that a sample "
    "may differ from itself by a few ten-thousandths of its gradient, or a few thousandths of one in 8 bits, whenever "
    "it is computed (`--repeatable` adds in one order)"
)
SEEDED = (
    "the noise, towards whoever knows or guesses the seed: this run was given a fixed seed, from which its noise can "
    "be computed and subtracted. The guarantee holds only towards people who cannot guess it"
)


def scope_section(facts: RunFacts) -> Section:
    """Return the section on what is covered, what is not, and what evaluations cost."""
    evaluation = {
        "public": "evaluations on public data cost nothing",
        "outside": "evaluations on private data of held-out people are not covered: nothing is promised to these "
        "people",
        "noised": f"evaluations on held-out people were released with noise, within a budget of their own; "
        f"{_disjoint(facts)}",
    }
    made = tuple(evaluation.get(cost, cost) + _evaluated_too(facts, cost) for cost in sorted(facts.evaluation_costs))
    if (budget := facts.settings.get("eval_epsilon")) is not None:
        most = f"epsilon {shown_epsilon(budget)} at delta {shown_delta(facts.promise.delta or 0)}"
        made += (f"the budget of the noised evaluations is {most}",)
    blocks = ("Covered:", Bullets(covered(facts)), "Not covered:", Bullets(not_covered(facts)))
    return Section("What is covered", (*blocks, *(("Evaluation:", Bullets(made)) if made else ())))


def _evaluated_too(facts: RunFacts, cost: str) -> str:
    """Return what the evaluations measure, and of whom, if some of their samples are trained on; else nothing."""
    if not facts.evaluated_too or cost == "noised":
        return ""
    losses = "their exact losses are released, which their epsilon does not cover, and " * (cost == "outside")
    return f". Some of the samples are trained on too: {losses}the held-out loss is lower than on new samples"


def covered(facts: RunFacts) -> tuple[str, ...]:
    """Return what the guarantee covers."""
    *others, statement = COVERED
    return (*others, statement + AND_EVALUATED * facts.evaluated_too)


def not_covered(facts: RunFacts) -> tuple[str, ...]:
    """Return what the guarantee does not cover, with what is particular to this run first."""
    choice = held_out_choice(facts)
    in_any_order = facts.config.get("device") == "cuda" and not facts.settings.get("repeatable")
    return (
        *((SEEDED,) if facts.seeded else ()),
        *(() if choice is None else (choice,)),
        PAID_CHOICES if facts.search is not None and facts.search.epsilon is not None else CHOICES,
        *NOT_COVERED,
        *((ANY_ORDER,) if in_any_order else ()),
    )


def _disjoint(facts: RunFacts) -> str:
    """Return what is known of units that are trained on and held out."""
    if facts.promise.unit.startswith("one user"):
        return "no held-out user was trained on"
    if facts.settings.get("eval_data") is not None:
        return (
            "that no held-out unit was trained on is for the author to confirm; a person may have units on both sides"
        )
    return "no held-out unit was trained on, but a person with several units may have some on both sides"
