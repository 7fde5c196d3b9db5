"""Tests of attached taps: the same carry gradients and records as taps that are added, and no use that goes missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fdp.gradients.tape
from fdp import ops, tree
from fdp.gradients.attached_taps import WritesInPlace, attached_vjp, can_attach
from fdp.gradients.execution import EAGER
from fdp.gradients.rules import per_sample_gradient
from fdp.gradients.taps import tapped_vjp, trace
from fdp.model import Block
from fdp.types import FdpError
from tests.conftest import Case, randn

X = {"x": randn(3, 6, 4)}
WEIGHTS = {"w": randn(5, 4, seed=2), "b": randn(5, seed=3)}
TRAINED = frozenset(WEIGHTS)


def block_of(apply: Any, name: str = "block") -> Block:
    return Block(name, {"w": "w", "b": "b"}, apply)


def check_same_gradients(case: Case) -> None:
    flat, carry = tree.flatten(case.params), ()
    draw = torch.Generator().manual_seed(4)
    for block in case.model.blocks:
        weights = {path: flat[path] for path in tree.leaves(block.params)}
        uses = trace(block, flat, case.model.trainable, carry, case.data)[0]
        arguments = (block, weights, carry, case.data, uses, case.model.trainable)
        assert can_attach(block)
        (out, pull), (expected, reference) = attached_vjp(*arguments), tapped_vjp(*arguments)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        gradient = tree.map(lambda leaf: torch.randn(leaf.shape, dtype=leaf.dtype, generator=draw), expected)
        (carry_gradient, records), (expected_gradient, others) = pull(gradient), reference(gradient)
        torch.testing.assert_close(carry_gradient, expected_gradient, rtol=1e-10, atol=1e-12)
        assert list(records) == list(others)
        for path, found in records.items():
            for record, other in zip(found, others[path], strict=True):
                assert not per_sample_gradient(record).requires_grad
                torch.testing.assert_close(
                    per_sample_gradient(record), per_sample_gradient(other), rtol=1e-10, atol=1e-12
                )
        carry = expected


def test_attached_taps_give_the_gradients_of_added_taps(case: Case):
    check_same_gradients(case)


def test_the_check_notices_a_tap_that_gets_less_than_the_gradient(case: Case, monkeypatch):
    attach, expand = fdp.gradients.tape.attach, fdp.gradients.tape.Tape.expand
    monkeypatch.setattr(fdp.gradients.tape, "attach", lambda y, tap: attach(y, 0.999 * tap))

    def less(self: Any, leaf: Any) -> Tensor:
        copies = expand(self, leaf)
        return 0.999 * copies + 0.001 * copies.detach() if self.attached else copies

    monkeypatch.setattr(fdp.gradients.tape.Tape, "expand", less)
    with pytest.raises(AssertionError):
        check_same_gradients(case)


def test_a_planned_use_that_is_missing_is_an_error():
    def once(p: Any, carry: Any, data: Any) -> Tensor:
        return ops.linear(data["x"], p["w"], p["b"]).sum((1, 2))

    def twice(p: Any, carry: Any, data: Any) -> Tensor:
        return once(p, carry, data) + once(p, carry, {"x": data["x"].tanh()})

    uses, _ = trace(block_of(twice), WEIGHTS, TRAINED, (), X)
    with pytest.raises(FdpError, match=r"expected the uses \['w#1'\], as planned, got none"):
        attached_vjp(block_of(once), WEIGHTS, (), X, uses, TRAINED)


def test_a_block_that_writes_into_an_output_gets_added_taps_and_the_right_gradients():
    def in_place(p: Any, carry: Any, data: Any) -> Tensor:
        return F.relu(ops.linear(data["x"], p["w"], p["b"]), inplace=True).square().sum((1, 2))

    def out_of_place(p: Any, carry: Any, data: Any) -> Tensor:
        return F.relu(ops.linear(data["x"], p["w"], p["b"])).square().sum((1, 2))

    block = block_of(in_place)
    uses, _ = trace(block_of(out_of_place), WEIGHTS, TRAINED, (), X)
    assert can_attach(block)
    with pytest.raises(WritesInPlace):
        attached_vjp(block, WEIGHTS, (), X, uses, TRAINED)
    assert not can_attach(block)
    _, pull = EAGER.tapped_vjp(block, WEIGHTS, (), X, uses, TRAINED)
    _, reference = tapped_vjp(block_of(out_of_place), WEIGHTS, (), X, uses, TRAINED)
    ones = torch.ones(3, dtype=X["x"].dtype)
    records, expected = pull(ones)[1], reference(ones)[1]
    for path in WEIGHTS:
        torch.testing.assert_close(per_sample_gradient(records[path][0]), per_sample_gradient(expected[path][0]))


def test_taps_are_added_under_a_transform_and_in_inference_mode():
    block, seen = block_of(lambda p, carry, data: carry), []
    torch.func.vmap(lambda x: (seen.append(can_attach(block)), x)[1])(torch.zeros(2))
    with torch.inference_mode():
        seen.append(can_attach(block))
    assert seen == [False, False]
    assert can_attach(block)
