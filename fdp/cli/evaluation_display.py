"""The words for evaluations: a line while a run goes on, a row of the header, a row of the result.

held-out loss 2.3145 (outside the guarantee: computed without noise on 61 users who were not trained on)
held-out loss 2.31 ± 0.15                               noised: the standard deviation of the noise beside the loss

>>> for state, record in show_evaluations(stream, evaluator, console): ...
>>> summary | evaluation_summary(evaluator, records)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from fdp.data.nouns import FILE, RECORD, USER, count
from fdp.data.units import dataset_unit
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon
from fdp.run.evaluation import Evaluator
from fdp.run.evaluation_config import Cost, EvaluationConfig, planned_steps
from fdp.run.kept import Best, Kept, is_exhausted
from fdp.run.prepare_run import Run
from fdp.run.step_record import Evaluation, StepRecord
from fdp.types import TrainState

CHOICE = {
    Cost.PUBLIC: "the choice is free, by public data",
    Cost.NOISED: "the choice is within the budget of the evaluations",
    Cost.OUTSIDE: "the choice is not covered for the held-out samples; for those trained on epsilon holds, since it is "
    "that of all planned steps",
}
"""The cost of choosing a step by its evaluation."""

NOUNS = {
    "user": USER,
    "record": RECORD,
    "file": FILE,
    "window": "window",
    "labelled": "image",
    "packed": "packed row",
}
"""Nouns for a held-out sample, by the second word of its unit (``fdp.data.units``)."""


LOUD_NOISE = 0.3
"""Noise on the held-out loss, in nats, above which a single figure says little: a perplexity known to a third."""
MOST_DECIMALS, FINE_NOISE = 4, 0.01


class Noise(NamedTuple):
    """The standard deviations of the noise on the held-out loss, and on the accuracy (None: not known)."""

    loss: float
    accuracy: float | None


def noise_of(evaluator: Evaluator) -> Noise | None:
    """Return the noise on the numbers of the evaluations; None if they have none."""
    if (release := evaluator.release) is None:
        return None
    return Noise(release.loss_deviation(), release.loss_deviation() / release.max_loss)


def cost_words(evaluator: Evaluator) -> str:
    """Return what the numbers of the evaluations cost, in words."""
    config, private = evaluator.config, evaluator.run.epsilons is not None
    if config.cost is Cost.PUBLIC:
        return f"free: computed on {len(config.dataset):,} samples of public data{_trained_too(config.shared)}"
    who = _held_out_words(config)
    if config.budget is None:
        outside = "outside the guarantee" if private else "no guarantee"
        return f"{outside}: computed without noise on {who}"
    return (
        f"epsilon {shown_epsilon(config.budget.epsilon)} at delta {shown_delta(config.budget.delta)} for each of "
        f"{who}, for all {len(evaluator.steps)} evaluations together; nothing for those trained on"
    )


def header_words(evaluator: Evaluator) -> str:
    """Return when the run is evaluated, on what, and at what cost."""
    every, release = evaluator.config.every, evaluator.release
    often = f"every {every} steps and at the end" if every > 1 else "after every step"
    said = f"{often}; {cost_words(evaluator)}"
    if release is None:
        return said
    noise = release.loss_deviation()
    return (
        f"{said}. Noise of ±{noise:.3g} on the held-out loss (losses clipped to {release.max_loss:.3g}, sums divided "
        f"by {release.budget.population:,}, a public number); "
        + (loud_noise_words(evaluator, noise) if noise > LOUD_NOISE else "fewer evaluations have less")
    )


def loud_noise_words(evaluator: Evaluator, noise: float) -> str:
    """Return what lowers the noise on the held-out loss to ``LOUD_NOISE``, from public numbers.

    Of k evaluations together the noise is sqrt(k) times that of one, and it falls as 1 / (number of held-out samples).
    """
    planned, steps = len(evaluator.steps), evaluator.run.config.steps
    fewer = max(1, math.floor(planned * (LOUD_NOISE / noise) ** 2))
    more = noise / LOUD_NOISE
    helps = f"larger --eval-epsilon has less, and so has a larger part held out ({more:.2g} times: ±{LOUD_NOISE:g})"
    said = f"more than ±{LOUD_NOISE:g}, so that one figure says little. "
    if planned == 1:
        return f"{said}A {helps}"
    every = math.ceil(steps / fewer)
    evaluations = len(planned_steps(every, steps))
    left = noise * math.sqrt(evaluations / planned)
    return f"{said}--eval-every {every} ({count(evaluations, 'evaluation')}) has ±{left:.2g}; a {helps}"


def result_words(evaluation: Evaluation, noise: Noise | None = None) -> str:
    """Return the numbers of an evaluation, with digits that fit the noise.

    without noise   held-out loss 2.3145, perplexity 10.12
    with noise      held-out loss 2.31 ± 0.15, perplexity 8.7 to 12
    """
    words = []
    if evaluation.loss is not None:
        words.append(f"held-out loss {_number(evaluation.loss, noise)}{_plus_minus(noise)}")
    if evaluation.accuracy is not None:
        words.append(_accuracy_words(evaluation.accuracy, noise))
    elif (perplexity := evaluation.perplexity) is not None:
        words.append(_perplexity_words(perplexity, noise))
    return ", ".join(words) or "held-out loss n/a: not finite"


def show_evaluations(
    stream: Iterable[tuple[TrainState, StepRecord]], evaluator: Evaluator | None, console: Console
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on, and print every evaluation with what it costs."""
    noise = None if evaluator is None else noise_of(evaluator)
    for state, record in stream:
        found = record.evaluation
        if found is not None and evaluator is not None:
            console.print(Text(f"step {record.step}  {result_words(found, noise)}  ({found.cost})", style="green"))
        for text in found.texts if found is not None else ():
            console.print(Text(f"step {record.step}  sample: {text!r}", style="dim"), soft_wrap=True)
        yield state, record


