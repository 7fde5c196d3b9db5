from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from fdp_kernels import keep_hopper
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fdp.gradients import rules, sample_gradients
from fdp.gradients.rules import Dense, OneHot, Pair, Record, Rule, check_rule, has_kernels, rows
from fdp.gradients.sample_gradients import gram_squared_norm, per_sample_gradient, squared_norm
from fdp.ops import CONV1D, CONV2D, EMBEDDING, LINEAR
from fdp.types import FdpError

INF, NAN = float("inf"), float("nan")
CONV = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids_of(*shape: int, rows: int, seed: int = 0) -> Tensor:
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(seed))


def linear_pair(batch: int, tokens: int, out: int, inputs: int, *, seed: int = 0, dtype=torch.float64) -> Pair:
    left, right = (randn(batch, 1, tokens, n, seed=seed + i, dtype=dtype) for i, n in enumerate((out, inputs)))
    return Pair(left, right, (out, inputs))


def embedding_pair(batch: int, tokens: int, table: int, features: int, *, seed: int = 0, dtype=torch.float64) -> Pair:
    right = randn(batch, 1, tokens, features, seed=seed, dtype=dtype)
    return Pair(OneHot(ids_of(batch, tokens, rows=table, seed=seed)), right, (table, features))


def exact(record: Record) -> Tensor:
    """``G_b`` in float64, one token at a time: independent of the code under test."""
    if isinstance(record, Dense):
        return record.gradient.double()
    left, right, shape = record
    if isinstance(left, OneHot):
        left = F.one_hot(left.ids, shape[0]).unsqueeze(1)
    out = sum(a.double().unsqueeze(-1) * b.double().unsqueeze(-2) for a, b in zip(left.unbind(2), right.unbind(2)))
    return torch.as_tensor(out).reshape(right.shape[0], *shape)


def close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((got.double() - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-300))


@pytest.mark.parametrize("shape", [(1, 3), (4, 3), (3, 1, 5), (2, 63, 4), (2, 3, 2, 4), (1, 100, 2), (3, 2, 2, 2, 1)])
@pytest.mark.parametrize("outputs", [1, 7])
def test_linear_agrees_with_vmap_grad(shape, outputs):
    check_rule(LINEAR, randn(*shape), randn(outputs, shape[-1], seed=1), tolerance=1e-12)


@pytest.mark.parametrize("shape", [(1,), (4,), (3, 1), (2, 63), (3, 4, 5), (1, 100)])
def test_embedding_agrees_with_vmap_grad(shape):
    check_rule(EMBEDDING, ids_of(*shape, rows=6), randn(6, 3), tolerance=1e-12)


