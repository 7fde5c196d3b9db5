"""The factors of one block's records against the definition, row by row; padding holds NaN throughout."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import keys
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.rules import Dense, OneHot, Pair, Record
from fdp.kfac import factors
from fdp.kfac.factor_forms import Form
from fdp.kfac.measure.block_factors import Task, TokenMask, make_token_mask, run_tasks
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.types import Factor
from fdp.models import GPTConfig, gpt
from tests.conftest import Case, case_named, randn
from tests.kfac_cases import assert_same, curvatures, surveyed

BATCH, TOKENS, INPUTS, OUTPUTS = 3, 4, 5, 6
MASK = torch.tensor([1.0, 0.0, 1.0])
PRESENT = torch.tensor([[True, True, False, True], [True] * 4, [False, True, True, False]])
EXACT = {torch.float64: 1e-12, torch.bfloat16: 1e-5}

forms = pytest.mark.parametrize("form", [Form.DENSE, Form.COLUMNS, Form.DIAGONAL])
masks = pytest.mark.parametrize("present", [None, PRESENT], ids=["all", "padded"])


def counted(present: Tensor | None) -> Tensor:
    return (MASK > 0)[:, None] & (torch.ones(BATCH, TOKENS, dtype=torch.bool) if present is None else present)


def spoilt(rows: Tensor, present: Tensor | None) -> Tensor:
    """Set the rows of padding to NaN or infinity."""
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan], dtype=rows.dtype)
    return torch.where(counted(present)[..., None], rows, bad[:, None])


def pair(present: Tensor | None, dtype: torch.dtype) -> tuple[Pair, Tensor, Tensor]:
    """Return a record with spoilt padding, and its output and input rows before that."""
    g, x = randn(BATCH, TOKENS, OUTPUTS, seed=1).to(dtype), randn(BATCH, TOKENS, INPUTS, seed=2).to(dtype)
    record = Pair(spoilt(g, present).unsqueeze(1), spoilt(x, present).unsqueeze(1), (OUTPUTS, INPUTS))
    return record, g.double(), x.double()


def task(form: Form, **fields: Any) -> Task:
    usual = Task((0,), False, True, form, bias=False, elementwise=False, reduced=False, last=True, positions=(TOKENS,))
    return usual._replace(**fields)


def places_of(present: Tensor | None, dtype: torch.dtype) -> TokenMask:
    return make_token_mask(MASK, present, [(TOKENS,), (TOKENS, TOKENS)], dtype)


def run(tasks: list[Task], records: list[Record], places: TokenMask) -> list[Any]:
    return run_tasks(tasks, records, places)


def assert_matrix(factor: Factor | Tensor, form: Form, rows: Tensor, dtype: torch.dtype) -> None:
    """Compare with ``rows^T rows`` of (positions, n), or its diagonal."""
    assert not isinstance(factor, Tensor)
    total = factors.to_dense(factor).total
    assert total.dtype == factors.sum_dtype(dtype)
    expected = rows.mT @ rows
    expected = expected.diag().diag() if form is Form.DIAGONAL else expected
    torch.testing.assert_close(total.double().cpu(), expected, rtol=EXACT[dtype], atol=EXACT[dtype])


@forms
@masks
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("bias", [False, True])
def test_inputs_are_divided_by_their_samples_number_of_positions(form, present, dtype, bias):
    record, _, x = pair(present, dtype)
    (factor,) = run([task(form, bias=bias)], [record], places_of(present, dtype))
    x = torch.cat([x, torch.ones(BATCH, TOKENS, 1)], 2) if bias else x
    counts = counted(present).double()
    root = (counts / counts.sum(1, keepdim=True).clamp_min(1)).sqrt()
    assert_matrix(factor, form, (x * root[..., None]).flatten(0, 1), dtype)


@forms
@masks
@pytest.mark.parametrize("dtype", EXACT)
def test_output_gradients_are_not_scaled(form, present, dtype):
    record, g, _ = pair(present, dtype)
    (factor,) = run([task(form, left=True, inputs=False, positions=())], [record], places_of(present, dtype))
    assert_matrix(factor, form, (g * counted(present)[..., None]).flatten(0, 1), dtype)


@forms
@masks
@pytest.mark.parametrize("dtype", EXACT)
def test_reduce_sums_a_samples_rows_before_squaring_or_returns_them(form, present, dtype):
    (record, g, x), places = pair(present, dtype), places_of(present, dtype)
    tasks = [
        task(form, left=True, inputs=False, positions=(), reduced=True),
        task(form, bias=True, reduced=True),
        task(form, bias=True, reduced=True, last=False),
    ]
    left, right, rows = run(tasks, [record], places)
    counts = counted(present)[..., None].double()
    assert_matrix(left, form, (g * counts).sum(1), dtype)
    x = torch.cat([x, torch.ones(BATCH, TOKENS, 1)], 2)
    mean = (x * counts).sum(1) / counts.sum(1).clamp_min(1)
    assert_matrix(right, form, mean, dtype)
    assert rows.dtype == factors.sum_dtype(dtype)
    torch.testing.assert_close(rows.double(), mean, rtol=EXACT[dtype], atol=EXACT[dtype])


@pytest.mark.parametrize("reduced", [False, True])
def test_two_uses_in_a_block_are_positions_of_one_layer(reduced):
    (record, _, x), places = pair(None, torch.float64), places_of(None, torch.float64)
    other = record._replace(right=record.right * 2)
    two = task(Form.DENSE, records=(0, 1), positions=(TOKENS, TOKENS), reduced=reduced)
    (factor,) = run([two], [record, other], places)
    rows = torch.cat([x, 2 * x], 1)[[0, 2]]
    rows = rows.mean(1) if reduced else rows.flatten(0, 1) / (2 * TOKENS) ** 0.5
    assert_matrix(factor, Form.DENSE, rows, torch.float64)


@masks
@pytest.mark.parametrize("reduced", [False, True])
def test_groups_are_columns_side_by_side_on_both_sides(reduced, present):
    g, x = randn(BATCH, 2, TOKENS, OUTPUTS, seed=1), randn(BATCH, 2, TOKENS, INPUTS, seed=2)
    lefts, rights = (z.transpose(1, 2).clone() for z in (g, torch.cat([x, torch.ones(BATCH, 2, TOKENS, 1)], 3)))
    g[1], x[1] = torch.nan, torch.nan
    both = [
        task(Form.DIAGONAL, left=True, inputs=False, positions=(), reduced=reduced),
        task(Form.DIAGONAL, bias=True, positions=(TOKENS,), reduced=reduced),
    ]
    left, right = run(both, [Pair(g, x, (2 * OUTPUTS, INPUTS))], places_of(present, torch.float64))
    counts = counted(present)[..., None].double()
    share = counts / counts.sum(1, keepdim=True).clamp_min(1)
    outputs, inputs = lefts.flatten(2) * counts, rights.flatten(2)
    outputs, inputs = (outputs.sum(1), (inputs * share).sum(1)) if reduced else (outputs, inputs * share.sqrt())
    assert_matrix(left, Form.DIAGONAL, outputs.reshape(-1, 2 * OUTPUTS), torch.float64)
    assert_matrix(right, Form.DIAGONAL, inputs.reshape(-1, 2 * (INPUTS + 1)), torch.float64)


@masks
def test_one_hot_rows_are_counted(present):
    ids = torch.tensor([[0, 1, 1, 4], [2, 2, 2, 2], [3, 0, 0, 3]])
    record = Pair(OneHot(ids), randn(BATCH, 1, TOKENS, INPUTS), (5, INPUTS))
    both = [task(Form.DENSE, left=True), task(Form.DIAGONAL, left=True, reduced=True)]
    expanded, reduced = run(both, [record], places_of(present, torch.float64))
    counts = counted(present).double()
    each = counts / counts.sum(1, keepdim=True).clamp_min(1)
    rows = torch.nn.functional.one_hot(ids, 5).double() * each.sqrt()[..., None]
    assert_matrix(expanded, Form.DENSE, rows.flatten(0, 1), torch.float64)
    assert_matrix(reduced, Form.DIAGONAL, (rows * each.sqrt()[..., None]).sum(1), torch.float64)


@pytest.mark.parametrize("dtype", EXACT)
def test_small_parameters_have_the_square_of_the_sum_of_their_uses(dtype):
    first, second = randn(BATCH, 2, 3, seed=1).to(dtype), randn(BATCH, 2, 3, seed=2).to(dtype)
    true = [first.double().flatten(1)[[0, 2]], second.double().flatten(1)[[0, 2]]]
    first[1], second[1] = torch.nan, torch.inf
    one = task(Form.DIAGONAL, left=True, inputs=False, elementwise=True, reduced=True, positions=())
    tasks, places = [one, one._replace(records=(0, 1)), one._replace(last=False)], places_of(None, dtype)
    alone, together, waiting = run(tasks, [Dense(first), Dense(second)], places)
    assert_matrix(alone, Form.DIAGONAL, true[0], dtype)
    assert_matrix(together, Form.DIAGONAL, true[0] + true[1], dtype)
    assert waiting.dtype == factors.sum_dtype(dtype)
    assert torch.equal(waiting[[0, 2]].double(), true[0])
    assert not waiting[1].any()


# How much is asked of the device


class Counted(TorchDispatchMode):
    """A counter of the calls of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def stack(layers: int) -> Case:
    model = gpt(GPTConfig(layers=layers, width=8, heads=2, context=4, vocab_size=11))
    return Case(model, model.init(keys.key(0)), {"tokens": torch.arange(15).view(3, 5) % 11})


