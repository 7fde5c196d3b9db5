"""Leaves that are used several times: merged pairs, and norms and sums by kernels or in float64, never mixed."""

from __future__ import annotations

import pytest
import torch
from fdp_kernels.embedding import embedding_norms_reference

import fdp.gradients.launches
import fdp.gradients.rules
import fdp.gradients.shared_leaves
from fdp.gradients.launches import add_parts, part_size
from fdp.gradients.rules import MIN_FACTOR, Dense, OneHot, Pair, Record, rows
from fdp.gradients.sample_gradients import direct_squared_norm_of_uses, weighted_gradient_of_uses
from fdp.gradients.shared_leaves import (
    has_stored_head,
    merge_uses,
    squared_norm_by_kernels,
    weighted_parts_of_shared,
)
from tests.conftest import randn

SHAPE = (7, 5)
FACTORS = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)


def linear(tokens: int, seed: int) -> Pair:
    return Pair(rows(randn(3, tokens, 7, seed=seed)), rows(randn(3, tokens, 5, seed=seed + 1)), SHAPE)


def embedding(tokens: int, seed: int) -> Pair:
    ids = torch.randint(0, 7, (3, tokens), generator=torch.Generator().manual_seed(seed))
    return Pair(OneHot(ids), rows(randn(3, tokens, 5, seed=seed)), SHAPE)


