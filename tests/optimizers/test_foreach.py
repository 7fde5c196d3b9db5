"""Groups of leaves: every leaf is computed as by itself, whichever leaves share a call."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from fdp import optimizers as fo
from fdp import tree
from fdp.optimizers import foreach
from fdp.optimizers.foreach import each, groups_of, in_groups
from fdp.types import FdpError
from tests.conftest import randn

SIZES = [(3,), (), (40, 5), (7,), (2, 2, 2), (0,), (129,)]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float32]
PARAMS = {f"leaf{i}": randn(*size, seed=i).to(dtype) for i, (size, dtype) in enumerate(zip(SIZES, DTYPES))}
GRADS = {f"leaf{i}": randn(*size, seed=50 + i).to(dtype) for i, (size, dtype) in enumerate(zip(SIZES, DTYPES))}


@pytest.fixture(params=[0, 8, 50, 1 << 20])
def at_once(request, monkeypatch):
    monkeypatch.setattr(foreach, "ELEMENTS_TOGETHER", request.param)
    return request.param


def equal(one, other):
    assert tree.paths(one) == tree.paths(other)
    for a, b in zip(tree.leaves(one), tree.leaves(other)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_groups_hold_every_leaf_once_and_in_order(at_once):
    seen = []
    found = in_groups(lambda p, g: seen.append(p) or each("add", p, g, alpha=2), PARAMS, GRADS)
    assert [leaf is own for own, leaf in zip(PARAMS.values(), chain(*seen), strict=True)] == [True] * len(SIZES)
    sizes = [sum(leaf.numel() for leaf in group) for group in seen]
    assert all(size <= at_once for size, group in zip(sizes, seen) if len(group) > 1)
    assert len(seen) == 1 or at_once < (1 << 20)
    equal(found, tree.map(lambda p, g: torch.add(p, g, alpha=2), PARAMS, GRADS))


def test_several_results_are_several_trees():
    added, doubled = in_groups(lambda p, g: (each("add", p, g), each("mul", p, 2)), PARAMS, GRADS)
    equal(added, tree.map(torch.add, PARAMS, GRADS))
    equal(doubled, tree.map(lambda p: p * 2, PARAMS))


@pytest.mark.parametrize("name", ["adam", "adamw", "masked", "scheduled", "noise", "sgd"])
def test_an_update_does_not_depend_on_the_groups(name, at_once, monkeypatch):
    optimizer = {
        "adam": fo.adam(0.1),
        "adamw": fo.adamw(0.1, weight_decay=0.2),
        "masked": fo.adamw(0.1, mask=lambda params: tree.map(lambda p: p.ndim > 1, params)),
        "scheduled": fo.chain(fo.scale_by_adam(), fo.add_decayed_weights(fo.cosine(0.1, steps=9)), fo.scale(-0.1)),
        "noise": fo.adamw(0.1, noise_std=0.3, eps_root=1e-3),
        "sgd": fo.sgd(0.1, momentum=0.9),
    }[name]

    def run():
        params, state, before = PARAMS, optimizer.init(PARAMS), tree.map(torch.clone, PARAMS)
        for step in range(3):
            old = tree.map(torch.clone, state)
            updates, after = optimizer.update(tree.map(lambda g: g * (step + 1), GRADS), state, params)  # noqa: B023
            equal(state, old)  # nothing that was given is changed
            params, state = fo.apply_updates(params, updates), after
        equal(PARAMS, before)
        return params, state

    found = run()
    monkeypatch.setattr(foreach, "_groups", lambda leaves: [slice(i, i + 1) for i in range(len(leaves))])
    equal(found, run())


def test_a_name_with_an_underscore_changes_the_leaves():
    for leaves in ([randn(3).abs()], [randn(3).abs(), randn(4).abs()]):
        expected = [leaf.sqrt() for leaf in leaves]
        found = each("sqrt_", leaves)
        assert all(a is b for a, b in zip(found, leaves))
        equal(found, expected)


class Other(torch.Tensor):
    """Stands for a tensor that is not plain, such as a DTensor."""


@pytest.mark.parametrize("other", [torch.empty(3, device="meta"), torch.zeros(3).as_subclass(Other)])
def test_leaves_that_are_not_plain_or_elsewhere_are_alone(other):
    assert list(foreach._groups([torch.zeros(2), torch.zeros(3)])) == [slice(0, 2)]
    assert list(foreach._groups([torch.zeros(2), other])) == [slice(0, 1), slice(1, 2)]


def test_leaves_are_alone_in_a_trace_and_under_a_transform():
    sizes = []
    add = lambda p, g: in_groups(lambda a, b: sizes.append(len(a)) or each("add", a, b), p, g)  # noqa: E731
    equal(torch.compile(add, backend="eager")(PARAMS, GRADS), tree.map(torch.add, PARAMS, GRADS))
    params, grads = ({path: torch.stack([leaf, 2 * leaf]) for path, leaf in each.items()} for each in (PARAMS, GRADS))
    equal(torch.func.vmap(add)(params, grads), tree.map(torch.add, params, grads))
    assert sizes == [1] * 2 * len(SIZES)


def test_trees_with_other_paths_are_refused_and_empty_ones_returned():
    with pytest.raises(FdpError, match="expected trees with the same paths"):
        in_groups(lambda a, b: each("add", a, b), {"a": torch.ones(2)}, {"b": torch.ones(2)})
    state = fo.scale_by_adam().init({"a": torch.zeros(2)})
    with pytest.raises(FdpError, match="expected trees with the same paths"):
        fo.scale_by_adam().update({"b": torch.ones(2)}, state, {"b": torch.ones(2)})
    assert fo.apply_updates({}, {}) == {}


@pytest.mark.parametrize(
    ("sizes", "together", "apart"),
    [
        ([], [], []),
        ([9], [[0]], [[0]]),
        ([3, 3, 3], [[0, 1], [2]], [[0], [1], [2]]),
        ([9, 1, 6, 0, 1], [[0], [1, 2, 3], [4]], [[0], [1], [2], [3], [4]]),
    ],
)
def test_neighbours_share_a_group_until_it_is_full(sizes, together, apart, monkeypatch):
    monkeypatch.setattr(foreach, "ELEMENTS_TOGETHER", 7)
    for share, expected in ((True, together), (False, apart)):
        found = [list(range(len(sizes)))[group] for group in groups_of(sizes, share=share)]
        assert found == expected
