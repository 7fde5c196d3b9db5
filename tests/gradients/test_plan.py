from __future__ import annotations

from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from fdp import ops, tree
from fdp.gradients import plan as plans
from fdp.gradients import trace_uses
from fdp.gradients.costs import CUDA_HALF, Choice, NormBy, SumBy, rates_of
from fdp.gradients.plan import Method, Plan, explain, make_plan
from fdp.gradients.timing import signature
from fdp.model import Block, Model, from_loss
from fdp.models import build
from fdp.types import FdpError
from tests.conftest import Case, case_named, randn

TRACED = [Method.GHOST, Method.GHOST_BK, Method.FLASH, Method.FLASH_BK, Method.AUTO]


def linear_plan(*, batch: int, tokens: int, width: int, dtype=torch.float32, **options) -> Plan:
    params = {"w": torch.zeros(width, width)}
    model = from_loss(lambda p, d: ops.linear(d["x"], p["w"]).sum((1, 2)), params)
    return make_plan(model, params, {"x": torch.zeros(batch, tokens, width)}, dtype=dtype, **options)


def plan_of(case: Case, method: Method, budget: float | None = None) -> Plan:
    return make_plan(*case, method=method, memory_budget=budget, dtype=torch.float64)


@cache
def plan_named(name: str, method: Method) -> Plan:
    return plan_of(case_named(name), method)


@pytest.mark.parametrize("method", [*TRACED, Method.MATERIALIZE])
def test_every_trainable_leaf_has_a_choice(case_name, case: Case, method):
    assert set(plan_named(case_name, method).choices) == case.model.trainable == set(tree.flatten(case.params))


def test_plain_training_makes_no_choice():
    plan = plan_of(case_named("gpt"), Method.NONE)
    assert (plan.choices, plan.private, plan.stored_bytes) == ({}, False, 0)
    assert plan_of(case_named("gpt"), Method.AUTO).private


@pytest.mark.parametrize("method", TRACED)
def test_a_leaf_that_the_loss_never_uses_is_an_error_naming_it(method):
    params = {"w": randn(5, 4), "layers": [{"idle": randn(3)}]}
    model = from_loss(lambda p, d: ops.linear(d["x"], p["w"]).sum(1), params)
    with pytest.raises(FdpError, match=r"never uses \['layers\.0\.idle'\]; freeze"):
        make_plan(model, params, {"x": randn(3, 4)}, method=method)
    frozen = model._replace(frozen=frozenset({"layers.0.idle"}))
    assert set(make_plan(frozen, params, {"x": randn(3, 4)}, method=method, dtype=torch.float64).choices) == {"w"}


def unshaped(kind: str) -> tuple[Model, dict, dict]:
    params, data = {"w": randn(5, 4)}, {"x": randn(3, 2, 4)}
    over = {"scalar": (0, 1, 2), "tokens": (2,), "other": (0, 2)}[kind]
    return from_loss(lambda p, d: ops.linear(d["x"], p["w"]).sum(over), params), params, data


@pytest.mark.parametrize(("kind", "got"), [("scalar", r"\(\)"), ("tokens", r"\(3, 2\)"), ("other", r"\(2,\)")])
@pytest.mark.parametrize(
    "method",
    [
        *TRACED,
        Method.MATERIALIZE,
        Method.NONE,
    ],
)
def test_a_loss_that_is_not_one_number_per_sample_is_refused(kind, got, method):
    model, params, data = unshaped(kind)
    with pytest.raises(FdpError, match=rf"loss of every sample, shape \(3,\), got {got}; do not average"):
        make_plan(model, params, data, method=method, dtype=torch.float64)


def test_a_loss_that_is_not_a_tensor_is_refused():
    params = {"w": randn(5, 4)}
    model = from_loss(lambda p, d: (ops.linear(d["x"], p["w"]).sum(1),), params)  # type: ignore[arg-type]
    with pytest.raises(FdpError, match="got tuple"):
        make_plan(model, params, {"x": randn(3, 4)}, dtype=torch.float64)


