"""K-FAC as an optimizer: the natural gradient by dense algebra, SGD at its limits, fixed shapes, resuming, ranks."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fdp import keys, ops, optimizers, tree
from fdp.data import datasets
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.plan import Method, make_plan
from fdp.kfac import factors
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.factor_forms import Form
from fdp.kfac.form_policy import auto, by_path, everything
from fdp.kfac.inversion.damped_inverse import Damping
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.measure.estimator import Sharing
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.optimizer import Kfac, kfac
from fdp.kfac.private.curvature_sources import KfacOptimizer
from fdp.kfac.state import KfacState, find_kfac_state
from fdp.kfac.state_slots import read_slot
from fdp.kfac.types import Layer
from fdp.model import Likelihood, Model, Outputs, from_loss
from fdp.models import build, mlp
from fdp.parallel.dtensors import localize
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharded_init import init_params
from fdp.parallel.sharding import Zero, abstract_params, make_sharding
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.run.prepare_run import prepare
from fdp.run.run_config import RunConfig
from fdp.run.step_metrics import summarise
from fdp.run.training_run import steps
from fdp.step import init_state, make_train_step
from fdp.storage import checkpoint
from fdp.types import Batch, FdpError, TrainState, Tree
from tests.conftest import case_named, randn
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")
KEY = keys.key(3)
COLUMNS = by_path({"layers.*.weight": Form.COLUMNS, "head.weight": (Form.SOFTMAX, Form.COLUMNS)})


def settings(**changes: Any) -> KfacConfig:
    """Return dense, exact settings without momentum and trust region, plus the given changes."""
    plain: dict[str, Any] = {"kl_clip": None, "momentum": 0.0, "policy": everything(), "column_dtype": None}
    return KfacConfig(**(plain | changes))


# The natural gradient


def linear_net(*widths: int) -> tuple[Model, Tree]:
    """Return ``W_n ... W_1 x`` with a squared loss; the last layer has a bias."""
    params = {f"w{i}": randn(b, a, seed=i) / math.sqrt(a) for i, (a, b) in enumerate(pairwise(widths))}
    params["bias"] = randn(widths[-1], seed=9)
    last = len(widths) - 2

    def scores(p: Tree, _: Tree, batch: Tree) -> Tensor:
        x = batch["x"]
        for i in range(last):
            x = ops.linear(x, p[f"w{i}"])
        return ops.linear(x, p[f"w{last}"], p["bias"])

    def loss(p: Tree, batch: Tree) -> Tensor:
        return (scores(p, (), batch) - batch["y"]).square().sum(-1) / 2

    outputs = Outputs(scores, Likelihood.SQUARED, lambda batch: batch["y"])
    return from_loss(loss, params, outputs=outputs), params


def regression(samples: int, inputs: int, outputs: int) -> Tree:
    return {"x": randn(samples, inputs, seed=11), "y": randn(samples, outputs, seed=12)}


def gradient_of(model: Model, params: Tree, batch: Tree) -> Tree:
    return torch.func.grad(lambda p: model.loss(p, batch).mean())(params)


def stated(k: Kfac, params: Tree) -> TrainState:
    return TrainState(params, k.optimizer.init(params), (), torch.zeros((), dtype=torch.int64))


def refreshed(k: Kfac, state: TrainState, batch: Tree, step: int = 0, mask: Tensor | None = None) -> TrainState:
    mask = torch.ones(len(tree.leaves(batch)[0])) if mask is None else mask
    return k.refresh(state, batch, mask, KEY, step)


def moved(k: Kfac, model: Model, params: Tree, batch: Tree) -> Tree:
    state = refreshed(k, stated(k, params), batch)
    return k.optimizer.update(gradient_of(model, params, batch), state.opt, params)[0]


def dense_natural(model: Model, params: Tree, batch: Tree, layers: list[list[str]], damping: float) -> Tree:
    """Return ``-(F + damping I)^-1 g`` of each group of leaves, with F from the Jacobian of the scores."""
    outputs = model.blocks[-1].outputs
    assert outputs is not None
    jacobians = torch.func.jacrev(lambda p: outputs.scores(p, (), batch))(params)
    gradient = gradient_of(model, params, batch)
    found = {}
    for paths in layers:
        jacobian = torch.cat([jacobians[path].flatten(2) for path in paths], 2)
        fisher = torch.einsum("boi,boj->ij", jacobian, jacobian) / len(jacobian)
        g = torch.cat([gradient[path].flatten() for path in paths])
        solved = torch.linalg.solve(fisher + damping * torch.eye(len(g), dtype=g.dtype), -g)
        for path, part in zip(paths, solved.split([params[path].numel() for path in paths])):
            found[path] = part.view(params[path].shape)
    return found


def test_a_step_is_the_natural_gradient_of_a_deep_linear_net_by_dense_algebra() -> None:
    model, params = linear_net(5, 4, 3)
    batch = regression(40, 5, 3)
    config = settings(damping=1e-7, fisher=Fisher.EXACT, method=Damping.PRODUCT, via=Via.EIGEN, max_condition=None)
    k = kfac(model, batch, learning_rate=1.0, config=config, dtype=torch.float64)
    got = moved(k, model, params, batch)
    expected = dense_natural(model, params, batch, [["w0"], ["w1", "bias"]], 1e-7)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


def test_a_quadratic_problem_is_solved_in_one_step() -> None:
    model, params = linear_net(6, 2)
    batch = regression(50, 6, 2)
    k = kfac(
        model,
        batch,
        learning_rate=1.0,
        config=settings(damping=1e-13, fisher=Fisher.EXACT),
        dtype=torch.float64,
    )
    after = optimizers.apply_updates(params, moved(k, model, params, batch))
    inputs = torch.cat([batch["x"], torch.ones(50, 1, dtype=torch.float64)], 1)
    best = torch.linalg.lstsq(inputs, batch["y"]).solution.T
    torch.testing.assert_close(after["w0"], best[:, :-1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after["bias"], best[:, -1], rtol=1e-5, atol=1e-6)


# Its limits


def test_without_a_measurement_it_is_gradient_descent() -> None:
    model, params = linear_net(5, 4, 3)
    gradient = gradient_of(model, params, regression(4, 5, 3))
    k = kfac(model, regression(4, 5, 3), learning_rate=0.3, config=settings(), dtype=torch.float64)
    plain = optimizers.sgd(0.3)
    expected, _ = plain.update(gradient, plain.init(params), params)
    torch.testing.assert_close(k.optimizer.update(gradient, k.optimizer.init(params), params)[0], expected)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 0.0), (0.0, 0.1)])
def test_momentum_and_weight_decay_are_those_of_torch(momentum: float, weight_decay: float) -> None:
    model, params = linear_net(5, 4, 3)
    config = settings(momentum=momentum, weight_decay=weight_decay)
    k = kfac(model, regression(4, 5, 3), learning_rate=0.05, config=config, dtype=torch.float64)
    theirs = [leaf.clone().requires_grad_() for leaf in params.values()]
    sgd = torch.optim.SGD(theirs, lr=0.05, momentum=momentum, weight_decay=weight_decay)
    state = k.optimizer.init(params)
    for seed in range(4):
        gradient = {path: randn(*leaf.shape, seed=seed) for path, leaf in params.items()}
        updates, state = k.optimizer.update(gradient, state, params)
        params = optimizers.apply_updates(params, updates)
        for leaf, g in zip(theirs, gradient.values()):
            leaf.grad = g
        sgd.step()
    torch.testing.assert_close(list(params.values()), [leaf.detach() for leaf in theirs])


def test_weight_decay_is_decoupled_from_momentum() -> None:
    model, params = linear_net(3, 2)
    zero = tree.map(torch.zeros_like, params)
    config = settings(momentum=0.9, weight_decay=0.1)
    k = kfac(model, regression(2, 3, 2), learning_rate=0.5, config=config, dtype=torch.float64)
    state = k.optimizer.init(params)
    for _ in range(3):
        updates, state = k.optimizer.update(zero, state, params)
        torch.testing.assert_close(updates, tree.map(lambda p: -0.05 * p, params))


@pytest.mark.parametrize("kl_clip", [1e-6, 1e3])
def test_the_step_changes_predictions_by_at_most_the_clip(kl_clip: float) -> None:
    model, params = linear_net(5, 4, 3)
    batch = regression(40, 5, 3)
    free = moved(kfac(model, batch, learning_rate=0.2, config=settings(damping=1e-2), dtype=torch.float64), *_of())
    clipped = settings(damping=1e-2, kl_clip=kl_clip)
    got = moved(kfac(model, batch, learning_rate=0.2, config=clipped, dtype=torch.float64), *_of())
    gradient = tree.flatten(gradient_of(model, params, batch))
    dot = sum(float((gradient[path] * leaf).sum()) for path, leaf in free.items()) / -0.2
    factor = min(1.0, math.sqrt(kl_clip / (0.2**2 * dot)))
    assert (factor == 1) == (kl_clip == 1e3)
    torch.testing.assert_close(got, tree.map(lambda u: factor * u, free))


def _of() -> tuple[Model, Tree, Tree]:
    model, params = linear_net(5, 4, 3)
    return model, params, regression(40, 5, 3)


# Measurements


def classifier(dtype: torch.dtype = torch.float64) -> tuple[Model, Tree]:
    model = mlp(widths=(6, 5, 7), classes=4)
    return model, tree.map(lambda leaf: leaf.to(dtype), model.init(keys.key(1)))


def images(samples: int, seed: int = 1) -> Tree:
    draw = torch.Generator().manual_seed(seed)
    return {"image": randn(samples, 6, seed=seed), "label": torch.randint(0, 4, (samples,), generator=draw)}


HEAD, FIRST = Layer("head.weight", "head.bias"), Layer("layers.0.weight", "layers.0.bias")


def kept_matrix(k: Kfac, state: TrainState, layer: Layer, side: int) -> Tensor:
    kept = find_kfac_state(state.opt).factors[layer.weight][side]
    assert kept is not None
    return factors.matrix(read_slot(kept, k.plan.layers[layer][:2][side], device=CPU))


@pytest.mark.parametrize("policy", [everything(), COLUMNS])
def test_measurements_are_averaged_by_how_many_samples_they_have(policy: Any) -> None:
    model, params = classifier()
    config = settings(policy=policy, decay=0.5, window=2, factor_period=2, inverse_period=2)
    k = kfac(model, images(2), learning_rate=1.0, config=config, dtype=torch.float64)
    masks = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])
    state = refreshed(k, stated(k, params), images(2), 0, masks[0])
    one = kept_matrix(k, state, FIRST, 1)
    two = kept_matrix(k, refreshed(k, stated(k, params), images(2, seed=2), 0, masks[1]), FIRST, 1)
    state = refreshed(k, state, images(2, seed=2), 2, masks[1])
    torch.testing.assert_close(kept_matrix(k, state, FIRST, 1), (0.5 * 2 * one + 1 * two) / (0.5 * 2 + 1))
    assert int(find_kfac_state(state.opt).measured) == 2


@pytest.mark.parametrize("column_dtype", [None, torch.float16])
def test_columns_and_dense_sides_precondition_alike(column_dtype: torch.dtype | None) -> None:
    model, params = classifier()
    found = []
    for policy in (everything(), COLUMNS):
        config = settings(policy=policy, column_dtype=column_dtype)
        k = kfac(model, images(2), learning_rate=1.0, config=config, dtype=torch.float64)
        found.append(moved(k, model, params, images(2)))
    assert k.plan.layers[FIRST].left.form is k.plan.layers[HEAD].right.form is Form.COLUMNS
    assert k.plan.layers[HEAD].left.form is Form.SOFTMAX
    slack: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10} if column_dtype is None else {"rtol": 2e-2, "atol": 2e-3}
    weights = [{path: u[path] for path in ("head.weight", "layers.0.weight")} for u in map(tree.flatten, found)]
    torch.testing.assert_close(weights[0], weights[1], **slack)


@pytest.mark.parametrize("name", ["gpt", "gpt-untied"])
@pytest.mark.parametrize("distribution", Distribution)
def test_reduced_embeddings_are_stored_as_columns_that_fit_their_slot(name: str, distribution: Distribution) -> None:
    """A sample of a tied table has two columns: its tokens' shares and its output gradient."""
    model, params, batch = case_named(name)
    wide = {"policy": by_path({"embed.tokens": (Form.COLUMNS, Form.COLUMNS)}), "distribution": distribution}
    one = tree.map(lambda leaf: leaf[:1], batch)
    config = settings(sharing=Sharing.REDUCE, **wide)
    k = kfac(model, one, learning_rate=1.0, config=config, dtype=torch.float64)
    left, _, _ = k.plan.layers[Layer("embed.tokens", None)]
    assert (left.form, left.columns) == (Form.COLUMNS, 2 if name == "gpt" else 1)
    assert int(find_kfac_state(refreshed(k, stated(k, params), one).opt).failures) == 0


