"""The privacy contract, and proof that these tests would notice a breach.

Every check is a plain function of the code under test. It is run on the real code, over methods, clipping styles,
dtypes, tied and untied models and extreme samples; then it is run on code broken on purpose, where it must fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdp.finish
import fdp.gradients.launches
import fdp.gradients.per_sample
import fdp.gradients.rules
import fdp.stages
import fdp.types
from fdp import keys, ops, tree
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.clipped_sum import clipped_sum, lazy_clipped_sum
from fdp.gradients.execution import EAGER, Execution, Memory
from fdp.gradients.linear_maps import LowRankMap, MatrixMap, Sides
from fdp.gradients.per_sample import Transform, identity, per_sample_norms
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.gradients.precondition import map_record
from fdp.gradients.rules import Dense
from fdp.model import Model, from_loss
from fdp.models import GPTConfig, cnn, gpt
from fdp.optimizers import sgd
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.noise import add_noise
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.stages import make_stages
from fdp.step import init_state, make_train_step
from fdp.types import NO_SAMPLES, Clip, ClippedSum, Norms
from tests.conftest import summed


class Within(NamedTuple):
    """A method that may keep no more than ``budget`` bytes."""

    method: Method
    budget: float

    @property
    def value(self) -> str:
        return f"{self.method.value} within {self.budget:g}"


# flash without room has the norms of flash_bk and the sum of ghost
METHODS = [
    *(method for method in Method if method is not Method.NONE),
    pytest.param(Within(Method.FLASH, 0.0), marks=pytest.mark.slow),
]
# on a CPU flash_bk measures as ghost_bk or auto does, and flash keeps what materialize keeps
STYLED = [pytest.param(m, marks=pytest.mark.slow) if m in (Method.FLASH_BK, Method.FLASH) else m for m in METHODS]
STYLES = {
    "flat": clipping.flat(max_norm=0.25),
    "per-layer": clipping.per_layer(max_norm=0.25),
    "automatic": clipping.automatic(max_norm=0.25),
    "quantile": clipping.quantile(max_norm=0.25, target_quantile=0.5, learning_rate=0.2, count_noise=1.0),
}
SLACK = {torch.float32: 1e-6, torch.bfloat16: 1e-6}
GAINS = {"ordinary": 1.0, "outlier": 1e6, "huge": 1e30, "nan": torch.nan, "inf": torch.inf, "zero": 0.0}
BATCH = 4


def with_gain(model: Model) -> Model:
    """The model with each sample's loss multiplied by its own ``gain``: a sample as extreme as we like."""
    *blocks, last = model.blocks
    scaled = last._replace(apply=lambda p, carry, data: last.apply(p, carry, data) * data["gain"])
    if (head := last.head) is not None:  # a fused head weights the loss of every token

        def weights(data: dict[str, torch.Tensor]) -> torch.Tensor:
            targets = head.targets(data)
            own = None if head.weights is None else head.weights(data)
            each = torch.full(targets.shape, 1 / targets.shape[1]) if own is None else own
            return each * data["gain"].unsqueeze(1)

        scaled = scaled._replace(head=head._replace(weights=weights))
    return model._replace(blocks=(*blocks, scaled))


@cache
def language_model(*, tied: bool) -> Model:
    return with_gain(gpt(GPTConfig(layers=1, width=8, heads=2, context=6, vocab_size=11, tied=tied)))


def language_data(gain: float) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 11, (BATCH, 7), generator=torch.Generator().manual_seed(1))
    gains = torch.ones(BATCH)
    gains[1] = gain
    return {"tokens": tokens, "gain": gains}


_MADE: dict[Any, tuple[Model, Any]] = {}
"""Parameters and plans that several tests share: to trace a model takes as long as to check it."""


def made_once(model: Model, what: Any, make: Callable[[], Any]) -> Any:
    """Return ``make()``, once for every model and ``what``; the model is stored, so that its id stays its own."""
    at = (id(model), what)
    if at not in _MADE:
        _MADE[at] = (model, make())
    return _MADE[at][1]


