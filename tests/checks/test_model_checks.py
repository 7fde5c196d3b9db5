from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fdp import ops, tree
from fdp.checks.model_checks import _orders, check_independent, check_norms, check_separate, reference_gradients
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.rules import Pair, Rule, rows
from fdp.model import from_loss
from fdp.types import FdpError
from tests.conftest import Case, case_named, randn

PARAMS, DATA = {"w": randn(5, 4)}, {"x": randn(6, 4)}


def model_of(loss):
    return from_loss(loss, PARAMS, name="mixed")


def batch_norm(p, d):
    return ops.linear(F.batch_norm(d["x"], None, None, training=True), p["w"]).square().sum(1)


def in_batch_softmax(p, d):
    h = ops.linear(d["x"], p["w"])
    return F.cross_entropy(h @ h.T, torch.arange(len(h)), reduction="none")


def mean_subtracted(p, d):
    losses = ops.linear(d["x"], p["w"]).square().sum(1)
    return losses - losses.mean()


def batch_mean(p, d):
    losses = ops.linear(d["x"], p["w"]).square().sum(1)
    return losses.mean().expand(len(losses))


def running(p, d):
    return ops.linear(d["x"], p["w"]).square().sum(1).cumsum(0)


def by_position(p, d):
    return ops.linear(d["x"], p["w"]).square().sum(1) * torch.arange(1, 1 + len(d["x"]))


def capacity(p, d):
    """Routing: the three samples with the largest scores are served, the others are not."""
    scores = ops.linear(d["x"], p["w"]).square().sum(1)
    return torch.where(scores >= scores.sort().values[-3], scores, 0.0)


def scores_of(p, d):
    return ops.linear(d["x"], p["w"]).square().sum(1)


def of_outliers(p, d):
    scores = scores_of(p, d)
    return torch.where(scores.amax() > 1e4, scores / scores.amax(), scores)


def above_the_mean(p, d):
    """No arithmetic leads from one sample to another."""
    scores = scores_of(p, d)
    return scores + (d["x"][:, 0] > d["x"][:, 0].detach().mean())


def among_many(p, d):
    scores = scores_of(p, d)
    return scores - scores.mean() if len(scores) > 6 else scores


def beside_nan(p, d):
    return scores_of(p, d) * (2.0 if bool(d["x"].isnan().any()) else 1.0)


def among_sixteen(p, d):
    scores = scores_of(p, d)
    return scores - scores.mean() if len(scores) > 15 else scores


def among_six(p, d):
    scores = scores_of(p, d)
    return scores - scores.mean() if len(scores) == 6 else scores


def in_pairs(p, d):
    """A loss that changes only if the sample has a neighbour."""
    return scores_of(p, d) * (1.0 if len(d["x"]) > 1 else 2.0)


@pytest.mark.parametrize(
    "loss",
    [
        batch_norm,
        in_batch_softmax,
        mean_subtracted,
        batch_mean,
        running,
        by_position,
        capacity,
        of_outliers,
        above_the_mean,
        among_many,
        among_six,
        among_sixteen,
        beside_nan,
        in_pairs,
    ],
)
def test_a_loss_that_depends_on_other_samples_is_refused(loss):
    with pytest.raises(FdpError, match=r"mixed: the loss of a sample changed by .* not independent"):
        check_independent(model_of(loss), PARAMS, DATA)