def test_more_columns_than_features_are_stored_dense() -> None:
    model, params = classifier()
    k = kfac(model, images(9), learning_rate=1.0, config=settings(policy=COLUMNS), dtype=torch.float64)
    assert {side.form for layer in k.plan.layers.values() for side in layer[:2]} == {Form.DENSE}
    full = kfac(model, images(9), learning_rate=1.0, config=settings(), dtype=torch.float64)
    a, b = (tree.flatten(moved(each, model, params, images(9))) for each in (k, full))
    torch.testing.assert_close({path: a[path] for path in b}, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": everything()},
        {"policy": auto(rho=1e9)},
        {"policy": COLUMNS, "window": 3},
        {"policy": COLUMNS, "distribution": Distribution.RING},
        {"policy": everything(), "method": Damping.PRODUCT, "via": Via.EIGEN, "max_condition": 1e4},
        {"policy": COLUMNS, "cap": 1},
    ],
)
@pytest.mark.filterwarnings("ignore::fdp.kfac.ranks.gather_columns.CappedWarning")
def test_the_state_never_changes_its_shape_and_refreshing_in_place_is_the_same(changes: dict[str, Any]) -> None:
    model, params = classifier(torch.float32)
    k = kfac(model, cast(images(3)), learning_rate=1.0, config=KfacConfig(**changes))
    state = stated(k, params)
    kinds = [(path, leaf.shape, leaf.dtype) for path, leaf in tree.flatten(state).items()]
    before = tree.map(Tensor.clone, state)
    zeros = torch.zeros(3)
    for mask, step in ((zeros, 0), (torch.ones(3), 10), (torch.ones(3), 20)):  # at first nobody is there
        after = refreshed(k, state, cast(images(3, seed=step)), step, mask)
        assert [(path, leaf.shape, leaf.dtype) for path, leaf in tree.flatten(after).items()] == kinds
        torch.testing.assert_close(tree.flatten(state), tree.flatten(before), rtol=0, atol=0)
        places = [leaf.data_ptr() for leaf in tree.leaves(state)]
        state = k.refresh(state, cast(images(3, seed=step)), mask, KEY, step, donate=True)
        assert [leaf.data_ptr() for leaf in tree.leaves(state)] == places
        torch.testing.assert_close(tree.flatten(state), tree.flatten(after), rtol=0, atol=0)
        before = tree.map(Tensor.clone, state)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(find_kfac_state(state.opt).maps))


