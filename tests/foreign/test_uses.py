"""Every way in which a module may use a parameter: recorded exactly, or refused with path, shapes and remedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp import keys, ops
from fdp.fast.compiled import CompiledRunner
from fdp.foreign.uses import dropout
from fdp.foreign.uses.custom_rules import operation, rule
from fdp.foreign.uses.dispatch import RULES
from fdp.foreign.uses.einsum import EINSUM, parse
from fdp.foreign.uses.function_table import FUNCTION_KINDS, HANDLERS, FunctionKind
from fdp.foreign.uses.products import LINEAR_ROWS
from fdp.gradients.costs import sizes
from fdp.gradients.execution import Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.rules import Dense, Pair, Rule, check_rule, per_sample_gradient, rows
from fdp.gradients.tape import Use
from fdp.gradients.taps import tapped_vjp, trace
from fdp.model import Block
from fdp.types import FdpError
from tests.foreign_cases import Foreign, Probe, assert_exact, ids, probe, randn

EAGER = partial(CompiledRunner, backend="aot_eager")
X = {"x": randn(3, 6, 4)}
IMAGE = {"x": randn(3, 4, 5, 6)}
IDS = {"ids": ids(3, 6, below=7)}
LATER = {"options": {"batch_first": False, "call": lambda module, data: module(data["x"].transpose(0, 1))}}
"""Tokens in dim 0."""


def over_tokens(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Apply ``run`` to (batch * tokens, features)."""

    def flattened(m: Probe, x: Tensor) -> Tensor:
        return run(m, x.reshape(-1, x.shape[-1])).reshape(*x.shape[:2], -1)

    return flattened


def last_first(m: Probe, x: Tensor) -> Tensor:
    """Tokens first, flattened: (tokens * batch, features)."""
    y = F.linear(x.reshape(-1, 4), m.w, m.b).tanh() * m.g
    return F.layer_norm(y.reshape(6, -1, 4), (4,), m.g, m.b).transpose(0, 1)


def relative(m: Probe, x: Tensor) -> Tensor:
    """Compute attention with a learned bias by distance, as in T5: parameters without samples all the way to the
    scores.
    """
    place = torch.arange(x.shape[1])
    bias = F.embedding((place[:, None] - place[None]).abs(), m.table).permute(2, 0, 1).unsqueeze(0)
    q = x.unsqueeze(1).expand(-1, 2, -1, -1)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias) * bias.exp().sum(-1, keepdim=True)


def standardised(m: Probe, x: Tensor) -> Tensor:
    w = m.w - m.w.mean((1, 2, 3), keepdim=True)
    return F.conv2d(x, w / (w.std((1, 2, 3), keepdim=True) + 1e-5), m.b, padding=1)


def in_place(m: Probe, x: Tensor) -> Tensor:
    y = x * 1.0
    y += m.b
    y.mul_(m.g)
    return y.tanh()


def spread(m: Probe, x: Tensor) -> Tensor:
    token = m.t.expand(len(x), -1, -1)
    more = m.g.repeat(len(x), 2, 1)
    return torch.cat([token, x, more, m.b.expand_as(x)], 1).sin()


def derived(m: Probe, x: Tensor) -> Tensor:
    y = x * (1.0 + m.g.float().double()) + m.b.to(torch.float64).unsqueeze(0)
    y = y / m.s.exp() - 2.0 * m.g[:4].view(1, 4)
    y = (2.0 - m.b) * y + (1.0 / m.g.square().add(1.0)) ** 2
    return torch.where(y > 0, y, m.b.tanh() * y)


def norms(m: Probe, x: Tensor) -> Tensor:
    y = F.layer_norm(x, (4,), m.g, m.b, 1e-3) + F.layer_norm(x, (4,), None, None)
    y = F.rms_norm(y, (4,), m.g) + F.layer_norm(y, (6, 4), m.t)
    return F.group_norm(y.transpose(1, 2), 2, m.g, m.b) + F.instance_norm(x.transpose(1, 2), weight=m.g, bias=m.b)


def positions(m: Probe, ids: Tensor) -> Tensor:
    """Use six positions for three samples: as many as if they were flattened samples."""
    place = torch.arange(ids.shape[1])
    h = F.embedding(ids, m.w) + F.embedding(place, m.p) + F.embedding(place.unsqueeze(0), m.p).tanh()
    return F.linear(F.layer_norm(h, (4,), m.g), m.w) + m.w[ids].sum(-1, keepdim=True)


