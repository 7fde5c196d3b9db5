"""float32 sums over microbatches: how far they are rounded, and that the noise covers it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from fdp_kernels.embedding import embedding_norms
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fdp.stages
from fdp import keys, ops, tree
from fdp.gradients.accumulate import add_microbatches, clipped_gradient
from fdp.gradients.clipped_sum import clipped_sum, lazy_clipped_sum
from fdp.gradients.execution import Execution, Memory
from fdp.gradients.lazy_sum import LazySum, add_onto
from fdp.gradients.plan import make_plan
from fdp.model import Model, from_loss
from fdp.optimizers import sgd
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.microbatches import pad_to_microbatches
from fdp.privacy.sampling import Poisson, poisson, trusted_batch
from fdp.privacy.sum_rounding import (
    UNIT,
    Rounding,
    check_draw,
    most_microbatches,
    most_samples,
    relative_error,
    rounding_slack,
)
from fdp.stages import make_stages
from fdp.step import init_state, make_train_step
from fdp.types import ClippedSum, FdpError

SIZE, SAMPLES, WIDTH = 16, 1024, 4
SAMPLING = poisson(1 << 20, expected_batch_size=SAMPLES)
FLOAT32 = Execution(memory=Memory(sum_dtype=torch.float32, microbatch_size=SIZE))
STYLES = {
    "flat": clipping.flat(max_norm=1.0),
    "per-layer": clipping.per_layer(max_norm=1.0),
    "automatic": clipping.automatic(max_norm=1.0),
    "quantile": clipping.quantile(max_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=1.0),
}


def linear_model() -> Model:
    """A model whose gradient of a sample is the sample."""
    return from_loss(lambda p, d: ops.linear(d["x"], p["w"]).sum((1, 2)), {"w": torch.zeros(1, WIDTH)})


def draws() -> dict[str, Tensor]:
    """Samples whose float32 sums are rounded as much as possible, and differently if one of them is missing."""
    random = torch.Generator().manual_seed(0)
    equal = torch.full((SAMPLES, WIDTH), 3.0)
    uneven = equal * (1 + 0.3 * torch.rand(SAMPLES, WIDTH, generator=random))
    tiny = torch.full((SAMPLES, WIDTH), 3e-8)
    tiny[:SIZE] = 3.0  # a large sum, on which every tiny sample is lost, or rounded up
    turning = uneven * torch.tensor([1.0, -1.0]).repeat(SAMPLES // 2)[:, None]
    late = uneven.clone()
    late[-1] = -3.0
    return {"equal": equal, "uneven": uneven, "tiny on large": tiny, "alternating": turning, "opposed": late}


def summed(
    x: Tensor, style: clipping.ClipStyle, execution: Execution, sum_records: Callable = clipped_sum
) -> ClippedSum:
    """The sum over the microbatches of a step, as the step makes it, with its sensitivity."""
    model = linear_model()
    plan = make_plan(model, {"w": torch.zeros(1, WIDTH)}, {"x": torch.zeros(SIZE, 1, WIDTH)})
    mechanism = Mechanism(SAMPLING, style, 1.0)
    stages = make_stages(model, sgd(0.1), mechanism=mechanism, plan=plan, execution=execution)
    gradient = clipped_gradient(model, mechanism, plan, execution, sum_records)
    matrix, mask = pad_to_microbatches(torch.arange(len(x)), microbatch_size=SIZE)
    weights = stages.weights({"w": torch.zeros(1, WIDTH)}, x.device)

    def work(i: int, onto: ClippedSum | None):
        return gradient(weights, style.init(), {"x": x[matrix[i]].unsqueeze(1)}, mask[i], onto=onto)

    total = add_microbatches(work, len(matrix)).total
    return stages.reduce(total)


def moved(x: Tensor, out: int, style: clipping.ClipStyle, sum_records: Callable = clipped_sum) -> tuple[float, float]:
    """Return how far sample ``out`` moves the sum, and the sensitivity that the sum states."""
    with_, without = (summed(batch, style, FLOAT32, sum_records) for batch in (x, torch.cat([x[:out], x[out + 1 :]])))
    assert with_.value["w"].dtype == torch.float32
    return float((with_.value["w"].double() - without.value["w"].double()).norm()), float(with_.sensitivity)


def check_the_sensitivity_covers_the_rounding() -> float:
    """Return the largest ratio of what a sample moves to C; raise if one is above the stated sensitivity."""
    worst = 0.0
    for x in draws().values():
        for out in (0, 3 * SIZE + 1, SAMPLES - 1):
            size, stated = moved(x, out, STYLES["flat"])
            assert size <= stated, f"{size} of {stated}"
            worst = max(worst, size)
    return worst


def test_neighbouring_float32_sums_of_64_microbatches_differ_by_at_most_the_stated_sensitivity():
    worst = check_the_sensitivity_covers_the_rounding()
    assert worst > 1 + 1e-5, "nothing was rounded against the sample, so nothing was tested"


def test_the_check_notices_a_bound_that_is_left_out(monkeypatch):
    monkeypatch.setattr(fdp.stages, "rounding_slack", lambda sampling, rounding: 0.0)
    with pytest.raises(AssertionError):
        check_the_sensitivity_covers_the_rounding()


@pytest.mark.parametrize("sum_records", [clipped_sum, lazy_clipped_sum], ids=["evaluated", "lazy"])
@pytest.mark.parametrize("style", STYLES)
def test_every_clipping_style_carries_the_bound(style, sum_records):
    slack = rounding_slack(SAMPLING, Rounding(torch.float32, SIZE))
    size, stated = moved(draws()["uneven"], SIZE, STYLES[style], sum_records)
    assert stated == pytest.approx(1 + slack, rel=1e-6)
    assert size <= stated
    exact = summed(draws()["uneven"][:64], STYLES[style], Execution(), sum_records)
    assert float(exact.sensitivity) == pytest.approx(1.0, rel=1e-6)
    assert exact.value["w"].dtype == torch.float64


@pytest.mark.parametrize("tied", [False, True])
def test_the_extra_noise_of_64_microbatches_and_1024_samples_is_below_2_percent(tied):
    on_cpu = rounding_slack(SAMPLING, Rounding(torch.float32, SIZE))
    on_gpu = rounding_slack(SAMPLING, Rounding(torch.float32, SIZE, kernel_samples=SIZE, tied=tied))
    assert 0 < on_cpu < on_gpu < 0.02
    assert rounding_slack(SAMPLING, Rounding()) == 0.0


@pytest.mark.parametrize("samples", [1, 2, 8, 63, 64])
def test_the_term_of_kernels_covers_what_float64_rounds_of_an_embedding_whose_rows_cancel(samples):
    """Rows of n samples, as large as the floor of their norm lets them be: n T additions, then float32."""
    tokens, ids = 512, torch.zeros(1, 512, dtype=torch.int64)
    rows = torch.ones(1, tokens, 1, dtype=torch.float64)
    rows[:, ::2] = -1
    largest = float(rows.abs().sum() / embedding_norms(ids, rows).sqrt())  # sum_t |g_t| of a sample with norm C = 1
    assert largest == pytest.approx(2.0**28 / tokens)
    rounded = samples * tokens * 2.0**-53 * samples * largest + UNIT * samples
    assert rounded <= relative_error(samples, Rounding(kernel_samples=samples))


@given(
    values=st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=60),
    size=st.integers(1, 7),
    lazy=st.booleans(),
)
def test_a_float32_sum_errs_by_at_most_the_relative_error(values, size, lazy):
    parts = torch.tensor(values, dtype=torch.float64).split(size)
    total: dict[str, Tensor] = {}
    for part in parts:
        rows = part.unsqueeze(1)
        leaf = LazySum(rows, torch.ones(len(part), dtype=torch.float64)) if lazy else rows.sum(0)
        total = add_onto(total, {"w": leaf}, torch.float32)
    error = abs(float(total["w"].double() - math.fsum(values)))
    assert error <= relative_error(len(values), Rounding(torch.float32, size))


def test_a_reduction_in_float32_adds_ranks_plus_one_roundings():
    one = Rounding(reduce_dtype=torch.float32, ranks=4)
    assert relative_error(1000, one) == pytest.approx(5 * UNIT * 1000, rel=1e-6)
    both = one._replace(sum_dtype=torch.float32, microbatch_size=10)
    alone = Rounding(torch.float32, 10)
    assert relative_error(1000, both) == pytest.approx(
        relative_error(1000, one) + relative_error(1000, alone), rel=1e-4
    )


def test_a_draw_that_the_bound_does_not_cover_is_refused():
    rounding = Rounding(torch.float32, SIZE)
    most, count = most_samples(SAMPLING), most_microbatches(SAMPLING, SIZE)
    check_draw(int(most), count, SAMPLING, rounding)
    with pytest.raises(FdpError, match=r"samples in a step that expects 1024, got more.*Nothing was released"):
        check_draw(int(most) + 1, count, SAMPLING, rounding)
    with pytest.raises(FdpError, match="Give the size that is used as --microbatch"):
        check_draw(10, count + 1, SAMPLING, rounding)
    check_draw(10**9, 10**9, SAMPLING, Rounding())
    truncated = poisson(1 << 20, expected_batch_size=SAMPLES, max_batch_size=1100)
    assert most_samples(truncated) == 1100


def test_poisson_draws_exceed_the_public_number_of_samples_with_probability_below_1e_22():
    from math import lgamma, log

    for expected in (0.5, 1, 30, 1024, 1e5):
        first = math.floor(most_samples(Poisson(1 << 40, expected, 1 << 40))) + 1
        # P(N = n) of the Poisson law, an upper bound of the binomial's tail this far out; terms fall geometrically.
        log_term = first * log(expected) - expected - lgamma(first + 1)
        tail = log_term - log(1 - expected / first)
        assert tail < log(1e-22)


def understated(count: int) -> tuple[Callable, tuple]:
    """A step that expects 1 sample, and its arguments with ``count``."""
    sampling = poisson(1000, expected_batch_size=1)
    model, mechanism = linear_model(), Mechanism(sampling, STYLES["flat"], 1.0)
    params = {"w": torch.zeros(1, WIDTH)}
    data, mask = torch.ones(2, 80, 1, WIDTH), torch.zeros(160)
    mask[:count] = 1
    plan = make_plan(model, params, {"x": data[0]})
    execution = Execution(memory=Memory(sum_dtype=torch.float32, microbatch_size=80))
    step = make_train_step(model, sgd(0.1), mechanism=mechanism, plan=plan, execution=execution)
    state = init_state(model, params, sgd(0.1), mechanism)
    return step, (state, trusted_batch({"x": data}, mask.view(2, 80), sampling, step=0), keys.key(1))


def test_a_step_with_too_many_samples_is_refused_or_if_compiled_drowned():
    step, fine = understated(111)
    after, _ = step(*fine)
    assert all(torch.isfinite(leaf).all() for leaf in tree.leaves(after.params))
    _, many = understated(112)
    with pytest.raises(FdpError, match="announce a larger population"):
        step(*many)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert not torch.isfinite(compiled(*many)[0].params["w"]).any()
    assert torch.isfinite(compiled(*fine)[0].params["w"]).all()


def test_float32_sums_have_noise_of_their_own_and_need_the_microbatch_size():
    model, mechanism = linear_model(), Mechanism(SAMPLING, STYLES["flat"], 1.0)
    plan = make_plan(model, {"w": torch.zeros(1, WIDTH)}, {"x": torch.zeros(SIZE, 1, WIDTH)})

    def key(execution: Execution) -> Tensor:
        return make_stages(model, sgd(0.1), mechanism=mechanism, plan=plan, execution=execution).key(
            keys.key(0), torch.tensor(0)
        )

    other = FLOAT32._replace(memory=Memory(sum_dtype=torch.float32, microbatch_size=2 * SIZE))
    assert torch.equal(key(Execution()), key(Execution(memory=Memory(microbatch_size=SIZE))))
    assert not torch.equal(key(Execution()), key(FLOAT32))
    assert not torch.equal(key(other), key(FLOAT32))
    with pytest.raises(FdpError, match="got no microbatch_size"):
        key(Execution(memory=Memory(sum_dtype=torch.float32)))
    with pytest.raises(FdpError, match="expected float64 or float32"):
        key(Execution(memory=Memory(sum_dtype=torch.bfloat16, microbatch_size=SIZE)))
