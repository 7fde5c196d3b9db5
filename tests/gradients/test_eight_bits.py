"""Gradients stored in 8 bits: what may be stored so, what is measured and added, and what it does to training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fdp_kernels.keep_int8 import widen_int8

from fdp import keys, optimizers, tree
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.gradients import launches, rules, shared_leaves
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.costs import NormBy, SumBy
from fdp.gradients.eight_bits import (
    Rounded,
    can_round,
    is_product,
    not_rounded,
    rounded_parts,
    store_rounded,
    stored_gradient,
)
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.launches import add_parts, weighted_parts
from fdp.gradients.linear_maps import MatrixMap, Sides
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.gradients.precondition import map_record
from fdp.gradients.rules import Dense, OneHot, Pair, per_sample_gradient
from fdp.gradients.timing import signature
from fdp.models import GPTConfig, gpt
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, sample_batch
from fdp.stages import make_stages
from fdp.step import init_state, make_train_step
from fdp.types import FdpError
from tests.adversary import IN_8_BITS, forced
from tests.conftest import randn

MODEL = gpt(GPTConfig(layers=2, width=32, heads=4, context=16, vocab_size=61, tied=False))


def product(tokens: int, columns: int, seed: int) -> Pair:
    return Pair(randn(3, 1, tokens, 5, seed=seed), randn(3, 1, tokens, columns, seed=seed + 1), (5, columns))


def in_8_bits(plan: Plan) -> Plan:
    found = [use.path for block in plan.uses for use in block if can_round(use.rule, use.leaf_shape[-1])]
    assert len(found) == 9
    return forced(plan, *IN_8_BITS, leaves=found)


@pytest.mark.parametrize(
    ("rule", "columns", "possible"),
    [("linear", 32, True), ("matmul", 16, True), ("linear", 24, False), ("embedding", 32, False), ("conv", 32, False)],
)
def test_products_of_aligned_rows_can_be_stored(rule: str, columns: int, possible: bool) -> None:
    assert can_round(rule, columns) == possible


def test_one_product_over_tokens_is_a_product() -> None:
    assert is_product(product(4, 16, 0))
    assert not is_product(Dense(randn(3, 5)))
    assert not is_product(Pair(OneHot(torch.zeros(3, 4, dtype=torch.int64)), randn(3, 1, 4, 16), (5, 16)))
    assert not is_product(Pair(randn(3, 2, 4, 5), randn(3, 2, 4, 16), (10, 16)))  # groups of a convolution


def test_norm_and_sum_are_of_the_rounded_gradients_whatever_shares_a_launch() -> None:
    pairs = [product(4, 16, 0), product(9, 144, 3), product(4, 272, 5)]
    stored = store_rounded(pairs)
    factors = torch.tensor([0.5, 0.0, 2.0])
    parts = rounded_parts(stored, [factors] * 3, size=2)
    for pair, record, part in zip(pairs, stored, parts):
        G = widen_int8(record.integers, record.exponents).double()
        exact = per_sample_gradient(pair)
        assert float((G - exact).norm() / exact.norm()) < 0.012
        torch.testing.assert_close(record.squares.sum(1), G.square().sum((1, 2)), rtol=1e-14, atol=0.0)
        assert part.shape == (2, *pair.shape)
        torch.testing.assert_close(part.double().sum(0), torch.einsum("b,bpd->pd", factors.double(), G))
    mixed = [stored[0], Dense(randn(3, 7)), pairs[1]]
    sums = weighted_parts(mixed, [factors.double()] * 3)
    torch.testing.assert_close(add_parts(sums[0]).double(), parts[0].double().sum(0))
    assert [part.shape[1:] for part in sums] == [(5, 16), (7,), (5, 144)]
    assert store_rounded([]) == rounded_parts([], [], size=2) == []


@pytest.mark.parametrize(("samples", "sizes"), [(64, [64]), (96, [48, 48]), (130, [64, 64, 2])])
def test_at_most_64_samples_are_added_in_float32(samples: int, sizes: list[int]) -> None:
    """The slack of the noise covers no more."""
    (record,) = store_rounded([Pair(randn(samples, 1, 2, 3, seed=1), randn(samples, 1, 2, 16, seed=2), (3, 16))])
    factors = torch.rand(samples, dtype=torch.float64)
    (parts,) = weighted_parts([record], [factors])
    split = zip(stored_gradient(record).double().split(sizes), factors.split(sizes))
    expected = torch.stack([torch.tensordot(of, few, dims=1) for few, of in split])
    torch.testing.assert_close(parts.double(), expected, rtol=1e-4, atol=1e-5)


def test_rounded_gradients_among_other_uses_are_an_error() -> None:
    (record,) = store_rounded([product(4, 16, 0)])
    dense = Dense(randn(3, 5))
    assert not_rounded([dense]) == [dense]
    torch.testing.assert_close(stored_gradient(dense := Dense(randn(3, 5))), dense.gradient)
    assert stored_gradient(record).shape == (3, 5, 16)
    with pytest.raises(FdpError, match="stored_dtype: expected no gradients in 8 bits"):
        not_rounded([dense, record])


@pytest.mark.long
def test_a_fused_head_in_8_bits_can_be_preconditioned() -> None:
    params, data = MODEL.init(keys.key(0)), {"tokens": torch.arange(51).view(3, 17)}
    plan = forced(make_plan(MODEL, params, data), *IN_8_BITS, leaves=["head.weight"])
    left, right = (MatrixMap(torch.eye(n) + 0.1 * torch.ones(n, n)) for n in (61, 32))
    for sides in (Sides(left, right), Sides(left, None), Sides(None, right)):
        transform, found = partial(map_record, {"head.weight": sides}), []
        for runner in (EAGER, CompiledRunner(backend="aot_eager")):
            execution = Execution(runner=runner)
            _, norms, stash = per_sample_norms(MODEL, params, data, plan=plan, execution=execution, transform=transform)
            clip = clipping.clip_to(norms, max_norm=1e-2)
            found.append((norms.squared["head.weight"], clipped_sum(stash, clip).value["head.weight"]))
        torch.testing.assert_close(found[1], found[0], rtol=5e-2, atol=1e-4)
        assert not torch.equal(found[1][0], found[0][0]), "the fused head is rounded before it is mapped"


def plan_on_a_gpu(method: Method = Method.AUTO, **options: object) -> Plan:
    """Plan for a GPU without one: shapes, costs and options are the same."""
    params = MODEL.init(keys.key(0))
    example = {"tokens": torch.zeros(8, 17, dtype=torch.int64)}
    device = torch.device("cuda")
    return make_plan(MODEL, params, example, method=method, dtype=torch.bfloat16, device=device, **options)  # type: ignore[arg-type]


def test_only_auto_stores_in_8_bits_and_only_if_asked_to() -> None:
    def kinds(plan: Plan) -> set[NormBy]:
        return {choice.norm for choice in plan.choices.values()}

    assert NormBy.KEEP_INT8 not in kinds(plan_on_a_gpu())
    for method in (Method.FLASH, Method.FLASH_BK, Method.GHOST_BK, Method.MATERIALIZE):
        assert NormBy.KEEP_INT8 not in kinds(plan_on_a_gpu(method, stored_dtype=torch.int8))
    (use,) = [use for block in plan_on_a_gpu().uses for use in block if use.path == "head.weight"]
    times = {signature(use, by, torch.bfloat16): 1.0 if by is NormBy.KEEP_INT8 else 2.0 for by in NormBy}
    assert NormBy.KEEP_INT8 not in kinds(plan_on_a_gpu(timings=times))
    rounded = plan_on_a_gpu(stored_dtype=torch.int8, timings=times)
    assert rounded.choices["head.weight"].norm is NormBy.KEEP_INT8
    assert rounded.choices["head.weight"].sum is SumBy.REUSE
    assert NormBy.KEEP_INT8 not in kinds(plan_on_a_gpu(stored_dtype=torch.int8, timings=times, memory_budget=0.0))
    with pytest.raises(FdpError, match=r"stored_dtype: expected torch.int8, or None .* got torch.float16"):
        plan_on_a_gpu(stored_dtype=torch.float16)


def test_a_run_that_goes_on_stores_the_leaves_in_8_bits_that_it_stored_before() -> None:
    every = [use for block in plan_on_a_gpu().uses for use in block]
    fast, slow = (
        {signature(use, NormBy.KEEP_INT8, torch.bfloat16): seconds for use in every} for seconds in (1e-9, 1.0)
    )
    plan = plan_on_a_gpu(stored_dtype=torch.int8, timings=fast)
    assert "head.weight" in plan.rounded
    assert plan_on_a_gpu(stored_dtype=torch.int8, timings=slow).rounded == ()
    for rounded in (plan.rounded, ("head.weight",), ()):
        for options in ({"timings": fast}, {"timings": slow}, {"timings": slow, "memory_budget": 0.0}):
            again = plan_on_a_gpu(Method.AUTO, stored_dtype=torch.int8, rounded=rounded, **options)
            assert again.rounded == rounded
            assert all(again.choices[path].sum is SumBy.REUSE for path in rounded)
    with pytest.raises(FdpError, match=r"rounded: expected leaves whose gradients can be stored.* got .*embed.tokens"):
        plan_on_a_gpu(stored_dtype=torch.int8, rounded=["embed.tokens"])
    with pytest.raises(FdpError, match="rounded: expected leaves"):
        plan_on_a_gpu(rounded=["head.weight"])


def test_a_plan_for_a_cpu_stores_nothing_in_8_bits() -> None:
    example = {"tokens": torch.zeros(8, 17, dtype=torch.int64)}
    plan = make_plan(MODEL, MODEL.init(keys.key(0)), example, stored_dtype=torch.int8)
    assert all(choice.norm is not NormBy.KEEP_INT8 for choice in plan.choices.values())


def test_what_is_stored_takes_a_quarter_of_float32() -> None:
    params, tokens = MODEL.init(keys.key(0)), torch.randint(0, 61, (8, 17), generator=torch.Generator().manual_seed(1))
    plan = make_plan(MODEL, params, {"tokens": tokens})
    stash = per_sample_norms(MODEL, params, {"tokens": tokens}, plan=in_8_bits(plan))[2]
    (record,) = stash.records["blocks.0.up"]
    assert isinstance(record, Rounded)
    assert record.integers.nbytes + record.exponents.nbytes < 8 * 128 * 32 * 1.05


def train(change: bool, noise: float, steps: int = 40) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on tokens that count up, and return the losses and the last parameters."""
    sampling, optimizer, key = poisson(64, expected_batch_size=24), optimizers.adamw(3e-3), keys.key(5)
    mechanism = Mechanism(sampling, clipping.flat(max_norm=1.0), noise)
    params = MODEL.init(keys.key(0))
    data = {"tokens": (torch.arange(64)[:, None] + torch.arange(17)) % 61}
    plan = make_plan(MODEL, params, {"tokens": data["tokens"][:32]})
    step = make_train_step(MODEL, optimizer, mechanism=mechanism, plan=in_8_bits(plan) if change else plan)
    state, losses = init_state(MODEL, params, optimizer, mechanism), []
    for t in range(steps):
        state, metrics = step(state, sample_batch(data, sampling, key, step=t, microbatch_size=32), key)
        losses.append(float(metrics.losses[metrics.mask > 0].mean()))
    return losses, tree.flatten(state.params)


