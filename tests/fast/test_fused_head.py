"""A head fused with its loss is the block as it stands: losses, carry gradient, records; and refuses what it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdp_kernels.keep_int8 import widen_int8
from torch import Tensor

import fdp.fast.chunked_head
import fdp.fast.fused_head
from fdp import keys, tree
from fdp.fast.compiled import CompiledRunner
from fdp.fast.fused_head import can_fuse, fused_vjp
from fdp.gradients.clipped_sum import clipped_sum, plain_sum
from fdp.gradients.costs import NormBy, SumBy
from fdp.gradients.eight_bits import Rounded
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.gradients.rules import Dense, Pair, per_sample_gradient
from fdp.gradients.taps import tapped_vjp
from fdp.model import Model
from fdp.models import GPTConfig, LlamaConfig, gpt, llama, mlp
from fdp.privacy.clipping import clip_to
from tests.conftest import randn, random_like

VOCAB = 11
MODELS: dict[str, Model] = {
    "gpt-untied": gpt(GPTConfig(layers=1, width=8, heads=2, context=5, vocab_size=VOCAB, tied=False)),
    "gpt-tied": gpt(GPTConfig(layers=1, width=8, heads=2, context=5, vocab_size=VOCAB)),
    "llama": llama(LlamaConfig(layers=1, width=8, heads=2, key_heads=1, hidden=9, context=5, vocab_size=VOCAB)),
}
DATA = {"tokens": torch.randint(0, VOCAB, (3, 6), generator=torch.Generator().manual_seed(2))}
BLOCKS = CompiledRunner(backend="aot_eager")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(params=[False, True], ids=["as-is", "padded"])
def _padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary padded with words of zeros, as on a GPU."""
    if request.param:

        def padded(w: Tensor, *, to: int = 8) -> Tensor:
            return torch.cat([w, w.new_zeros(-len(w) % to, w.shape[1])])

        monkeypatch.setattr(fdp.fast.chunked_head, "_pad_vocabulary", padded)


def keeping(model: Model, params: Any, method: Method = Method.AUTO, norm: NormBy = NormBy.KEEP) -> Plan:
    """Return a plan that stores the head's gradients, or the pair that they are products of."""
    plan = make_plan(model, params, DATA, method=method, dtype=torch.float64)
    path = head_of(model)
    if not plan.private:
        return plan
    kept = plan.choices[path]._replace(norm=norm, sum=SumBy.PAIR if norm is NormBy.SYMMETRIC else SumBy.REUSE)
    return plan._replace(choices=plan.choices | {path: kept})


def head_of(model: Model) -> str:
    block = model.blocks[-1]
    assert block.head is not None
    return block.params[block.head.weight]


def last_block(model: Model) -> tuple[Any, dict[str, Tensor], Tensor]:
    """The head, its weights and the input of it."""
    flat, block = tree.flatten(random_like(model)), model.blocks[-1]
    return block, {path: flat[path] for path in dict.fromkeys(tree.leaves(block.params))}, randn(3, 5, 8)