def cast(batch: Tree) -> Tree:
    return tree.map(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, batch)


def test_factors_and_inverses_have_periods_of_their_own() -> None:
    model, params = classifier()
    config = settings(factor_period=2, inverse_period=4)
    k = kfac(model, images(3), learning_rate=1.0, config=config, dtype=torch.float64)
    state, measured, inverted = stated(k, params), [], []
    for t in range(9):
        after = refreshed(k, state, images(3, seed=t), t)
        old, new = find_kfac_state(state.opt), find_kfac_state(after.opt)
        measured += [t] if int(new.measured) > int(old.measured) else []
        pairs = zip(tree.leaves(new.maps), tree.leaves(old.maps))
        inverted += [t] if not all(torch.equal(a, b) for a, b in pairs) else []
        state = after
    assert (measured, inverted) == ([0, 1, 2, 4, 6, 8], [0, 1, 2, 4, 8])  # 1 and 2: curvature changes most at first


@pytest.mark.parametrize("policy", [everything(), COLUMNS])
@pytest.mark.parametrize("distribution", list(Distribution))
def test_a_measurement_that_is_not_finite_is_counted_and_not_added(policy: Any, distribution: Distribution) -> None:
    model, params = classifier()
    config = settings(policy=policy, distribution=distribution)
    k = kfac(model, images(2), learning_rate=1.0, config=config, dtype=torch.float64)
    state = refreshed(k, stated(k, params), images(2))
    spoiled = images(2)
    spoiled["image"][1, 2] = math.nan
    after = find_kfac_state(refreshed(k, state, spoiled, 10).opt)
    assert int(after.failures) == len(k.plan.layers)
    before = find_kfac_state(state.opt)
    torch.testing.assert_close(tree.leaves(after.factors), tree.leaves(before.factors), rtol=0, atol=0)
    torch.testing.assert_close(tree.leaves(after.maps), tree.leaves(before.maps), rtol=0, atol=0)


