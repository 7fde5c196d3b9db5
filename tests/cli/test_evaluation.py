"""``fdp train`` with held-out data: what is computed, what it costs, and which mistakes are refused."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fdp.cli import display, session
from fdp.cli.configure import configure
from fdp.cli.configure_evaluation import OverlapWarning
from fdp.cli.covered_files import describe_not_covered
from fdp.cli.evaluation_display import cost_words
from fdp.data import datasets
from fdp.models import build as build_model
from fdp.models import logits
from fdp.run import evaluation
from fdp.run.evaluation import evaluate, make_evaluator
from fdp.run.evaluation_config import planned_steps
from fdp.run.prepare_run import prepare
from fdp.run.run_folder import read_run_folder
from fdp.run.step_record import StepRecord
from fdp.storage import checkpoint
from fdp.storage.safetensors import import_safetensors
from fdp.types import FdpError
from tests.cli.train_runs import call, interrupt_after, last_json, small_options, train


def evaluations(folder: Path) -> list[StepRecord]:
    return [record for record in read_run_folder(folder).records if record.evaluation is not None]


def test_a_run_is_evaluated_on_held_out_images_outside_the_guarantee(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--eval-data", "digits-test", "--eval-every", "2", "--json", steps=5) == 0
    text = capsys.readouterr().out
    assert "outside the guarantee: computed without noise on 360 images that were not trained on" in " ".join(
        text.replace("│", " ").split()
    )
    found = evaluations(tmp_path / "run")
    assert [record.step for record in found] == [2, 4, 5]
    summary = last_json(text)["evaluation"]
    assert (summary["first"]["step"], summary["last"]["step"], summary["cost"]) == (2, 5, "outside")
    model, test = build_model("logistic"), datasets.digits()[1]
    params = import_safetensors(tmp_path / "run" / "model.safetensors", like=model.init(torch.arange(8)))
    data = {"image": test.image, "label": test.label}
    assert summary["last"]["loss"] == pytest.approx(float(model.loss(params, data).mean()), rel=1e-5)
    right = (logits(model, params, data).argmax(1) == test.label).double().mean()
    assert summary["last"]["accuracy"] == pytest.approx(float(right))
    assert found[-1].evaluation is not None
    assert found[-1].evaluation.perplexity is None


def test_a_fraction_is_held_out_and_evaluation_changes_no_parameter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hashes = []
    for name, more in {"plain": [], "evaluated": ["--eval-data", "digits-test"]}.items():
        assert train(tmp_path / name, "--seed", "1", "--json", "--quiet", *more) == 0
        hashes.append(last_json(capsys.readouterr().out)["parameter_sha256"])
    assert hashes[0] == hashes[1]
    assert train(tmp_path / "fraction", "--seed", "1", "--json", "--quiet", "--eval-fraction", "0.2") == 0
    summary = last_json(capsys.readouterr().out)
    assert summary["samples"] + summary["evaluation"]["samples"] == 1437
    assert 200 < summary["evaluation"]["samples"] < 380
    assert len(evaluations(tmp_path / "fraction")) == 3


def test_public_data_is_free_and_noised_evaluations_state_their_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--eval-data", "digits-test", "--eval-every", "3", "--json"]
    assert train(tmp_path / "public", *words, "--eval-public") == 0
    text = capsys.readouterr().out
    assert last_json(text)["evaluation"]["cost_in_words"].startswith("free")
    assert f"not covered {describe_not_covered(tmp_path / 'public')}" in " ".join(text.replace("│", " ").split())
    assert train(tmp_path / "noised", *words, "--eval-epsilon", "2", "--seed", "1") == 0
    text = capsys.readouterr().out
    summary = last_json(text)["evaluation"]
    assert (summary["cost"], summary["epsilon"], summary["planned"]) == ("noised", 2.0, 1)
    shown = " ".join(text.replace("│", " ").split())
    assert "epsilon 2.000 at delta 1e-06 for each of 360 images" in shown
    assert f"not covered {display.BUT_NOISED}{describe_not_covered(tmp_path / 'noised')}" in shown
    noise = f"{summary['loss_noise']:.3f}"  # two digits
    assert f"step 3 held-out loss {summary['last']['loss']:.3f} ± {noise}, accuracy" in shown
    assert f"(each ± {noise})" in shown
    assert abs(summary["last"]["loss"] - summary["first"]["loss"]) == 0
    assert summary["loss_noise"] > 0


def test_noised_and_exact_evaluations_differ_by_the_stated_noise(tmp_path: Path) -> None:
    options = {"eval_data": "digits-test", "eval_every": 1, "steps": 40, "warmup": 1, "seed": 3}
    exact_run, state = prepare(configure(small_options(**options)))
    exact = make_evaluator(exact_run)
    assert exact is not None
    true = evaluate(exact, state.params, step=1)
    run, state = prepare(configure(small_options(**options, eval_epsilon=4.0, eval_max_loss=100.0)))
    noised = make_evaluator(run)
    assert noised is not None
    assert noised.release is not None
    found = [evaluate(noised, state.params, step=step) for step in range(1, 41)]
    gaps = torch.tensor([each.loss - true.loss for each in found])  # pyright: ignore
    deviation = noised.release.loss_deviation()
    assert 0.6 * deviation < float(gaps.std()) < 1.5 * deviation
    assert abs(float(gaps.mean())) < 4 * deviation / math.sqrt(40)


@pytest.mark.filterwarnings("ignore::fdp.run.repeated_samples.RepeatsWarning")
def test_padded_records_are_weighed_by_sample_in_the_loss_and_by_token_in_the_perplexity(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "ab" * (3 + 5 * (i % 7)) + chr(65 + i % 26)}) for i in range(60)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "test.jsonl").write_text("\n".join([*lines[:8], json.dumps({"text": "x"})]) + "\n")
    options = small_options(
        model="gpt-nano", data=str(tmp_path / "train.jsonl"), unit="record", context=40, eval_every=2, batch_size=8,
        eval_data=str(tmp_path / "test.jsonl"), microbatch=4, seed=1,
    )  # fmt: skip
    with pytest.warns(OverlapWarning):
        run, state = prepare(configure(options))
    evaluator = make_evaluator(run)
    assert evaluator is not None
    found = evaluate(evaluator, state.params, step=2)
    data = evaluator.config.dataset.fetch(torch.arange(9).numpy())
    losses = run.config.model.loss(state.params, data).detach().double()
    tokens = data["loss_mask"].sum(1).double()
    assert (tokens[-1], losses[-1]) == (0, 0), "a record of one byte has nothing to predict"
    assert found.loss == pytest.approx(float(losses[:-1].mean()), rel=1e-5)
    assert found.token_loss == pytest.approx(float((losses * tokens).sum() / tokens.sum()), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(float((losses * tokens).sum() / tokens.sum())), rel=1e-5)
    assert found.loss != pytest.approx(found.token_loss, rel=1e-5)


def test_the_planned_steps_end_with_the_last() -> None:
    assert planned_steps(3, 10) == (3, 6, 9, 10)
    assert planned_steps(5, 10) == (5, 10)
    assert planned_steps(10, 10) == (10,)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"eval_data": "digits-test", "eval_fraction": 0.1}, "expected one of them, got both"),
    "the same": ({"eval_data": "digits"}, r"got --data itself; hold out a part of it with --eval-fraction"),
    "fraction": ({"eval_fraction": 1.5}, "--eval-fraction: expected a number between 0 and 1"),
    "every": ({"eval_fraction": 0.1, "eval_every": 9}, "--eval-every: expected 1 to the 4 steps of the run, got 9"),
    "epsilon": ({"eval_fraction": 0.1, "eval_epsilon": -1.0}, "--eval-epsilon: expected a finite number above 0"),
    "population": ({"eval_fraction": 0.1, "eval_epsilon": 1.0, "eval_population": 0}, "--eval-population: expected 1"),
    "public": ({"eval_data": "digits-test", "eval_public": True, "eval_epsilon": 1.0}, "public data needs no noise"),
    "text": ({"eval_data": "digits-test", "model": "gpt-nano", "data": "stdlib"}, "is images: expected a classifier"),
}


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_mistakes_about_evaluation_are_explained(name: str) -> None:
    changes, message = MISTAKES[name]
    with pytest.raises(FdpError, match=message):
        configure(small_options(**changes))


def test_an_evaluation_option_without_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--eval-epsilon", "1") == 2
    assert "--eval-epsilon: expected --eval-data or --eval-fraction to go with it" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert call("train", "--eval-public", "--model", "logistic", "--data", "digits") == 2
    assert "--eval-public: expected --eval-data to go with it" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["outside", "noised"])
def test_a_run_that_is_interrupted_and_resumed_has_the_same_numbers_average_and_best(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--json",
        "--seed",
        "3",
        "--save-every",
        "2",
        "--eval-fraction",
        "0.1",
        "--eval-every",
        "2",
        "--ema",
        "0.8",
    ]
    words += ["--keep-best", "--lr", "0.05", *(["--eval-epsilon", "3"] if kind == "noised" else [])]
    assert train(tmp_path / "whole", *words, steps=8) == 0
    whole = last_json(capsys.readouterr().out)
    with monkeypatch.context() as patch:
        interrupt_after(5, patch)
        assert train(tmp_path / "run", *words, steps=8) == 130
    capsys.readouterr()
    assert train(tmp_path / "run", *words, steps=8) == 0
    resumed = last_json(capsys.readouterr().out)
    assert resumed["evaluation"] == whole["evaluation"]
    assert resumed["exported"] == whole["exported"]
    assert resumed["parameter_sha256"] == whole["parameter_sha256"]
    assert [record.evaluation for record in evaluations(tmp_path / "run")] == [
        record.evaluation for record in evaluations(tmp_path / "whole")
    ]


def test_keep_best_and_patience_say_what_they_chose_and_need_held_out_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--eval-data", "digits-test", "--eval-every", "1", "--patience", "2", "--keep-best", "--json"]
    words += ["--lr", "1", "--seed", "1", "--on-divergence", "continue"]
    assert train(tmp_path / "run", *words, "--warmup", "0", "--schedule", "constant", steps=30) == 0
    text = capsys.readouterr().out
    summary = last_json(text)
    assert summary["steps"] < 30
    assert summary["exported"]["stopped_early"]
    assert summary["exported"]["step"] == summary["evaluation"]["best"]["step"] == summary["steps"] - 2
    shown = " ".join(text.replace("│", " ").split())
    assert "by --patience. The epsilon is that of all 30" in shown
    assert "the choice is not covered for the held-out samples" in shown
    assert summary["epsilon"] > summary["epsilon_if_stop_was_decided_in_advance"]
    for flag in (["--keep-best"], ["--patience", "2"]):
        assert train(tmp_path / "refused", *flag) == 2
        assert f"{flag[0]}: expected --eval-data or --eval-fraction to go with it" in capsys.readouterr().err
    assert train(tmp_path / "refused", "--ema", "1") == 2
    assert "--ema: expected a decay of at least 0 and below 1" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("public", [False, True])
def test_a_choice_by_held_out_people_is_said_even_if_it_is_the_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], public: bool
) -> None:
    words = ["--eval-data", "digits-test", "--eval-every", "3", "--patience", "2", "--json"]
    assert train(tmp_path / "run", *words, *(["--eval-public"] if public else []), steps=3) == 0
    exported = last_json(capsys.readouterr().out)["exported"]
    assert (exported["step"], exported["stopped_early"]) == (3, False)
    assert exported["in_words"].startswith("the parameters after the last step")
    assert ("the choice is not covered for the held-out samples" in exported["in_words"]) is not public
    assert call("statement", str(tmp_path / "run")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("their loss, without noise, decided when training stops" in said) is not public


def test_held_out_users_who_are_trained_on_are_refused(tmp_path: Path) -> None:
    for name, users in {"train": range(30), "other": range(30, 40), "both": range(25, 40)}.items():
        lines = (json.dumps({"author": f"user {user}", "text": f"note {user} of a day"}) for user in users)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    options = {"model": "gpt-nano", "unit": "user", "user_field": "author", "context": 16, "batch_size": 4}
    options |= {"data": str(tmp_path / "train.jsonl")}
    config = configure(small_options(**options, eval_data=str(tmp_path / "other.jsonl")))
    assert config.evaluation is not None
    assert len(config.evaluation.dataset) == 10
    with pytest.raises(FdpError, match="expected other users than those of --data, got some who are in both"):
        configure(small_options(**options, eval_data=str(tmp_path / "both.jsonl")))
    assert configure(small_options(**options, eval_data=str(tmp_path / "both.jsonl"), eval_public=True)).evaluation


NOTES = [json.dumps({"author": f"user {i}", "text": f"note {i} of a day"}) for i in range(40)]
SIDES = {
    "train": NOTES[:30],
    "copy": NOTES[:30][::-1],
    "part": NOTES[3:8],
    "some": NOTES[27:40],
    "other": NOTES[30:],
    "renamed": [line.replace("user ", "person ") for line in NOTES[:30]],
}


@pytest.mark.parametrize(
    ("unit", "notes", "words"),
    [
        ("user", NOTES[30:31], "on 1 user who was not trained on"),
        ("user", NOTES[30:32], "on 2 users who were not trained on"),
        ("record", NOTES[30:31], "on 1 record that was not trained on"),
        ("record", NOTES[29:31], "on 2 held-out samples, 1 of which is trained on too"),
    ],
)
@pytest.mark.filterwarnings("ignore::fdp.cli.configure_evaluation.OverlapWarning")
def test_one_held_out_sample_is_not_several(unit: str, notes: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join(SIDES["train"]))
    (tmp_path / "other.jsonl").write_text("\n".join(notes))
    options = {"model": "gpt-nano", "unit": unit, "context": 16, "batch_size": 4}
    options |= {"user_field": "author"} if unit == "user" else {}
    sources = {"data": str(tmp_path / "train.jsonl"), "eval_data": str(tmp_path / "other.jsonl")}
    evaluator = make_evaluator(prepare(configure(small_options(**options, **sources)))[0])
    assert evaluator is not None
    assert cost_words(evaluator).endswith(words)


@pytest.mark.parametrize("unit", ["record", "user", "window"])
def test_a_copy_of_the_training_data_is_refused_whatever_its_name_and_order(unit: str, tmp_path: Path) -> None:
    for name, lines in SIDES.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    options = {"model": "gpt-nano", "unit": unit, "context": 16, "batch_size": 4, "data": str(tmp_path / "train.jsonl")}
    options |= {"user_field": "author"} if unit == "user" else {}
    (tmp_path / "same.jsonl").write_text("\n".join(SIDES["renamed" if unit == "user" else "train"]))
    for name in ("same", "copy", "part") if unit == "record" else ("same",):
        with pytest.raises(FdpError, match=r"got \d+ samples, all of which are in --data too; hold out a part"):
            configure(small_options(**options, eval_data=str(tmp_path / f"{name}.jsonl")))
    with pytest.raises(FdpError, match="all of which are in --data too"):
        configure(small_options(**options, eval_data=str(tmp_path / "same.jsonl"), eval_public=True))


def test_samples_on_both_sides_are_refused_if_evaluations_are_noised_and_warned_of_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lines in SIDES.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    options = {"model": "gpt-nano", "unit": "record", "context": 16, "batch_size": 4}
    options |= {"data": str(tmp_path / "train.jsonl")}
    some = {"eval_data": str(tmp_path / "some.jsonl")}
    with pytest.raises(FdpError, match=r"got 3 of 13 in both: .* --eval-epsilon.*take them out .* --eval-fraction 0.1"):
        configure(small_options(**options, **some, eval_epsilon=1.0))
    with pytest.warns(OverlapWarning, match="got 3 of 13 in both: exact losses"):
        assert configure(small_options(**options, **some)).evaluation
    for public in (some, {"eval_data": str(tmp_path / "part.jsonl")}):  # no privacy to lose
        assert configure(small_options(**options, **public, eval_public=True)).evaluation
    assert configure(small_options(**options, eval_data=str(tmp_path / "other.jsonl"), eval_epsilon=1.0)).evaluation
    words = ["--model", "gpt-nano", "--unit", "record", "--context", "16", "--data", options["data"], "--steps", "2"]
    words += [
        "--lr",
        "1e-3,1e-2",
        "--epsilon",
        "4",
        "--eval-data",
        some["eval_data"],
        "--out",
        str(tmp_path / "search"),
    ]
    assert call("search", *words) == 2
    assert "got 3 of 13 in both" in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
@pytest.mark.parametrize("public", [False, True])
@pytest.mark.filterwarnings("ignore::fdp.cli.configure_evaluation.OverlapWarning")
def test_samples_on_both_sides_are_counted_in_the_metrics_and_told_wherever_the_evaluation_is(
    public: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "some"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(SIDES[name]))
    words = shlex.split(
        "train --model gpt-nano --unit record --context 16 --noise-multiplier 1 --batch-size 4 --steps 2"
    )
    words += ["--data", str(tmp_path / "train.jsonl"), "--eval-data", str(tmp_path / "some.jsonl"), "--keep-best"]
    words += ["--eval-public"] * public
    assert call(*words, "--out", str(tmp_path / "run"), "--json") == 0
    summary = last_json(capsys.readouterr().out)
    assert "3 of which are trained on too" in summary["evaluation"]["cost_in_words"]
    assert ("except for those on both sides" in summary["exported"]["in_words"]) is not public
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["evaluation"]["shared"] for line in lines] == [3, 3]
    assert call("statement", str(tmp_path / "run")) == 0
    assert "Some of the samples are trained on too" in " ".join(capsys.readouterr().out.split())


def test_noised_evaluations_of_an_attempt_whose_key_is_lost_are_not_released_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--eval-fraction", "0.1", "--eval-every", "1", "--eval-epsilon", "2", "--save-every", "5", "--quiet"]
    monkeypatch.setattr(checkpoint, "save", lambda *_, **__: None)  # the machine stops before anything is saved
    interrupt_after(3, monkeypatch)
    assert train(tmp_path / "run", *words, steps=8) == 130
    assert train(tmp_path / "run", *words, steps=8) == 2
    assert "would spend their budget twice" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("seed", [None, "1"])
def test_noised_evaluations_that_were_released_stand_when_their_steps_are_made_again(
    seed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: other losses with the same noise would be told apart. A second attempt stops before it gets there."""
    folder, every = tmp_path / "run", "3" if seed is None else "7"  # with a seed, nothing is saved
    words = ["--eval-fraction", "0.1", "--eval-every", "2", "--eval-epsilon", "2", "--save-every", every, "--quiet"]
    words += [] if seed is None else ["--seed", seed]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", lambda *_, **__: None)  # the machine stops
        interrupt_after(5, patch)
        assert train(folder, *words, steps=8) == 130
    released = {record.step: record.evaluation for record in evaluations(folder)}
    assert list(released) == [2, 4]

    real = evaluation.contributions
    monkeypatch.setattr(evaluation, "contributions", lambda losses, *rest, **more: real(losses + 0.5, *rest, **more))
    with monkeypatch.context() as patch:
        patch.setattr(session, "steps", stopping)
        with pytest.raises(RuntimeError, match="the machine stops"):
            train(folder, *words, steps=8)
    assert len(evaluations(folder)) == (1 if seed is None else 0), "the lines of later steps are gone"
    assert train(folder, *words, steps=8) == 0
    found = {record.step: record.evaluation for record in evaluations(folder)}
    assert list(found) == [2, 4, 6, 8]
    assert {step: found[step] for step in released} == released


def stopping(*_: Any, **__: Any) -> Iterator[Any]:
    raise RuntimeError("the machine stops")
    yield
