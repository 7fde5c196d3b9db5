"""Hints: each once, from the right records, and none where nothing is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fdp.advice.divergence import find_divergence, patience
from fdp.advice.hints import FIRST_STEP_SHARE, Diverged, clipping_hint, follow_hints, hints_before
from fdp.cli.configure import configure
from fdp.privacy.guarantee import RELATION, Guarantee
from fdp.privacy.shown_numbers import round_up
from fdp.run.prepare_run import Run, prepare
from fdp.run.step_record import StepRecord
from tests.cli.train_runs import last_json, small_options, train


def record(step: int, loss: float | None = 2.0, clipped: float | None = 0.5, samples: int = 32) -> StepRecord:
    return StepRecord(step, loss, 1.0, clipped, 2.0, 3.0, 4.0, 1.0, samples, 0.1)


def losses(*values: float | None) -> list[StepRecord]:
    return [record(step, value) for step, value in enumerate(values, start=1)]


def prepared(**changes: object) -> Run:
    return prepare(configure(small_options(**changes)))[0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.5, 5.6, 5.4, 5.5, 5.6, 5.5, 5.4, 5.6], None),  # learns nothing
        ([5.5, 9.0, 5.0, 9.0, 9.0, 9.0, 9.0], None),  # 4 in a row
        ([5.5, 9.0, 9.0, 9.0, 9.0, 9.0], 6),
        ([5.5, 100.0, 100.0, 100.0], 4),  # far above: 3 are enough
        ([5.5, None, None, None], 4),  # not finite
        ([2.3, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0], None),
        ([0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], None),  # a well-trained model may lose a little
        ([None, 5.0, 5.1], None),
    ],
)
def test_divergence_is_a_loss_that_stays_above_the_first(values: Sequence[float | None], expected: int | None) -> None:
    found = find_divergence(losses(*values), steps=40)
    assert (None if found is None else found.step) == expected


def test_a_short_run_is_judged_at_its_end() -> None:
    assert find_divergence(losses(2.0, 9.0, 9.0), steps=4) is None
    found = find_divergence(losses(2.0, 9.0, 9.0, 9.0), steps=4)
    assert found is not None
    assert "2 " in f"{found.sentence} "
    assert find_divergence(losses(2.0, 9.0, 9.0, 1.9), steps=4) is None


def test_empty_draws_neither_diverge_nor_end_a_divergence() -> None:
    empty = record(9, None, samples=0)
    assert find_divergence([*losses(5.5, 5.0), empty, empty, empty], steps=40) is None
    assert find_divergence([*losses(5.5, 70, 80), empty, record(10, 90.0)], steps=40) is not None


def test_patience_grows_with_the_run() -> None:
    assert [patience(steps) for steps in (3, 40, 400, 10_000)] == [5, 5, 20, 50]


def test_all_clipped_and_none_clipped_are_told_with_numbers() -> None:
    kind, said = clipping_hint([record(i, clipped=1.0) for i in range(1, 11)], steps=40) or ("", "")
    assert kind == "clipped"
    assert "all samples were clipped in the last 10 steps (median norm 3" in said
    kind, said = clipping_hint([record(i, clipped=0.0) for i in range(1, 11)], steps=40) or ("", "")
    assert kind == "unclipped"
    assert "lower --max-norm to about 3" in said
    mixed = [record(i, clipped=1.0) for i in range(1, 10)] + [record(10, clipped=0.97)]
    assert clipping_hint(mixed, steps=40) is None
    assert clipping_hint(mixed[:5], steps=40) is None


def test_each_hint_is_given_once_and_divergence_ends_the_stream() -> None:
    run, said = prepared(steps=40, clip="flat"), []
    records = [record(i, clipped=1.0) for i in range(1, 31)]
    stream = [(None, each) for each in records]
    assert len(list(follow_hints(stream, run, say=said.append, stop=True))) == 30  # type: ignore[arg-type]
    assert len(said) == 1
    bad = [(None, each) for each in losses(2.0, 90.0, 90.0, 90.0, 90.0)]
    with pytest.raises(Diverged, match=r"the loss is 90 at step 4; before the first update it was 2\..*--lr"):
        list(follow_hints(bad, run, say=said.append, stop=True))  # type: ignore[arg-type]
    assert len(list(follow_hints(bad, run, say=said.append, stop=False))) == 5  # type: ignore[arg-type]
    assert len(said) == 2
    assert "diverges" in said[1]


@pytest.mark.long
def test_a_first_step_that_spends_most_names_the_price_of_more() -> None:
    dear = prepared(noise_multiplier=None, epsilon=6.0, steps=4, batch_size=2, population=100_000)
    hint = next(hint for hint in hints_before(dear) if "first step" in hint)
    assert "of epsilon 6" in hint
    assert "4 times as many steps, --steps 16, need only 1.06 times the noise" in hint
    assert f"instead of {round_up(dear.mechanism.noise_multiplier, 4)})" in hint
    before = (Guarantee(1.0, 1e-6, RELATION, "one record"),)  # extended: the budget is what the total has left
    extended = dear._replace(config=replace(dear.config, before=before))
    assert not [hint for hint in hints_before(extended) if "first step" in hint]
    cheap = prepared(noise_multiplier=None, epsilon=2.0, steps=400, batch_size=256)
    assert not [hint for hint in hints_before(cheap) if "first step" in hint]


@pytest.mark.parametrize(("noise", "told"), [(0.3, True), (4.0, False)])
def test_an_epsilon_that_promises_little_is_told(noise: float, told: bool) -> None:
    found = hints_before(prepared(noise_multiplier=noise))
    assert any("promises little: beyond 10" in hint for hint in found) == told


def test_steps_that_need_as_much_more_noise_are_not_called_cheap() -> None:
    """Four times the steps with twice the noise gain nothing."""
    tiny = prepared(noise_multiplier=None, epsilon=1e-4, steps=3, batch_size=256)
    assert tiny.epsilons is not None
    assert tiny.epsilons[0] > FIRST_STEP_SHARE * tiny.epsilons[-1], "else the test tests nothing"
    assert not [hint for hint in hints_before(tiny) if "first step" in hint]


@pytest.mark.parametrize(
    ("population", "expected"),
    [
        (100_000, "100,000 is far above the number of samples: a step draws about 0.1 samples on average instead of 8"),
        (100, "100 is far below the number of samples: a step draws about 100 samples on average instead of 8"),
        (1_000, None),
        (2_500, None),
        (None, None),
    ],
)
def test_a_population_far_from_the_number_of_samples_is_told(population: int | None, expected: str | None) -> None:
    run = prepared(batch_size=8, population=population)
    found = [hint for hint in hints_before(run) if "far" in hint]
    assert (expected is None) == (not found)
    if expected is not None:
        assert expected in found[0]
        assert str(run.mechanism.sampling.dataset_size) not in found[0].replace(",", "")


def test_a_rate_near_one_and_a_batch_too_small_are_told() -> None:
    assert any("sampling rate is 0.8" in hint for hint in hints_before(prepared(batch_size=1440, population=1800)))
    drowned = hints_before(prepared(noise_multiplier=50.0, batch_size=8))
    assert any("small for this noise" in hint and "--batch-size" in hint for hint in drowned)
    assert not hints_before(prepared(noise_multiplier=1.0, batch_size=256, steps=50))
    assert not hints_before(prepared(method="none", noise_multiplier=None))


@pytest.mark.long
def test_a_learning_rate_that_diverges_is_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "a", "--lr", "1e6", "--json", steps=30) == 4
    shown, explained = capsys.readouterr()
    summary = last_json(shown)
    assert summary["diverged"]["step"] < 30
    assert summary["epsilon"] > 0
    assert "Lower --lr" in explained
    assert "no model was exported" in shown
    assert "spent" in shown
    assert not (tmp_path / "a" / "model.safetensors").exists()
    assert train(tmp_path / "b", "--lr", "1e6", "--on-divergence", "continue", steps=8) == 0
    assert train(tmp_path / "c", "--on-divergence", "stopp", steps=3) == 2


def test_adapters_on_a_preset_are_answered_with_the_folder() -> None:
    hints = hints_before(prepared(model="mlp", train_only="*bias"))
    assert any("a preset with random parameters" in hint and "--model FOLDER" in hint for hint in hints)
    assert not any("random parameters" in hint for hint in hints_before(prepared()))
