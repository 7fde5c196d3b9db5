"""Optimizers against ``torch.optim`` and the equations, and the contract of the pair (init, update)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from fdp import optimizers as fo
from fdp import tree
from fdp.optimizers.adam import second_moment
from fdp.types import FdpError, Tree

STEPS = 6
DTYPES = {torch.float32: 1e-6, torch.float64: 1e-12}


class Block(NamedTuple):
    weight: Tensor
    bias: list[Tensor]


def make_params(dtype: torch.dtype = torch.float32) -> Tree:
    draw = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)  # noqa: E731
    return {"z": Block(new(5, 7), [new(7), new()]), "a": [new(2, 3, 4), (new(1, 1),)]}


def make_grads(params: Tree, step: int) -> Tree:
    draw = torch.Generator().manual_seed(100 + step)
    return tree.map(lambda p: torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype), params)


def run(optimizer: fo.Optimizer, params: Tree, *, steps: int = STEPS) -> Tree:
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(make_grads(params, step), state, params)
        params = fo.apply_updates(params, updates)
    return params


def run_torch(make: Callable[[list[Tensor]], torch.optim.Optimizer], params: Tree, *, lr: Any = None) -> Tree:
    leaves = [p.clone().requires_grad_() for p in tree.leaves(params)]
    optimizer = make(leaves)
    schedule = lr(optimizer) if lr else None
    for step in range(STEPS):
        for leaf, grad in zip(leaves, tree.leaves(make_grads(params, step))):
            leaf.grad = grad
        optimizer.step()
        if schedule:
            schedule.step()
    remaining = iter(leaves)
    return tree.map(lambda _: next(remaining).detach(), params)


def assert_close(got: Tree, want: Tree, tolerance: float) -> None:
    for path, leaf in tree.flatten(want).items():
        other = tree.flatten(got)[path]
        assert other.dtype == leaf.dtype
        torch.testing.assert_close(other, leaf, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("momentum", "nesterov", "weight_decay"),
    [c for c in itertools.product([0.0, 0.9], [False, True], [0.0, 0.1]) if c[0] or not c[1]],
)
def test_sgd_equals_torch(dtype, momentum, nesterov, weight_decay):
    settings = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    params = make_params(dtype)
    want = run_torch(lambda leaves: torch.optim.SGD(leaves, lr=0.1, **settings), params)
    assert_close(run(fo.sgd(0.1, **settings), params), want, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99), (0.5, 0.0)])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_and_adamw_equal_torch(dtype, betas, eps, weight_decay):
    params, tolerance = make_params(dtype), DTYPES[dtype]
    ours = {"b1": betas[0], "b2": betas[1], "eps": eps}
    theirs = {"lr": 1e-2, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    want = run_torch(lambda leaves: torch.optim.AdamW(leaves, **theirs), params)
    assert_close(run(fo.adamw(1e-2, weight_decay=weight_decay, **ours), params), want, tolerance)
    want = run_torch(lambda leaves: torch.optim.Adam(leaves, **theirs), params)
    l2 = fo.chain(fo.add_decayed_weights(weight_decay), fo.adam(1e-2, **ours))
    assert_close(run(l2, params), want, tolerance)


ADAPTIVE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Adagrad", {}, {}),
    ("Adagrad", {"lr_decay": 0.3, "eps": 1e-2}, {}),
    ("Adagrad", {"initial_accumulator_value": 0.5, "lr_decay": 0.1}, {}),
    ("Adadelta", {}, {}),
    ("Adadelta", {"rho": 0.5, "eps": 1e-2}, {}),
    ("Adadelta", {"rho": 0.0}, {}),
    ("Adamax", {}, {}),
    ("Adamax", {"eps": 1e-2}, {"betas": (0.5, 0.6)}),
    ("Adamax", {}, {"betas": (0.0, 0.0)}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("name", "shared", "betas"), ADAPTIVE)
def test_adagrad_adadelta_and_adamax_equal_torch(dtype, weight_decay, name, shared, betas):
    params = make_params(dtype)
    settings = shared | {"weight_decay": weight_decay}
    ours = settings | dict(zip(("b1", "b2"), betas.get("betas", ())))
    want = run_torch(lambda leaves: getattr(torch.optim, name)(leaves, lr=0.1, **settings, **betas), params)
    assert_close(run(getattr(fo, name.lower())(0.1, **ours), params), want, DTYPES[dtype])


def test_clipping_by_value_is_that_of_torch():
    params = make_params(torch.float64)
    optimizer = fo.chain(fo.clip_by_value(0.3), fo.scale(-1.0))
    grads = make_grads(params, 0)
    leaves = [p.clone().requires_grad_() for p in tree.leaves(params)]
    for leaf, grad in zip(leaves, tree.leaves(grads)):
        leaf.grad = grad.clone()
    torch.nn.utils.clip_grad_value_(leaves, 0.3)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    for update, leaf in zip(tree.leaves(updates), leaves):
        assert leaf.grad is not None
        assert torch.equal(-update, leaf.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lr", "beta2_decay", "eps1", "d", "weight_decay"),
    list(itertools.product([1e-2, 0.7], [-0.8, -0.3], [None, 1e-2], [1.0, 1.05], [0.0, 0.1])),
)
def test_adafactor_equals_torch(dtype, lr, beta2_decay, eps1, d, weight_decay):
    params = make_params(dtype)
    shared = {"beta2_decay": beta2_decay, "weight_decay": weight_decay}
    eps = (eps1, 1e-3)
    want = run_torch(lambda leaves: torch.optim.Adafactor(leaves, lr=lr, eps=eps, d=d, **shared), params)
    assert_close(run(fo.adafactor(lr, eps1=eps1, clip_threshold=d, **shared), params), want, DTYPES[dtype])


def test_adafactor_small_parameters_take_the_floor_of_the_step():
    params = tree.map(lambda p: p * 1e-6, make_params(torch.float64))
    want = run_torch(lambda leaves: torch.optim.Adafactor(leaves, lr=0.1, eps=(None, 1e-2)), params)
    assert_close(run(fo.adafactor(0.1, eps2=1e-2), params), want, 1e-12)


def test_adafactor_small_gradients_take_the_floor_of_the_row_mean():
    weight = torch.ones(3, 4, dtype=torch.float64)
    grad = 0.05 * make_grads({"w": weight}, 0)["w"]  # g^2 about 0.0025 < eps1, and its share still above eps1^2
    theirs = weight.clone().requires_grad_()
    theirs.grad = grad
    torch.optim.Adafactor([theirs], lr=0.1, eps=(1e-2, 1e-3)).step()
    optimizer = fo.adafactor(0.1, eps1=1e-2)
    updates, _ = optimizer.update({"w": grad}, optimizer.init({"w": weight}), {"w": weight})
    assert_close(fo.apply_updates({"w": weight}, updates), {"w": theirs.detach()}, 1e-12)


def test_adafactor_state_of_a_matrix_is_a_row_and_a_column():
    state = fo.scale_by_factored_rms().init({"w": torch.zeros(64, 32), "b": torch.zeros(9)})
    assert tree.size(state) == 1 + 64 + 32 + 9


def lamb_of_the_paper(params, grads_of, *, lr, b1, b2, eps, decay, steps):
    """Algorithm 2 of arXiv 1904.00962, one layer and one number at a time."""
    layers = [p.flatten().tolist() for p in params]
    m = [[0.0] * len(x) for x in layers]
    v = [[0.0] * len(x) for x in layers]
    for t in range(1, steps + 1):
        for i, g in enumerate(grads_of(t - 1)):
            g = g.flatten().tolist()
            m[i] = [b1 * mj + (1 - b1) * gj for mj, gj in zip(m[i], g)]
            v[i] = [b2 * vj + (1 - b2) * gj**2 for vj, gj in zip(v[i], g)]
            r = [mj / (1 - b1**t) / (math.sqrt(vj / (1 - b2**t)) + eps) for mj, vj in zip(m[i], v[i])]
            r = [rj + decay * xj for rj, xj in zip(r, layers[i])]
            x_norm, r_norm = math.hypot(*layers[i]), math.hypot(*r)
            ratio = x_norm / r_norm if x_norm > 0 and r_norm > 0 else 1.0
            layers[i] = [xj - lr * ratio * rj for xj, rj in zip(layers[i], r)]
    return layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b1", "b2", "decay"), [*itertools.product([0.0, 0.9], [0.99], [0.0, 0.1])])
def test_lamb_equals_the_paper(dtype, b1, b2, decay):
    params = make_params(dtype)
    params["zero"] = torch.zeros(3, dtype=dtype)  # no weights yet: ratio 1
    want = lamb_of_the_paper(
        tree.leaves(params),
        lambda step: tree.leaves(make_grads(params, step)),
        lr=0.05, b1=b1, b2=b2, eps=1e-6, decay=decay, steps=STEPS,
    )  # fmt: skip
    got = run(fo.lamb(0.05, b1=b1, b2=b2, weight_decay=decay), params)
    remaining = iter(want)
    want = tree.map(lambda p: torch.tensor(next(remaining), dtype=dtype).reshape(p.shape), params)
    assert_close(got, want, DTYPES[dtype])


def test_lamb_with_no_gradient_and_no_decay_stays():
    params = make_params()
    optimizer = fo.lamb(0.1, weight_decay=0.0)
    updates, _ = optimizer.update(tree.map(torch.zeros_like, params), optimizer.init(params), params)
    assert all(not leaf.any() for leaf in tree.leaves(updates))


@pytest.mark.parametrize("make", [fo.lamb, fo.adafactor])
def test_every_sum_over_a_leaf_goes_through_the_reductions(make):
    """The halves of every matrix, with reductions that sum over both, take the step of the full matrix."""
    whole = {"w": torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))}
    halves = lambda t: {"w": t["w"].reshape(2, 3, 4)}  # noqa: E731

    def mean(values: Tree, dim: int) -> Tree:  # dim -2 of the whole is dims 0 and -2 of the halves
        return tree.map(lambda v: v.mean((0, -2) if dim == -2 else -1, keepdim=True).expand(2, -1, -1), values)

    shards = fo.Reductions(
        sum_of_squares=fo.LOCAL.sum_of_squares,
        size=fo.LOCAL.size,
        mean=mean,
        mean_of_squares=lambda values, dim: mean(tree.map(torch.square, values), dim),
    )
    want, got = whole, halves(whole)
    optimizer = make(0.1)
    state, sharded_state = optimizer.init(want), optimizer.init(got, shards)
    for step in range(3):
        grads = make_grads(want, step)
        updates, state = optimizer.update(grads, state, want)
        want = fo.apply_updates(want, updates)
        updates, sharded_state = optimizer.update(halves(grads), sharded_state, got, shards)
        got = fo.apply_updates(got, updates)
    assert_close(got, halves(want), 1e-12)


def test_a_chain_passes_the_reductions_on_to_every_part():
    params = {"w": torch.ones(4)}
    pretended = fo.LOCAL._replace(sum_of_squares=lambda values: {"w": torch.tensor(100.0)})
    optimizer = fo.chain(fo.chain(fo.clip_by_global_norm(1.0)), fo.scale(2.0))
    updates, _ = optimizer.update(params, optimizer.init(params, pretended), params, reductions=pretended)
    torch.testing.assert_close(updates["w"], torch.full((4,), 0.2))


@pytest.mark.parametrize(
    "name", ["sgd", "adam", "adamw", "momentum of adam", "adagrad", "adadelta", "adamax", "clipped by value"]
)
def test_elementwise_optimizers_use_no_reduction(name):
    def refuse(*_: Any) -> Tree:
        raise AssertionError("asked for a reduction")

    optimizer, params = OPTIMIZERS[name], make_params()
    state = optimizer.init(params, fo.Reductions(refuse, refuse, refuse, refuse))
    optimizer.update(make_grads(params, 0), state, params, fo.Reductions(refuse, refuse, refuse, refuse))


def test_the_state_of_adafactor_on_a_part_without_rows_is_finite():
    state = fo.adafactor(0.1).init({"w": torch.zeros(0, 4)})
    assert [tuple(leaf.shape) for leaf in (state[0].rows["w"], state[0].cols["w"])] == [(0, 1), (1, 4)]
    assert torch.equal(state[0].cols["w"], torch.zeros(1, 4))


# Adam without the noise in its second moment.


def noisy_run(optimizer: fo.Optimizer, signal: Tensor, noise_std: float, steps: int) -> tuple[Tensor, Any]:
    draw, params = torch.Generator().manual_seed(7), {"w": torch.zeros_like(signal)}
    state, updates = optimizer.init(params), params
    for _ in range(steps):
        noise = noise_std * torch.randn(signal.shape, generator=draw, dtype=signal.dtype)
        updates, state = optimizer.update({"w": signal + noise}, state, params)
    return updates["w"], state


@pytest.mark.parametrize("steps", [1, 4])
def test_corrected_second_moment_is_unbiased_for_the_signal_squared(steps):
    signal, noise_std = torch.full((400_000,), 1.0, dtype=torch.float64), 2.0
    direction = fo.scale_by_adam(b2=0.9)
    _, state = noisy_run(direction, signal, noise_std, steps)
    square, factor = state.square["w"], torch.tensor(1 / (1 - 0.9**steps))
    corrected = second_moment(square, factor=factor, noise_std=noise_std, eps_root=0.0)
    plain = second_moment(square, factor=factor, noise_std=None, eps_root=0.0)
    # Var(g^2) = 2 sigma^4 + 4 s^2 sigma^2 = 48: 5 deviations of the mean are 5 sqrt(48 / 400,000) = 0.055.
    assert abs(corrected.mean().item() - 1) < 0.055
    assert abs(plain.mean().item() - (1 + 4)) < 0.055


def test_correction_restores_the_unit_step_of_adam():
    """After many steps Adam's step is signal / |signal| = 1; noise in the second moment makes it smaller."""
    signal, settings = torch.ones(2000, dtype=torch.float64), {"b1": 0.99, "b2": 0.99}
    corrected, _ = noisy_run(fo.scale_by_adam(noise_std=1.0, eps_root=1e-3, **settings), signal, 1.0, 600)
    plain, _ = noisy_run(fo.scale_by_adam(**settings), signal, 1.0, 600)
    assert corrected.median().item() == pytest.approx(1.0, abs=0.03)
    assert plain.median().item() == pytest.approx(1 / math.sqrt(2), abs=0.03)