def params_of(model: Model, seed: int = 0) -> Any:
    """Parameters far from their small initial values, so that every leaf has a gradient that matters."""

    def make() -> Any:
        key = keys.key(seed)
        flat = tree.flatten(model.init(key))
        return tree.nest(
            {p: w + 0.5 * keys.normal(keys.fold_in(key, f"test {p}"), tuple(w.shape)) for p, w in flat.items()}
        )

    return made_once(model, seed, make)


def plan_of(
    model: Model, params: Any, data: Any, *, method: Method | Within, dtype: torch.dtype = torch.float32
) -> Plan:
    """Return the plan of a method, which depends on the shapes of the data only."""
    by, budget = method if isinstance(method, Within) else (method, None)
    what = (by, budget, dtype, str(tree.map(lambda leaf: (leaf.shape, leaf.dtype), data)))
    make = partial(make_plan, model, params, data, method=by, memory_budget=budget, dtype=dtype)
    return made_once(model, what, make)


def sums_of(
    model: Model,
    params: Any,
    data: Any,
    masks: Sequence[torch.Tensor],
    *,
    plan: Any,
    style: Any,
    blocks: CompiledRunner | None = None,
    lazy: bool = False,
    transform: Transform = identity,
    sum_dtype: torch.dtype = torch.float64,
) -> list[ClippedSum]:
    """Return the clipped sum over the samples of each mask; norms do not depend on it.

    In float32, they are sums of a microbatch that is one of several, with the sensitivity of a step.
    """
    execution = Execution(runner=blocks or EAGER, memory=Memory(sum_dtype=sum_dtype, microbatch_size=BATCH))
    _, norms, stash = per_sample_norms(model, params, data, plan=plan, execution=execution, transform=transform)
    clips = [style.clip(norms, style.init()).masked(mask) for mask in masks]
    if sum_dtype == torch.float64:
        return [summed(stash, clip, lazy=lazy) for clip in clips]
    totals = [(lazy_clipped_sum if lazy else clipped_sum)(stash.copy(), clip, NO_SAMPLES) for clip in clips]
    mechanism = Mechanism(poisson(100, expected_batch_size=BATCH), style, 1.0)
    stages = make_stages(model, sgd(0.1), mechanism=mechanism, plan=plan, execution=execution)
    assert {leaf.dtype for total in totals for leaf in total.value.values()} == {sum_dtype}
    return [stages.reduce(total) for total in totals]


def total_of(model: Model, params: Any, data: Any, mask: torch.Tensor, **how: Any) -> ClippedSum:
    return sums_of(model, params, data, [mask], **how)[0]


def everyone_and_all_but_one(samples: int, absent: int) -> list[torch.Tensor]:
    """Return the mask of all samples, and those without each of the first ones."""
    masks = torch.ones(1 + absent, samples)
    masks[1:, :absent].fill_diagonal_(0)
    return list(masks)


def distance(a: ClippedSum, b: ClippedSum) -> float:
    return float(sum((a.value[p].double() - b.value[p].double()).square().sum() for p in a.value) ** 0.5)


def check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
    model: Model, params: Any, data: Any, *, method: Method | Within, style: Any, dtype: torch.dtype, **how: Any
) -> None:
    plan, masks = plan_of(model, params, data, method=method, dtype=dtype), everyone_and_all_but_one(BATCH, BATCH)
    present, *others = sums_of(model, params, data, masks, plan=plan, style=style, **how)
    assert all(torch.isfinite(leaf).all() for leaf in present.value.values()), "a sample poisoned the sum"
    assert set(present.value) == model.trainable, "a leaf is missing from the sum"
    for b, absent in enumerate(others):
        moved, bound = distance(present, absent), float(present.sensitivity)
        assert moved <= bound * (1 + SLACK[dtype]), f"sample {b} moved the sum by {moved}, allowed {bound}"


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", list(SLACK), ids=["float32", "bfloat16"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("method", STYLED, ids=lambda m: m.value)
def test_one_sample_moves_the_sum_by_at_most_its_sensitivity(method, style, dtype, tied, gain):
    model = language_model(tied=tied)
    params = params_of(model)
    check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
        model, params, language_data(GAINS[gain]), method=method, style=STYLES[style], dtype=dtype
    )


