"""Sources that load without a download, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fdp.data import datasets
from fdp.data.windows import Windows
from fdp.types import FdpError


def test_stdlib_is_python_source_and_the_same_every_time() -> None:
    first, second = datasets.load("stdlib", context=128), datasets.load("stdlib", context=128)
    assert isinstance(first, Windows)
    assert isinstance(second, Windows)
    assert len(first) > 10_000
    assert np.array_equal(first.tokens[:], second.tokens[:])
    assert b"def " in first.tokens[:100_000].tobytes()
    assert first.unit.one == "one window of 129 bytes"


def test_a_text_file_is_mapped_and_a_folder_is_joined_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second é")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    single = datasets.load(tmp_path / "b.txt", context=3)
    folder = datasets.load(tmp_path, context=3)
    assert isinstance(single, Windows)
    assert isinstance(folder, Windows)
    assert isinstance(single.tokens, np.memmap)
    assert folder.tokens[:].tobytes().decode() == "first\nsecond é"


def test_jsonl_reads_one_field_of_every_record(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"body": "one"}\n\n{"body": "two"}\n')
    dataset = datasets.load(path, context=2, field="body")
    assert isinstance(dataset, Windows)
    assert dataset.tokens[:].tobytes() == b"one\ntwo"
    with pytest.raises(
        FdpError,
        match=r"line 1: expected text in field 'text', got no such field among its 1 \('body' there\); name the field",
    ):
        datasets.load(path, context=2)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_npy_token_files_are_mapped_in_their_own_dtype(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=dtype))
    dataset = datasets.load(tmp_path / "tokens.npy", context=9, vocab_size=100)
    assert isinstance(dataset, Windows)
    assert isinstance(dataset.tokens, np.memmap)
    assert len(dataset) == 10
    assert dataset.fetch(np.array([9]))["tokens"].tolist() == [list(range(90, 100))]


def test_bin_token_files_are_little_endian_uint16(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(b"\x01\x00\x00\x02" * 4)
    dataset = datasets.load(tmp_path / "tokens.bin", context=3, vocab_size=1000)
    assert dataset.fetch(np.array([0]))["tokens"].tolist() == [[1, 512, 1, 512]]
    assert dataset.unit.one == "one window of 4 tokens"


@pytest.mark.parametrize("before", [0, 15, 16, 17, 40])
def test_a_byte_that_is_not_utf8_is_named_with_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    monkeypatch.setattr(datasets, "CHUNK_BYTES", 16)
    path = tmp_path / "latin.txt"
    path.write_bytes(b"a" * before + b"\xe9" + b"b" * 30)
    with pytest.raises(FdpError, match=rf"expected UTF-8 text, got a byte at position {before} that is not;"):
        datasets.load(path, context=3)


def test_a_character_across_two_chunks_is_still_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "CHUNK_BYTES", 16)
    path = tmp_path / "text.txt"
    path.write_text("a" * 15 + "é" * 20)
    assert len(datasets.load(path, context=4)) == 11


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "got an empty file"),
        ("empty.bin", b"", "got an empty file"),
        ("odd.bin", b"\x00\x01\x02", "whole uint16 tokens, got 3 bytes"),
        ("empty.jsonl", b"\n", "empty"),
        ("broken.jsonl", b'{"text": "a"}\n{"text"', "line 2: expected a JSON object"),
        ("latin.jsonl", b'{"text": "\xe9"}', "line 1: expected a JSON object in UTF-8"),
        ("surrogate.jsonl", rb'{"text": "\ud800"}', "line 1: expected text, got a lone surrogate"),
        ("list.jsonl", b"[1]", "line 1: expected a JSON object, got a list"),
        ("cut.txt", "é".encode()[:1], "expected UTF-8"),
        ("short.txt", b"ab", "at least one window of 5 bytes, got 2"),
        ("broken.npy", b"not an array", "cannot be read"),
    ],
)
def test_a_file_without_usable_text_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FdpError, match=message):
        datasets.load(path, context=4)


def test_an_empty_folder_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FdpError, match="empty"):
        datasets.load(tmp_path, context=4)
    with pytest.raises(FdpError, match=r"got 'stdlb'. Did you mean 'stdlib'\?"):
        datasets.load("stdlb", context=4)
    with pytest.raises(FdpError, match="context: expected at least 1"):
        datasets.load("stdlib", context=0)


def test_digits_are_the_same_disjoint_split_every_time() -> None:
    train, test = datasets.digits()
    again, _ = datasets.digits()
    assert (len(train), len(test)) == (1437, 360)
    assert torch.equal(train.image, again.image)
    rows = train.fetch(np.array([3, 1]))
    assert rows["image"].shape == (2, 1, 8, 8)
    assert rows["image"].dtype == torch.float32
    assert rows["label"].tolist() == [int(train.label[3]), int(train.label[1])]
    assert float(train.image.min()) == 0
    assert float(train.image.max()) == 1
    assert sorted(train.label.unique().tolist()) == list(range(10))


def test_images_and_text_are_not_confused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "abc"}))
    with pytest.raises(FdpError, match="expected a classifier"):
        datasets.load("digits", context=8)
    with pytest.raises(FdpError, match="expected a language model"):
        datasets.load("stdlib", context=None)