PROBES: dict[str, Callable[[], Foreign]] = {
    "linear": lambda: probe(lambda m, x: F.linear(x, m.w, m.b).tanh(), X, w=(5, 4), b=(5,)),
    "linear twice": lambda: probe(lambda m, x: F.linear(F.linear(x, m.w, m.b).tanh(), m.w, m.b), X, w=(4, 4), b=(4,)),
    "flattened": lambda: probe(over_tokens(lambda m, x: F.linear(x, m.w, m.b).tanh() * m.b), X, w=(5, 4), b=(5,)),
    "tokens first": lambda: probe(last_first, X, w=(4, 4), b=(4,), g=(4,), **LATER),
    "addmm": lambda: probe(over_tokens(lambda m, x: torch.addmm(m.b, x, m.w).tanh()), X, w=(4, 5), b=(5,)),
    "addmm residual": lambda: probe(over_tokens(lambda m, x: torch.addmm(x, x.tanh(), m.w)), X, w=(4, 4)),
    "mm": lambda: probe(over_tokens(lambda m, x: torch.mm(x, m.w).tanh()), X, w=(4, 5)),
    "matmul": lambda: probe(lambda m, x: ((x @ m.w).tanh() @ m.w.t()).tanh() @ m.w.transpose(0, 1).t(), X, w=(4, 5)),
    "vector": lambda: probe(lambda m, x: (x @ m.w).tanh(), X, w=(4,)),
    "from the left": lambda: probe(lambda m, x: (m.w @ x).tanh(), X, w=(5, 6)),
    "turned": lambda: probe(lambda m, x: F.linear(x, m.w.permute(1, 0), m.b).tanh(), X, w=(4, 5), b=(5,)),
    "turned, added": lambda: probe(lambda m, x: (x + m.w.t()) * m.w.t().unsqueeze(0).exp(), X, w=(4, 6)),
    "experts": lambda: probe(
        lambda m, x: torch.bmm(x.reshape(1, -1, 4).expand(2, -1, -1), m.w).tanh().unflatten(1, (-1, 6)).transpose(0, 1),
        X,
        w=(2, 4, 5),
    ),
    "experts of samples": lambda: probe(lambda m, x: (x.unsqueeze(1) @ m.w).tanh(), X, w=(2, 4, 5)),
    "einsum": lambda: probe(lambda m, x: torch.einsum("btd,df->btf", x, m.w).tanh(), X, w=(4, 5)),
    "einsum heads": lambda: probe(lambda m, x: torch.einsum("btd,hdk->bhtk", x, m.w).tanh(), X, w=(2, 4, 5)),
    "einsum turned": lambda: probe(lambda m, x: torch.einsum("dhk,btd->btkh", m.w, x).tanh(), X, w=(4, 2, 5)),
    "einsum groups": lambda: probe(
        lambda m, x: torch.einsum("bthd,hfd->bthf", x.unflatten(2, (2, 2)), m.w).tanh(), X, w=(2, 3, 2)
    ),
    "einsum dots": lambda: probe(lambda m, x: torch.einsum("...d,fd->...f", x, m.w).tanh(), X, w=(5, 4)),
    "einsum flattened": lambda: probe(
        lambda m, x: torch.einsum("nd,edf->enf", x.reshape(-1, 4), m.w).tanh().unflatten(1, (-1, 6)).transpose(0, 1),
        X,
        w=(2, 4, 5),
    ),
    "positions": lambda: probe(positions, IDS, w=(7, 4), p=(9, 4), g=(4,)),
    "padding": lambda: probe(lambda m, ids: F.embedding(ids - 1, m.w, padding_idx=-7).sin(), IDS, w=(7, 4)),
    "norms": lambda: probe(norms, X, g=(4,), b=(4,), t=(6, 4)),
    "batch norm, fixed": lambda: probe(
        lambda m, x: F.batch_norm(x, torch.full((6,), 0.1).double(), torch.ones(6).double(), m.g, m.b).sin(),
        X,
        g=(6,),
        b=(6,),
    ),
    "prelu": lambda: probe(lambda m, x: F.prelu(F.prelu(x, m.a) - 0.3, m.c), X, a=(1,), c=(6,)),
    "conv1d": lambda: probe(lambda m, x: F.conv1d(x, m.w, m.b, stride=2, dilation=2).sin(), X, w=(3, 6, 2), b=(3,)),
    "conv2d": lambda: probe(
        lambda m, x: F.conv2d(x, m.w, m.b, (2, 1), (1, 0), (1, 2), 2).sin(), IMAGE, w=(6, 2, 3, 2), b=(6,)
    ),
    "conv2d same": lambda: probe(lambda m, x: F.conv2d(x, m.w, None, padding="same").sin(), IMAGE, w=(3, 4, 2, 3)),
    "conv3d": lambda: probe(
        lambda m, x: F.conv3d(x, m.w, m.b, (1, 2, 1), (1, 0, 1), (2, 1, 1), 2).sin(),
        {"x": randn(3, 4, 4, 5, 3)},
        w=(2, 2, 2, 3, 2),
        b=(2,),
    ),
    "weights of weights": lambda: probe(
        lambda m, x: F.linear(x, m.w * m.g[:, None] / m.w.norm(dim=1, keepdim=True), m.b * m.b).tanh(),
        X,
        w=(5, 4),
        g=(5,),
        b=(5,),
    ),
    "masked weight": lambda: probe(
        lambda m, x: (x @ (m.w * torch.ones(4, 4, dtype=torch.float64).tril())).tanh(), X, w=(4, 4)
    ),
    "standardised": lambda: probe(standardised, IMAGE, w=(3, 4, 3, 3), b=(3,)),
    "derived": lambda: probe(derived, X, g=(4,), b=(4,), s=()),
    "leading one": lambda: probe(lambda m, x: (x + m.p[:, : x.shape[1]]) * m.s, X, p=(1, 8, 4), s=(1, 1, 1)),
    "spread": lambda: probe(spread, X, t=(1, 1, 4), g=(1, 2, 4), b=(4,)),
    "in place": lambda: probe(in_place, X, b=(4,), g=(6, 4)),
    "sparse": lambda: probe(lambda m, ids: F.embedding(ids, m.w, sparse=True).sin(), IDS, w=(7, 4)),
    "relative": lambda: probe(relative, X, table=(6, 2)),
    "chunks": lambda: probe(
        lambda m, x: torch.cat([x * part for part in torch.stack([m.g, m.b]).flatten().chunk(2)], -1).sin(),
        X,
        g=(4,),
        b=(4,),
    ),
    "detached": lambda: probe(
        lambda m, x: (x * m.g * m.g.detach() * m.w.t().detach().sum()).sin() @ m.w, X, g=(4,), w=(4, 4)
    ),
}
COMPILED = ("positions",)


pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),  # torch's own, on the module by itself
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of vmap, in materialised paths
]


@pytest.mark.parametrize("method", [Method.AUTO, Method.GHOST, Method.FLASH_BK])
@pytest.mark.parametrize("name", PROBES)
def test_every_use_is_recorded_exactly(name, method):
    assert_exact(PROBES[name](), method)


@pytest.mark.parametrize(
    "name", [*COMPILED, *(pytest.param(name, marks=pytest.mark.slow) for name in PROBES if name not in COMPILED)]
)
def test_every_use_is_recorded_exactly_if_compiled(name):
    assert_exact(PROBES[name](), blocks=EAGER())


# ---------------------------------------------------------------- where the samples are


def test_another_extent_equal_to_the_number_of_samples_is_refused():
    # Three positions for three samples: ids of positions look like one id per sample.
    foreign = probe(lambda m, x: x + F.embedding(torch.arange(3), m.p), {"x": randn(3, 3, 4)}, p=(5, 4))
    with pytest.raises(
        FdpError, match=r"p: .* with 3 samples .* happens to be 3, or a multiple. Use another microbatch"
    ):
        assert_exact(foreign)
    assert_exact(foreign._replace(data={"x": randn(4, 3, 4)}))
    assert_exact(foreign._replace(data={"x": randn(1, 3, 4)}))