@pytest.mark.parametrize("lazy", [False, True], ids=["evaluated", "lazy"])
@pytest.mark.parametrize("gain", ["ordinary", "outlier", "nan"])
@pytest.mark.parametrize("dtype", list(SLACK), ids=["float32", "bfloat16"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("method", [Method.AUTO, Method.GHOST], ids=lambda m: m.value)
def test_one_sample_moves_a_float32_sum_by_at_most_its_sensitivity(method, style, dtype, gain, lazy):
    model = language_model(tied=True)
    check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
        model, params_of(model), language_data(GAINS[gain]), method=method, style=STYLES[style], dtype=dtype,
        sum_dtype=torch.float32, lazy=lazy,
    )  # fmt: skip


@pytest.mark.parametrize("pixel", [1e6, -1e20, torch.nan, torch.inf, 0.0])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
def test_extreme_inputs_move_the_sum_by_at_most_its_sensitivity(method, pixel):
    model = cnn(channels=(3, 4), side=4, classes=3)
    image = torch.rand(BATCH, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    image[1] = pixel
    data = {"image": image, "label": torch.tensor([0, 1, 2, 0])}
    check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
        model, params_of(model), data, method=method, style=STYLES["flat"], dtype=torch.float32
    )


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
@settings(max_examples=15, deadline=None)
@given(gain=st.floats(0, 1e8, width=32), bound=st.floats(1e-3, 1e3), seed=st.integers(0, 100))
def test_any_sample_moves_the_sum_by_at_most_any_bound(method, gain, bound, seed):
    model = language_model(tied=True)
    check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
        model,
        params_of(model, seed),
        language_data(gain),
        method=method,
        style=clipping.flat(max_norm=bound),
        dtype=torch.float32,
    )


def linear_case(x: torch.Tensor, g: torch.Tensor) -> tuple[Model, Any, Any]:
    """One linear layer whose inputs are ``x`` and whose output gradients are ``g``."""
    params = {"w": torch.zeros(g.shape[-1], x.shape[-1])}
    model = from_loss(lambda p, d: (ops.linear(d["x"], p["w"]) * d["g"]).sum((1, 2)), params)
    return model, params, {"x": x, "g": g}


def moves(model: Model, params: Any, data: Any, *, method: Method | Within, **how: Any) -> list[float]:
    """Return how far removing each of the first samples moves the sum, clipped to 1."""
    plan, style = plan_of(model, params, data, method=method), clipping.flat(max_norm=1.0)
    masks = everyone_and_all_but_one(plan.batch_size, min(4, plan.batch_size))
    present, *others = sums_of(model, params, data, masks, plan=plan, style=style, **how)
    return [distance(present, absent) for absent in others]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
def test_tokens_that_each_round_up_move_the_sum_by_at_most_its_sensitivity(method):
    """In float32, every token between two that cancel would be rounded up to twice its size."""
    x = torch.full((2, 240, 16), 0.5)
    x[:, 0], x[:, -1] = 1.3 * 2**23, -1.3 * 2**23
    assert max(moves(*linear_case(x, torch.ones(2, 240, 16)), method=method)) <= 1 + 1e-6


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
def test_a_sample_that_cancels_does_not_magnify_another(method):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 2, 5, generator=generator)
    x[0] = 10.0
    x[1, 0] = 1e6 * torch.randn(5, generator=generator)
    x[1, 1] = -x[1, 0]
    assert max(moves(*linear_case(x, torch.ones(3, 2, 3)), method=method)) <= 1 + 1e-6


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
def test_a_large_batch_of_aligned_samples_is_not_rounded_over_the_bound(method):
    x = torch.linspace(1, 2, 6).expand(1024, 1, 6) * torch.linspace(2, 3, 1024).view(-1, 1, 1)
    assert max(moves(*linear_case(x, torch.ones(1024, 1, 4)), method=method)) <= 1 + 1e-6