def test_an_inverse_that_fails_keeps_the_last_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = classifier()
    k = kfac(model, images(3), learning_rate=1.0, config=settings(), dtype=torch.float64)
    state = refreshed(k, stated(k, params), images(3))
    monkeypatch.setattr("fdp.kfac.refresh.invert_batched", lambda layers, **_: dict.fromkeys(layers))
    monkeypatch.setattr("fdp.kfac.refresh.invert_or_keep", lambda *_, **__: (None, False))
    after = find_kfac_state(refreshed(k, state, images(3, seed=5), 10).opt)
    assert int(after.failures) == len(k.plan.layers)
    torch.testing.assert_close(tree.leaves(after.maps), tree.leaves(find_kfac_state(state.opt).maps), rtol=0, atol=0)


# Mistakes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"damping": 0.0}, "damping: expected a finite number above 0"),
        ({"damping": -1.0}, "damping"),
        ({"damping": math.nan}, "damping"),
        ({"factor_period": 0}, "factor_period: expected at least 1 step"),
        ({"inverse_period": 0}, "inverse_period: expected at least 1 step"),
        ({"factor_period": 3, "inverse_period": 10}, "a multiple of factor_period = 3"),
        ({"cap": 0}, "cap: expected at least 1 column"),
        ({"window": 0}, "window: expected at least 1"),
        ({"kl_clip": 0.0}, "kl_clip"),
        ({"decay": 1.5}, "decay"),
        ({"momentum": 1.0}, "momentum"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"max_condition": 1e4}, "needs eigenvalues"),
        ({"max_condition": 1e4, "via": Via.EIGEN, "distribution": Distribution.RING}, "got ring, which computes none"),
        ({"column_dtype": torch.int8}, "column_dtype"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FdpError, match=words):
        KfacConfig(**changes)


