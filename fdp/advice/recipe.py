"""A recipe: every setting of a private run, each with its reason and the paper it comes from.

    batch size, steps   most predicted progress in the time given (:mod:`fdp.advice.batch_and_steps`)
    learning rate       1 / width with Adam, decayed by a cosine
    clipping            automatic (normalised), C = 1
    what is trained     LoRA of rank 16 for a pretrained model of 10 million parameters or more; else everything
    microbatch          the largest that fits and is of use; it changes speed and memory only

The learning rate of Adam falls with the width of the matrices (Yang et al. 2022, arXiv 2203.03466). The constant 1 fits
what was published for private fine-tuning: 5e-4 (RoBERTa-base, width 768) and 2e-3 (GPT-2, 768) of Li et al. 2022
(arXiv 2110.05679), 1e-3 (LoRA on RoBERTa-base and -large, 768 and 1024) and 4e-4 (LoRA on GPT-2-medium, 1024) of Yu et
al. 2022 (arXiv 2110.06500), all of them 10 to 100 times the rates of training without privacy.

    >>> recipe = make_recipe(situation, given={"batch_size": 256}, seconds=3600.0)
    >>> recipe.settings                                     # {"batch_size": 256, "steps": 740, "lr": 1e-3, ...}
    >>> recipe.reasons["lr"]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from fdp.advice.batch_and_steps import Choice, Fixed, Problem, Speed, choose_batch_and_steps
from fdp.advice.signal import alignment_of, signal_to_noise
from fdp.model import Model
from fdp.privacy.shown_numbers import round_up

LORA_RANK, LORA_FROM = 16, 10_000_000
"""The advised rank, and the size of a pretrained model from which adapters are advised."""

ADAM_LIKE = ("adamw", "adam", "adamax")
HIGHEST_RATE, LOWEST_RATE = 2e-2, 1e-5


class Situation(NamedTuple):
    """A model with its data and budget on a machine: all that a recipe depends on."""

    problem: Problem
    speed: Speed
    width: int
    microbatch: int


class Recipe(NamedTuple):
    """The settings that were not given, by the name of the option in Python, and the reason for each."""

    settings: dict[str, Any]
    reasons: dict[str, str]
    choice: Choice
    seconds: float


def make_recipe(situation: Situation, *, given: Mapping[str, Any], seconds: float) -> Recipe:
    """Return settings for everything that is not ``given``, to train within ``seconds``."""
    problem, speed = situation.problem, situation.speed
    fixed = Fixed(given.get("batch_size"), given.get("steps"), given.get("epochs"))
    choice = choose_batch_and_steps(problem, speed, seconds=seconds, fixed=fixed)
    lasts = speed.seconds(choice.batch_size, choice.steps)
    found = {
        "batch_size": (choice.batch_size, _why_batch(problem, choice)),
        "steps": (choice.steps, _why_steps(problem, choice, lasts, seconds)),
        **_learning_rate(given, situation.width),
        **_clipping(given),
        "schedule": ("cosine", "cosine after a warm-up of a tenth of the steps: noise hurts least at small rates"),
        "microbatch": (
            min(situation.microbatch, _power_of_two_above(choice.batch_size)),
            "fits into free memory; it changes speed and memory, not the result",
        ),
    }
    taken = set(given) | ({"steps"} if "epochs" in given else set())
    left = {key: both for key, both in found.items() if key not in taken}
    return Recipe(
        {key: value for key, (value, _) in left.items()}, {key: why for key, (_, why) in left.items()}, choice, lasts
    )


def advise_lora(model: Model, *, pretrained: bool) -> tuple[int, str] | None:
    """Return the rank of LoRA and the reason if adapters are advised, else None."""
    size = sum(math.prod(leaf.shape) for leaf in model.leaves.values())
    if not pretrained or size < LORA_FROM:
        return None
    return LORA_RANK, (
        f"adapters: {size / 1e6:,.0f} million pretrained parameters; LoRA was as good as or better than training all "
        f"of them privately, with less noise, memory and time (Yu et al. 2022, arXiv 2110.06500)"
    )


def model_width(model: Model) -> int:
    """Return the most common dimension of the model's matrices, weighted by size."""
    sizes: Counter[int] = Counter()
    for leaf in model.leaves.values():
        if len(leaf.shape) >= 2:
            sizes.update({size: math.prod(leaf.shape) for size in set(leaf.shape) - {model.vocab_size}})
    return max(sizes, key=lambda size: (sizes[size], -size)) if sizes else 1


def learning_rate_for(width: int) -> float:
    """Return ``1 / width`` to one digit, between 1e-5 and 2e-2."""
    return float(f"{min(max(1 / width, LOWEST_RATE), HIGHEST_RATE):.0e}")


def _learning_rate(given: Mapping[str, Any], width: int) -> dict[str, tuple[Any, str]]:
    optimizer = given.get("optimizer", "adamw")
    if optimizer not in ADAM_LIKE:
        return {}
    why = (
        f"1 / width {width} for Adam (Yang et al. 2022, arXiv 2203.03466), the scale of Li et al. and Yu et al. 2022 "
        f"for private training; the setting most worth a search"
    )
    return {"lr": (learning_rate_for(width), why)}


def _clipping(given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    style = given.get("clip", "automatic")
    whys = {
        "automatic": "every gradient is scaled to C, so no norm of a private gradient has to be known, and with Adam "
        "the size of C does not matter (Bu et al. 2023, arXiv 2206.07136)",
        "flat": "C = 1, as in De et al. 2022 (arXiv 2204.13650); the hints of a run say if it is far off",
    }
    found: dict[str, tuple[Any, str]] = {"clip": (style, whys.get(style, "as given"))}
    if style in whys:
        found["max_norm"] = (1.0, "with Adam only its ratio to the gradients' norms matters")
    return found


def _why_batch(problem: Problem, choice: Choice) -> str:
    aligned = alignment_of(pretrained=problem.pretrained, steps=choice.steps)
    ratio = signal_to_noise(
        noise_multiplier=choice.noise_multiplier,
        batch_size=choice.batch_size,
        parameters=problem.parameters,
        steps=choice.steps,
        alignment=aligned,
    )
    noise = round_up(choice.noise_multiplier, 4)
    return (
        f"most predicted progress in this time: noise multiplier {noise}, noise-to-batch ratio "
        f"{choice.noise_multiplier / choice.batch_size:.2g}, signal-to-noise {ratio.per_step:.2g} per step and "
        f"{ratio.in_total:.2g} in all (Sander et al. 2023, arXiv 2210.03403; McKenna et al. 2025, 2501.18914)"
    )


def _why_steps(problem: Problem, choice: Choice, lasts: float, seconds: float) -> str:
    epochs = choice.batch_size * choice.steps / problem.population
    room = "all of the time given" if lasts > 0.8 * seconds else "more would add little at this epsilon"
    return f"{epochs:.2g} epochs of the public population of {problem.population:,}; {room}"


def _power_of_two_above(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
