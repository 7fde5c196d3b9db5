"""``--sample``, held-out users and ``fdp generate`` with a folder of ``transformers`` and LoRA."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from fdp.run.run_folder import read_run_folder
from tests.cli.train_runs import call, last_json

transformers = pytest.importorskip("transformers")


@pytest.mark.long
def test_adapters_of_a_folder_are_evaluated_merged_and_write_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_head=2, n_layer=2, n_positions=32, vocab_size=256, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    notes = (json.dumps({"author": f"a{i % 20}", "text": f"note {i}, a day like any other"}) for i in range(60))
    (tmp_path / "notes.jsonl").write_text("\n".join(notes))
    words = shlex.split(
        f"train --model {tmp_path}/model --data {tmp_path}/notes.jsonl --tokenizer bytes --unit user "
        f"--user-field author --windows-per-user 2 "
        f"--context 16 --lora 2 --noise-multiplier 1 --batch-size 4 --microbatch 4 --steps 2 "
        f"--warmup 1 --eval-fraction 0.3 --ema 0.5 --keep-best --sample note --sample-tokens 4 --out {tmp_path}/run"
    )
    assert call(*words, "--json") == 0
    text = capsys.readouterr().out
    assert "users who were not trained on" in " ".join(text.replace("│", " ").split())
    assert last_json(text)["evaluation"]["last"]["perplexity"] > 1
    last = read_run_folder(tmp_path / "run").records[-1].evaluation
    assert last is not None
    assert last.texts[0].startswith("note")
    assert call("generate", str(tmp_path / "run"), "--prompt", "note", "--tokens", "4", "--temperature", "0") == 0
    assert capsys.readouterr().out.startswith("note")
    assert call("generate", str(tmp_path / "model"), "--prompt", "note") == 2
    assert "expected a tokenizer in the folder, got none" in " ".join(capsys.readouterr().err.split())
    assert call("generate", str(tmp_path / "model"), "--prompt", "note", "--tokenizer", "bytes", "--tokens", "2") == 0
    assert capsys.readouterr().out.startswith("note")
