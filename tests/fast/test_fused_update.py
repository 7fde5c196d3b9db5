"""The fused end of a step is the plain one; the copies it computes with are always those of the parameters at hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fdp import keys, tree
from fdp.fast.compiled import CompiledRunner
from fdp.fast.fused_update import FusedUpdate
from fdp.gradients.execution import LOCAL, Execution
from fdp.gradients.lazy_sum import LazySum, evaluate
from fdp.gradients.plan import Method, make_plan
from fdp.models import mlp
from fdp.optimizers import (
    Optimizer,
    adam,
    adamw,
    add_decayed_weights,
    apply_updates,
    chain,
    scale_by_learning_rate,
    scale_by_schedule,
    trace,
    warmup_cosine,
)
from fdp.optimizers.base import Momentum
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.noise import add_noise, declare_sensitivity, expected_mean
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import init_state, make_train_step
from fdp.types import Batch, ClippedSum, FdpError, Flat, TrainState

MODEL = mlp(widths=(5, 7, 6), classes=3)
EXPECTED = 8.0
SAMPLING = poisson(100, expected_batch_size=EXPECTED)
SHARED = CompiledRunner(backend="aot_eager")


def no_vectors(params: Any) -> Any:
    return tree.map(lambda leaf: leaf.ndim > 1, params)


def by_halves() -> Optimizer:
    """Momentum on half of the gradient: something in front, with a state of its own."""
    front = scale_by_schedule(lambda step: 0.5 + step.double())
    parts = [front, trace(0.8), add_decayed_weights(0.1), scale_by_learning_rate(1e-2)]
    whole = chain(*parts)
    return whole._replace(descent=Momentum(front, 1e-2, 0.8, 0.1, whole.update))


OPTIMIZERS = {
    "momentum": by_halves,
    "adam": partial(adam, 1e-2),
    "adamw": partial(adamw, 1e-2, weight_decay=0.1),
    "mask-schedule": partial(adamw, warmup_cosine(3e-2, warmup_steps=2, steps=9), weight_decay=0.1, mask=no_vectors),
}
STYLES = {
    "flat": clipping.flat(max_norm=0.25),
    "quantile": clipping.quantile(max_norm=0.25, target_quantile=0.5, learning_rate=0.3, count_noise=1.0),
}


def mechanism_of(style: str = "flat", z: float = 1.0) -> Mechanism:
    return Mechanism(SAMPLING, STYLES[style], z) if z else without_noise(SAMPLING, STYLES[style])


def batch_of(data: Any) -> Batch:
    return trusted_batch(data, torch.ones(1, 4), SAMPLING, step=None)


def state_of(optimizer: Optimizer, mechanism: Mechanism, model=MODEL, seed: int = 0) -> TrainState:
    return init_state(model, model.init(keys.key(seed)), optimizer, mechanism)


def sums_of(step: int, paths: Any, *, rows: int = 3) -> ClippedSum:
    """Lazy sums, but for one leaf; the second row must not be read."""
    draw = torch.Generator().manual_seed(step)
    value: dict[str, Any] = {}
    for path in paths:
        leaf = torch.randn(rows, *MODEL.leaves[path].shape, generator=draw)
        factors = torch.rand(rows, generator=draw, dtype=torch.float64)
        factors[1], leaf[1] = 0, torch.nan
        value[path] = LazySum(leaf, factors)
    first = next(iter(value))
    value[first] = value[first].evaluate()
    return declare_sensitivity(value, torch.tensor(0.125 * (step + 1), dtype=torch.float64))


def noised(total: ClippedSum, key: Tensor, mechanism: Mechanism) -> Flat:
    z = mechanism.noise_multiplier
    return add_noise(total, key=key, noise_multiplier=z) if z else total.value


def plain(
    state: TrainState, total: ClippedSum, tally: Tensor, key: Tensor, optimizer: Optimizer, mechanism: Mechanism
) -> TrainState:
    flat = tree.flatten(state.params)
    noisy = noised(evaluate(total), key, mechanism)
    mean = {path: leaf.float() for path, leaf in expected_mean(noisy, SAMPLING).items()}
    trained = {path: flat[path] for path in mean}
    updates, opt = optimizer.update(mean, state.opt, trained)
    params = tree.unflatten(state.params, flat | apply_updates(trained, updates))
    return TrainState(params, opt, mechanism.clip.update(state.clip, tally, key, EXPECTED), state.step + 1)


def fused_of(optimizer: Optimizer, mechanism: Mechanism, dtype=torch.float32, model=MODEL) -> FusedUpdate:
    rule = optimizer.rule
    assert rule is not None
    return FusedUpdate(model, rule, mechanism, dtype)


@pytest.mark.parametrize("z", [0.0, 1.3])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_fused_update_equals_noise_mean_and_update_in_turn(name, style, z):
    frozen = MODEL._replace(frozen=frozenset({"layers.0.weight", "head.bias"}))
    optimizer, mechanism = OPTIMIZERS[name](), mechanism_of(style, z)
    want, got = (state_of(optimizer, mechanism, frozen) for _ in range(2))
    update, places = fused_of(optimizer, mechanism, torch.bfloat16, frozen), [p.data_ptr() for p in tree.leaves(got)]
    paths = [path for path in frozen.leaves if path in frozen.trainable]
    for t in range(4):
        total, key, tally = sums_of(t, paths), keys.fold_in(keys.key(5), t), torch.tensor(2.0)
        want = plain(want, total, tally, key, optimizer, mechanism)
        update.refresh_copies(got.params)
        got = update(got, total, tally, key)
        torch.testing.assert_close(tree.flatten(got), tree.flatten(want), rtol=2e-6, atol=2e-7)
        for path, leaf in tree.flatten(update.compute_weights(got.params)).items():
            assert torch.equal(leaf, tree.flatten(got.params)[path].bfloat16()), path
    assert [leaf.data_ptr() for leaf in tree.leaves(got)] == places


def test_the_noise_is_scaled_by_the_sensitivity_of_the_sum_and_added_once():
    """With rates and moments that make the update the sign of the mean, large noise decides every sign."""
    optimizer, mechanism = adamw(1.0, b1=0.0, b2=0.0, eps=1.0, weight_decay=0.0), mechanism_of(z=3.0)
    key = keys.key(9)
    for sensitivity in (0.5, 2.0):
        state = state_of(optimizer, mechanism)
        before = tree.map(torch.clone, state.params)
        zeros = {path: torch.zeros(spec.shape, dtype=torch.float64) for path, spec in MODEL.leaves.items()}
        update = fused_of(optimizer, mechanism)
        update(state, ClippedSum(zeros, torch.tensor(sensitivity)), torch.tensor(0.0), key)
        for path, leaf in tree.flatten(state.params).items():
            draw = keys.normal(keys.fold_in(key, path), tuple(leaf.shape), dtype=torch.float64)
            noise = 3.0 * sensitivity / EXPECTED * draw
            moved = (tree.flatten(before)[path] - leaf).double()  # noise / (|noise| + 1)
            torch.testing.assert_close(moved, noise / (noise.abs() + 1), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- the copies


@pytest.mark.parametrize("z", [-1.0, float("nan"), float("inf")])
def test_noise_that_add_gaussian_would_refuse_is_refused(z):
    with pytest.raises(FdpError, match="noise_multiplier: expected a finite number, 0 or more"):
        fused_of(adamw(1e-3), mechanism_of(z=z))


def weights_are_those_of(update: FusedUpdate, params: Any) -> bool:
    update.refresh_copies(params)
    flat, found = tree.flatten(params), tree.flatten(update.compute_weights(params))
    return all(torch.equal(found[path], leaf.to(update.dtype)) for path, leaf in flat.items())


def after_a_step(dtype=torch.bfloat16) -> tuple[FusedUpdate, TrainState]:
    optimizer, mechanism = adamw(1e-1), mechanism_of()
    update, state = fused_of(optimizer, mechanism, dtype), state_of(optimizer, mechanism)
    update.refresh_copies(state.params)
    return update, update(state, sums_of(0, MODEL.leaves), torch.tensor(0.0), keys.key(1))


def test_copies_follow_parameters_that_the_caller_changes_in_place():
    update, state = after_a_step()
    assert weights_are_those_of(update, state.params)
    for leaf in tree.leaves(state.params):
        leaf.add_(1)
        assert weights_are_those_of(update, state.params)


def test_copies_follow_another_state_and_back():
    update, state = after_a_step()
    other = state_of(adamw(1e-1), mechanism_of(), seed=3)
    for params in (other.params, state.params, tree.map(torch.clone, state.params), other.params):
        assert weights_are_those_of(update, params)


def test_copies_stay_where_they_are():
    """A recorded graph looks for them there."""
    update, _ = after_a_step()
    places = {path: copy.data_ptr() for path, copy in update.copies.items()}
    assert weights_are_those_of(update, state_of(adamw(1e-1), mechanism_of(), seed=3).params)
    assert {path: copy.data_ptr() for path, copy in update.copies.items()} == places


def test_copies_are_not_made_again_after_the_updates_own_writes(monkeypatch):
    update, state = after_a_step()
    copies = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other, **_: copies.append(other))
    update.refresh_copies(state.params)
    assert copies == []


def test_other_parameters_in_the_same_place_are_other_parameters():
    """An allocator gives a new state the memory of one that is gone: same addresses, same number of writes."""
    update, state = after_a_step()
    memory = {path: np.zeros(leaf.shape, np.float32) for path, leaf in tree.flatten(state.params).items()}
    params = tree.unflatten(state.params, {path: torch.from_numpy(array) for path, array in memory.items()})
    assert weights_are_those_of(update, params)
    versions = [leaf._version for leaf in tree.leaves(params)]
    del params
    for array in memory.values():
        array += 1  # someone else's values
    params = tree.unflatten(state.params, {path: torch.from_numpy(array) for path, array in memory.items()})
    assert [leaf._version for leaf in tree.leaves(params)] == versions
    assert weights_are_those_of(update, params)


def test_parameters_that_are_in_the_compute_dtype_are_computed_with_as_they_are():
    update, state = after_a_step()
    half = tree.map(lambda leaf: leaf.bfloat16() + 1, state.params)
    assert weights_are_those_of(update, half)
    update, state = after_a_step(torch.float32)
    assert update.copies == {}
    assert weights_are_those_of(update, state.params)


@pytest.mark.parametrize("change", ["in place", "another state", "nothing"])
def test_a_step_computes_with_the_parameters_it_is_given(change, monkeypatch):
    """Losses are those of a step that knows nothing of what came before."""
    check_fresh(change)


def check_fresh(change: str) -> None:
    optimizer, mechanism = adamw(1e-1), mechanism_of()
    draw = torch.Generator().manual_seed(0)
    data = {"image": torch.randn(1, 4, 5, generator=draw), "label": torch.tensor([[0, 1, 2, 0]])}
    batch = batch_of(data)
    example = tree.map(lambda leaf: leaf[0], data)
    plan = make_plan(MODEL, MODEL.init(keys.key(0)), example, method=Method.FLASH_BK, dtype=torch.bfloat16)
    make = partial(make_train_step, MODEL, optimizer, mechanism=mechanism, plan=plan)
    step, plain_step = make(execution=Execution(runner=SHARED), donate=("state",)), make()
    state = state_of(optimizer, mechanism)
    for t in range(2):
        state, _ = step(state, batch, keys.fold_in(keys.key(2), t))
    if change == "in place":
        for leaf in tree.leaves(state.params):
            leaf.mul_(1.5)
    elif change == "another state":
        state = state_of(optimizer, mechanism, seed=7)
    _, expected = plain_step(tree.map(torch.clone, state), batch, keys.key(3))
    _, metrics = step(state, batch, keys.key(3))
    torch.testing.assert_close(metrics.losses, expected.losses, rtol=1e-2, atol=1e-2)


def test_a_copy_that_is_never_refreshed_is_noticed(monkeypatch):
    real = FusedUpdate.refresh_copies
    monkeypatch.setattr(FusedUpdate, "refresh_copies", lambda self, params: None if self.copies else real(self, params))
    for change in ("in place", "another state"):
        with pytest.raises(AssertionError):
            check_fresh(change)


def test_a_step_that_may_not_write_takes_the_plain_end(monkeypatch):
    monkeypatch.setattr(FusedUpdate, "__call__", lambda *_: pytest.fail("not donated"))
    optimizer, mechanism = adamw(1e-1), mechanism_of()
    data = {"image": torch.ones(1, 4, 5), "label": torch.tensor([[0, 1, 2, 0]])}
    plan = make_plan(MODEL, MODEL.init(keys.key(0)), tree.map(lambda leaf: leaf[0], data))
    step = make_train_step(MODEL, optimizer, mechanism=mechanism, plan=plan, execution=Execution(runner=SHARED))
    state = state_of(optimizer, mechanism)
    before = tree.map(torch.clone, state)
    after, _ = step(state, batch_of(data), keys.key(0))
    assert all(map(torch.equal, tree.leaves(before), tree.leaves(state)))
    assert not torch.equal(tree.leaves(after.params)[0], tree.leaves(state.params)[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_wraps_another_is_never_bypassed(name, monkeypatch):
    """Not even by a pass that knows of no update but its own: it then does not take the step."""
    own, mechanism = OPTIMIZERS[name](), mechanism_of()

    def still(grads: Any, state: Any, params: Any, reductions: Any) -> Any:
        updates, state = own.update(grads, state, params, reductions)
        return tree.map(torch.zeros_like, updates), state

    optimizer = own._replace(update=still)
    data = {"image": torch.ones(1, 4, 5), "label": torch.tensor([[0, 1, 2, 0]])}
    plan = make_plan(MODEL, MODEL.init(keys.key(0)), tree.map(lambda leaf: leaf[0], data))
    options: Any = {"mechanism": mechanism, "plan": plan, "execution": Execution(runner=SHARED), "donate": ("state",)}
    state = state_of(optimizer, mechanism)
    before = tree.map(torch.clone, state.params)
    after, _ = make_train_step(MODEL, optimizer, **options)(state, batch_of(data), keys.key(0))
    assert all(map(torch.equal, tree.leaves(after.params), tree.leaves(before)))


@pytest.mark.parametrize("z", [0.0, 1.3])
def test_a_private_step_with_something_in_front_is_the_plain_step(z, monkeypatch):
    """Noise before the front, once, and its draws those of the plain step."""
    optimizer, mechanism = by_halves(), mechanism_of(z=z)
    draw = torch.Generator().manual_seed(1)
    data = {"image": torch.randn(1, 4, 5, generator=draw), "label": torch.tensor([[0, 1, 2, 0]])}
    plan = make_plan(MODEL, MODEL.init(keys.key(0)), tree.map(lambda leaf: leaf[0], data))
    made = []
    for execution in (LOCAL, Execution(runner=SHARED)):
        donate = ("state",)
        step = make_train_step(MODEL, optimizer, mechanism=mechanism, plan=plan, donate=donate, execution=execution)
        state = state_of(optimizer, mechanism)
        for t in range(3):
            state, _ = step(state, batch_of(data), keys.key(t))
        made.append(tree.flatten(state))
    torch.testing.assert_close(made[1], made[0], rtol=1e-5, atol=1e-6)
