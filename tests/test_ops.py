from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fdp import ops
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.rules import Dense, Rule
from fdp.gradients.tape import Tape, Watched
from fdp.model import from_loss
from fdp.types import FdpError
from tests.conftest import randn


def watched(value, batch: int = 3) -> Watched:
    return Watched(value, "leaf", Tape(batch, None))


W, b, s = randn(5, 4), randn(5, seed=2), randn(4, seed=3)
x, ids = randn(3, 6, 4, seed=4), torch.tensor([[0, 1, 2, 4, 4, 0]] * 3)
image, kernel, line = randn(3, 4, 7, 6, seed=5), randn(6, 2, 3, 3), randn(6, 2, 3)
CONV = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}

# name: the operation on (maybe watched) parameters, the parameters, and what torch says
OPS = {
    "linear": (lambda w: ops.linear(x, w), (W,), lambda: F.linear(x, W)),
    "linear with bias": (lambda w, c: ops.linear(x, w, c), (W, b), lambda: F.linear(x, W, b)),
    "embedding": (lambda w: ops.embedding(ids, w), (W,), lambda: W[ids]),
    "add": (lambda w: ops.add(x, w), (s,), lambda: x + s),
    "add a table": (lambda w: ops.add(x, w), (randn(6, 4),), lambda: x + randn(6, 4)),
    "scale": (lambda w: ops.scale(x, w), (s,), lambda: x * s),
    "scale by one number": (lambda w: ops.scale(x, w), (torch.tensor(2.5),), lambda: 2.5 * x),
    "layer_norm": (lambda w: ops.layer_norm(x, w), (s,), lambda: F.layer_norm(x, (4,), s)),
    "layer_norm with bias": (
        lambda w, c: ops.layer_norm(x, w, c, eps=0.1),
        (s, b[:4]),
        lambda: F.layer_norm(x, (4,), s, b[:4], 0.1),
    ),
    "rms_norm": (lambda w: ops.rms_norm(x, w, eps=0.1), (s,), lambda: F.rms_norm(x, (4,), s, 0.1)),
    "conv1d": (
        lambda w, c: ops.conv1d(image.flatten(2), w, c, **CONV),
        (line, randn(6)),
        lambda: F.conv1d(image.flatten(2), line, randn(6), **CONV),
    ),
    "conv2d": (
        lambda w, c: ops.conv2d(image, w, c, **CONV),
        (kernel, randn(6)),
        lambda: F.conv2d(image, kernel, randn(6), **CONV),
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_watched_and_plain_parameters_give_what_torch_gives(name):
    op, params, expected = OPS[name]
    torch.testing.assert_close(op(*params), expected(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(op(*(watched(p) for p in params)), expected(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, (_, params, _) in OPS.items() if len(params) == 2])
@pytest.mark.parametrize("which", [0, 1])
def test_one_parameter_may_be_frozen_and_the_other_watched(name, which):
    op, params, expected = OPS[name]
    mixed = [watched(p) if i == which else p for i, p in enumerate(params)]
    torch.testing.assert_close(op(*mixed), expected(), rtol=1e-12, atol=1e-12)
    assert [use.path for use in mixed[which].tape.uses] == ["leaf"]  # type: ignore[union-attr]


def test_rms_norm_takes_its_mean_in_float32():
    wide = 300 * torch.ones(1, 4, dtype=torch.float16)  # 300^2 overflows float16
    assert ops.rms_norm(wide, torch.ones(4, dtype=torch.float16)).tolist() == [[1.0] * 4]


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_softmax_of_scores(causal):
    q, k, v = (randn(2, heads, 5, 4, seed=i) for i, heads in enumerate((4, 2, 2)))
    K, V = (z.repeat_interleave(2, 1) for z in (k, v))  # query heads 0, 1 share key head 0
    scores = q @ K.mT / 2.0
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(ops.attention(q, k, v, causal=causal), scores.softmax(-1) @ V, rtol=1e-12, atol=1e-12)


def test_a_rule_of_your_own_is_used_like_the_others():
    rule = Rule("diagonal", lambda x, w: x * w, lambda x, g, shape: Dense((x * g).flatten(1, -2).sum(1)))
    params = {"w": randn(4)}
    model = from_loss(lambda p, d: ops.use(rule, d["x"], p["w"]).square().sum((1, 2)), params)
    plan = make_plan(model, params, {"x": x}, method=Method.AUTO, dtype=torch.float64)
    _, norms, _ = per_sample_norms(model, params, {"x": x}, plan=plan)
    expected = (2 * x.square() * params["w"]).sum(1).square().sum(1)
    torch.testing.assert_close(norms.squared["w"], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (1, 1, 4)])
def test_a_parameter_with_as_many_dimensions_as_the_input_is_refused_or_right(shape):
    params, data = {"w": randn(*shape)}, {"x": x[:, 0]}
    model = from_loss(lambda p, d: ops.scale(d["x"], p["w"]).flatten(1).square().sum(1), params)
    try:
        plan = make_plan(model, params, data, method=Method.AUTO, dtype=torch.float64)
    except FdpError:
        return
    _, norms, _ = per_sample_norms(model, params, data, plan=plan)
    expected = (2 * x[:, 0].square() * params["w"].view(-1, 4)[0]).square().sum(1)
    torch.testing.assert_close(norms.squared["w"], expected, rtol=1e-12, atol=0)
