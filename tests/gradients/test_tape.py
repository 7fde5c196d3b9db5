"""Tests of the tape: no use of a watched leaf goes unrecorded, and attaching a tap is adding it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fdp import ops, tree
from fdp.gradients.tape import Tape, Watched, attach, attach_bias
from fdp.gradients.taps import make_taps, trace, watch
from fdp.model import Block, from_loss
from fdp.types import FdpError
from tests.conftest import randn

x = randn(3, 4)
ids = torch.tensor([0, 1, 2])

ESCAPES = {
    "matmul": lambda w: torch.matmul(x, w),
    "x @ w": lambda w: x @ w,
    "w @ x": lambda w: w @ x,
    "x + w": lambda w: x + w,
    "w + x": lambda w: w + x,
    "1 + w": lambda w: 1 + w,
    "x - w": lambda w: x - w,
    "w - x": lambda w: w - x,
    "x * w": lambda w: x * w,
    "2 * w": lambda w: 2 * w,
    "x / w": lambda w: x / w,
    "w / 2": lambda w: w / 2,
    "1 / w": lambda w: 1 / w,
    "w ** 2": lambda w: w**2,
    "x ** w": lambda w: x**w,
    "-w": lambda w: -w,
    "w[0]": lambda w: w[0],
    "list(w)": list,
    "w.T": lambda w: w.T,
    "w.mT": lambda w: w.mT,
    "w.sum()": lambda w: w.sum(),
    "w.detach()": lambda w: w.detach(),
    "w.data": lambda w: w.data,
    "w.to()": lambda w: w.to(torch.float32),
    "F.linear": lambda w: F.linear(x, w),
    "F.embedding": lambda w: F.embedding(ids, w),
    "F.layer_norm": lambda w: F.layer_norm(x, (4,), w),
    "einsum": lambda w: torch.einsum("bi,oi->bo", x, w),
    "addmm": lambda w: torch.addmm(w, x, x.T),
    "cat": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack([x, w]),
    "where": lambda w: torch.where(x > 0, x, w),
    "sum": lambda w: torch.sum(w),
    "keyword": lambda w: torch.mul(input=x, other=w),
    "input of linear": lambda w: ops.linear(w, x),
    "input of scale": lambda w: ops.scale(w, x),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_any_other_operation_on_a_watched_leaf_is_an_error_naming_leaf_and_operation(name):
    leaf = Watched(randn(4, 4), "blocks.0.weight", Tape(3, None))
    with pytest.raises(
        FdpError, match=r"blocks\.0\.weight \(shape \(4, 4\)\): used by .+, which has no per-sample rule"
    ):
        ESCAPES[name](leaf)


@pytest.mark.parametrize(
    ("name", "operation"), [("matmul", "matmul"), ("F.linear", "linear"), ("w.T", "T"), ("cat", "cat")]
)
def test_the_error_names_the_operation(name, operation):
    with pytest.raises(FdpError, match=f"used by {operation},"):
        ESCAPES[name](Watched(randn(4, 4), "w", Tape(3, None)))


def test_a_watched_leaf_tells_its_shape_dtype_and_device():
    leaf = Watched(randn(5, 4), "w", Tape(3, None))
    assert (tuple(leaf.shape), leaf.dtype, leaf.device) == ((5, 4), torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("name", ["x @ w", "F.linear", "w.T"])
def test_an_escape_inside_a_model_is_caught_when_it_is_traced(name):
    params = {"layers": [{"w": randn(4, 4)}]}
    model = from_loss(lambda p, d: d["x"].sum(1) + ESCAPES[name](p["layers"][0]["w"]).sum(), params)
    with pytest.raises(FdpError, match=r"layers\.0\.w .*no per-sample rule"):
        trace(model.blocks[0], tree.flatten(params), model.trainable, (), {"x": x})


@pytest.mark.parametrize("inputs", [randn(6, 4), randn(4), torch.tensor(1.0)])
def test_an_input_without_a_leading_sample_dimension_is_refused(inputs):
    leaf = Watched(randn(5, 4), "w", Tape(3, None))
    with pytest.raises(FdpError, match=r"w: used by linear on an input of shape .* leading sample dimension of 3"):
        ops.linear(inputs, leaf)


# ---------------------------------------------------------------- taps that are attached, for plain autograd


def attached_gradients(tokens: tuple[int, ...], *, bias: bool):
    """The gradients of ``y``, of the tap and of the bias's copies, by attaching and by adding."""
    y = randn(3, *tokens, 4).requires_grad_()
    tap = torch.zeros(()).double().expand(y.shape).detach().requires_grad_()
    copies = randn(1, 4, seed=3).expand(3, 4).detach().requires_grad_()
    found = []
    for by in ("attach", "add"):
        if by == "attach":
            out = attach(y, tap)
            out = attach_bias(out, copies) if bias else out
        else:
            out = y + tap
            out = out + (copies - copies.detach()).reshape(3, *[1] * len(tokens), 4) if bias else out
        wanted = [y, tap, copies] if bias else [y, tap]
        found.append((out.detach(), torch.autograd.grad((out.sin() * out).sum(), wanted)))
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [(), (5,), (2, 3)])
def test_attaching_a_tap_is_adding_it(tokens, bias):
    (value, gradients), (expected, truth) = attached_gradients(tokens, bias=bias)
    assert torch.equal(value, expected)
    torch.testing.assert_close(gradients, truth, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_attached_tap_is_not_lost_in_a_compiled_function(backend):
    def run(y, tap, copies):
        return attach_bias(attach(y * 2, tap), copies).sin()

    y, tap, copies = randn(3, 5, 4), randn(3, 5, 4, seed=2), randn(3, 4, seed=3)
    given = [leaf.requires_grad_() for leaf in (y, tap, copies)]
    g = torch.autograd.grad(torch.compile(run, fullgraph=True, backend=backend)(*given).sum(), given)
    output_gradient = (2 * y.detach()).cos()
    torch.testing.assert_close(g, (2 * output_gradient, output_gradient, output_gradient.sum(1)))


def test_a_linear_layer_with_a_bias_records_both():
    block = Block("b", {"w": "w", "b": "b"}, lambda p, c, d: ops.linear(d["x"], p["w"], p["b"]).sin().sum((1, 2)))
    weights, data = {"w": randn(5, 4), "b": randn(5, seed=2)}, {"x": randn(3, 2, 4)}
    trainable = frozenset(weights)
    uses, _ = trace(block, weights, trainable, (), data)
    seen = []
    for attached in (True, False):
        taps = {name: tap.detach().requires_grad_() for name, tap in make_taps(uses, weights).items()}
        tape = Tape(3, taps, attached=attached)
        out = block.apply(watch(block, weights, trainable, tape), (), data)
        assert tuple(tape.uses) == uses
        seen.append((out.detach(), torch.autograd.grad(out.sum(), list(taps.values()))))
    torch.testing.assert_close(*seen, rtol=1e-12, atol=1e-12)