def test_correction_has_a_floor():
    optimizer, params = fo.adam(1.0, eps=0.0, noise_std=3.0, eps_root=0.1), {"w": torch.zeros(4)}
    updates, _ = optimizer.update({"w": torch.ones(4)}, optimizer.init(params), params)  # v^ = 1 < 9
    torch.testing.assert_close(updates["w"], torch.full((4,), -10.0))


def test_no_noise_and_a_floor_out_of_reach_is_adam():
    params = make_params(torch.float64)
    assert_close(run(fo.adamw(1e-2, noise_std=0.0, eps_root=1e-12), params), run(fo.adamw(1e-2), params), 1e-14)


# Schedules.


def values(schedule: fo.Schedule, steps: int) -> list[float]:
    return [schedule(torch.tensor(step)).item() for step in range(steps)]


def test_schedules_have_their_closed_forms():
    assert values(fo.constant(0.3), 2) == [0.3, 0.3]
    assert values(fo.linear(1.0, 0.5, steps=4), 6) == pytest.approx([1, 0.875, 0.75, 0.625, 0.5, 0.5])
    half = [0.1 + 0.9 * (1 + math.cos(math.pi * min(t, 8) / 8)) / 2 for t in range(10)]
    assert values(fo.cosine(1.0, steps=8, end=0.1), 10) == pytest.approx(half)
    assert values(fo.warmup_cosine(1.0, warmup_steps=4, steps=12, end=0.1), 14) == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, *half]
    )
    assert values(fo.warmup(fo.linear(1.0, 0.0, steps=2), steps=2), 5) == pytest.approx([0.5, 1, 1, 0.5, 0])
    assert values(fo.step_decay(2.0, every=2, factor=0.5), 6) == pytest.approx([2, 2, 1, 1, 0.5, 0.5])
    assert values(fo.piecewise(1.0, factors={3: 0.1, 1: 0.5}), 5) == pytest.approx([1, 0.5, 0.5, 0.05, 0.05])


