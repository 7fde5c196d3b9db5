"""Records of every format give the same datasets, and errors that name file and row."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdp import keys
from fdp.data import corpus, datasets, text
from fdp.data.digest import data_digest
from fdp.data.files import RecordForm, find_source
from fdp.data.read_counts import read_counts_of
from fdp.data.record_files import read_records
from fdp.data.table_records import find_separator, read_table
from fdp.data.user_fields import user_fields
from fdp.data.windows import Windows
from fdp.types import FdpError

pyarrow = pytest.importorskip("pyarrow")

NOTES = [
    {"patient_id": "ann", "text": 'one, "two"\nthree'},
    {"patient_id": "bob", "text": "four"},
    {"patient_id": "Ann", "text": "fünf ; six\tseven"},
]
BY_PATIENT: dict[str, Any] = {"per_user": corpus.PerUser("patient_id", windows=2, key=keys.key(0))}
ALIKE: tuple[dict[str, Any], ...] = ({}, BY_PATIENT, {"form": RecordForm.TEXT, "field": "patient_id"})


def json_lines() -> bytes:
    return "".join(json.dumps(note) + "\n" for note in NOTES).encode()


def table(separator: str = ",") -> bytes:
    lines = io.StringIO()
    rows = csv.DictWriter(lines, ["patient_id", "text"], delimiter=separator)
    rows.writeheader()
    rows.writerows(NOTES)
    return lines.getvalue().encode()


def write_parquet(path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(NOTES), path, row_group_size=2)


def write_stream(path: Path, notes: list[dict[str, Any]] = NOTES) -> None:
    import pyarrow.ipc

    found = pyarrow.Table.from_pylist(notes)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, found.schema) as stream:
        stream.write_table(found, max_chunksize=2)


def write_indexed(path: Path) -> None:
    import pyarrow.feather

    pyarrow.feather.write_feather(pyarrow.Table.from_pylist(NOTES), str(path))


def write_saved(path: Path) -> None:
    """Write a folder as ``datasets.save_to_disk`` does, in two files whose order is that of state.json."""
    path.mkdir()
    write_stream(path / "data-00001-of-00002.arrow", NOTES[:2])
    write_stream(path / "data-00000-of-00002.arrow", NOTES[2:])
    files = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in (1, 0)]
    (path / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "x", "_split": "train"}))
    (path / "dataset_info.json").write_text(json.dumps({"features": {}}))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "notes.ndjson": lambda path: path.write_bytes(json_lines()),
    "notes.json": lambda path: path.write_text(json.dumps(NOTES)),
    "notes.csv": lambda path: path.write_bytes(table()),
    "bom.csv": lambda path: path.write_bytes(b"\xef\xbb\xbf" + table() + b"\r\n"),
    "notes.tsv": lambda path: path.write_bytes(table("\t")),
    "notes.JSONL.gz": lambda path: path.write_bytes(gzip.compress(json_lines())),
    "notes.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(NOTES).encode())),
    "notes.csv.gz": lambda path: path.write_bytes(gzip.compress(table())),
    "notes.parquet": write_parquet,
    "notes.arrow": write_stream,
    "notes.feather": write_indexed,
    "saved": write_saved,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_datasets(name: str, tmp_path: Path) -> None:
    plain = tmp_path / "notes.jsonl"
    plain.write_bytes(json_lines())
    path = tmp_path / name
    WRITERS[name](path)
    assert [record for _, record in read_records(find_source(path))] == NOTES
    for options in ALIKE:
        one, other = (corpus.load(each, context=9, vocab_size=256, **options) for each in (plain, path))
        assert data_digest(one) == data_digest(other)
        assert one.reading == other.reading
        assert one.unit == other.unit
    for tokenizer in (None, text.BYTES):
        one, other = (datasets.load(each, context=9, tokenizer=tokenizer) for each in (plain, path))
        assert data_digest(one) == data_digest(other)


def test_places_name_file_and_row(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b.parquet")
    (tmp_path / "a.csv").write_bytes(table())
    write_saved(tmp_path / "c")
    places = [place.removeprefix(f"{tmp_path}/") for place, _ in read_records(find_source(tmp_path))]
    assert places == [
        *("a.csv, line 2, row 1", "a.csv, line 4, row 2", "a.csv, line 5, row 3"),
        *("b.parquet, row 1", "b.parquet, row 2", "b.parquet, row 3"),
        *("c/data-00001-of-00002.arrow, row 1", "c/data-00001-of-00002.arrow, row 2"),
        "c/data-00000-of-00002.arrow, row 1",
    ]
    assert corpus.read(tmp_path, text.BYTES)[0].texts == 9


def test_conversations_are_read_from_parquet(tmp_path: Path) -> None:
    import pyarrow.parquet

    said = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(said), tmp_path / "a.parquet")
    documents, _ = corpus.read(tmp_path / "a.parquet", text.BYTES)
    assert bytes(documents.row(0).tolist()) == b"user: hi\nassistant: ho\n"


def test_zipped_texts_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one two"))
    (tmp_path / "b.txt").write_bytes(b"three")
    documents, _ = corpus.read(tmp_path, text.BYTES)
    assert [bytes(documents.row(i).tolist()) for i in range(2)] == [b"one two", b"three"]
    for path, found in ((tmp_path, b"one two\nthree"), (tmp_path / "a.txt.gz", b"one two")):
        dataset = datasets.load(path, context=2)
        assert isinstance(dataset, Windows)
        assert dataset.tokens[:].tobytes() == found


CANARY = "Xylophon4711"
BROKEN: dict[str, tuple[bytes, str]] = {
    "a.csv": (f"text,by\n{CANARY},b,c\n".encode(), "line 2, row 1: expected 2 fields, as in the header, got 3"),
    "b.csv": (f'text,by\na,b\n"{CANARY},b\n'.encode(), "line 3: .* got a quote that is not closed"),
    "c.csv": (f'text,by\n"{CANARY}"x,b\n'.encode(), "line 2: .* something after a closing quote"),
    "d.csv": (f"text,by\n{CANARY},\xff\n".encode("latin-1"), "line [12]: .* a byte that is not UTF-8"),
    "e.csv": (f"text|{CANARY}\na|b\n".encode(), "line 1: .* separated by commas, got one field with bars in it"),
    "f.csv": (f"{CANARY},{CANARY}\na,b\n".encode(), "line 1: expected a header that names every field once"),
    "g.csv": (f"{CANARY},by\na,b\n".encode(), "row 1: expected text in field 'text', .* no such field among its 2"),
    "e.tsv": (f"text;{CANARY}\na;b\n".encode(), "got one field with semicolons in it; write the table again"),
    "j.csv": (f"text\t{CANARY};by\na\tb;c\n".encode(), "line 1: .* separated by commas, got one field with semicolons"),
    "l.csv": (f'"text;{CANARY}"\na\n'.encode(), "line 1: .* separated by commas, got one field with semicolons in it"),
    "m.csv": (f"text;by\n{CANARY};b;c\n".encode(), "line 2, row 1: expected 2 fields, as in the header, got 3"),
    "n.csv": (f'text;by\n"{CANARY};b\n'.encode(), "line 2: expected fields separated by semicolons, got a quote that"),
    "o.csv": (
        f"text;by\n{CANARY};\xff\n".encode("latin-1"),
        "line [12]: .* by semicolons, got a byte that is not UTF-8",
    ),
    "k.csv": (f"text,{CANARY}\n".encode(), "expected a header and a record on every row, got a header and no rows"),
    "h.csv": (b"\n", "expected a header and a record on every row, got nothing"),
    "i.tsv": (f"text,by\n{CANARY},b\n".encode(), "separated by tabs, got one field with commas in it"),
    "a.csv.gz": (gzip.compress(f"text\n{CANARY}\n".encode())[:-12], "expected a file compressed by gzip, got one that"),
    "a.jsonl.gz": (gzip.compress(json.dumps({"text": CANARY * 99}).encode())[:-30], "expected a file compressed by"),
    "a.json.gz": (gzip.compress(b"[]")[:-9], "expected a file compressed by gzip"),
    "a.txt.gz": (gzip.compress(CANARY.encode())[:-9], "expected a file compressed by gzip"),
    "a.parquet": (CANARY.encode(), "a.parquet: expected a table that pyarrow reads, got one that it does not"),
    "a.arrow": (CANARY.encode(), "a.arrow: expected a table that pyarrow reads, got one that it does not"),
    "a.feather": (b"ARROW1" + CANARY.encode(), "a.feather: expected a table that pyarrow reads"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_row_and_without_content(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    for read in (
        lambda: corpus.load(tmp_path / name, context=4, vocab_size=256),
        lambda: datasets.load(tmp_path / name, context=1),
    ):
        with pytest.raises(FdpError, match=message) as caught:
            read()
        error: BaseException | None = caught.value
        while error is not None:
            assert CANARY not in f"{error!r} {vars(error)}"
            error = error.__cause__ or error.__context__


@pytest.mark.parametrize(("suffix", "found"), [(".csv", "|"), (".tsv", ";")])
def test_the_command_that_separates_fields_otherwise_works_as_printed(suffix: str, found: str, tmp_path: Path) -> None:
    (tmp_path / f"a{suffix}").write_text(f'text{found}by\n"one; ""two"", three\t4"{found}b\n')
    with pytest.raises(FdpError) as caught:
        list(read_table(tmp_path / f"a{suffix}"))
    command = str(caught.value).partition("for example by: python")[2]
    command = command.replace("OLD", f"a{suffix}").replace("NEW", f"b{suffix}")
    subprocess.run(f"{shlex.quote(sys.executable)}{command}", shell=True, check=True, cwd=tmp_path)
    assert [record for _, record in read_table(tmp_path / f"b{suffix}")] == [
        {"text": 'one; "two", three\t4', "by": "b"}
    ]


@pytest.mark.parametrize(("separator", "words"), [(";", "semicolons"), ("\t", "tabs")])
@pytest.mark.parametrize("zipped", ["", ".gz"])
def test_a_csv_file_with_other_separators_is_the_same_data(
    separator: str, words: str, zipped: str, tmp_path: Path
) -> None:
    """The values have both separators, commas and line breaks in quotes; the file begins with a mark, as Excel's do."""
    write = gzip.compress if zipped else bytes
    (tmp_path / f"commas.csv{zipped}").write_bytes(write(table()))
    other = tmp_path / f"others.csv{zipped}"
    other.write_bytes(write(codecs.BOM_UTF8 + b"\r\n" + table(separator)))
    assert b"\r\n" in table(separator)
    for options in ALIKE:
        one, two = (
            corpus.load(path, context=9, vocab_size=256, **options)
            for path in (tmp_path / f"commas.csv{zipped}", other)
        )
        assert data_digest(one) == data_digest(two)
        assert one.reading.separated == ""
        assert f"separated by {words}" in two.reading.line()
    one, two = (datasets.load(path, context=2) for path in (tmp_path / f"commas.csv{zipped}", other))
    assert data_digest(one) == data_digest(two)
    assert f"; separated by {words}" in read_line(two)
    assert user_fields(other, text_field="text") == ("patient_id",)
    mixed = datasets.load(tmp_path, context=2)
    assert f"; separated by commas and {words}" in read_line(mixed)


