"""Gather, ring and owner equal one process and dense algebra for a softmax head with more classes than tokens.

With padding, and if nothing was measured."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fdp import keys, ops, tree
from fdp.gradients.execution import Execution
from fdp.kfac import Distribution, Fisher, Form, KfacConfig, by_path, kfac
from fdp.kfac.state import find_kfac_state
from fdp.model import Block, LeafSpec, Likelihood, Model, Outputs
from fdp.models import mlp
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharding import Zero, make_sharding
from fdp.types import TrainState, Tree
from tests.conftest import randn
from tests.ranks import run_on_ranks

DAMPING, SAMPLES, CLASSES = 1e-2, 6, 40
SCALES = (0.05, 1.0, 4.0, 10.0)
ON_RANKS = (0.05, 4.0)
POLICY = by_path({"head.weight": (Form.SOFTMAX, Form.DENSE), "*": (Form.DENSE, Form.DENSE)})
KEY = keys.key(1)


class Case(NamedTuple):
    """A model whose head has more classes than the batch has tokens, its parameters and its samples."""

    model: Model
    params: Tree
    data: Tree


def images(scale: float) -> Case:
    """Return an MLP; a larger ``scale`` of the head makes its classes more certain."""
    params = {
        "layers": {"0": {"weight": randn(5, 6, seed=1), "bias": randn(5, seed=2)}},
        "head": {"weight": scale * randn(CLASSES, 5, seed=3), "bias": randn(CLASSES, seed=4)},
    }
    label = torch.randint(0, CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(0))
    return Case(mlp(widths=(6, 5), classes=CLASSES), params, {"image": randn(SAMPLES, 6, seed=5), "label": label})


def sentences() -> Case:
    """Return tokens of which some are padding, all of them in two samples."""

    def hidden(p: Tree, _: Tree, data: Tree) -> Tensor:
        return ops.linear(data["x"], p["weight"], p["bias"]).tanh()

    def scores(p: Tree, h: Tensor, data: Tree) -> Tensor:
        return ops.linear(h, p["weight"], p["bias"])

    def weights(data: Tree) -> Tensor:
        return data["present"] / data["present"].sum(1, keepdim=True).clamp(min=1)

    def loss(p: Tree, h: Tensor, data: Tree) -> Tensor:
        logs = scores(p, h, data).log_softmax(2).gather(2, data["y"].unsqueeze(2)).squeeze(2)
        return -(weights(data) * logs).sum(1)

    outputs = Outputs(
        scores, Likelihood.SOFTMAX, lambda d: d["y"], weights, weight="weight", present=lambda d: d["present"]
    )
    params = {name: dict(weight=randn(*shape, seed=7), bias=randn(shape[0], seed=8)) for name, shape in SHAPES.items()}
    leaves = {path: LeafSpec(tuple(leaf.shape), keys.normal) for path, leaf in tree.flatten(params).items()}
    names = {name: {leaf: f"{name}.{leaf}" for leaf in ("weight", "bias")} for name in SHAPES}
    blocks = (Block("hidden", names["hidden"], hidden), Block("head", names["head"], loss, outputs=outputs))
    y = torch.randint(0, CLASSES, (SAMPLES, 4), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([4, 2, 0, 3, 0, 1])
    present = (torch.arange(4) < lengths[:, None]).double()
    return Case(Model("m", leaves, blocks), params, {"x": randn(SAMPLES, 4, 6, seed=9), "y": y, "present": present})


SHAPES = {"hidden": (5, 6), "head": (CLASSES, 5)}


def updated(case: Case, ranks: int, distribution: Distribution, column_dtype: torch.dtype | None = None) -> Tree:
    """Return the update after one measurement, and the effect of an empty measurement before and after it."""
    model, params, data = case
    sharding = None
    if ranks > 1:
        sharding = make_sharding(model, make_mesh({"replicate": ranks}, device_type="cpu"), zero=Zero.NONE)
    share, rank = SAMPLES // ranks, 0 if sharding is None else sharding.rank
    mine = tree.map(lambda leaf: leaf[rank * share : (rank + 1) * share], data)
    config = KfacConfig(
        policy=POLICY, distribution=distribution, column_dtype=column_dtype, damping=DAMPING, kl_clip=None,
        momentum=0.0, fisher=Fisher.EMPIRICAL,
    )  # fmt: skip
    k = kfac(model, mine, learning_rate=1.0, config=config, execution=Execution(sharding), dtype=torch.float64)
    state = TrainState(params, k.optimizer.init(params), (), torch.zeros((), dtype=torch.int64))
    counts, kept = [], []

    def measured(state: TrainState, mask: Tensor, step: int, data: Tree = mine) -> TrainState:
        after = k.refresh(state, data, mask, KEY, step)
        states = [find_kfac_state(one.opt) for one in (state, after)]
        before, now = (tree.leaves((each.factors, each.maps)) for each in states)
        counts.append(int(find_kfac_state(after.opt).failures))
        kept.append(all(torch.equal(a, b) for a, b in zip(before, now)))
        return after

    nobody, everybody = torch.zeros(share), torch.ones(share)
    state = measured(state, nobody, 0)
    state = measured(state, everybody, 10)
    gradient = torch.func.grad(lambda p: model.loss(p, data).mean())(params)
    update, _ = k.optimizer.update(gradient, state.opt, params)
    state = measured(state, nobody, 20)
    if "present" in data:  # samples, but all of their tokens are padding
        measured(state, everybody, 30, mine | {"present": torch.zeros_like(mine["present"])})
    assert len(find_kfac_state(state.opt).maps) == 2
    return {"update": tree.flatten(update), "failures": counts, "kept": kept}


def on_ranks(ranks: int) -> list[Tree]:
    """Run every case in every distribution."""
    found = [updated(images(scale), ranks, one) for scale in ON_RANKS for one in Distribution]
    found += [updated(sentences(), ranks, one) for one in Distribution]
    return found + [updated(images(1.0), ranks, one, torch.float16) for one in Distribution]


def by_dense_algebra(scale: float) -> dict[str, Tensor]:
    """Return ``-(G + sqrt(damping) / pi)^-1 g (A + sqrt(damping) pi)^-1`` of the head, G = mean of diag(p) - p p^T."""
    _, params, data = images(scale)
    first, head = params["layers"]["0"], params["head"]
    h = torch.tanh(data["image"] @ first["weight"].T + first["bias"])
    p = (h @ head["weight"].T + head["bias"]).softmax(-1)
    curvature = p.mean(0).diag() - p.T @ p / SAMPLES
    inputs = torch.cat([h, h.new_ones(SAMPLES, 1)], 1)
    second = inputs.T @ inputs / SAMPLES
    gradient = ((p - torch.nn.functional.one_hot(data["label"], CLASSES)) / SAMPLES).T @ inputs
    pi = ((second.trace() / len(second)) / (curvature.trace() / len(curvature))).sqrt()
    left = curvature + DAMPING**0.5 / pi * torch.eye(len(curvature), dtype=h.dtype)
    right = second + DAMPING**0.5 * pi * torch.eye(len(second), dtype=h.dtype)
    update = -torch.linalg.solve(left, gradient) @ torch.linalg.inv(right)
    return {"head.weight": update[:, :-1], "head.bias": update[:, -1]}


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_gather_ring_and_owner_equal_one_process_with_padding_and_empty_ranks(ranks: int) -> None:
    alone = [updated(images(scale), 1, Distribution.GATHER) for scale in ON_RANKS]
    alone += [updated(sentences(), 1, Distribution.GATHER), updated(images(1.0), 1, Distribution.GATHER, torch.float16)]
    for found in run_on_ranks(on_ranks, ranks, ranks):
        for i, mine in enumerate(found):
            expected, where = alone[i // 3], f"case {i // 3}, {list(Distribution)[i % 3].value}"
            for path, update in expected["update"].items():
                error = (mine["update"][path] - update).norm() / update.norm()
                assert error < 1e-10, f"{where}: {path} differs by {error:.1e}"
            # At first there is no inverse to keep but the identity; later the last good one: every layer, once each.
            assert mine["failures"] == ([2, 2, 4, 6] if i // 3 == len(ON_RANKS) else [2, 2, 4]), where
            assert mine["kept"] == [True, False, *[True] * (len(mine["kept"]) - 2)], where


@pytest.mark.parametrize("distribution", Distribution)
@pytest.mark.parametrize("scale", SCALES)
def test_the_softmax_form_of_a_wide_head_equals_dense_algebra(scale: float, distribution: Distribution) -> None:
    found = updated(images(scale), 1, distribution)["update"]
    for path, update in by_dense_algebra(scale).items():
        assert (found[path] - update).norm() < 1e-12 * update.norm()


@pytest.mark.parametrize("distribution", Distribution)
@pytest.mark.parametrize("scale", SCALES)
def test_a_wide_head_stored_in_half_precision_is_inverted(scale: float, distribution: Distribution) -> None:
    """With rounded columns and their total the curvature is within 1e-3, as by default."""
    found: Any = updated(images(scale), 1, distribution, torch.float16)
    assert found["failures"] == [2, 2, 4]
    for path, update in by_dense_algebra(scale).items():
        assert (found["update"][path] - update).norm() < 1e-3 * update.norm()