def evaluation_summary(evaluator: Evaluator | None, records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the entry ``evaluation`` of ``summary.json``: the first, the last and the best evaluation, and the cost.

    Empty without evaluations. The best is the one with the lowest loss; one that is not finite is never the best.
    """
    found = [record for record in records if record.evaluation is not None]
    if evaluator is None or not found:
        return {}
    best = min(found, key=_loss_of)
    config, release, noise = evaluator.config, evaluator.release, noise_of(evaluator)
    return {
        "evaluation": {
            "first": _entry(found[0]),
            "last": _entry(found[-1]),
            "best": _entry(best),
            "evaluations": len(found),
            "cost": config.cost.value,
            "cost_in_words": cost_words(evaluator),
            "samples": len(config.dataset),
            "epsilon": None if config.budget is None else config.budget.epsilon,
            "delta": None if config.budget is None else config.budget.delta,
            "planned": len(evaluator.steps),
            "noise_multiplier": None if release is None else release.noise_multiplier,
            "loss_noise": None if noise is None else noise.loss,
            "accuracy_noise": None if noise is None else noise.accuracy,
        }
    }


def result_summary(run: Run, state: TrainState, evaluator: Evaluator | None = None) -> dict[str, Any]:
    """Return the entry ``exported`` of ``summary.json``: which parameters the run exports, if not simply the last.

    The choice of a step by private held-out numbers is not covered for the people they were computed on.
    """
    evaluation, kept = run.config.evaluation, state.opt
    if not isinstance(kept, Kept):
        return {}
    said = [] if run.config.ema is None else [f"the average of the parameters with decay {run.config.ema:g} (free)"]
    found: dict[str, Any] = {"step": int(state.step), "ema": run.config.ema, "stopped_early": False}
    if evaluation is not None and isinstance(kept.best, Best):
        if evaluation.keep_best and int(kept.best.step):
            found |= {"step": int(kept.best.step)}
            noise = None if evaluator is None else noise_of(evaluator)
            loss = f"{_number(float(kept.best.loss), noise)}{_plus_minus(noise)}"
            said.append(f"the best by held-out loss, {loss} after step {int(kept.best.step)}")
        if is_exhausted(run, state) and int(state.step) < run.config.steps:
            found |= {"stopped_early": True}
            said.append(
                f"stopped after step {int(state.step)}, {evaluation.patience} evaluations without a lower held-out loss"
            )
        if found["stopped_early"] or found["step"] != int(state.step):
            said.append(_choice_words(evaluation))
        elif evaluation.cost is Cost.OUTSIDE:  # to take the last step, too, was a choice
            said += [*([] if said else ["the parameters after the last step"]), _choice_words(evaluation)]
    return {"exported": found | {"in_words": "; ".join(said) or "the parameters after the last step"}}


def summary_words(found: dict[str, Any]) -> str:
    """Return the row of the result panel, from the entry ``evaluation`` of a summary."""
    first, last = found["first"], found["last"]
    noise = None if found.get("loss_noise") is None else Noise(found["loss_noise"], found.get("accuracy_noise"))
    loss = f"held-out loss {_number(first['loss'], noise)} → {_number(last['loss'], noise)}"
    loss += f" (each{_plus_minus(noise)})" if noise is not None else ""
    if last["accuracy"] is not None:
        loss += f", {_accuracy_words(last['accuracy'], noise)}"
    elif last["perplexity"] is not None:
        loss += f", {_perplexity_words(last['perplexity'], noise)}"
    best = found["best"]
    if best["step"] != last["step"]:
        loss += f"; best {_number(best['loss'], noise)} after step {best['step']}"
    return f"{loss} ({found['cost_in_words']})"


def _entry(record: StepRecord) -> dict[str, Any]:
    evaluation = record.evaluation
    assert evaluation is not None
    numbers = {"loss": evaluation.loss, "token_loss": evaluation.token_loss, "accuracy": evaluation.accuracy}
    return {"step": record.step} | numbers | {"perplexity": evaluation.perplexity}


def _loss_of(record: StepRecord) -> float:
    loss = None if record.evaluation is None else record.evaluation.loss
    return math.inf if loss is None else loss


def _number(loss: float | None, noise: Noise | None) -> str:
    return "n/a" if loss is None else f"{loss:.{_decimals(noise)}f}"


def _plus_minus(noise: Noise | None) -> str:
    return "" if noise is None else f" ± {noise.loss:.{_decimals(noise)}f}"


def _decimals(noise: Noise | None) -> int:
    """Return the decimals of a loss: those that show two digits of its noise, and at most four."""
    if noise is None or noise.loss <= 0:
        return MOST_DECIMALS
    return min(MOST_DECIMALS, max(0, 1 - math.floor(math.log10(noise.loss))))


def _perplexity_words(perplexity: float, noise: Noise | None) -> str:
    """Return a perplexity; with noise on the loss that shows in two decimals, from where to where it may be."""
    if noise is None or noise.loss < FINE_NOISE:
        return f"perplexity {perplexity:,.2f}"
    low, high = (perplexity * math.exp(min(each, 700.0)) for each in (-noise.loss, noise.loss))
    return f"perplexity {_two_digits(low)} to {_two_digits(high)}"


def _two_digits(number: float) -> str:
    return f"{number:.2g}" if number < 100 else f"{float(f'{number:.2g}'):,.0f}" if number < 1e6 else f"{number:.1e}"


def _accuracy_words(accuracy: float, noise: Noise | None) -> str:
    if noise is None or noise.accuracy is None:
        return f"accuracy {accuracy:.1%}"
    decimals = 0 if noise.accuracy >= 0.1 else 1
    return f"accuracy {accuracy:.{decimals}%} ± {noise.accuracy:.{decimals}%}"


def _trained_too(shared: int) -> str:
    return f", {shared:,} of which {'is' if shared == 1 else 'are'} trained on too" if shared else ""


def _choice_words(config: EvaluationConfig) -> str:
    """Return the cost of choosing a step by its evaluation; epsilon holds for nobody who is on both sides."""
    on_both_sides = config.cost is Cost.OUTSIDE and config.shared > 0
    return CHOICE[config.cost] + ", except for those on both sides" * on_both_sides


def _held_out_words(config: EvaluationConfig) -> str:
    """Return the number of held-out samples with what they are, and how many of them are trained on."""
    number = len(config.dataset)
    if config.shared:
        return f"{count(number, 'held-out sample')}{_trained_too(config.shared)}"
    words = dataset_unit(config.dataset).one.replace(",", "").split()
    word = words[1] if len(words) > 1 else ""
    noun = NOUNS.get(word, "sample")
    return (
        f"{count(number, noun)} {'who' if noun == USER else 'that'} {'was' if number == 1 else 'were'} not trained on"
    )
