"""``fdp advise`` as a user types it."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.train_runs import call, last_json

SMALL = shlex.split("advise --model logistic --data digits --epsilon 4 --hours 0.01 --json")


def test_the_command_that_is_printed_trains(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, "--max-norm", "0.5", "--steps", "12") == 0
    shown = capsys.readouterr().out
    found = last_json(shown)
    assert found["command"] in shown
    words = shlex.split(found["command"])[1:]
    assert words[:9] == shlex.split("train --model logistic --data digits --epsilon 4 --clip automatic")
    assert words[words.index("--max-norm") + 1] == "0.5"
    assert "steps" not in found["settings"]
    assert {"batch_size", "lr", "clip"} <= set(found["settings"])
    assert found["settings"].keys() == found["reasons"].keys()
    assert found["population"] == 1500, "the public number, not the private 1437"
    assert "1437" not in shown
    assert "1,437" not in shown
    assert call(*words, "--out", str(tmp_path / "run"), "--json") == 0
    summary = last_json(capsys.readouterr().out)
    assert summary["noise_multiplier"] == pytest.approx(found["noise_multiplier"])
    assert summary["epsilon"] <= 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hours", "0"], "--hours: expected a positive number, got 0"),
        (["--hours", "1e-9"], "--hours: expected time for 10 steps"),
        (["--method", "none"], "--method none: expected a private run"),
        (["--model", "gpt-nan"], "--model"),
    ],
)
def test_mistakes_are_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, *words) == 2
    assert message in last_json(capsys.readouterr().out)["error"]
