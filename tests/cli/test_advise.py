"""``fdp advise`` as a user types it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from fdp.advice import machine
from fdp.cli.advise import HEADINGS
from fdp.cli.configure import configure
from fdp.cli.recipe import largest_batch
from fdp.privacy.shown_numbers import round_up
from tests.cli.train_runs import call, interrupt_after, last_json, small_options
from tests.data.test_text import write

SMALL = shlex.split("advise --model logistic --data digits --epsilon 4 --hours 0.01 --json")


def test_the_command_that_is_printed_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, "--max-norm", "0.5", "--steps", "12") == 0
    shown = capsys.readouterr().out
    found = last_json(shown)
    assert found["command"] in shown
    table = shown[shown.index("settings around the recipe") :]
    assert "…" not in table, "a heading or a number is cut at 80 columns"
    assert len(HEADINGS) == len(
        table.splitlines()[5].replace(" min", "_").replace(" s", "_").replace("no ", "_").split()
    )
    words = shlex.split(found["command"])[1:]
    assert words[:9] == shlex.split("train --model logistic --data digits --epsilon 4 --clip automatic")
    assert words[words.index("--max-norm") + 1] == "0.5"
    assert "steps" not in found["settings"]
    noise = round_up(found["noise_multiplier"], 4)
    assert f"noise multiplier {noise}, noise-to-batch" in " ".join(shown.split())
    assert table.count(f" {noise} ") >= 1
    assert {"batch_size", "lr", "clip"} <= set(found["settings"])
    assert found["settings"].keys() == found["reasons"].keys()
    assert found["population"] == 1500, "the public number, not the private 1437"
    assert not re.search(r"(?<!\d)1437(?!\d)", shown), "the private number; digits of measured seconds may hold it"
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


USERS = shlex.split("advise --unit user --user-field by --context 32 --epsilon 4 --hours 0.01 --batch-size 2 --steps 2")


@pytest.mark.long
def test_windows_per_user_is_suggested_and_said_to_be_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "notes.jsonl", *({"by": f"u{i % 12}", "text": f"a word or two, {i}"} for i in range(24)))
    assert call(*USERS, "--data", str(data), "--json") == 0
    shown = capsys.readouterr().out
    found = last_json(shown)
    windows, pack = found["private_suggestions"]
    assert windows.startswith("--windows-per-user 2: uses all windows of 90% of the users")
    assert pack.startswith("--pack: ")
    assert "computed from private data and covered by no budget" in " ".join(shown.split())
    assert "windows_per_user" not in found["settings"], "the recipe uses public numbers only"
    assert call(*USERS, "--data", str(data), "--windows-per-user", "8", "--pack", "--json") == 0
    shown = capsys.readouterr().out
    assert last_json(shown)["private_suggestions"] == [], "what is given stays"
    assert "computed from private data" not in shown


AUTO = shlex.split("train --model logistic --data digits --epsilon 4 --recipe auto --hours 0.01 --steps 6 --max-norm 2")


def test_recipe_auto_fills_in_what_is_not_given_and_resumes_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    words = [*AUTO, "--save-every", "2", "--out", str(out)]
    with monkeypatch.context() as patch:
        interrupt_after(4, patch)
        assert call(*words) == 130
    shown = capsys.readouterr().out
    assert "--batch-size" in shown
    assert "expected duration" in shown
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert (settings["steps"], settings["max_norm"]) == (6, 2.0), "what is given wins"
    assert (settings["clip"], settings["lr"]) == ("automatic", 0.02)
    assert settings["batch_size"] != 64
    assert settings["recipe"] == "auto"
    monkeypatch.setattr(machine, "time_steps", lambda *args, **more: pytest.fail("a resumed run has its recipe"))
    assert call(*words) == 0
    assert "the settings are those that the run began with" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["settings"] == settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "atuo"], "--recipe: expected one of none, auto; got 'atuo'. Did you mean 'auto'?"),
        (["--recipe", "none", "--hours", "2"], "--hours: expected --recipe auto to go with it"),
    ],
)
def test_mistakes_about_recipes_are_explained(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*AUTO, *words, "--json", "--out", str(tmp_path / "run")) == 2
    assert message in last_json(capsys.readouterr().out)["error"]


def test_the_microbatch_follows_from_the_public_number_of_samples() -> None:
    """It is written to files that hold nothing of the data: 1437 samples, announced as 1500 by default."""
    config = configure(small_options())
    assert len(config.dataset) == 1437
    assert largest_batch(config, {}) == 1500
    assert largest_batch(configure(small_options(population=4000)), {}) == 4000
    assert largest_batch(config, {"batch_size": 64}) == 64
