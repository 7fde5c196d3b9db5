"""The fused update against the plain path: add_gaussian, scale, optimizer.update, apply_updates, cast."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fdp import keys, optimizers, tree
from fdp.fast.noisy_update import NoisyUpdate, _first
from fdp.gradients.lazy_sum import LazySum
from fdp.optimizers import Optimizer, adam, adamw, apply_updates, chain, clip_by_global_norm, warmup_cosine
from fdp.optimizers.adam import AdamState
from fdp.optimizers.base import Momentum
from fdp.privacy.noise import add_noise, declare_sensitivity, expected_mean
from fdp.privacy.sampling import poisson
from fdp.types import FdpError, Flat, ShardWindow

SHAPES = {"blocks.0.w": (6, 5), "embed": (7, 16), "norm": (5,), "one": ()}
EXPECTED = 12.0
SAMPLING = poisson(1000, expected_batch_size=EXPECTED)
RATE = warmup_cosine(3e-2, warmup_steps=2, steps=9)


def no_vectors(params: Any) -> Any:
    return tree.map(lambda leaf: leaf.ndim > 1, params)


def momentum(learning_rate: Any, *, weight_decay: float) -> Optimizer:
    parts = [optimizers.trace(0.8), optimizers.add_decayed_weights(weight_decay)]
    whole = chain(*parts, optimizers.scale_by_learning_rate(learning_rate))
    return whole._replace(descent=Momentum(optimizers.scale(1.0), learning_rate, 0.8, weight_decay, whole.update))


OPTIMIZERS = {
    "momentum": lambda: momentum(1e-2, weight_decay=0.0),
    "momentum-schedule": lambda: momentum(RATE, weight_decay=0.1),
    "adam": lambda: adam(1e-2),
    "adam-schedule": lambda: adam(RATE, b1=0.5, b2=0.7),
    "adamw": lambda: adamw(1e-2, weight_decay=0.1),
    "adamw-schedule-mask": lambda: adamw(RATE, weight_decay=0.1, mask=no_vectors),
    "adamw-corrected": lambda: adamw(1e-2, noise_std=0.05, eps_root=1e-3, eps=1e-6),
    "adamw-no-momentum": lambda: adamw(1e-2, b1=0.0, weight_decay=0.0),
}


def fused(optimizer: Optimizer) -> NoisyUpdate:
    rule = optimizer.rule
    assert rule is not None
    return NoisyUpdate(rule)


def params_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> Flat:
    draw = torch.Generator().manual_seed(seed)
    return {path: torch.randn(shape, generator=draw).to(dtype) for path, shape in SHAPES.items()}


def sums_of(step: int, samples: int, dtype: torch.dtype = torch.float32) -> dict[str, LazySum]:
    draw = torch.Generator().manual_seed(100 + step)
    factors = torch.rand(samples, generator=draw, dtype=torch.float64)
    sums = {}
    for path, shape in SHAPES.items():
        rows = torch.randn(samples, *shape, generator=draw).to(dtype)
        if samples > 1:
            factors[1] = 0
            rows[1] = math.nan
        sums[path] = LazySum(rows, factors)
    return sums


def plain_step(optimizer: Optimizer, params: Flat, state: Any, sums: dict[str, LazySum], key: Tensor, z: float) -> Any:
    """The path without kernels, in float64 up to the noise."""
    value = {
        path: sum(f * row.double() for f, row in zip(s.factors.double(), s.rows) if f != 0) for path, s in sums.items()
    }
    value = {path: torch.as_tensor(leaf) for path, leaf in value.items()}
    bound = torch.tensor(1.5, dtype=torch.float64, device=key.device)
    noisy = add_noise(declare_sensitivity(value, bound), key=key, noise_multiplier=z) if z else value
    mean = {path: leaf.to(torch.promote_types(params[path].dtype, torch.float32)) for path, leaf in noisy.items()}
    mean = {path: leaf.to(mean[path].dtype) for path, leaf in expected_mean(noisy, SAMPLING).items()}
    updates, state = optimizer.update(mean, state, params)
    return apply_updates(params, updates), state


def noise_scale(z: float, device: str = "cpu") -> Tensor | None:
    return torch.tensor(1.5 * z, dtype=torch.float64, device=device) if z else None


def assert_trees_close(got: Any, want: Any, rtol: float = 2e-6) -> None:
    got, want = tree.flatten(got), tree.flatten(want)
    assert list(got) == list(want)
    for path in want:
        assert got[path].dtype == want[path].dtype
        torch.testing.assert_close(got[path], want[path], rtol=rtol, atol=2e-7)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("z", [0.0, 0.7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_noisy_update_equals_the_plain_path(name, z, samples):
    optimizer = OPTIMIZERS[name]()
    want, got = params_of(), params_of()
    want_state, state = optimizer.init(want), optimizer.init(got)
    copies = {path: torch.zeros(leaf.shape, dtype=torch.bfloat16) for path, leaf in got.items() if path != "norm"}
    places = [leaf.data_ptr() for leaf in tree.leaves((got, state, copies))]
    update_ = fused(optimizer)
    for step in range(5):
        key, sums = keys.fold_in(keys.key(5), step), sums_of(step, samples)
        want, want_state = plain_step(optimizer, want, want_state, sums, key, z)
        update_(got, state, sums, copies, key=key, noise_scale=noise_scale(z), expected_batch_size=EXPECTED)
        assert_trees_close(got, want)
        assert_trees_close(state, want_state)
        assert all(torch.equal(copy, got[path].bfloat16()) for path, copy in copies.items())
    assert [leaf.data_ptr() for leaf in tree.leaves((got, state, copies))] == places


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_other_dtypes_take_the_plain_path(dtype):
    optimizer = adamw(1e-2)
    want, got = params_of(dtype), params_of(dtype)
    want_state, state = optimizer.init(want), optimizer.init(got)
    update_ = fused(optimizer)
    for step in range(2):
        key, sums = keys.fold_in(keys.key(5), step), sums_of(step, 2)
        want, want_state = plain_step(optimizer, want, want_state, sums, key, 0.7)
        update_(got, state, sums, key=key, noise_scale=noise_scale(0.7), expected_batch_size=EXPECTED)
        assert_trees_close(got, want)
        assert_trees_close(state, want_state)


PLACES = {
    "rows": ShardWindow((6, 5), ((2, 3), (0, 5))),
    "columns": ShardWindow((6, 5), ((0, 6), (1, 3))),
    "box": ShardWindow((6, 5), ((1, 2), (2, 2))),
    "one row, some columns": ShardWindow((6, 5), ((4, 1), (1, 3))),
    "nothing": ShardWindow((6, 5), ((6, 0), (0, 5))),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_shard_is_updated_to_its_part_of_the_full_leaf(name):
    optimizer, place = adamw(1e-2), PLACES[name]
    inside = tuple(slice(start, start + length) for start, length in place.window)
    whole = {"w": params_of()["blocks.0.w"]}
    part = {"w": whole["w"][inside].clone()}
    sums = {"w": sums_of(0, 2)["blocks.0.w"]}
    cut = {"w": LazySum(sums["w"].rows[(slice(None), *inside)], sums["w"].factors)}
    say: dict[str, Any] = {"key": keys.key(3), "noise_scale": noise_scale(1.0), "expected_batch_size": EXPECTED}
    fused(optimizer)(whole, optimizer.init(whole), sums, **say)
    fused(optimizer)(part, optimizer.init(part), cut, shard_windows={"w": place}, **say)
    torch.testing.assert_close(part["w"], whole["w"][inside], rtol=1e-6, atol=1e-7)


def test_the_first_element_is_known_where_elements_follow_each_other():
    firsts = {name: _first(place) for name, place in PLACES.items()}
    assert firsts == {"rows": 10, "columns": None, "box": None, "one row, some columns": 21, "nothing": 30}
    assert _first(ShardWindow((), ())) == 0
    assert _first(ShardWindow((1, 8), ((0, 1), (4, 4)))) == 4


def test_each_key_and_leaf_has_its_own_noise():
    optimizer = adamw(1e-2)
    update_, means = fused(optimizer), []
    for seed in (0, 1):
        params = {path: torch.zeros(4, 4) for path in ("a", "b")}
        state = optimizer.init(params)
        sums = {path: LazySum(torch.zeros(1, 4, 4), torch.ones(1)) for path in params}
        update_(params, state, sums, key=keys.key(seed), noise_scale=noise_scale(1.0), expected_batch_size=1.0)
        means += [state[0].mean["a"], state[0].mean["b"]]
    draws = torch.cat([mean.flatten() for mean in means])
    assert len(draws.unique()) == len(draws)


def test_only_adam_and_adamw_say_that_they_are():
    assert adamw(1e-3).rule is not None
    assert adam(1e-3).rule is not None
    others = [
        chain(adamw(1e-3)),
        chain(clip_by_global_norm(1.0), adamw(1e-3)),
        optimizers.scale_by_adam(),
        optimizers.sgd(0.1),
        optimizers.lamb(1e-3),
        optimizers.adafactor(1e-3),
    ]
    assert all(other.rule is None for other in others)


def test_an_optimizer_with_a_replaced_update_has_no_rule():
    for made in (adam(1e-3), adamw(1e-3), momentum(1e-2, weight_decay=0.1)):
        assert made.rule is not None
        assert made._replace(update=lambda *args, own=made.update: own(*args)).rule is None
        assert optimizers.sgd(0.1)._replace(adamw=made.adamw, descent=made.descent).rule is None


def test_bad_arguments_are_refused_and_change_nothing():
    optimizer = adamw(1e-2)
    params, sums = params_of(), sums_of(0, 1)
    state, update_ = optimizer.init(params), fused(optimizer)
    before = tree.map(Tensor.clone, (params, state))
    good: dict[str, Any] = {"key": keys.key(0), "noise_scale": noise_scale(1.0), "expected_batch_size": EXPECTED}
    fewer = {path: s for path, s in sums.items() if path != "norm"}
    wrong_rows = sums | {"norm": LazySum(sums["norm"].rows[:, :2], sums["norm"].factors)}
    for message, change in [
        ("sums: expected the leaves", lambda: update_(params, state, fewer, **good)),
        ("opt_state: expected", lambda: update_(params, optimizers.sgd(0.1).init(params), sums, **good)),
        ("opt_state: expected", lambda: update_(params, optimizer.init({"a": torch.ones(2)}), sums, **good)),
        ("expected that of momentum", lambda: fused(momentum(0.1, weight_decay=0.0))(params, state, sums, **good)),
        ("expected_batch_size", lambda: update_(params, state, sums, **{**good, "expected_batch_size": 0.0})),
        ("expected an int64 tensor", lambda: update_(params, state, sums, **{**good, "key": torch.zeros(8)})),
        ("sums\\['norm'\\]: expected rows", lambda: update_(params, state, wrong_rows, **good)),
    ]:
        with pytest.raises(FdpError, match=message):
            change()
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves((params, state))))


# ---------------------------------------------------------------- on a GPU


def there(values: Any) -> Any:
    return tree.map(lambda leaf: leaf.cuda(), values)


@pytest.mark.gpu
@pytest.mark.parametrize("z", [0.0, 0.7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gpu_is_the_plain_path_in_one_pass(name, z):
    optimizer = OPTIMIZERS[name]()
    want, got = there(params_of()), there(params_of())
    want_state, state = optimizer.init(want), optimizer.init(got)
    copies = {path: torch.zeros_like(leaf, dtype=torch.bfloat16) for path, leaf in got.items()}
    update_ = fused(optimizer)
    for step in range(4):
        key = keys.fold_in(keys.key(5), step).cuda()
        sums = there(sums_of(step, 4, torch.bfloat16))
        want, want_state = plain_step(optimizer, want, want_state, sums, key, z)
        update_(got, state, sums, copies, key=key, noise_scale=noise_scale(z, "cuda"), expected_batch_size=EXPECTED)
        assert_trees_close(got, want, rtol=2e-5)
        assert_trees_close(state, want_state, rtol=2e-5)
        assert all(torch.equal(copy, got[path].bfloat16()) for path, copy in copies.items())


@pytest.mark.gpu
def test_gpu_has_the_noise_of_the_cpu():
    optimizer, moments = adamw(1e-2, b1=0.0), []
    for device in ("cpu", "cuda"):
        params = tree.map(lambda leaf: leaf.to(device), params_of())  # noqa: B023
        state, sums = optimizer.init(params), tree.map(lambda leaf: leaf.to(device), sums_of(0, 4))  # noqa: B023
        say: dict[str, Any] = {"noise_scale": noise_scale(0.7, device), "expected_batch_size": EXPECTED}
        fused(optimizer)(params, state, sums, key=keys.key(1).to(device), **say)
        moments.append(state[0].mean)
    assert_trees_close(tree.map(Tensor.cpu, moments[1]), moments[0])


@pytest.mark.gpu
def test_gpu_replay_draws_new_noise_for_a_new_key_and_counts_steps():
    optimizer = adamw(RATE, weight_decay=0.1, mask=no_vectors)
    got, want = there(params_of()), there(params_of())
    state, want_state = optimizer.init(got), optimizer.init(want)
    copies = {path: torch.zeros_like(leaf, dtype=torch.bfloat16) for path, leaf in got.items()}
    gradients, key = there(sums_of(0, 4, torch.bfloat16)), keys.key(0).cuda()
    update_, eager = fused(optimizer), fused(optimizer)
    say: dict[str, Any] = {"noise_scale": noise_scale(0.7, "cuda"), "expected_batch_size": EXPECTED}

    def step() -> None:
        sums = {path: LazySum(rows * 1, factors * 1) for path, (rows, factors) in gradients.items()}
        update_(got, state, sums, copies, key=key, **say)

    step()
    eager(want, want_state, gradients, key=key, **say)
    torch.cuda.synchronize()
    update_.reserve()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (1, 2, 3):
        key.copy_(keys.key(seed))
        graph.replay()
        eager(want, want_state, gradients, key=key, **say)
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves((got, state)), tree.leaves((want, want_state))))
    assert isinstance(state[0], AdamState)
    assert int(state[0].step) == int(state[-1].step) == 4
