"""Reductions over shards equal those over full leaves, on every mesh, with as few collectives as they promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fdp import optimizers as fo
from fdp import tree
from fdp.parallel import collectives
from fdp.parallel.sharded_norms import sharded_global_norm, sharded_reductions
from fdp.types import Axis, FdpError, Flat, Path
from tests.ranks import run_on_ranks

STEPS = 4
MESHES = {
    "shard": {"shard": 4},
    "tensor x shard": {"tensor": 2, "shard": 2},
    "replicate x shard": {"replicate": 2, "shard": 2},
}
# Shape, and the dim that each axis cuts where it is on the mesh.
LEAVES: dict[Path, tuple[tuple[int, ...], dict[str, int]]] = {
    "matrix": ((8, 6), {"shard": 0}),
    "vector": ((5,), {"shard": 0}),
    "cube": ((6, 3, 4), {"tensor": 2, "shard": 0}),
    "cube.middle": ((2, 5, 3), {"tensor": 1}),
    "short": ((2, 5), {"tensor": 0, "shard": 0}),  # fewer rows than ranks
    "thin": ((1, 6), {"tensor": 1, "shard": 0}),
    "both": ((7, 6), {"tensor": 1, "shard": 0}),
    "twice": ((9, 4), {"tensor": 0, "shard": 0}),
    "whole": ((3, 2), {}),
    "scalar": ((), {}),
}
WIDE = {"both", "vector"}  # in float64, among others in float32
OPTIMIZERS: dict[str, Callable[[], fo.Optimizer]] = {
    "lamb": lambda: fo.lamb(0.05, weight_decay=0.1),
    "adafactor": lambda: fo.adafactor(0.05, weight_decay=0.1),
    "clip": lambda: fo.chain(fo.clip_by_global_norm(0.5), fo.sgd(0.1, momentum=0.9)),
    "adamw": lambda: fo.adamw(0.05),
    "adagrad": lambda: fo.adagrad(0.05, weight_decay=0.1),
    "adadelta": lambda: fo.adadelta(weight_decay=0.1),
    "adamax": lambda: fo.chain(fo.clip_by_value(0.5), fo.adamax(0.05, weight_decay=0.1)),
}
ELEMENTWISE = dict.fromkeys(("adamw", "adagrad", "adadelta", "adamax"), 0)


class LeafPlan(NamedTuple):
    shape: tuple[int, ...]
    sharded_dims: tuple[tuple[Axis, int], ...]


class Plan(NamedTuple):
    leaves: dict[Path, LeafPlan]
    axes: tuple[Axis, ...]
    world: Axis


def make_plan(sizes: dict[str, int]) -> Plan:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    axes = tuple(collectives.axis_of(mesh, name) for name in sizes)
    flat = init_device_mesh("cpu", (math.prod(sizes.values()),), mesh_dim_names=("world",))
    leaves = {
        path: LeafPlan(shape, tuple((axis, dims[axis.name]) for axis in axes if axis.name in dims))
        for path, (shape, dims) in LEAVES.items()
    }
    return Plan(leaves, axes, collectives.axis_of(flat, "world"))


def draw(seed: int) -> Flat:
    generator = torch.Generator().manual_seed(seed)
    new = lambda path, shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype_of(path))  # noqa: E731
    return {path: new(path, shape) for path, (shape, _) in LEAVES.items()}


def dtype_of(path: Path) -> torch.dtype:
    return torch.float64 if path in WIDE else torch.float32


def part_of(whole: Tensor, plan: LeafPlan, reduced: tuple[int, ...]) -> Tensor:
    """This rank's part, cut as DTensor cuts: chunks of ceil(n / size), one axis after the other."""
    for axis, dim in plan.sharded_dims:
        if whole.ndim > 1 and dim - whole.ndim in reduced:
            continue
        length = whole.shape[dim]
        chunk = -(-length // axis.size)
        start = min(axis.rank * chunk, length)
        whole = whole.narrow(dim, start, min(chunk, length - start))
    return whole


def parts_of(whole: Flat, plan: Plan, *, reduced: tuple[int, ...] = ()) -> Flat:
    return {path: part_of(leaf, plan.leaves[path], reduced).clone() for path, leaf in whole.items()}


def difference(got: Flat, want: Flat) -> float:
    """The largest absolute difference over all leaves; infinite where a shape or a dtype is another, or a NaN."""
    if any((got[path].shape, got[path].dtype) != (leaf.shape, leaf.dtype) for path, leaf in want.items()):
        return math.inf
    gaps = [(got[path] - leaf).abs().max().item() for path, leaf in want.items() if leaf.numel()]
    return max(math.inf if math.isnan(gap) else gap for gap in gaps)


def counted(fn: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Return the result of ``fn`` and the number of collectives it took."""
    with patch.object(collectives, "all_reduce", wraps=collectives.all_reduce) as spy:
        return fn(*args), spy.call_count


def train(name: str, plan: Plan) -> tuple[float, set[int]]:
    """The largest difference from the unsharded run over a few steps, and the collectives of a step."""
    optimizer, counts = OPTIMIZERS[name](), set()

    def update(*args: Any) -> Any:
        result, count = counted(optimizer.update, *args)
        counts.add(count)
        return result

    return largest_gap(optimizer, update, plan), counts


def largest_gap(optimizer: fo.Optimizer, update: Callable[..., Any], plan: Plan) -> float:
    """Between a run of ``update`` on parts and a run of ``optimizer`` on whole leaves."""
    reductions, whole, parts = sharded_reductions(plan), draw(0), parts_of(draw(0), plan)
    state, part_state = optimizer.init(whole), optimizer.init(parts, reductions)
    gaps = []
    for step in range(STEPS):
        grads = draw(1 + step)
        updates, state = optimizer.update(grads, state, whole)
        whole = fo.apply_updates(whole, updates)
        updates, part_state = update(parts_of(grads, plan), part_state, parts, reductions)
        parts = fo.apply_updates(parts, updates)
        gaps.append(difference(parts, parts_of(whole, plan)))
    return max(gaps)


def reduce_all(plan: Plan) -> dict[str, tuple[float, int]]:
    """Each reduction of parts against that of the whole: the difference and the collectives."""
    reductions, whole = sharded_reductions(plan), draw(7)
    parts, cases = parts_of(whole, plan), {}
    squares, count = counted(reductions.sum_of_squares, parts)
    cases["sum_of_squares"] = difference(squares, fo.LOCAL.sum_of_squares(whole)), count
    backwards = reductions.sum_of_squares(dict(reversed(parts.items())) if plan.world.rank else parts)
    cases["any order"] = difference(backwards, squares), 1
    sizes, count = counted(reductions.size, parts)
    cases["size"] = float(sizes != fo.LOCAL.size(whole)), count
    for name in ("mean", "mean_of_squares"):
        for dim in (-1, -2):
            got, count = counted(getattr(reductions, name), parts, dim)
            want = parts_of(getattr(fo.LOCAL, name)(whole, dim), plan, reduced=(dim,))
            cases[f"{name} {dim}"] = difference(got, want), count
    got, count = counted(reductions.mean, reductions.mean(parts, -1), -2)
    want = parts_of(fo.LOCAL.mean(fo.LOCAL.mean(whole, -1), -2), plan, reduced=(-1, -2))
    cases["mean of means"] = difference(got, want), count
    norm, count = counted(sharded_global_norm, parts, plan)
    cases["global_norm"] = abs(norm.item() - tree.global_norm(whole).item()), count
    return cases


def edge_cases(plan: Plan) -> dict[str, Any]:
    reductions, parts = sharded_reductions(plan), parts_of(draw(7), plan)
    want = reductions.sum_of_squares(parts)["whole"]
    copies = parts | {"whole": parts["whole"] if plan.world.rank == 0 else parts["whole"] * torch.nan}
    spoiled = parts | {"matrix": parts["matrix"] * (torch.nan if plan.world.rank == 3 else 1.0)}
    lonely = {"thin": parts["thin"]}  # on some ranks nothing at all
    try:
        reductions.sum_of_squares({"blocks": parts["whole"]})
        message = ""
    except FdpError as error:
        message = str(error)
    return {
        "a copy counts once, whatever the others hold": torch.equal(reductions.sum_of_squares(copies)["whole"], want),
        "norm of NaN": sharded_global_norm(spoiled, plan).item(),
        "lonely": {dim: reductions.mean(lonely, dim)["thin"].shape for dim in (-1, -2)},
        "same norm": sharded_global_norm(parts, plan).item(),
        "message": message,
    }


def everything() -> dict[str, Any]:
    """All cases in one start of the processes."""
    results = {}
    for name, sizes in MESHES.items():
        plan = make_plan(sizes)
        results[name] = {
            "reductions": reduce_all(plan),
            "optimizers": {optimizer: train(optimizer, plan) for optimizer in OPTIMIZERS},
            "edges": edge_cases(plan),
        }
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(everything, 4)


# Collectives of a step; a mean takes one per axis that cuts the dim of any leaf.
STEP_COLLECTIVES = {
    "shard": {"lamb": 2, "adafactor": 4, "clip": 1} | ELEMENTWISE,
    "tensor x shard": {"lamb": 2, "adafactor": 7, "clip": 1} | ELEMENTWISE,
    "replicate x shard": {"lamb": 2, "adafactor": 4, "clip": 1} | ELEMENTWISE,
}


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_on_shards_takes_the_steps_of_full_leaves(ranks, mesh, name):
    for results in ranks:
        gap, counts = results[mesh]["optimizers"][name]
        assert gap < 1e-6
        assert counts == {STEP_COLLECTIVES[mesh][name]}


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", MESHES)
def test_every_reduction_of_shards_equals_that_of_full_leaves(ranks, mesh):
    across, along = (2, 1) if mesh == "tensor x shard" else (1, 0)
    collectives_of = {
        "sum_of_squares": 1,
        "any order": 1,
        "size": 0,
        "mean -1": along,
        "mean -2": across,
        "mean_of_squares -1": along,
        "mean_of_squares -2": across,
        "mean of means": across,
        "global_norm": 1,
    }
    for results in ranks:
        cases = results[mesh]["reductions"]
        assert {name: count for name, (_, count) in cases.items()} == collectives_of
        for name, (gap, _) in cases.items():
            # Sums of squares reach 50, where float32 is 4e-6 apart; float64 accumulation leaves at most one such step.
            assert gap <= (4e-6 if name == "sum_of_squares" else 1e-6), name


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", MESHES)
def test_a_repeated_leaf_counts_once_and_a_bad_number_reaches_everyone(ranks, mesh):
    edges = [results[mesh]["edges"] for results in ranks]
    for edge in edges:
        assert edge["a copy counts once, whatever the others hold"]
        assert "blocks: expected the path of a leaf of the sharding (matrix, vector" in edge["message"]
        assert edge["lonely"][-2][0] == 1
        assert edge["lonely"][-1][1] == 1
    assert len({edge["same norm"] for edge in edges}) == 1
    # Rank 3 holds a part of its own where all axes cut the matrix, and a copy elsewhere.
    assert all(math.isnan(edge["norm of NaN"]) == (mesh == "shard") for edge in edges)


def compiled() -> dict[str, float]:
    plan = make_plan(MESHES["tensor x shard"])
    optimizers = {name: OPTIMIZERS[name]() for name in ("lamb", "adafactor")}
    return {
        name: largest_gap(optimizer, torch.compile(optimizer.update, fullgraph=True), plan)
        for name, optimizer in optimizers.items()
    }


@pytest.mark.ranks
@pytest.mark.slow
def test_a_compiled_optimizer_on_shards_takes_the_steps_of_full_leaves():
    for gaps in run_on_ranks(compiled, 4):
        assert all(gap < 1e-6 for gap in gaps.values()), gaps
