from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from fdp import cpu_operations, ops
from fdp.gradients.vjp import vjp
from fdp.types import FdpError
from tests.conftest import randn


@pytest.mark.parametrize("on_arm", [True, False], ids=["ARM", "x86"])
@pytest.mark.parametrize("tokens", [65, 128, 129, 192, 260])
def test_causal_attention_of_some_queries_at_a_time_is_that_of_all(tokens, on_arm, monkeypatch):
    monkeypatch.setattr(cpu_operations, "ON_ARM", on_arm)
    monkeypatch.setattr(cpu_operations, "MAX_TOKENS_AT_ONCE", 64 if on_arm else 128)
    q, k, v = (randn(2, heads, tokens, 8, seed=i).requires_grad_() for i, heads in enumerate((4, 2, 2)))
    K, V = (z.repeat_interleave(2, 1) for z in (k, v))
    expected, found = F.scaled_dot_product_attention(q, K, V, is_causal=True), ops.attention(q, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slope = randn(2, 4, tokens, 8, seed=9)
    for mine, theirs in zip(*(torch.autograd.grad(out, (q, k, v), slope) for out in (found, expected))):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    if tokens > cpu_operations.MAX_TOKENS_AT_ONCE:
        first, later = cpu_operations.queries_at_once(tokens), v.detach().clone()
        later[:, :, first:] = torch.nan  # what comes later is not read
        assert torch.equal(ops.attention(q, k, later)[:, :, :first], found[:, :, :first])


def attention_once(q, k, v):
    with cpu_operations.differentiated_once():
        return ops.attention(q, k, v)


@pytest.mark.parametrize("on_arm", [True, False], ids=["ARM", "x86"])
@pytest.mark.parametrize(("tokens", "dtype"), [(129, torch.float32), (192, torch.float32), (260, torch.float64)])
def test_attention_that_is_differentiated_once_is_what_autograd_makes_of_it(tokens, dtype, on_arm, monkeypatch):
    monkeypatch.setattr(cpu_operations, "ON_ARM", on_arm)
    q, k, v = (randn(2, tokens, 4, 8, seed=i).to(dtype).transpose(1, 2).requires_grad_() for i in range(3))
    y, expected = attention_once(q, k, v), ops.attention(q, k, v)
    assert type(y.grad_fn).__name__ == "_CausalAttentionBackward"
    assert type(expected.grad_fn).__name__ == "CatBackward0"
    assert torch.equal(y, expected)
    slope = randn(2, 4, tokens, 8, seed=9).to(dtype)
    theirs = torch.autograd.grad(expected, (q, k, v), slope)
    for _ in range(2):  # a pull-back may be used again
        mine = torch.autograd.grad(y, (q, k, v), slope, retain_graph=True)
        for name, one, other in zip("qkv", mine, theirs):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=name)
        assert torch.equal(mine[0], theirs[0])  # those of k and v are sums, in any order
    calls = count_calls(cpu_operations._CausalAttention, "backward", monkeypatch)
    by_func, pull, _ = vjp(lambda q, k, v: (ops.attention(q, k, v), ()), q.detach(), k.detach(), v.detach())
    assert torch.equal(by_func, y)
    for one, other in zip(pull(slope), mine):
        assert torch.equal(one, other)
    assert len(calls) == 1


def count_calls(owner, name, monkeypatch):
    real, calls = getattr(owner, name), []

    def counted(*args):
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(owner, name, staticmethod(counted))
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("batch", [2, 0])
@pytest.mark.parametrize("alike", [True, False], ids=["one tensor for all", "grouped queries"])
def test_attention_that_is_differentiated_once_of_other_kinds(alike, batch, dtype):
    q = randn(batch, 4, 160, 8).to(dtype).requires_grad_()
    k = q if alike else randn(batch, 2, 160, 8, seed=1).to(dtype).requires_grad_()
    y, expected = attention_once(q, k, k), ops.attention(q, k, k)
    if batch:
        assert type(y.grad_fn).__name__ == "_CausalAttentionBackward"
    assert torch.equal(y, expected)
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 0.05}[dtype]
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), (q, k)) for out in (y, expected))):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_attention_holds_one_mask_at_a_time(monkeypatch):
    real, masks = cpu_operations._hidden, []

    def counted(*args):
        assert sum(mask() is not None for mask in masks) <= 1
        mask = real(*args)
        masks.append(weakref.ref(mask))
        return mask

    monkeypatch.setattr(cpu_operations, "_hidden", counted)
    q = torch.randn(1, 2, 600, 4, requires_grad=True)
    with torch.no_grad():
        ops.attention(q, q, q)
    attention_once(q, q, q).sum().backward()
    assert len(masks) == 3 * len(cpu_operations._queries(600))
    assert len(masks) >= 15


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore
        return None


def test_where_no_gradient_comes_back_there_is_none():
    q = torch.randn(1, 2, 160, 4, requires_grad=True)
    for y in (attention_once(q, q, q), once(q)):
        assert torch.autograd.grad(NoGradient.apply(y).sum(), q, allow_unused=True) == (None,)