def test_gradients_that_are_rounded_otherwise_have_other_noise() -> None:
    """Two runs with one seed would else differ by what the rounding did, without noise."""
    params, example = MODEL.init(keys.key(0)), {"tokens": torch.zeros(8, 17, dtype=torch.int64)}
    mechanism = Mechanism(poisson(64, expected_batch_size=8), clipping.flat(max_norm=1.0), 1.0)
    drawn = []
    for stored in (None, torch.int8):
        plan = make_plan(MODEL, params, example, stored_dtype=stored)
        stages = make_stages(MODEL, optimizers.sgd(0.1), mechanism=mechanism, plan=plan)
        drawn.append(stages.key(keys.key(3), torch.tensor(0)))
    assert not torch.equal(*drawn)


@pytest.mark.long
def test_private_training_hardly_changes() -> None:
    """With the same noise: the losses stay together, although every gradient is rounded."""
    exact, there = train(change=False, noise=0.05)
    rounded, here = train(change=True, noise=0.05)
    assert exact[0] - exact[-1] > 1.0
    assert max(abs(a - b) for a, b in zip(exact, rounded)) < 0.02 * (exact[0] - exact[-1])
    assert any(not torch.equal(here[path], there[path]) for path in here)


TIED = gpt(GPTConfig(layers=1, width=32, heads=4, context=16, vocab_size=61))