# --- the same with blocks compiled, and with sums that are left for the noise to be made ---------------------------

BLOCKS = CompiledRunner(backend="aot_eager")
COMPILED_MODEL = language_model(tied=True)
lazy_or_not = pytest.mark.parametrize("lazy", [False, True], ids=["evaluated", "lazy"])


@lazy_or_not
@pytest.mark.parametrize("gain", ["ordinary", "outlier", "nan", "inf"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
def test_compiled_one_sample_moves_the_sum_by_at_most_its_sensitivity(method, gain, lazy):
    check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
        COMPILED_MODEL, params_of(COMPILED_MODEL), language_data(GAINS[gain]), method=method, style=STYLES["flat"],
        dtype=torch.float32, blocks=BLOCKS, lazy=lazy,
    )  # fmt: skip


CANCELLING_PARAMS = {"w": torch.zeros(16, 16)}
CANCELLING = from_loss(lambda p, d: (ops.linear(d["x"], p["w"]) * d["g"]).sum((1, 2)), CANCELLING_PARAMS)


@lazy_or_not
@pytest.mark.parametrize("scale", [1.0, 1e6])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
def test_compiled_tokens_that_cancel_move_the_sum_by_at_most_its_sensitivity(method, scale, lazy):
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(3, 1, 16, generator=draw) + 1e-3 * torch.randn(3, 60, 16, generator=draw)
    g = torch.randn(3, 60, 16, generator=draw)
    x[0], g[0] = scale * x[0], scale * (g[0] - g[0].mean(0))
    found = moves(CANCELLING, CANCELLING_PARAMS, {"x": x, "g": g}, method=method, blocks=BLOCKS, lazy=lazy)
    assert max(found) <= 1 + 1e-6
    assert max(found) > 0.9, "nothing was clipped, so nothing was tested"


@lazy_or_not
@pytest.mark.parametrize("mutate", ["records halved", "carry halved"])
def test_the_check_notices_compiled_blocks_that_leave_something_out(mutate, lazy, monkeypatch):
    """Norms of less than what is summed: of two backwards, the one that measures is wrong."""
    real, calls = CompiledRunner.tapped_vjp, []

    def wrong(self, block, *args):
        out, pull = real(self, block, *args)

        def less(gradient):
            carry, records = pull(gradient)
            calls.append(block.name)
            if calls.count(block.name) % 2 == 0:
                return carry, records
            if mutate == "carry halved":
                return tree.map(lambda leaf: leaf / 2, carry), records
            halved = {
                p: [Dense(fdp.gradients.rules.per_sample_gradient(r) / 2) for r in found]
                for p, found in records.items()
            }
            return carry, halved

        return out, less

    monkeypatch.setattr(CompiledRunner, "tapped_vjp", wrong)
    with pytest.raises(AssertionError):
        check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
            COMPILED_MODEL, params_of(COMPILED_MODEL), language_data(3.0), method=Within(Method.FLASH, 0.0),
            style=STYLES["flat"], dtype=torch.float32, blocks=BLOCKS, lazy=lazy,
        )  # fmt: skip


# --- the same with gradients preconditioned before they are clipped --------------------------------------------------