def test_under_autocast_attention_and_sums_are_torchs(monkeypatch):
    monkeypatch.setattr(cpu_operations, "ON_ARM", True)
    q, x = torch.randn(1, 2, 160, 8, requires_grad=True), torch.randn(2, 200, 300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = attention_once(q, q, q)
        assert y.dtype == torch.bfloat16
        assert torch.equal(cpu_operations.sum_over_tokens(x, (1,)), x.sum(1))
    torch.testing.assert_close(y.float(), attention_once(q, q, q), rtol=0.02, atol=0.02)


def test_attention_without_torchs_flash_kernel_is_left_to_autograd():
    q = torch.randn(1, 2, 160, 4, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        y = attention_once(q, q, q)
        assert type(y.grad_fn).__name__ == "CatBackward0"
        torch.testing.assert_close(y, F.scaled_dot_product_attention(q, q, q, is_causal=True))
    spread = torch.randn(1, 2, 160, 8, requires_grad=True)[..., ::2]  # features that do not lie side by side
    assert type(attention_once(spread, spread, spread).grad_fn).__name__ == "CatBackward0"


def test_attention_that_was_promised_to_be_differentiated_once_is_not_differentiated_twice():
    q = torch.randn(1, 2, 160, 4, requires_grad=True)
    with pytest.raises(FdpError, match="attention: expected to be differentiated once"):
        torch.autograd.grad(attention_once(q, q, q).sum(), q, create_graph=True)


def test_a_sample_with_a_nan_does_not_spoil_the_attention_of_others():
    q = torch.randn(2, 2, 160, 4)
    q[0, 0, 7, 1] = torch.nan
    q.requires_grad_()
    (slope,) = torch.autograd.grad(attention_once(q, q, q).sum(), q)
    assert slope[0].isnan().any()
    assert not slope[1].isnan().any()


@pytest.mark.parametrize("on_arm", [True, False], ids=["ARM", "x86"])
@pytest.mark.parametrize("shape", [(3, 130, 300), (3, 130, 8), (1, 1, 256), (3, 0, 300), (0, 5, 300), (2, 4, 5, 300)])
def test_a_sum_over_tokens_is_torchs_up_to_rounding_and_no_sample_touches_another(shape, on_arm, monkeypatch):
    monkeypatch.setattr(cpu_operations, "ON_ARM", on_arm)
    x, dims = randn(*shape).float(), tuple(range(1, len(shape) - 1))
    total = cpu_operations.sum_over_tokens(x, dims)
    torch.testing.assert_close(total.double(), x.double().sum(dims), rtol=1e-5, atol=1e-4)
    if x.numel():
        x[0, 0, ..., 0] = torch.nan
        spoilt = cpu_operations.sum_over_tokens(x, dims)
        assert spoilt[0, 0].isnan()
        assert torch.equal(spoilt[1:], total[1:])
        assert torch.equal(cpu_operations.sum_over_tokens(x[-1:], dims), spoilt[-1:]) or len(x) == 1
    assert cpu_operations.sum_over_tokens(x.double(), dims).dtype == torch.float64


def test_a_sum_over_one_of_two_dimensions_of_tokens_is_torchs(monkeypatch):
    monkeypatch.setattr(cpu_operations, "ON_ARM", True)
    x = randn(2, 3, 4, 300).float()
    assert torch.equal(cpu_operations.sum_over_tokens(x, (1,)), x.sum(1))  # a bias for every token


def test_a_sum_over_tokens_can_be_compiled():
    x = randn(3, 130, 300).float()
    compiled = torch.compile(cpu_operations.sum_over_tokens, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, (1,)), x.sum(1))


def gelu_in_float64(x):
    """Return GELU and its slope, in float64; inputs beyond 100 have the slope of 100."""
    wide = x.detach().double().requires_grad_()
    y = F.gelu(wide, approximate="tanh")
    near = wide.detach().clamp(-100, 100).requires_grad_()
    return y.detach(), torch.autograd.grad(F.gelu(near, approximate="tanh").sum(), near)[0]


def once(x):
    with cpu_operations.differentiated_once():
        return ops.gelu(x)


def test_attention_under_another_default_device_or_mode_leaves_nothing_behind():
    q = randn(1, 2, 300, 8)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with torch.device("meta"):
        torch.testing.assert_close(ops.attention(q, q, q), expected, rtol=1e-12, atol=1e-12)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(vjp(lambda q: (ops.attention(q, q, q), ()), torch.empty(1, 2, 300, 8))[0], FakeTensor)
    torch.testing.assert_close(ops.attention(q, q, q), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("at_once", [1 << 20, 1000])
def test_gelu_that_is_differentiated_once_is_torchs_and_so_is_its_slope(at_once, cpu_loops, monkeypatch):
    monkeypatch.setattr(cpu_operations, "ON_ARM", True)  # takes gelu_and_slope without the compiled loops as well
    monkeypatch.setattr(cpu_operations, "ELEMENTS_AT_ONCE", at_once)
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
    monkeypatch.setattr(cpu_operations, "ON_ARM", False)
    monkeypatch.setattr(cpu_operations.cpu_library, "library", lambda: None)
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
    with cpu_operations.differentiated_once():  # the inner derivative is differentiated by the outer one
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


def test_a_plain_and_a_private_step_compute_attention_in_the_same_way(monkeypatch):
    """One differentiates by torch.func, the other by autograd; neither may have the slower way to itself."""
    q, k, v = (torch.randn(2, 2, 160, 4) for _ in range(3))
    parts = [rows.stop - rows.start for rows in cpu_operations._queries(160)]
    assert len(parts) > 1
    real, calls = F.scaled_dot_product_attention, []

    def counted(*args, **options):
        calls.append(args[0].shape[2])
        return real(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    q.requires_grad_()
    (by_autograd,) = torch.autograd.grad(ops.attention(q, k, v).sum(), q)
    assert calls == parts
    calls.clear()
    by_func = torch.func.grad(lambda q: ops.attention(q, k, v).sum())(q.detach())
    assert calls == parts
    torch.testing.assert_close(by_func, by_autograd)
    calls.clear()
    with sdpa_kernel(SDPBackend.MATH):
        torch.func.vmap(lambda q: ops.attention(q[None], k[:1], v[:1])[0])(q.detach())
    assert calls == [160], "vectorised over samples, it stays one operation"