def table(B: int, T: int, n: int) -> dict[NormBy, float]:
    """The table of fdp.gradients.plan for B samples of T tokens and a square float32 weight.

    Moving an element counts 32 flops; a Gram matrix of float32 data is made in float64, at twice the price, and so are
    the gradients of a sum from pairs, unless there is one token.
    """
    W, moved = 2 * B * T * n * n, 32 * B * n * n
    formed = 2 * moved if T > 1 else 0
    flops = {
        NormBy.KEEP: W + 2 * moved,
        NormBy.DIRECT: W + moved + W + 2 * formed,
        NormBy.GRAM: 2 * (2 * B * T * T * (n + n)) + W + formed,
    }
    return {norm: count / rates_of(torch.device("cpu"), torch.float32).matrix for norm, count in flops.items()}


@pytest.mark.parametrize(
    ("tokens", "width", "norm"), [(1, 64, NormBy.GRAM), (12, 8, NormBy.KEEP), (512, 64, NormBy.KEEP)]
)
def test_auto_takes_the_cheapest_row_of_the_table(tokens, width, norm):
    costs = table(2, tokens, width)
    assert min(costs, key=lambda n: costs[n]) is norm  # each case is decided by the table, not by the code
    (choice,) = linear_plan(batch=2, tokens=tokens, width=width, method=Method.AUTO).choices.values()
    assert choice.norm is norm
    assert choice.seconds == pytest.approx(costs[norm])
    assert choice.sum is (SumBy.REUSE if norm is NormBy.KEEP else SumBy.PAIR)


def test_gram_norms_of_repeated_uses_pay_for_their_cross_terms():
    params, (B, T, n) = {"w": torch.zeros(8, 8)}, (2, 12, 8)

    def loss(p, d):
        return ops.linear(ops.linear(ops.linear(d["x"], p["w"]), p["w"]), p["w"]).sum((1, 2))

    plan = make_plan(from_loss(loss, params), params, {"x": torch.zeros(B, T, n)}, method=Method.GHOST_BK)
    grams, sums = 6 * 2 * (2 * B * T * T * (n + n)), 3 * (2 * B * T * n * n)  # 3 squares and 3 cross terms
    formed = 2 * 32 * B * n * n  # the gradient of each sample, in float64
    rate = rates_of(torch.device("cpu"), torch.float32).matrix
    assert plan.choices["w"].seconds == pytest.approx((grams + sums + formed) / rate)
    assert plan.stored_bytes == 3 * B * T * (n + n) * 4


def test_stored_bytes_are_those_of_the_table():
    B, T, n = 2, 12, 8
    pairs = linear_plan(batch=B, tokens=T, width=n, method=Method.GHOST_BK)
    assert pairs.stored_bytes == B * T * (n + n) * 4
    assert linear_plan(batch=B, tokens=T, width=n, method=Method.MATERIALIZE).stored_bytes == B * n * n * 4
    assert linear_plan(batch=B, tokens=512, width=n, method=Method.AUTO).stored_bytes == B * n * n * 4
    assert linear_plan(batch=B, tokens=T, width=n, method=Method.GHOST).stored_bytes == 0
    half = linear_plan(batch=B, tokens=T, width=n, method=Method.GHOST_BK, dtype=torch.bfloat16)
    assert half.stored_bytes == B * T * (n + n) * 2


def test_many_gradients_are_formed_in_float64_a_few_at_a_time_rather_than_stored():
    few, many = (linear_plan(batch=2, tokens=4, width=width, method=Method.AUTO) for width in (2048, 4096))
    assert [plan.choices["w"].norm for plan in (few, many)] == [NormBy.KEEP, NormBy.GRAM]


def test_a_large_vocabulary_is_never_stored_per_sample():
    params = {"table": torch.zeros(5000, 8)}
    model = from_loss(lambda p, d: ops.embedding(d["ids"], p["table"]).sum((1, 2)), params)
    plan = make_plan(model, params, {"ids": torch.zeros(4, 64, dtype=torch.int64)}, method=Method.AUTO)
    assert plan.choices["table"].norm is NormBy.GRAM
    assert plan.stored_bytes == 4 * 64 * (8 * 4 + 8)  # gradients and ids


