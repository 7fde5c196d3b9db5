from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fdp_kernels import cpu_library
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from fdp import ops
from fdp.cpu import layer_norm as layer_norm_file
from fdp.cpu.layer_norm import layer_norm, pull_back_reference
from fdp.cpu.promise import differentiated_once
from fdp.gradients.tape import Tape, Watched
from fdp.gradients.vjp import vjp
from fdp.types import FdpError
from tests.cpu.functions import NoGradient

compiled = pytest.mark.skipif(cpu_library.library() is None, reason="no C compiler")
EPS = 1e-5


def once(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with differentiated_once():
        return layer_norm(x, weight, bias, eps=EPS)


def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * weight + bias


def values(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return an input, scales and biases of each sample's own, and a gradient of the output."""
    draw = torch.Generator().manual_seed(seed)
    own = (shape[0], *[1] * (len(shape) - 2), shape[-1])
    x, weight, bias, g = (torch.randn(some, generator=draw) for some in (shape, own, own, shape))
    return (3 * x + 1).requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), g


def takes_loop(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_LayerNormBackward"


SHAPES = [(3, 70, 33), (2, 32, 16), (1, 2, 17), (2, 3, 4, 40), (2, 129, 16), (0, 5, 16)]
OTHERS = [(3, 0, 16), (1, 1, 17), (3, 50), (2, 70, 15)]
"""No token, a single one, and short rows: torch's operations."""


@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS])
def test_output_and_gradients_are_those_in_float64(shape, cpu_loops):
    *given, g = values(*shape)
    wide = [z.detach().double().requires_grad_() for z in given]
    y, expected = once(*given), torchs(*wide)
    assert takes_loop(y) == (cpu_loops and shape in SHAPES)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=5e-6)
    theirs = torch.autograd.grad(expected, wide, g.double())
    for _ in range(2):  # a pull-back may be used again
        mine = torch.autograd.grad(y, given, g, retain_graph=True)
        for one, other, like in zip(mine, theirs, given):
            assert one.shape == like.shape
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES[:-2])
def test_the_way_back_is_the_one_of_the_equations(shape):
    *given, g = values(*shape)
    x, weight, _ = (z.detach().double() for z in given)
    moments = torch.stack([x.mean(-1), (x.var(-1, correction=0) + EPS).rsqrt()], -1)
    wide = [z.detach().double().requires_grad_() for z in given]
    expected = torch.autograd.grad(torchs(*wide), wide, g.double())
    for one, other in zip(pull_back_reference(g.double(), x, weight, moments), expected):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_values_are_the_same_with_and_without_gradients_and_by_torch_func(cpu_loops):
    *given, g = values(3, 70, 33)
    y = once(*given)
    mine = torch.autograd.grad(y, given, g)
    with torch.no_grad():
        assert torch.equal(once(*given), y)
    out, pull, _ = vjp(lambda *given: (layer_norm(*given, eps=EPS), ()), *[z.detach() for z in given])
    assert torch.equal(out, y)
    assert all(map(torch.equal, pull(g), mine))
    for one, other in zip(torch.func.vmap(pull)(torch.stack([g, -2 * g])), mine):  # many gradients at once
        torch.testing.assert_close(one[1], -2 * other, rtol=1e-5, atol=2e-5)


@compiled
def test_rows_far_from_zero_lose_little():
    """A mean that is off by its own rounding is not small beside a small deviation."""
    x = torch.full((1, 2, 3000), 1e4 / 3)
    x[0, 1] += torch.linspace(-1, 1, 3000)
    own = torch.ones(1, 1, 3000).requires_grad_()
    y = once(x.requires_grad_(), own, own)
    assert takes_loop(y)
    torch.testing.assert_close(y.double(), torchs(x.double(), own.double(), own.double()), rtol=1e-3, atol=2e-3)


def test_many_gradients_at_once_take_the_equations(cpu_loops):
    *given, g = values(3, 8, 16)
    y, many = once(*given), torch.stack([g, -2 * g])
    found = torch.autograd.grad(y, given, many, retain_graph=True, is_grads_batched=True)
    for one, other in zip(found, torch.autograd.grad(y, given, g)):
        torch.testing.assert_close(one[1], -2 * other, rtol=1e-5, atol=2e-5)


def test_a_sample_is_computed_alike_in_any_batch_and_at_any_place():
    *given, g = values(5, 70, 33)
    y = once(*given)
    whole = torch.autograd.grad(y, given, g)
    for some in (slice(0, 1), slice(1, 3), slice(4, 5)):
        alone = [z.detach()[some].clone().requires_grad_() for z in given]
        part = once(*alone)
        assert torch.equal(part, y[some])
        for one, all_of_them in zip(torch.autograd.grad(part, alone, g[some]), whole):
            assert torch.equal(one, all_of_them[some])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_does_not_spoil_others(bad, cpu_loops):
    *given, g = values(3, 70, 33)
    expected = torch.autograd.grad(once(*given), given, g)
    for where in (given[0].data, g):
        kept, where[1, 40, 7] = where[1, 40, 7].clone(), bad
        found = torch.autograd.grad(once(*given), given, g)
        assert not found[0][1].isfinite().all()
        for one, other in zip(found, expected):
            assert torch.equal(one[::2], other[::2])
        where[1, 40, 7] = kept