@pytest.mark.usefixtures("_padded")
@pytest.mark.parametrize("norm", [NormBy.KEEP, NormBy.KEEP_INT8, NormBy.SYMMETRIC])
def test_private_pull_back_is_that_of_the_block(model: Model, norm: NormBy):
    block, weights, carry = last_block(model)
    plan = keeping(model, random_like(model), norm=norm)
    assert can_fuse(block, plan)
    losses, pull = fused_vjp(BLOCKS, block, weights, carry, DATA, plan.uses[-1], plan, None)
    expected, reference = tapped_vjp(block, weights, carry, DATA, plan.uses[-1], plan.trainable)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    (of_carry, found), (wanted, records) = pull(None), reference(torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(of_carry, wanted, rtol=1e-12, atol=1e-12)
    assert set(found) == set(records)
    assert isinstance(found[head_of(model)][0], {NormBy.KEEP: Dense, NormBy.KEEP_INT8: Rounded}.get(norm, Pair))
    for path, (record,) in records.items():
        (got,) = found[path]
        if isinstance(got, Rounded):
            G, exact = widen_int8(got.integers, got.exponents).double(), per_sample_gradient(record)
            assert float((G - exact).norm() / exact.norm()) < 0.012
            torch.testing.assert_close(got.squares.sum(1), G.square().sum((1, 2)), rtol=1e-14, atol=0.0)
            continue
        torch.testing.assert_close(per_sample_gradient(got), per_sample_gradient(record), rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("_padded")
@pytest.mark.parametrize("start", [None, [1.0, 0.0, 1.0]])
def test_plain_pull_back_is_that_of_the_block(model: Model, start):
    block, weights, carry = last_block(model)
    plan = keeping(model, random_like(model), Method.NONE)
    gradient = None if start is None else torch.tensor(start, dtype=torch.float64)
    losses, pull = fused_vjp(BLOCKS, block, weights, carry, DATA, plan.uses[-1], plan, gradient)
    expected, reference = EAGER.plain_vjp(block, weights, carry, DATA, plan.trainable)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    ones = torch.ones(3, dtype=torch.float64)
    (of_carry, found), (wanted, gradients) = pull(None), reference(ones if gradient is None else gradient)
    torch.testing.assert_close(of_carry, wanted, rtol=1e-12, atol=1e-12)
    assert set(found) == set(gradients)
    for path, value in gradients.items():
        torch.testing.assert_close(found[path], value, rtol=1e-12, atol=1e-13)


@pytest.mark.long
@pytest.mark.parametrize("norm", [NormBy.KEEP, NormBy.SYMMETRIC])
def test_the_whole_loop_with_a_fused_head_is_the_loop(model: Model, norm: NormBy):
    params = random_like(model)
    plan = keeping(model, params, norm=norm)
    totals = []
    for blocks in (BLOCKS, None):
        losses, norms, stash = per_sample_norms(
            model, params, DATA, plan=plan, execution=Execution(runner=blocks or EAGER)
        )
        totals.append((losses, norms.squared, clipped_sum(stash, clip_to(norms, max_norm=0.5)).value))
    torch.testing.assert_close(*totals, rtol=1e-10, atol=1e-12)
    none, mask = keeping(model, params, Method.NONE), torch.tensor([1.0, 0.0, 1.0])
    plain = [
        plain_sum(model, params, DATA, mask, plan=none, execution=Execution(runner=blocks or EAGER))
        for blocks in (BLOCKS, None)
    ]
    torch.testing.assert_close(*plain, rtol=1e-10, atol=1e-12)


def test_the_loop_takes_the_fused_way(monkeypatch):
    """And would notice if it were wrong."""
    model = MODELS["gpt-untied"]
    params = random_like(model)
    real = fdp.fast.fused_head.fused_head_stored

    def wrong(*args):
        losses, dh, kept = real(*args)
        return losses, dh, 2 * kept

    monkeypatch.setattr(fdp.fast.fused_head, "fused_head_stored", wrong)
    plan = keeping(model, params)
    _, norms, _ = per_sample_norms(model, params, DATA, plan=plan, execution=Execution(runner=BLOCKS))
    _, truth, _ = per_sample_norms(model, params, DATA, plan=plan)
    path = head_of(model)
    torch.testing.assert_close(norms.squared[path], 4 * truth.squared[path])


def test_a_head_is_fused_only_if_the_plan_stores_what_its_sum_needs():
    model = MODELS["gpt-untied"]
    params, block, path = model.init(keys.key(0)), model.blocks[-1], head_of(model)
    plan = keeping(model, params)
    assert can_fuse(block, plan)
    assert not can_fuse(block._replace(head=None), plan)
    assert not can_fuse(mlp(widths=(4, 5), classes=3).blocks[-1], plan)
    for norm in NormBy:
        other = plan._replace(choices=plan.choices | {path: plan.choices[path]._replace(norm=norm)})
        assert can_fuse(block, other) == (norm is not NormBy.VMAP)
    assert not can_fuse(block._replace(params=block.params | {"again": path}), plan)
    frozen = model._replace(frozen=frozenset({path}))
    for method in (Method.AUTO, Method.NONE):
        assert not can_fuse(block, make_plan(frozen, params, DATA, method=method))
    assert can_fuse(block, make_plan(model, params, DATA, method=Method.NONE))
    for method in (Method.MATERIALIZE, Method.GHOST):
        assert not can_fuse(block, make_plan(model, params, DATA, method=method))
    for method in (Method.FLASH, Method.GHOST_BK, Method.FLASH_BK):
        assert can_fuse(block, make_plan(model, params, DATA, method=method))
    assert not can_fuse(block, make_plan(model, params, DATA, method=Method.FLASH, memory_budget=0.0))


@pytest.mark.parametrize("frozen", [pytest.param("head.norm", marks=pytest.mark.long), "head.weight"])
def test_frozen_leaves_of_a_head_have_no_part(frozen):
    model = MODELS["gpt-untied"]._replace(frozen=frozenset({frozen}))
    params = random_like(model)
    for method in (Method.AUTO, Method.NONE):
        plan = make_plan(model, params, DATA, method=method, dtype=torch.float64)
        if plan.private and frozen != "head.weight":
            plan = keeping(model, params)
        if plan.private:
            _, norms, _ = per_sample_norms(model, params, DATA, plan=plan, execution=Execution(runner=BLOCKS))
            _, truth, _ = per_sample_norms(model, params, DATA, plan=plan)
            torch.testing.assert_close(norms.squared, truth.squared, rtol=1e-10, atol=0)
        else:
            mask = torch.ones(3)
            found, truth = (
                plain_sum(model, params, DATA, mask, plan=plan, execution=Execution(runner=b or EAGER))
                for b in (BLOCKS, None)
            )
            torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
        assert frozen not in plan.trainable
