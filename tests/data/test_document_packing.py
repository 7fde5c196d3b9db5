"""Rows of several documents of one owner: nothing is lost, nothing of one document reaches another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdp import keys, ops
from fdp.data import corpus
from fdp.data.document_packing import PackUnit, pack
from fdp.data.documents import Documents, join_documents, pad_rows, records
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.types import FdpError
from tests.conftest import randn, random_like
from tests.data.test_chat import CONTEXT, MODELS, VOCAB
from tests.data.test_text import write

DOCUMENTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=20)


def documents_of(spec: list[tuple[str, int]]) -> Documents:
    """Documents whose tokens are all different, by owner and length."""
    starts = np.cumsum([0, *(length for _, length in spec)])
    numbers = [list(range(starts[i], starts[i + 1])) for i in range(len(spec))]
    owners = [owner for owner, _ in spec]
    return join_documents(((tokens, [True] * len(tokens)) for tokens in numbers), owners, source="here")


@given(spec=DOCUMENTS, context=st.integers(1, 6))
def test_every_token_is_in_one_row_of_its_own_owner(spec: list[tuple[str, int]], context: int) -> None:
    documents = documents_of(spec)
    owner_of = {t: owner for i, owner in enumerate(documents.owners) for t in documents.row(i).tolist()}
    packed = pack(documents, context=context, unit=PackUnit.OWNER)
    seen: list[int] = []
    for i, owner in enumerate(packed.owners):
        row = packed.row(i).tolist()
        assert len(row) <= context + 1
        assert {owner_of[t] for t in row} <= {owner}
        seen += row
    assert sorted(seen) == sorted(owner_of)
    assert set(packed.owners) == set(documents.owners)


@given(spec=DOCUMENTS, context=st.integers(1, 6))
def test_an_owners_rows_depend_on_nothing_of_others(spec: list[tuple[str, int]], context: int) -> None:
    def rows_of(documents: Documents, owner: str) -> list[int]:
        packed = pack(documents, context=context, unit=PackUnit.OWNER)
        assert packed.segments is not None
        mine = [i for i, name in enumerate(packed.owners) if name == owner]
        return [len(packed.row(i)) for i in mine]

    owner = spec[0][0]
    alone = [entry for entry in spec if entry[0] == owner]
    assert rows_of(documents_of(spec), owner) == rows_of(documents_of(alone), owner)


@given(spec=DOCUMENTS, context=st.integers(1, 6))
def test_a_target_counts_only_within_its_document(spec: list[tuple[str, int]], context: int) -> None:
    packed = pack(documents_of(spec), context=context, unit=PackUnit.ROW)
    rows = pad_rows(packed, np.arange(len(packed.owners)), context=context)
    tokens, mask, segments = (rows[name] for name in ("tokens", "loss_mask", "segments"))
    assert tokens.shape == (len(packed.owners), context + 1)
    assert bool((tokens[:, 1:] == tokens[:, :-1] + 1)[mask].all())  # consecutive tokens are of one document
    assert bool((segments[mask] > 0).all())
    pieces = [
        size for _, length in spec for size in [context + 1] * (length // (context + 1)) + [length % (context + 1)]
    ]
    assert int(mask.sum()) == sum(max(0, size - 1) for size in pieces)


def test_segments_are_numbered_from_one_and_padding_is_zero() -> None:
    packed = pack(documents_of([("a", 3), ("b", 2), ("a", 2), ("a", 3)]), context=5, unit=PackUnit.OWNER)
    assert packed.owners == ("a", "a", "b")
    rows = pad_rows(packed, np.array([0, 1, 2]), context=5)
    assert rows["tokens"].tolist() == [[0, 1, 2, 5, 6, 0], [7, 8, 9, 0, 0, 0], [3, 4, 0, 0, 0, 0]]
    assert rows["segments"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert rows["loss_mask"].int().tolist() == [[1, 1, 0, 1, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]


def test_an_owner_with_several_rows_is_refused_unless_packed_by_row(tmp_path: Path) -> None:
    documents = documents_of([("a", 4), ("b", 2), ("a", 4)])
    with pytest.raises(FdpError, match=r"expected one row per unit of privacy, got 2 rows of one owner"):
        records(pack(documents, context=4, unit=PackUnit.OWNER), context=4, vocab_size=99)
    assert len(records(pack(documents, context=6, unit=PackUnit.ROW), context=6, vocab_size=99)) == 2
    with pytest.raises(FdpError, match="already packed"):
        pack(pack(documents, context=4, unit=PackUnit.OWNER), context=4, unit=PackUnit.OWNER)
    path = write(tmp_path / "a.jsonl", {"text": "abc", "by": "x"}, {"text": "de", "by": "y"})
    rows = corpus.load(path, context=7, vocab_size=256, pack=PackUnit.ROW)
    assert len(rows) == 1
    assert rows.unit.one == "one packed row of anyone's records (up to 8 bytes)"
    with pytest.raises(FdpError, match="expected a user field, whose records share rows"):
        corpus.load(path, context=7, vocab_size=256, pack=PackUnit.OWNER)
    with pytest.raises(FdpError, match="would be the unit, and not the user"):
        corpus.load(
            path,
            context=7,
            vocab_size=256,
            pack=PackUnit.ROW,
            per_user=corpus.PerUser("by", windows=1, key=keys.key(0)),
        )


@pytest.mark.parametrize("causal", [True, False])
def test_attention_stays_within_a_segment(causal: bool) -> None:
    q, k, v = randn(2, 4, 6, 3), randn(2, 2, 6, 3, seed=2), randn(2, 2, 6, 3, seed=3)
    segments = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 3, 3]])
    found = ops.attention(q, k, v, causal=causal, segments=segments)
    for b in range(2):
        for number in segments[b].unique():
            mine = (segments[b] == number).nonzero().flatten()
            alone = ops.attention(*(x[b : b + 1][:, :, mine] for x in (q, k, v)), causal=causal)
            torch.testing.assert_close(found[b : b + 1][:, :, mine], alone, rtol=1e-10, atol=1e-12)


def packed_row() -> dict[str, torch.Tensor]:
    """Documents of 2 and 3 tokens in a row of 6, and one of 4 in another."""
    draw = np.random.default_rng(0)
    pieces = [(draw.integers(0, VOCAB, length).tolist(), [True] * length) for length in (2, 3, 4)]
    documents = join_documents(pieces, ["a", "a", "b"], source="here")
    rows = pad_rows(pack(documents, context=CONTEXT, unit=PackUnit.OWNER), np.arange(2), context=CONTEXT)
    assert rows["segments"].tolist() == [[1, 1, 2, 2, 2], [1, 1, 1, 1, 0]]
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_documents_in_a_packed_row_have_the_losses_they_have_alone(name: str) -> None:
    model, rows = MODELS[name], packed_row()
    params = random_like(model)
    first, second = rows["tokens"][0, :2], rows["tokens"][0, 2:5]
    total = 0.0
    for document in (first, second):
        tokens = torch.zeros(1, CONTEXT + 1, dtype=torch.int64)
        tokens[0, : len(document)] = document
        mask = torch.arange(CONTEXT)[None] < len(document) - 1
        total = total + model.loss(params, {"tokens": tokens, "loss_mask": mask})[0] * (len(document) - 1)
    torch.testing.assert_close(model.loss(params, rows)[0], total / 3, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("changed", [0, 1])
def test_changing_one_segments_tokens_does_not_change_anothers_losses(name: str, changed: int) -> None:
    model, rows = MODELS[name], packed_row()
    params = random_like(model)
    rows = {key: leaf[:1] for key, leaf in rows.items()}
    spans = (slice(0, 2), slice(2, 5))
    other = rows["tokens"].clone()
    other[0, spans[changed]] = (other[0, spans[changed]] + 1) % VOCAB
    kept = torch.zeros_like(rows["loss_mask"])
    kept[0, spans[1 - changed]] = rows["loss_mask"][0, spans[1 - changed]]
    losses = [model.loss(params, rows | {"tokens": tokens, "loss_mask": kept}) for tokens in (rows["tokens"], other)]
    assert torch.equal(*losses)
    assert float(losses[0]) > 0
    together = {key: leaf for key, leaf in rows.items() if key != "segments"} | {"loss_mask": kept}
    seen = [model.loss(params, together | {"tokens": tokens}) for tokens in (rows["tokens"], other)]
    assert torch.equal(*seen) == (changed == 1)  # without segments the second would see the first


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", [Method.GHOST, Method.GHOST_BK, Method.AUTO, Method.FLASH, Method.FLASH_BK])
def test_norms_of_packed_rows_are_those_of_vmap(name: str, method: Method) -> None:
    model, rows = MODELS[name], packed_row()
    params = random_like(model)
    found, truth = (
        per_sample_norms(model, params, rows, plan=make_plan(model, params, rows, method=way, dtype=torch.float64))[1]
        for way in (method, Method.MATERIALIZE)
    )
    torch.testing.assert_close(found.squared, truth.squared, rtol=1e-8, atol=1e-14)
