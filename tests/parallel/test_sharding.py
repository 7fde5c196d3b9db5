"""The same numbers on one rank and on several: initial values, losses, norms, noise and parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fdp import keys, ops, optimizers, tree
from fdp.checks.first_call import Checks
from fdp.fast.compile_modes import make_execution
from fdp.foreign.torch_init import place_leaves, torch_leaves
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.init import uniform
from fdp.model import Block, LeafSpec, Model, from_loss
from fdp.models import GPTConfig, LlamaConfig, gpt, llama
from fdp.parallel.agree import check_agreement
from fdp.parallel.collectives import axis_of
from fdp.parallel.dtensors import full_tensor, localize, shard_leaf
from fdp.parallel.mesh import make_mesh
from fdp.parallel.offload import NO_OFFLOAD, Offload
from fdp.parallel.sharded_init import init_params, shared_key
from fdp.parallel.sharded_norms import sharded_global_norm
from fdp.parallel.sharding import Data, Reduce, Sharding, Zero, abstract_params, make_sharding, over_tensor_axis
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, sample_batch
from fdp.stages import make_stages
from fdp.step import init_state, make_train_step
from fdp.types import FdpError
from tests.fake_ranks import fake_ranks
from tests.ranks import run_on_ranks

# 13 tokens of vocabulary and a context of 6: dims that no number of ranks below divides.
MODELS = {
    "gpt": gpt(GPTConfig(layers=2, width=8, heads=4, context=6, vocab_size=13)),
    "gpt untied": gpt(GPTConfig(layers=2, width=8, heads=4, context=6, vocab_size=13, tied=False)),
    "one layer": gpt(GPTConfig(layers=1, width=8, heads=2, context=6, vocab_size=13)),
    "large vocabulary": gpt(GPTConfig(layers=1, width=8, heads=4, context=6, vocab_size=50257)),
    "llama": llama(LlamaConfig(layers=2, width=8, heads=4, key_heads=2, hidden=12, context=6, vocab_size=13)),
}
STYLES = {
    "flat": clipping.flat(max_norm=0.3),
    "per-layer": clipping.per_layer(max_norm=0.3),
    "automatic": clipping.automatic(max_norm=0.3),
    "quantile": clipping.quantile(max_norm=0.3, target_quantile=0.5, learning_rate=0.3, count_noise=1.0),
}
OPTIMIZERS = {
    "sgd": optimizers.sgd(0.5, momentum=0.9),
    "lamb": optimizers.lamb(0.01),
    "adamw": optimizers.adamw(
        optimizers.warmup_cosine(0.01, warmup_steps=2, steps=9), eps=1e-4, noise_std=1e-3, eps_root=1e-3
    ),
    "adafactor": optimizers.adafactor(0.01),
    # eps of the size of gradients: Adam makes a sign of any smaller one, and a step of a rounding error
    "clipped": optimizers.chain(optimizers.clip_by_global_norm(0.01), optimizers.adamw(0.01, eps=1e-4)),
}
DATA = {"tokens": torch.randint(0, 13, (40, 7), generator=torch.Generator().manual_seed(0))}
SAMPLING = poisson(40, expected_batch_size=10)
STEPS = 2
ALL = Offload(params=True, grads=True, optimizer=True)


_PLANS: dict[Any, Plan] = {}


def train(
    axes: dict[str, int] | None = None,
    *,
    zero: Zero = Zero.THREE,
    model: str = "gpt",
    method: Method = Method.AUTO,
    style: str = "flat",
    optimizer: str = "sgd",
    data: Data = Data.SPLIT,
    reduce: Reduce | None = None,
    reduce_dtype: torch.dtype | None = None,
    offload: Offload = NO_OFFLOAD,
    checkpoint_activations: bool = False,
    microbatch_size: int = 6,
    memory_budget: float | None = None,
    steps: int = STEPS,
    backend: str | None = None,
    checks: Checks = Checks.SKIPPED,
) -> dict[str, Any]:
    """A few steps; on one rank if ``axes`` is None. Parameters come back whole.

    ``checks`` draw nothing and change nothing, and take longer than the steps.
    """
    net, chosen, root = MODELS[model], OPTIMIZERS[optimizer], keys.key(0)
    mechanism = Mechanism(SAMPLING, STYLES[style], 0.0 if method is Method.NONE else 1.0)
    sharding, rank, ranks = None, 0, 1
    if axes is not None:
        mesh = make_mesh(axes, device_type="cpu")
        net = over_tensor_axis(net, mesh)
        sharding = make_sharding(net, mesh, zero=zero, data=data, reduce=reduce, reduce_dtype=reduce_dtype)
        rank, ranks = sharding.rank, sharding.ranks
    params = net.init(root) if sharding is None else init_params(net, root, sharding)
    batches = [
        sample_batch(DATA, SAMPLING, root, step=t, microbatch_size=microbatch_size, rank=rank, ranks=ranks)
        for t in range(steps)
    ]
    example = {"tokens": batches[0].data["tokens"][0]}
    at = (model, method, memory_budget, len(example["tokens"]), (axes or {}).get("tensor"))
    if at not in _PLANS:  # placement does not change a plan, and to trace a model takes as long as to train it
        _PLANS[at] = make_plan(net, abstract_params(net, sharding), example, method=method, memory_budget=memory_budget)
    plan = _PLANS[at]
    step = make_train_step(
        net,
        chosen,
        mechanism=mechanism,
        plan=plan,
        execution=make_execution(sharding=sharding, offload=offload, checkpoint_activations=checkpoint_activations),
        checks=checks,
    )
    if backend is not None:
        step = torch.compile(step, fullgraph=True, dynamic=False, backend=backend)
    state = init_state(net, params, chosen, mechanism, execution=make_execution(sharding=sharding, offload=offload))
    first = whole(state.params)
    losses, norms = [], []
    for batch in batches:
        state, metrics = step(state, batch, root)
        real = metrics.mask > 0
        losses.append(metrics.losses[real])
        norms.append(metrics.norms[real])
    return {
        "init": first,
        "losses": torch.cat(losses),
        "norms": torch.cat(norms),
        "params": whole(state.params),
        "opt": whole(state.opt),
        "clip": state.clip,
        "held": sum(
            leaf.to_local().numel() if isinstance(leaf, DTensor) else leaf.numel()
            for leaf in tree.leaves((state.params, state.opt))
        ),
    }


def whole(values: Any) -> dict[str, torch.Tensor]:
    flat = tree.flatten(values)
    return {path: full_tensor(leaf) for path, leaf in flat.items()}


def assert_same(got: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    for path, leaf in expected["init"].items():
        assert torch.equal(got["init"][path], leaf), f"{case}: {path}: not the same bits at the start"
    for what in ("losses", "norms", "clip"):
        torch.testing.assert_close(
            got[what], expected[what], rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda m, w=what: f"{case}: {w}: {m}"
        )
    for what in ("params", "opt"):
        for path, leaf in expected[what].items():
            torch.testing.assert_close(
                got[what][path], leaf, rtol=1e-5, atol=1e-6, msg=lambda m, p=path: f"{case}: {p}: {m}"
            )


def cases(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the runs for this number of ranks. The first words name every setting that changes a result."""
    every = (Method.MATERIALIZE, Method.GHOST, Method.GHOST_BK, Method.AUTO, Method.NONE)
    found: dict[str, dict[str, Any]] = {}
    for zero in Zero:
        for method in every if ranks == 2 else (Method.AUTO,):
            found[f"zero {zero.value}, {method.value}"] = {"zero": zero, "method": method}
    found |= {
        "zero 2, reduced in every microbatch": {"zero": Zero.TWO, "reduce": Reduce.PER_MICROBATCH},
        "zero 3, reduced once": {"reduce": Reduce.PER_STEP},
        "replicated data": {"data": Data.REPLICATED},
        "replicated data, zero 0": {"data": Data.REPLICATED, "zero": Zero.NONE},
        "microbatches of 3": {"microbatch_size": 3},
        "offload": {"offload": ALL},
        "offload, zero 2": {"offload": ALL, "zero": Zero.TWO},
        "activation checkpoints, zero 2": {"checkpoint_activations": True, "zero": Zero.TWO},
        "activation checkpoints, zero 3": {"checkpoint_activations": True},
        "small memory budget": {"memory_budget": 1000.0},
        "untied": {"model": "gpt untied"},
        "llama": {"model": "llama"},
        "quantile": {"style": "quantile"},
        "lamb": {"optimizer": "lamb"},
        "adamw": {"optimizer": "adamw"},
    }
    if ranks == 2:
        found |= {
            "quantile, replicated data": {"style": "quantile", "data": Data.REPLICATED},
            "quantile, replicated data, zero 0": {"style": "quantile", "data": Data.REPLICATED, "zero": Zero.NONE},
            "per-layer": {"style": "per-layer"},
            "automatic": {"style": "automatic"},
            "adafactor": {"optimizer": "adafactor"},
            "clipped by global norm": {"optimizer": "clipped", "method": Method.NONE},
            "float32 sums": {"reduce_dtype": torch.float32, "method": Method.NONE},  # private: with more noise
            "none with offload": {"offload": ALL, "method": Method.NONE},
            "none with activation checkpoints": {
                "checkpoint_activations": True, "method": Method.NONE, "zero": Zero.NONE
            },
        }  # fmt: skip
        axes = [{"shard": 2}, {"replicate": 2}, {"tensor": 2}]
    elif ranks == 4:
        axes = [{"shard": 4}, {"replicate": 2, "shard": 2}, {"tensor": 2, "shard": 2}]
    else:
        axes = [{"shard": 8}, {"replicate": 2, "tensor": 2, "shard": 2}]
    first, *others = axes
    for settings in found.values():
        settings["axes"] = first
    for other in others:
        name = " x ".join(f"{axis}={size}" for axis, size in other.items())
        found[f"{name}"] = {"axes": other}
        found[f"{name}, zero 2"] = {"axes": other, "zero": Zero.TWO}
        if "tensor" in other:
            for method in (Method.MATERIALIZE, Method.GHOST, Method.NONE) if ranks < 8 else ():
                found[f"{name}, {method.value}"] = {"axes": other, "method": method}
            found |= {
                f"{name}, llama": {"axes": other, "model": "llama"},
                f"{name}, per-layer": {"axes": other, "style": "per-layer"},
                f"{name}, lamb": {"axes": other, "optimizer": "lamb"},
                f"{name}, adafactor": {"axes": other, "optimizer": "adafactor"},
                f"{name}, replicated data": {"axes": other, "data": Data.REPLICATED},
            }
    found["large vocabulary"] = {"axes": first, "model": "large vocabulary"}
    for name in ("zero 3, auto", "zero 3, none"):
        found[name] = {"axes": first, "steps": 5 if ranks < 8 else STEPS, "method": Method(name.split()[-1])}
    return found


