"""``fdp search`` as a user types it: the choice is in the budget, or said not to be."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from fdp.cli import search_runs, session
from fdp.privacy import accounting
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson
from fdp.privacy.selection import POISSON, Repetitions, selection_epsilon
from fdp.privacy.shown_numbers import shown_epsilon
from tests.cli.train_runs import call, interrupt_after, last_json

SMALL = shlex.split(
    "search --model logistic --data digits --batch-size 32 --microbatch 16 --steps 3 --epsilon 4 --trials 2 --seed 1 "
    "--lr 1e-2,1e-1 --json"
)


@pytest.mark.long
def test_the_best_run_is_exported_with_the_epsilon_of_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search"
    assert call(*SMALL, "--eval-data", "digits-test", "--eval-public", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    found = last_json(shown)
    assert found == json.loads((out / "search.json").read_text())
    assert found["trials"], "seed 1 draws at least one run"
    scores = [trial["score"] for trial in found["trials"]]
    assert found["best"]["score"] == min(scores)
    best = Path(found["best"]["folder"])
    assert (out / "model.safetensors").read_bytes() == (best / "model.safetensors").read_bytes()
    config = json.loads((best / "config.json").read_text())
    assert config["noise_multiplier"] == found["noise_multiplier"]
    sampling = poisson(1500, expected_batch_size=32, population=1500)
    mechanism = Mechanism(sampling, flat(max_norm=1.0), found["noise_multiplier"])
    budget = {"steps": 3, "delta": found["delta"]}
    assert found["epsilon"] == pytest.approx(selection_epsilon(mechanism, Repetitions(2.0, POISSON), **budget))
    assert 3.9 < found["epsilon"] <= 4
    summary = json.loads((best / "summary.json").read_text())
    assert summary["epsilon"] < found["epsilon"], "one run alone costs less than the search"
    assert "covers the model and its settings" in shown
    assert "public data" in shown
    assert "whoever guesses --seed can repeat the noise of every run" in " ".join(shown.split())
    stated = shown_epsilon(found["epsilon"])
    assert f"epsilon {stated} at delta" in shown
    for trial in found["trials"]:
        assert call("statement", trial["folder"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        chosen = trial["folder"] == found["best"]["folder"]
        assert (f"differentially private with epsilon = {stated} and" in said) == chosen
        assert ("Chosen by fdp search" in said) == chosen
        assert ("not the run that was chosen" in said) != chosen


WILD = shlex.split("--lr 1e6,1e7 --optimizer sgd --schedule constant --steps 12 --max-norm 1 --clip flat")


@pytest.mark.long
def test_losses_on_the_training_data_do_not_decide_which_run_can_be_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ``fdp train`` would end because its training loss diverges has a score like any other."""
    words = (*SMALL, *WILD, "--eval-data", "digits-test", "--eval-public")
    assert call(*words, "--out", str(tmp_path / "a")) == 0
    found = last_json(capsys.readouterr().out)
    assert found["trials"]
    for trial in found["trials"]:
        assert trial["score"] is not None
        assert len((Path(trial["folder"]) / "metrics.jsonl").read_text().splitlines()) == 12
    assert call(*words, "--not-private", "--out", str(tmp_path / "b")) == 0
    assert last_json(capsys.readouterr().out)["best"] is None


def test_a_run_whose_parameters_stop_being_finite_is_not_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*SMALL, *WILD, "--lr", "1e38,1e39", "--eval-data", "digits-test", "--eval-public")
    assert call(*words, "--out", str(tmp_path / "search")) == 0
    found = last_json(capsys.readouterr().out)
    assert found["trials"]
    assert all(trial["score"] is None for trial in found["trials"])


def test_a_search_without_privacy_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, "--not-private", "--out", str(tmp_path / "search")) == 0
    shown = capsys.readouterr().out
    found = last_json(shown)
    assert found["private"] is False
    assert found["epsilon"] is None
    assert "not private: each run alone has epsilon 4" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected --eval-fraction 0.1 or --eval-data to choose by"),
        (["--lr", "1e-2"], "expected at least two settings to choose from"),
        (["--lr", "fast,slow"], "--lr: expected a number, got 'fast'"),
        (["--max-norm", "-1,1"], "--max-norm: expected numbers of 0 or more"),
        (["--eval-fraction", "0.1", "--eval-epsilon", "1"], "--eval-epsilon: expected held-out people"),
        (["--eval-fraction", "0.1", "--trials", "0"], "--trials: expected a mean number of runs of at least 1"),
        (["--eval-fraction", "0.1", "--clip", "quantile"], "clip: expected a style without a released count"),
    ],
)
def test_mistakes_are_explained(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*SMALL, *words, "--out", str(tmp_path / "search")) == 2
    assert message in last_json(capsys.readouterr().out)["error"]


