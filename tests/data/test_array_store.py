"""Arrays that grow piece by piece: the same values in memory and in a file, which has no name and no other reader."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fdp.data import array_store, corpus, datasets, documents, text, windows
from fdp.data.array_store import ArrayWriter, join_arrays, narrowest_dtype
from fdp.data.digest import data_digest
from fdp.types import FdpError

RECORDS, BYTES_EACH = 40, 200_000


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let arrays of more than 64 KiB become files; return the folder in which they are."""
    monkeypatch.setattr(array_store, "IN_MEMORY_BYTES", 1 << 16)
    monkeypatch.setattr(array_store, "PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(documents, "CHUNK_TOKENS", 1 << 12)
    monkeypatch.setenv("FDP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "bool"])
@pytest.mark.parametrize("size", [0, 1, 1000, 100_001])
def test_an_array_holds_all_pieces_in_order(dtype: str, size: int, small_memory: Path) -> None:
    values = (np.arange(size) % 251).astype(dtype)
    found = join_arrays((values[i : i + 777] for i in range(0, size, 777)), np.dtype(dtype))
    assert found.dtype == np.dtype(dtype)
    assert np.array_equal(found, values)
    assert isinstance(found, np.memmap) == (values.nbytes > 1 << 16)


def test_a_large_array_leaves_no_file_that_anyone_could_open(small_memory: Path) -> None:
    found = join_arrays([np.ones(1 << 18, np.uint8)], np.dtype("u1"))
    assert isinstance(found, np.memmap)
    assert list(small_memory.iterdir()) == []
    assert small_memory.stat().st_mode & 0o077 == 0


def test_a_disk_without_room_is_an_error_that_names_the_remedy(
    small_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_memory.parent.joinpath("file").write_text("")
    monkeypatch.setenv("FDP_CACHE", str(small_memory.parent / "file"))
    with pytest.raises(FdpError, match="set FDP_CACHE to a folder on a larger disk"):
        join_arrays([np.ones(1 << 18, np.uint8)], np.dtype("u1"))


def test_numbers_that_a_type_cannot_hold_are_refused_and_not_wrapped_around() -> None:
    assert [narrowest_dtype(size).name for size in (256, 257, 65536, 65537)] == ["uint8", "uint16", "uint16", "uint32"]
    for wrong in (256, -1):
        with pytest.raises(FdpError, match="expected numbers from 0 to 255, got another"):
            ArrayWriter(np.dtype("u1")).append([1, wrong])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of 8 MB of records."""
    path = tmp_path_factory.mktemp("large") / "large.jsonl"
    lines = (json.dumps({"text": chr(97 + i % 26) * BYTES_EACH, "user": i % 7}) for i in range(RECORDS))
    path.write_text("\n".join(lines))
    return path


WAYS = {
    "windows": lambda path: datasets.load(path, context=99),
    "windows of tokens": lambda path: datasets.load(path, context=99, vocab_size=300, tokenizer=text.BYTES),
    "records": lambda path: corpus.load(path, context=99, vocab_size=256),
    "rows": lambda path: corpus.load(path, context=99_999, vocab_size=256, pack=corpus.PackUnit.ROW),
}


@pytest.mark.parametrize("way", WAYS)
def test_data_several_times_larger_than_memory_is_read_and_fetched_in_it(
    way: str, large: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = WAYS[way](large)
    monkeypatch.setattr(array_store, "IN_MEMORY_BYTES", 1 << 18)
    monkeypatch.setattr(array_store, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(documents, "CHUNK_TOKENS", 1 << 15)
    monkeypatch.setattr(datasets, "CHUNK_BYTES", 1 << 15)
    monkeypatch.setattr(windows, "CHUNK_TOKENS", 1 << 15)
    monkeypatch.setenv("FDP_CACHE", str(tmp_path))
    tracemalloc.start()
    dataset = WAYS[way](large)
    dataset.fetch(np.arange(3))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < RECORDS * BYTES_EACH, "the largest record, as a list of numbers, is a fifth of the data"
    assert data_digest(dataset) == data_digest(expected)
    assert os.listdir(tmp_path) == []