SLOW_ON_TWO = ("zero 0, materialize", "zero 0, ghost_bk", "zero 0, none", "zero 2, materialize", "zero 2, ghost_bk")
LONG_ON_TWO = (
    "zero 2, ghost", "replicated data, zero 0", "offload, zero 2", "activation checkpoints, zero 2",
    "none with offload", "none with activation checkpoints", "quantile, replicated data, zero 0", "adafactor", "untied",
    "replicate=2, zero 2", "tensor=2, zero 2", "tensor=2, materialize", "tensor=2, adafactor",
    "tensor=2, replicated data", "tensor=2, none",
)  # fmt: skip
"""Combinations of settings that are each tested on two ranks by others, too."""
SHORT = {
    2: tuple(name for name in cases(2) if name not in SLOW_ON_TWO + LONG_ON_TWO),
    4: (
        "zero 0, auto", "zero 2, auto", "zero 3, auto", "zero 3, none", "large vocabulary", "offload",
        "replicated data", "replicate=2 x shard=2", "tensor=2 x shard=2", "tensor=2 x shard=2, llama",
        "tensor=2 x shard=2, lamb",
    ),
    8: ("zero 3, auto", "zero 3, none", "replicate=2 x tensor=2 x shard=2", "replicate=2 x tensor=2 x shard=2, lamb"),
}  # fmt: skip
"""The runs of every day; those of ``LONG_ON_TWO`` are marked long, all others slow."""


