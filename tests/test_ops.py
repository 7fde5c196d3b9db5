from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from fdp import cpu_operations, ops
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.rules import Dense, Rule
from fdp.gradients.taps import Tape, Watched
from fdp.gradients.vjp import vjp
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
    by_func, pull, _ = vjp(lambda q: (ops.attention(q, k.detach(), v.detach()), ()), q.detach())
    assert torch.equal(by_func, y)
    assert torch.equal(pull(slope)[0], mine[0])


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
def test_gelu_that_is_differentiated_once_is_torchs_and_so_is_its_slope(at_once, monkeypatch):
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


def test_a_rule_of_your_own_is_used_like_the_others():
    rule = Rule("diagonal", lambda x, w: x * w, lambda x, g, shape: Dense((x * g).flatten(1, -2).sum(1)))
    params = {"w": randn(4)}
    model = from_loss(lambda p, d: ops.use(rule, d["x"], p["w"]).square().sum((1, 2)), params)
    plan = make_plan(model, params, {"x": x}, method=Method.AUTO, dtype=torch.float64)
    _, norms, _ = per_sample_norms(model, params, {"x": x}, plan=plan)
    expected = (2 * x.square() * params["w"]).sum(1).square().sum(1)
    torch.testing.assert_close(norms.squared["w"], expected, rtol=1e-12, atol=0)


def test_a_plain_and_a_private_step_compute_attention_in_the_same_way(monkeypatch):
    """One differentiates by torch.func, the other by autograd; neither may have the slower way to itself."""
    q, k, v = (torch.randn(2, 2, 160, 4) for _ in range(3))
    real, calls = F.scaled_dot_product_attention, []

    def counted(*args, **options):
        calls.append(args[0].shape[2])
        return real(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    q.requires_grad_()
    (by_autograd,) = torch.autograd.grad(ops.attention(q, k, v).sum(), q)
    assert calls == [64, 64, 32]
    calls.clear()
    by_func = torch.func.grad(lambda q: ops.attention(q, k, v).sum())(q.detach())
    assert calls == [64, 64, 32]
    torch.testing.assert_close(by_func, by_autograd)
    calls.clear()
    with sdpa_kernel(SDPBackend.MATH):
        torch.func.vmap(lambda q: ops.attention(q[None], k[:1], v[:1])[0])(q.detach())
    assert calls == [160], "vectorised over samples, it stays one operation"


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