def test_a_batch_of_the_wrong_shape_is_refused() -> None:
    model, params = classifier()
    k = kfac(model, images(3), learning_rate=1.0, config=settings(), dtype=torch.float64)
    with pytest.raises(FdpError, match="data: expected a microbatch of the shapes given to kfac"):
        refreshed(k, stated(k, params), images(4))
    with pytest.raises(FdpError, match=r"mask: expected shape \(3,\), got \(2,\)"):
        refreshed(k, stated(k, params), images(3), mask=torch.ones(2))


def test_a_state_of_another_optimizer_is_refused() -> None:
    model, params = classifier()
    k = kfac(model, images(3), learning_rate=1.0, config=settings(), dtype=torch.float64)
    other = TrainState(params, optimizers.adamw(1e-3).init(params), (), torch.zeros((), dtype=torch.int64))
    with pytest.raises(FdpError, match="expected one K-FAC state in the optimizer's state, got 0"):
        refreshed(k, other, images(3))


def test_the_state_is_found_and_replaced_inside_a_chain() -> None:
    model, params = classifier()
    k = kfac(model, images(3), learning_rate=1.0, config=settings(), dtype=torch.float64)
    whole = optimizers.chain(optimizers.clip_by_global_norm(1.0), k.optimizer, optimizers.scale(0.5))
    state = TrainState(params, whole.init(params), (), torch.zeros((), dtype=torch.int64))
    after = refreshed(k, state, images(3))
    assert isinstance(find_kfac_state(after.opt), KfacState)
    assert int(find_kfac_state(after.opt).measured) == 1
    gradient = gradient_of(model, params, images(3))
    updates, opt = whole.update(gradient, after.opt, params)
    assert int(find_kfac_state(opt).step) == 1
    assert all(leaf.isfinite().all() for leaf in tree.leaves(updates))