def test_independent_losses_pass(case: Case):
    check_independent(*case, tolerance=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_a_bad_sample_of_an_honest_model_passes(bad):
    case = case_named("loop")
    data = {"x": case.data["x"].clone()}
    data["x"][1] = bad
    check_independent(case.model, case.params, data)


def test_a_bad_sample_that_spreads_is_refused():
    data = {"x": DATA["x"].clone()}
    data["x"][1] = float("nan")
    with pytest.raises(FdpError, match="not independent"):
        check_independent(model_of(mean_subtracted), PARAMS, data)


def test_a_small_change_beside_a_large_loss_is_refused():
    x = DATA["x"].clone()
    x[0] *= 1e3

    def loss(p, d):
        return scores_of(p, d) + 0.1 * d["x"].clamp(-1, 1).mean()

    assert float(loss(PARAMS, {"x": x}).amax()) > 1e5
    with pytest.raises(FdpError, match="not independent"):
        check_independent(model_of(loss), PARAMS, {"x": x})


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_count_over_the_batch_is_refused_though_all_count(dtype):
    def loss(p, d):
        return scores_of(p, d) * d["counts"] / d["counts"].sum() * len(d["x"])

    with pytest.raises(FdpError, match="not independent"):
        check_independent(model_of(loss), PARAMS, DATA | {"counts": torch.ones(6, dtype=dtype)})


def test_a_loss_that_depends_on_the_longest_sample_is_refused():
    tokens = torch.arange(1, 25).view(6, 4)

    def loss(p, d):
        longest = (d["tokens"] != 0).sum(1).max()
        return ops.embedding(d["tokens"], p["w"]).square().sum((1, 2)) / longest

    table = {"w": randn(25, 3)}
    with pytest.raises(FdpError, match=r"one token, then padding\) has one loss alone and another beside sample 0"):
        check_independent(from_loss(loss, table), table, {"tokens": tokens})


def test_synthetic_samples_that_a_model_rejects_are_left_out():
    def loss(p, d):
        if not bool((d["x"].abs() < 100).all()):
            raise ValueError("too large")
        return scores_of(p, d)

    check_independent(model_of(loss), PARAMS, DATA)


def test_a_loss_that_depends_on_others_in_batches_of_the_given_size_is_refused():
    def among_three(p, d):
        scores = scores_of(p, d)
        return scores - scores.mean() if len(scores) == 3 else scores

    with pytest.raises(FdpError, match="not independent"):
        check_independent(model_of(among_three), PARAMS, {"x": DATA["x"][:3]})


@pytest.mark.parametrize("loss", [in_pairs, mean_subtracted, by_position])
def test_a_model_that_rejects_all_synthetic_samples_is_checked_on_the_data(loss):
    def strict(p, d):
        if not bool((d["x"].unsqueeze(1) == DATA["x"]).all(-1).any(1).all()):
            raise ValueError("unknown sample")
        return loss(p, d)

    with pytest.raises(FdpError, match=r"sample \d of the data has one loss alone and another beside (sample|\d)"):
        check_independent(model_of(strict), PARAMS, DATA)
    for same in (scores_of, lambda p, d: 2 * scores_of(p, d)):
        loss = same
        check_independent(model_of(strict), PARAMS, DATA)


@pytest.mark.parametrize("count", [2, 3, 5, 11, 12, 13, 64])
@pytest.mark.parametrize("room", [2, 3, 4, 16])
def test_every_sample_is_in_two_batches_and_where_there_are_several_beside_others(count, room):
    orders = _orders(count, room)
    assert all(len(order) == room for order in orders)
    for i in range(count):
        beside = [frozenset(order) for order in orders if i in order]
        assert len(beside) >= 2
        assert len(set(beside)) > 1 or room >= count - 1
    assert len(set(map(tuple, orders))) > len(orders) // 2


# ---------------------------------------------------------------- rows


def in_another_order(p, d):
    return ops.linear(d["x"].flip(0), p["w"]).flip(0).square().sum(1)


class MixesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):  # pyright: ignore
        return g + 0.1 * g.mean(0)


def in_the_backward(p, d):
    return MixesBackward.apply(ops.linear(d["x"], p["w"])).square().sum(1)  # pyright: ignore


@pytest.mark.parametrize("loss", [in_another_order, in_the_backward])
def test_rows_that_are_not_one_samples_are_refused(loss):
    alike = {"x": DATA["x"][:1].expand(6, -1).clone()}
    model = model_of(loss)
    plan = make_plan(model, PARAMS, alike, dtype=torch.float64)
    check_independent(model, PARAMS, alike)  # losses do not show it
    with pytest.raises(FdpError, match=r"mixed: changing only the first sample's rows changed another sample"):
        check_separate(model, PARAMS, alike, plan=plan)


def test_rows_of_honest_models_pass(case: Case):
    check_separate(*case, plan=make_plan(*case, dtype=torch.float64), tolerance=1e-9)


def test_group_normalisation_passes():
    def loss(p, d):
        return ops.linear(F.group_norm(d["x"], 2), p["w"]).square().sum(1)

    check_independent(model_of(loss), PARAMS, DATA)