@pytest.mark.parametrize("kernels", [False, True], ids=["exactly", "by kernels"])
@pytest.mark.parametrize("compile", [Compile.NONE, pytest.param(Compile.STEP, marks=pytest.mark.long)])
def test_a_tied_head_in_8_bits_trains_with_all_checks_of_the_first_step(
    monkeypatch: pytest.MonkeyPatch, kernels: bool, compile: Compile
) -> None:
    """The checks run in float32, where no kernel takes a head and its embedding together: there they are added."""
    if kernels:  # of half precision, by their references
        for module in (rules, launches, shared_leaves):
            monkeypatch.setattr(
                module, "has_kernels", lambda r: isinstance(r, Pair) and r.right.dtype == torch.bfloat16
            )
    sampling, optimizer, key = poisson(64, expected_batch_size=8), optimizers.sgd(0.1), keys.key(5)
    mechanism, params = Mechanism(sampling, clipping.flat(max_norm=1.0), 1.0), TIED.init(keys.key(0))
    data = {"tokens": torch.randint(0, 61, (64, 17), generator=torch.Generator().manual_seed(1))}
    plan = make_plan(TIED, params, {"tokens": data["tokens"][:8]}, dtype=torch.bfloat16)
    batch, found = sample_batch(data, sampling, key, step=0, microbatch_size=8), []
    for own in (plan, forced(plan, *IN_8_BITS, leaves=["embed.tokens", "blocks.0.up", "blocks.0.down"])):
        execution = make_execution(compile=compile, backend="aot_eager")
        step = make_train_step(TIED, optimizer, mechanism=mechanism, plan=own, execution=execution)
        state, metrics = step(init_state(TIED, params, optimizer, mechanism), batch, key)
        found.append((tree.flatten(state.params), metrics.norms))
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-3)
    assert not torch.equal(found[1][0]["embed.tokens"], found[0][0]["embed.tokens"])
