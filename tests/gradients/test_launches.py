"""Records that share a launch have the same results as alone, in the same order, with their own factors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fdp.gradients.launches
import fdp.gradients.rules
from fdp.gradients.costs import SQUARED_NORMS, NormBy
from fdp.gradients.launches import (
    add_parts,
    direct_squared_norms,
    store_gradients,
    symmetric_squared_norms,
    weighted_parts,
)
from fdp.gradients.rules import (
    Dense,
    OneHot,
    Pair,
    Record,
    direct_squared_norm,
    store_gradient,
    symmetric_squared_norm,
    weighted_gradient,
)

HALF = torch.bfloat16


def pair(batch: int, tokens: int, p: int, d: int, groups: int = 1, dtype: torch.dtype = HALF) -> Pair:
    draw = torch.Generator().manual_seed(batch + tokens + p + d)
    left, right = (torch.randn(batch, groups, tokens, n, generator=draw).to(dtype) for n in (p, d))
    return Pair(left, right, (groups * p, d))


def records(batch: int = 3) -> list[Record]:
    """Pairs alike and not, among others that no launch can share."""
    ids = OneHot(torch.arange(5 * batch).reshape(batch, 5) % 7)
    return [
        pair(batch, 5, 4, 6),
        Dense(torch.randn(batch, 4, generator=torch.Generator().manual_seed(0))),
        pair(batch, 9, 4, 6),
        pair(batch, 5, 8, 2),
        Pair(ids, pair(batch, 5, 1, 6).right, (7, 6)),
        pair(batch, 5, 4, 6, groups=2),
        pair(batch, 5, 3, 3, dtype=torch.float32),
        pair(batch, 5, 2, 8),
    ]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """As on a GPU; what was launched, and with how many pairs."""
    found: list[tuple[str, int]] = []

    def counting(name: str):
        real = getattr(fdp.gradients.launches, name)
        return lambda gs, *more: (found.append((name, len(gs))), real(gs, *more))[1]

    for module in (fdp.gradients.rules, fdp.gradients.launches):
        monkeypatch.setattr(module, "has_kernels", lambda r: isinstance(r, Pair) and r.right.dtype == HALF)
    for name in ("foreach_direct", "foreach_keep", "foreach_ghost", "foreach_weighted_parts"):
        monkeypatch.setattr(fdp.gradients.launches, name, counting(name))
    return found


def weighted_gradients(records: list, factors: list[Tensor]) -> list[Tensor]:
    return [add_parts(parts) for parts in weighted_parts(records, factors)]


def assert_same(got: Tensor, alone: Tensor) -> None:
    torch.testing.assert_close(got, alone, rtol=0, atol=0)


def test_stored_gradients_equal_those_of_each_record_alone(launches: list[tuple[str, int]]) -> None:
    for got, record in zip(store_gradients(records()), records(), strict=True):
        alone = store_gradient(record)
        assert_same(got.gradient, alone.gradient)
        assert (got.squares is None) == (alone.squares is None)
        if got.squares is not None and alone.squares is not None:
            assert_same(got.squares.sum(1), alone.squares.sum(1))
    assert sorted(launches) == [("foreach_keep", 1), ("foreach_keep", 3)]


def test_norms_equal_those_of_each_record_alone(launches: list[tuple[str, int]]) -> None:
    pairs = [record for record in records() if isinstance(record, Pair)]
    for got, record in zip(symmetric_squared_norms(pairs), pairs, strict=True):
        assert_same(got, symmetric_squared_norm(record))
    for got, record in zip(direct_squared_norms(pairs), pairs, strict=True):
        assert_same(got, direct_squared_norm(record))
    assert sorted(launches) == [
        ("foreach_direct", 1),
        ("foreach_direct", 3),
        ("foreach_ghost", 1),
        ("foreach_ghost", 3),
    ]


def test_each_option_for_norms_uses_its_own_kernel(launches: list[tuple[str, int]]) -> None:
    for by, name in ((NormBy.DIRECT, "foreach_direct"), (NormBy.SYMMETRIC, "foreach_ghost")):
        SQUARED_NORMS[by]([pair(3, 5, 4, 6)])
        assert launches.pop() == (name, 1)
    SQUARED_NORMS[NormBy.GRAM]([pair(3, 5, 4, 6)])
    assert not launches


def test_sums_equal_those_of_each_record_alone_with_its_factors(launches: list[tuple[str, int]]) -> None:
    factors = [(torch.rand(3, generator=torch.Generator().manual_seed(i)) + i).double() for i in range(8)]
    factors[3][1] = 0.0
    left = records()[3].left  # type: ignore[union-attr]
    assert isinstance(left, Tensor)
    poisoned = records()
    poisoned[3] = Pair(left.index_fill(0, torch.tensor([1]), torch.nan), poisoned[3].right, poisoned[3].shape)  # type: ignore
    for got, record, f in zip(weighted_gradients(poisoned, factors), records(), factors, strict=True):
        torch.testing.assert_close(got.double(), weighted_gradient(record, f).double(), rtol=1e-6, atol=1e-6)
    assert sorted(launches) == [("foreach_weighted_parts", 1), ("foreach_weighted_parts", 3)]


def test_more_samples_than_one_float32_sum_takes_are_split(launches: list[tuple[str, int]]) -> None:
    many = [pair(65, 2, 3, 4), pair(65, 2, 4, 3)]
    factors = [torch.ones(65, dtype=torch.float64)] * 2
    for got, record in zip(weighted_gradients(many, factors), many):
        assert_same(got, weighted_gradient(record, factors[0]))
        assert got.dtype == torch.float64
    assert not launches


def test_parts_of_equal_size_share_a_launch_and_are_added_in_float64(launches: list[tuple[str, int]]) -> None:
    many = [pair(128, 2, 3, 4), pair(128, 2, 4, 3)]
    factors = [torch.linspace(0, 1, 128, dtype=torch.float64), torch.ones(128, dtype=torch.float64)]
    for got, record, factor in zip(weighted_gradients(many, factors), many, factors):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, weighted_gradient(record, factor), rtol=1e-12, atol=1e-12)
    assert launches == [("foreach_weighted_parts", 2)]
    for parts, record, factor in zip(weighted_parts(many, factors), many, factors):
        assert parts.shape == (2, *record.shape)
        torch.testing.assert_close(parts.double().sum(0), weighted_gradient(record, factor), rtol=1e-6, atol=1e-6)


def test_without_kernels_no_launch_is_shared() -> None:
    found = weighted_gradients(records(), [torch.ones(3, dtype=torch.float64)] * 8)
    for got, record in zip(found, records(), strict=True):
        assert_same(got, weighted_gradient(record, torch.ones(3)))
        assert got.dtype == torch.float64
    assert store_gradients([]) == []


@pytest.mark.parametrize("batch", [1, 3, 16, 130])
def test_small_gradients_are_summed_together_on_a_cpu(monkeypatch, batch: int) -> None:
    draw = torch.Generator().manual_seed(batch)
    shapes = [(64,), (3, 64), (65,), (1,), (128,), (2, 512), (16, 128), (8, 8)]
    wide = [Dense(torch.randn(batch, *shape, generator=draw)) for shape in shapes]
    several: list[Record] = [*wide, Dense(wide[0].gradient.double()), Dense(wide[1].gradient.to(HALF))]
    flat, other = torch.rand(2, batch, generator=draw, dtype=torch.float64).unbind()
    flat[-1] = 0.0
    for record in several:
        record.gradient[-1] = torch.nan  # type: ignore[union-attr]
    factors = [flat] * len(several)
    factors[4] = other
    sizes: list[int] = []
    real = fdp.gradients.launches.weighted_gradient
    monkeypatch.setattr(
        fdp.gradients.launches, "weighted_gradient", lambda r, f: (sizes.append(r.gradient[0].numel()), real(r, f))[1]
    )
    for got, record, f in zip(weighted_gradients(several, factors), several, factors, strict=True):
        torch.testing.assert_close(got, real(record, f), rtol=1e-14, atol=1e-14, equal_nan=True)
    assert sorted(sizes) == [1, 64, 65, 128, 192, 64 + 192 + 1024 + 64, 2048]