def test_no_run_at_all_is_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_runs, "draw_repetitions", lambda repetitions, rng: 0)
        assert call(*SMALL, "--eval-fraction", "0.1", "--out", str(tmp_path / "search")) == 0
    assert "nothing is released and nothing is spent" in capsys.readouterr().out


PUBLIC = ("--eval-data", "digits-test", "--eval-public")


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def draw_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_runs, "draw_repetitions", lambda repetitions, rng: 3)


def interrupt_while(number: int, *, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGINT before run ``number`` of a search reads its data, or after its last step."""
    train = session.train

    def interrupted(options, **more):
        here = options.output.out.name == f"trial-{number}"
        if here and not training:
            os.kill(os.getpid(), signal.SIGINT)
        code = train(options, **more)
        if here and training:
            os.kill(os.getpid(), signal.SIGINT)
        return code

    monkeypatch.setattr(session, "train", interrupted)


def test_an_interrupted_search_stops_exports_nothing_and_claims_no_more_than_its_runs_composed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_three(monkeypatch)
    interrupt_after(2, monkeypatch)
    assert call(*SMALL, *PUBLIC, "--out", str(tmp_path / "search")) == 130
    shown = capsys.readouterr().out
    found = last_json(shown)
    assert len(found["trials"]) == 1
    assert (found["best"], found["private"], found["epsilon"]) == (None, False, None)
    assert found == json.loads((tmp_path / "search" / "search.json").read_text())
    assert not (tmp_path / "search" / "model.safetensors").exists()
    sampling = poisson(1500, expected_batch_size=32, population=1500)
    mechanism = Mechanism(sampling, flat(max_norm=1.0), found["noise_multiplier"])
    composed = accounting.epsilon(mechanism, steps=3 * 3, delta=found["delta"])
    said = " ".join(found["statement"])
    assert f"epsilon {shown_epsilon(composed)} at delta" in said
    assert composed > summary_of(tmp_path / "search" / "trial-1")["epsilon"]
    for words in ("interrupted in run 1", "all 3 runs that were drawn", "the search cannot go on", "a second search"):
        assert words in said
    assert ": interrupted" in shown
    assert "diverged" not in shown
    assert "covers the model" not in shown


@pytest.mark.parametrize(
    ("number", "training", "code", "begun"),
    [pytest.param(2, False, 130, 2, marks=pytest.mark.long), (2, True, 130, 2), (3, True, 0, 3)],
)
def test_a_signal_between_the_steps_ends_a_search_unless_every_run_is_made(
    number: int,
    training: bool,
    code: int,
    begun: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw_three(monkeypatch)
    interrupt_while(number, training=training, monkeypatch=monkeypatch)
    assert call(*SMALL, *PUBLIC, "--out", str(tmp_path / "search")) == code
    found = last_json(capsys.readouterr().out)
    assert len(found["trials"]) == begun
    assert (found["best"] is None) == (code != 0)


def test_an_interrupted_search_that_is_not_private_states_no_epsilon_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_three(monkeypatch)
    interrupt_after(2, monkeypatch)
    assert call(*SMALL, "--not-private", "--out", str(tmp_path / "search")) == 130
    assert "covered by nothing" in " ".join(last_json(capsys.readouterr().out)["statement"])


@pytest.mark.long
def test_the_folder_of_a_search_leads_to_its_chosen_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_three(monkeypatch)
    out = tmp_path / "my search"
    assert call(*SMALL, *PUBLIC, "--out", str(out)) == 0
    shown = capsys.readouterr().out
    best = last_json(shown)["best"]["folder"]
    assert f"fdp statement '{best}'" in shown
    for command in ("statement", "report"):
        assert call(command, str(out)) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"got that of a search; name its chosen run, {best}" in said
    assert call("statement", best, "--ledger", "off") == 0
    assert call("report", best) == 0
    moved = out.rename(tmp_path / "moved")
    assert call("generate", str(moved), "--prompt", "a") == 2
    assert f"{moved / Path(best).name}: expected a language model" in " ".join(capsys.readouterr().err.split())