def moved_by_one(reduce_dtype: torch.dtype | None) -> tuple[float, float]:
    """Return how far one of 2 x 1024 samples moves the sum, and the sensitivity that the sum states."""
    net = from_loss(lambda p, d: ops.linear(d["x"], p["w"]).sum((1, 2)), {"w": torch.zeros(4, 4)})
    sharding = make_sharding(
        net, make_mesh({"shard": 2}, device_type="cpu"), zero=Zero.THREE, reduce_dtype=reduce_dtype
    )
    mechanism = Mechanism(poisson(5000, expected_batch_size=2048), clipping.flat(max_norm=1.0), 1.0)
    x, worst, stated = torch.full((1024, 1, 4), 3.0), 0.0, 0.0
    plan = make_plan(net, abstract_params(net, sharding), {"x": x}, method=Method.AUTO)
    stages = make_stages(
        net, optimizers.sgd(0.1), mechanism=mechanism, plan=plan, execution=make_execution(sharding=sharding)
    )
    weights = stages.weights(localize(init_params(net, keys.key(0), sharding)), torch.device("cpu"))
    for last in torch.linspace(0.5, 1, 9):
        if sharding.rank == 1:
            x[-1] = -3.0 * torch.tensor([1, 1, 1, last])
        totals = []
        for counts in (1.0, 0.0):
            mask = torch.ones(1024)
            mask[-1] = counts if sharding.rank == 1 else 1.0
            totals.append(stages.reduce(stages.gradient(weights, (), {"x": x}, mask).total))
        with_, without = totals
        difference = {path: with_.value[path].double() - without.value[path].double() for path in with_.value}
        worst, stated = max(worst, float(sharded_global_norm(difference, sharding))), float(with_.sensitivity)
    return worst, stated