USES: dict[str, list[Record]] = {
    "tied": [linear(4, 0), embedding(6, 3)],
    "embedding first": [embedding(6, 3), linear(4, 0)],
    "shared layer": [linear(4, 0), linear(9, 2)],
    "two embeddings": [embedding(4, 0), embedding(6, 3)],
    "stored head": [Dense(randn(3, 7, 5)), embedding(6, 3)],
    "stored head, two embeddings": [Dense(randn(3, 7, 5)), embedding(6, 3), embedding(2, 5)],
    "all": [linear(4, 0), embedding(6, 3), linear(2, 5), embedding(1, 7)],
}


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take any pair for one that the kernels take; on a CPU they are their references, in float64."""
    for module in (fdp.gradients.rules, fdp.gradients.launches, fdp.gradients.shared_leaves):
        monkeypatch.setattr(module, "has_kernels", lambda record: isinstance(record, Pair))
    for module in (fdp.gradients.rules, fdp.gradients.launches):
        monkeypatch.setattr(module, "kernel_factors", lambda factors: factors)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", USES)
def test_norm_and_sum_are_those_of_all_uses_together(name: str) -> None:
    records = USES[name]
    square = squared_norm_by_kernels(records)
    assert square is not None
    torch.testing.assert_close(square, direct_squared_norm_of_uses(records), rtol=1e-9, atol=0)
    total = add_parts(weighted_parts_of_shared(records, FACTORS))
    expected = weighted_gradient_of_uses(records, FACTORS)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)  # an embedding's sum is float32


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", USES)
def test_many_samples_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (fdp.gradients.rules, fdp.gradients.launches):
        monkeypatch.setattr(module, "SAMPLES_PER_FLOAT32_SUM", 2)
    parts = weighted_parts_of_shared(USES[name], FACTORS)
    assert len(parts) >= 2  # three samples, at most two at a time
    expected = weighted_gradient_of_uses(USES[name], FACTORS)
    torch.testing.assert_close(add_parts(parts), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_kernels")
def test_an_embedding_is_added_to_the_parts_of_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fdp.gradients.rules, fdp.gradients.launches):
        monkeypatch.setattr(module, "SAMPLES_PER_FLOAT32_SUM", 1)
    parts = weighted_parts_of_shared(USES["tied"], FACTORS)
    assert len(parts) == len(FACTORS)  # no more than for the head alone
    for part, one in zip(parts, torch.eye(len(FACTORS), dtype=torch.float64)):  # no part has more than one sample
        torch.testing.assert_close(part, weighted_gradient_of_uses(USES["tied"], FACTORS * one), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("samples", [1, 5, 6, 8])
def test_a_part_has_the_same_samples_of_head_and_embedding(
    monkeypatch: pytest.MonkeyPatch, samples: int, stored: bool
) -> None:
    """Five samples in parts of at most four have no equal parts, and are split into four and one."""
    for module in (fdp.gradients.rules, fdp.gradients.launches):
        monkeypatch.setattr(module, "SAMPLES_PER_FLOAT32_SUM", 4)
    left, ids = randn(samples, 4, 7), torch.arange(6 * samples).view(samples, 6) % 7
    records: list[Record] = [
        Dense(randn(samples, 7, 5)) if stored else Pair(rows(left), rows(randn(samples, 4, 5)), SHAPE),
        Pair(OneHot(ids), rows(randn(samples, 6, 5, seed=3)), SHAPE),
    ]
    factors = torch.linspace(0.5, 1, samples, dtype=torch.float64)
    parts = weighted_parts_of_shared(records, factors)
    size = part_size(samples, len(parts))
    assert size <= 4
    for k, part in enumerate(parts):
        mine = torch.zeros_like(factors)
        mine[k * size : (k + 1) * size] = factors[k * size : (k + 1) * size]
        torch.testing.assert_close(part.double(), weighted_gradient_of_uses(records, mine), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("stored", [False, True])
def test_a_factor_that_is_too_small_for_the_head_is_0_for_its_embedding(stored: bool) -> None:
    tiny = torch.tensor([0.5, 2.0**-101, 1.0], dtype=torch.float64)
    head, rows_of = Dense(randn(3, 7, 5)), embedding(6, 3)
    for side in (head.gradient, rows_of.right):
        side[1] *= 2.0**120
    huge = [head if stored else linear(4, 0), rows_of]
    without = torch.where(tiny < MIN_FACTOR, 0.0, tiny)
    found = add_parts(weighted_parts_of_shared(huge, without))
    assert torch.equal(add_parts(weighted_parts_of_shared(huge, tiny)) - found, torch.zeros(SHAPE).double())


@pytest.mark.usefixtures("_kernels")
def test_a_missing_cross_term_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [squared_norm_by_kernels([record]) for record in USES["tied"]]
    apart = torch.stack([part for part in parts if part is not None]).sum(0)
    monkeypatch.setattr(fdp.gradients.shared_leaves, "tied_norms", lambda *_: apart)
    with pytest.raises(AssertionError):
        test_norm_and_sum_are_those_of_all_uses_together("tied")


@pytest.mark.usefixtures("_kernels")
def test_a_missing_cross_term_with_a_stored_head_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fdp.gradients.shared_leaves,
        "stored_tied_norms",
        lambda H, squares, ids, e: squares + embedding_norms_reference(ids, e),
    )
    with pytest.raises(AssertionError):
        test_norm_and_sum_are_those_of_all_uses_together("stored head")


@pytest.mark.usefixtures("_kernels")
def test_only_embeddings_of_the_same_dtype_and_shape_stay_beside_a_stored_head() -> None:
    head, own = Dense(randn(3, 7, 5)), embedding(6, 3)
    assert has_stored_head([head, own])
    assert has_stored_head([own, head])
    wide = own._replace(right=own.right.float())
    for others in ([head], [own], [head, linear(4, 0)], [head, head, own], [head, own, linear(4, 0)], [head, wide]):
        assert not has_stored_head(others)
    assert not has_stored_head([head, own._replace(shape=(35,))])


@pytest.mark.usefixtures("_kernels")
def test_at_most_two_pairs_are_left() -> None:
    merged = merge_uses(USES["all"])
    assert merged is not None
    assert isinstance(merged.linear, Pair)
    assert merged.embedding is not None
    assert merged.linear.right.shape == (3, 1, 6, 5)
    assert merged.embedding.right.shape == (3, 1, 7, 5)


@pytest.mark.usefixtures("_kernels")
def test_dense_records_groups_and_mixed_dtypes_stay_in_float64() -> None:
    one = linear(4, 0)
    grouped = Pair(randn(3, 2, 4, 7), randn(3, 2, 4, 5), (14, 5))
    wide = Pair(one.left, one.right.float(), SHAPE)
    for others in ([one, Dense(randn(3, 7, 5))], [grouped, grouped], [one, wide]):
        assert merge_uses(others) is None
        assert squared_norm_by_kernels(others) is None
    records: list[Record] = [one, Dense(randn(3, 7, 5))]
    (total,) = weighted_parts_of_shared(records, FACTORS)
    assert torch.equal(total, weighted_gradient_of_uses(records, FACTORS))


def test_without_kernels_everything_stays_in_float64() -> None:
    assert squared_norm_by_kernels(USES["tied"]) is None