def preconditioned(model: Model) -> Transform:
    """Roots as K-FAC makes them, up to 30 times as large in one direction as in another; of vectors, diagonals."""
    sides = {}
    for path in sorted(model.trainable):
        rows, *rest = model.leaves[path].shape
        if not rest:
            each = 1 + 10 * keys.uniform(keys.fold_in(keys.key(1), path), (rows,))
            sides[path] = Sides(LowRankMap(each, each.new_zeros(rows, 0), each.new_zeros(0, 0)), None)
        else:
            both = [keys.normal(keys.fold_in(keys.key(i), path), (n, n)) for i, n in enumerate((rows, math.prod(rest)))]
            sides[path] = Sides(*(MatrixMap(a @ a.mT / len(a) + 0.1 * torch.eye(len(a))) for a in both))
    return partial(map_record, sides)


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", list(SLACK), ids=["float32", "bfloat16"])
@pytest.mark.parametrize("method", STYLED, ids=lambda m: m.value)
def test_preconditioned_one_sample_moves_the_sum_by_at_most_its_sensitivity(method, dtype, tied, gain):
    model = language_model(tied=tied)
    check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
        model, params_of(model), language_data(GAINS[gain]), method=method, style=STYLES["flat"], dtype=dtype,
        transform=preconditioned(model),
    )  # fmt: skip


@pytest.mark.parametrize("pixel", [1e6, -1e20, torch.nan, torch.inf])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
def test_preconditioned_extreme_inputs_move_the_sum_by_at_most_its_sensitivity(method, pixel):
    model = cnn(channels=(3, 4), side=4, classes=3)
    image = torch.rand(BATCH, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    image[1] = pixel
    data = {"image": image, "label": torch.tensor([0, 1, 2, 0])}
    check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
        model, params_of(model), data, method=method, style=STYLES["flat"], dtype=torch.float32,
        transform=preconditioned(model),
    )  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_a_sample_that_is_not_finite_in_one_leaf_contributes_nothing_to_any(style):
    norms = Norms({"a": torch.tensor([0.1, torch.nan, 0.1]), "b": torch.tensor([0.1, 0.1, torch.inf])})
    clip = STYLES[style].clip(norms, STYLES[style].init())
    assert all(factor[1:].tolist() == [0.0, 0.0] and factor[0] > 0 for factor in clip.factors.values())


def check_padding_is_invisible(model: Model, params: Any, *, method: Method | Within) -> None:
    """The content of a padded sample changes not one bit of the sum."""
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    totals = []
    for gain in (1.0, 1e6, torch.nan):
        data = language_data(gain)
        plan = plan_of(model, params, data, method=method)
        totals.append(total_of(model, params, data, mask, plan=plan, style=STYLES["flat"]))
    for other in totals[1:]:
        assert all(torch.equal(totals[0].value[p], other.value[p]) for p in other.value)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
def test_padding_is_invisible(method):
    model = language_model(tied=True)
    check_padding_is_invisible(model, params_of(model), method=method)


fold_in, normal = keys.fold_in, keys.normal  # as they are before any mutation


