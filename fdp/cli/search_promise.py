"""The promise of ``fdp search``: the noise with which the search costs ``--epsilon``, and its statement in sentences.

while runs are trained     no epsilon: it holds only if every run that was drawn is made
after the last run         epsilon of the best of a Poisson number of runs  (fdp.privacy.selection)
interrupted by a signal    epsilon of all runs that were drawn, composed
``--not-private``          no epsilon: the choice among the runs is covered by nothing

>>> price = find_price(config, Repetitions(search.trials, POISSON), search)
>>> statement(price, search, shared, best, count)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fdp.cli.search_options import SearchOptions
from fdp.privacy import accounting
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson
from fdp.privacy.selection import Repetitions, noise_multiplier_for_selection, selection_epsilon
from fdp.privacy.shown_numbers import round_up, shown_delta, shown_epsilon
from fdp.run.run_folder import SEARCH_RESULT

if TYPE_CHECKING:
    from fdp.run.run_config import RunConfig

NOTHING_DRAWN = (
    "the number of runs was drawn as 0, which happens with probability {chance:.2g}: nothing was trained, nothing is "
    "released and nothing is spent. To draw again until there is a run would not be covered; a new search is a second "
    "one, and the epsilons of both add up"
)
NOT_ENDED = (
    "the search has not ended: no epsilon can be stated for any of its runs. If an error ended it, it cannot go on, "
    "and its runs stay with the owner of the data"
)
SEEDED = (
    "not covered: whoever guesses --seed can repeat the noise of every run and subtract it, and knows the number of "
    "runs, which has to be secret. For a real release leave --seed out"
)


class Price(NamedTuple):
    """The noise of every run, the epsilon of the whole search (None: not covered) and of one run alone."""

    noise_multiplier: float | None
    epsilon: float | None
    delta: float


def score_name(shared: Mapping[str, Any]) -> str:
    """Return what runs are chosen by, in words."""
    held_out = shared.get("eval_fraction") is not None or shared.get("eval_data") is not None
    return "held-out loss" if held_out else "training loss"


def find_price(config: RunConfig, repetitions: Repetitions, search: SearchOptions) -> Price:
    """Return the noise with which the whole search costs ``--epsilon``."""
    if search.not_private:
        return Price(None, None, config.delta)
    sampling = poisson(len(config.dataset), expected_batch_size=config.batch_size, population=config.population)
    budget = {"steps": config.steps, "delta": config.delta}
    noise = noise_multiplier_for_selection(sampling, config.clip, repetitions, epsilon=search.epsilon, **budget)
    spent = selection_epsilon(Mechanism(sampling, config.clip, noise), repetitions, **budget)
    return Price(noise, spent, config.delta)


def statement(
    price: Price, search: SearchOptions, shared: dict[str, Any], best: dict[str, Any] | None, count: int
) -> list[str]:
    """Return what was done and what is promised, in sentences."""
    if count == 0:
        return [NOTHING_DRAWN.format(chance=math.exp(-search.trials))]
    if best is None:
        chosen = "no run had a finite score: all diverged. Lower the values of --lr"
    else:
        drawn = ", ".join(f"--{key.replace('_', '-')} {value:g}" for key, value in best["settings"].items())
        score = f"{score_name(shared)} {best['score']:.4f} (lower is better)"
        which = "the only run" if count == 1 else f"best of {count} runs"
        chosen = f"{which}: {drawn}, {score}, from {best['folder']}"
    if price.epsilon is None or price.noise_multiplier is None:
        return [
            chosen,
            f"not private: each run alone has epsilon {search.epsilon:g}, but the choice among them used data and is "
            f"covered by nothing; no epsilon can be stated for the chosen model",
        ]
    outside = (
        "public data, which costs nothing"
        if shared["eval_public"]
        else "held-out people, who are outside the guarantee: nothing is promised to them"
    )
    return [
        chosen,
        f"epsilon {shown_epsilon(price.epsilon)} at delta {shown_delta(price.delta)} covers the model and its "
        f"settings, chosen from a Poisson number of runs with mean {search.trials:g} (Papernot and Steinke 2022, "
        f"Theorem 6, by RDP; noise multiplier {round_up(price.noise_multiplier, 4)} in every run)",
        f"chosen by the loss on {outside}",
        f"not covered: {SEARCH_RESULT}, the number of runs, their scores and the models that were not chosen",
        *([] if search.seed is None else [SEEDED]),
    ]


def interrupted_statement(
    price: Price, config: RunConfig, search: SearchOptions, *, begun: int, count: int
) -> list[str]:
    """Return what a search that a signal ended has spent, and why it cannot go on.

    Guarantees:
      - the stated epsilon is that of all runs that were drawn, composed: it holds for whatever is released of them,
        also if a score led to the interruption.
    """
    ended = f"interrupted in run {begun}: no model was chosen or exported. Its runs stay with the owner of the data"
    if price.noise_multiplier is None:
        spent = f"not private: each run alone has epsilon {search.epsilon:g}; a choice among them is covered by nothing"
    else:
        sampling = poisson(len(config.dataset), expected_batch_size=config.batch_size, population=config.population)
        mechanism = Mechanism(sampling, config.clip, price.noise_multiplier)
        epsilon = accounting.epsilon(mechanism, steps=count * config.steps, delta=price.delta)
        runs = "the one run that was drawn" if count == 1 else f"all {count} runs that were drawn"
        spent = (
            f"the epsilon of a search holds only if every run that was drawn is made. This one has spent epsilon "
            f"{shown_epsilon(epsilon)} at delta {shown_delta(price.delta)}: that of {runs}, composed, since a score "
            f"may have led to the interruption"
        )
    return [
        ended,
        spent,
        "the search cannot go on. To search again, give another --out: that is a second search, and the epsilons of "
        "both add up",
    ]
