"""The unit of privacy in words: one function, and every place that prints it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fdp import keys
from fdp.data import corpus
from fdp.data.document_packing import PackUnit
from fdp.data.documents import Long, join_documents, records
from fdp.data.images import Examples
from fdp.data.units import PrivacyUnit, UnitKind, dataset_unit, named_by, privacy_unit, sentence, statement
from fdp.data.users import by_user
from fdp.data.windows import windows
from tests.data.test_text import write

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
ROWS = (UnitKind.WINDOW, UnitKind.RECORD, UnitKind.FILE, UnitKind.USER, UnitKind.ROW)


@pytest.mark.parametrize("kind", ROWS)
def test_the_table_in_the_docs_is_what_a_run_prints(kind: UnitKind) -> None:
    unit = privacy_unit(kind, tokens=129, word="byte", windows=8 if kind is UnitKind.USER else 1)
    option = "record" if kind is UnitKind.FILE else kind.value
    assert f"| `{option}` | {unit.one} | {unit.note} |\n" in PAGE


def test_every_unit_kind_has_a_description() -> None:
    found = [privacy_unit(kind, tokens=129, word="byte", windows=8) for kind in UnitKind]
    assert len(set(found)) == len(UnitKind)
    assert all(unit.one.startswith("one ") and unit.note for unit in found)


def test_only_windows_split_a_longer_text_into_several_samples() -> None:
    assert [kind for kind in UnitKind if "in several windows" in privacy_unit(kind).note] == [UnitKind.WINDOW]


def test_datasets_describe_their_unit(tmp_path: Path) -> None:
    path = write(tmp_path / "mail.jsonl", {"text": "abc", "by": "ann"}, {"text": "abcdefgh", "by": "bob"})
    by = corpus.PerUser("by", windows=2, key=keys.key(0))
    assert corpus.load(path, context=3, vocab_size=256).unit == privacy_unit(UnitKind.RECORD, tokens=4, word="byte")
    users = corpus.load(path, context=3, vocab_size=256, per_user=by)
    assert users.unit == privacy_unit(UnitKind.USER, tokens=4, word="byte", windows=2, which=named_by("by"))
    rows = corpus.load(path, context=3, vocab_size=256, pack=PackUnit.ROW)
    assert rows.unit == privacy_unit(UnitKind.ROW, tokens=4, word="byte")
    stream = windows(np.zeros(9, dtype=np.uint8), context=3, vocab_size=256, where="here")
    assert stream.unit == privacy_unit(UnitKind.WINDOW, tokens=4)
    assert Examples(torch.zeros(1, 1), torch.zeros(1)).unit == privacy_unit(UnitKind.IMAGE)
    assert dataset_unit([1, 2]) == privacy_unit(UnitKind.SAMPLE)
    documents = join_documents([([1, 2], [True, True])], ["a"], source="here")
    assert records(documents, context=3, vocab_size=9).unit == privacy_unit(UnitKind.RECORD, tokens=4)
    assert by_user(documents, context=3, vocab_size=9, windows=1, key=keys.key(0)).unit.one.startswith("one user")


def test_a_unit_of_several_windows_says_how_many_and_what_they_hold(tmp_path: Path) -> None:
    path = write(tmp_path / "mail.jsonl", {"text": "abcdefgh", "patient": "ann"}, {"text": "ij", "patient": "ann"})
    (tmp_path / "a.txt").write_text("abcdefgh")

    def one(name: str = "mail.jsonl", **options: Any) -> str:
        return corpus.load(tmp_path / name, context=3, vocab_size=256, **options).unit.one

    by = corpus.PerUser("patient", windows=2, key=keys.key(0))
    assert path.exists()
    assert one(windows_per_record=2) == "one record (its first 2 windows of 4 bytes)"
    assert one("a.txt", windows_per_record=2) == "one file (its first 2 windows of 4 bytes)"
    assert one(per_user=by) == "one user, named by patient (up to 2 windows of 4 bytes)"
    cut = by._replace(long=Long.CUT)
    assert (
        one(per_user=cut) == "one user, named by patient (up to 2 windows of 4 bytes, each the beginning of a record)"
    )
    packed = "one user, named by patient (up to 2 windows of 4 bytes, each of as many records as fit)"
    assert one(per_user=by, pack=PackUnit.OWNER) == packed


def test_a_statement_says_unit_neighbours_and_meaning() -> None:
    unit = privacy_unit(UnitKind.RECORD, tokens=513)
    assert statement(unit, change="added or removed") == (
        "The unit of privacy is one record (its first 513 tokens). Neighbouring datasets differ in one unit, added or "
        "removed. The whole record is protected, whatever its length; a person's ten records are ten samples."
    )


def test_a_sentence_names_the_change_between_neighbours() -> None:
    assert sentence(PrivacyUnit("one letter", "ten are ten"), change="sent") == "one letter, sent; ten are ten"