def test_tokens_first_are_refused_unless_batch_first_is_false():
    foreign = probe(lambda m, x: F.linear(x.transpose(0, 1), m.w).transpose(0, 1), {"x": randn(4, 7, 4)}, w=(5, 4))
    with pytest.raises(FdpError, match=r"w: expected an input with .*batch_first=False.* got shape \(7, 4, 4\)"):
        assert_exact(foreign)
    assert_exact(foreign._replace(options=foreign.options | {"batch_first": False}))


def test_a_constant_that_samples_were_written_into_is_no_constant():
    def run(m: Probe, x: Tensor) -> Tensor:
        rows = torch.zeros(len(x) * 6, 4, dtype=torch.float64)
        view = rows[:]
        view.copy_(x.reshape(-1, 4))  # the constant itself is not touched by name
        return F.linear(rows, m.w).tanh().view(len(x), 6, -1)

    assert_exact(probe(run, X, w=(5, 4)))


def test_a_result_without_samples_is_refused():
    foreign = probe(lambda m, x: m.g.exp(), X, g=(3,))
    with pytest.raises(FdpError, match=r"g: expected the module to return \(batch, ...\), got a value of shape \(3,\)"):
        assert_exact(foreign)


# ---------------------------------------------------------------- refusals


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):  # pyright: ignore
        x, w = ctx.saved_tensors
        return 2 * g * w, 2 * (g * x).sum((0, 1))


def under_no_grad(m: Probe, x: Tensor) -> Tensor:
    with torch.no_grad():
        top = m.g.abs().max()
    return x * m.g / top


