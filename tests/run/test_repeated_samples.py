"""A run says before its first step that samples occur more than once, and writes the numbers nowhere."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fdp
from fdp.run.repeated_samples import RepeatsWarning
from tests.cli.train_runs import call

TEXTS = ["a first note", "a second note", "a third note", "a fourth note"]
GPT = shlex.split("--model gpt-nano --context 16 --unit record --batch-size 3 --microbatch 4 --steps 1 --device cpu")


def private(x: torch.Tensor) -> fdp.PrivateRun:
    labels, loss = torch.zeros(len(x), dtype=torch.int64), nn.CrossEntropyLoss()
    return fdp.private(nn.Linear(2, 2), (x, labels), loss=loss, noise_multiplier=1.0, steps=1, batch_size=4)


def test_equal_samples_are_counted_in_a_warning_that_says_what_to_do() -> None:
    x = torch.arange(20.0).reshape(10, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private(x)
    x[7] = x[9] = x[1]
    words = (
        r"data: 3 of 10 samples are equal to another one; one of them occurs 3 times. .* a person whose data occurs 3 "
        r"times has 3 times the sensitivity, .* Remove the copies, or make all samples of a person one .* private data"
    )
    with pytest.warns(RepeatsWarning, match=words):
        private(x)


@pytest.mark.parametrize("copied", [False, True])
def test_fdp_train_says_so_on_the_screen_only(copied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [*TEXTS, TEXTS[2]] if copied else TEXTS
    data, out = tmp_path / "notes.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert call("train", "--data", str(data), *GPT, "--noise-multiplier", "1", "--out", str(out)) == 0
    said = "2 of 5 samples are equal to another one"
    assert (said in re.sub(r"\s+", " ", capsys.readouterr().out)) == copied
    assert not [file for file in out.rglob("*") if file.is_file() and b"equal to another" in file.read_bytes()]


def test_a_dry_run_says_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "notes.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, TEXTS[2]]))
    assert call("train", "--data", str(data), *GPT, "--noise-multiplier", "1", "--dry-run") == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert said.index("2 of 5 samples are equal to another one") < said.index("dry run: every check passed")


@pytest.mark.parametrize(
    ("long", "first"),
    [((), "9 bytes"), (("--long", "split", "--windows-per-user", "2"), "2 windows of 9 bytes")],
)
def test_samples_that_are_equal_after_cutting_are_not_called_copies(
    long: tuple[str, ...], first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "notes.jsonl"
    data.write_text("".join(json.dumps({"text": f"the patient was seen {text}"}) + "\n" for text in TEXTS))
    words = ["--noise-multiplier", "1", "--out", str(tmp_path / "run"), *long]
    assert call("train", "--data", str(data), *GPT, *words, "--context", "8") == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"4 of 4 samples are equal to another one in their first {first}, all that is trained on" in said
    assert "may be no copies and only begin alike: remove those that are copies, or make" in said
    assert "Remove the copies" not in said


def test_plain_training_promises_nothing_and_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "notes.jsonl"
    data.write_text(2 * (json.dumps({"text": TEXTS[0]}) + "\n"))
    words = ["--method", "none", "--out", str(tmp_path / "run")]
    assert call("train", "--data", str(data), *GPT, *words, "--batch-size", "2", "--microbatch", "2") == 0
    assert "equal to another" not in capsys.readouterr().out