@compiled
def test_a_sum_over_many_tokens_is_not_far_off():
    """Terms of one sign, of which a running sum in float32 would lose more and more."""
    x, weight, bias, _ = values(1, 8192, 16)
    g = torch.full_like(x, 0.1)
    of_bias = torch.autograd.grad(once(x, weight, bias), bias, g)[0]
    exact = g.double().sum((0, 1))
    assert ((of_bias.double() - exact).abs() <= 5e-6 * exact).all()
    running = torch.zeros(())
    for _ in range(8192):
        running += 0.1
    assert abs(float(running) - float(exact[0])) > 2e-5 * float(exact[0]), "else this test would notice nothing"


@compiled
@pytest.mark.parametrize("case", ["strided", "negative", "another default dtype"])
def test_tensors_that_lie_otherwise_in_memory_give_the_same(case):
    *given, g = values(3, 8, 16)
    y, expected = once(*given), torch.autograd.grad(once(*given), given, g)
    default = torch.get_default_dtype()
    if case == "another default dtype":
        torch.set_default_dtype(torch.float64)
    try:
        lie = torch._neg_view if case == "negative" else lambda z: z.transpose(1, 2).contiguous().transpose(1, 2)
        sign = -1 if case == "negative" else 1
        others = [lie(sign * z.detach()).requires_grad_() for z in given]
        again = once(*others)
        assert takes_loop(again)
        assert torch.equal(again, y)
        assert all(map(torch.equal, torch.autograd.grad(again, others, lie(sign * g)), expected))
    finally:
        torch.set_default_dtype(default)


@compiled
def test_where_samples_share_scales_or_nothing_is_promised_it_is_torchs():
    x, weight, bias, _ = values(3, 8, 16)
    expected = torchs(x, weight, bias)
    for y, to in (
        (layer_norm(x, weight, bias, eps=EPS), expected),
        (once(x.double(), weight.double(), bias.double()), expected.double()),
        (once(x, weight[0, 0], bias[0, 0]), torchs(x, weight[0, 0], bias[0, 0])),
        (once(x, weight, bias[0]), torchs(x, weight, bias[0])),
        (once(x, weight.expand(3, 8, 16), bias.expand(3, 8, 16)), expected),
    ):
        assert not takes_loop(y)
        torch.testing.assert_close(y, to, rtol=1e-5, atol=2e-6)
    assert takes_loop(once(x, weight, bias))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not takes_loop(once(x, weight, bias))
    with torch.device("meta"):  # a default for new tensors, which says nothing of x
        torch.testing.assert_close(once(x, weight, bias), expected, rtol=1e-5, atol=2e-6)
    with FakeTensorMode() as mode:
        assert isinstance(once(*(mode.from_tensor(z) for z in (x, weight, bias))), FakeTensor)


def test_it_can_be_vectorised_compiled_traced_and_differentiated_twice_or_forwards():
    *given, g = (z.detach() for z in values(3, 8, 16))
    expected = torchs(*given)
    with differentiated_once():
        alone = torch.func.vmap(lambda x, w, b: layer_norm(x[None], w[None], b[None], eps=EPS)[0])
        torch.testing.assert_close(alone(*given), expected)
        slope = torch.func.grad(lambda x: (layer_norm(x, given[1], given[2], eps=EPS) * g).sum())
        theirs = torch.func.grad(lambda x: (torchs(x, *given[1:]) * g).sum())
        twice = torch.func.grad(lambda x: slope(x).square().sum())(given[0])
        by_torch = torch.func.grad(lambda x: theirs(x).square().sum())(given[0])
        torch.testing.assert_close(twice, by_torch, rtol=1e-4, atol=1e-5)
    fast = torch.compile(lambda x, w, b: layer_norm(x, w, b, eps=EPS), backend="eager", fullgraph=True)
    torch.testing.assert_close(fast(*given), expected)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(given[0], g)
        rise, by_torch = (forward_ad.unpack_dual(norm(dual, *given[1:])).tangent for norm in (once, torchs))
    torch.testing.assert_close(rise, by_torch)


@compiled
def test_what_was_promised_to_be_differentiated_once_is_not_differentiated_twice():
    x, weight, bias, _ = values(3, 8, 16)
    with pytest.raises(FdpError, match="layer_norm: expected to be differentiated once"):
        torch.autograd.grad(once(x, weight, bias).sum(), x, create_graph=True)


def test_where_no_gradient_comes_back_there_is_none():
    x, weight, bias, _ = values(3, 8, 16)
    found = torch.autograd.grad(NoGradient.apply(once(x, weight, bias)).sum(), (x, weight, bias), allow_unused=True)
    assert found == (None, None, None)


@compiled
def test_the_layer_norm_of_a_model_takes_the_loop_where_its_parameters_are_watched(monkeypatch):
    calls = []
    real = layer_norm_file._forward
    monkeypatch.setattr(layer_norm_file, "_forward", lambda *args: calls.append(1) or real(*args))
    x, weight, bias, _ = (z.detach() for z in values(3, 8, 16))
    tape = Tape(3, {"w": weight[:, 0].clone(), "b": bias[:, 0].clone()})
    with differentiated_once():
        y = ops.layer_norm(x, Watched(weight[0, 0], "w", tape), Watched(bias[0, 0], "b", tape))
    assert calls
    torch.testing.assert_close(y, torchs(x, weight, bias), rtol=1e-5, atol=2e-6)