TORCH_SCHEDULES = {
    "linear": (
        fo.linear(0.1, 0.025, steps=4),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.25, total_iters=4),
    ),
    "cosine": (
        fo.cosine(0.1, steps=STEPS, end=0.01),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.01),
    ),
    "step_decay": (
        fo.step_decay(0.1, every=2, factor=0.3),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.3),
    ),
    "piecewise": (
        fo.piecewise(0.1, factors={1: 0.5, 4: 0.5}),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 4], gamma=0.5),
    ),
    "warmup": (
        fo.warmup(fo.constant(0.1), steps=4),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.25, total_iters=3),
    ),
}


@pytest.mark.parametrize("name", TORCH_SCHEDULES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "adagrad", "adadelta", "adamax"])
def test_scheduled_training_equals_torch(name, optimizer):
    schedule, lr = TORCH_SCHEDULES[name]
    ours, theirs = {
        "sgd": (fo.sgd, torch.optim.SGD),
        "adamw": (fo.adamw, torch.optim.AdamW),
        "adafactor": (fo.adafactor, torch.optim.Adafactor),
        "adagrad": (fo.adagrad, torch.optim.Adagrad),
        "adadelta": (fo.adadelta, torch.optim.Adadelta),
        "adamax": (fo.adamax, torch.optim.Adamax),
    }[optimizer]
    params = make_params(torch.float64)
    make = lambda leaves: theirs(leaves, lr=0.1, weight_decay=0.1)  # noqa: E731
    assert_close(run(ours(schedule, weight_decay=0.1), params), run_torch(make, params, lr=lr), 1e-12)


