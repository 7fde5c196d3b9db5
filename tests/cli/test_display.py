"""The output of ``fdp train``: header, progress, result and report."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fdp.cli import display, progress
from fdp.cli.configure import configure
from fdp.cli.covered_files import describe_covered, describe_not_covered
from fdp.privacy.guarantee import RELATION
from fdp.run import prepare_run, training_run
from fdp.run.equal_sizes import RoundingWarning
from fdp.run.step_record import StepRecord
from tests.cli.train_runs import call, small_options, train


def test_a_log_gets_plain_lines_and_says_what_is_covered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", steps=30) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert sum(line.startswith("step ") for line in text.splitlines()) == 11  # the first, then one in ten
    flat = " ".join(text.replace("│", " ").split())
    assert f"covered {describe_covered(tmp_path / 'run')}" in flat
    assert f"not covered {describe_not_covered(tmp_path / 'run')}" in flat
    assert "one labelled image, added or removed" in flat
    assert "samples/s" in flat
    assert f"neighbours {RELATION}" in flat
    assert f"({RELATION})" in flat, "at the end, beside the epsilon"
    assert f"32 of 1,500 expected per step (public rate 0.0213{display.ROUNDED})" in flat
    assert train(tmp_path / "other", "--population", "2000", "--delta", "1e-3", steps=2) == 0
    flat = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "32 of 2,000 expected per step (public rate 0.016)" in flat
    assert "is not below 1 / samples = 0.0005" in flat
    assert train(tmp_path / "few", "--population", "100", "--delta", "8e-4", steps=2) == 0
    flat = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "is not below 1 / samples = 0.0007" in flat, "there are more samples than were announced"


def test_the_result_repeats_in_one_line_that_a_given_seed_makes_the_noise_guessable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "seeded", "--seed", "7", steps=2) == 0
    shown = capsys.readouterr().out
    result = shown[shown.index("─ done") :]
    assert f"7: {display.GUESSABLE}" in result, "in one line"
    assert train(tmp_path / "run", steps=2) == 0
    assert display.GUESSABLE not in capsys.readouterr().out
    plain = ["--model", "logistic", "--data", "digits", "--method", "none", "--seed", "7", "--steps", "2"]
    assert call("train", *plain, "--out", str(tmp_path / "plain")) == 0
    assert display.GUESSABLE not in capsys.readouterr().out, "there is no noise"


def test_a_warning_of_the_run_is_a_plain_paragraph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = prepare_run.usable_sizes

    def warn(*args: Any, **options: Any) -> tuple[int, ...]:
        warnings.warn("of two sizes one is used", RoundingWarning, stacklevel=2)
        return real(*args, **options)

    monkeypatch.setattr(prepare_run, "usable_sizes", warn)
    assert train(tmp_path / "run", steps=2) == 0
    found = capsys.readouterr()
    assert "of two sizes one is used" in found.out.splitlines()
    assert "RoundingWarning" not in found.out + found.err


def test_the_epsilon_shown_is_never_below_the_one_spent() -> None:
    record = StepRecord(1, 1.0, 0.00042, 1.0, 1.0, 1.0, 1.0, 1.0, samples=8, seconds=2.0)
    assert progress.progress_words([record], total=3) == ["loss 1.0000", "epsilon 0.001", "4.0 samples/s", "0:04 left"]
    assert progress.progress_words([record._replace(epsilon=7.9931)], total=1)[1] == "epsilon 7.994"
    assert progress.progress_words([record._replace(epsilon=None)], total=1)[1] == "not private"


def test_a_terminal_gets_a_line_that_is_redrawn() -> None:
    run, state = prepare_run.prepare(configure(small_options()))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, height=30)
    seen = list(progress.follow(training_run.steps(run, state), run, console))
    assert [record.step for _, record in seen] == [1, 2, 3, 4]
    text = screen.getvalue()
    assert "\x1b[" in text
    assert "step 4/4" in text
    assert "epsilon" in text
    assert "0:00 left" in text


def test_a_sparkline_falls_with_its_values() -> None:
    assert progress.sparkline([float(9 - i) for i in range(8)]) == "█▇▆▅▄▃▂▁"
    assert len(progress.sparkline([float(i) for i in range(1000)])) == 24
    assert progress.sparkline([1.0]) == ""
    assert progress.sparkline([1.0, 1.0]) == "▁▁"
