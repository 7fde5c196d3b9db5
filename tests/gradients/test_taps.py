from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fdp import ops, tree
from fdp.checks.model_checks import check_norms
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.rules import per_sample_gradient
from fdp.gradients.taps import (
    EXPANDED,
    Tape,
    Use,
    Watched,
    attach,
    attach_bias,
    batch_size_of,
    make_taps,
    tapped_vjp,
    trace,
    watch,
)
from fdp.model import Block, from_loss
from fdp.types import FdpError, Tree
from tests.conftest import Case, randn

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


def test_positions_are_not_taken_for_samples_when_there_are_as_many():
    params = {"positions": randn(3, 4)}  # 3 tokens, 3 samples: arange(3) looks like one id per sample

    def loss(p, data):
        return (data["x"] + ops.embedding(torch.arange(3), p["positions"])).square().sum((1, 2))

    model = from_loss(loss, params)
    with pytest.raises(FdpError, match="sample dimension"):
        make_plan(model, params, {"x": randn(3, 3, 4)}, method=Method.AUTO, dtype=torch.float64)


def test_a_leaf_called_like_the_use_of_another_is_refused_or_right():
    params, data = {"w": randn(5, 4), "w#0": randn(5)}, {"x": x}
    model = from_loss(lambda p, d: ops.linear(d["x"], p["w"], p["w#0"]).sin().sum(1), params)
    try:
        plan = make_plan(model, params, data, method=Method.GHOST_BK, dtype=torch.float64)
    except FdpError:
        return
    check_norms(model, params, data, plan=plan)


def test_trace_finds_every_use_with_its_shapes(case: Case):
    flat = tree.flatten(case.params)
    carry: Tree = ()
    found = set()
    for block in case.model.blocks:
        uses, carry = trace(block, flat, case.model.trainable, carry, case.data)
        found |= {use.path for use in uses}
        assert len({use.name for use in uses}) == len(uses)
        for use in uses:
            assert use.leaf_shape == tuple(flat[use.path].shape)
            assert use.input_shape[0] == use.output_shape[0] == 3
    assert found == case.model.trainable
    assert tuple(carry.shape) == (3,)


def test_trace_lists_repeated_uses_apart_and_expanded_ones_once():
    params = {"w": randn(4, 4), "b": randn(4)}

    def loss(p, data):
        h = ops.linear(ops.linear(data["x"], p["w"], p["b"]), p["w"], p["b"])
        return ops.add(h, p["b"]).sum(1)

    block = from_loss(loss, params).blocks[0]
    uses, _ = trace(block, params, frozenset(params), (), {"x": x})
    assert uses == (
        Use("w#0", "w", "linear", (3, 4), (3, 4), (4, 4)),
        Use("b", "b", EXPANDED, (3, 4), (3, 4), (4,)),
        Use("w#1", "w", "linear", (3, 4), (3, 4), (4, 4)),
    )


def test_trace_leaves_out_what_is_not_trained():
    params = {"w": randn(5, 4), "b": randn(5)}
    block = from_loss(lambda p, d: ops.linear(d["x"], p["w"], p["b"]).sum(1), params).blocks[0]
    uses, _ = trace(block, params, frozenset({"b"}), (), {"x": x})
    assert [use.path for use in uses] == ["b"]


def test_trace_computes_nothing():
    huge = 10**7  # a weight of 10^14 elements
    params = {"w": torch.zeros(()).expand(huge, huge)}
    block = from_loss(lambda p, d: ops.linear(d["x"], p["w"]).sum((1, 2)), params).blocks[0]
    uses, out = trace(block, params, frozenset(params), (), {"x": torch.zeros(()).expand(3, huge, huge)})
    assert uses[0].output_shape == (3, huge, huge)
    assert tuple(out.shape) == (3,)


def test_the_pull_back_gives_the_carry_gradient_and_the_records_of_every_use(case: Case, reference):
    flat = tree.flatten(case.params)
    uses, carry, pulls = [], (), []
    for block in case.model.blocks:
        weights = {path: flat[path] for path in tree.leaves(block.params)}
        plain = block.apply(tree.select(flat, block.params), carry, case.data)
        uses = trace(block, flat, case.model.trainable, carry, case.data)[0]
        carry, pull = tapped_vjp(block, weights, carry, case.data, uses, case.model.trainable)
        torch.testing.assert_close(carry, plain, rtol=1e-12, atol=1e-12)
        pulls.append(pull)
    gradient = torch.ones(3, dtype=torch.float64)
    total = {}
    for pull in reversed(pulls):
        gradient, records = pull(gradient)
        for path, found in records.items():
            for record in found:
                total[path] = total.get(path, 0) + per_sample_gradient(record)
    assert set(total) == set(reference)
    for path, expected in reference.items():
        torch.testing.assert_close(total[path], expected, rtol=1e-10, atol=1e-12)


def test_a_block_hands_back_the_gradient_of_its_carry():
    block = Block("b", {"w": "w"}, lambda p, h, d: ops.linear(h, p["w"]).tanh())
    w, h, g = randn(5, 4), randn(3, 4, seed=2), randn(3, 5, seed=3)
    uses, _ = trace(block, {"w": w}, frozenset({"w"}), h, {"x": x})
    _, pull = tapped_vjp(block, {"w": w}, h, {"x": x}, uses, frozenset({"w"}))
    carry_gradient, records = pull(g)
    expected = torch.func.vjp(lambda h: F.linear(h, w).tanh(), h)[1](g)[0]
    torch.testing.assert_close(carry_gradient, expected)
    assert not carry_gradient.requires_grad
    assert [use.path for use in uses] == list(records) == ["w"]


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"x": torch.zeros(3), "y": torch.zeros(4)},
        {"x": torch.tensor(1.0)},
        {"x": x, "y": torch.tensor(1)},
    ],
)
def test_data_without_one_common_sample_dimension_is_refused(data):
    with pytest.raises(FdpError, match="same leading sample dimension"):
        batch_size_of(data)


def test_the_batch_size_is_the_leading_size():
    assert batch_size_of({"x": torch.zeros(3, 2), "y": [torch.zeros(3)]}) == 3


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
