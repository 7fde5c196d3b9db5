"""Private and public samples in one dataset: a private unit changes one sample, and no public one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdp import keys, tree
from fdp.data import corpus
from fdp.data.digest import data_digest
from fdp.data.document_packing import PackUnit
from fdp.data.held_out import split_held_out
from fdp.data.mixed import Mixed
from fdp.data.windows import windows
from fdp.privacy.microbatches import Dataset
from fdp.types import FdpError
from tests.data.test_text import write

BY = corpus.PerUser("by", windows=2, key=keys.key(0))
READERS: dict[str, dict[str, Any]] = {
    "record": {},
    "split": {"windows_per_record": 2},
    "user": {"per_user": BY},
    "packed": {"per_user": BY, "pack": PackUnit.OWNER},
}
NOTES = st.lists(st.tuples(st.sampled_from("abcd"), st.text("xyz", min_size=2, max_size=9)), min_size=1, max_size=6)


def samples(dataset: Dataset) -> list[str]:
    rows = tree.flatten(dataset.fetch(np.arange(len(dataset))))
    return [str({path: leaf[i].tolist() for path, leaf in rows.items()}) for i in range(len(dataset))]


def load(path: Path, notes: list[tuple[str, str]], unit: str) -> Dataset:
    write(path, *({"by": name, "text": words} for name, words in notes))
    return corpus.load(path, context=3, vocab_size=256, **READERS[unit])


@pytest.mark.parametrize("unit", READERS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    notes=NOTES, public=NOTES, one=st.tuples(st.just("e"), st.text("xyz", min_size=2, max_size=9)), at=st.integers(0, 6)
)
def test_a_private_unit_adds_one_sample_and_changes_no_other(
    unit: str, notes: list, public: list, one: tuple[str, str], at: int, tmp_path: Path
) -> None:
    given_public = load(tmp_path / "public.jsonl", public, unit)
    without = Mixed(load(tmp_path / "a.jsonl", notes, unit), given_public)
    with_it = Mixed(load(tmp_path / "b.jsonl", [*notes[:at], one, *notes[at:]], unit), given_public)
    before, after = Counter(samples(without)), Counter(samples(with_it))
    assert sum((after - before).values()) == 1
    assert not before - after
    assert len(with_it) == len(without) + 1
    assert samples(with_it)[-len(given_public) :] == samples(without)[-len(given_public) :] == samples(given_public)


def test_samples_are_fetched_in_the_order_asked_for(tmp_path: Path) -> None:
    one, other = (load(tmp_path / f"{i}.jsonl", [("a", f"{i}{j}") for j in range(4)], "record") for i in range(2))
    mixed = Mixed(one, other)
    order = np.array([5, 0, 7, 3, 3, 4])
    rows = mixed.fetch(order)["tokens"]
    assert ["".join(map(chr, row[:2])) for row in rows.tolist()] == ["11", "00", "13", "03", "03", "10"]
    assert mixed.fetch(np.array([], dtype=np.int64))["tokens"].shape == (0, 4)


def test_unit_counts_and_digest_tell_both_sides(tmp_path: Path) -> None:
    private, public = (
        load(tmp_path / "a.jsonl", [("a", "xyxyxy")], "record"),
        windows(np.arange(8), context=3, vocab_size=256, where="here"),
    )
    with pytest.raises(FdpError, match=r"public data: expected samples like the private ones, .* read both alike"):
        Mixed(private, public)
    public = load(tmp_path / "b.jsonl", [("b", "zz"), ("c", "zzz")], "record")
    mixed = Mixed(private, public)
    assert mixed.unit.one == "one record (its first 4 bytes) of the private data"
    assert mixed.unit.note.endswith("; the public data is not protected")
    assert mixed.reading is not None
    assert mixed.reading.line() == (
        "1 record, each a sample of up to 4 bytes; 1 record cut at 4 bytes; and public: 2 records, each a sample of up "
        "to 4 bytes"
    )
    assert mixed.reading.as_json()["public"]["samples"] == 2
    digests = {data_digest(each) for each in (mixed, Mixed(public, private), private, public)}
    assert len(digests) == 4


def test_only_private_units_are_held_out(tmp_path: Path) -> None:
    private = load(tmp_path / "a.jsonl", [("a", f"{i:03}") for i in range(40)], "record")
    public = load(tmp_path / "b.jsonl", [("b", f"{i:03}") for i in range(40)], "record")
    train, held_out = split_held_out(Mixed(private, public), 0.3)
    alone = split_held_out(private, 0.3)
    assert samples(held_out) == samples(alone[1])
    assert samples(train) == samples(alone[0]) + samples(public)
    assert data_digest(train) != data_digest(Mixed(private, public))


def test_a_public_record_without_a_user_is_its_own_owner(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    path = write(tmp_path / "a.jsonl", {"text": "abc"}, {"text": "def", "by": "ann"}, {"text": "ghi", "by": "ann"})
    with pytest.raises(FdpError, match="line 1: expected a user's name or number"):
        corpus.load(path, context=3, vocab_size=256, per_user=BY)
    loose = BY._replace(all_named=False)
    assert len(corpus.load(path, context=3, vocab_size=256, per_user=loose)) == 2
    assert len(corpus.load(tmp_path / "a.txt", context=3, vocab_size=256, per_user=loose)) == 1