# The contract of the pair.

OPTIMIZERS: dict[str, fo.Optimizer] = {
    "sgd": fo.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": fo.adam(fo.warmup_cosine(0.1, warmup_steps=2, steps=8), noise_std=0.1, eps_root=1e-3),
    "adamw": fo.adamw(0.1),
    "lamb": fo.lamb(0.1),
    "adafactor": fo.adafactor(0.1, weight_decay=0.1),
    "adagrad": fo.adagrad(0.1, lr_decay=0.1),
    "adadelta": fo.adadelta(weight_decay=0.1),
    "adamax": fo.adamax(fo.cosine(0.1, steps=8)),
    "clipped by value": fo.chain(fo.clip_by_value(0.5), fo.adagrad(0.1)),
    "clipped": fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(fo.constant(0.1))),
    "momentum of adam": fo.chain(fo.scale_by_adam(), fo.trace(0.9), fo.scale(-0.1)),
    "plain": fo.chain(fo.scale(1.0)),
    "empty": fo.chain(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inputs_are_never_modified(name):
    optimizer, params = OPTIMIZERS[name], make_params()
    state = optimizer.init(params)
    for step in range(3):
        grads = make_grads(params, step)
        before = tree.map(torch.clone, (params, grads, state))
        updates, new_state = optimizer.update(grads, state, params)
        new_params = fo.apply_updates(params, updates)
        again, _ = optimizer.update(grads, state, params)
        for kept, now in zip(tree.leaves(before), tree.leaves((params, grads, state))):
            assert torch.equal(kept, now)
        for first, second in zip(tree.leaves(updates), tree.leaves(again)):
            assert torch.equal(first, second)
        params, state = new_params, new_state


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_state_keeps_full_precision_and_updates_have_the_dtype_of_params(name, param_dtype, grad_dtype):
    optimizer, params = OPTIMIZERS[name], make_params(param_dtype)
    grads = tree.map(lambda g: g.to(grad_dtype), make_grads(params, 0))
    start = state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(grads, state, params)
        assert [u.dtype for u in tree.leaves(updates)] == [param_dtype] * len(tree.leaves(params))
        for old, new in zip(tree.leaves(start), tree.leaves(state)):
            assert new.dtype == old.dtype
            assert new.shape == old.shape
            full = torch.float64 if param_dtype == torch.float64 else torch.float32
            assert new.dtype in (torch.int64, full)
    assert tree.paths(state) == tree.paths(start)


def test_float64_leaves_do_not_lend_their_dtype_to_others():
    params = {"a": torch.ones(2, dtype=torch.float64), "b": torch.ones((), dtype=torch.float32)}
    for optimizer in OPTIMIZERS.values():
        updates, state = optimizer.update(params, optimizer.init(params), params)
        assert (updates["a"].dtype, updates["b"].dtype) == (torch.float64, torch.float32)
        assert [leaf.dtype for leaf in tree.leaves(state)] == [
            leaf.dtype for leaf in tree.leaves(optimizer.init(params))
        ]


def test_structure_of_params_is_kept():
    got = run(fo.adamw(0.1), make_params(), steps=1)
    assert isinstance(got["z"], Block)
    assert isinstance(got["z"].bias, list)
    assert isinstance(got["a"][1], tuple)
    assert tree.paths(got) == tree.paths(make_params())


def test_chain_applies_left_to_right():
    params, grads = {"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}
    decay, double = fo.add_decayed_weights(1.0), fo.scale(2.0)
    for optimizer, want in [(fo.chain(decay, double), 6.0), (fo.chain(double, decay), 5.0)]:
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        assert updates["w"].item() == want


def test_a_chain_in_a_chain_is_the_flat_chain():
    params = make_params(torch.float64)
    parts = fo.add_decayed_weights(0.1), fo.trace(0.9), fo.scale_by_learning_rate(0.1)
    nested = fo.chain(fo.chain(*parts[:2]), parts[2])
    assert_close(run(nested, params), run(fo.chain(*parts), params), 0)


def test_weight_decay_follows_the_mask():
    params = make_params()
    decay = fo.chain(fo.add_decayed_weights(0.5, mask=lambda p: tree.map(lambda leaf: leaf.ndim > 1, p)))
    updates, _ = decay.update(tree.map(torch.zeros_like, params), decay.init(params), params)
    for update, param in zip(tree.leaves(updates), tree.leaves(params)):
        assert torch.equal(update, 0.5 * param if param.ndim > 1 else torch.zeros_like(param))


@given(norm=st.floats(1e-3, 1e3), max_norm=st.floats(1e-3, 1e3))
@settings(max_examples=30, deadline=None)
def test_global_clip_bounds_the_norm_and_keeps_the_direction(norm, max_norm):
    params = make_params(torch.float64)
    grads = make_grads(params, 0)
    grads = tree.map(lambda g: g * norm / tree.global_norm(grads), grads)
    clip = fo.chain(fo.clip_by_global_norm(max_norm))
    updates, _ = clip.update(grads, clip.init(params), params)
    assert_close(updates, tree.map(lambda g: g * min(1, max_norm / norm), grads), 1e-12)


def test_global_clip_of_zero_is_zero():
    params = make_params()
    clip = fo.chain(fo.clip_by_global_norm(1.0))
    updates, _ = clip.update(tree.map(torch.zeros_like, params), clip.init(params), params)
    assert all(torch.equal(u, torch.zeros_like(u)) for u in tree.leaves(updates))


@pytest.mark.parametrize(
    "name",
    [
        "adam",
        "adafactor",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("sgd", "lamb", "clipped", "adagrad", "adadelta", "adamax")
        ),
    ],
)
def test_one_graph_eager_equals_compiled(name):
    optimizer = OPTIMIZERS[name]
    eager = compiled = {"w": torch.linspace(-1, 1, 12).reshape(3, 4), "b": [torch.tensor(0.5)]}
    torch.compiler.reset()
    counted = CompileCounterWithBackend("aot_eager")

    def step(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = optimizer.update(grads, state, params)
        return fo.apply_updates(params, updates), state

    fast = torch.compile(step, fullgraph=True, backend=counted)
    state, fast_state = optimizer.init(eager), optimizer.init(compiled)
    for i in range(3):
        grads = make_grads(eager, i)
        eager, state = step(grads, state, eager)
        compiled, fast_state = fast(grads, fast_state, compiled)
        assert_close(compiled, eager, 1e-6)
    assert counted.frame_count == 1


@pytest.mark.slow
def test_compiled_scalars_are_computed_once_not_once_per_element():
    optimizer, params = OPTIMIZERS["adam"], [torch.ones(8, 8), torch.ones(100)]
    torch.compiler.reset()
    compiled = torch.compile(optimizer.update, fullgraph=True)
    _, code = run_and_get_code(compiled, params, optimizer.init(params), params)
    assert "".join(code).count("expm1(") == 2  # one for each moment, whatever the number of leaves
    assert "".join(code).count("cos(") == 1


# Errors.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fo.sgd(-0.1), "learning_rate: expected a finite number, 0 or more, got -0.1"),
        (lambda: fo.adafactor(-0.1), "value: expected a finite number, 0 or more, got -0.1"),
        (lambda: fo.adamw(math.nan), "learning_rate"),
        (lambda: fo.constant(-1.0), "got -1.0"),
        (lambda: fo.sgd(0.1, momentum=1.0), r"momentum: expected a decay rate in \[0, 1\), got 1.0"),
        (lambda: fo.sgd(0.1, nesterov=True), "nesterov: expected momentum > 0"),
        (lambda: fo.sgd(0.1, weight_decay=-1.0), "weight_decay"),
        (lambda: fo.adam(0.1, b1=1.0), r"b1: expected a decay rate in \[0, 1\), got 1.0"),
        (lambda: fo.adam(0.1, b2=-0.1), r"b2: expected a decay rate in \[0, 1\), got -0.1"),
        (lambda: fo.adamw(0.1, eps=-1.0), "eps"),
        (lambda: fo.adamw(0.1, weight_decay=-1.0), "weight_decay"),
        (lambda: fo.adam(0.1, noise_std=-1.0, eps_root=1.0), "noise_std"),
        (lambda: fo.adam(0.1, noise_std=1.0), "eps_root: expected a number > 0 with noise_std"),
        (lambda: fo.adafactor(0.1, beta2_decay=0.8), "beta2_decay"),
        (lambda: fo.adafactor(0.1, clip_threshold=0.0), "threshold"),
        (lambda: fo.adafactor(0.1, eps1=-1.0), "eps1"),
        (lambda: fo.clip_by_global_norm(0.0), "max_norm: expected a finite number above 0"),
        (lambda: fo.clip_by_value(0.0), "limit: expected a finite number above 0"),
        (lambda: fo.adagrad(0.1, lr_decay=-1.0), "lr_decay"),
        (lambda: fo.adagrad(0.1, initial_accumulator_value=-1.0), "initial_accumulator_value"),
        (lambda: fo.adadelta(0.1, rho=1.0), "rho: expected a decay rate"),
        (lambda: fo.adamax(0.1, b1=1.0), "b1: expected a decay rate"),
        (lambda: fo.adamax(0.1, weight_decay=-1.0), "weight_decay"),
        (lambda: fo.cosine(0.1, steps=0), "steps"),
        (lambda: fo.warmup_cosine(0.1, warmup_steps=5, steps=5), "warmup_steps"),
    ],
)
def test_a_bad_setting_is_an_error(make, message):
    with pytest.raises(FdpError, match=message):
        make()


