"""The contract on the fused path: compiled blocks, lazy sums, noise and AdamW in one pass over every leaf.

With ``b1 = 0`` AdamW's first moment is the noised mean itself: times B, it is what the step released.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fdp.fast.fused_update
import fdp.gradients.clipped_sum
import fdp.stages
from fdp import keys, tree
from fdp.checks.first_call import Checks
from fdp.fast.compiled import CompiledRunner
from fdp.fast.fused_update import FusedUpdate
from fdp.fast.noisy_update import NoisyUpdate, first_moments
from fdp.gradients.execution import Execution
from fdp.gradients.lazy_sum import LazySum, evaluate
from fdp.gradients.plan import Method, make_plan
from fdp.optimizers import adamw
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.noise import add_noise
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.stages import make_stages
from fdp.step import init_state, make_train_step
from fdp.types import Clip, Flat
from tests.test_contract import BATCH, STYLES, language_data, language_model, params_of, total_of

MODEL = language_model(tied=True)
SAMPLING = poisson(100, expected_batch_size=32)
RUNNER = CompiledRunner(backend="eager")
KEY, Z, MAX_NORM = keys.key(7), 200.0, 0.25
fold_in, normal = keys.fold_in, keys.normal  # as they are before any mutation


def released(z: float, *, gain: float = 2.0, mask: Tensor | None = None, microbatches: int = 2) -> Flat:
    """Return what a fused step releases: B times the noised mean, and by ``noise key`` the key of its noise."""
    mechanism = Mechanism(SAMPLING, STYLES["flat"], z) if z else without_noise(SAMPLING, STYLES["flat"])
    optimizer, params = adamw(1e-3, b1=0.0), params_of(MODEL)
    data = tree.map(lambda leaf: leaf.reshape(microbatches, -1, *leaf.shape[1:]), language_data(gain))
    plan = make_plan(MODEL, params, tree.map(lambda leaf: leaf[0], data), method=Method.AUTO)
    options: Any = {"mechanism": mechanism, "plan": plan, "execution": Execution(runner=RUNNER), "donate": ("state",)}
    mask = torch.ones(BATCH) if mask is None else mask
    batch = trusted_batch(data, mask.view(microbatches, -1), SAMPLING, step=0)
    state = init_state(MODEL, tree.map(torch.clone, params), optimizer, mechanism)
    drawn_by = make_stages(MODEL, optimizer, **options).key(KEY, state.step)
    after, _ = make_train_step(MODEL, optimizer, checks=Checks.SKIPPED, **options)(state, batch, KEY)
    mean = first_moments(after.opt, sorted(MODEL.trainable))
    return {path: leaf.double() * SAMPLING.expected_batch_size for path, leaf in mean.items()} | {"noise key": drawn_by}


def distance(a: Flat, b: Flat) -> float:
    return float(torch.stack([(a[path] - b[path]).square().sum() for path in MODEL.trainable]).sum().sqrt())


def check_noise(*, microbatches: int = 2) -> None:
    """The released sum is the clipped sum plus z C times one draw per element."""
    params, everything = params_of(MODEL), language_data(2.0)
    plan = make_plan(MODEL, params, everything, method=Method.MATERIALIZE)
    clean = total_of(MODEL, params, everything, torch.ones(BATCH), plan=plan, style=STYLES["flat"])
    found = released(Z, microbatches=microbatches)
    for path, value in clean.value.items():
        drawn = normal(fold_in(found["noise key"], path), tuple(value.shape), dtype=torch.float64)
        torch.testing.assert_close(found[path] - value, Z * MAX_NORM * drawn, rtol=1e-5, atol=1e-3)


def check_sensitivity(*, gain: float = 2.0) -> None:
    """Leaving out any one sample moves the released sum by at most C, and some sample moves it by about C."""
    whole, moved = released(0.0, gain=gain), []
    for b in range(BATCH):
        mask = torch.ones(BATCH)
        mask[b] = 0.0
        moved.append(distance(whole, released(0.0, gain=gain, mask=mask)))
    assert max(moved) <= MAX_NORM * (1 + 1e-5)
    assert max(moved) > 0.9 * MAX_NORM, "nothing was clipped, so nothing was tested"


def test_the_step_is_fused(monkeypatch):
    passes, real = [], FusedUpdate.__call__
    monkeypatch.setattr(FusedUpdate, "__call__", lambda self, *args: passes.append(0) or real(self, *args))
    released(Z)
    assert len(passes) == 1


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_noise_is_added_once_and_scaled_by_the_sensitivity(microbatches):
    check_noise(microbatches=microbatches)


@pytest.mark.parametrize("gain", [2.0, 1e6, torch.nan, torch.inf])
def test_one_sample_moves_the_released_sum_by_at_most_its_sensitivity(gain):
    check_sensitivity(gain=gain)


# --- mutations: each is a mistake someone has made; the checks above must fail on it --------------------------------


def noise_skipped(monkeypatch):
    monkeypatch.setattr(fdp.fast.fused_update, "noise_deviation", lambda total, z: 0 * total.sensitivity.double())


def noise_scaled_by_the_batch(monkeypatch):
    real = fdp.fast.fused_update.noise_deviation
    monkeypatch.setattr(fdp.fast.fused_update, "noise_deviation", lambda total, z: real(total, z) / 32)


def noise_twice(monkeypatch):
    real = fdp.stages.lazy_clipped_sum

    def wrong(stash, clip, onto):
        total = evaluate(real(stash, clip, onto))
        return total._replace(value=add_noise(total, key=keys.key(7), noise_multiplier=Z))

    monkeypatch.setattr(fdp.stages, "lazy_clipped_sum", wrong)


def the_same_noise_for_every_leaf(monkeypatch):
    real = NoisyUpdate._children
    monkeypatch.setattr(NoisyUpdate, "_children", lambda self, key, paths: real(self, key, [paths[0]] * len(paths)))


def mean_over_another_number(monkeypatch):
    real = NoisyUpdate.__call__

    def wrong(self, *args, expected_batch_size, **options):
        return real(self, *args, expected_batch_size=expected_batch_size + 1, **options)

    monkeypatch.setattr(NoisyUpdate, "__call__", wrong)


def not_clipped_at_all(monkeypatch):
    monkeypatch.setattr(clipping, "clip_factors", lambda norms, max_norm: torch.ones_like(norms))


def factors_without_a_guard_for_nan(monkeypatch):
    def wrong(rows, factors):
        return LazySum(rows * factors.view(-1, *[1] * (rows.ndim - 1)), torch.ones_like(factors))

    monkeypatch.setattr(fdp.gradients.clipped_sum, "LazySum", wrong)


def padding_counted(monkeypatch):
    monkeypatch.setattr(Clip, "masked", lambda self, mask: self)


MUTATIONS = [
    (noise_skipped, check_noise),
    (noise_scaled_by_the_batch, check_noise),
    (noise_twice, check_noise),
    (the_same_noise_for_every_leaf, check_noise),
    (mean_over_another_number, check_noise),
    (not_clipped_at_all, check_sensitivity),
    (padding_counted, check_sensitivity),
    (factors_without_a_guard_for_nan, lambda: check_sensitivity(gain=torch.nan)),
]


@pytest.mark.parametrize(("mutate", "check"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_the_check_notices(mutate, check, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check()