def operations(layers: int) -> Counter[str]:
    case = stack(layers)
    surveyed(*case)
    with Counted() as counted:
        curvatures(case, Fisher.SAMPLED)
    return counted.seen


def test_the_host_waits_for_the_device_as_often_for_many_blocks_as_for_one():
    """Sending a number from the host to a GPU (lift_fresh) waits for it, as fetching one does."""
    waits = {"_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero", "equal", "masked_select"}
    one, four = ({name: seen[name] for name in waits} for seen in (operations(1), operations(4)))
    assert one == four


def test_one_more_block_adds_few_operations():
    """Count operations outside forward and backward, of 4 layers with dense sides and 4 small leaves."""
    more = operations(3)
    more.subtract(operations(2))
    assert more["where"] == 12  # once per side and small leaf
    assert more["cat"] == 4  # columns of ones
    assert more["linalg_vector_norm"] == more["pow"] == 4
    assert more["gt"] == more["isfinite"] == 0


@pytest.mark.long
def test_layers_of_other_forms_are_compiled_separately():
    case, sides = case_named("mlp"), [(Form.DENSE, Form.DIAGONAL), (Form.DIAGONAL, Form.DENSE), (Form.SKIP, Form.DENSE)]
    chosen = dict(zip(surveyed(*case).layers, sides, strict=True))
    found = curvatures(case, Fisher.EMPIRICAL, forms=chosen, runner=CompiledRunner("aot_eager"))
    assert_same(found, curvatures(case, Fisher.EMPIRICAL, forms=chosen))