# A run


def run_config(**changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "model": build("mlp"),
        "dataset": datasets.load("digits", context=None, field="text", vocab_size=256),
        "method": Method.NONE,
        "clip": flat(max_norm=1.0),
        "noise_multiplier": None,
        "epsilon": None,
        "delta": 1e-6,
        "batch_size": 24,
        "steps": 7,
        "optimizer": KfacOptimizer(0.1, KfacConfig(damping=3e-2, factor_period=2, inverse_period=2)),
        "seed": 1,
        "dtype": torch.float32,
        "microbatch_size": 16,
        "memory_budget": None,
        "compile": Compile.NONE,
        "device": CPU,
    }
    return RunConfig(**(settings | changes))


def test_a_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    run, first = prepare(run_config())
    states, records = zip(*steps(run, first))
    state = states[-1]
    checkpoint.save(tmp_path, states[2], meta={}, keep=1)
    again, fresh = prepare(run_config())
    middle = checkpoint.load(tmp_path / "step-00000003", like=fresh)
    *_, (end, _) = steps(again, middle)
    for path, leaf in tree.flatten(state).items():
        assert torch.equal(leaf, tree.flatten(end)[path]), path
    summary = summarise(run, state, records)
    assert (summary["kfac_measured"], summary["kfac_failures"]) == (5, 0)
    assert records[-1].loss is not None
    assert records[-1].loss < 0.7 * (records[0].loss or 0)


def test_a_private_run_on_private_factors_is_refused() -> None:
    with pytest.raises(FdpError, match="measured on the private data without noise"):
        prepare(run_config(method=Method.GHOST_BK, noise_multiplier=1.0))


# Ranks


def trained(distribution: Distribution, columns: bool, ranks: int) -> tuple[list[Tree], int]:
    """Return the parameters after each of a few steps on the same samples, on one rank or several."""
    model = mlp(widths=(6, 5, 7), classes=4)
    mechanism = Mechanism(poisson(100, expected_batch_size=4), flat(max_norm=1.0), 0.0)
    sharding = (
        None if ranks == 1 else make_sharding(model, make_mesh({"shard": ranks}, device_type="cpu"), zero=Zero.THREE)
    )
    rank = 0 if sharding is None else sharding.rank
    own = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    whole = [images(4, seed=t) for t in range(4)]
    batches = [tree.map(lambda leaf: leaf[own], batch) for batch in whole]
    policy = COLUMNS if columns else everything()
    config = KfacConfig(
        policy=policy, distribution=distribution, factor_period=2, inverse_period=2, column_dtype=None, damping=1e-2
    )
    key = keys.key(7)
    k = kfac(model, batches[0], learning_rate=0.1, config=config, execution=Execution(sharding), dtype=torch.float64)
    if sharding is None:
        params = tree.map(Tensor.double, model.init(key))
    else:
        params = init_params(model, key, sharding)
        params = tree.map(lambda leaf: leaf.double(), params)
    plan = make_plan(model, abstract_params(model, sharding), batches[0], method=Method.NONE, dtype=torch.float64)
    step = make_train_step(
        model, k.optimizer, mechanism=mechanism, plan=plan, execution=make_execution(sharding=sharding)
    )
    state = k.place(init_state(model, params, k.optimizer, mechanism, execution=make_execution(sharding=sharding)))
    seen = []
    for t, batch in enumerate(batches):
        state = k.refresh(state, batch, torch.ones(len(batch["label"])), key, t)
        data, mask = tree.map(lambda leaf: leaf[None], batch), torch.ones(1, len(batch["label"]))
        share = trusted_batch(data, mask, mechanism.sampling, step=t, rank=rank, ranks=ranks)
        state, _ = step(state, share, key)
        seen.append(tree.map(lambda leaf: leaf.full_tensor() if ranks > 1 else leaf, state.params))
    return seen, int(find_kfac_state(localize(state).opt).failures)


