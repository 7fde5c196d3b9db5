"""``fdp inspect --data`` tells the data without a run, with or without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fdp.cli.main import main
from tests.data.test_text import make_tokenizer, write

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    said = ({"patient_id": f"p{i % 12}", "note": "word " * (1 + i % 9), f"secret {i}?": 1} for i in range(60))
    return write(tmp_path_factory.mktemp("data") / "notes.jsonl", *said)


def inspect(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> tuple[str, dict[str, Any]]:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *map(str, words), "--json"])
    assert int(caught.value.code or 0) == code
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split()), json.loads(found.out.splitlines()[-1])


def test_data_is_told_without_a_model(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, found = inspect(capsys, "--data", notes, "--field", "note", "--context", 8)
    told = found["data"]
    assert set(found) == {"data"}
    assert told["line"].startswith("168 windows of 9 bytes in 60 notes")
    assert told["lengths"] == {"5%": 5, "25%": 15, "median": 25, "75%": 35, "95%": 45, "longest": 45}
    fields = {row["field"]: (row["present"], row["values"]) for row in told["fields"]}
    assert fields == {"patient_id": (60, 12), "note": (60, 9), "60 fields whose names look like content": (60, 60)}
    assert [row["kind"] for row in told["fields"]] == ["text", "text", ""]
    assert "secret" not in said
    assert "p11" not in said
    assert "--unit user --user-field patient_id protects the person" in said
    assert "computed from private data and covered by no budget" in said
    assert told["suggestions"] == ["--context 64: 100% of the texts fit into one window whole (with 8: 12%)"]


@pytest.mark.parametrize("words", [[], ["--form", "text"], ["--field", "nota"], ["--field", "day"]])
def test_records_with_the_text_in_another_field_have_their_fields_listed(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ({"patient": f"p{i % 5}", "note": "a secret word " * 9, "day": i, f"secret {i}?": 1} for i in range(20))
    path = write(tmp_path / "notes.jsonl", *said)
    shown, found = inspect(capsys, "--data", path, *words, code=2)
    for name, kind in (("patient", "text"), ("note", "text"), ("day", "a number")):
        assert f"│ {name} │ {kind} │ 20 │" in shown
    assert "name the field that holds the text with --field, such as --field note. The table lists" in found["error"]
    assert "secret" not in shown
    assert "computed from private data and covered by no budget" in shown


def test_the_example_is_no_field_of_people_and_a_table_may_lack_its_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("patient,note\np1,a day\np2,a week\n")
    _, found = inspect(capsys, "--data", path, code=2)
    assert (
        "such as --field note. The table lists the fields; if it lists values, the file has no header" in found["error"]
    )


def test_a_field_of_one_record_is_no_example_in_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "notes.jsonl", {"secret": "word", "day": 1}, {"day": 2})
    _, found = inspect(capsys, "--data", path, code=2)
    assert found["error"].endswith("name the field that holds the text with --field. The table lists the fields")


def test_users_get_suggestions_about_windows_and_packing(
    notes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--data", notes, "--field", "note", "--unit", "user", "--user-field", "patient_id", "--context", 64]
    said, found = inspect(capsys, *words, "--windows-per-user", 2)
    assert found["data"]["line"].startswith("12 patients, 60 notes, 24 windows of up to 65 bytes; 12 patients capped")
    assert "--windows-per-user 5: uses all windows of 90% of the patients" in said
    assert any(each.startswith("--pack") for each in found["data"]["suggestions"])
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_model_and_data_are_shown_together(notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "tiny")
    make_tokenizer(tmp_path / "tiny")
    words = ["--data", notes, "--field", "note"]
    said, found = inspect(capsys, tmp_path / "tiny", *words)
    assert found["data"]["reading"]["word"] == "token"
    assert found["leaves"]
    assert "memory on one device" in said
    alone, data = inspect(capsys, *words, "--model", tmp_path / "tiny")
    assert set(data) == {"data"}
    assert "memory on one device" not in alone
    assert data["data"]["lengths"]["longest"] == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a model (a folder or a preset), or --data, or both, got neither"),
        (["--data", "no/such/file"], "expected stdlib or digits, or a path that exists, got 'no/such/file'"),
        (["mlp", "--data", "stdlib"], "is text: expected a language model, got a classifier"),
    ],
)
def test_mistakes_are_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in inspect(capsys, *words, code=2)[0]


def test_images_and_named_data_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = inspect(capsys, "--model", "mlp", "--data", "digits")
    assert found["data"]["line"] == "1,437 images"


COPIES = ({"text": "one two"}, {"text": "one two"}, {"text": ""}, {"text": "three"}, {"text": ""}, {"text": "one two"})


@pytest.mark.parametrize("words", [[], ["--unit", "user", "--user-field", "by"], ["--unit", "row"]])
def test_equal_and_empty_texts_are_told_whatever_the_unit(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "notes.jsonl", *(each | {"by": f"p{i % 2}"} for i, each in enumerate(COPIES)))
    said, found = inspect(capsys, "--data", path, "--context", 4, *words)
    told = "3 of 6 records are equal to another one; one of them occurs 3 times: remove those that are copies"
    assert told in found["data"]["warnings"]
    assert told in said
    assert "2 of 6 records hold nothing to learn (empty, one token, or no answer): remove them" in said
    assert said.index("computed from private data and covered by no budget") < said.index(told)


@pytest.mark.parametrize("words", [[], ["--unit", "record"]])
def test_nothing_is_said_of_texts_that_differ(
    words: list[str], notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "notes.jsonl", *({"text": f"note {i}"} for i in range(9)))
    assert inspect(capsys, "--data", path, "--context", 8, *words)[1]["data"]["warnings"] == []


def test_equal_and_empty_records_are_told_as_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", str(write(tmp_path / "notes.jsonl", *COPIES)), "--unit", "record", "--context", "16"]
    found = inspect(capsys, *words)[1]["data"]["warnings"]
    assert len(found) == 2
    with pytest.raises(SystemExit) as caught:
        main(["train", *words, "--dry-run", "--batch-size", "2", "--noise-multiplier", "1", "--ledger", "off"])
    assert not caught.value.code
    said = " ".join(capsys.readouterr().out.split())
    assert all(each in said for each in found)