def test_an_integer_parameter_is_an_error_that_names_the_path():
    params = {"a": torch.ones(2), "b": [torch.ones(2, dtype=torch.int32)]}
    with pytest.raises(FdpError, match=r"params\['b.0'\]: expected a floating point tensor, got .*int32"):
        fo.adamw(0.1).init(params)
    with pytest.raises(FdpError, match=r"params\['c'\]: expected a floating point tensor, got a float"):
        fo.adamw(0.1).init({"c": 1.0})
    with pytest.raises(FdpError, match="empty"):
        fo.adamw(0.1).init({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"a": g["a"]}, r"grads\['b.0'\]: expected a tensor of shape \(2,\), got no leaf"),
        (lambda g: g | {"b": [None]}, r"grads\['b.0'\]: expected a tensor of shape \(2,\), got no leaf"),
        (lambda g: g | {"c": g["a"]}, r"grads\['c'\]: expected no leaf here, as in params"),
        (lambda g: g | {"a": torch.ones(1)}, r"grads\['a'\]: expected shape \(3,\), got \(1,\)"),
        (lambda g: g | {"a": 1.0}, r"grads\['a'\]: expected shape \(3,\), got a float"),
        (lambda g: g | {"b": tuple(g["b"])}, "a tuple is not a list"),
    ],
)
def test_a_gradient_that_does_not_fit_is_an_error_that_names_the_path(change, message):
    params = {"a": torch.ones(3), "b": [torch.ones(2)]}
    optimizer = fo.sgd(0.1)
    with pytest.raises(FdpError, match=message):
        optimizer.update(change(params), optimizer.init(params), params)
    with pytest.raises(FdpError, match=message.replace("grads", "updates")):
        fo.apply_updates(params, change(params))


def test_the_state_of_another_chain_is_an_error():
    params = make_params()
    with pytest.raises(FdpError, match="state: expected that of a chain of 3, got 1"):
        fo.adamw(0.1).update(make_grads(params, 0), fo.sgd(0.1).init(params), params)
