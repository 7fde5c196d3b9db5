"""Groups of a convolution and experts, each a layer of its own, against Kronecker products formed as matrices."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fdp import keys, ops, tree
from fdp.gradients.execution import Execution
from fdp.kfac import Distribution, Fisher, Form, KfacConfig, Sharing, by_path, everything, kfac
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.inversion.woodbury import Power
from fdp.kfac.state import find_kfac_state
from fdp.model import from_loss
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharding import Zero, make_sharding
from fdp.types import TrainState, Tree
from tests import foreign_cases
from tests.conftest import Case, randn
from tests.ranks import run_on_ranks

DAMPING, SAMPLES, GROUPS = 1e-2, 6, 2
KEY = keys.key(1)


def output(p: Tree, x: Tensor) -> Tensor:
    return F.conv2d(x, p["kernel"], p["bias"], groups=GROUPS)


def convolution() -> Case:
    """Return two groups of filters whose inputs differ by a factor of a hundred."""

    def loss(p: Tree, data: Tree) -> Tensor:
        return ops.conv2d(data["x"], p["kernel"], p["bias"], groups=GROUPS).sin().sum((1, 2, 3))

    params = {"kernel": randn(4, 2, 2, 2, seed=1), "bias": randn(4, seed=2)}
    data = {"x": randn(SAMPLES, 4, 3, 4, seed=3) * torch.tensor([1.0, 1.0, 100.0, 100.0]).view(4, 1, 1)}
    return Case(from_loss(loss, params), params, data)


def places_of(case: Case) -> tuple[Tensor, Tensor]:
    """Return output gradients and inputs (groups, batch, positions, n) by plain autograd and ``F.unfold``."""
    _, params, data = case
    y = output(params, data["x"]).requires_grad_()
    (g,) = torch.autograd.grad(y.sin().sum(), y)
    patches = F.unfold(data["x"], 2).transpose(1, 2)
    x = torch.stack(patches.chunk(GROUPS, 2))  # unfold has the channels of a group side by side
    return torch.stack(g.flatten(2).transpose(1, 2).chunk(GROUPS, 2)), torch.cat([x, torch.ones_like(x[..., :1])], 3)


def solved(left: Tensor, right: Tensor, gradient: Tensor) -> Tensor:
    """Return ``-(diag(left) + a)^-1 G (diag(right) + b)^-1`` of one group, with its own pi."""
    pi = math.sqrt(float(right.mean() / left.mean()))
    a = (left + math.sqrt(DAMPING) / pi).diag().inverse()
    b = (right + math.sqrt(DAMPING) * pi).diag().inverse()
    curved = torch.kron(a, b)  # rows of the gradient first
    return -(curved @ gradient.flatten()).view(gradient.shape)


def update_of(
    case: Case, distribution: Distribution, *, ranks: int = 1, sharing: Sharing = Sharing.EXPAND
) -> dict[str, Tensor]:
    """Return the update of the mean gradient after one measurement."""
    model, params, data = case
    sharding = None
    if ranks > 1:
        sharding = make_sharding(model, make_mesh({"replicate": ranks}, device_type="cpu"), zero=Zero.NONE)
    share, rank = len(tree.leaves(data)[0]) // ranks, 0 if sharding is None else sharding.rank
    mine = tree.map(lambda leaf: leaf[rank * share : (rank + 1) * share], data)
    config = KfacConfig(
        policy=everything(), distribution=distribution, damping=DAMPING, kl_clip=None, momentum=0.0,
        fisher=Fisher.EMPIRICAL, sharing=sharing,
    )  # fmt: skip
    k = kfac(model, mine, learning_rate=1.0, config=config, execution=Execution(sharding), dtype=torch.float64)
    state = TrainState(params, k.optimizer.init(params), (), torch.zeros((), dtype=torch.int64))
    state = k.refresh(state, mine, torch.ones(share), KEY, 0)
    assert int(find_kfac_state(state.opt).failures) == 0
    gradient = torch.func.grad(lambda p: model.loss(p, data).mean())(params)
    return tree.flatten(k.optimizer.update(gradient, state.opt, params)[0])


def by_dense_algebra(sharing: Sharing) -> dict[str, Tensor]:
    case = convolution()
    g, x = places_of(case)
    gradient = torch.einsum("gbso,gbsi->goi", g, x) / SAMPLES
    if sharing is Sharing.REDUCE:
        g, x = g.sum(2, keepdim=True), x.mean(2, keepdim=True)
    lefts, rights = g.square().sum(2).mean(1), x.square().mean(2).mean(1)
    done = torch.cat([solved(*each) for each in zip(lefts, rights, gradient)])
    return {"kernel": done[:, :-1].view(4, 2, 2, 2), "bias": done[:, -1]}


def on_ranks(ranks: int) -> list[dict[str, Tensor]]:
    return [update_of(convolution(), one, ranks=ranks) for one in Distribution]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for path, update in expected.items():
        torch.testing.assert_close(found[path], update, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("distribution", Distribution)
def test_every_group_of_a_convolution_is_a_layer_of_its_own(distribution: Distribution, sharing: Sharing) -> None:
    assert_equal(update_of(convolution(), distribution, sharing=sharing), by_dense_algebra(sharing))


@pytest.mark.ranks
def test_groups_on_several_ranks_equal_one_rank() -> None:
    for found in run_on_ranks(on_ranks, 3, 3):
        for update in found:
            assert_equal(update, by_dense_algebra(Sharing.EXPAND))


def test_groups_of_other_sizes_have_diagonals_of_their_own() -> None:
    """The mean of both groups' squares would fit neither."""
    _, x = places_of(convolution())
    squares = x[..., :-1].square().mean((1, 2, 3))
    assert float(squares[1] / squares[0]) > 5000
    model, _, data = convolution()
    policy = by_path({"kernel": (Form.DIAGONAL, Form.DIAGONAL)})
    config = KfacConfig(policy=policy, damping=DAMPING, fisher=Fisher.EMPIRICAL, power=Power.ROOT, via=Via.EIGEN)
    k = kfac(model, data, learning_rate=1.0, config=config, dtype=torch.float64)
    sides = k.plan.layers[next(iter(k.plan.layers))]
    assert (sides.left.size, sides.right.size, sides.right.groups) == (4, GROUPS * 9, GROUPS)


@pytest.mark.parametrize("distribution", Distribution)
def test_every_expert_is_a_layer_of_its_own(distribution: Distribution) -> None:
    foreign = foreign_cases.case_named("experts")
    model, params = foreign_cases.model_named("experts")
    found = update_of(Case(model, params, foreign.data), distribution)["down"]
    x, p = foreign.data["x"], tree.flatten(params)
    hidden = torch.einsum("btd,edf->ebtf", x, p["up"]).tanh()
    scores = torch.func.functional_call(foreign.module, p, (x,))
    slope = scores.softmax(-1) - F.one_hot(foreign.data["label"], 3)
    routed = F.linear(x, p["router.weight"], p["router.bias"]).softmax(-1)
    g = torch.einsum("bte,bd->ebtd", routed, slope @ p["head.weight"] / x.shape[1])
    gradient = torch.einsum("ebtf,ebtd->efd", hidden, g) / len(x)
    lefts, rights = hidden.square().mean(2).mean(1), g.square().sum(2).mean(1)
    expected = torch.stack([solved(*each) for each in zip(lefts, rights, gradient)])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)
