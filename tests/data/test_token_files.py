"""A folder of token files is the row that they would be in one file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from fdp.data import corpus, datasets
from fdp.data.digest import data_digest
from fdp.data.files import find_token_files
from fdp.data.held_out import split_held_out
from fdp.data.token_files import Shards, read_tokens
from fdp.data.windows import Windows
from fdp.types import FdpError
from tests.cli.train_runs import call

TOKENS = np.random.default_rng(0).integers(0, 256, 2003)


def write_shards(folder: Path, cuts: tuple[int, ...] = (300, 301, 1500)) -> Path:
    folder.mkdir()
    types = ("u1", "u2", "i8", "u4")
    for number, part in enumerate(np.split(TOKENS, cuts)):
        np.save(folder / f"{number:03}.npy", part.astype(types[number % 4]))
    return folder


def test_a_folder_of_shards_is_the_file_of_all_of_them(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", TOKENS)
    one = datasets.load(tmp_path / "one.npy", context=16)
    several = datasets.load(write_shards(tmp_path / "shards"), context=16)
    assert isinstance(several, Windows)
    assert isinstance(several.tokens, Shards)
    which = np.array([0, 17, 5, 116, 17])  # window 17 begins in one file and ends in another
    assert torch.equal(one.fetch(which)["tokens"], several.fetch(which)["tokens"])
    assert len(one) == len(several)
    assert one.reading == several.reading
    assert data_digest(one) == data_digest(several)
    held = [split_held_out(dataset, 0.2)[1] for dataset in (one, several)]
    assert data_digest(held[0]) == data_digest(held[1])


def test_slices_of_shards_are_those_of_the_row(tmp_path: Path) -> None:
    tokens = read_tokens(write_shards(tmp_path / "shards", (0, 300, 300, 1999)))
    assert len(tokens) == 2003
    for first, last in ((0, 0), (0, 300), (299, 302), (5, 2003), (2000, 5000), (300, 300)):
        assert np.array_equal(tokens[first:last], TOKENS[first:last])
    assert np.array_equal(tokens.first(1501)[1400:1600], TOKENS[1400:1501])  # pyright: ignore
    with pytest.raises(FdpError, match="without a stride"):
        tokens[::2]


def test_the_type_of_bin_files_is_named_beside_them(tmp_path: Path) -> None:
    TOKENS.astype("<u4").tofile(tmp_path / "a.bin")
    assert len(read_tokens(tmp_path / "a.bin")) == 2 * len(TOKENS), "uint16 by default"
    (tmp_path / "tokens.json").write_text(json.dumps({"dtype": "uint32"}))
    assert np.array_equal(read_tokens(tmp_path)[:], TOKENS)
    for wrong in ("{}", '{"dtype": "float32"}', "[", '"uint16"'):
        (tmp_path / "tokens.json").write_text(wrong)
        with pytest.raises(FdpError, match=r'tokens.json: expected \{"dtype": "uint16"\}, or another of uint8'):
            read_tokens(tmp_path)


def test_a_folder_with_anything_else_is_no_folder_of_tokens(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards")
    assert len(find_token_files(folder)) == 4
    assert find_token_files(tmp_path / "missing") == ()
    (folder / "notes.txt").write_text("text")
    assert find_token_files(folder) == ()
    with pytest.raises(FdpError, match=r"got 4 files of tokens \(000.*; give tokens a folder of their own, with"):
        datasets.load(folder, context=16)
    (folder / "notes.txt").unlink()
    with pytest.raises(FdpError, match="got 4 files of tokens"):
        corpus.load(folder, context=16, vocab_size=256)
    np.save(folder / "000.npy", np.ones((2, 2)))
    with pytest.raises(FdpError, match=r"000.npy: expected integers in one dimension, got float64"):
        datasets.load(folder, context=16)


def test_a_token_outside_the_vocabulary_is_named_by_its_position_in_the_row(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards")
    np.save(folder / "001.npy", np.array([256], dtype="u2"))
    with pytest.raises(FdpError, match="expected token ids from 0 to 255, got another at position 300"):
        datasets.load(folder, context=16)


def test_the_command_trains_on_a_folder_of_shards(tmp_path: Path) -> None:
    words = shlex.split("--model gpt-nano --context 16 --noise-multiplier 1 --batch-size 2 --microbatch 2 --steps 1")
    folder = write_shards(tmp_path / "shards")
    assert (
        call("train", *words, "--data", str(folder), "--out", str(tmp_path / "run"), "--ledger", "off", "--quiet") == 0
    )