def abstract(name: str, *, context: int, batch: int):
    """A model, parameters that take no memory, and a microbatch."""
    model = build(name, context=context)
    flat = {path: torch.zeros(()).expand(leaf.shape) for path, leaf in model.leaves.items()}
    return model, tree.nest(flat), {"tokens": torch.zeros(batch, context + 1, dtype=torch.int64)}


def test_planning_a_large_model_takes_no_memory(monkeypatch):
    real, largest = torch.empty, []

    def empty(*size, **options):
        out = real(*size, **options)
        largest.append(0 if isinstance(out, FakeTensor) or out.is_meta else out.untyped_storage().nbytes())
        return out

    monkeypatch.setattr(torch, "empty", empty)
    make_plan(*abstract("gpt-nano", context=16, batch=2), method=Method.AUTO)
    assert max(largest) < 1000


def test_ghost_methods_fix_the_norm_and_differ_in_the_sum():
    case = case_named("gpt")
    book, second = plan_of(case, Method.GHOST_BK), plan_of(case, Method.GHOST)
    assert {choice.sum for choice in second.choices.values()} == {SumBy.SECOND_BACKWARD}
    assert second.stored_bytes == 0
    for path, leaf in case.model.leaves.items():
        if len(leaf.shape) == 2 and path != "embed.positions":
            assert book.choices[path][:2] == (NormBy.GRAM, SumBy.PAIR)
            assert second.choices[path].norm is NormBy.GRAM


def test_materialize_stores_every_gradient():
    plan = plan_of(case_named("loop"), Method.MATERIALIZE)
    assert {choice[:2] for choice in plan.choices.values()} == {(NormBy.VMAP, SumBy.REUSE)}
    assert plan.stored_bytes == 3 * (16 + 4) * 8


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("name", ["gpt", "cnn", "all-ways"])
@pytest.mark.parametrize("method", [Method.AUTO, Method.FLASH])
def test_the_memory_budget_is_respected(method, name, fraction):
    case, free = case_named(name), plan_named(name, method)
    budget = fraction * free.stored_bytes
    plan = plan_of(case, method, budget)
    assert plan.stored_bytes <= budget
    second = [choice.sum is SumBy.SECOND_BACKWARD for choice in plan.choices.values()]
    assert all(second) or not any(second)
    assert set(plan.choices) == set(free.choices)
    if fraction >= 1:
        assert plan.choices == free.choices
    if all(second):
        assert plan.stored_bytes == 0
        assert all(choice.norm is not NormBy.KEEP for choice in plan.choices.values())


def test_a_tighter_budget_stores_a_smaller_form_before_it_goes_back_twice():
    loose = linear_plan(batch=2, tokens=2, width=16, method=Method.AUTO)
    tight = linear_plan(batch=2, tokens=2, width=16, method=Method.AUTO, memory_budget=loose.stored_bytes - 1)
    (choice,) = tight.choices.values()
    assert choice.sum is SumBy.PAIR
    none = linear_plan(batch=2, tokens=2, width=16, method=Method.AUTO, memory_budget=choice.stored_bytes - 1)
    assert next(iter(none.choices.values())).sum is SumBy.SECOND_BACKWARD


@pytest.mark.parametrize("method", [*TRACED, Method.MATERIALIZE])
def test_explain_prints_every_use(case_name, method):
    plan = plan_named(case_name, method)
    text = explain(plan)
    assert f"method {method.value}, microbatch 3, float64" in text
    uses = [use for block in plan.uses for use in block]
    lines = text.splitlines()
    for use in uses:
        choice: Choice = plan.choices[use.path]
        wanted = (
            use.path,
            use.rule,
            "x".join(map(str, use.input_shape)),
            choice.norm.value,
            choice.sum.value,
        )
        assert any(all(part in line for part in wanted) for line in lines)
    assert len(lines) == 3 + (len(uses) or len(plan.choices))


# ---------------------------------------------------------------- as on a GPU, in half precision


