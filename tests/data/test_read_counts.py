"""Data that is not trained on is counted and reported before a run; the counts go only to files outside the budget."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdp import keys
from fdp.cli.main import main
from fdp.data import corpus, datasets
from fdp.data.document_packing import PackUnit, pack
from fdp.data.documents import Documents, join_documents, pad_rows, records, rows_with_loss
from fdp.data.read_counts import ReadCounts, read_counts_of
from fdp.data.units import UnitKind
from fdp.types import FdpError
from tests.data.test_text import write

COUNTED = st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=8)
TINY = shlex.split("--steps 1 --warmup 0 --batch-size 4 --microbatch 4 --noise-multiplier 0.5 --seed 0 --json")


def documents_of(counted: list[list[bool]]) -> Documents:
    owners = [f"{i // 2}" for i in range(len(counted))]
    return join_documents(((range(len(row)), row) for row in counted), owners, source="here")


@given(counted=COUNTED, context=st.integers(1, 6), packed=st.booleans())
def test_rows_with_loss_are_those_whose_mask_has_any(counted: list[list[bool]], context: int, packed: bool) -> None:
    documents = documents_of(counted)
    documents = pack(documents, context=context, unit=PackUnit.OWNER) if packed else documents
    every = np.arange(len(documents.owners))
    for length, given_context in ((context, context), (20, None)):
        mask = pad_rows(documents, every, context=length)["loss_mask"]
        assert rows_with_loss(documents, context=given_context).tolist() == mask.any(1).tolist()


def test_records_that_lose_their_end_are_counted_and_reported(tmp_path: Path) -> None:
    said = [{"prompt": "ab", "completion": "cd"}, {"prompt": "abcd", "completion": "efgh"}]
    said += [{"prompt": "abcdefgh", "completion": "i"}, {"prompt": "a", "completion": ""}]
    reading = corpus.load(write(tmp_path / "a.jsonl", *said), context=5, vocab_size=256).reading
    assert reading == ReadCounts(
        UnitKind.RECORD, 4, 6, "byte", texts=4, windows=4, cut=2, unlearned=1, silent=2, lost=5
    )
    assert reading.line() == "4 records, each a sample of up to 6 bytes; 2 records cut at 6 bytes"
    assert reading.warnings() == [
        "2 of 4 records are longer than the 6 bytes of a sample: their ends, 5 bytes, are not trained on (1 of them "
        "loses all that would be learned); a longer --context or --long split keeps more of them",
        "2 of 4 records hold nothing to learn (no answer, too short, or cut before it): they are sampled like the "
        "others and change nothing",
    ]
    assert corpus.load(tmp_path / "a.jsonl", context=9, vocab_size=256).reading.cut == 0


def test_unused_windows_of_users_are_counted_and_reported(tmp_path: Path) -> None:
    said = [{"text": "abcdefghij", "by": "ann"}, {"text": "xy", "by": "bob"}, {"text": "z", "by": "cy"}]
    path = write(tmp_path / "a.jsonl", *said, {"text": "kl", "by": "ann"})
    options: dict[str, Any] = {
        "context": 3,
        "vocab_size": 256,
        "per_user": corpus.PerUser("by", windows=2, key=keys.key(0)),
    }
    reading = corpus.load(path, **options).reading
    assert reading == ReadCounts(
        UnitKind.USER, 3, 4, "byte", texts=4, windows=4, capped=1, left_out=2, silent=1, packed=5, most=2
    )
    assert reading.line() == (
        "3 users, 4 records, 4 windows of up to 4 bytes; 1 user capped at 2 windows; --pack would save 17% of the "
        "windows"
    )
    capped, silent = reading.warnings()
    assert capped == "1 of 3 users has more windows than --windows-per-user: 2 of 6 windows are not trained on"
    assert silent.startswith("1 of 3 users holds nothing to learn")
    rows = corpus.load(path, context=3, vocab_size=256, pack=PackUnit.ROW).reading
    assert rows.line() == "4 records, packed into 4 rows of up to 4 bytes"


def test_a_tail_and_links_are_counted_and_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij")
    os.link(tmp_path / "a.txt", tmp_path / "b.txt")
    for reading in (
        read_counts_of(datasets.load(tmp_path, context=3)),
        corpus.load(tmp_path, context=3, vocab_size=256).reading,
    ):
        assert reading is not None
        assert reading.warnings()[-1] == "1 file of the folder is a link to another that is read: left out"
    windows = read_counts_of(datasets.load(tmp_path, context=3))
    assert windows is not None
    assert windows.line() == "2 windows of 4 bytes in 1 file; 2 bytes at the end fill no window and are left out"
    one = read_counts_of(datasets.load(tmp_path, context=8))
    assert one is not None
    assert one.line() == "1 window of 9 bytes in 1 file; 1 byte at the end fills no window and is left out"
    images = read_counts_of(datasets.digits()[0])
    assert images is not None
    assert images.line() == "1,437 images"


def test_data_without_anything_to_learn_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(FdpError, match=r"a.jsonl: expected something to learn, got records or files without it"):
        corpus.load(path, context=9, vocab_size=256)


def test_documents_built_in_memory_are_counted() -> None:
    dataset = records(
        join_documents([([1] * 5, [True] * 5), ([1], [True])], ["a", "b"], source="x"), context=3, vocab_size=9
    )
    assert (dataset.reading.texts, dataset.reading.cut, dataset.reading.silent) == (2, 1, 1)


@pytest.mark.parametrize("unit", ["record", "user"])
def test_a_run_reports_counts_on_screen_and_keeps_them_out_of_shared_files(
    unit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would be folded in the middle of a word
    said = [{"text": f"note {i} of some length", "by": f"user {i % 20}"} for i in range(60)]
    path, out = write(Path("mail.jsonl"), *said), tmp_path / "run"
    by = ["--user-field", "by", "--windows-per-user", "1"] if unit == "user" else []
    words = ["train", *TINY, "--context", "16", "--data", str(path), "--unit", unit, *by, "--out", str(out)]
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert not caught.value.code
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    if unit == "record":
        assert (
            "mail.jsonl, 60 records, each a sample of up to 17 bytes; 60 records cut at 17 bytes (counts are" in printed
        )
        assert "60 of 60 records are longer than the 17 bytes of a sample: their ends, 290 bytes, are not" in printed
        assert "one record (its first 17 bytes), added or removed; the whole record is protected" in printed
    else:
        assert "mail.jsonl, 20 users, 60 records, 20 windows of up to 17 bytes; 20 users capped at 1 window" in printed
        assert (
            "20 of 20 users have more windows than --windows-per-user: 100 of 120 windows are not trained on" in printed
        )
        assert (
            "one user, named by by (up to 1 window of 17 bytes), added or removed; all of a user's records" in printed
        )
        assert "longer text is several" not in printed
    summary = json.loads((out / "summary.json").read_text())["reading"]
    assert (summary["kind"], summary["texts"], summary["cut"]) == (unit, 60, 60 if unit == "record" else 0)
    config = (out / "config.json").read_text()
    assert not {"reading", "texts", "cut", "capped", "left_out", "silent"} & set(json.loads(config))
    assert "120" not in config
