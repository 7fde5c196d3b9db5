"""The same numbers on one rank and on several: initial values, losses, norms, noise and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fdp import clipping, keys, optimizers, tree
from fdp.init import uniform
from fdp.mechanism import Mechanism
from fdp.mesh import make_mesh
from fdp.methods import Method, make_plan
from fdp.model import Block, LeafSpec, Model
from fdp.models import GPTConfig, LlamaConfig, gpt, llama
from fdp.offload import NOTHING, Offload
from fdp.sampling import poisson, sample_batch
from fdp.sharding import (
    Data,
    Reduce,
    Zero,
    abstract_params,
    cut_out,
    init_params,
    make_sharding,
    over_tensor_axis,
)
from fdp.step import init_state, make_train_step
from fdp.types import FdpError
from tests.ranks import run_on_ranks

# 13 tokens of vocabulary and a context of 6: dims that no number of ranks below divides.
MODELS = {
    "gpt": gpt(GPTConfig(layers=2, width=8, heads=4, context=6, vocab_size=13)),
    "gpt untied": gpt(GPTConfig(layers=2, width=8, heads=4, context=6, vocab_size=13, tied=False)),
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
    "adafactor": optimizers.adafactor(0.01),
    "clipped": optimizers.chain(optimizers.clip_by_global_norm(0.01), optimizers.adamw(0.01)),
}
DATA = {"tokens": torch.randint(0, 13, (40, 7), generator=torch.Generator().manual_seed(0))}
SAMPLING = poisson(40, expected_batch_size=10)
STEPS = 5
ALL = Offload(params=True, grads=True, optimizer=True)


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
    offload: Offload = NOTHING,
    checkpoint_activations: bool = False,
    microbatch_size: int = 6,
    memory_budget: float | None = None,
    steps: int = STEPS,
) -> dict[str, Any]:
    """A few steps; on one rank if ``axes`` is None. Parameters come back whole."""
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
        sample_batch(DATA, SAMPLING, keys.fold_in(root, t), microbatch_size=microbatch_size, rank=rank, ranks=ranks)
        for t in range(steps)
    ]
    shapes = abstract_params(net, sharding)
    plan = make_plan(net, shapes, {"tokens": batches[0].data["tokens"][0]}, method=method, memory_budget=memory_budget)
    step = make_train_step(
        net,
        chosen,
        mechanism=mechanism,
        plan=plan,
        sharding=sharding,
        offload=offload,
        checkpoint_activations=checkpoint_activations,
    )
    state = init_state(net, params, chosen, mechanism, sharding=sharding, offload=offload)
    first = whole(state.params)
    losses, norms = [], []
    for t, batch in enumerate(batches):
        state, metrics = step(state, batch, keys.fold_in(root, 100 + t))
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
    return {path: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for path, leaf in flat.items()}


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
    """What is run on so many ranks. Every setting of ``train`` that changes a result is in the first word group."""
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
    }
    if ranks == 2:
        found |= {
            "per-layer": {"style": "per-layer"},
            "automatic": {"style": "automatic"},
            "adafactor": {"optimizer": "adafactor"},
            "clipped by global norm": {"optimizer": "clipped", "method": Method.NONE},
            "float32 sums": {"reduce_dtype": torch.float32},
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
    if ranks == 8:  # eight processes on few cores: the meshes that only they can form
        keep = ("zero", "x", "replicated data", "offload", "lamb")
        found = {name: case for name, case in found.items() if name.startswith(keep[:1]) or "x" in name.split()}
    return found


def everything(names: list[str], ranks: int) -> dict[str, Any]:
    return {name: train(**cases(ranks)[name]) for name in names}


_ALONE: dict[str, dict[str, Any]] = {}


def alone(settings: dict[str, Any]) -> dict[str, Any]:
    """The same run on one rank, with none of what must not change a result."""
    kept = {name: settings[name] for name in ("model", "method", "style", "optimizer", "steps") if name in settings}
    return _ALONE.setdefault(repr(kept), train(None, **kept)) if repr(kept) not in _ALONE else _ALONE[repr(kept)]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_same_numbers_on_any_number_of_ranks(ranks):
    settings = cases(ranks)
    first, *rest = run_on_ranks(everything, ranks, list(settings), ranks)
    for name, got in first.items():
        assert_same(got, alone(settings[name]), f"{ranks} ranks, {name}")
    for other in rest:
        for name, got in other.items():
            assert torch.equal(got["losses"], first[name]["losses"]), f"{name}: ranks saw different losses"
            for path, leaf in first[name]["params"].items():
                assert torch.equal(got["params"][path], leaf), f"{name}: {path}: ranks hold different values"
    assert first["zero 3, auto"]["held"] < 1.4 * first["zero 0, auto"]["held"] / ranks
