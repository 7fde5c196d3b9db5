"""Samples that occur more than once are counted while the data is read, which it is once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fdp import keys
from fdp.data import repeated
from fdp.data.digest import FETCHED_BYTES, data_digest
from fdp.data.documents import Documents, join_documents, records
from fdp.data.held_out import Subset
from fdp.data.images import Examples
from fdp.data.mixed import Mixed
from fdp.data.repeated import NO_REPEATS, Repeats, digest_and_repeats
from fdp.data.units import UnitKind
from fdp.data.users import by_record, by_user
from fdp.run.own_samples import TensorSamples
from tests.data.test_digest import Rows, make_windows

DISTINCT = torch.arange(12, dtype=torch.float32).reshape(6, 2)


def documents_of(*texts: list[int]) -> Documents:
    owners = [str(i) for i in range(len(texts))]
    return join_documents(((text, [True] * len(text)) for text in texts), owners, source="here")


def copies(*rows: int) -> Tensor:
    return DISTINCT[list(rows)]


def tensors(x: Tensor) -> Any:
    return TensorSamples({"x": x})


def mixed(x: Tensor) -> Any:
    return Mixed(tensors(x), tensors(torch.zeros(9, 2)))


@pytest.mark.parametrize("of", [Rows, tensors, mixed])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [((0, 1, 2), NO_REPEATS), ((0, 1, 0), Repeats(2, 2)), ((3, 0, 3, 1, 3, 0), Repeats(5, 3)), ((4, 4), Repeats(2, 2))],
)
def test_equal_samples_are_counted(of: Any, rows: tuple[int, ...], expected: Repeats) -> None:
    dataset = of(copies(*rows))
    assert digest_and_repeats(dataset) == (data_digest(dataset), expected)


def test_samples_are_equal_in_all_their_leaves() -> None:
    images = copies(0, 0, 1).reshape(3, 1, 1, 2)
    assert digest_and_repeats(Examples(images, torch.tensor([0, 1, 1])))[1] == NO_REPEATS
    assert digest_and_repeats(Examples(images, torch.tensor([1, 1, 1])))[1] == Repeats(2, 2)


def test_a_record_that_is_copied_is_counted_and_one_that_begins_alike_is_not() -> None:
    of = records(documents_of([3, 1], [3, 1, 4], [3, 1], [5]), context=4, vocab_size=9)
    assert digest_and_repeats(of)[1] == Repeats(2, 2)


def test_users_with_the_same_note_are_not_counted_and_records_of_several_windows_are() -> None:
    documents = documents_of([3, 1], [3, 1], [5])
    users = by_user(documents, context=4, vocab_size=9, windows=2, key=keys.key(0))
    for of in (users, Subset(users, np.arange(2))):
        assert digest_and_repeats(of) == (data_digest(of), NO_REPEATS)
    long = by_record(documents, context=4, vocab_size=9, windows=2, kind=UnitKind.RECORD)
    assert digest_and_repeats(long)[1] == Repeats(2, 2)


def test_data_that_is_fetched_is_read_once() -> None:
    class Counted(Rows):
        def __init__(self, x: Tensor) -> None:
            super().__init__(x)
            self.fetched: list[int] = []

        def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
            self.fetched += indices.tolist()
            return super().fetch(indices)

    dataset = Counted(torch.zeros(3, FETCHED_BYTES // 4))
    assert digest_and_repeats(dataset)[1] == Repeats(3, 3)
    assert dataset.fetched == [0, 0, 1, 2]  # the first one tells how large a sample is


def test_windows_mapped_files_and_very_many_samples_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_fetch(*_: Any) -> None:
        raise AssertionError("fetched")

    stream = make_windows(np.zeros(129 * 40, dtype=np.uint8))
    for of in (stream, Subset(stream, np.arange(30))):
        assert digest_and_repeats(of)[1] == NO_REPEATS
    documents = documents_of([3, 1], [3, 1])
    mapped = np.memmap(tmp_path / "tokens", dtype=documents.tokens.dtype, mode="w+", shape=documents.tokens.shape)
    mapped[:] = documents.tokens
    large = records(documents._replace(tokens=mapped), context=4, vocab_size=9)
    monkeypatch.setattr(type(large), "fetch", no_fetch)
    assert digest_and_repeats(large) == (data_digest(large), NO_REPEATS)
    monkeypatch.setattr(repeated, "MOST_COUNTED", 1)
    for of in (Rows, tensors):
        assert digest_and_repeats(of(copies(0, 0)))[1] == NO_REPEATS
