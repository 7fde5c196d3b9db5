"""Data that does not fit the model is refused before anything is spent; long records and public data are told."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fdp.cli.main import main
from fdp.foreign.hub.positions import longest_context
from fdp.privacy.guarantee import MARKER
from tests.data.test_text import make_tokenizer

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("shallow_nano")
TINY = shlex.split("--steps 1 --warmup 0 --batch-size 4 --microbatch 4 --noise-multiplier 0.5 --seed 0 --context 8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    path = tmp_path_factory.mktemp("models") / "tiny"
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "notes.jsonl"
    said = [{"patient_id": f"p{i % 12}", "note": f"note {i} of many, many words"[: 6 + i % 20]} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, said)))
    return path


def train(out: Path, *words: Any, code: int = 0) -> dict[str, Any]:
    with pytest.raises(SystemExit) as caught:
        main(["train", *TINY, "--out", str(out), *map(str, words)])
    assert int(caught.value.code or 0) == code
    return json.loads((out / "summary.json").read_text()) if code == 0 else {}


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return " ".join((found.out + found.err).replace("│", " ").split())


def test_a_folder_without_a_tokenizer_is_refused_unless_bytes_are_asked_for(folder, notes, tmp_path, capsys):
    words = ["--model", folder, "--data", notes, "--field", "note"]
    train(tmp_path / "a", *words, code=2)
    said = printed(capsys)
    assert "expected a tokenizer in the folder for the text of --data" in said
    assert "or give --tokenizer bytes if the model reads bytes" in said
    train(tmp_path / "b", "--model", folder, "--data", "stdlib", code=2)
    assert train(tmp_path / "c", *words, "--tokenizer", "bytes")["reading"]["word"] == "byte"
    np.save(tmp_path / "tokens.npy", np.arange(200) % 250)
    assert train(tmp_path / "d", "--model", folder, "--data", tmp_path / "tokens.npy")["samples"] == 22


def test_tokens_beside_a_tokenizer_are_checked_against_its_vocabulary(folder, tmp_path, capsys):
    tokenizer = make_tokenizer(tmp_path / "words")
    np.save(tmp_path / "tokens.npy", np.arange(200) % 7)
    words = ["--model", folder, "--tokenizer", tokenizer]
    assert train(tmp_path / "a", *words, "--data", tmp_path / "tokens.npy")["samples"] == 22
    np.save(tmp_path / "others.npy", np.arange(200) % 250)
    train(tmp_path / "b", *words, "--data", tmp_path / "others.npy", code=2)
    assert "others.npy: expected token ids from 0 to" in printed(capsys)


def test_a_context_beyond_the_positions_is_refused_with_the_longest(folder, notes, tmp_path, capsys):
    words = ["--model", folder, "--data", notes, "--field", "note", "--tokenizer", "bytes"]
    train(tmp_path / "a", *words, "--context", "17", code=2)
    assert "--context 17: expected at most 16, the positions of the model in" in printed(capsys)
    train(tmp_path / "b", *words, "--context", "16")


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({"n_positions": 16}, 16),
        ({"max_seq_len": 64, "attn_config": SimpleNamespace(alibi=True)}, None),
        ({"max_position_embeddings": 64, "alibi": True}, None),
        ({}, None),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4.0}}, 400),
        ({"max_position_embeddings": 100, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 100),
        (
            {
                "max_position_embeddings": 1000,
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 125},
            },
            1000,
        ),
        (
            {
                "max_position_embeddings": 100,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100},
            },
            400,
        ),
        ({"max_position_embeddings": 514, "model_type": "roberta", "pad_token_id": 1}, 512),
    ],
)
def test_the_longest_context_is_what_the_configuration_says(config: dict[str, Any], most: int | None) -> None:
    assert longest_context(SimpleNamespace(**config)) == most


def test_the_longest_context_of_real_configurations() -> None:
    llama = transformers.LlamaConfig(
        max_position_embeddings=64, rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=1e4
    )
    assert longest_context(llama) == 128
    assert longest_context(transformers.GPT2Config(n_positions=32)) == 32
    assert longest_context(transformers.BloomConfig()) is None


def test_long_records_are_cut_with_a_warning_or_split(notes, tmp_path, capsys):
    words = ["--data", notes, "--field", "note", "--unit", "record"]
    cut = train(tmp_path / "cut", *words)
    said = printed(capsys)
    assert "40 notes, each a sample of up to 9 bytes; 32 notes cut at 9 bytes (counts are private)" in said
    assert "32 of 40 notes are longer than the 9 bytes of a sample: their ends, " in said
    split = train(tmp_path / "split", *words, "--long", "split", "--windows-per-user", "2")
    said = printed(capsys)
    assert "40 notes, 72 windows of up to 9 bytes; 14 notes capped at 2 windows" in said
    assert "one record (its first 2 windows of 9 bytes), added or removed; the whole record is protected" in said
    assert (cut["samples"], split["samples"]) == (40, 40), "the unit stays a record"
    by = ["--data", notes, "--field", "note", "--unit", "user", "--user-field", "patient_id"]
    train(tmp_path / "user", *by)
    assert "12 patients, 40 notes, 83 windows of up to 9 bytes; 3 patients capped at 8 windows" in printed(capsys)
    train(tmp_path / "user-cut", *by, "--long", "cut")
    assert "12 patients, 40 notes, 40 windows of up to 9 bytes; 32 notes cut at 9 bytes" in printed(capsys)


def test_a_person_is_suggested_if_records_have_one(notes, tmp_path, capsys):
    train(tmp_path / "a", "--data", notes, "--field", "note")
    said = printed(capsys)
    assert (
        "the records have a field 'patient_id' (12 values in 40 records): --unit user --user-field patient_id" in said
    )
    assert "p11" not in said


@pytest.mark.parametrize("words", [("--unit", "record"), ("--unit", "record", "--long", "split"), ("--unit", "row")])
def test_a_person_is_suggested_if_records_are_protected_and_beside_the_epsilon(words, notes, tmp_path, capsys):
    train(tmp_path / "a", "--data", notes, "--field", "note", *words)
    said = printed(capsys)
    hint = "--unit user --user-field patient_id"
    assert f"the records have a field 'patient_id' (12 values in 40 records): {hint} protects the person" in said
    done = said[said.index("─ done") :]
    assert "unit of privacy one " in done
    assert f", not a person: for that, {hint}" in done
    train(tmp_path / "b", "--data", notes, "--field", "note", "--unit", "user", "--user-field", "patient_id")
    done = printed(capsys).partition("─ done")[2]
    assert "unit of privacy one user, named by patient_id (up to 8 windows of 9 bytes)" in done
    assert "not a person" not in done


def test_a_run_without_the_field_of_the_text_is_told_which_it_may_be(notes, tmp_path, capsys):
    for unit in ("window", "record"):
        train(tmp_path / "a", "--data", notes, "--unit", unit, code=2)
        assert "name the field with --field, such as --field note (fdp inspect" in printed(capsys)
    said = [{"what": "one", "day": i, "long": f"a{i}"} for i in range(3)]
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(map(json.dumps, said)) + "\n{")
    train(tmp_path / "a", "--data", path, code=2)
    assert "name the field with --field (fdp inspect" in printed(capsys), "the last line is damaged"


def test_folders_of_people_are_suggested_if_files_are_protected(tmp_path, capsys):
    for i in range(12):
        (tmp_path / "texts" / f"p{i}").mkdir(parents=True)
        (tmp_path / "texts" / f"p{i}" / "a.txt").write_text(f"a text of {i}")
    train(tmp_path / "a", "--data", tmp_path / "texts", "--unit", "record")
    said = printed(capsys)
    assert "--unit user --user-field folder protects the person, --unit record only a file" in said


def test_the_header_says_where_parameters_come_from_and_how_many_are_trained(folder, notes, tmp_path, capsys):
    words = ["--data", notes, "--field", "note"]
    train(tmp_path / "a", *words)
    assert "context 8, from random parameters" in printed(capsys)
    train(tmp_path / "b", *words, "--model", folder, "--tokenizer", "bytes")
    assert "from random parameters" not in printed(capsys)
    train(tmp_path / "c", *words, "--model", folder, "--tokenizer", "bytes", "--lora", "2")
    said = printed(capsys)
    every = 256 * 8 + 16 * 8 + 12 * 8 * 8 + 13 * 8 + 2 * 8
    adapters = 2 * (8 + 24 + 8 + 8 + 8 + 32 + 32 + 8)
    assert f"GPT2LMHeadModel+lora, {adapters} of {every + adapters:,} parameters trained" in said
    assert "from random parameters" not in said


def test_public_data_is_trained_on_and_not_protected(notes, tmp_path, capsys):
    (tmp_path / "public.csv").write_text("note\n" + "".join(f"public {i}\n" for i in range(25)))
    words = ["--data", notes, "--field", "note", "--unit", "user", "--user-field", "patient_id"]
    alone = train(tmp_path / "alone", *words)
    capsys.readouterr()
    mixed = train(tmp_path / "mixed", *words, "--public-data", tmp_path / "public.csv")
    said = printed(capsys)
    assert (alone["samples"], mixed["samples"]) == (12, 37)
    assert mixed["reading"]["public"]["samples"] == 25
    assert "and public: 25 patients, 25 notes" in said
    assert "of the private data, added or removed" in said
    assert "the public data is not protected" in said
    assert mixed["unit"].endswith("of the private data")
    assert json.loads((tmp_path / "mixed" / "config.json").read_text())["settings"]["public_data"].endswith(
        "public.csv"
    )
    assert "of the private data" in (tmp_path / "mixed" / MARKER).read_text()
    train(tmp_path / "same", *words, "--public-data", notes, code=2)
    assert "expected other data than --data, got the same" in printed(capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--long", "split"], "--long: expected --unit record or user to go with it"),
        (["--unit", "record", "--long", "trim"], "--long: expected one of cut, split; got 'trim'"),
        (
            ["--unit", "record", "--windows-per-user", "2"],
            "--windows-per-user: expected --unit user, or --unit record with --long split, to go with it",
        ),
    ],
)
def test_mistakes_are_explained(words, message, notes, tmp_path, capsys):
    train(tmp_path / "run", "--data", notes, "--field", "note", *words, code=2)
    assert message in printed(capsys)
    assert not (tmp_path / "run").exists()