def read_line(dataset: Any) -> str:
    reading = read_counts_of(dataset)
    assert reading is not None
    return reading.line()


@pytest.mark.parametrize(
    ("header", "separator"),
    [
        ("text", ","),
        ("text,by;or", ","),
        ('"text;by",to', ","),
        ('"text, or note";by', ";"),
        ('"text;\n\tnote"\tby', "\t"),
        ("text\tby;to", ","),
        ('"text;by"', ","),
        ("text|by", ","),
    ],
)
def test_the_separator_is_that_of_the_header_outside_quotes(header: str, separator: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n1;2;3,4\t5\n")
    assert find_separator(tmp_path / "a.csv") == separator
    (tmp_path / "a.tsv").write_text(f"{header}\n")
    assert find_separator(tmp_path / "a.tsv") == "\t"


def test_a_header_longer_than_what_is_looked_at_is_separated_by_commas(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",".join(f"field{i};" for i in range(10_000)))
    assert find_separator(tmp_path / "a.csv") == ","


def test_a_table_without_the_user_is_refused_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text,patient_id\n{CANARY},1\n{CANARY},\n")
    with pytest.raises(FdpError, match="line 3, row 2: expected a user's name or number in field 'patient_id', got a "):
        corpus.load(tmp_path / "a.csv", context=4, vocab_size=256, **BY_PATIENT)


def test_a_folder_of_several_splits_says_which_to_name(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_saved(tmp_path / split)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        FdpError, match=r"expected one split of a saved dataset, got a folder of several; name one: .*/test, .*/train"
    ):
        corpus.load(tmp_path, context=4, vocab_size=256)
    assert len(corpus.load(tmp_path / "train", context=4, vocab_size=256)) == 3
    (tmp_path / "train" / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(FdpError, match=r"expected the .arrow files of a saved dataset, got no data-00000"):
        corpus.load(tmp_path / "train", context=4, vocab_size=256)


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(FdpError, match=r"pyarrow is needed to read .*a.parquet.*: pip install 'fdp\[parquet\]'"):
        corpus.load(tmp_path / "a.parquet", context=4, vocab_size=256)


def test_tokens_beside_a_tokenizer_are_of_its_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 255, 3]))
    assert len(datasets.load(tmp_path / "a.npy", context=1, vocab_size=500, tokenizer=text.BYTES)) == 2
    np.save(tmp_path / "b.npy", np.array([1, 2, 256, 3]))
    assert len(datasets.load(tmp_path / "b.npy", context=1, vocab_size=500)) == 2
    with pytest.raises(FdpError, match="expected token ids from 0 to 255, got another at position 2"):
        datasets.load(tmp_path / "b.npy", context=1, vocab_size=500, tokenizer=text.BYTES)
