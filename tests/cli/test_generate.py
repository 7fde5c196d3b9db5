"""``fdp generate`` and ``--sample``, as a user types them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fdp.run.run_folder import read_run_folder
from tests.cli.train_runs import call, last_json, train

pytestmark = pytest.mark.usefixtures("shallow_nano")
TEXT = shlex.split(
    "--model gpt-nano --context 16 --noise-multiplier 1 --batch-size 4 --microbatch 4 --steps 2 --warmup 1"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shallow_nano: None) -> Path:
    """Train two steps on a few lines, with two prompts and no held-out data."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "lines.txt").write_text("".join(f"line {i} of the text\n" for i in range(40)))
    words = ["--data", str(folder / "lines.txt"), "--out", str(folder / "run"), "--quiet"]
    assert call("train", *TEXT, *words, "--sample", "line 1", "--sample", "text", "--sample-tokens", "5") == 0
    return folder / "run"


def test_prompts_of_a_run_are_continued_at_every_evaluation(run: Path) -> None:
    found = [record.evaluation for record in read_run_folder(run).records]
    assert [len(each.texts) for each in found if each is not None] == [2, 2]
    assert found[1] is not None
    assert [text[:6] for text in found[1].texts] == ["line 1", found[1].texts[1][:6]]
    assert found[1].texts[1].startswith("text")
    assert (found[1].loss, found[1].cost) == (None, "public")


def test_a_run_generates_text_and_a_seed_repeats_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert call("generate", str(run), "--prompt", "line", "--tokens", "8", "--seed", seed, "--json") == 0
        texts.append(last_json(capsys.readouterr().out))
    assert texts[0] == texts[1] != texts[2]
    assert texts[0]["text"].startswith("line")
    assert texts[0]["tokens"] == 8
    assert call("generate", str(run), "--prompt", "line", "--tokens", "3", "--temperature", "0") == 0
    assert capsys.readouterr().out.startswith("line")


def test_mistakes_say_what_to_do(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("generate", str(tmp_path / "nowhere"), "--prompt", "a") == 2
    assert "expected the folder of a run" in capsys.readouterr().err
    assert call("generate", str(tmp_path), "--prompt", "a") == 2
    assert "with model.safetensors or model/" in " ".join(capsys.readouterr().err.split())
    assert call("generate", str(run), "--prompt", "a", "--temperature", "-1") == 2
    assert "--temperature: expected 0 (the most likely token) or more" in capsys.readouterr().err
    assert train(tmp_path / "digits", "--sample", "a") == 2
    assert "--sample: expected a language model to write text" in capsys.readouterr().err
    assert train(tmp_path / "digits", "--sample-tokens", "5") == 2
    assert "--sample-tokens: expected --sample to go with it" in capsys.readouterr().err
    assert train(tmp_path / "images", "--quiet", steps=2) == 0
    assert call("generate", str(tmp_path / "images"), "--prompt", "a") == 2
    assert "expected a language model to generate text, got the classifier logistic" in capsys.readouterr().err
    settings = {"settings": {"model": "models/tiny", "prefix": 8}}
    (tmp_path / "prefix").mkdir()
    (tmp_path / "prefix" / "config.json").write_text(json.dumps(settings))
    assert call("generate", str(tmp_path / "prefix"), "--prompt", "a") == 2
    assert "peft.PeftModel.from_pretrained" in capsys.readouterr().err
