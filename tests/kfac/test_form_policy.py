"""The forms that policies choose, their costs, and the storage of factors."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fdp import keys
from fdp.kfac import factors
from fdp.kfac.factor_forms import Form
from fdp.kfac.factor_storage import MAX_DEVICE_BYTES, CompressedFactor, Where, compress, store_device
from fdp.kfac.form_policy import (
    MAX_SIDE_BYTES,
    CostModel,
    FormPair,
    FormRow,
    Policy,
    auto,
    by_path,
    everything,
    forms_of,
    plan_forms,
    policy_named,
    side_cost,
)
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.layers import Survey, survey
from fdp.kfac.measure.collect import check_forms, collect
from fdp.kfac.measure.estimator import Estimator, Sharing
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.ranks.gather_columns import CAP_COLUMNS
from fdp.kfac.types import ColumnsFactor, Factor, SoftmaxFactor
from fdp.model import Model
from fdp.models import GPTConfig, gpt
from fdp.parallel.sharding import abstract_params
from fdp.types import FdpError

SKIPPED = (Form.SKIP, Form.SKIP)


def small(*, tied: bool = True) -> Model:
    return gpt(GPTConfig(layers=1, width=8, heads=2, context=6, vocab_size=13, tied=tied))


@cache
def large() -> Model:
    """Return the layers of GPT-2 Large, once each; parameters are never drawn."""
    return gpt(GPTConfig(layers=1, width=1280, heads=20, context=512, vocab_size=50257, tied=False))


def survey_of(model: Model) -> Survey:
    assert model.context is not None
    tokens = {"tokens": torch.zeros(2, model.context + 1, dtype=torch.int64)}
    return survey(model, abstract_params(model, None), tokens)


@cache
def survey_of_large() -> Survey:
    return survey_of(large())


def plan(
    model: Model,
    policy: Policy,
    *,
    samples: int = 4,
    sharing: Sharing = Sharing.EXPAND,
    via: Via = Via.CHOLESKY,
    factor_period: int = 10,
    inverse_period: int = 10,
) -> dict[str, FormRow]:
    known = survey_of_large() if model is large() else survey_of(model)
    rows = plan_forms(
        model,
        known,
        policy=policy,
        sharing=sharing,
        samples=samples,
        costs=CostModel(via, factor_period, inverse_period),
    )
    assert [row.layer for row in rows] == list(known.layers)
    try:
        check_forms(model, known, forms_of(rows), sharing)
    except FdpError as error:
        raise AssertionError("collect would refuse what the policy chose") from error
    return {row.layer.weight: row for row in rows}


def forms(row: FormRow) -> FormPair:
    return row.left, row.right


def test_all_is_dense_on_both_sides_and_the_head_a_softmax():
    rows = plan(small(tied=False), everything())
    assert forms(rows["blocks.0.qkv"]) == (Form.DENSE, Form.DENSE)
    assert forms(rows["blocks.0.down"]) == (Form.DENSE, Form.DENSE)
    assert forms(rows["head.weight"]) == (Form.SOFTMAX, Form.DENSE)
    assert forms(rows["embed.tokens"]) == (Form.DIAGONAL, Form.DENSE)
    assert forms(rows["blocks.0.norm1"]) == (Form.DIAGONAL, Form.SKIP)
    assert forms(plan(small(), everything())["embed.tokens"]) == (Form.SOFTMAX, Form.DENSE)


def test_auto_takes_the_cheaper_of_matrix_and_columns():
    rows = plan(large(), auto(rho=100.0), samples=1)  # 512 tokens, 1280 and 5120 wide: fewer than half of either
    assert forms(rows["blocks.0.up"]) == (Form.COLUMNS, Form.COLUMNS)
    assert forms(rows["blocks.0.qkv"]) == (Form.COLUMNS, Form.COLUMNS)
    rows = plan(large(), auto(rho=100.0), samples=4)  # 2048: fewer than half of 5120, more than 1280
    assert forms(rows["blocks.0.up"]) == (Form.COLUMNS, Form.DENSE)
    assert forms(rows["blocks.0.down"]) == (Form.DENSE, Form.COLUMNS)
    assert forms(rows["head.weight"]) == (Form.SOFTMAX, Form.DENSE)
    rows = plan(large(), auto(rho=100.0), samples=16)  # 8192
    assert forms(rows["blocks.0.up"]) == (Form.DENSE, Form.DENSE)


def test_one_row_per_sample_makes_columns_cheap():
    rows = plan(large(), auto(rho=100.0), samples=16, sharing=Sharing.REDUCE)
    assert forms(rows["blocks.0.up"]) == (Form.COLUMNS, Form.COLUMNS)


def test_beyond_the_cap_or_the_bytes_a_head_is_a_diagonal():
    assert CAP_COLUMNS == 8192
    for policy, samples in ((auto(rho=1e9), 17), (auto(rho=1e9, cap=511), 1), (auto(rho=1e9, side_bytes=10**8), 1)):
        row = plan(large(), policy, samples=samples)["head.weight"]
        assert row.left is Form.DIAGONAL  # the matrix would be 20 GB
        assert "other forms have more" in row.why
    assert MAX_SIDE_BYTES < 2 * 4 * 50257**2


def test_beyond_rho_the_more_expensive_side_becomes_diagonal_first():
    rows = [plan(large(), auto(rho=rho), samples=4)["blocks.0.up"] for rho in (1.0, 0.8, 0.01, 1e-4, 0.0)]
    assert [forms(row) for row in rows] == [
        (Form.COLUMNS, Form.DENSE),
        (Form.DIAGONAL, Form.DENSE),
        (Form.DIAGONAL, Form.DIAGONAL),
        SKIPPED,
        SKIPPED,
    ]
    assert [row.flops for row in rows] == sorted((row.flops for row in rows), reverse=True)
    assert "diagonal of the more expensive side" in rows[1].why


@given(rho=st.floats(0.0, 3.0), samples=st.integers(1, 40), period=st.integers(1, 100))
@settings(deadline=None, max_examples=30)
def test_no_layer_costs_more_than_rho_of_its_step(rho, samples, period):
    for row in plan(large(), auto(rho=rho), samples=samples, factor_period=period, inverse_period=period).values():
        leaf = large().leaves[row.layer.weight].shape
        tokens = 512 if len(leaf) > 1 and "positions" not in row.layer.weight else 1
        parameters = math.prod(leaf) + (max(leaf[:1]) if row.layer.bias else 0)
        assert row.flops <= rho * 6 * samples * tokens * parameters * (1 + 1e-9)


def test_rare_updates_are_cheaper_and_eigenvalues_dearer():
    often, seldom = (plan(large(), everything(), inverse_period=i, factor_period=i)["blocks.0.up"] for i in (1, 10))
    eigen = plan(large(), everything(), via=Via.EIGEN)["blocks.0.up"]
    assert seldom.flops < often.flops
    assert eigen.flops > seldom.flops
    assert often.bytes == seldom.bytes == 8 * (5120**2 + 1281**2)


def test_costs_are_those_of_the_table():
    costs = CostModel(Via.CHOLESKY, factor_period=2, inverse_period=5, column_bytes=2)
    cost = {form: side_cost(form, 10, 6, 4, costs=costs) for form in Form}
    assert cost[Form.DENSE].flops == 2 * 4 * 100 / 2 + 1000 / 5 + 2 * 100 * 6
    assert cost[Form.COLUMNS].flops == pytest.approx((16 * 10 + 64 / 3) / 5 + 4 * 4 * 10 * 6)
    assert cost[Form.DIAGONAL].flops == 2 * 4 * 10 / 2 + 10 / 5 + 60
    assert cost[Form.COLUMNS] == cost[Form.SOFTMAX]
    assert cost[Form.SKIP] == (0.0, 0)
    assert [cost[form].bytes for form in (Form.DENSE, Form.COLUMNS, Form.DIAGONAL)] == [800, 40 * 6 + 64, 80]


def test_forms_by_path():
    chosen = by_path({"*.up": (Form.COLUMNS, Form.DENSE), "blocks.*": Form.DIAGONAL, "head.weight": Form.DENSE})
    model = gpt(GPTConfig(layers=1, width=8, heads=2, context=6, vocab_size=13, tied=False))
    with pytest.raises(FdpError, match=r"blocks\.0\.norm1: expected the forms \(diagonal, skip\)"):
        plan(model, chosen)
    rows = plan(model, by_path({"*.up": (Form.COLUMNS, Form.DENSE), "*.out": Form.DIAGONAL}))
    assert forms(rows["blocks.0.up"]) == (Form.COLUMNS, Form.DENSE)
    assert forms(rows["blocks.0.out"]) == (Form.DIAGONAL, Form.DIAGONAL)
    assert forms(rows["head.weight"]) == SKIPPED
    assert rows["head.weight"].flops == rows["head.weight"].bytes == 0


def test_collect_returns_the_forms_of_the_policy():
    model = small(tied=False)
    data = {"tokens": torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(0))}
    rows = plan(model, auto(rho=1e9), samples=2)
    params = model.init(keys.key(0))
    chosen = forms_of(list(rows.values()))
    estimator = Estimator(survey(model, params, data), chosen, Fisher.EMPIRICAL, Sharing.EXPAND)
    found = collect(model, params, data, torch.ones(2), estimator=estimator, key=keys.key(1))
    kinds = {
        Form.DENSE: "DenseFactor",
        Form.COLUMNS: "ColumnsFactor",
        Form.DIAGONAL: "DiagonalFactor",
        Form.SOFTMAX: "SoftmaxFactor",
        Form.SKIP: "NoneType",
    }
    assert set(found) == {row.layer for row in rows.values()}
    for layer, curvature in found.items():
        row = rows[layer.weight]
        assert [type(side).__name__ for side in curvature] == [kinds[row.left], kinds[row.right]]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: auto(rho=-0.1), "rho: expected 0"),
        (lambda: auto(rho=math.nan), "rho: expected 0"),
        (lambda: auto(cap=0), "cap: expected at least 1"),
        (lambda: auto(side_bytes=0), "side_bytes"),
        (lambda: policy_named("some"), "expected one of all, auto"),
        (lambda: policy_named("all", cap=0), "cap: expected at least 1"),
        (lambda: plan(small(), everything(), factor_period=0), "factor_period: expected at least 1 step, got 0"),
        (lambda: plan(small(), everything(), inverse_period=-1), "inverse_period: expected at least 1 step"),
        (lambda: plan(small(), everything(), samples=0), "samples: expected at least 1"),
        (lambda: plan(small(), by_path({"nothing.*": Form.DENSE})), "to match a layer, got 'nothing"),
        (lambda: plan(small(), by_path({"*.up": Form.SOFTMAX})), "expected the form softmax only on the left"),
        (lambda: compress(COLUMNS, device=CPU, dtype=torch.int8), "floating-point"),
    ],
)
def test_invalid_settings_are_refused(act, words):
    with pytest.raises(FdpError, match=words):
        act()


def test_policies_by_name():
    for name, policy in (("all", everything()), ("auto", auto())):
        assert plan(small(), policy_named(name)) == plan(small(), policy)
    assert plan(large(), policy_named("auto", rho=0.0))["blocks.0.up"].left is Form.SKIP


# -------------------------------------------------------------------------------------------------------------- store
CPU = torch.device("cpu")
COLUMNS = factors.columns(torch.randn(5, 9, generator=torch.Generator().manual_seed(0)), weight=5.0)


def decompress(stored: CompressedFactor) -> Factor:
    factor, scale = stored
    if scale is None:
        return factor
    assert isinstance(factor, ColumnsFactor | SoftmaxFactor)
    return factor._replace(columns=factor.columns.to(scale.dtype) / scale)


@example(sizes=[-36.0, 36.0, 0.0], dtype=torch.float16)
@given(
    sizes=st.lists(st.floats(-36, 36), min_size=1, max_size=6), dtype=st.sampled_from([torch.float16, torch.bfloat16])
)
@settings(deadline=None, max_examples=60)
def test_columns_of_any_size_come_back_within_eps_of_their_largest_entry(sizes, dtype):
    rows = torch.randn(len(sizes), 9, generator=torch.Generator().manual_seed(1))
    factor = factors.columns(rows * torch.tensor([10.0**size for size in sizes])[:, None], weight=3.0)
    stored = compress(factor, device=CPU, dtype=dtype)
    back = decompress(stored)
    assert isinstance(stored.factor, ColumnsFactor)
    assert isinstance(back, ColumnsFactor)
    assert stored.factor.columns.dtype == dtype
    assert back.columns.dtype == torch.float32
    largest = factor.columns.abs().amax(0)
    assert ((back.columns - factor.columns).abs() <= torch.finfo(dtype).eps * largest).all()
    assert torch.equal(back.weight, factor.weight)


def test_only_the_columns_of_a_softmax_are_compressed():
    factor = factors.softmax(torch.randn(4, 6).softmax(-1), weight=4.0)
    stored = compress(factor, device=CPU)
    assert isinstance(stored.factor, SoftmaxFactor)
    assert [x.dtype for x in stored.factor] == [torch.float32, torch.float16, torch.float32]
    back = decompress(stored)
    assert isinstance(back, SoftmaxFactor)
    assert torch.equal(back.total, factor.total)
    torch.testing.assert_close(back.columns, factor.columns, rtol=1e-3, atol=1e-3)


def test_sums_are_never_compressed_and_dtype_none_changes_nothing():
    dense = factors.dense(torch.randn(4, 6), weight=4.0)
    assert compress(dense, device=CPU) == CompressedFactor(dense, None)
    assert torch.equal(decompress(compress(COLUMNS, device=CPU, dtype=None))[0], COLUMNS.columns)


def test_zeros_nans_and_no_columns_are_stored_unchanged():
    rows = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1000.0], [1e-40, 0.0]])
    back = decompress(compress(factors.columns(rows, weight=4.0), device=CPU))
    assert isinstance(back, ColumnsFactor)
    torch.testing.assert_close(back.columns.mT, rows, equal_nan=True, rtol=1e-3, atol=0.0)
    none = factors.columns(torch.zeros(0, 3), weight=0.0)
    back = decompress(compress(none, device=CPU))
    assert isinstance(back, ColumnsFactor)
    assert back.columns.shape == (3, 0)


def test_large_factors_go_to_cpu_memory():
    home = torch.device("meta")
    assert MAX_DEVICE_BYTES == 500_000_000
    assert store_device(Where.AUTO, MAX_DEVICE_BYTES, home=home) == home
    assert store_device(Where.AUTO, MAX_DEVICE_BYTES + 1, home=home) == CPU
    assert store_device(Where.DEVICE, MAX_DEVICE_BYTES + 1, home=home) == home
    assert store_device(Where.CPU, 0, home=home) == CPU