REFUSED: dict[str, tuple[Callable[[], Foreign], str]] = {
    "sorted": (lambda: probe(lambda m, x: x * m.g.sort()[0], X, g=(4,)), r"g: used by .*sort on g \(4,\)"),
    "max norm": (
        lambda: probe(lambda m, ids: F.embedding(ids, m.w, max_norm=1.0), IDS, w=(7, 4)),
        "max_norm=1.0 renorm",
    ),
    "by frequency": (
        lambda: probe(lambda m, ids: F.embedding(ids, m.w, scale_grad_by_freq=True), IDS, w=(7, 4)),
        "scale_grad_by_freq",
    ),
    "in place": (lambda: probe(lambda m, x: x * m.g.mul_(2.0), X, g=(4,)), r"g: the module changes this .*mul_\)"),
    "into a constant": (
        lambda: probe(lambda m, x: x * torch.ones(4, dtype=torch.float64).add_(m.g), X, g=(4,)),
        "g: expected in-place changes of samples only",
    ),
    "as a number": (lambda: probe(lambda m, x: x * m.s * float(m.s), X, s=()), "s: used by .*(float|item)"),
    "property": (lambda: probe(lambda m, x: x * m.g.T, X, g=(4,)), r"g: used by the property .T"),
    "per sample": (
        lambda: probe(lambda m, x: x * m.g, X, g=(3, 1, 4)),
        r"g: expected an extent of 1 in dim 0.*got shape \(3, 1, 4\)",
    ),
    "no gradient": (
        lambda: probe(under_no_grad, X, g=(4,)),
        r"g: used by a torch.autograd.Function, or under torch.no",
    ),
    "batch statistics": (
        lambda: probe(lambda m, x: F.batch_norm(x, None, None, m.g, training=True), X, g=(6,)),
        "g: used by F.batch_norm by statistics of the batch.*GroupNorm",
    ),
    "mixing einsum": (
        lambda: probe(lambda m, x: torch.einsum("btd,bd->bt", x, m.w), X, w=(3, 4)),
        r"w: used by torch.einsum\('btd,bd->bt'\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_uses_without_a_rule_are_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(FdpError, match=message):
        assert_exact(make())


def test_the_error_names_leaf_operation_shapes_and_choices():
    foreign = probe(lambda m, x: torch.cdist(x, m.w), X, w=(2, 4))
    with pytest.raises(FdpError) as refused:
        assert_exact(foreign)
    choices = ("requires_grad_(False)", "materialize=('w',)", "--method materialize")
    for part in ("w: used by", "cdist", "(3, 6, 4)", "w (2, 4)", *choices):
        assert part in str(refused.value)
    assert_exact(foreign._replace(options=foreign.options | {"materialize": ("w",)}))


def test_a_custom_backward_is_refused_or_materialised():
    foreign = probe(lambda m, x: Twice.apply(x, m.g), X, g=(4,))  # pyright: ignore
    with pytest.raises(FdpError, match=r"g: used by a torch.autograd.Function"):
        assert_exact(foreign)
    assert_exact(foreign._replace(options=foreign.options | {"materialize": ("g",)}))


def test_a_property_that_torch_compile_does_not_show_is_refused_if_compiled():
    foreign = probe(lambda m, x: (x @ m.w.T).tanh(), X, w=(5, 4))
    assert_exact(foreign)
    with pytest.raises(
        FdpError, match=r": expected .t\(\), got the property .T, which torch.compile does not show; write .t\(\)"
    ):
        assert_exact(foreign, blocks=EAGER())


@pytest.mark.long
def test_a_use_that_torch_compile_does_not_show_gives_nan(monkeypatch):
    # F.pad is such a function; if nothing refused it there, the leaf's one use would be seen and the other not.
    monkeypatch.delitem(HANDLERS, F.pad)
    monkeypatch.setitem(FUNCTION_KINDS, F.pad, FunctionKind.PARAMETERS_ONLY)
    foreign = probe(lambda m, x: x * m.g + F.pad(m.g, (0, 0)), X, g=(4,))
    assert_exact(foreign)
    model, params = foreign.model()
    plan = make_plan(model, params, X, method=Method.AUTO, dtype=torch.float64)
    _, norms, _ = per_sample_norms(model, params, X, plan=plan, execution=Execution(runner=EAGER()))
    assert norms.total().isnan().all()


def test_a_planned_use_that_is_missing_is_an_error():
    def once(p: Any, carry: Any, data: Any) -> Tensor:
        return ops.linear(data["x"], p["w"]).sum((1, 2))

    def twice(p: Any, carry: Any, data: Any) -> Tensor:
        return once(p, carry, data) + once(p, carry, {"x": data["x"].tanh()})

    weights, trained = {"w": randn(5, 4)}, frozenset({"w"})
    uses, _ = trace(Block("twice", {"w": "w"}, twice), weights, trained, (), X)
    block = Block("once", {"w": "w"}, once, compiled=False)
    with pytest.raises(FdpError, match=r"once: expected the uses \['w#1'\], as planned, got none"):
        tapped_vjp(block, weights, (), X, uses, trained)
    with pytest.raises(FdpError, match=r"once: expected the uses .* as planned, got .*; do not compile it"):
        CompiledRunner().tapped_vjp(block, weights, (), X, uses, trained)


# ---------------------------------------------------------------- dropout


def noisy(p: float = 0.5) -> Foreign:
    def run(m: Probe, x: Tensor) -> Tensor:
        h = F.dropout(F.linear(x, m.w), p) + F.dropout(m.g.expand(len(x), 6, -1), p) * m.g
        h = F.dropout2d(h.unsqueeze(2), p).squeeze(2)
        h = h.unsqueeze(1)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=p, is_causal=True).squeeze(1)

    return probe(run, dropout.with_keys(X, keys.key(5)), w=(4, 4), g=(4,))


@pytest.mark.parametrize("method", [Method.MATERIALIZE, Method.GHOST, Method.AUTO])
def test_dropout_is_a_function_of_the_samples_keys(method):
    assert_exact(noisy(), method)


@pytest.mark.slow
def test_compiled_dropout_draws_the_same_masks():
    assert_exact(noisy(), blocks=EAGER())


def test_dropout_in_attention_modules_draws_from_keys():
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.3, batch_first=True).double().train()
    data = dropout.with_keys({"src": randn(3, 5, 4)}, keys.key(1))
    assert_exact(Foreign(layer, data, {"loss": lambda out, _: out.square().sum((1, 2))}), Method.GHOST)


