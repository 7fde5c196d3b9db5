from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fdp import ops, tree
from fdp.kfac.layers import survey, to_leaves, to_matrix
from fdp.kfac.types import Layer
from fdp.model import from_loss
from fdp.types import Tree
from tests.conftest import CASES, case_named, randn


def test_a_bias_is_a_column_only_if_it_goes_with_every_use_and_nowhere_else():
    def layers(loss: Callable[[Tree, Tree], Tensor]) -> set[Layer]:
        params = {"w": randn(4, 4), "v": randn(4, 4), "b": randn(4)}
        return set(survey(from_loss(loss, params), params, {"x": randn(3, 4)}).layers)

    apart = {Layer("w", None), Layer("v", None), Layer("b", None)}
    x_of = {
        "twice": lambda p, x: ops.linear(ops.linear(x, p["w"], p["b"]), p["v"]),
        "of two": lambda p, x: ops.linear(ops.linear(x, p["w"], p["b"]), p["v"], p["b"]),
        "once of two uses": lambda p, x: ops.linear(ops.linear(ops.linear(x, p["w"], p["b"]), p["w"]), p["v"]),
        "elsewhere": lambda p, x: ops.linear(ops.add(ops.linear(x, p["w"], p["b"]), p["b"]), p["v"]),
    }
    found = {name: layers(lambda p, d, fn=fn: fn(p, d["x"]).sum(1)) for name, fn in x_of.items()}
    assert found.pop("twice") == {Layer("w", "b"), Layer("v", None)}
    assert all(these == apart for these in found.values()), found


@pytest.mark.parametrize("name", CASES)
def test_every_leaf_is_in_one_layer_and_survives_the_round_trip(name):
    model, params, data = case_named(name)
    known, flat = survey(model, params, data), tree.flatten(params)
    paths = [path for layer in known.layers for path in layer if path is not None]
    assert sorted(paths) == sorted(model.trainable)
    for layer in known.layers:
        value = to_matrix(layer, known.shapes[layer], flat)
        assert tuple(value.shape) == known.shapes[layer]
        for path, leaf in to_leaves(layer, value, flat).items():
            assert torch.equal(leaf, flat[path])
