from __future__ import annotations

import pytest
import torch

from fdp import keys, ops, tree
from fdp.init import constant
from fdp.model import Block, LeafSpec, Model, check_params, from_loss
from fdp.types import FdpError
from tests.conftest import Case, randn


def two_blocks() -> Model:
    leaves = {"first.w": LeafSpec((4, 3), constant(0.5)), "last.b": LeafSpec((4,), constant(0.0))}
    first = Block("first", {"w": "first.w"}, lambda p, carry, d: ops.linear(d["x"], p["w"]))
    last = Block("last", {"b": "last.b"}, lambda p, h, d: ops.add(h, p["b"]).sum(1))
    return Model("two", leaves, (first, last))


def test_the_loss_goes_through_the_blocks_in_order():
    model, x = two_blocks(), randn(5, 3).float()
    params = {"first": {"w": torch.ones(4, 3)}, "last": {"b": torch.tensor([1.0, 2.0, 3.0, 4.0])}}
    torch.testing.assert_close(model.loss(params, {"x": x}), 4 * x.sum(1) + 10)


def test_init_nests_the_leaves_by_path():
    params = two_blocks().init(keys.key(0), dtype=torch.float64)
    assert tree.flatten(params).keys() == {"first.w", "last.b"}
    assert params["first"]["w"].dtype == torch.float64
    assert (params["first"]["w"] == 0.5).all()


def test_frozen_leaves_are_not_trainable():
    model = two_blocks()._replace(frozen=frozenset({"last.b"}))
    assert model.trainable == {"first.w"}
    assert two_blocks().trainable == {"first.w", "last.b"}


def test_from_loss_is_the_loss_as_one_block():
    params = {"layers": [{"w": randn(2, 3)}], "b": randn(2)}

    def loss(p, d):
        return ops.linear(d["x"], p["layers"][0]["w"], p["b"]).square().sum(1)

    model, data = from_loss(loss, params, name="mine"), {"x": randn(4, 3)}
    assert torch.equal(model.loss(params, data), loss(params, data))
    assert {path: leaf.shape for path, leaf in model.leaves.items()} == {"b": (2,), "layers.0.w": (2, 3)}
    assert model.name == "mine"
    check_params(model, params)


def test_the_loss_of_a_model_is_per_sample(case: Case):
    whole = case.model.loss(case.params, case.data)
    assert whole.shape == (3,)
    for b in range(3):
        alone = case.model.loss(case.params, tree.map(lambda leaf: leaf[b : b + 1], case.data))  # noqa: B023
        torch.testing.assert_close(alone, whole[b : b + 1], rtol=1e-12, atol=1e-12)


def good() -> dict:
    return {"first": {"w": torch.zeros(4, 3)}, "last": {"b": torch.zeros(4)}}


BAD = {
    "missing": ({"first": {"w": torch.zeros(4, 3)}}, r"missing leaves \['last.b'\]"),
    "extra": (good() | {"more": torch.zeros(1)}, r"unknown leaves \['more'\]"),
    "shape": (good() | {"last": {"b": torch.zeros(3)}}, r"last\.b: expected shape \(4,\), got \(3,\)"),
    "integer": (good() | {"last": {"b": torch.zeros(4, dtype=torch.int64)}}, r"last\.b: .*torch\.int64"),
    "nan": (good() | {"last": {"b": torch.full((4,), torch.nan)}}, r"last\.b: holds NaN or infinity"),
    "infinite": (
        good() | {"last": {"b": torch.tensor([0, 0, torch.inf, 0])}},
        r"last\.b: holds NaN or infinity",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_parameters_that_are_not_the_models_are_refused(name):
    check_params(two_blocks(), good())
    params, message = BAD[name]
    with pytest.raises(FdpError, match=message):
        check_params(two_blocks(), params)


def test_a_leaf_that_no_block_names_is_refused():
    model = two_blocks()
    model = model._replace(blocks=model.blocks[:1])
    with pytest.raises(FdpError, match=r"no block uses \['last\.b'\]"):
        check_params(model, good())