def check_noise_is_added_once_and_scaled_by_the_sensitivity(*, microbatches: int) -> None:
    """With plain SGD at rate 1 the step subtracts the noised mean: times B, minus the clipped sum, it is the noise."""
    key, z, expected_batch_size = keys.key(7), 200.0, 32
    model = language_model(tied=True)
    params, everything = params_of(model), language_data(2.0)
    plan = make_plan(model, params, everything, method=Method.MATERIALIZE)
    clean = total_of(model, params, everything, torch.ones(BATCH), plan=plan, style=STYLES["flat"])

    data = tree.map(lambda leaf: leaf.reshape(microbatches, -1, *leaf.shape[1:]), everything)
    plan = make_plan(model, params, tree.map(lambda leaf: leaf[0], data), method=Method.AUTO)
    sampling = poisson(100, expected_batch_size=expected_batch_size)
    mechanism = Mechanism(sampling, STYLES["flat"], z)
    step = make_train_step(model, sgd(1.0), mechanism=mechanism, plan=plan)
    state = init_state(model, params, sgd(1.0), mechanism)
    batch = trusted_batch(data, torch.ones(microbatches, BATCH // microbatches), sampling, step=0)
    after, _ = step(state, batch, key)
    drawn_by = make_stages(model, sgd(1.0), mechanism=mechanism, plan=plan).key(key, state.step)

    before, now = tree.flatten(state.params), tree.flatten(after.params)
    for path, value in clean.value.items():
        noise = (before[path] - now[path]).double() * expected_batch_size - value
        expected = z * 0.25 * normal(fold_in(drawn_by, path), tuple(value.shape), dtype=torch.float64)
        torch.testing.assert_close(noise, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_noise_is_added_once_and_scaled_by_the_sensitivity(microbatches):
    check_noise_is_added_once_and_scaled_by_the_sensitivity(microbatches=microbatches)


# --- mutations: each is a mistake someone has made; the checks above must fail on it --------------------------------


def run_sensitivity_check(*, dtype: torch.dtype = torch.float32, style: str = "flat") -> None:
    model = language_model(tied=True)
    for seed in range(3):
        for method in (Method.GHOST_BK, Method.AUTO):
            check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
                model, params_of(model, seed), language_data(3.0), method=method, style=STYLES[style], dtype=dtype
            )


def run_preconditioned_check() -> None:
    model = language_model(tied=True)
    for method in (Method.GHOST_BK, Method.GHOST):
        check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
            model, params_of(model), language_data(3.0), method=method, style=STYLES["flat"], dtype=torch.float32,
            transform=preconditioned(model),
        )  # fmt: skip


def norm_of_the_output_gradient_only(monkeypatch):
    real = fdp.gradients.rules.Pair

    def wrong(record):
        if isinstance(record, real) and not isinstance(record.left, fdp.gradients.rules.OneHot):
            return record.left.float().square().sum((1, 2, 3))
        return fdp.gradients.rules.squared_norm(record)

    monkeypatch.setattr(fdp.gradients.per_sample, "gram_squared_norm", wrong)


def preconditioned_after_the_norm_is_taken(monkeypatch):
    real = per_sample_norms

    def wrong(*args, transform, **options):
        losses, norms, _ = real(*args, **options)
        return losses, norms, real(*args, transform=transform, **options)[2]

    monkeypatch.setitem(globals(), "per_sample_norms", wrong)


def one_side_only_in_the_norm(monkeypatch):
    real = per_sample_norms

    def wrong(*args, transform, **options):
        half = partial(map_record, {path: sides._replace(right=None) for path, sides in transform.args[0].items()})
        losses, norms, _ = real(*args, transform=half, **options)
        return losses, norms, real(*args, transform=transform, **options)[2]

    monkeypatch.setitem(globals(), "per_sample_norms", wrong)


def cross_terms_of_a_tied_leaf_forgotten(monkeypatch):
    monkeypatch.setattr(fdp.gradients.per_sample, "cross_term", lambda a, b: torch.zeros(BATCH))
    monkeypatch.setattr(fdp.gradients.per_sample, "_merge", lambda records, choice: records)

    def no_cross(records, choice):
        return sum(fdp.gradients.rules.squared_norm(record) for record in records)

    monkeypatch.setattr(fdp.gradients.per_sample, "_squared", no_cross)


def factor_rounded_to_bfloat16(monkeypatch):
    real = fdp.gradients.rules.weighted_gradient
    monkeypatch.setattr(fdp.gradients.launches, "weighted_gradient", lambda r, f: real(r, f.bfloat16().float()))


def factor_applied_without_a_guard_for_nan(monkeypatch):
    def wrong(record, factors):
        return torch.einsum("b,b...->...", factors, fdp.gradients.rules.per_sample_gradient(record).double())

    monkeypatch.setattr(fdp.gradients.launches, "weighted_gradient", wrong)


def not_clipped_at_all(monkeypatch):
    monkeypatch.setattr(clipping, "clip_factors", lambda norms, max_norm: torch.ones_like(norms))


def sensitivity_of_one_layer_claimed_for_all(monkeypatch):
    real = clipping._joined

    def wrong(norms: Norms, parts: Sequence[Clip]) -> Clip:
        clip = real(norms, parts)
        return Clip(clip.factors, parts[0].sensitivity, bound=clip.bound)

    monkeypatch.setattr(clipping, "_joined", wrong)


def noise_skipped(monkeypatch):
    monkeypatch.setattr(fdp.finish, "add_noise", lambda total, key, noise_multiplier, shard_windows: total.value)


def noise_once_per_microbatch(monkeypatch):
    real = fdp.stages.clipped_sum

    def wrong(stash, clip, *onto, **options):
        total = real(stash, clip, *onto, **options)
        return total._replace(value=add_noise(total, key=keys.key(7), noise_multiplier=200.0))

    monkeypatch.setattr(fdp.stages, "clipped_sum", wrong)


def mean_before_noise(monkeypatch):
    real = fdp.finish.add_noise

    def wrong(total, key, noise_multiplier, shard_windows):
        mean = total._replace(value={p: v / 32 for p, v in total.value.items()})
        return real(mean, key=key, noise_multiplier=noise_multiplier)

    monkeypatch.setattr(fdp.finish, "add_noise", wrong)
    monkeypatch.setattr(fdp.finish, "expected_mean", lambda leaves, sampling: leaves)


def noise_scaled_by_the_batch(monkeypatch):
    real = fdp.finish.add_noise

    def wrong(total, key, noise_multiplier, shard_windows):
        return real(total._replace(sensitivity=total.sensitivity / 32), key=key, noise_multiplier=noise_multiplier)

    monkeypatch.setattr(fdp.finish, "add_noise", wrong)


def the_same_noise_for_every_leaf(monkeypatch):
    monkeypatch.setattr("fdp.privacy.noise.keys.fold_in", lambda key, path: key)
    monkeypatch.setattr("fdp.privacy.noise.keys.fold_in_nonces", lambda key, nonces: key.expand(len(nonces), 8))


def padding_counted(monkeypatch):
    monkeypatch.setattr("fdp.types.Clip.masked", lambda self, mask: self)


def run_nan_check() -> None:
    model = language_model(tied=True)
    check_one_sample_moves_the_sum_by_at_most_its_sensitivity(
        model, params_of(model), language_data(torch.nan), method=Method.AUTO, style=STYLES["flat"],
        dtype=torch.float32,
    )  # fmt: skip


def run_padding_check() -> None:
    model = language_model(tied=True)
    check_padding_is_invisible(model, params_of(model), method=Method.AUTO)


def run_noise_check() -> None:
    check_noise_is_added_once_and_scaled_by_the_sensitivity(microbatches=2)


MUTATIONS = [
    (preconditioned_after_the_norm_is_taken, run_preconditioned_check),
    (one_side_only_in_the_norm, run_preconditioned_check),
    (norm_of_the_output_gradient_only, run_sensitivity_check),
    (cross_terms_of_a_tied_leaf_forgotten, run_sensitivity_check),
    (factor_rounded_to_bfloat16, run_sensitivity_check),
    (not_clipped_at_all, run_sensitivity_check),
    (sensitivity_of_one_layer_claimed_for_all, lambda: run_sensitivity_check(style="per-layer")),
    (factor_applied_without_a_guard_for_nan, run_nan_check),
    (padding_counted, run_padding_check),
    (noise_skipped, run_noise_check),
    (noise_once_per_microbatch, run_noise_check),
    (mean_before_noise, run_noise_check),
    (noise_scaled_by_the_batch, run_noise_check),
    (the_same_noise_for_every_leaf, run_noise_check),
]


@pytest.mark.parametrize(("mutate", "check"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_the_check_notices(mutate, check, monkeypatch):
    check()
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("leaf", sorted(language_model(tied=True).leaves))
def test_the_check_notices_a_leaf_left_out_of_the_norm(leaf, monkeypatch):
    real = fdp.types.Norms.total
    monkeypatch.setattr(
        "fdp.types.Norms.total", lambda self: real(Norms(self.squared | {leaf: 0 * self.squared[leaf]}))
    )
    with pytest.raises(AssertionError):
        run_sensitivity_check()
