"""Recipes: every setting has a reason, and what is given stays."""

from __future__ import annotations

import pytest
import torch

from fdp import models
from fdp.advice.batch_and_steps import Choice, Problem, Speed
from fdp.advice.machine import Memory, choose_microbatch, free_memory
from fdp.advice.recipe import Situation, advise_lora, learning_rate_for, make_recipe, model_width
from fdp.advice.table import make_rows
from fdp.cli.advise import fits_words
from fdp.foreign.adapters.lora import lora_model

SITUATION = Situation(Problem(842_496, False, 69_000, 8.0, 1e-7), Speed(0.1, 0.03), 128, 32)


def test_every_setting_has_a_reason_and_names_a_source() -> None:
    recipe = make_recipe(SITUATION, given={}, seconds=120)
    assert set(recipe.settings) == {"batch_size", "steps", "lr", "clip", "max_norm", "schedule", "microbatch"}
    assert recipe.settings.keys() == recipe.reasons.keys()
    assert recipe.seconds <= 120
    for key in ("batch_size", "lr", "clip"):
        assert "20" in recipe.reasons[key]
        assert "arXiv" in recipe.reasons[key]


def test_what_is_given_is_not_in_the_recipe() -> None:
    given = {"batch_size": 100, "lr": 1e-3, "clip": "flat", "max_norm": 0.1, "epochs": 0.1}
    recipe = make_recipe(SITUATION, given=given, seconds=1e5)
    assert set(recipe.settings) == {"schedule", "microbatch"}
    assert recipe.choice.batch_size == 100
    assert recipe.choice.steps == 69
    assert "lr" not in make_recipe(SITUATION, given={"optimizer": "sgd"}, seconds=120).settings


@pytest.mark.parametrize(
    ("name", "width"), [("gpt-nano", 128), ("llama-nano", 128), ("gpt2", 768), ("gpt2-medium", 1024)]
)
def test_the_width_is_that_of_the_model(name: str, width: int) -> None:
    assert model_width(models.build(name)) == width


def test_the_learning_rate_is_one_over_the_width_within_bounds() -> None:
    assert [learning_rate_for(width) for width in (1, 128, 768, 1024, 10**7)] == [2e-2, 8e-3, 1e-3, 1e-3, 1e-5]


def test_adapters_are_advised_for_large_pretrained_models_only() -> None:
    large, small = models.build("gpt2"), models.build("gpt-nano")
    rank, why = advise_lora(large, pretrained=True) or (0, "")
    assert rank == 16
    assert "Yu et al. 2022" in why
    assert advise_lora(large, pretrained=False) is None
    assert advise_lora(small, pretrained=True) is None
    targets = [path for path, leaf in small.leaves.items() if sorted(leaf.shape) == [128, 512]]
    adapted = lora_model(small, rank=2, alpha=4.0, targets=targets)
    assert model_width(adapted) == 128, "adapters do not change the width"


@pytest.mark.slow
def test_rows_hold_the_recipe_once_and_mark_what_fits() -> None:
    choice = make_recipe(SITUATION, given={}, seconds=120).choice
    rows = make_rows(SITUATION, choice, seconds=120)
    recipe = [row for row in rows if row.is_recipe]
    assert len(recipe) == 1
    assert recipe[0].fits
    assert recipe[0].noise_to_batch == pytest.approx(recipe[0].noise_multiplier / recipe[0].batch_size)
    assert not all(row.fits for row in rows)
    assert recipe[0].progress > 0.9 * max(row.progress for row in rows if row.fits)


def test_rows_with_batches_that_the_recipe_never_chooses_are_marked() -> None:
    small = SITUATION._replace(problem=SITUATION.problem._replace(population=1000, epsilon=None, noise_multiplier=1.0))
    rows = make_rows(small, Choice(200, 50, 1.0), seconds=1e6)
    assert {row.batch_size: row.high_rate for row in rows} == {50: False, 200: False, 800: True}
    for row in rows:
        assert fits_words(row, fits_memory=False) == "no memory"
        same = "recipe" if row.is_recipe else "yes"
        assert fits_words(row, fits_memory=True) == ("high rate" if row.batch_size == 800 else same)
        assert fits_words(row._replace(fits=False), fits_memory=True) == "no time"
    assert fits_words(rows[-1]._replace(is_recipe=True), fits_memory=True) == "recipe", "a batch size that was given"


def test_the_microbatch_is_the_largest_that_fits() -> None:
    cpu, memory = torch.device("cpu"), Memory(100.0, 10.0)
    assert choose_microbatch(memory, 1e9, most=1000, device=cpu) == 32
    assert choose_microbatch(memory, 260 / 0.8, most=1000, device=cpu) == 16
    assert choose_microbatch(memory, 1.0, most=1000, device=cpu) == 1
    assert choose_microbatch(memory, 1e9, most=7, device=cpu) == 4
    assert free_memory(cpu) > 0