@pytest.fixture
def _gpu(monkeypatch):
    """The rates of a GPU, without one."""
    monkeypatch.setattr(plans, "rates_of", lambda device, dtype: CUDA_HALF)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(("tokens", "norm"), [(128, NormBy.SYMMETRIC), (300, NormBy.SYMMETRIC), (1024, NormBy.DIRECT)])
@pytest.mark.parametrize(
    ("method", "budget", "by_sum"), [(Method.FLASH_BK, None, SumBy.PAIR), (Method.FLASH, 0.0, SumBy.SECOND_BACKWARD)]
)
def test_flash_without_room_and_flash_bk_take_the_cheaper_of_direct_and_symmetric(method, budget, by_sum, tokens, norm):
    """Symmetric while T + tile < 2 d p / (d + p), which is 512 here."""
    plan = linear_plan(batch=2, tokens=tokens, width=512, method=method, dtype=torch.bfloat16, memory_budget=budget)
    (choice,) = plan.choices.values()
    assert choice[:2] == (norm, by_sum)
    assert (choice.stored_bytes == 0) == (method is Method.FLASH)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("tokens", [4, 128, 1024])
def test_flash_stores_gradients_and_goes_back_once(tokens):
    """Also of short sequences, where another way would be cheaper."""
    (choice,) = linear_plan(
        batch=2, tokens=tokens, width=512, method=Method.FLASH, dtype=torch.bfloat16
    ).choices.values()
    assert choice[:2] == (NormBy.KEEP, SumBy.REUSE)
    assert choice.stored_bytes == 2 * 512 * 512 * 2


@pytest.mark.parametrize("name", ["gpt", "gpt-untied", "llama", "cnn", "convolutions", "all-ways"])
def test_flash_stores_every_leaf_but_tables(name):
    plan = plan_named(name, Method.FLASH)
    tables = {use.path for block in plan.uses for use in block if use.rule == "embedding"}
    for path, choice in plan.choices.items():
        if path not in tables:
            assert choice[:2] == (NormBy.KEEP, SumBy.REUSE), path
        assert choice.norm is not NormBy.GRAM
        assert choice.sum is not SumBy.SECOND_BACKWARD


def table_plan(*, batch: int, tokens: int, rows: int, method: Method, **options) -> Plan:
    params = {"w": torch.zeros(rows, 64)}
    model = from_loss(lambda p, d: ops.embedding(d["ids"], p["w"]).sum((1, 2)), params)
    data = {"ids": torch.zeros(batch, tokens, dtype=torch.int64)}
    return make_plan(model, params, data, method=method, dtype=torch.bfloat16, **options)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(("rows", "kept"), [(50257, False), (64, True)])
def test_flash_stores_an_embedding_only_if_that_is_cheapest(rows, kept):
    (choice,) = table_plan(batch=4, tokens=512, rows=rows, method=Method.FLASH).choices.values()
    assert (choice.norm is NormBy.KEEP) == kept
    if not kept:
        assert choice == next(iter(table_plan(batch=4, tokens=512, rows=rows, method=Method.FLASH_BK).choices.values()))


@pytest.mark.usefixtures("_gpu")
def test_under_a_budget_flash_chooses_among_its_own_options():
    """Gram matrices, stored, are not: though they would be the cheapest here by their measured times."""
    times = {
        signature(use, by, torch.bfloat16): 1e-9 if by is NormBy.GRAM else 1e-3
        for use in linear_plan(batch=2, tokens=8, width=64, dtype=torch.bfloat16).uses[0]
        for by in (NormBy.KEEP, NormBy.DIRECT, NormBy.GRAM, NormBy.SYMMETRIC)
    }
    options = {"batch": 2, "tokens": 8, "width": 64, "dtype": torch.bfloat16, "timings": times}
    pairs = 2 * 8 * (64 + 64) * 2
    for budget, by_sum in ((pairs, SumBy.PAIR), (pairs - 1, SumBy.SECOND_BACKWARD)):
        for method, grams in ((Method.AUTO, True), (Method.FLASH, False)):
            (choice,) = linear_plan(method=method, memory_budget=budget, **options).choices.values()
            assert choice.sum is by_sum
            assert (choice.norm is NormBy.GRAM) == grams


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("name", ["gpt", "gpt-untied", "llama"])
def test_on_a_gpu_a_head_is_chosen_by_its_price_like_other_leaves(name):
    case = case_named(name)
    head = case.model.blocks[-1].head
    assert head is not None
    path = case.model.blocks[-1].params[head.weight]
    for method in (Method.FLASH_BK, Method.GHOST_BK):
        plan = make_plan(*case, method=method, dtype=torch.bfloat16)
        assert plan.choices[path].norm is not NormBy.KEEP
    frozen = case._replace(model=case.model._replace(frozen=frozenset({path})))
    assert path not in make_plan(*frozen, method=Method.AUTO, dtype=torch.bfloat16).choices
    small = make_plan(*case, method=Method.AUTO, dtype=torch.bfloat16, memory_budget=0)
    assert small.stored_bytes == 0
    assert small.choices[path].sum is SumBy.SECOND_BACKWARD


