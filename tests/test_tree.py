from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdp import tree
from fdp.types import FdpError


class Point(NamedTuple):
    x: object
    y: object


names = st.text("abcxyz_", min_size=1, max_size=4)
trees = st.recursive(
    st.integers(),
    lambda child: (
        st.lists(child, min_size=1, max_size=3)
        | st.dictionaries(names, child, min_size=1, max_size=3)
        | st.tuples(child, child)
        | st.builds(Point, child, child)
    ),
    max_leaves=12,
)


def test_a_path_is_the_dotted_list_of_keys():
    params = {"embed": {"tokens": 1}, "blocks": [{"scale": 2}, {"scale": 3}], "at": Point(4, (5, 6))}
    assert tree.flatten(params) == {
        "at.x": 4,
        "at.y.0": 5,
        "at.y.1": 6,
        "blocks.0.scale": 2,
        "blocks.1.scale": 3,
        "embed.tokens": 1,
    }


@given(trees)
def test_unflatten_undoes_flatten(value):
    flat = tree.flatten(value)
    assert tree.unflatten(value, flat) == value
    assert tree.unflatten(value, dict(reversed(flat.items()))) == value


@given(trees)
def test_paths_and_leaves_are_in_one_order(value):
    assert dict(zip(tree.paths(value), tree.leaves(value))) == tree.flatten(value)
    assert len(tree.paths(value)) == len(tree.leaves(value))
    assert tree.refill(value, tree.leaves(value)) == value
    assert tree.same_paths(value, value)
    assert not tree.same_paths(value, value, {"another": value})


@given(trees)
def test_flatten_undoes_nest(value):
    flat = tree.flatten(value)
    if "" not in flat:
        assert tree.flatten(tree.nest(flat)) == flat


def test_the_order_of_insertion_does_not_matter():
    assert list(tree.flatten({"b": 1, "a": 2})) == list(tree.flatten({"a": 2, "b": 1})) == ["a", "b"]


def test_runs_of_numbers_become_lists_in_their_order():
    flat = {f"blocks.{i}": i for i in range(12)}
    assert tree.nest(flat) == {"blocks": list(range(12))}
    assert tree.nest({"a.1": 1, "a.2": 2}) == {"a": {"1": 1, "2": 2}}


def test_two_leaves_with_one_path_are_refused():
    with pytest.raises(FdpError, match=r"\['a\.b'\] twice"):
        tree.flatten({"a": {"b": 1}, "a.b": 2})


@pytest.mark.parametrize(
    ("flat", "message"),
    [({"a": 1}, r"missing \['b'\]"), ({"a": 1, "b": 2, "c": 3}, r"not in the tree \['c'\]")],
)
def test_unflatten_names_missing_and_unknown_leaves(flat, message):
    with pytest.raises(FdpError, match=message):
        tree.unflatten({"a": 0, "b": 0}, flat)


def test_map_and_select_go_leaf_by_leaf():
    assert tree.map(lambda a, b: a + b, {"x": [1, 2]}, {"x": [10, 20]}) == {"x": [11, 22]}
    assert tree.select({"p.q": 5, "r": 6}, {"here": "p.q", "twice": ["p.q", "r"]}) == {
        "here": 5,
        "twice": [5, 6],
    }


def test_size_and_norm():
    left = {"a": torch.full((2, 3), 2.0), "b": torch.tensor(5.0)}
    assert tree.size(left) == 7
    assert tree.global_norm(left).item() == 7.0
    assert tree.global_norm(left).dtype == torch.float64


def test_the_global_norm_of_a_large_leaf_is_added_up_in_float64():
    leaf = torch.full((3_000_000,), 0.1)
    assert tree.global_norm({"w": leaf}).item() == pytest.approx(leaf[0].item() * 3e6**0.5, rel=1e-12)


def test_squared_norms_go_leaf_by_leaf_and_are_finite_only_if_all_elements_are():
    found = tree.squared_norms({"b": torch.tensor([3.0, 4.0]), "a": torch.full((2,), 3e38), "c": torch.ones(0)})
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([1.8e77, 25.0, 0.0])
    for bad in (torch.inf, -torch.inf, torch.nan):
        found = tree.squared_norms({"a": torch.ones(2), "b": torch.tensor([1.0, bad] + [0.0] * 5000)})
        assert torch.isfinite(found).tolist() == [True, False]
