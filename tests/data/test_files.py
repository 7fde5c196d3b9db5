"""Files once each, records by their own form, and errors that name file and line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdp import keys
from fdp.data import corpus, datasets, text
from fdp.data.files import RecordForm, find_source
from fdp.data.read_counts import read_counts_of
from fdp.data.record_fields import owner_of, record_form, text_field
from fdp.data.record_files import read_records
from fdp.data.units import UnitKind
from fdp.data.windows import Windows
from fdp.types import FdpError
from tests.data.test_text import write

SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
RECORDS: dict[RecordForm, dict[str, Any]] = {
    RecordForm.TEXT: {"text": "abc"},
    RecordForm.COMPLETION: {"prompt": "p", "completion": "c"},
    RecordForm.MESSAGES: {"messages": SAID},
}
BY_USER: dict[str, Any] = {"per_user": corpus.PerUser("by", windows=2, key=keys.key(0))}


def rows(path: Path, **options: Any) -> list[bytes]:
    documents, _ = corpus.read(path, text.BYTES, **options)
    return [documents.row(i).astype(np.uint8).tobytes() for i in range(len(documents.owners))]


def test_one_users_record_does_not_decide_how_anothers_is_read(tmp_path: Path) -> None:
    """With a's messages in the file, b's record (messages and text) must not be read differently than without."""
    a, b = {"by": "a", "messages": SAID}, {"by": "b", "messages": SAID, "text": "something else"}
    for name, records in {"both": (a, b), "alone": (b,)}.items():
        path = write(tmp_path / f"{name}.jsonl", *records)
        where = (
            f"line {len(records)}: expected a record that can be read in one way, got one that can be read as text and"
        )
        with pytest.raises(FdpError, match=f"{where} as messages; choose one with --form text or --form messages"):
            corpus.load(path, context=20, vocab_size=256, **BY_USER)
    both, alone = (rows(tmp_path / f"{name}.jsonl", form=RecordForm.MESSAGES)[-1] for name in ("both", "alone"))
    assert both == alone == b"user: hi\nassistant: ho\n"
    assert rows(tmp_path / "alone.jsonl", form=RecordForm.TEXT) == [b"something else"]
    with pytest.raises(FdpError, match=r"both.jsonl, line 1: expected text in field 'text', got no such field"):
        rows(tmp_path / "both.jsonl", form=RecordForm.TEXT)


@pytest.mark.parametrize("first", RECORDS)
@pytest.mark.parametrize("second", RECORDS)
def test_records_of_two_forms_are_refused_with_both_lines(
    first: RecordForm, second: RecordForm, tmp_path: Path
) -> None:
    path = write(tmp_path / "mixed.jsonl", RECORDS[first], RECORDS[first], RECORDS[second])
    if first is second:
        assert len(rows(path)) == 3
        return
    words = (
        rf"line 3: expected {first.value} like .*mixed.jsonl, line 1, got {second.value}; .* split it, or give --form"
    )
    with pytest.raises(FdpError, match=words):
        rows(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(list(RECORDS)),
    extra=st.lists(st.dictionaries(st.sampled_from(["title", "text", "prompt", "messages"]), st.none() | st.just("x"))),
    left_out=st.integers(0, 4),
)
def test_a_document_is_a_function_of_its_own_record(
    form: RecordForm, extra: list, left_out: int, tmp_path: Path
) -> None:
    """A record gives the same document with or without others in the file; a null field counts as missing."""
    records = [RECORDS[form] | {k: v for k, v in more.items() if k not in RECORDS[form]} for more in extra]
    records = [RECORDS[form], *records]

    def found(some: list[dict]) -> list[bytes] | None:
        try:
            return rows(write(tmp_path / "some.jsonl", *some))
        except FdpError:
            return None

    whole = found(records)
    fewer = [record for i, record in enumerate(records) if i != left_out] or records
    part = found(fewer)
    if whole is not None:
        expected = [row for i, row in enumerate(whole) if i != left_out] or whole
        assert part == expected
    unclear = [record for record in records if isinstance(record.get("text"), str) and form is not RecordForm.TEXT]
    unclear += [
        record for record in records if isinstance(record.get("messages"), str) and form is not RecordForm.MESSAGES
    ]
    assert (whole is None) == bool(unclear)
    for record in unclear:  # what is refused is refused by itself
        with pytest.raises(FdpError, match="in one way"):
            record_form(record, "text", "here")


def test_a_null_field_counts_as_missing_and_a_named_field_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "union.jsonl", {"messages": SAID, "text": None, "prompt": None, "completion": None})
    assert rows(path) == [b"user: hi\nassistant: ho\n"]
    path = write(tmp_path / "body.jsonl", {"body": "abc", "messages": None, "prompt": "x"})
    assert rows(path, field="body") == [b"abc"]
    with pytest.raises(FdpError, match=r"got no such field among its 3 \('body', 'prompt', 'messages' there\)"):
        rows(path)


def test_a_mistyped_field_is_answered_with_a_close_one_but_never_with_content() -> None:
    record = {"text": "a", "patient": "p7", "diagnosis": "x"}
    for read in (lambda: owner_of(record, "patinet", "here"), lambda: text_field(record, "pateint", "here")):
        with pytest.raises(FdpError, match=r"among its 3 \(did you mean 'patient'\?\).*fdp inspect --data shows"):
            read()
    with pytest.raises(FdpError, match=r"among its 3 \('text' there\)"):
        owner_of(record, "ward", "here")
    first_row = {"Text me, Anna": "a", "texts": "b"}  # a table without a header: these are content
    for field in ("text", "Text me, Ann"):
        with pytest.raises(FdpError, match=r"no such field among its 2;"):
            text_field(first_row, field, "here")


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL", "a.NdJson"])
def test_json_lines_are_read_under_any_extension(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, {"text": "one"}, {"text": "two"})
    assert rows(path) == [b"one", b"two"]
    dataset = datasets.load(path, context=2)
    assert isinstance(dataset, Windows)
    assert dataset.tokens[:].tobytes() == b"one\ntwo"


@pytest.mark.parametrize("name", ["a.json", "a.JSON"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_holds_a_list_of_records_or_one_record(name: str, indent: int | None, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("\ufeff" + json.dumps([{"text": "one"}, {"text": "[two]"}], indent=indent) + "\n")
    assert rows(path) == [b"one", b"[two]"]
    path.write_text(json.dumps({"text": "one"}, indent=indent))
    assert rows(path) == [b"one"]
    path.write_text("[]")
    with pytest.raises(FdpError, match="empty"):
        rows(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": "b"}', "line 1, record 1: .* got more after it .is it JSON lines"),
        ('[{"text": "a"}]\n[]', "expected one list of records, got more after it"),
        ('[{"text": "a"},\n {"text": }]', "line 2, record 2: .* invalid JSON from line 2, column 11 on"),
        ('[{"text": "a"}\n {"text": "b"}]', "record 1: expected a comma or the end of the list after it"),
        ('[{"text": "a"}', "record 1: expected a comma or the end"),
        ('[{"text": "a"}, ', "record 2: expected a JSON object"),
        ("[[1]]", "line 1, record 1: expected a JSON object, got a list"),
        ('"a"', "expected a JSON object, got text"),
        ('{"data": [{"text": "a"}]}', "expected text in field 'text', .* got no such field among its 1"),
    ],
)
def test_a_broken_list_is_refused_with_its_place(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(FdpError, match=message):
        rows(tmp_path / "a.json")


def test_a_folder_of_shards_is_read_record_by_record_in_the_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "b.jsonl", {"text": "33", "by": "ann"})
    write(tmp_path / "a.jsonl", {"text": "1", "by": "ann"}, {"text": "2", "by": "bob"})
    write(tmp_path / "sub" / "c.ndjson", {"text": "4", "by": "bob"})
    (tmp_path / "d.json").write_text(json.dumps([{"text": "5", "by": "cy"}]))
    (tmp_path / ".hidden.txt").write_text("x")
    (tmp_path / "empty.txt").write_text("")
    assert rows(tmp_path) == [b"1", b"2", b"33", b"5", b"4"]
    assert corpus.read(tmp_path, text.BYTES)[1] is UnitKind.RECORD
    assert len(corpus.load(tmp_path, context=2, vocab_size=256, **BY_USER)) == 3
    dataset = datasets.load(tmp_path, context=2)
    assert isinstance(dataset, Windows)
    assert dataset.tokens[:].tobytes() == b"1\n2\n33\n5\n4"
    write(tmp_path / "sub" / "e.jsonl", {"body": "6"})
    with pytest.raises(FdpError, match=r"sub/e.jsonl, line 1: expected text in field 'text'"):
        rows(tmp_path)
    (tmp_path / "sub" / "e.jsonl").write_text('{"messages": 1}')
    with pytest.raises(FdpError, match=r"e.jsonl, line 1: expected text like .*a.jsonl, line 1, got messages"):
        rows(tmp_path)


def test_a_folder_of_texts_is_read_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.md").write_text("one")
    assert rows(tmp_path) == [b"one", b"two"]
    dataset = corpus.load(tmp_path, context=2, vocab_size=256)
    assert dataset.unit.one == "one file (its first 3 bytes)"
    with pytest.raises(FdpError, match="whose records have the fields of --form messages, got a text"):
        rows(tmp_path, form=RecordForm.MESSAGES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "a.jsonl",
            r"expected records only or texts only, got records in 1 file .a.jsonl. and text in 1 .*b.txt.; .* --form",
        ),
        ("a.npy", r"a.npy: expected text or records, got a file of tokens; give it by itself, or a folder of "),
        (
            "a.xlsx",
            r"a.xlsx: expected text, .jsonl, .* or .parquet, got another table; write its rows .* move it out .*--form",
        ),
        ("a.parquet.gz", "got an archive; unpack it"),
        ("a.gz", "got an archive"),
        ("a.pdf", "got a document; save it as plain text, or move it out"),
        ("a.DOCX", "got a document"),
        ("a.tar.gz", "got an archive"),
        (
            "a.csv.gz",
            r"got records in 1 file .a.csv.gz. and text in 1 file .b.txt.",
        ),
    ],
)
def test_a_folder_of_several_kinds_is_refused_unless_every_file_is_a_text(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / name).write_text("one")
    with pytest.raises(FdpError, match=message):
        rows(tmp_path)
    with pytest.raises(FdpError, match=message):
        datasets.load(tmp_path, context=2)
    assert rows(tmp_path, form=RecordForm.FILE) == [b"one", b"two"]
    dataset = datasets.load(tmp_path, context=2, form=RecordForm.FILE)
    assert isinstance(dataset, Windows)
    assert dataset.tokens[:].tobytes() == b"one\ntwo"


def test_all_files_that_are_refused_are_named_in_one_error(tmp_path: Path) -> None:
    for name in ("scan1.pdf", "scan2.pdf", "scan3.PDF", "scan4.docx", "old.zip", "LIESMICH.txt", "b.csv"):
        (tmp_path / name).write_text("text\n1\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "latin.csv").write_bytes("text\nÄpfel\n".encode("latin-1"))
    with pytest.raises(FdpError) as caught:
        rows(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: expected records only or texts only, got an archive (old.zip), 4 documents (scan1.pdf, "
        "scan2.pdf, scan3.PDF and 1 more), 1 file not in UTF-8 (sub/latin.csv), records in 2 files (b.csv, "
        "sub/latin.csv) and text in 1 file (LIESMICH.txt); unpack archives; save documents as plain text; convert "
        "others to UTF-8: in Excel save it as CSV UTF-8, or iconv -f latin1 -t utf-8 OLD > NEW, if it is Latin-1; give "
        "records and texts folders of their own, or --form file if every file is one text, or move them out of the "
        "folder"
    )


def test_a_single_file_that_is_refused_cannot_be_moved_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_text("one")
    with pytest.raises(FdpError, match=r"got a document; save it as plain text .if it is a plain text with such"):
        rows(tmp_path / "a.pdf")


def test_a_file_with_several_links_is_read_once(tmp_path: Path) -> None:
    """Also as windows of bytes, where the same text would be in two samples."""
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "a.txt").write_text("abcdef")
    (folder / "b.txt").symlink_to(folder / "a.txt")
    os.link(folder / "a.txt", folder / "c.txt")
    (elsewhere / "d.txt").write_text("ghi")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "again").symlink_to(elsewhere)
    (folder / "circle").symlink_to(folder)
    for tokenizer in (None, text.BYTES):
        dataset = datasets.load(folder, context=2, tokenizer=tokenizer)
        assert isinstance(dataset, Windows)
        assert dataset.tokens[:].astype(np.uint8).tobytes() == b"abcdef\nghi"
    assert rows(folder) == [b"abcdef", b"ghi"]
    assert find_source(folder).links == 3


def test_empty_and_hidden_files_are_counted(tmp_path: Path) -> None:
    """A folder of 4 files of which 2 are read must not look as if it had 2."""
    for name, words in {"a/1.txt": "one two", "b/1.txt": "three four", "b/2.txt": "", "c/.DS_Store": "x"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(words)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("not looked into")
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "gone")
    (tmp_path / "a" / "circle").symlink_to(tmp_path)
    assert find_source(tmp_path).unread == 2
    by_record = [corpus.load(tmp_path, context=2, vocab_size=256, windows_per_record=windows) for windows in (1, 2)]
    for dataset in (datasets.load(tmp_path, context=2), *by_record):
        reading = read_counts_of(dataset)
        assert reading is not None
        assert "2 files of the folder are empty, or hidden by a name that begins with a dot: left out" in (
            reading.warnings()
        )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "read").symlink_to(tmp_path / "b")
    assert find_source(tmp_path / "elsewhere").unread == 1, "links to folders are followed"


def test_a_file_under_two_names_is_read_once(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"text": "one"})
    os.link(tmp_path / "a.jsonl", tmp_path / "b.ndjson")
    assert rows(tmp_path) == [b"one"]


def test_places_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "two"}\r\n')
    assert [place for place, _ in read_records(find_source(path))] == [f"{path}, line 1", f"{path}, line 4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2: .* got one that is nested too deeply"),
        ('{"text": "a", "x": ' + '{"y":' * 20_000 + "1" + "}" * 20_001, "line 2: .* nested too deeply"),
        ('{"text": "a", "x": ' + "1" * 5000 + "}", "line 2: .* got one with a number of too many digits"),
        ('{"text": "a", "by": "\\ud800"}', "line 2, field 'by': expected text, got a lone surrogate"),
        ('{"text": "\\udfff", "by": "a"}', "line 2: expected text, got a lone surrogate"),
        ('{"text": "a"', "line 2: expected a JSON object .* invalid JSON from column 13 on"),
        ('{"text": "a", "text": "b"}', "line 2: .* a field twice"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused_with_its_place(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a", "by": "ann"}) + f"\n{line}\n")
    with pytest.raises(FdpError, match=message):
        corpus.load(path, context=2, vocab_size=256, **BY_USER)


def test_windows_are_read_as_text_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "abc", "messages": SAID})
    assert len(datasets.load(path, context=2)) == 1
    with pytest.raises(FdpError, match="--form messages: expected --unit record or user to go with it"):
        datasets.load(path, context=2, form=RecordForm.MESSAGES)
    with pytest.raises(FdpError, match="line 1: expected text in field 'text', got no such field"):
        datasets.load(write(tmp_path / "b.jsonl", {"messages": SAID}), context=2)
