"""Folders of texts as users; fields of records that could name a person are tested in tests/cli/test_other_names.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fdp import keys
from fdp.data import corpus, datasets, text
from fdp.data.corpus import PerUser
from fdp.data.held_out import split_held_out
from fdp.data.user_fields import FOLDER, folder_of, user_fields
from fdp.data.users import Users
from fdp.report.run_facts import unit_note
from fdp.types import FdpError
from tests.cli.train_runs import call, train


def write(root: Path, *names: str) -> Path:
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"note {i} " * 5)
    return root


def load(root: Path, *, all_named: bool = True, windows: int = 16) -> Users:
    by = PerUser(FOLDER, windows, keys.key(0), all_named=all_named)
    found = corpus.load(root, tokenizer=text.BYTES, context=16, vocab_size=256, per_user=by)
    assert isinstance(found, Users)
    return found


def test_every_folder_is_one_user_at_any_depth_and_in_any_spelling(tmp_path):
    """Else a person whose notes are in two folders of theirs would be two units of privacy."""
    root = write(tmp_path, "ada/1.txt", "ada/2024/1.txt", "ada/2024/may/1.txt", "Bob/1.txt", "bob /2.txt")
    assert len(load(root)) == 2
    names = ["ada/1.txt", "ada/2024/may/1.txt", "Ada/1.txt"]
    assert {folder_of(root / name, root, all_named=True) for name in names} == {"ada"}


def test_a_file_without_a_user_is_refused_or_its_own_user(tmp_path):
    root = write(tmp_path, "ada/1.txt", "bob/1.txt", "stray.txt")
    with pytest.raises(FdpError, match=r"stray.txt: expected it in a folder, which names its user"):
        load(root)
    assert len(load(root, all_named=False)) == 3
    with pytest.raises(FdpError, match=r"stray.txt: expected a folder with a folder for every user .* name the folder"):
        load(root / "stray.txt")
    hidden = write(tmp_path / "other", "\u200b/1.txt", "ada/1.txt")
    with pytest.raises(FdpError, match="without visible characters"):
        load(hidden)


def test_a_folder_whose_name_is_not_text_is_a_user_like_any_other(tmp_path):
    """Old shares have names in Latin-1."""
    root = write(tmp_path, *(f"{name}/{i}.txt" for name in ("M\udcfcller", *"abcdefghi") for i in range(3)))
    users = load(root)
    assert len(users) == 10
    kept, held_out = split_held_out(users, 0.5)
    assert len(kept) + len(held_out) == 10


def test_the_unit_says_that_a_user_is_a_folder(tmp_path):
    root = write(tmp_path, "ada/1.txt", "bob/1.txt")
    assert load(root, windows=2).unit.one == "one user, a folder of texts (up to 2 windows of 17 bytes)"
    assert "a person with texts in two folders is two users" in load(root).unit.note
    assert unit_note(load(root).unit.one) == load(root).unit.note


def test_other_fields_of_texts_are_refused_and_the_folder_is_named(tmp_path):
    root = write(tmp_path, "ada/1.txt", "bob/1.txt")
    by = PerUser("patient", 8, keys.key(0))
    with pytest.raises(FdpError, match="field 'patient', got a text; of a folder of texts, --user-field folder makes"):
        corpus.load(root, tokenizer=text.BYTES, context=16, vocab_size=256, per_user=by)
    assert user_fields(root, text_field="text") == (FOLDER,)
    assert user_fields(root / "ada", text_field="text") == (), "no folders"
    assert user_fields(write(tmp_path / "one", "ada/1.txt"), text_field="text") == (), "one user"


def test_ten_folders_of_texts_suggest_that_each_is_a_person(tmp_path):
    root = write(tmp_path / "notes", *(f"patient {i}/{j}.txt" for i in range(10) for j in range(2)))
    (said,) = datasets.load(str(root), context=16).reading.warnings()
    assert said == (
        "the 20 files are in 10 folders; if each is a person's: --unit user --user-field folder protects the person, "
        "--unit window only a window"
    )
    write(root, "stray.txt")
    assert datasets.load(str(root), context=16).reading.warnings() == []
    assert datasets.load("stdlib", context=16).reading.warnings() == []


@pytest.mark.long
@pytest.mark.usefixtures("shallow_nano")
def test_a_folder_of_peoples_notes_is_trained_on_from_the_command_line(tmp_path, capsys):
    names = [f"patient {i}/{j}.txt" for i in range(30) for j in range(1 + i % 3)]
    root = write(tmp_path / "notes", *names)
    data = ["--model", "gpt-nano", "--data", str(root), "--unit", "user", "--user-field", "folder", "--context", "16"]
    code = train(tmp_path / "run", *data, "--batch-size", "8", steps=2)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "30 folders, 60 files" in " ".join(shown.out.replace("│", " ").split())
    assert call("statement", str(tmp_path / "run")) == 0
    statement = " ".join(capsys.readouterr().out.split())
    assert "one user, a folder of texts (up to 8 windows of 17 bytes)" in statement
    assert "all files in a folder, at any depth, are one sample" in statement.replace("All", "all")
    assert train(tmp_path / "other", *data, "--batch-size", "8", "--eval-fraction", "0.3", steps=2) == 0
    assert "users who were not trained on" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_dates_fractions_and_values_that_never_repeat_are_not_suggested(tmp_path):
    path = tmp_path / "notes.jsonl"

    def suggested(**more):
        records = [
            {
                "note": "x",
                "id": i,
                "day": "2024-01-31",
                "time": "8:15",
                "dose": "0,5",
                **{k: v(i) for k, v in more.items()},
            }
            for i in range(20)
        ]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return user_fields(path, text_field="note")

    assert suggested() == ("id",)
    assert suggested(ward=lambda i: i % 3) == ("ward",)
    assert suggested(ward=lambda i: i % 3, patient_id=lambda i: f"p{i}") == ("patient_id", "ward")
    assert suggested(who=lambda i: "ann" if i else "31.1.2024") == ("who",)


def test_the_error_about_a_missing_user_field_names_no_date(tmp_path, capsys):
    path = tmp_path / "notes.jsonl"
    path.write_text(
        "".join(f'{{"note": "x", "date": "{1 + i % 9}/3/2024", "patient_id": {i % 3}}}\n' for i in range(20))
    )
    assert call("train", "--data", str(path), "--field", "note", "--unit", "user") == 2
    assert "it could be patient_id. For example: --user-field patient_id" in " ".join(capsys.readouterr().err.split())
