"""Whether a unit is held out depends on that unit alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdp import keys, tree
from fdp.data import corpus, datasets
from fdp.data.digest import data_digest
from fdp.data.document_packing import PackUnit
from fdp.data.documents import join_documents, records, split_rows
from fdp.data.held_out import split_held_out
from fdp.data.images import examples
from fdp.data.units import dataset_unit
from fdp.data.users import by_user
from fdp.data.windows import windows
from fdp.privacy.microbatches import Dataset
from fdp.types import FdpError
from tests.data.test_text import write

TEXTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=30)


def samples(dataset: Dataset) -> list[str]:
    """Return every sample as text, with all of its values."""
    rows = [tree.flatten(dataset.fetch(np.array([i]))) for i in range(len(dataset))]
    return [str({path: leaf.tolist() for path, leaf in row.items()}) for row in rows]


def sides(dataset: Dataset, fraction: float) -> tuple[list[str], list[str]]:
    """Return the samples on both sides, where a side without samples is no error."""
    try:
        train, held = split_held_out(dataset, fraction)
    except FdpError as error:
        everything = samples(dataset)
        return ([], everything) if "none trained on" in str(error) else (everything, [])
    return samples(train), samples(held)


def make_records(rows: list[list[int]], context: int = 3) -> Dataset:
    pieces = [(row, [True] * len(row)) for row in rows]
    documents = join_documents(pieces, [str(i) for i in range(len(rows))], source="here")
    return records(documents, context=context, vocab_size=10)


def make_windows(rows: list[list[int]]) -> Dataset:
    return windows(np.array([[*row, 0, 0, 0, 0, 0, 0][:4] for row in rows]).ravel(), context=3, **WINDOWS)


def make_images(rows: list[list[int]]) -> Dataset:
    image = torch.tensor([[*row, 0, 0, 0, 0, 0, 0][:4] for row in rows]).float()
    return examples(image, torch.tensor([row[0] for row in rows]), where="here")


def make_plain(rows: list[list[int]]) -> Dataset:
    found = make_images(rows)

    class Plain:
        def __len__(self) -> int:
            return len(rows)

        def fetch(self, indices: np.ndarray) -> Any:
            return {"x": found.fetch(indices)}

    return Plain()


WINDOWS: dict[str, Any] = {"vocab_size": 10, "where": "here"}
MAKERS = {"records": make_records, "windows": make_windows, "images": make_images, "plain": make_plain}


@pytest.mark.parametrize("kind", MAKERS)
@given(rows=TEXTS, more=TEXTS, fraction=st.floats(0.05, 0.95))
def test_whether_a_unit_is_held_out_depends_on_that_unit_alone(
    kind: str, rows: list[list[int]], more: list[list[int]], fraction: float
) -> None:
    """The sides of two datasets together are the two datasets' sides, one after the other."""
    make = MAKERS[kind]
    one, other, both = (sides(make(each), fraction) for each in (rows, more, rows + more))
    assert both == (one[0] + other[0], one[1] + other[1])


@given(rows=TEXTS, fraction=st.floats(0.05, 0.9))
def test_every_sample_is_on_one_side_and_equal_samples_on_the_same(rows: list[list[int]], fraction: float) -> None:
    dataset = make_records(rows)
    train, held = sides(dataset, fraction)
    assert sorted(train + held) == sorted(samples(dataset))
    assert not set(train) & set(held)
    assert set(held) <= set(sides(dataset, fraction + 0.05)[1]), "a larger fraction holds out the same and more"


@given(
    spec=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 9)), min_size=1, max_size=20),
    gone=st.sampled_from("abcdefgh"),
)
def test_a_user_is_held_out_by_name_whatever_the_user_wrote(spec: list[tuple[str, int]], gone: str) -> None:
    def held_users(names: list[tuple[str, int]]) -> set[str]:
        pieces = [(range(size), [True] * size) for _, size in names]
        documents = join_documents(pieces, [name for name, _ in names], source="here")
        rows = split_rows(documents, length=4)
        dataset = by_user(rows, context=3, vocab_size=10, windows=2, key=keys.key(0))
        users = list(dict.fromkeys(rows.owners))
        try:
            held = split_held_out(dataset, 0.5)[1]
        except FdpError as error:
            return set(users) if "none trained on" in str(error) else set()
        everything = [dataset.fetch(np.array([i])) for i in range(len(dataset))]
        assert len(held) <= len(everything)
        return {users[i] for i in held.indices}  # pyright: ignore[reportAttributeAccessIssue]

    rest = [(name, size) for name, size in spec if name != gone]
    assume(rest)
    assert held_users(spec) - {gone} == held_users(rest)
    assert held_users([(name, 10 - size) for name, size in spec]) == held_users(spec)


def test_the_sides_are_the_same_in_every_run_and_about_the_fraction() -> None:
    rows = [[i // 1000, i // 100 % 10, i // 10 % 10, i % 10] for i in range(10_000)]
    train, held = split_held_out(make_records(rows), 0.1)
    assert (len(train), len(held)) == (8990, 1010), "a fixed public hash; a changed number moves everyone's units"
    again = split_held_out(make_records([*rows, [1]], context=7), 0.1)
    assert abs(len(again[1]) - len(held)) <= 1, "the context is no part of a record that fits into it"


def test_sides_keep_the_unit_and_have_digests_of_their_own(tmp_path: Path) -> None:
    said = [{"text": f"note {i}", "by": f"user {i % 7}"} for i in range(40)]
    path = write(tmp_path / "a.jsonl", *said)
    by = corpus.PerUser("by", windows=2, key=keys.key(0))
    for dataset in (
        datasets.load(path, context=3),
        corpus.load(path, context=9, vocab_size=256),
        corpus.load(path, context=9, vocab_size=256, per_user=by),
        corpus.load(path, context=9, vocab_size=256, per_user=by, pack=PackUnit.OWNER),
    ):
        train, held = split_held_out(dataset, 0.4)
        assert len(train) + len(held) == len(dataset)
        assert dataset_unit(train) == dataset_unit(held) == dataset_unit(dataset)
        assert len({data_digest(train), data_digest(held), data_digest(dataset)}) == 3
        assert data_digest(split_held_out(dataset, 0.4)[0]) == data_digest(train)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, float("nan")])
def test_a_fraction_is_between_0_and_1(fraction: float) -> None:
    with pytest.raises(FdpError, match="fraction held out: expected a number between 0 and 1"):
        split_held_out(make_records([[1], [2]]), fraction)


def test_a_side_without_samples_is_refused() -> None:
    with pytest.raises(FdpError, match=r"expected samples on both sides, got none held out with a fraction of 0.001"):
        split_held_out(make_records([[1], [2]]), 0.001)