def test_dropout_keeps_the_mean_and_drops_its_share():
    x = torch.ones(8, 50_000, dtype=torch.float64)
    drawn = dropout.apply_dropout(x, keys.split(keys.key(0), 8), 1, 0.3)
    assert ((drawn == 0).double().mean(1) - 0.3).abs().max() < 0.01
    assert set(drawn.unique().tolist()) == {0.0, 1 / 0.7}
    other = dropout.apply_dropout(x, keys.split(keys.key(0), 8), 2, 0.3)
    both = ((drawn == 0) & (other == 0)).double().mean()
    assert abs(both - 0.09) < 0.003  # calls are independent, and so are samples
    assert abs(((drawn[0] == 0) & (drawn[1] == 0)).double().mean() - 0.09) < 0.01
    assert abs(((drawn[:, 1:] == 0) & (drawn[:, :-1] == 0)).double().mean() - 0.09) < 0.003
    assert (dropout.apply_dropout(x, keys.split(keys.key(0), 8), 1, 1.0) == 0).all()


def test_the_keys_of_the_next_block_differ():
    first = keys.split(keys.key(0), 4)
    second = dropout.next_keys(first)
    third = dropout.next_keys(second)
    words = torch.cat([first, second, third]).flatten()
    assert len(words.unique()) == len(words)
    assert ((second >= 0) & (second < 1 << 32)).all()
    torch.testing.assert_close(dropout.next_keys(first[1:2]), second[1:2], rtol=0, atol=0)


def test_every_dropout_call_draws_a_new_mask():
    data = dropout.with_keys({"x": torch.ones(3, 50, dtype=torch.float64)}, keys.key(5))
    model, params = probe(lambda m, x: (F.dropout(x) - F.dropout(x)) * m.g, data, g=(1,)).model()
    assert (model.loss(params, data) > 0).all()
    torch.testing.assert_close(model.loss(params, data), model.loss(params, data), rtol=0, atol=0)


def test_dropout_without_keys_is_refused():
    foreign = noisy()._replace(data=X)
    with pytest.raises(
        FdpError,
        match=r"dropout: expected a key per sample.* got none for p = 0.5 .* eval\(\), or add keys: .*with_keys",
    ):
        assert_exact(foreign)
    shared = probe(lambda m, x: x * F.dropout(m.g, 0.5), dropout.with_keys(X, keys.key(5)), g=(4,))
    with pytest.raises(
        FdpError, match=r"dropout: expected a tensor of shape .* got one of shape \(4,\) without samples"
    ):
        assert_exact(shared)
    with pytest.raises(FdpError, match="expected a dictionary"):
        dropout.with_keys([X["x"]], keys.key(0))  # pyright: ignore


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + torch.randn_like(x),
        lambda x: F.gumbel_softmax(x),
        lambda x: F.alpha_dropout(x, 0.5, True),
        lambda x: x * torch.rand(1),
    ],
)
def test_random_functions_of_torch_are_refused(draw):
    foreign = probe(lambda m, x: draw(x * m.g), X, g=(4,))
    with pytest.raises(FdpError, match=r"draws random numbers; put it in eval\(\)"):
        assert_exact(foreign)
    assert_exact(probe(lambda m, x: F.alpha_dropout(x * m.g, 0.5, False), X, g=(4,)))


def test_dropout_between_recurrent_layers_is_refused():
    layers = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True).double()
    foreign = Foreign(layers, {"input": randn(3, 5, 4)}, {"loss": lambda out, _: out[0].square().sum((1, 2))})
    with pytest.raises(FdpError, match=r"dropout: expected none between recurrent layers"):
        assert_exact(foreign)


# ---------------------------------------------------------------- rules of one's own


@operation
def gated(x: Tensor, weight: Tensor, *, power: int = 2) -> Tensor:
    """``(x W^T)^power``, an operation that torch does not have."""
    return F.linear(x, weight) ** power


@mock.patch.dict(RULES, clear=True)
def test_a_custom_operation_is_refused_without_a_rule_and_exact_with_one():
    @operation
    def scaled(x: Tensor, weight: Tensor, *, by: float = 1.0) -> Tensor:
        return by * F.linear(x, weight)

    foreign = probe(lambda m, x: scaled(x, m.w, by=3.0).tanh(), X, w=(5, 4))
    with pytest.raises(FdpError, match=r"w: used by .*scaled.* on \(3, 6, 4\)"):
        assert_exact(foreign)
    made = rule(scaled, example=(randn(3, 6, 4), randn(5, 4)), by=2.0)(
        lambda x, g, shape, *, by: Pair(rows(by * g), rows(x), shape)
    )
    assert made.name == "scaled"
    assert_exact(foreign, Method.GHOST)
    assert_exact(foreign, blocks=EAGER())