@pytest.mark.slow
def test_block_factors_are_compiled_once_per_kind_of_block():
    two, three = CompiledRunner("aot_eager"), CompiledRunner("aot_eager")
    curvatures(stack(2), Fisher.SAMPLED, runner=two)
    found = curvatures(stack(3), Fisher.SAMPLED, runner=three)
    assert len(two.kinds) == len(three.kinds) == 6  # embedding, layer and head, and the factors of each
    assert_same(found, curvatures(stack(3), Fisher.SAMPLED))


@pytest.mark.slow
@masks
@pytest.mark.parametrize("dtype", EXACT)
def test_compiled_factors_equal_eager_ones_and_ignore_padding(present, dtype):
    (record, _, _), places = pair(present, dtype), places_of(present, dtype)
    ids = OneHot(torch.tensor([[0, 1, 1, 4], [2, 2, 2, 2], [3, 0, 0, 3]]))
    small = randn(BATCH, 2, 3).to(dtype)
    small[1] = torch.nan
    records: list[Record] = [record, Pair(ids, record.right, (5, INPUTS)), Dense(small)]
    both = [(form, reduced) for form in (Form.DENSE, Form.COLUMNS, Form.DIAGONAL) for reduced in (False, True)]
    tasks = [task(form, bias=True, reduced=reduced) for form, reduced in both]
    tasks += [task(form, left=True, inputs=False, positions=(), reduced=reduced) for form, reduced in both]
    tasks += [task(Form.DIAGONAL, records=(1,), left=True, reduced=reduced) for reduced in (False, True)]
    tasks += [task(Form.DIAGONAL, records=(2,), left=True, inputs=False, positions=(), elementwise=True, reduced=True)]
    compiled = CompiledRunner().function(
        "sums", lambda records, places: run_tasks(tasks, records, places), records, places
    )
    for one, other in zip(compiled, run(tasks, records, places), strict=True):
        assert type(one) is type(other)
        for x, y in zip(one, other, strict=True):
            assert x.dtype == y.dtype
            assert x.isfinite().all()
            torch.testing.assert_close(x, y, rtol=EXACT[dtype], atol=EXACT[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_the_gpu_rows_of_odd_widths_in_half_precision_have_the_same_sums(compiled):
    dtype = torch.bfloat16
    record, g, x = pair(None, dtype)
    assert isinstance(record.left, Tensor)
    records = [Pair(record.left.cuda(), record.right.cuda(), record.shape)]
    places = make_token_mask(MASK.cuda(), None, [(TOKENS,)], dtype)
    tasks = [task(form, bias=True) for form in (Form.DENSE, Form.DIAGONAL)]
    tasks += [task(form, left=True, inputs=False, positions=()) for form in (Form.DENSE, Form.DIAGONAL)]

    def sums(records: list[Pair], places: TokenMask) -> list[Factor | Tensor]:
        return run_tasks(tasks, records, places)

    found = CompiledRunner().function("sums", sums, records, places) if compiled else sums(records, places)
    x = torch.cat([x, torch.ones(BATCH, TOKENS, 1)], 2)[[0, 2]].flatten(0, 1) / TOKENS**0.5
    for factor, each, rows in zip(found, tasks, (x, x, *[g[[0, 2]].flatten(0, 1)] * 2), strict=True):
        assert_matrix(factor, each.form, rows, dtype)
