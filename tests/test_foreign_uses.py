"""Every way in which a foreign module may use a parameter: recorded exactly, or refused with path, place and remedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp import keys, ops
from fdp.compiled import Blocks
from fdp.foreign import dropout
from fdp.foreign.uses import RULES, operation, rule
from fdp.methods import Method, make_plan
from fdp.per_sample import per_sample_norms
from fdp.rules import Dense, Pair, rows
from fdp.types import FdpError
from tests.foreign_cases import Foreign, Probe, assert_exact, gradients, ids, probe, randn

EAGER = partial(Blocks, backend="aot_eager")
X = {"x": randn(3, 6, 4)}
IMAGE = {"x": randn(3, 4, 5, 6)}
IDS = {"ids": ids(3, 6, below=7)}
LATER = {"options": {"batch_first": False, "call": lambda module, data: module(data["x"].transpose(0, 1))}}
"""Tokens in dim 0."""


def over_tokens(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``run`` on (batch * tokens, features)."""

    def flattened(m: Probe, x: Tensor) -> Tensor:
        return run(m, x.reshape(-1, x.shape[-1])).reshape(*x.shape[:2], -1)

    return flattened


def last_first(m: Probe, x: Tensor) -> Tensor:
    """Tokens first, flattened: (tokens * batch, features)."""
    y = F.linear(x.reshape(-1, 4), m.w, m.b).tanh() * m.g
    return F.layer_norm(y.reshape(6, -1, 4), (4,), m.g, m.b).transpose(0, 1)


def relative(m: Probe, x: Tensor) -> Tensor:
    """Attention with a learned bias by distance, as T5 has it: parameters without samples all the way to the scores."""
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
    """Six positions for three samples: as many as they would be if they were flattened samples."""
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
    "relative": lambda: probe(relative, X, table=(6, 2)),
    "chunks": lambda: probe(
        lambda m, x: torch.cat([x * part for part in torch.stack([m.g, m.b]).flatten().chunk(2)], -1).sin(),
        X,
        g=(4,),
        b=(4,),
    ),
    "detached": lambda: probe(lambda m, x: (x * m.g * m.g.detach() * m.w.data.sum()).sin() @ m.w, X, g=(4,), w=(4, 4)),
}
COMPILED = ("derived", "positions", "tokens first")


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own, on the module by itself


@pytest.mark.parametrize("method", [Method.AUTO, Method.GHOST, Method.FLASH_BK])
@pytest.mark.parametrize("name", PROBES)
def test_every_use_is_recorded_exactly(name, method):
    assert_exact(PROBES[name](), method)


@pytest.mark.parametrize(
    "name", [*COMPILED, *(pytest.param(name, marks=pytest.mark.slow) for name in PROBES if name not in COMPILED)]
)
def test_compiled_they_are_recorded_as_exactly(name):
    assert_exact(PROBES[name](), blocks=EAGER())