@mock.patch.dict(RULES, clear=True)
def test_an_operator_of_torch_ops_takes_a_rule():
    with torch.library._scoped_library("fdp_test", "DEF") as library:
        library.define("thrice(Tensor x, Tensor weight) -> Tensor")
        library.impl("thrice", lambda x, weight: 3 * F.linear(x, weight), "CompositeImplicitAutograd")
        thrice = torch.ops.fdp_test.thrice
        foreign = probe(lambda m, x: thrice(x, m.w).tanh(), X, w=(5, 4))
        with pytest.raises(FdpError, match=r"w: used by .*thrice.* on \(3, 6, 4\)"):
            assert_exact(foreign)
        rule(thrice)(Rule("thrice", thrice, lambda x, g, shape: Pair(rows(3 * g), rows(x), shape)))
        assert_exact(foreign)


def test_a_wrong_rule_is_refused():
    @operation
    def doubled(x: Tensor, weight: Tensor) -> Tensor:
        return 2 * x * weight

    with pytest.raises(FdpError, match="rule doubled: per-sample gradient differs"):
        rule(doubled, example=(randn(3, 4), randn(4)))(lambda x, g, shape: Dense(x * g))
    assert not [name for name in RULES if "doubled" in str(name)]


def test_an_operation_that_nobody_watches_is_the_function_itself():
    torch.testing.assert_close(gated(X["x"], randn(5, 4)), F.linear(X["x"], randn(5, 4)) ** 2)


# ---------------------------------------------------------------- the rules behind them


def test_rules_agree_with_vmap_grad():
    check_rule(ops.MATMUL, randn(3, 6, 4), randn(4, 5), tolerance=1e-12)
    check_rule(ops.EXPERTS, randn(3, 2, 6, 4), randn(2, 4, 5), tolerance=1e-12)
    conv = {"stride": (1, 2, 1), "padding": (1, 0, 1), "dilation": (2, 1, 1), "groups": 2}
    check_rule(ops.CONV3D, randn(3, 4, 4, 5, 3), randn(2, 2, 2, 3, 2), tolerance=1e-12, **conv)
    check_rule(ops.EMBEDDING, ids(3, 6, below=7), randn(7, 4), tolerance=1e-12)
    check_rule(LINEAR_ROWS, randn(3, 6, 4), randn(9, 4), tolerance=1e-12, start=3, stop=6)
    for equation, w in (("btd,edf->btef", (2, 4, 5)), ("btd,efd->btef", (2, 5, 4)), ("btd,dfe->btef", (4, 5, 2))):
        letters = parse(equation, 3, 3, swapped=False, flattened=False)
        assert letters is not None
        options = {"x_of": letters.x, "w_of": letters.w, "y_of": letters.y}
        check_rule(EINSUM, randn(3, 6, 4), randn(*w), tolerance=1e-12, **options)


def test_a_padded_row_gets_no_gradient():
    tokens, table, g = torch.tensor([[1, 0, 2], [0, 0, 0]]), randn(3, 2), randn(2, 3, 2)
    found = per_sample_gradient(ops.EMBEDDING.record(tokens, g, (3, 2), padding_idx=-3))
    assert (found[:, 0] == 0).all()
    torch.testing.assert_close(found[0, 1:], g[0, [0, 2]])
    torch.testing.assert_close(ops.embedding(tokens, table, padding_idx=0), table[tokens])


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (Use("w#0", "w", "matmul", (3, 6, 4), (3, 6, 5), (4, 5)), (3, 6, 4, 5)),
        (Use("w#0", "w", "linear", (3, 6, 4), (3, 6, 5), (5, 4)), (3, 6, 5, 4)),
        (Use("w#0", "w", "linear rows", (3, 6, 4), (3, 6, 5), (15, 4)), (3, 6, 15, 4)),
        (Use("w#0", "w", "experts", (3, 2, 6, 4), (3, 2, 6, 5), (2, 4, 5)), (6, 6, 4, 5)),
        (Use("w#0", "w", "einsum", (3, 6, 4), (3, 6, 2, 5), (2, 4, 5)), (6, 6, 4, 5)),
    ],
)
def test_costs_equal_those_of_the_products(use, expected):
    assert sizes(use) == expected