OPTIONS = [
    CONV | dict(zip(("stride", "padding", "dilation", "groups"), values))
    for values in itertools.product((1, 2, 3), (0, 2), (1, 2), (1, 2))
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("batch", [1, 3])
def test_conv1d_agrees_with_vmap_grad(options, batch):
    check_rule(CONV1D, randn(batch, 4, 13), randn(6, 4 // options["groups"], 3), tolerance=1e-12, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_conv2d_agrees_with_vmap_grad(options):
    check_rule(CONV2D, randn(2, 4, 9, 7), randn(6, 4 // options["groups"], 3, 2), tolerance=1e-12, **options)


def test_depthwise_and_pointwise_convolutions_agree_with_vmap_grad():
    check_rule(CONV2D, randn(2, 4, 5, 5), randn(4, 1, 3, 3), tolerance=1e-12, **CONV | {"groups": 4, "padding": 1})
    check_rule(CONV2D, randn(2, 4, 5, 5), randn(3, 4, 1, 1), tolerance=1e-12, **CONV)
    check_rule(CONV2D, randn(2, 4, 3, 3), randn(3, 4, 3, 3), tolerance=1e-12, **CONV)  # one position: no sum


def last_token(x: Tensor, g: Tensor, shape) -> Pair:
    return Pair(rows(g)[:, :, -1:], rows(x)[:, :, -1:], shape)


def averaged(x: Tensor, g: Tensor, shape) -> Pair:
    return Pair(rows(g) / rows(g).shape[2], rows(x), shape)


def one_sample_off(x: Tensor, g: Tensor, shape) -> Pair:
    return Pair(rows(g), rows(x.roll(1, 0)), shape)


def all_samples(x: Tensor, g: Tensor, shape) -> Dense:
    total = torch.einsum("b...o,b...i->oi", g, x)
    return Dense(total.expand(x.shape[0], *shape))


def transposed(x: Tensor, g: Tensor, shape) -> Pair:
    return Pair(rows(x), rows(g), shape)


def transposed_shape(x: Tensor, g: Tensor, shape) -> Pair:
    return Pair(rows(x), rows(g), shape[::-1])


def negated(x: Tensor, g: Tensor, shape) -> Pair:
    return Pair(-rows(g), rows(x), shape)


def without_batch(x: Tensor, g: Tensor, shape) -> Dense:
    return Dense(torch.einsum("b...o,b...i->oi", g, x)[None])


def not_a_number(x: Tensor, g: Tensor, shape) -> Pair:
    return Pair(rows(g) * NAN, rows(x), shape)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (last_token, "per-sample gradient differs"),
        (averaged, "per-sample gradient differs"),
        (one_sample_off, "per-sample gradient differs"),
        (all_samples, "per-sample gradient differs"),
        (transposed, "per-sample gradient differs"),
        (transposed_shape, "expected shape .*5, 3.*got"),
        (negated, "per-sample gradient differs"),
        (without_batch, "expected shape"),
        (not_a_number, "per-sample gradient differs"),
    ],
)
def test_check_rule_catches_a_wrong_record(record, message):
    outputs = 5 if record is transposed_shape else 3  # a square weight hides a transposed shape, not its values
    with pytest.raises(FdpError, match=f"rule wrong: .*{message}"):
        check_rule(Rule("wrong", F.linear, record), randn(3, 4, 3, seed=7), randn(outputs, 3))


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, w: F.linear(x - x.mean(0), w),
        lambda x, w: F.linear(x, w) / x.shape[0],
        lambda x, w: F.linear(x, w).cumsum(0),
    ],
)
def test_check_rule_catches_an_operation_that_mixes_samples(forward):
    with pytest.raises(FdpError, match="one sample alone differs"):
        check_rule(Rule("mixing", forward, LINEAR.record), randn(3, 4, 5), randn(2, 5))


def test_check_rule_catches_a_wrong_norm_of_a_right_gradient(monkeypatch):
    x, weight = randn(3, 4, 5), randn(2, 5)
    for name in ("squared_norm", "gram_squared_norm", "weighted_gradient"):
        with monkeypatch.context() as patch:
            right = getattr(rules, name)
            patch.setattr(rules, name, lambda *args, right=right: right(*args) * 1.01)
            with pytest.raises(FdpError, match="differs from vmap"):
                check_rule(LINEAR, x, weight)


RECORDS = {
    "linear": lambda dtype: linear_pair(3, 5, 4, 6, dtype=dtype),
    "one token": lambda dtype: linear_pair(3, 1, 4, 6, dtype=dtype),
    "embedding": lambda dtype: embedding_pair(3, 9, 5, 4, dtype=dtype),
    "groups": lambda dtype: Pair(randn(3, 2, 5, 3, dtype=dtype), randn(3, 2, 5, 4, seed=1, dtype=dtype), (6, 2, 2)),
    "dense": lambda dtype: Dense(randn(3, 4, 2, dtype=dtype)),
    "single": lambda dtype: Dense(randn(3, dtype=dtype)),
}


SINGLE = "single"


@pytest.fixture(params=[*(name for name in RECORDS if name != "single"), SINGLE])
def record_of(request):
    return RECORDS[request.param]


# float32 and bf16 against float64 arithmetic on the same stored numbers. The direct norm of bf16 pairs is of
# the per-sample gradient as it is kept, rounded to bf16.
@pytest.mark.parametrize(
    ("dtype", "exactly", "direct"),
    [(torch.float64, 1e-14, 1e-14), (torch.float32, 1e-6, 1e-6), (torch.bfloat16, 1e-6, 1e-2)],
)
def test_every_form_agrees_with_the_definition(record_of, dtype, exactly, direct):
    record = record_of(dtype)
    G = exact(record)
    square = G.reshape(3, -1).square().sum(1)
    factors = torch.tensor([0.3, 0.0, 0.9], dtype=torch.float64)
    assert rules.per_sample_gradient(record).shape == G.shape
    assert close(rules.per_sample_gradient(record), G, direct)
    assert close(rules.squared_norm(record), square, direct)
    assert close(rules.gram_squared_norm(record), square, exactly)
    expected = torch.einsum("b,b...->...", factors, G)
    got = rules.weighted_gradient(record, factors)
    assert close(got, expected, exactly)
    assert got.shape == G.shape[1:]
    assert got.dtype == rules.squared_norm(record).dtype == rules.gram_squared_norm(record).dtype == torch.float64


def poisoned(record: Record, sample: int, value: float) -> Record:
    def poison(x: Tensor) -> Tensor:
        x = x.clone()
        x[sample] = value
        return x

    if isinstance(record, Dense):
        return Dense(poison(record.gradient))
    left = record.left if isinstance(record.left, OneHot) else poison(record.left)
    return Pair(left, poison(record.right), record.shape)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", RECORDS)
def test_a_sample_whose_factor_is_zero_contributes_exactly_zero(name, dtype, value):
    record = RECORDS[name](dtype)
    factors = torch.tensor([0.3, 0.0, 0.9])
    expected = rules.weighted_gradient(record, factors)
    assert torch.equal(rules.weighted_gradient(poisoned(record, 1, value), factors), expected)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_sample_has_a_norm_that_is_not_finite_and_leaves_the_others_alone(record_of, value):
    record = record_of(torch.float32)
    bad = poisoned(record, 1, value)
    for norm in (rules.squared_norm, rules.gram_squared_norm):
        assert not norm(bad)[1].isfinite()
        assert torch.equal(norm(bad)[[0, 2]], norm(record)[[0, 2]])


def test_factors_are_not_rounded_to_the_dtype_of_the_record():
    factor = 1 - 2.0**-10  # rounds up to 1 in bf16
    for record in (linear_pair(1, 1, 3, 4, dtype=torch.bfloat16), Dense(randn(1, 5, dtype=torch.bfloat16))):
        got = rules.weighted_gradient(record, torch.tensor([factor]))
        assert close(got, factor * exact(record)[0], 1e-6)


def test_squares_of_bf16_are_added_up_in_float32():
    ones = torch.ones(2, 5000, dtype=torch.bfloat16)  # a bf16 sum would stop at 256
    assert rules.squared_norm(Dense(ones)).tolist() == [5000.0, 5000.0]
    # one token, so the gradient itself is exact
    pair = Pair(ones.view(2, 1, 1, -1)[..., :50], ones.view(2, 1, 1, -1)[..., :100], (50, 100))
    assert rules.squared_norm(pair).tolist() == [5000.0, 5000.0]
    assert rules.gram_squared_norm(pair).tolist() == [5000.0, 5000.0]


def test_the_float32_sum_of_squares_of_many_elements_is_accurate():
    G = randn(1, 3_000_000, dtype=torch.float32)
    assert close(rules.squared_norm(Dense(G)), G.double().square().sum(1), 1e-6)


def cancelling(tokens: int, *, seed: int, dtype: torch.dtype, spread: float) -> Pair:
    """Inputs nearly constant over tokens, output gradients that sum to about zero: the Gram terms cancel."""
    right = randn(2, 1, 1, 24, seed=seed) + spread * randn(2, 1, tokens, 24, seed=seed + 1)
    left = randn(2, 1, tokens, 16, seed=seed + 2)
    left = left - left.mean(2, keepdim=True)
    return Pair(left.to(dtype), right.to(dtype), (16, 24))


@pytest.mark.parametrize("tokens", [64, 256])
@pytest.mark.parametrize("spread", [1e-2, 1e-4])
@pytest.mark.parametrize("seed", [0, 10, 20])
def test_the_gram_norm_of_cancelling_float32_data_is_exact(tokens, spread, seed):
    pair = cancelling(tokens, seed=seed, dtype=torch.float32, spread=spread)
    square = exact(pair).flatten(1).square().sum(1)
    torch.testing.assert_close(rules.gram_squared_norm(pair).double().sqrt(), square.sqrt(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", [0, 10, 20])
def test_the_gram_norm_of_cancelling_bf16_data_stays_within_a_thousandth(seed):
    pair = cancelling(256, seed=seed, dtype=torch.bfloat16, spread=3e-2)
    square = exact(pair).flatten(1).square().sum(1)
    torch.testing.assert_close(rules.gram_squared_norm(pair).double().sqrt(), square.sqrt(), rtol=1e-3, atol=0)


PAIRS = {
    "linear x linear, other tokens": lambda: (linear_pair(3, 5, 6, 4), linear_pair(3, 2, 6, 4, seed=5)),
    "embedding x linear": lambda: (embedding_pair(3, 7, 6, 4), linear_pair(3, 5, 6, 4, seed=5)),
    "embedding x embedding": lambda: (embedding_pair(3, 7, 6, 4), embedding_pair(3, 5, 6, 4, seed=5)),
    "dense x linear": lambda: (Dense(randn(3, 6, 4)), linear_pair(3, 5, 6, 4)),
    "dense x embedding": lambda: (Dense(randn(3, 6, 4)), embedding_pair(3, 5, 6, 4)),
    "dense x dense": lambda: (Dense(randn(3, 6, 4)), Dense(randn(3, 6, 4, seed=5))),
    "groups x groups": lambda: (
        Pair(randn(3, 2, 5, 3), randn(3, 2, 5, 4, seed=1), (6, 4)),
        Pair(randn(3, 2, 3, 3, seed=2), randn(3, 2, 3, 4, seed=3), (6, 4)),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_cross_term_is_the_inner_product_of_two_uses(name):
    a, b = PAIRS[name]()
    expected = (exact(a) * exact(b)).flatten(1).sum(1)
    assert close(rules.cross_term(a, b), expected, 1e-13)
    assert close(rules.cross_term(b, a), expected, 1e-13)
    assert expected.abs().min() > 1e-3


@given(
    batch=st.integers(1, 4),
    tokens=st.integers(1, 9),
    out=st.integers(1, 7),
    inputs=st.integers(1, 7),
    seed=st.integers(0, 1000),
)
def test_direct_and_gram_norms_agree_on_every_shape(batch, tokens, out, inputs, seed):
    for pair in (
        linear_pair(batch, tokens, out, inputs, seed=seed),
        embedding_pair(batch, tokens, out, inputs, seed=seed),
    ):
        torch.testing.assert_close(rules.gram_squared_norm(pair), rules.squared_norm(pair), rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- the norms that methods choose from

NORMS = [rules.direct_squared_norm, rules.symmetric_squared_norm, rules.stored_squared_norm]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_every_norm_is_that_of_what_the_sum_adds(record_of, norm, dtype):
    record = record_of(dtype)
    if isinstance(record, Dense) and norm is not rules.direct_squared_norm:
        pytest.skip("small parameters have one way")
    found = norm(record)
    assert found.dtype == torch.float64
    for b, one_hot in enumerate(torch.eye(3, dtype=torch.float64)):
        added = rules.weighted_gradient(record, one_hot).square().sum()
        assert found[b] >= added * (1 - 1e-14)
        assert found[b] <= added * (1 + 1e-9)


@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_norm_is_below_that_of_tokens_that_cancel(norm, scale, dtype):
    pair = cancelling(100, seed=3, dtype=dtype, spread=1e-4)
    assert isinstance(pair.left, Tensor)
    pair = pair._replace(left=scale * pair.left, right=scale * pair.right)
    for b, one_hot in enumerate(torch.eye(2, dtype=torch.float64)):
        assert norm(pair)[b] >= rules.weighted_gradient(pair, one_hot).square().sum() * (1 - 1e-12)


def half_on_gpu(monkeypatch):
    """Half-precision pairs go to the ops of kernels, which on a CPU run their references."""
    monkeypatch.setattr(rules, "has_kernels", lambda r: isinstance(r, Pair) and r.right.dtype == torch.bfloat16)


@pytest.mark.parametrize("name", ["linear", "one token", "embedding", "groups"])
def test_kernels_give_the_same_norms_sums_and_stored_gradients(name, monkeypatch):
    record = RECORDS[name](torch.bfloat16)
    factors = torch.tensor([0.3, 0.0, 0.9], dtype=torch.float64)
    truth = [norm(record) for norm in NORMS], rules.weighted_gradient(record, factors)
    half_on_gpu(monkeypatch)
    for found, expected in zip((norm(record) for norm in NORMS), truth[0]):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(rules.weighted_gradient(record, factors).double(), truth[1], rtol=1e-6, atol=1e-7)
    kept = rules.store_gradient(record)
    assert kept.gradient.shape == (3, *record.shape)
    assert kept.gradient.dtype == torch.bfloat16
    assert close(kept.gradient, exact(record), 1e-2)
    if kept.squares is not None:
        torch.testing.assert_close(kept.squares.sum(1), rules.squared_norm(Dense(kept.gradient)))


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["linear", "embedding", "groups"])
def test_with_kernels_bad_samples_do_not_affect_others(name, value, monkeypatch):
    half_on_gpu(monkeypatch)
    record = RECORDS[name](torch.bfloat16)
    bad, factors = poisoned(record, 1, value), torch.tensor([0.3, 0.0, 0.9])
    assert torch.equal(rules.weighted_gradient(bad, factors), rules.weighted_gradient(record, factors))
    for norm in NORMS:
        assert not norm(bad)[1].isfinite()
        assert torch.equal(norm(bad)[[0, 2]], norm(record)[[0, 2]])


def test_kernels_are_for_half_precision_pairs_on_a_gpu():
    pair = linear_pair(2, 3, 4, 5, dtype=torch.bfloat16)
    assert not rules.has_kernels(pair)
    assert not rules.has_kernels(Dense(torch.zeros(2, 3, dtype=torch.bfloat16)))


@pytest.mark.parametrize(("tokens", "vocabulary", "by_triton"), [(2047, 50257, True), (2048, 50257, False)])
def test_a_long_sequence_is_stored_by_the_kernel_where_its_body_for_hopper_runs(
    tokens: int, vocabulary: int, by_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = (
        torch.empty(4, 1, tokens, width, dtype=torch.bfloat16, device="meta") for width in (vocabulary, 1280)
    )
    record = Pair(left, right, (vocabulary, 1280))
    assert rules.kernel_stores_faster(record) == by_triton
    monkeypatch.setattr(keep_hopper, "runs_hopper", lambda _: True)
    assert rules.kernel_stores_faster(record)
    groups = Pair(left.expand(4, 2, tokens, vocabulary), right.expand(4, 2, tokens, 1280), (2 * vocabulary, 1280))
    assert not rules.kernel_stores_faster(groups)  # of a convolution


@pytest.mark.parametrize("name", RECORDS)
def test_stored_gradients_are_the_per_sample_gradients(name):
    record = RECORDS[name](torch.float32)
    kept = rules.store_gradient(record)
    assert torch.equal(kept.gradient, rules.per_sample_gradient(record))


def test_sums_of_many_samples_by_kernels_are_added_up_in_float64(monkeypatch):
    """Half-precision pairs on a GPU: here the kernels' references, and 3 samples at a time."""
    half = torch.bfloat16
    monkeypatch.setattr(rules, "has_kernels", lambda record: isinstance(record, Pair) and record.right.dtype == half)
    monkeypatch.setattr(rules, "SAMPLES_PER_FLOAT32_SUM", 3)
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(8, 1, 5, n, generator=draw).to(half) for n in (4, 6))
    ids = torch.randint(0, 4, (8, 5), generator=draw)
    factors = torch.rand(8, dtype=torch.float64, generator=draw)
    for pair in (Pair(left, right, (4, 6)), Pair(OneHot(ids), right, (4, 6))):
        exact = torch.einsum("b,bpd->pd", factors, rules.per_sample_gradient(rules.widen_record(pair)))
        total = rules.weighted_gradient(pair, factors)
        assert total.dtype == torch.float64
        assert torch.allclose(total, exact, rtol=1e-5, atol=1e-5)


CANCELLING = [1e8, 1e15, 1e30]


def cancelling_pair(size: float, *, tokens: int = 6) -> Pair:
    """Ordinary samples and, last, one whose two tokens cancel exactly."""
    left, right = randn(5, 1, tokens, 3).float(), randn(5, 1, tokens, 4, seed=1).float()
    left[-1], right[-1] = 0, 0
    left[-1, 0, 0], left[-1, 0, 1], right[-1, 0, :2] = size, -size, size
    return Pair(left, right, (3, 4))


def cancelling_embedding(size: float) -> Pair:
    ids, right = torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(0)), randn(5, 1, 6, 4).float()
    ids[-1], right[-1] = 3, 0
    right[-1, 0, 0], right[-1, 0, 1] = size, -size
    return Pair(OneHot(ids), right, (7, 4))


@pytest.mark.parametrize("size", CANCELLING)
@pytest.mark.parametrize("norm", [rules.direct_squared_norm, rules.symmetric_squared_norm, rules.stored_squared_norm])
@pytest.mark.parametrize("made", [cancelling_pair, cancelling_embedding])
def test_tokens_that_cancel_leave_nothing_in_what_others_add(made, norm, size):
    """One accumulator per sample and a floor in every norm: the sum of the others is the same with it and without."""
    record = made(size)
    factors = (1 / norm(record).sqrt()).clamp(max=1.0)
    without = factors.clone()
    without[-1] = 0
    moved = rules.weighted_gradient(record, factors) - rules.weighted_gradient(record, without)
    assert float(moved.norm()) <= 1e-6
    assert float(norm(record)[-1].sqrt()) > 1e-9 * size  # the floor: not 0, though the gradient is


def test_rows_of_a_sample_that_go_to_one_place_are_added_up():
    ids, right = torch.tensor([[3, 1, 3, 0], [2, 2, 2, 2]]), randn(2, 1, 4, 5)
    places, rows = sample_gradients.sample_rows(ids, right)
    table = torch.zeros(2, 4, 5, dtype=rows.dtype).scatter_add(1, places[..., None].expand_as(rows), rows)
    torch.testing.assert_close(table, rules.per_sample_gradient(Pair(OneHot(ids), right, (4, 5))))
    for b in range(2):  # every place at most once; rows left over are zero
        used = places[b][rows[b].abs().sum(1) > 0].tolist()
        assert sorted(used) == sorted(set(ids[b].tolist()))


def test_a_few_samples_at_a_time_give_the_same_norms_and_sums(monkeypatch):
    record, factors = cancelling_pair(1.0), torch.rand(5)
    uses = [record, rules.Dense(randn(5, 3, 4, seed=7).float())]
    squares, total = (
        sample_gradients.direct_squared_norm_of_uses(uses),
        sample_gradients.weighted_gradient_of_uses(uses, factors),
    )
    for most in (1, 24, 36):
        monkeypatch.setattr(sample_gradients, "ELEMENTS_AT_ONCE", most)
        assert torch.equal(sample_gradients.direct_squared_norm_of_uses(uses), squares)
        torch.testing.assert_close(
            sample_gradients.weighted_gradient_of_uses(uses, factors), total, rtol=1e-13, atol=1e-13
        )


@pytest.mark.parametrize("groups", [1, 2])
def test_a_single_token_per_sample_is_one_product_without_the_samples_of_factor_zero(groups):
    left, right = randn(5, groups, 1, 3, dtype=torch.float32), randn(5, groups, 1, 4, seed=1, dtype=torch.float32)
    left[1, 0, 0, 0], right[2, 0, 0, 1], left[3] = NAN, INF, left[3] * 1e30
    record, factors = Pair(left, right, (groups * 3, 4)), torch.tensor([0.5, 0.0, 0.0, 1e-30, 0.25])
    gradient = rules.per_sample_gradient(Pair(left.double(), right.double(), record.shape))
    expected = sum(float(factors[b]) * gradient[b] for b in (0, 3, 4))
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(
        sample_gradients.weighted_gradient_of_uses([record], factors), expected, rtol=1e-6, atol=0
    )
    everyone, others = factors, factors * torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    moved = [sample_gradients.weighted_gradient_of_uses([record], c) for c in (everyone, others)]
    torch.testing.assert_close(moved[0] - moved[1], 0.25 * gradient[4], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_a_single_token_is_no_smaller_than_what_the_sum_adds(groups, dtype):
    left, right = (randn(64, groups, 1, n, seed=n, dtype=dtype).exp() for n in (7, 33))
    record = Pair(left, right, (groups * 7, 33))
    square = rules.stored_squared_norm(record)
    for b in range(64):
        added = sample_gradients.weighted_gradient_of_uses([record], (torch.arange(64) == b).double())
        exact = sum(Fraction(entry) ** 2 for entry in added.flatten().tolist())
        assert exact <= Fraction(float(square[b])) <= exact * (1 + Fraction(1, 10**12))


def test_a_kernel_gets_no_factor_that_float32_would_round_away():
    factors = torch.tensor([1.0, 1e-20, 3e-45, 1e-60], dtype=torch.float64)
    assert rules.kernel_factors(factors).tolist() == [1.0, torch.tensor(1e-20).item(), 0.0, 0.0]


@pytest.mark.parametrize("made", [cancelling_pair, cancelling_embedding])
def test_a_samples_tokens_are_added_up_before_they_meet_anothers(made):
    """With factor 1 for all, as if nothing had been measured: what cancels within a sample is gone, exactly."""
    record, everyone, others = made(1e15), torch.ones(5), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    with_it, without = (rules.weighted_gradient(record, factors) for factors in (everyone, others))
    torch.testing.assert_close(with_it, without, rtol=1e-12, atol=1e-12)


def test_a_samples_uses_of_a_leaf_are_added_up_before_they_meet_anothers():
    left, right = randn(5, 1, 6, 3), randn(5, 1, 6, 4, seed=1)
    left[4], right[4] = left[4] * 1e15, right[4] * 1e15
    pair = Pair(left, right, (3, 4))
    minus = -rules.per_sample_gradient(pair)
    minus[:4] = 0  # the second use takes back the whole gradient of the last sample
    everyone, others = torch.ones(5), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    sums = [sample_gradients.weighted_gradient_of_uses([pair, Dense(minus)], factors) for factors in (everyone, others)]
    torch.testing.assert_close(*sums, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("narrow", ["left", "right"])
def test_a_pair_of_two_dtypes_has_the_gradient_of_the_wider_one(narrow):
    """As of a router that computes in float32 inside a model in float64; no kernel takes it."""
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(3, 1, 5, n, generator=draw, dtype=torch.float64) for n in (4, 6))
    exact = (
        Pair(left.float().double(), right, (4, 6)) if narrow == "left" else Pair(left, right.float().double(), (4, 6))
    )
    mixed = Pair(left.float(), right, (4, 6)) if narrow == "left" else Pair(left, right.float(), (4, 6))
    assert torch.equal(per_sample_gradient(mixed), per_sample_gradient(exact))
    torch.testing.assert_close(squared_norm(mixed), gram_squared_norm(mixed), rtol=1e-10, atol=0)
    half = Pair(left.to("meta", torch.float32), right.to("meta", torch.bfloat16), (4, 6))
    assert not has_kernels(half)