def test_one_sample_or_an_averaged_loss_cannot_be_checked():
    with pytest.raises(FdpError, match="at least 2 samples, got 1"):
        check_independent(model_of(batch_norm), PARAMS, {"x": DATA["x"][:1]})
    with pytest.raises(FdpError, match=r"shape \(6,\), got \(\)"):
        check_independent(model_of(lambda p, d: ops.linear(d["x"], p["w"]).mean()), PARAMS, DATA)


@pytest.mark.parametrize("method", [Method.MATERIALIZE, Method.GHOST, Method.AUTO])
def test_honest_norms_pass(case: Case, method):
    check_norms(*case, plan=make_plan(*case, method=method, dtype=torch.float64), tolerance=1e-10)


def forgetful(x, g, shape) -> Pair:
    """A wrong rule: the last token only."""
    return Pair(rows(g)[:, :, -1:], rows(x)[:, :, -1:], shape)


def wrong_model(x):
    rule = Rule("forgetful", F.linear, forgetful)
    params, data = {"good": randn(4, 4), "bad": randn(5, 4)}, {"x": x}

    def loss(p, d):
        return ops.use(rule, ops.linear(d["x"], p["good"]).tanh(), p["bad"]).square().sum((1, 2))

    return from_loss(loss, params), params, data


@pytest.mark.parametrize("method", [Method.GHOST, Method.GHOST_BK, Method.AUTO])
def test_a_wrong_rule_is_caught_and_its_leaf_is_named(method):
    model, params, data = wrong_model(randn(3, 6, 4))
    plan = make_plan(model, params, data, method=method, dtype=torch.float64)
    with pytest.raises(FdpError, match=r"^bad: per-sample norm differs from vmap\(grad\)"):
        check_norms(model, params, data, plan=plan)


def test_a_wrong_norm_is_caught_beside_an_outlier():
    # The outlier has one token that matters, so the wrong rule is right on it; its norm dwarfs the others.
    x = randn(3, 6, 4)
    x[0, :-1] = 0.0
    rule = Rule("forgetful", F.linear, forgetful)
    params, data = {"w": randn(5, 4)}, {"x": x * torch.tensor([1e4, 1.0, 1.0])[:, None, None]}
    model = from_loss(lambda p, d: ops.use(rule, d["x"], p["w"]).square().sum((1, 2)), params)
    plan = make_plan(model, params, data, method=Method.GHOST, dtype=torch.float64)
    with pytest.raises(FdpError, match="w: per-sample norm differs"):
        check_norms(model, params, data, plan=plan)


def test_a_dimension_taken_for_the_samples_is_caught():
    # As many tokens as samples, tokens first: the uses look right by shape and are not.
    params, data = {"w": randn(5, 4)}, {"x": randn(3, 3, 4)}
    model = from_loss(lambda p, d: ops.linear(d["x"].transpose(0, 1), p["w"]).sin().sum((0, 2)), params)

    def plan_and_check():
        plan = make_plan(model, params, data, method=Method.AUTO, dtype=torch.float64)
        check_norms(model, params, data, plan=plan)

    with pytest.raises(FdpError, match=r"per-sample norm differs|sample dimension"):
        plan_and_check()


def test_frozen_leaves_have_no_norm_to_check():
    case = case_named("mlp")
    model = case.model._replace(frozen=frozenset({"head.weight"}))
    plan = make_plan(model, case.params, case.data, method=Method.AUTO, dtype=torch.float64)
    check_norms(model, case.params, case.data, plan=plan)


def test_the_reference_is_a_loop_of_single_sample_gradients(case: Case):
    reference = reference_gradients(*case)
    for b in range(3):
        flat = {path: leaf.clone().requires_grad_() for path, leaf in tree.flatten(case.params).items()}
        one = tree.map(lambda leaf: leaf[b : b + 1], case.data)  # noqa: B023
        loss = case.model.loss(tree.unflatten(case.params, flat), one)
        gradients = torch.autograd.grad(loss.sum(), list(flat.values()))
        for (path, leaf), gradient in zip(reference.items(), gradients, strict=True):
            torch.testing.assert_close(leaf[b], gradient, rtol=1e-9, atol=1e-12, msg=path)
