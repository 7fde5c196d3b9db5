"""Records longer than a window: cut with a count of what is lost, or several windows of the same sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdp import keys
from fdp.data import corpus, datasets
from fdp.data.document_packing import PackUnit, pack, packed_rows
from fdp.data.documents import Long, cut_rows, join_documents, split_rows
from fdp.data.held_out import split_held_out
from fdp.data.read_counts import read_counts_of
from fdp.data.units import UnitKind
from fdp.data.users import Users, by_record
from fdp.types import FdpError
from tests.data.test_text import write

CONTEXT: dict[str, Any] = {"context": 3, "vocab_size": 256}
SIZES = st.lists(st.integers(0, 14), min_size=1, max_size=8)
BY = corpus.PerUser("by", windows=3, key=keys.key(0))


def texts_of(dataset: Users, u: int) -> list[str]:
    rows = [dataset.documents.row(i) for i in dataset.rows[u] if i >= 0]
    return ["".join(map(chr, row)) for row in rows]


def test_a_long_record_is_one_sample_of_several_windows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "abcdefghij"}, {"text": "xy"}, {"text": "klmnopqrstuvwxyz"})
    dataset = corpus.load(path, windows_per_record=3, **CONTEXT)
    assert isinstance(dataset, Users)
    assert len(dataset) == 3
    assert [texts_of(dataset, u) for u in range(3)] == [["abcd", "efgh", "ij"], ["xy"], ["klmn", "opqr", "stuv"]]
    assert dataset.fetch(np.arange(3))["tokens"].shape == (3, 3, 4)
    assert dataset.reading.line() == "3 records, 7 windows of up to 4 bytes; 1 record capped at 3 windows"
    (capped,) = dataset.reading.warnings()
    assert capped == "1 of 3 records has more windows than --windows-per-user: 1 of 8 windows is not trained on"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, gone=st.integers(0, 7), windows=st.integers(1, 3))
def test_a_split_record_does_not_depend_on_other_records(
    sizes: list[int], gone: int, windows: int, tmp_path: Path
) -> None:
    """Removing a record removes its sample, and changes no other, although it changes the places of those after it."""
    words = ["abcdefghijklmnop"[:size] + chr(65 + i) for i, size in enumerate(sizes)]

    def samples(some: list[str]) -> list[list[list[int]]]:
        path = write(tmp_path / "some.jsonl", *({"text": each} for each in some))
        documents, kind = corpus.read(path, corpus.text.BYTES)
        rows = split_rows(documents, length=4)
        dataset = by_record(rows, context=3, vocab_size=256, windows=windows, kind=kind)
        return dataset.fetch(np.arange(len(dataset)))["tokens"].tolist()

    whole, gone = samples(words), gone % len(words)
    assert len(whole) == len(words), "a record is one sample, however long"
    if len(words) > 1:
        assert samples(words[:gone] + words[gone + 1 :]) == whole[:gone] + whole[gone + 1 :]


def test_cutting_keeps_the_first_window_of_every_record_of_a_user(tmp_path: Path) -> None:
    said = [("ann", "abcdefghij"), ("bob", "xy"), ("ann", "klmno")]
    path = write(tmp_path / "a.jsonl", *({"text": words, "by": name} for name, words in said))
    split, cut = (corpus.load(path, per_user=BY._replace(long=long), **CONTEXT) for long in (Long.SPLIT, Long.CUT))
    assert isinstance(split, Users)
    assert isinstance(cut, Users)
    assert split.reading.cut == 0
    assert split.reading.left_out == 2
    assert [texts_of(cut, u) for u in range(2)] == [["abcd", "klmn"], ["xy"]]
    assert (cut.reading.cut, cut.reading.lost, cut.reading.capped) == (2, 7, 0)
    assert cut.reading.warnings() == [
        "2 of 3 records are longer than the 4 bytes of a window: their ends, 7 bytes, are not trained on; a longer "
        "--context or --long split keeps more of them"
    ]
    packed = corpus.load(path, per_user=BY._replace(long=Long.CUT), pack=PackUnit.OWNER, **CONTEXT)
    assert (packed.reading.cut, packed.reading.windows) == (2, 3)


@given(sizes=SIZES, length=st.integers(1, 5))
def test_cut_rows_keeps_the_beginnings_and_counts_the_rest(sizes: list[int], length: int) -> None:
    owners = [f"{i % 3}" for i in range(len(sizes))]
    documents = join_documents(((range(n), [True] * n) for n in sizes), owners, source="here")
    cut = cut_rows(documents, length=length)
    assert [cut.row(i).tolist() for i in range(len(sizes))] == [list(range(min(n, length))) for n in sizes]
    assert cut.owned is not None
    assert sum(each.lost for each in cut.owned.values()) == sum(max(n - length, 0) for n in sizes)
    assert sum(each.cut for each in cut.owned.values()) == sum(n > length for n in sizes)
    assert sum(each.texts for each in cut.owned.values()) == len(sizes)


@given(sizes=SIZES, context=st.integers(1, 5))
def test_packing_is_predicted_without_packing(sizes: list[int], context: int) -> None:
    owners = [f"{i % 3}" for i in range(len(sizes))]
    documents = join_documents(((range(n), [True] * n) for n in sizes), owners, source="here")
    packed = pack(documents, context=context, unit=PackUnit.OWNER)
    found = packed_rows(split_rows(documents, length=context + 1), context=context)
    assert found == {owner: packed.owners.count(owner) for owner in set(owners)}


def test_the_line_says_that_packing_would_halve_the_windows(tmp_path: Path) -> None:
    said = [{"note": "ab", "patient_id": f"p{i // 2}"} for i in range(12)]
    path = write(tmp_path / "a.jsonl", *said)
    by = corpus.PerUser("patient_id", windows=3, key=keys.key(0))
    line = "6 patients, 12 notes, 12 windows of up to 4 bytes; --pack would halve the windows"
    dataset = corpus.load(path, field="note", per_user=by, **CONTEXT)
    assert dataset.reading.line() == line
    packed = corpus.load(path, field="note", per_user=by, pack=PackUnit.OWNER, **CONTEXT)
    assert packed.reading.line() == "6 patients, 12 notes, 6 windows of up to 4 bytes"


def test_records_with_a_person_suggest_the_person(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": f"note {i}", "patient_id": f"p{i % 7}"} for i in range(30)))
    reading = read_counts_of(datasets.load(path, context=3))
    assert reading is not None
    assert reading.warnings() == [
        "the records have a field 'patient_id' (7 values in 30 records): --unit user --user-field patient_id protects "
        "the person, --unit window only a window"
    ]
    said = corpus.load(path, **CONTEXT).reading.warnings()[-1]
    assert said.endswith("--user-field patient_id protects the person, --unit record only a record")


@pytest.mark.parametrize("options", [{}, {"windows_per_record": 3}, {"per_user": BY}])
def test_the_sides_of_a_split_count_their_own_samples(options: dict[str, Any], tmp_path: Path) -> None:
    said = [{"text": "abcdefghijklmnop"[: 3 + i % 13], "by": f"user {i % 9}"} for i in range(40)]
    dataset = corpus.load(write(tmp_path / "a.jsonl", *said), **CONTEXT, **options)
    sides = [read_counts_of(side) for side in split_held_out(dataset, 0.4)]
    for name in ("samples", "texts", "windows", "cut", "lost", "capped", "left_out", "silent", "packed"):
        assert sum(getattr(side, name) for side in sides) == getattr(dataset.reading, name)
    assert all(side is not None and side.samples for side in sides)


def test_a_split_record_is_held_out_by_its_content(tmp_path: Path) -> None:
    words = ["abcdefghijklmnop"[: 3 + i % 13] + str(i) for i in range(40)]

    def held(some: list[str]) -> list[Any]:
        dataset = corpus.load(
            write(tmp_path / "a.jsonl", *({"text": each} for each in some)), windows_per_record=3, **CONTEXT
        )
        side = split_held_out(dataset, 0.4)[1]
        return side.fetch(np.arange(len(side)))["tokens"].tolist()

    assert all(each in held(words) for each in held(words[7:]))


def test_windows_below_one_are_refused() -> None:
    documents = join_documents([([1], [True])], ["a"], source="here")
    with pytest.raises(FdpError, match="expected at least 1 for each record, got 0"):
        by_record(documents, context=3, vocab_size=9, windows=0, kind=UnitKind.RECORD)
