"""Batch size and steps: near what papers found best, within the time, and as given where given."""

from __future__ import annotations

import pytest

from fdp.advice.batch_and_steps import Fixed, Problem, Speed, choose_batch_and_steps, exact_noise, rough_noise
from fdp.types import FdpError

SAMPLES = Speed(0.0, 1.0)
"""One sample takes one second, so that seconds count samples."""

NANO = Problem(842_496, False, 69_000, 8.0, 1e-7)


@pytest.mark.parametrize(
    ("problem", "samples", "batch", "steps"),
    [
        # Li et al. 2022: GPT-2 on E2E, 10 epochs; RoBERTa-base on SST-2, 3 epochs
        (Problem(124_000_000, True, 42_000, 8.0, 8e-6), 420_000, 1024, 410),
        (Problem(125_000_000, True, 67_000, 8.0, 1e-6), 201_000, 1000, 200),
        # Yu et al. 2022: LoRA of rank 16 on MNLI, 20 epochs
        (Problem(1_200_000, True, 393_000, 6.7, 1e-6), 7_860_000, 2000, 3930),
        # De et al. 2022: WRN-16-4 on CIFAR-10
        (Problem(2_700_000, False, 50_000, 8.0, 1e-5), 8_192_000, 4096, 2000),
        # the best of a sweep over batch size, steps and learning rate: gpt-nano on the standard library
        (NANO, 3584, 32, 112),
    ],
)
def test_the_choice_is_near_the_published_one(problem: Problem, samples: int, batch: int, steps: int) -> None:
    found = choose_batch_and_steps(problem, SAMPLES, seconds=samples, fixed=Fixed())
    assert batch / 3 < found.batch_size < 3 * batch
    assert steps / 3 < found.steps < 3 * steps
    assert 0.5 * samples < found.batch_size * found.steps <= samples


def test_more_time_gives_larger_batches_and_more_steps() -> None:
    short, long = (choose_batch_and_steps(NANO, SAMPLES, seconds=s, fixed=Fixed()) for s in (4e3, 4e5))
    assert long.batch_size > 2 * short.batch_size
    assert long.steps > 2 * short.steps


def test_what_is_given_stays() -> None:
    batch = choose_batch_and_steps(NANO, SAMPLES, seconds=4000, fixed=Fixed(batch_size=100))
    assert batch.batch_size == 100
    assert batch.steps <= 40
    assert choose_batch_and_steps(NANO, SAMPLES, seconds=4000, fixed=Fixed(steps=77)).steps == 77
    both = choose_batch_and_steps(NANO, SAMPLES, seconds=1, fixed=Fixed(batch_size=64, steps=50))
    assert both[:2] == (64, 50)
    epochs = choose_batch_and_steps(NANO, SAMPLES, seconds=1e6, fixed=Fixed(epochs=2))
    assert epochs.batch_size * epochs.steps == pytest.approx(2 * NANO.population, rel=0.02)


def test_the_noise_is_that_of_the_accountant_and_the_rough_one_is_near() -> None:
    found = choose_batch_and_steps(NANO, SAMPLES, seconds=4000, fixed=Fixed(batch_size=64, steps=50))
    assert found.noise_multiplier == exact_noise(NANO, batch_size=64, steps=50)
    assert rough_noise(NANO, batch_size=64, steps=50) == pytest.approx(found.noise_multiplier, rel=0.3)
    given = NANO._replace(epsilon=None, noise_multiplier=0.7)
    assert exact_noise(given, batch_size=64, steps=50) == 0.7 == rough_noise(given, batch_size=64, steps=50)


def test_a_tiny_population_and_no_time_are_handled() -> None:
    tiny = NANO._replace(population=10)
    assert choose_batch_and_steps(tiny, SAMPLES, seconds=1000, fixed=Fixed()).batch_size <= 5
    with pytest.raises(FdpError, match="--hours: expected time for 10 steps"):
        choose_batch_and_steps(NANO, SAMPLES, seconds=5, fixed=Fixed())
    with pytest.raises(FdpError, match="--hours: expected a positive number"):
        choose_batch_and_steps(NANO, SAMPLES, seconds=0, fixed=Fixed())