@pytest.mark.ranks
def test_the_stated_sensitivity_covers_the_rounding_of_a_float32_reduction():
    for moved, stated in run_on_ranks(moved_by_one, 2, torch.float32):
        assert 1 + 1e-6 < moved <= stated < 1.002
    for moved, stated in run_on_ranks(moved_by_one, 2, None):
        assert moved <= 1 + 1e-6
        assert stated == 1.0


def everything(names: list[str], ranks: int) -> dict[str, Any]:
    return {name: train(**cases(ranks)[name]) for name in names}


_ALONE: dict[str, dict[str, Any]] = {}


def alone(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the same run on one rank, without the settings that must not change a result."""
    kept = {name: settings[name] for name in ("model", "method", "style", "optimizer", "steps") if name in settings}
    return _ALONE.setdefault(repr(kept), train(None, **kept)) if repr(kept) not in _ALONE else _ALONE[repr(kept)]


def check(ranks: int, names: list[str]) -> dict[str, Any]:
    settings = cases(ranks)
    first, *rest = run_on_ranks(everything, ranks, names, ranks)
    for name, got in first.items():
        assert_same(got, alone(settings[name]), f"{ranks} ranks, {name}")
    for other in rest:
        for name, got in other.items():
            assert torch.equal(got["losses"], first[name]["losses"]), f"{name}: ranks saw different losses"
            for path, leaf in first[name]["params"].items():
                assert torch.equal(got["params"][path], leaf), f"{name}: {path}: ranks hold different values"
    return first


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.long)])
def test_the_same_numbers_on_any_number_of_ranks(ranks):
    results = check(ranks, list(SHORT[ranks]))
    for name in ("zero 3, auto", "zero 3, none"):  # 1 rank against N from abstract init: losses to 1e-6
        truth = alone(cases(ranks)[name])
        torch.testing.assert_close(results[name]["losses"], truth["losses"], rtol=1e-6, atol=0)
        sums = [sum(float(leaf.double().sum()) for leaf in run["params"].values()) for run in (results[name], truth)]
        assert abs(sums[0] - sums[1]) < 1e-6 * abs(sums[1])


@pytest.mark.ranks
@pytest.mark.long
def test_the_same_numbers_in_more_combinations_on_two_ranks():
    check(2, list(LONG_ON_TWO))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_same_numbers_in_every_combination(ranks):
    others = SHORT[ranks] + (LONG_ON_TWO if ranks == 2 else ())
    check(ranks, [name for name in cases(ranks) if name not in others])


COMPILED = {
    "tensor": {"model": "one layer", "zero": Zero.TWO, "axes": {"tensor": 2}},
    "shard": {"axes": {"shard": 2}},
    "ghost": {"axes": {"shard": 2}, "method": Method.GHOST},
    "llama": {"axes": {"tensor": 2}, "model": "llama"},
}


def compiled(names: list[str], backend: str) -> dict[str, Any]:
    # One microbatch of every step's samples: one graph for all steps.
    return {name: train(**COMPILED[name], backend=backend, microbatch_size=24, steps=2) for name in names}


def check_compiled(names: list[str], backend: str) -> None:
    for results in run_on_ranks(compiled, 2, names, backend):
        for name, got in results.items():
            assert_same(got, alone(COMPILED[name] | {"steps": 2}), f"{name}, {backend}")


@pytest.mark.long
@pytest.mark.ranks
def test_the_whole_sharded_step_is_one_graph_and_agrees_with_eager():
    check_compiled(["tensor"], "eager")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_compiled_sharded_step_agrees_with_eager(backend):
    check_compiled(list(COMPILED), backend)


def test_one_rank_of_a_mesh_of_one_is_the_same_as_none():
    with fake_ranks(1):
        got = train({"shard": 1})
    assert_same(got, train(None), "one rank")


def test_a_mesh_names_its_axes_and_multiplies_to_the_world():
    with pytest.raises(FdpError, match="torchrun"):
        make_mesh({"shard": 2}, device_type="cpu")
    with fake_ranks(8, rank=6):
        for axes, said in (
            ({"shard": 3}, "multiply to the 8 ranks"),
            ({"shards": 8}, "expected axes among"),
            ({"shard": 0}, "at least 1"),
        ):
            with pytest.raises(FdpError, match=said):
                make_mesh(axes, device_type="cpu")
        mesh = make_mesh({"replicate": 2, "shard": 2, "tensor": 2}, device_type="cpu")
        sharding = make_sharding(over_tensor_axis(MODELS["gpt"], mesh), mesh, zero=Zero.THREE)
    places = [(axis.name, axis.rank, axis.size) for axis in sharding.axes]
    assert places == [("replicate", 1, 2), ("tensor", 0, 2), ("shard", 1, 2)]  # neighbours lie along tensor
    assert (sharding.rank, sharding.ranks, sharding.world.size) == (3, 4, 8)


def test_an_impossible_sharding_is_refused():
    with fake_ranks(3):
        mesh = make_mesh({"tensor": 3}, device_type="cpu")
        with pytest.raises(FdpError, match=r"divides the model's 4 heads, got 3 ranks"):
            over_tensor_axis(MODELS["gpt"], mesh)
        with pytest.raises(FdpError, match=r"call over_tensor_axis\(model, mesh\) first"):
            make_sharding(MODELS["gpt"], mesh, zero=Zero.TWO)
        axis = axis_of(mesh, "tensor")
        with pytest.raises(FdpError, match=r"blocks\.0\.out: expected dim 1 of \(8, 8\)"):
            make_sharding(MODELS["gpt"]._replace(tensor=axis), mesh, zero=Zero.TWO)
        with pytest.raises(FdpError, match="no tensor-parallel form"):
            over_tensor_axis(MODELS["gpt"]._replace(parallel=None), mesh)


def test_every_leaf_has_one_owner_and_no_leaf_is_left_out():
    model = MODELS["gpt"]
    spec = LeafSpec((2,), uniform(1.0))
    with fake_ranks(2):
        mesh = make_mesh({"shard": 2}, device_type="cpu")
        with pytest.raises(FdpError, match=r"no block uses \['spare'\]"):
            make_sharding(model._replace(leaves=model.leaves | {"spare": spec}), mesh, zero=Zero.TWO)
        lost = Block("lost", {"w": "nowhere"}, lambda p, h, data: h)
        with pytest.raises(FdpError, match="block lost uses 'nowhere'"):
            make_sharding(Model("m", {"w": spec}, (lost,)), mesh, zero=Zero.TWO)
        sharding = make_sharding(model, mesh, zero=Zero.TWO)
    assert sharding.leaves["embed.tokens"].blocks == ("embed", "head")  # tied: one leaf, owned by the first
    assert sharding.leaves["embed.tokens"].padded_numel == 7 * 8
    for zero in (Zero.NONE, Zero.TWO):
        for axes in ({"shard": 4}, {"tensor": 2, "shard": 2}, {"replicate": 2, "shard": 2}):
            counted = {path: torch.zeros(leaf.shape) for path, leaf in model.leaves.items()}
            for rank in range(4):
                with fake_ranks(4, rank=rank):
                    mesh = make_mesh(axes, device_type="cpu")
                    plan = make_sharding(over_tensor_axis(model, mesh), mesh, zero=zero)
                for path, leaf in plan.leaves.items():
                    box = tuple(slice(start, start + length) for start, length in leaf.window)
                    counted[path][box] += 1
                    copies = 4 // torch.Size([axis.size for axis, _ in leaf.sharded_dims]).numel()
                    counted[path][box] -= 1 - 1 / copies
            for path, count in counted.items():
                torch.testing.assert_close(count, torch.ones_like(count), msg=f"{path}: {axes}: not one owner each")


def test_initial_values_have_the_same_bits_under_every_sharding():
    model, key = MODELS["gpt"], keys.key(3)
    whole_leaves = tree.flatten(model.init(key))
    own = {"blocks.0.up": uniform(0.5)}
    for axes in ({"shard": 4}, {"tensor": 4}, {"tensor": 2, "shard": 2}):
        for rank in range(4):
            with fake_ranks(4, rank=rank):
                mesh = make_mesh(axes, device_type="cpu")
                sharding = make_sharding(over_tensor_axis(model, mesh), mesh, zero=Zero.THREE)
                drawn = tree.flatten(init_params(model, key, sharding))
                other = tree.flatten(init_params(model, key, sharding, inits=own))
                for path, leaf in whole_leaves.items():
                    mine = shard_leaf(leaf, path, sharding)
                    assert torch.equal(mine.to_local(), drawn[path].to_local()), path
                    assert torch.equal(mine.to_local(), other[path].to_local()) == (
                        path not in own or mine.to_local().numel() == 0
                    )
                with pytest.raises(FdpError, match=r"inits.*\['up'\]"):
                    init_params(model, key, sharding, inits={"up": uniform(0.5)})
                with pytest.raises(FdpError, match=r"head\.norm: expected shape \(8,\), got \(9,\)"):
                    shard_leaf(torch.zeros(9), "head.norm", sharding)


def cut_into(sharding: Sharding, path: str, leaf: torch.Tensor) -> torch.Tensor:
    return shard_leaf(leaf, path, sharding)


def test_a_module_of_torch_brings_its_own_initial_values_one_leaf_at_a_time():
    def factory() -> torch.nn.Module:
        return torch.nn.ModuleDict({"up": torch.nn.Linear(6, 13), "down": torch.nn.Linear(13, 6)})

    spec = {"up.weight": (13, 6), "up.bias": (13,), "down.weight": (6, 13), "down.bias": (6,)}
    leaves = {path: LeafSpec(shape, uniform(1.0)) for path, shape in spec.items()}
    model = Model("mlp", leaves, (Block("all", {path: path for path in leaves}, lambda p, h, data: h),))
    torch.manual_seed(5)
    expected = dict(factory().named_parameters())
    for rank in range(4):
        with fake_ranks(4, rank=rank):
            sharding = make_sharding(model, make_mesh({"shard": 4}, device_type="cpu"), zero=Zero.THREE)
            place = partial(cut_into, sharding)
            got = place_leaves(torch_leaves(factory, seed=5), place)
            for path, leaf in expected.items():
                part = got[path]
                assert isinstance(part, DTensor)
                assert torch.equal(part.to_local(), shard_leaf(leaf.detach(), path, sharding).to_local())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_ranks_hold_the_global_batch_between_them(ranks):
    everyone = sample_batch(DATA, SAMPLING, keys.key(5), step=0, microbatch_size=6)
    parts = [
        sample_batch(DATA, SAMPLING, keys.key(5), step=0, microbatch_size=6, rank=r, ranks=ranks) for r in range(ranks)
    ]
    assert len({part.mask.shape for part in parts}) == 1
    mask = torch.cat([part.mask for part in parts], dim=1)
    tokens = torch.cat([part.data["tokens"] for part in parts], dim=1)
    assert torch.equal(tokens[mask > 0], everyone.data["tokens"][everyone.mask > 0])
    with pytest.raises(FdpError, match="rank"):
        sample_batch(DATA, SAMPLING, keys.key(5), step=0, microbatch_size=6, rank=ranks, ranks=ranks)


def mistaken() -> list[str]:
    """Return the errors for mistakes that would add a sample twice, or independent noise on every rank."""
    net, chosen = MODELS["gpt"], OPTIMIZERS["sgd"]
    mechanism = Mechanism(SAMPLING, STYLES["flat"], 1.0)
    sharding = make_sharding(net, make_mesh({"shard": 2}, device_type="cpu"), zero=Zero.TWO)
    key = keys.key(0)
    params = init_params(net, key, sharding)
    share: dict[str, Any] = {"rank": sharding.rank, "ranks": sharding.ranks}
    batch = sample_batch(DATA, SAMPLING, key, step=0, microbatch_size=6, **share)
    plan = make_plan(net, abstract_params(net, sharding), {"tokens": batch.data["tokens"][0]})
    state = init_state(net, params, chosen, mechanism, execution=make_execution(sharding=sharding))
    low = sharding._replace(reduce_dtype=torch.bfloat16)
    other = make_sharding(net, sharding.mesh, zero=Zero.NONE)
    step = make_train_step(net, chosen, mechanism=mechanism, plan=plan, execution=make_execution(sharding=sharding))
    attempts = [
        lambda: init_params(net, keys.key(sharding.shard.rank), sharding),
        lambda: make_train_step(net, chosen, mechanism=mechanism, plan=plan)(state, batch, key),
        lambda: step(state, sample_batch(DATA, SAMPLING, key, step=0, microbatch_size=6), key),
        lambda: make_train_step(net, chosen, mechanism=mechanism, plan=plan, execution=make_execution(sharding=other))(
            state, batch, key
        ),
        lambda: make_train_step(net, chosen, mechanism=mechanism, plan=plan, execution=make_execution(sharding=low)),
        lambda: check_agreement({"data": sharding.shard.rank, "steps": 3}),
    ]
    found = []
    for attempt in attempts:
        try:
            attempt()
            found.append("nothing was said")
        except FdpError as error:
            found.append(str(error))
    step(state, batch, shared_key(keys.key(), sharding))
    return found


@pytest.mark.ranks
def test_settings_that_would_count_a_sample_twice_are_refused_on_every_rank():
    expected = (
        "the same key on every rank",
        "got a DTensor; give make_train_step the sharding",
        "expected the share of rank",
        "expected a shard of shape",
        "reduce_dtype: expected float64 or float32",
        "expected the same settings and data everywhere",
    )
    for found in run_on_ranks(mistaken, 2):
        for said, words in zip(found, expected, strict=True):
            assert words in said