def both_forms(distributions: list[Distribution]) -> list[tuple[list[Tree], int]]:
    return [trained(one, columns, 2) for one in distributions for columns in (False, True)]


@pytest.mark.long
@pytest.mark.ranks
def test_two_ranks_train_as_one_whatever_the_distribution() -> None:
    alone = [trained(Distribution.GATHER, columns, 1) for columns in (False, True)]
    for each in run_on_ranks(both_forms, 2, list(Distribution)):
        for i, (seen, failures) in enumerate(each):
            assert failures == 0
            for mine, theirs in zip(seen, alone[i % 2][0]):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
    assert not torch.equal(alone[0][0][-1]["head"]["weight"], alone[0][0][0]["head"]["weight"])


def resumed_ring(folder: str) -> bool:
    """Return True if a ring's columns, which differ between ranks, come back from a checkpoint."""
    model = mlp(widths=(6, 5, 7), classes=4)
    mechanism = Mechanism(poisson(100, expected_batch_size=4), flat(max_norm=1.0), 0.0)
    sharding = make_sharding(model, make_mesh({"shard": 2}, device_type="cpu"), zero=Zero.THREE)
    batch = cast(images(1, seed=sharding.rank))
    config = KfacConfig(policy=COLUMNS, distribution=Distribution.RING)
    k = kfac(model, batch, learning_rate=0.1, config=config, execution=Execution(sharding))
    fresh = k.place(
        init_state(
            model,
            init_params(model, KEY, sharding),
            k.optimizer,
            mechanism,
            execution=make_execution(sharding=sharding),
        )
    )
    state = k.refresh(fresh, batch, torch.ones(1), KEY, 0)
    checkpoint.save(Path(folder), state, meta={}, keep=1)
    found = checkpoint.load(Path(folder) / "step-00000000", like=fresh)
    pairs = zip(tree.leaves(localize(found)), tree.leaves(localize(state)))
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.ranks
def test_a_ring_is_saved_with_the_columns_of_every_rank(tmp_path: Path) -> None:
    assert run_on_ranks(resumed_ring, 2, str(tmp_path)) == [True, True]


# The fused end of a step


@pytest.mark.long
@pytest.mark.parametrize("decay", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_a_donated_step_of_compiled_blocks_is_the_plain_step(decay, monkeypatch):
    """One pass behind K-FAC applies momentum, decay, learning rate and cast."""
    model = mlp(widths=(6, 5), classes=3)
    data = {"image": randn(8, 6), "label": torch.arange(8) % 3}
    mechanism = Mechanism(poisson(64, expected_batch_size=8), flat(max_norm=1.0), 0.0)
    plan = make_plan(model, model.init(KEY), data, method=Method.NONE)
    made = []
    for compile in (Compile.NONE, Compile.BLOCK):
        config = settings(momentum=0.8, weight_decay=decay, kl_clip=1e-3)
        rate = optimizers.warmup_cosine(0.3, warmup_steps=1, steps=9)
        runner = CompiledRunner(backend="eager") if compile is Compile.BLOCK else EAGER
        k = kfac(model, data, learning_rate=rate, config=config, execution=Execution(runner=runner))
        step = make_train_step(
            model, k.optimizer, mechanism=mechanism, plan=plan, donate=("state",), execution=Execution(runner=runner)
        )
        state = k.place(init_state(model, model.init(KEY), k.optimizer, mechanism))
        for t in range(4):
            state = k.refresh(state, data, torch.ones(8), KEY, t)
            state, _ = step(state, Batch(tree.map(lambda x: x[None], data), torch.ones(1, 8)), KEY)
        made.append(tree.flatten(state))
    torch.testing.assert_close(made[1], made[0], rtol=1e-5, atol=1e-6)
