from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from fdp import ops
from fdp.cpu import gelu as gelu_file
from fdp.cpu.promise import differentiated_once
from fdp.gradients.vjp import vjp
from fdp.types import FdpError
from tests.cpu.functions import NoGradient


def gelu_in_float64(x):
    """Return GELU and its slope, in float64; inputs beyond 100 have the slope of 100."""
    wide = x.detach().double().requires_grad_()
    y = F.gelu(wide, approximate="tanh")
    near = wide.detach().clamp(-100, 100).requires_grad_()
    return y.detach(), torch.autograd.grad(F.gelu(near, approximate="tanh").sum(), near)[0]


def once(x):
    with differentiated_once():
        return ops.gelu(x)


@pytest.mark.parametrize("at_once", [1 << 20, 1000])
def test_gelu_that_is_differentiated_once_is_torchs_and_so_is_its_slope(at_once, cpu_loops, monkeypatch):
    monkeypatch.setattr(gelu_file, "ON_ARM", True)  # takes gelu_and_slope without the compiled loops as well
    monkeypatch.setattr(gelu_file, "ELEMENTS_AT_ONCE", at_once)
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.tensor([-1e30, -40.0, 40.0, 3e13, 1e30])]).requires_grad_()
    values, slopes = gelu_in_float64(x)
    y = once(x)
    assert type(y.grad_fn).__name__ == "_GeluBackward"  # not torch's own
    torch.testing.assert_close(y.detach().double(), values, rtol=1e-6, atol=1e-6)
    for _ in range(2):  # a pull-back may be used again
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        torch.testing.assert_close(slope.double(), slopes, rtol=0, atol=3e-6)
    out, pull, _ = vjp(lambda z: (ops.gelu(z), ()), x.detach())
    assert torch.equal(out, y.detach())
    assert torch.equal(pull(torch.ones_like(out))[0], slope)


def test_gelu_of_a_frozen_branch_inside_a_block(cpu_loops):
    def block(x):
        with torch.no_grad():
            frozen = ops.gelu(x)
        return ops.gelu(x) + frozen, ()

    x = torch.randn(40)
    y, pull, _ = vjp(block, x)
    torch.testing.assert_close(y, 2 * F.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pull(torch.ones(40))[0].double(), gelu_in_float64(x)[1], rtol=0, atol=3e-6)


def test_gelu_is_torchs_in_a_trace_and_in_forward_mode():
    x, direction = torch.randn(40), torch.randn(40)
    traced: Any = torch.jit.trace(once, x)
    torch.testing.assert_close(traced(x), F.gelu(x, approximate="tanh"))
    with torch.no_grad(), forward_ad.dual_level():
        rise = forward_ad.unpack_dual(once(forward_ad.make_dual(x, direction))).tangent
    assert rise is not None
    torch.testing.assert_close(rise.double(), gelu_in_float64(x)[1] * direction, rtol=0, atol=1e-5)


def test_gelu_is_torchs_where_nothing_is_faster(monkeypatch):
    monkeypatch.setattr(gelu_file, "ON_ARM", False)
    monkeypatch.setattr(gelu_file.cpu_library, "library", lambda: None)
    assert type(once(torch.ones(3, requires_grad=True)).grad_fn).__name__ == "GeluBackward0"


def test_gelu_without_the_promise_and_in_other_dtypes_is_torchs():
    x = torch.linspace(-3, 3, 12, requires_grad=True)
    for y, z in ((ops.gelu(x), x), (once(x.double()), x.double())):
        assert type(y.grad_fn).__name__ == "GeluBackward0"
        assert torch.equal(y, F.gelu(z, approximate="tanh"))
    with torch.device("meta"):  # a default for new tensors, which says nothing of x
        torch.testing.assert_close(once(x), F.gelu(x, approximate="tanh"))
    with torch.no_grad():
        values = once(x)
    assert torch.equal(values, once(x).detach())  # a forward without gradients gives the values of one with them
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert isinstance(once(fake), FakeTensor)
    assert isinstance(vjp(lambda z: (ops.gelu(z), ()), fake)[0], FakeTensor)


def test_gelu_can_be_vectorised_compiled_and_differentiated_in_a_derivative():
    x = torch.linspace(-3, 3, 12).view(3, 4)
    slope = torch.func.grad(lambda z: ops.gelu(z).sum())
    expected = torch.func.grad(lambda z: F.gelu(z, approximate="tanh").sum())
    twice = torch.func.grad(lambda z: expected(z).sum())(x)
    with differentiated_once():  # the inner derivative is differentiated by the outer one
        torch.testing.assert_close(torch.func.grad(lambda z: slope(z).sum())(x), twice, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.func.vmap(slope)(x), expected(x), rtol=0, atol=3e-6)
        z = x.clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(slope(z).sum(), z)[0], twice, rtol=0, atol=1e-5)
    promised = torch.func.grad(lambda z: torch.func.grad(lambda z: once(z).sum())(z).sum())  # a promise inside of two
    torch.testing.assert_close(promised(x), twice, rtol=0, atol=1e-5)
    compiled = torch.compile(ops.gelu, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), F.gelu(x, approximate="tanh"))


def test_gelu_that_was_promised_to_be_differentiated_once_is_not_differentiated_twice():
    x = torch.linspace(-3, 3, 12, requires_grad=True)
    with pytest.raises(FdpError, match="expected to be differentiated once"):
        torch.autograd.grad(once(x).sum(), x, create_graph=True)
    assert torch.equal(ops.gelu(x), F.gelu(x, approximate="tanh"))  # the promise has ended


@pytest.mark.parametrize("gelu", [ops.gelu, once])
def test_a_sample_with_a_nan_has_a_gradient_of_nan_and_others_do_not(gelu):
    x = torch.tensor([[1.0, torch.nan], [1.0, 2.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(gelu(x).sum(), x)
    assert slope.isnan().tolist() == [[False, True], [False, False]]


def test_where_no_gradient_comes_back_there_is_none():
    x = torch.randn(3, requires_grad=True)
    assert torch.autograd.grad(NoGradient.apply(once(x)).sum(), x, allow_unused=True) == (None,)
