"""The contract on several ranks: no sample moves the sum by more than C, wherever it and the weights are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fdp.gradients.per_sample
from fdp import keys, tree
from fdp.fast.compile_modes import make_execution
from fdp.gradients.plan import Method, make_plan
from fdp.model import Model
from fdp.models import GPTConfig, gpt, mlp
from fdp.optimizers import sgd
from fdp.parallel.dtensors import localize
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharded_init import init_params
from fdp.parallel.sharded_norms import sharded_global_norm
from fdp.parallel.sharding import Reduce, Zero, abstract_params, make_sharding, over_tensor_axis
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson
from fdp.stages import make_stages
from fdp.types import Tree
from tests.ranks import run_on_ranks

C = 0.5
STYLES = {
    "flat": clipping.flat(max_norm=C),
    "per-layer": clipping.per_layer(max_norm=C),
    "automatic": clipping.automatic(max_norm=C),
    "quantile": clipping.quantile(max_norm=C, target_quantile=0.5, learning_rate=0.2, count_noise=1.0),
}
GPT = gpt(GPTConfig(layers=1, width=8, heads=2, context=6, vocab_size=13))
MLP = mlp(widths=(5, 7), classes=3)
SHARE = 3
"""Samples of a rank."""


def movement(
    model: Model,
    data: Tree,
    axes: dict[str, int],
    zero: Zero,
    method: Method,
    style: str,
    dtype: torch.dtype,
    **options: Any,
) -> float:
    """Return how far the sum over all ranks moves, in units of C, without the last sample of the last rank."""
    mesh = make_mesh(axes, device_type="cpu")
    model = over_tensor_axis(model, mesh)
    sharding = make_sharding(model, mesh, zero=zero, **options)
    mine = tree.map(lambda leaf: leaf[sharding.rank * SHARE : (sharding.rank + 1) * SHARE], data)
    plan = make_plan(model, abstract_params(model, sharding), mine, method=method, dtype=dtype)
    mechanism = Mechanism(poisson(100, expected_batch_size=6), STYLES[style], 1.0)
    stages = make_stages(model, sgd(0.1), mechanism=mechanism, plan=plan, execution=make_execution(sharding=sharding))
    # Large weights, so that every norm is over C.
    params = tree.map(lambda leaf: leaf * 5, localize(init_params(model, keys.key(0), sharding)))
    weights = stages.weights(params, torch.device("cpu"))
    sums = []
    for last in (1.0, 0.0):
        mask = torch.ones(SHARE)
        mask[-1] = last if sharding.rank == sharding.ranks - 1 else 1.0
        part = stages.gradient(weights, mechanism.clip.init(), mine, mask)
        sums.append(stages.reduce(part.total).value)
    moved = {path: sums[0][path] - sums[1][path] for path in sums[0]}
    return float(sharded_global_norm(moved, sharding)) / C


def tokens(ranks: int) -> Tree:
    return {"tokens": torch.randint(0, 13, (SHARE * ranks, 7), generator=torch.Generator().manual_seed(1))}


def inputs(ranks: int, last: float) -> Tree:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SHARE * ranks, 5, generator=generator)
    x[-1] *= last
    return {"image": x, "label": torch.randint(0, 3, (SHARE * ranks,), generator=generator)}


def movements(mutated: bool) -> dict[str, float]:
    found = {}
    if mutated:
        fdp.gradients.per_sample.sum_over_tensor_axis = lambda sharding, norms: norms
        return {"tensor": movement(GPT, tokens(1), {"tensor": 2}, Zero.TWO, Method.AUTO, "flat", torch.float32)}
    for axes in ({"shard": 2}, {"replicate": 2}, {"tensor": 2}):
        for method in (Method.MATERIALIZE, Method.GHOST, Method.GHOST_BK, Method.AUTO):
            for zero in (Zero.TWO, Zero.THREE):
                name = f"{axes} {method.value} {zero.name}"
                data = tokens(1 if "tensor" in axes else 2)
                found[name] = movement(GPT, data, axes, zero, method, "flat", torch.float32)
        for style in ("per-layer", "automatic", "quantile"):
            data = tokens(1 if "tensor" in axes else 2)
            found[f"{axes} {style}"] = movement(GPT, data, axes, Zero.THREE, Method.AUTO, style, torch.float32)
        found[f"{axes} bfloat16"] = movement(GPT, data, axes, Zero.THREE, Method.AUTO, "flat", torch.bfloat16)
    for last in (1e6, float("nan"), float("inf"), 0.0):
        for reduce in Reduce:
            name = f"outlier {last} {reduce.value}"
            found[name] = movement(
                MLP, inputs(2, last), {"shard": 2}, Zero.THREE, Method.AUTO, "flat", torch.float32, reduce=reduce
            )
    return found


@pytest.mark.ranks
def test_no_sample_moves_the_sum_by_more_than_c_on_any_placement():
    first, second = run_on_ranks(movements, 2, False)
    assert first == pytest.approx(second, nan_ok=True)
    for name, moved in first.items():
        slack = 1e-3 if "bfloat16" in name else 1e-6
        assert moved <= 1 + slack, name
        assert moved > 0.2 or "outlier" in name, f"{name}: nothing moved, so nothing was tested"
    assert first["outlier nan step"] == first["outlier inf step"] == 0


@pytest.mark.ranks
def test_a_norm_that_is_not_summed_over_the_tensor_axis_is_noticed():
    (moved, _) = run_on_ranks(movements, 2, True)
    assert moved["tensor"] > 1.01
