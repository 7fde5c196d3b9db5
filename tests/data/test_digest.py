"""A digest of all the data: one value changed anywhere is noticed, however much there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fdp import keys
from fdp.data import corpus, datasets
from fdp.data.digest import FETCHED_BYTES, ArrayBacked, data_digest
from fdp.data.document_packing import PackUnit, pack
from fdp.data.documents import Documents, Records, records
from fdp.data.images import Examples
from fdp.data.users import Users, by_user
from fdp.data.windows import Windows, windows
from tests.data.test_document_packing import documents_of
from tests.data.test_text import write


class Rows:
    """A dataset that only fetches."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return {"x": self.x[torch.as_tensor(indices)]}


def make_windows(tokens: np.ndarray, context: int = 128) -> Windows:
    return windows(tokens, context=context, vocab_size=256, where="here")


@pytest.mark.parametrize("place", [0, 129 * 1001, 24_500_000, 48_999_875])
def test_one_changed_token_in_49_megabytes_is_noticed(place: int) -> None:
    tokens = np.zeros(49_000_000, dtype=np.uint8)
    before = data_digest(make_windows(tokens))
    tokens[place] = 7
    assert data_digest(make_windows(tokens)) != before


@given(size=st.integers(1, 40), place=st.integers(0, 39), change=st.integers(1, 255))
def test_every_value_of_a_dataset_that_only_fetches_counts(size: int, place: int, change: int) -> None:
    x = torch.arange(size * 3).reshape(size, 3)
    other = x.clone()
    other.view(-1)[place % (3 * size)] += change
    assert data_digest(Rows(x)) == data_digest(Rows(x.clone()))
    assert data_digest(Rows(x)) != data_digest(Rows(other))


def test_every_sample_of_many_is_fetched_once() -> None:
    seen: list[int] = []

    class Seen(Rows):
        def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
            seen.extend(indices.tolist())
            return super().fetch(indices)

    count = FETCHED_BYTES // 80 * 3 + 5
    data_digest(Seen(torch.zeros(count, 10, dtype=torch.int64)))
    assert seen == [0, *range(count)], "one for its size, then all"


def test_size_context_and_order_count_and_the_type_of_tokens_does_not() -> None:
    tokens = np.arange(120, dtype=np.uint8)
    same = [make_windows(tokens.astype(dtype), 3) for dtype in ("u1", "<u2", ">u2", "i4", "i8", ">i8")]
    assert len({data_digest(each) for each in same}) == 1
    other = [
        make_windows(tokens, 4),
        make_windows(tokens[::-1].copy(), 3),
        make_windows(tokens[:116], 3),
        make_windows(tokens + 130, 3),
    ]
    assert len({data_digest(each) for each in (same[0], *other)}) == 5
    assert data_digest(make_windows(tokens[:118], 3)) == data_digest(make_windows(tokens[:116], 3)), (
        "a tail is in no sample"
    )


def dataset_of(kind: str, documents: Documents) -> Records | Users:
    given: dict[str, Any] = {"context": 4, "vocab_size": 1000}
    if kind == "records":
        return records(documents._replace(owners=tuple(f"{i}" for i in range(len(documents.owners)))), **given)
    rows = pack(documents, context=4, unit=PackUnit.OWNER) if kind == "packed" else documents
    return by_user(rows, windows=2, key=keys.key(0), **given)


@pytest.mark.parametrize("kind", ["records", "users", "packed"])
def test_the_digest_of_documents_covers_everything_in_their_samples(kind: str) -> None:
    documents = documents_of([("ann", 3), ("bob", 2), ("ann", 5), ("cy", 1)])
    before = data_digest(dataset_of(kind, documents))
    assert data_digest(dataset_of(kind, documents)) == before
    changes: list[Callable[[Documents], Documents]] = [
        *(lambda d, i=i: d._replace(tokens=_changed(d.tokens, i, 999)) for i in range(len(documents.tokens))),
        *(lambda d, i=i: d._replace(counted=_changed(d.counted, i, False)) for i in range(len(documents.tokens))),
        lambda d: d._replace(starts=_changed(d.starts, 1, 2)),
    ]
    if kind != "records":
        changes.append(lambda d: d._replace(owners=("ann", "bob", "bob", "cy")))
    found = [data_digest(dataset_of(kind, change(documents))) for change in changes]
    assert len({before, *found}) == len(changes) + 1


def _changed(array: np.ndarray, place: int, value: Any) -> np.ndarray:
    other = array.copy()
    other[place] = value
    return other


def test_images_labels_and_loaded_data(tmp_path: Path) -> None:
    image, label = torch.rand(5, 1, 2, 2), torch.arange(5)
    other = image.clone()
    other[3, 0, 1, 1] += 1e-3
    sets = [Examples(image, label), Examples(other, label), Examples(image, label.flip(0))]
    assert len({data_digest(each) for each in sets}) == 3
    path = write(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "cd"})
    loaded = [corpus.load(path, context=3, vocab_size=256), datasets.load("stdlib", context=128)]
    assert all(isinstance(each, ArrayBacked) for each in (*sets, *loaded))
    halves = [torch.full((3, 2), value, dtype=torch.bfloat16) for value in (1.0, 2.0)]
    assert len({data_digest(Rows(half)) for half in halves}) == 2
