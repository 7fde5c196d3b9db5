"""A model that draws random numbers is not computed twice: norms and sums would be of different gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.map import map as map_each
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fdp import ops
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.random_draws import RandomDraws, _without_dropout, check_same_outputs
from fdp.model import Model, from_loss
from fdp.privacy.clipping import clip_to
from fdp.types import Clip, FdpError
from tests.conftest import randn

DATA = {"x": randn(4, 5, 6).float()}
PARAMS = {"w": torch.ones(3, 6)}
GENERATOR = torch.Generator()


def model_with(draw: Callable[[Tensor], Tensor]) -> Model:
    return from_loss(lambda p, d: ops.linear(draw(d["x"]), p["w"]).square().sum((1, 2)), PARAMS)


def attention(dropout: float) -> Callable[[Tensor], Tensor]:
    return lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=dropout)[:, 0]


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rand": lambda x: x * torch.rand(5, 1),
    "rand_like": lambda x: x + torch.rand_like(x),
    "a generator": lambda x: x * torch.randn(5, 1, generator=GENERATOR),
    "in place": lambda x: x + torch.zeros_like(x).normal_(),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "attention": attention(0.5),
}
QUIET = {
    "no dropout": lambda x: F.dropout(x, 0.5, training=False),
    "attention": attention(0.0),
    "empty": lambda x: x + 0 * torch.zeros_like(x),
}
TWICE = [(Method.GHOST, None), (Method.FLASH, 0.0), (Method.AUTO, 0.0)]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(("method", "budget"), TWICE)
def test_a_second_backward_of_random_numbers_is_refused(name: str, method: Method, budget: float | None) -> None:
    words = rf"computes the same twice, since {method.value} goes back a second time .* draws random numbers \(aten\."
    with pytest.raises(FdpError, match=words):
        make_plan(model_with(DRAWS[name]), PARAMS, DATA, method=method, memory_budget=budget)


@pytest.mark.parametrize("name", QUIET)
@pytest.mark.parametrize(("method", "budget"), TWICE)
def test_a_model_that_draws_nothing_is_planned(name: str, method: Method, budget: float | None) -> None:
    make_plan(model_with(QUIET[name]), PARAMS, DATA, method=method, memory_budget=budget)


@pytest.mark.parametrize("method", [Method.GHOST_BK, Method.FLASH_BK, Method.AUTO])
def test_where_what_was_measured_is_stored_random_numbers_move_the_sum_by_at_most_the_bound(method: Method) -> None:
    model = model_with(DRAWS["dropout"])
    plan = make_plan(model, PARAMS, DATA, method=method)
    for _ in range(5):
        _, norms, stash = per_sample_norms(model, PARAMS, DATA, plan=plan)
        clip = clip_to(norms, max_norm=0.1)
        one = Clip({path: factors * (torch.arange(4) == 1) for path, factors in clip.factors.items()}, clip.sensitivity)
        assert clipped_sum(stash, one).value["w"].norm() <= 0.1 * (1 + 1e-6)


@pytest.mark.parametrize(("method", "budget"), TWICE)
def test_what_is_computed_again_and_is_not_the_same_is_refused(method: Method, budget: float | None) -> None:
    model = model_with(lambda x: x)
    plan = make_plan(model, PARAMS, DATA, method=method, memory_budget=budget)
    _, norms, stash = per_sample_norms(model, PARAMS, DATA, plan=plan)
    assert clipped_sum(stash.copy(), clip_to(norms, max_norm=0.1)).value["w"].isfinite().all()
    factor = iter([1.0, 10.0])
    model = model_with(lambda x: x * next(factor))
    _, norms, stash = per_sample_norms(model, PARAMS, DATA, plan=plan)
    with pytest.raises(FdpError, match="loss: expected the same output when it is computed again for the sum"):
        clipped_sum(stash, clip_to(norms, max_norm=0.1))


@pytest.mark.parametrize(("share", "same"), [(0.0, True), (1e-4, True), (0.01, False), (0.9, False)])
@pytest.mark.parametrize("largest", [1e-3, 1.0, 1e6])
def test_every_sample_is_compared_by_its_own_size(largest: float, share: float, same: bool) -> None:
    """One huge sample does not make differences of the others look small."""
    factors = iter([1.0, 1.0 + share])

    def change_one(x: Tensor) -> Tensor:
        return torch.cat([x[:1], x[1:2] * next(factors), x[2:]])

    model, data = model_with(change_one), {"x": DATA["x"].clone()}
    data["x"][0] = largest
    plan = make_plan(model_with(lambda x: x), PARAMS, data, method=Method.GHOST)
    _, norms, stash = per_sample_norms(model, PARAMS, data, plan=plan)
    clip = clip_to(norms, max_norm=0.1)
    if same:
        clipped_sum(stash, clip)
    else:
        with pytest.raises(FdpError, match="expected the same output"):
            clipped_sum(stash, clip)


def test_losses_near_zero_may_differ_by_rounding() -> None:
    given, again = torch.tensor([0.0, 1e-7, 5.0]), torch.tensor([1e-6, 0.0, 5.0])
    check = check_same_outputs(model_with(lambda x: x), [given])
    assert check is not None
    check(0, again)
    with pytest.raises(FdpError, match="expected the same output"):
        check_same_outputs(model_with(lambda x: x), [given])(0, given + torch.tensor([1e-4, 0.0, 0.0]))  # pyright: ignore


def test_outputs_that_hold_no_numbers_are_not_compared() -> None:
    with FakeTensorMode():
        assert check_same_outputs(model_with(lambda x: x), [torch.empty(3)]) is None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_is_the_same_when_it_is_computed_again(bad: float) -> None:
    model, data = model_with(lambda x: x), {"x": DATA["x"].clone()}
    data["x"][1, 2, 3] = bad
    plan = make_plan(model, PARAMS, data, method=Method.GHOST)
    _, norms, stash = per_sample_norms(model, PARAMS, data, plan=plan)
    assert clipped_sum(stash, clip_to(norms, max_norm=0.1)).value["w"].isfinite().all()


def _cond(branch: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cond(x.sum() > 0, branch, lambda x: x.clone(), (x,))


def _flex(score: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def attention(x: Tensor) -> Tensor:
        q = torch.zeros(1, 1, 128, 16)
        return x + flex_attention(q, q, q, score_mod=lambda value, *_: score(value)).sum()  # pyright: ignore

    return attention


def _mask(kept: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def attention(x: Tensor) -> Tensor:
        q, one = torch.zeros(1, 1, 128, 16), torch.ones(1, 1, 1, dtype=torch.int32)
        mask = BlockMask.from_kv_blocks(
            one, one.unsqueeze(3) - 1, mask_mod=lambda b, h, i, j: kept((i - j).float()) > 0
        )
        return x + flex_attention(q, q, q, block_mask=mask).sum()  # pyright: ignore

    return attention


def _map(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: map_each(step, x)  # pyright: ignore


INSIDE = {"cond": _cond, "map": _map, "score": _flex, "mask": _mask}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", INSIDE)
def test_draws_inside_operators_that_call_functions_are_found(name: str) -> None:
    for inside, draws in ((lambda x: F.dropout(x, 0.5), True), (torch.rand_like, True), (torch.sin, False)):
        found: set[str] = set()
        with FakeTensorMode(), RandomDraws(found), torch.no_grad():
            INSIDE[name](inside)(torch.empty(4, 6))
        assert bool(found) == draws
        assert all(each.startswith("aten.") for each in found)


def test_an_operator_that_hides_its_functions_is_a_draw() -> None:
    found: set[str] = set()
    with RandomDraws(found):  # only one branch is taken
        torch.cond(torch.tensor(True), torch.sin, lambda x: torch.rand_like(x), (torch.ones(2),))
    assert found == {"cond"}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recurrent_layers_draw_only_with_dropout(dropout: float) -> None:
    lstm = torch.ops.aten._cudnn_rnn.default
    given = {argument.name: None for argument in lstm._schema.arguments} | {"dropout": dropout}
    assert _without_dropout(lstm, (), given) == (dropout == 0)
    assert torch.Tag.nondeterministic_seeded in lstm.tags


def test_draws_are_found_by_name() -> None:
    found: set[str] = set()
    with RandomDraws(found):
        torch.randn(3).add_(torch.zeros(3))
    assert found == {"aten.randn.default"}
