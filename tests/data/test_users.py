"""A sample is a user: up to a fixed number of windows, chosen by a rule that depends on no other user."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdp import keys, tree
from fdp.data import corpus
from fdp.data.document_packing import PackUnit
from fdp.data.documents import Documents, split_rows
from fdp.data.users import Users, by_user
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.privacy.clipping import clip_to
from fdp.privacy.guarantee import default_delta
from fdp.privacy.microbatches import Dataset
from fdp.privacy.sampling import poisson, sample_batch
from fdp.types import FdpError
from tests.conftest import random_like
from tests.data.test_chat import CONTEXT, MODELS, VOCAB
from tests.data.test_document_packing import documents_of
from tests.data.test_text import write

KEY = keys.key(0)
SPEC = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), min_size=1, max_size=20)


def grouped(documents: Documents, *, windows: int, context: int = 2, key: torch.Tensor = KEY) -> Users:
    rows = split_rows(documents, length=context + 1)
    return by_user(rows, context=context, vocab_size=1000, windows=windows, key=key)


def windows_of(dataset: Users, u: int) -> list[list[int]]:
    """A user's windows, token by token, padding left out."""
    return [dataset.documents.row(i).tolist() for i in dataset.rows[u] if i >= 0]


def test_size_delta_unit_and_content_are_per_user(tmp_path: Path) -> None:
    said = [("ann", "abcdefg"), ("bob", "xy"), ("ann", "hi"), ("cy", "z")]
    path = write(tmp_path / "mail.jsonl", *({"text": words, "by": name} for name, words in said))
    dataset = corpus.load(path, context=3, vocab_size=256, per_user=corpus.PerUser("by", windows=3, key=KEY))
    assert isinstance(dataset, Users)
    assert isinstance(dataset, Dataset)
    assert len(dataset) == 3
    assert default_delta(len(dataset)) == default_delta(3)
    assert dataset.unit.one == "one user, named by by (up to 3 windows of 4 bytes)"
    rows = dataset.fetch(np.array([0, 2]))
    assert rows["tokens"].tolist() == [
        [[*b"abcd"], [*b"efg", 0], [*b"hi", 0, 0]],
        [[*b"z", 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    ]
    assert rows["loss_mask"].int().tolist() == [[[1, 1, 1], [1, 1, 0], [1, 0, 0]], [[0] * 3] * 3]
    assert (dataset.reading.silent, dataset.reading.capped, dataset.reading.texts) == (1, 0, 4)
    batch = sample_batch(dataset, poisson(3, expected_batch_size=2), KEY, step=0, microbatch_size=2)
    assert batch.data["tokens"].shape[1:] == (2, 3, 4)
    with pytest.raises(FdpError, match="expected the 3 samples of the dataset"):
        sample_batch(dataset, poisson(4, expected_batch_size=2), KEY, step=0, microbatch_size=2)


@given(spec=SPEC, windows=st.integers(1, 4))
def test_a_sample_holds_one_users_windows_and_no_window_is_in_two(spec: list[tuple[str, int]], windows: int) -> None:
    documents = documents_of(spec)
    dataset = grouped(documents, windows=windows)
    owner_of = {t: owner for i, owner in enumerate(documents.owners) for t in documents.row(i).tolist()}
    users = list(dict.fromkeys(documents.owners))
    assert len(dataset) == len(users)
    seen: list[int] = []
    for u, user in enumerate(users):
        mine = [t for window in windows_of(dataset, u) for t in window]
        assert {owner_of[t] for t in mine} <= {user}
        assert mine == sorted(mine)  # in their order
        seen += mine
        assert len(windows_of(dataset, u)) == min(dataset.documents.owners.count(user), windows)
    assert len(seen) == len(set(seen))


@given(spec=SPEC, windows=st.integers(1, 3))
def test_a_users_sample_does_not_depend_on_others(spec: list[tuple[str, int]], windows: int) -> None:
    documents = documents_of(spec)
    users = list(dict.fromkeys(documents.owners))
    dataset = grouped(documents, windows=windows)
    for u, user in enumerate(users):
        lengths = [length for name, length in spec if name == user]
        alone = grouped(documents_of([(user, length) for length in lengths]), windows=windows)
        together, by_itself = (each.fetch(np.array([i])) for each, i in ((dataset, u), (alone, 0)))
        assert torch.equal(together["loss_mask"], by_itself["loss_mask"])
        first = {
            t: n for n, t in enumerate(t for i, o in enumerate(documents.owners) if o == user for t in documents.row(i))
        }
        mine = [[first[t] for t in window] for window in windows_of(dataset, u)]
        assert mine == windows_of(alone, 0)


def test_the_windows_kept_depend_on_key_and_user_only_and_can_be_any_subset() -> None:
    def kept(user: str, seed: int) -> tuple[int, ...]:
        dataset = grouped(documents_of([(user, 12)]), windows=2, key=keys.key(seed))
        return tuple(int(i) for i in dataset.rows[0])

    assert kept("ann", 1) == kept("ann", 1)
    assert {kept("ann", seed) for seed in range(80)} == {(i, j) for i in range(4) for j in range(i + 1, 4)}
    assert {kept(f"user {i}", 1) for i in range(80)} == {(i, j) for i in range(4) for j in range(i + 1, 4)}
    reading = grouped(documents_of([("ann", 12)]), windows=2).reading
    assert (reading.capped, reading.left_out) == (1, 2)


def test_packed_windows_hold_several_records_of_one_user(tmp_path: Path) -> None:
    said = [("ann", "abc"), ("bob", "xy"), ("ann", "de"), ("ann", "fgh")]
    path = write(tmp_path / "mail.jsonl", *({"prompt": words, "completion": "!", "by": name} for name, words in said))
    dataset = corpus.load(
        path, context=6, vocab_size=256, per_user=corpus.PerUser("by", windows=2, key=KEY), pack=PackUnit.OWNER
    )
    rows = dataset.fetch(np.array([0]))
    assert rows["tokens"].tolist() == [[[*b"abc!de!"], [*b"fgh!", 0, 0, 0]]]
    assert rows["segments"].tolist() == [[[1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 0, 0]]]
    assert rows["loss_mask"].int().tolist() == [[[0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0]]]


def test_a_user_has_at_least_one_window(tmp_path: Path) -> None:
    path = write(tmp_path / "mail.jsonl", {"text": "ab", "by": "ann"})
    with pytest.raises(FdpError, match="expected at least 1 for each user"):
        corpus.load(path, context=2, vocab_size=256, per_user=corpus.PerUser("by", windows=0, key=KEY))


def user_data(*, packed: bool = False) -> dict[str, torch.Tensor]:
    """Two users of three windows each; of the second user nothing counts in the last two."""
    draw = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, VOCAB, (2, 3, CONTEXT + 1), generator=draw)
    mask = torch.rand(2, 3, CONTEXT, generator=draw) < 0.7
    mask[1, 1:] = False
    data = {"tokens": tokens, "loss_mask": mask}
    return data | {"segments": torch.tensor([1, 1, 2, 2, 2]).expand(2, 3, CONTEXT)} if packed else data


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_users_loss_is_the_mean_over_the_tokens_of_its_windows(name: str, packed: bool) -> None:
    model, data = MODELS[name], user_data(packed=packed)
    params = random_like(model)
    alone = model.loss(params, {key: leaf.flatten(0, 1) for key, leaf in data.items()}).view(2, 3)
    counts = data["loss_mask"].sum(-1)
    expected = (alone * counts).sum(1) / counts.sum(1)
    torch.testing.assert_close(model.loss(params, data), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_attention_does_not_cross_windows_and_padding_windows_change_nothing(name: str) -> None:
    model, data = MODELS[name], user_data()
    params = random_like(model)
    other = data["tokens"].clone()
    other[1, 1:] = (other[1, 1:] + 1) % VOCAB
    assert torch.equal(model.loss(params, data), model.loss(params, data | {"tokens": other}))
    other[1, 0] = (other[1, 0] + 1) % VOCAB
    assert not torch.equal(model.loss(params, data), model.loss(params, data | {"tokens": other}))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", [Method.GHOST, Method.GHOST_BK, Method.AUTO, Method.MATERIALIZE])
def test_norms_and_sums_per_user_are_those_of_single_backwards(name: str, packed: bool, method: Method) -> None:
    check_against_single_backwards(name, packed, method, None)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_blocks_take_windows(name: str, packed: bool) -> None:
    check_against_single_backwards(name, packed, Method.AUTO, CompiledRunner(backend="aot_eager"))


def check_against_single_backwards(name: str, packed: bool, method: Method, blocks: CompiledRunner | None) -> None:
    model, data = MODELS[name], user_data(packed=packed)
    params = random_like(model)
    plan = make_plan(model, params, data, method=method, dtype=torch.float64)
    _, norms, stash = per_sample_norms(model, params, data, plan=plan, execution=Execution(runner=blocks or EAGER))
    clip = clip_to(norms, max_norm=0.1)
    total = clipped_sum(stash, clip).value
    flat = {path: leaf.clone().requires_grad_() for path, leaf in tree.flatten(params).items()}
    expected = {path: torch.zeros_like(leaf) for path, leaf in flat.items()}
    for u in range(2):
        (loss,) = model.loss(tree.unflatten(params, flat), {key: leaf[u : u + 1] for key, leaf in data.items()})
        for path, G in zip(flat, torch.autograd.grad(loss, list(flat.values()))):
            torch.testing.assert_close(norms.squared[path][u], G.square().sum(), rtol=1e-8, atol=1e-14)
            expected[path] += clip.factors[path][u] * G
    assert float(clip.smallest().max()) < 1
    for path, value in expected.items():
        torch.testing.assert_close(total[path], value, rtol=1e-8, atol=1e-12)
