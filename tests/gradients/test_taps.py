from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fdp import ops, tree
from fdp.checks.model_checks import check_norms
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.rules import per_sample_gradient
from fdp.gradients.tape import EXPANDED, Use
from fdp.gradients.taps import batch_size_of, tapped_vjp, trace
from fdp.model import Block, from_loss
from fdp.types import FdpError, Tree
from tests.conftest import Case, randn

x = randn(3, 4)


def test_positions_are_not_taken_for_samples_when_there_are_as_many():
    params = {"positions": randn(3, 4)}  # 3 tokens, 3 samples: arange(3) looks like one id per sample

    def loss(p, data):
        return (data["x"] + ops.embedding(torch.arange(3), p["positions"])).square().sum((1, 2))

    model = from_loss(loss, params)
    with pytest.raises(FdpError, match="sample dimension"):
        make_plan(model, params, {"x": randn(3, 3, 4)}, method=Method.AUTO, dtype=torch.float64)


def test_a_leaf_called_like_the_use_of_another_is_refused_or_right():
    params, data = {"w": randn(5, 4), "w#0": randn(5)}, {"x": x}
    model = from_loss(lambda p, d: ops.linear(d["x"], p["w"], p["w#0"]).sin().sum(1), params)
    try:
        plan = make_plan(model, params, data, method=Method.GHOST_BK, dtype=torch.float64)
    except FdpError:
        return
    check_norms(model, params, data, plan=plan)


def test_trace_finds_every_use_with_its_shapes(case: Case):
    flat = tree.flatten(case.params)
    carry: Tree = ()
    found = set()
    for block in case.model.blocks:
        uses, carry = trace(block, flat, case.model.trainable, carry, case.data)
        found |= {use.path for use in uses}
        assert len({use.name for use in uses}) == len(uses)
        for use in uses:
            assert use.leaf_shape == tuple(flat[use.path].shape)
            assert use.input_shape[0] == use.output_shape[0] == 3
    assert found == case.model.trainable
    assert tuple(carry.shape) == (3,)


def test_trace_lists_repeated_uses_apart_and_expanded_ones_once():
    params = {"w": randn(4, 4), "b": randn(4)}

    def loss(p, data):
        h = ops.linear(ops.linear(data["x"], p["w"], p["b"]), p["w"], p["b"])
        return ops.add(h, p["b"]).sum(1)

    block = from_loss(loss, params).blocks[0]
    uses, _ = trace(block, params, frozenset(params), (), {"x": x})
    assert uses == (
        Use("w#0", "w", "linear", (3, 4), (3, 4), (4, 4)),
        Use("b", "b", EXPANDED, (3, 4), (3, 4), (4,)),
        Use("w#1", "w", "linear", (3, 4), (3, 4), (4, 4)),
    )


def test_trace_leaves_out_what_is_not_trained():
    params = {"w": randn(5, 4), "b": randn(5)}
    block = from_loss(lambda p, d: ops.linear(d["x"], p["w"], p["b"]).sum(1), params).blocks[0]
    uses, _ = trace(block, params, frozenset({"b"}), (), {"x": x})
    assert [use.path for use in uses] == ["b"]


def test_trace_computes_nothing():
    huge = 10**7  # a weight of 10^14 elements
    params = {"w": torch.zeros(()).expand(huge, huge)}
    block = from_loss(lambda p, d: ops.linear(d["x"], p["w"]).sum((1, 2)), params).blocks[0]
    uses, out = trace(block, params, frozenset(params), (), {"x": torch.zeros(()).expand(3, huge, huge)})
    assert uses[0].output_shape == (3, huge, huge)
    assert tuple(out.shape) == (3,)


def test_the_pull_back_gives_the_carry_gradient_and_the_records_of_every_use(case: Case, reference):
    flat = tree.flatten(case.params)
    uses, carry, pulls = [], (), []
    for block in case.model.blocks:
        weights = {path: flat[path] for path in tree.leaves(block.params)}
        plain = block.apply(tree.select(flat, block.params), carry, case.data)
        uses = trace(block, flat, case.model.trainable, carry, case.data)[0]
        carry, pull = tapped_vjp(block, weights, carry, case.data, uses, case.model.trainable)
        torch.testing.assert_close(carry, plain, rtol=1e-12, atol=1e-12)
        pulls.append(pull)
    gradient = torch.ones(3, dtype=torch.float64)
    total = {}
    for pull in reversed(pulls):
        gradient, records = pull(gradient)
        for path, found in records.items():
            for record in found:
                total[path] = total.get(path, 0) + per_sample_gradient(record)
    assert set(total) == set(reference)
    for path, expected in reference.items():
        torch.testing.assert_close(total[path], expected, rtol=1e-10, atol=1e-12)


def test_a_block_hands_back_the_gradient_of_its_carry():
    block = Block("b", {"w": "w"}, lambda p, h, d: ops.linear(h, p["w"]).tanh())
    w, h, g = randn(5, 4), randn(3, 4, seed=2), randn(3, 5, seed=3)
    uses, _ = trace(block, {"w": w}, frozenset({"w"}), h, {"x": x})
    _, pull = tapped_vjp(block, {"w": w}, h, {"x": x}, uses, frozenset({"w"}))
    carry_gradient, records = pull(g)
    expected = torch.func.vjp(lambda h: F.linear(h, w).tanh(), h)[1](g)[0]
    torch.testing.assert_close(carry_gradient, expected)
    assert not carry_gradient.requires_grad
    assert [use.path for use in uses] == list(records) == ["w"]


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"x": torch.zeros(3), "y": torch.zeros(4)},
        {"x": torch.tensor(1.0)},
        {"x": x, "y": torch.tensor(1)},
    ],
)
def test_data_without_one_common_sample_dimension_is_refused(data):
    with pytest.raises(FdpError, match="same leading sample dimension"):
        batch_size_of(data)


def test_the_batch_size_is_the_leading_size():
    assert batch_size_of({"x": torch.zeros(3, 2), "y": [torch.zeros(3)]}) == 3
