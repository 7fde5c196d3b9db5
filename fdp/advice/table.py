"""The table of `fdp advise`: noise, signal, time and memory for several batch sizes and numbers of epochs.

>>> for row in make_rows(situation, recipe.choice, seconds=3600.0): print(row.noise_multiplier, row.fits)
"""

from __future__ import annotations

from typing import NamedTuple

from fdp.advice.batch_and_steps import Choice, exact_noise, largest_batch
from fdp.advice.recipe import Situation
from fdp.advice.signal import Signal, alignment_of, progress, signal_to_noise

FACTORS = (0.25, 1, 4)
"""Batch sizes and epochs of the table, as multiples of the recipe's."""


class Row(NamedTuple):
    """One setting: its noise, its predicted signal-to-noise ratio, its time, and whether it fits into the time.

    ``progress`` is the number of steps without noise that would get as far, which the recipe makes as large as it can
    among batches of at most half the population: ``high_rate`` is True for larger ones, which it never chooses.
    """

    batch_size: int
    steps: int
    epochs: float
    noise_multiplier: float
    noise_to_batch: float
    signal: Signal
    progress: float
    seconds: float
    fits: bool
    high_rate: bool
    is_recipe: bool


def make_rows(situation: Situation, choice: Choice, *, seconds: float) -> list[Row]:
    """Return the recipe and settings around it, by batch size and then by epochs."""
    most = situation.problem.population
    sizes = sorted({min(most, max(1, round(choice.batch_size * factor))) for factor in FACTORS})
    samples = [choice.batch_size * choice.steps * factor for factor in FACTORS]
    pairs = [(size, max(1, round(count / size))) for size in sizes for count in samples]
    return [_make_row(situation, choice, pair, seconds) for pair in dict.fromkeys(pairs)]


def _make_row(situation: Situation, choice: Choice, pair: tuple[int, int], seconds: float) -> Row:
    (size, steps), problem = pair, situation.problem
    same = pair == (choice.batch_size, choice.steps)
    noise = choice.noise_multiplier if same else exact_noise(problem, batch_size=size, steps=steps)
    assumed = {
        "noise_multiplier": noise,
        "batch_size": size,
        "parameters": problem.parameters,
        "steps": steps,
        "alignment": alignment_of(pretrained=problem.pretrained, steps=steps),
    }
    found, steps_without_noise = signal_to_noise(**assumed), progress(**assumed)
    lasts, epochs = situation.speed.seconds(size, steps), size * steps / problem.population
    fits, high_rate = lasts <= seconds * 1.001, size > largest_batch(problem.population)
    return Row(size, steps, epochs, noise, noise / size, found, steps_without_noise, lasts, fits, high_rate, same)