def test_on_a_cpu_a_head_is_a_leaf_like_others():
    """Its per-sample gradients are the last thing to keep."""
    plan = make_plan(*abstract("gpt-nano", context=8, batch=2), method=Method.AUTO)
    assert plan.choices["embed.tokens"].norm is not NormBy.KEEP


@pytest.mark.parametrize("name", ["gpt-nano", "llama-nano"])
def test_equal_blocks_are_traced_once_with_the_uses_that_each_would_have(name, monkeypatch):
    model, params, microbatch = abstract(name, context=8, batch=2)
    if name == "gpt-nano":
        model = model._replace(frozen=frozenset(path for path in model.leaves if path.startswith("blocks.1.")))
    count, real = [], trace_uses.trace_tape
    monkeypatch.setattr(trace_uses, "trace_tape", lambda *a: count.append(a[0].name) or real(*a))
    found = make_plan(model, params, microbatch).uses
    kinds = 3 if name == "llama-nano" else 4  # a frozen layer is a kind of its own
    assert len(count) == 2 * kinds, "every kind at two batch sizes"
    monkeypatch.setattr(trace_uses, "_kind", lambda block, *_: block.name)
    assert make_plan(model, params, microbatch).uses == found
    assert len(count) == 2 * kinds + 2 * len(model.blocks)


def test_blocks_of_different_kinds_are_traced_apart(monkeypatch):
    """One function on leaves, inputs and sharing of other shapes, and another function on the same shapes."""

    def once(p, h, d):
        return ops.linear(h, p["w"])

    def twice(p, h, d):
        return ops.linear(ops.linear(h, p["w"]), p["v"])

    def again(p, h, d):
        return ops.linear(ops.linear(h, p["w"]), p["w"])

    shapes = {"a": (4, 4), "b": (4, 4), "c": (3, 4), "d": (3, 3), "e": (3, 3), "f": (3, 3), "g": (3, 3), "h": (3, 3)}
    params = {path: torch.zeros(shape) for path, shape in shapes.items()}
    blocks = (
        Block("input", {}, lambda p, _, d: d["x"]),
        *(Block(path, {"w": path}, once) for path in "abcd"),
        Block("tokens", {}, lambda p, h, d: h.unsqueeze(1).expand(-1, 2, -1)),
        Block("e", {"w": "e"}, once),
        Block("h", {"w": "h"}, again),
        Block("fg", {"w": "f", "v": "g"}, twice),
        Block("ff", {"w": "f", "v": "f"}, twice),
        Block("loss", {}, lambda p, h, d: h.sum((1, 2))),
    )
    leaves = from_loss(lambda p, d: d["x"].sum(1), params).leaves
    model, microbatch = Model("kinds", leaves, blocks), {"x": torch.zeros(2, 4)}
    count, real = [], trace_uses.trace_tape
    monkeypatch.setattr(trace_uses, "trace_tape", lambda *a: count.append(a[0].name) or real(*a))
    found = make_plan(model, params, microbatch).uses
    assert count == 2 * [block.name for block in blocks if block.name != "b"]
    monkeypatch.setattr(trace_uses, "_kind", lambda block, *_: block.name)
    assert make_plan(model, params, microbatch).uses == found
