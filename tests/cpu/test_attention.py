from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from fdp import ops
from fdp.cpu import attention
from fdp.cpu.promise import differentiated_once
from fdp.gradients.vjp import vjp
from fdp.types import FdpError
from tests.conftest import randn
from tests.cpu.functions import NoGradient, count_calls


@pytest.mark.parametrize("on_arm", [True, False], ids=["ARM", "x86"])
@pytest.mark.parametrize("tokens", [65, 128, 129, 192, 260])
def test_causal_attention_of_some_queries_at_a_time_is_that_of_all(tokens, on_arm, monkeypatch):
    monkeypatch.setattr(attention, "ON_ARM", on_arm)
    monkeypatch.setattr(attention, "MAX_TOKENS_AT_ONCE", 64 if on_arm else 128)
    q, k, v = (randn(2, heads, tokens, 8, seed=i).requires_grad_() for i, heads in enumerate((4, 2, 2)))
    K, V = (z.repeat_interleave(2, 1) for z in (k, v))
    expected, found = F.scaled_dot_product_attention(q, K, V, is_causal=True), ops.attention(q, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slope = randn(2, 4, tokens, 8, seed=9)
    for mine, theirs in zip(*(torch.autograd.grad(out, (q, k, v), slope) for out in (found, expected))):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    if tokens > attention.MAX_TOKENS_AT_ONCE:
        first, later = attention.queries_at_once(tokens), v.detach().clone()
        later[:, :, first:] = torch.nan  # what comes later is not read
        assert torch.equal(ops.attention(q, k, later)[:, :, :first], found[:, :, :first])


def attention_once(q, k, v):
    with differentiated_once():
        return ops.attention(q, k, v)


@pytest.mark.parametrize("on_arm", [True, False], ids=["ARM", "x86"])
@pytest.mark.parametrize(("tokens", "dtype"), [(129, torch.float32), (192, torch.float32), (260, torch.float64)])
def test_attention_that_is_differentiated_once_is_what_autograd_makes_of_it(tokens, dtype, on_arm, monkeypatch):
    monkeypatch.setattr(attention, "ON_ARM", on_arm)
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
    calls = count_calls(attention._CausalAttention, "backward", monkeypatch)
    by_func, pull, _ = vjp(lambda q, k, v: (ops.attention(q, k, v), ()), q.detach(), k.detach(), v.detach())
    assert torch.equal(by_func, y)
    for one, other in zip(pull(slope), mine):
        assert torch.equal(one, other)
    assert len(calls) == 1


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
    real, masks = attention._hidden, []

    def counted(*args):
        assert sum(mask() is not None for mask in masks) <= 1
        mask = real(*args)
        masks.append(weakref.ref(mask))
        return mask

    monkeypatch.setattr(attention, "_hidden", counted)
    q = torch.randn(1, 2, 600, 4, requires_grad=True)
    with torch.no_grad():
        ops.attention(q, q, q)
    attention_once(q, q, q).sum().backward()
    assert len(masks) == 3 * len(attention._queries(600))
    assert len(masks) >= 15


def test_where_no_gradient_comes_back_there_is_none():
    q = torch.randn(1, 2, 160, 4, requires_grad=True)
    y = attention_once(q, q, q)
    assert torch.autograd.grad(NoGradient.apply(y).sum(), q, allow_unused=True) == (None,)


def test_under_autocast_attention_is_torchs():
    q = torch.randn(1, 2, 160, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = attention_once(q, q, q)
        assert y.dtype == torch.bfloat16
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


def test_attention_under_another_default_device_or_mode_leaves_nothing_behind():
    q = randn(1, 2, 300, 8)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with torch.device("meta"):
        torch.testing.assert_close(ops.attention(q, q, q), expected, rtol=1e-12, atol=1e-12)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(vjp(lambda q: (ops.attention(q, q, q), ()), torch.empty(1, 2, 300, 8))[0], FakeTensor)
    torch.testing.assert_close(ops.attention(q, q, q), expected, rtol=1e-12, atol=1e-12)


def test_a_plain_and_a_private_step_compute_attention_in_the_same_way(monkeypatch):
    """One differentiates by torch.func, the other by autograd; neither may have the slower way to itself."""
    q, k, v = (torch.randn(2, 2, 160, 4) for _ in range(3))
    parts = [rows.stop - rows.start for rows in attention._queries(160)]
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
