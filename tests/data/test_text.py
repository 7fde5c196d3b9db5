"""Texts to tokens: any tokenizer of a local folder, one document per record or file, owners by a field."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fdp import keys
from fdp.data import corpus, datasets, text
from fdp.data.documents import Documents, join_documents, pad_rows, records, split_rows
from fdp.data.windows import Windows
from fdp.types import FdpError

TEXTS = ["one two three", "two two", "three one one two"]
WORDS = "user assistant hello how are you fine thanks bye"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_tokenizer(folder: Path, *, template: str | None = None) -> Path:
    """A small tokenizer of words, saved as transformers does."""
    raw = RawTokenizer(models.WordLevel(unk_token="[unk]"))  # type: ignore[call-arg]
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    special = ["[unk]", "[end]", "<user>", "<assistant>", "<end>"]
    raw.train_from_iterator([*TEXTS, WORDS], trainers.WordLevelTrainer(special_tokens=special))
    made = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[unk]", eos_token="[end]")
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path, *, user_field: str | None = None) -> Documents:
    return corpus.read(path, text.BYTES, user_field=user_field)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_tokenizer_is_loaded_from_a_local_folder(folder: Path) -> None:
    tokenizer = text.load_tokenizer(folder)
    one, two, three = tokenizer.encode("one two three")
    assert len({one, two, three}) == 3
    assert max(one, two, three) < tokenizer.vocab_size
    assert tokenizer.encode("two two") == [two, two]
    assert tokenizer.end == 1
    assert tokenizer.render is None


def test_token_windows_have_an_end_of_text_between_records(folder: Path, tmp_path: Path) -> None:
    tokenizer = text.load_tokenizer(folder)
    path = write(tmp_path / "notes.jsonl", *({"body": body} for body in TEXTS))
    dataset = datasets.load(path, context=2, field="body", vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
    assert isinstance(dataset, Windows)
    expected = [*tokenizer.encode(TEXTS[0]), 1, *tokenizer.encode(TEXTS[1]), 1, *tokenizer.encode(TEXTS[2])]
    assert dataset.tokens[:].tolist() == expected
    assert dataset.unit.one == "one window of 3 tokens"
    (tmp_path / "notes.txt").write_text(TEXTS[0])
    alone = datasets.load(tmp_path / "notes.txt", context=2, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
    assert alone.fetch(np.array([0]))["tokens"].tolist() == [tokenizer.encode(TEXTS[0])]
    with pytest.raises(FdpError, match="expected token ids from 0 to 2"):
        datasets.load(path, context=2, field="body", vocab_size=3, tokenizer=tokenizer)
    with pytest.raises(FdpError, match="expected text to go with a tokenizer"):
        datasets.load("stdlib", context=2, tokenizer=tokenizer)


def test_the_byte_tokenizer_gives_the_bytes_of_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "notes.jsonl", {"text": "oné"}, {"text": "two"})
    with_it, without = (datasets.load(path, context=2, tokenizer=chosen) for chosen in (text.BYTES, None))
    assert isinstance(with_it, Windows)
    assert isinstance(without, Windows)
    assert with_it.tokens[:].tolist() == without.tokens[:].tolist()
    assert with_it.unit.one == without.unit.one == "one window of 3 bytes"


def test_one_record_is_one_sample_padded_on_the_right_or_cut_at_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "notes.jsonl", {"text": "abcdefg"}, {"text": "xy"}, {"text": "z"})
    dataset = corpus.load(path, context=4, vocab_size=256)
    assert len(dataset) == 3
    rows = dataset.fetch(np.array([1, 0, 2]))
    assert rows["tokens"].tolist() == [[*b"xy", 0, 0, 0], [*b"abcde"], [*b"z", 0, 0, 0, 0]]
    assert rows["loss_mask"].int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert "segments" not in rows
    assert (dataset.reading.silent, dataset.reading.cut, dataset.reading.unlearned) == (1, 1, 0)
    assert dataset.unit.one == "one record (its first 5 bytes)"


def test_splitting_rows_loses_no_token_and_keeps_owners() -> None:
    documents = join_documents([([1, 2, 3, 4, 5], [True] * 5), ([], []), ([6], [True])], ["a", "b", "c"], source="here")
    pieces = split_rows(documents, length=2)
    assert [pieces.row(i).tolist() for i in range(len(pieces.owners))] == [[1, 2], [3, 4], [5], [], [6]]
    assert pieces.owners == ("a", "a", "a", "b", "c")
    with pytest.raises(FdpError, match=r"expected one row per unit of privacy, got 3 rows of one owner.*by_user"):
        records(pieces, context=2, vocab_size=9)
    assert pad_rows(documents, np.array([-1]), context=2)["tokens"].tolist() == [[0, 0, 0]]


def test_owners_are_records_or_the_users_they_name(tmp_path: Path) -> None:
    path = write(
        tmp_path / "notes.jsonl", {"text": "a", "by": "ann"}, {"text": "b", "by": 7}, {"text": "c", "by": "ann"}
    )
    assert len(set(read(path).owners)) == 3
    assert read(path, user_field="by").owners == ("ann", "7", "ann")


@pytest.mark.parametrize(
    "other", ["Jos\u0065\u0301", " JOS\u00e9", "Jos\u00e9\u200b", "\ufeffJose\u034f\u0301\ufe0f\0\n"]
)
def test_a_user_whose_name_is_written_in_several_ways_is_one_unit(tmp_path: Path, other: str) -> None:
    path = write(tmp_path / "notes.jsonl", {"text": "ab", "by": "Jos\u00e9"}, {"text": "b", "by": other})
    assert read(path, user_field="by").owners == ("jos\u00e9", "jos\u00e9")
    dataset = corpus.load(path, context=2, vocab_size=256, per_user=corpus.PerUser("by", windows=2, key=keys.key(0)))
    assert len(dataset) == 1


def test_users_that_differ_by_zeros_or_spaces_between_letters_are_two(tmp_path: Path) -> None:
    path = write(tmp_path / "notes.jsonl", *({"text": "a", "by": by} for by in ("ann", 7, "07", "a\tnn")))
    assert read(path, user_field="by").owners == ("ann", "7", "07", "a nn")


def test_a_record_with_a_field_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"text": "a", "by": "ann", "by": "bob"}\n')
    with pytest.raises(FdpError, match=r"line 1: expected a JSON object .* got one with a field twice"):
        read(path, user_field="by")


def test_a_link_to_a_file_is_not_a_second_unit(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("abc")
    (tmp_path / "a.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "c.txt").write_text("abc")
    assert [Path(owner).name for owner in read(tmp_path).owners] == ["a.txt", "c.txt"]


@pytest.mark.parametrize("by", [None, "", " ", "\u200b", True, 1.5, ["ann"]])
def test_a_record_without_a_known_user_is_refused(tmp_path: Path, by: object) -> None:
    path = write(tmp_path / "notes.jsonl", {"text": "a", "by": "ann"}, {"text": "b", "by": by})
    with pytest.raises(FdpError, match="line 2: expected a user's name or number in field 'by'"):
        read(path, user_field="by")


def test_unreadable_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FdpError, match="expected a folder that exists"):
        text.load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FdpError, match="expected a tokenizer in"):
        text.load_tokenizer(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(FdpError, match="expected UTF-8 text"):
        read(tmp_path / "a.txt")
    with pytest.raises(
        FdpError, match=r"expected .jsonl, .json, .csv or .parquet, whose records have field 'by', got a text"
    ):
        read(tmp_path / "a.txt", user_field="by")
    (tmp_path / "b.jsonl").write_text('{"text": "\\ud800"}\n')
    with pytest.raises(FdpError, match="line 1: expected text, got a lone surrogate"):
        read(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text("\n")
    with pytest.raises(FdpError, match="empty"):
        corpus.load(tmp_path / "c.jsonl", context=2, vocab_size=256)
    (tmp_path / "d.jsonl").write_text("[1]\n")
    with pytest.raises(FdpError, match="line 1: expected a JSON object, got a list"):
        corpus.load(tmp_path / "d.jsonl", context=2, vocab_size=256)
    path = write(tmp_path / "e.jsonl", {"text": "é"})
    with pytest.raises(FdpError, match="expected token ids from 0 to 127, got another in document 1"):
        corpus.load(path, context=2, vocab_size=128)
