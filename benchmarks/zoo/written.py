"""Modules written by hand: odd uses of parameters, odd layouts, state, tables, reordering, and mixing of samples."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.draws import floats, ids, integers, normal
from benchmarks.zoo.hold import Case, Draw, Kind, squares

TOKENS, IDS = floats("x", 5, 6), ids("x", 6)
WHOLE = {"materialize": ("*",)}
Run = Callable[..., Tensor]


class Free(nn.Module):
    """A module that computes any function of parameters, parts and data."""

    def __init__(self, run: Run, parts: dict[str, Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def free(
    name: str,
    run: Run,
    draw: Draw = TOKENS,
    *,
    parts: Callable[[], dict[str, Any]] = dict,
    options: dict[str, Any] | None = None,
    loss: Any = squares,
    refusal: str | None = None,
    mend: Any = None,
    compiled: bool = False,
    **shapes: tuple[int, ...],
) -> Kind:
    def make() -> Case:
        return Case(Free(run, parts(), **shapes).eval(), draw, loss=loss, options=options or {})

    return Kind(name, make, refusal=refusal, mend=mend, compiled=compiled)


def instead(run: Run) -> Callable[[Case], Case]:
    """Return a mend: the same module with another forward, as the error suggests."""

    def mended(case: Case) -> Case:
        module: Any = case.module
        module.run = run
        return case

    return mended


def frozen(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


def linear() -> dict[str, Any]:
    return {"l": nn.Linear(6, 4)}


def keeping(write: Callable[[Any, Tensor], Any]) -> Run:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.l(x).tanh()
        with torch.no_grad():
            write(m, h.mean((0, 1)))
        return h

    return run


plainly = instead(lambda m, x: m.l(x).tanh())
STATE = {"last": lambda: frozen(4)}
WRITTEN = "the module changes this tensor when it is called"


def stateful(name: str, write: Callable[[Any, Tensor], Any]) -> Kind:
    parts = lambda: {"l": nn.Linear(6, 4), "last": frozen(4), "seen": torch.zeros(4)}  # noqa: E731
    return free(name, keeping(write), parts=parts, refusal=WRITTEN, mend=plainly)


def set_data(m: Any, h: Tensor) -> None:
    m.last.data = h


class Attributes(nn.Module):
    """Constants as plain attributes, in a list and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 6))
        self.table = torch.randn(5, 6, dtype=torch.float64)
        self.held = [torch.randn(6, dtype=torch.float64)]
        self.box = SimpleNamespace(scale=torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * (self.w * self.table + self.held[0]) * self.box.scale).sin()


class Grows(nn.Module):
    """A rotary table that grows with the longest sequence seen."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.n:
            self.n = x.shape[1]
            a = torch.arange(self.n)[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
            self.cos, self.sin = a.cos(), a.sin()
        a, b = self.l(x).chunk(2, -1)
        c, s = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        return torch.cat([a * c - b * s, a * s + b * c], -1)


class Notes(nn.Module):
    """Keeps its last activations and attention in attributes, for whoever wants to look."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.seen, self.calls = nn.Linear(6, 6), {}, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen["h"] = self.l(x)
        self.attention = (self.seen["h"] @ x.transpose(1, 2)).softmax(-1)
        return self.attention @ self.seen["h"]


class Remembers(nn.Module):
    """Adds what it computed last, as a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.memory = nn.Linear(6, 6), torch.zeros(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x) + self.memory
        self.memory = h.detach().mean((0, 1))
        return h


class Stack(nn.Module):
    """Layers that own all parameters, to be taken one at a time."""

    def __init__(self, layer: Callable[[], nn.Module], head: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(3)])
        self.head = nn.Linear(6, 3) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Sorted(nn.Module):
    """Longest first, encode, back in order."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.h, self.o = nn.Embedding(13, 8, padding_idx=0), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = (x != 0).sum(1).argsort(descending=True, stable=True)
        h = self.h(self.e(x[order])).tanh().sum(1)
        return self.o(h[order.argsort()])


class Packed(nn.Module):
    """A recurrent layer over packed sequences of unlike lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(13, 8, padding_idx=0), nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp_min(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.e(x), lengths, batch_first=True, enforce_sorted=False)
        return self.o(self.r(packed)[1][0][-1])


class Tied(nn.Module):
    """A table of words that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.l = nn.Embedding(13, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.l(self.e(x)).tanh())


class Experts(nn.Module):
    """Two experts, each on the tokens routed to it."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self.router, self.dense = nn.Linear(6, 2), dense
        self.up, self.down = nn.Parameter(torch.randn(2, 6, 7) / 2), nn.Parameter(torch.randn(2, 7, 6) / 2)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        if self.dense:
            hidden = torch.einsum("btd,edf->btef", x, self.up).tanh()
            return (torch.einsum("btef,efd->bted", hidden, self.down) * share.unsqueeze(-1)).sum(2)
        out = torch.zeros_like(x)
        for e in range(2):
            where = (share.argmax(-1) == e).nonzero(as_tuple=True)
            out[where] = ((x[where] @ self.up[e]).tanh() @ self.down[e]) * share[..., e][where].unsqueeze(-1)
        return out


class Own(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


def longer(n: int, g: torch.Generator) -> dict[str, Tensor]:
    """Draw samples of another length than the example's."""
    return {"x": normal(g, n, 6 + n, 6)}


def padded(n: int, g: torch.Generator) -> dict[str, Tensor]:
    """Draw words of unequal lengths; the example has equal ones."""
    x = integers(g, n, 6)
    if n == 3:
        x[0, 1:], x[1, 3:] = 0, 0
    return {"x": x}


def pairs(out: Tensor, data: Any) -> Tensor:
    out = out.flatten(1)
    return F.cross_entropy(out @ out.t(), torch.arange(len(out)), reduction="none")


def flattened(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.reshape(-1, 6), m.w).view(len(x), 5, -1).tanh()


def turned(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.transpose(0, 1).reshape(-1, 6), m.w).view(5, len(x), -1).transpose(0, 1).sin()


def skipping(m: Any, x: Tensor) -> Tensor:
    chance = torch.rand([])
    return x if m.training and chance < 0.1 else m.l(x)


def branching(m: Any, x: Tensor) -> Tensor:
    return m.l(x) if bool((x.sum() > -1e9).item()) else x


def _module(name: str, make: Callable[[], nn.Module], draw: Draw, **more: Any) -> Kind:
    options = more.pop("options", {})
    return Kind(name, lambda: Case(make().eval(), draw, options=options), **more)


ORDER = "used on samples in an order that the data decide"
RANDOM = "expected a forward that gives the same result twice"
BY_LAYER = {"blocks": "layers.*"}

WRITTEN_BY_HAND: list[Kind] = [
    # uses of parameters
    free("a scale and a shift", lambda m, x: x * m.g + m.b, g=(6,), b=(6,), compiled=True),
    free("a learned temperature", lambda m, x: F.linear(x, m.w) / m.t.exp(), w=(4, 6), t=(), compiled=True),
    free(
        "a learned token", lambda m, x: torch.cat([m.t.expand(len(x), -1, -1), x], 1).tanh(), t=(1, 1, 6), compiled=True
    ),
    free("learned positions", lambda m, x: (x + m.p[: x.shape[1]]).tanh(), p=(9, 6), compiled=True),
    free("x @ W", lambda m, x: (x @ m.w).tanh(), w=(6, 4), compiled=True),
    free("x @ W.t()", lambda m, x: (x @ m.w.t()).tanh(), w=(4, 6)),
    free("W @ x", lambda m, x: (m.w @ x).tanh(), w=(4, 5)),
    free("addmm", lambda m, x: torch.addmm(m.b, x.reshape(-1, 6), m.w).view(len(x), 5, -1).tanh(), w=(6, 4), b=(4,)),
    free("einsum", lambda m, x: torch.einsum("btd,hde->bthe", x, m.w).tanh(), w=(2, 6, 3), compiled=True),
    free("a product of two parameters", lambda m, x: x @ (m.a @ m.b), a=(6, 2), b=(2, 4), compiled=True),
    free(
        "a low rank beside a weight",
        lambda m, x: F.linear(x, m.w) + (x @ m.a.t()) @ m.b.t(),
        w=(4, 6),
        a=(2, 6),
        b=(4, 2),
    ),
    free("a normalised weight", lambda m, x: F.linear(x, F.normalize(m.w, dim=1)), w=(4, 6), compiled=True),
    free("a softmax of a parameter", lambda m, x: (x * m.w.softmax(0)).sum(-1, keepdim=True).tanh(), w=(6,)),
    free(
        "a masked weight",
        lambda m, x: F.linear(x, m.w * m.mask),
        w=(4, 6),
        parts=lambda: {"mask": torch.ones(4, 6).tril()},
    ),
    free("half of a weight", lambda m, x: F.linear(x, m.w[:2]).tanh() + F.linear(x, m.w[2:]).sin(), w=(4, 6)),
    free("one weight used twice", lambda m, x: F.linear(F.linear(x, m.w).tanh(), m.w), w=(6, 6), compiled=True),
    free("rows by index", lambda m, x: m.t[x].sin(), IDS, t=(13, 4)),
    free(
        "rows by constant ids",
        lambda m, x: x * m.t[m.i],
        t=(9, 6),
        parts=lambda: {"i": torch.tensor([0, 2, 4, 6, 8])},
        mend=WHOLE,
    ),
    free("rows by one hot", lambda m, x: F.one_hot(x, 13).double() @ m.t, IDS, t=(13, 4)),
    free(
        "a bias of attention",
        lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=m.b),
        b=(5, 5),
        compiled=True,
    ),
    free("a learned query", lambda m, x: F.scaled_dot_product_attention(m.q.expand(len(x), -1, -1), x, x), q=(2, 6)),
    free("a recurrence", lambda m, x: _recurrence(m.w, x), w=(6, 6), compiled=True),
    free("a scan with decay", lambda m, x: _decay(m.a, x), a=(6,)),
    free("a complex rotation", lambda m, x: _rotation(m.f, x), f=(3,), mend=WHOLE),
    free("conv1d by hand", lambda m, x: F.conv1d(x.transpose(1, 2), m.w, padding=1).tanh(), w=(4, 6, 3)),
    free("unfold and a product", lambda m, x: x.unfold(1, 3, 1).flatten(2) @ m.w, w=(18, 4)),
    free("the outer product of two", lambda m, x: x * torch.outer(m.a, m.b), a=(5,), b=(6,)),
    free(
        "the inverse of a matrix",
        lambda m, x: x @ torch.linalg.solve(torch.eye(6).double() + m.w @ m.w.t(), torch.eye(6).double()),
        w=(6, 6),
        mend=WHOLE,
    ),
    free("the exponential of a matrix", lambda m, x: x @ torch.matrix_exp(m.w - m.w.t()), w=(6, 6)),
    free("a sorted parameter", lambda m, x: x * m.g.sort()[0], g=(6,), mend=WHOLE),
    free("bilinear by hand", lambda m, x: torch.einsum("bti,oij,btj->bto", x, m.w, x), w=(3, 6, 6), mend=WHOLE),
    free(
        "a hypernetwork",
        lambda m, x: torch.bmm(x, m.l(x.mean(1)).view(-1, 6, 4)),
        parts=lambda: {"l": nn.Linear(6, 24)},
        compiled=True,
    ),
    _module("tied words", Tied, IDS, compiled=True),
    _module(
        "tied words, detached head",
        lambda: Free(lambda m, x: F.linear(F.embedding(x, m.w).tanh(), m.w.detach()), {}, w=(13, 6)),
        IDS,
    ),
    _module("dense experts", lambda: Experts(dense=True), TOKENS, compiled=True),
    _module("routed experts", lambda: Experts(dense=False), TOKENS, mend=WHOLE),
    # layouts
    free("flattened tokens", flattened, w=(4, 6), compiled=True),
    free("tokens before samples, flattened", turned, w=(4, 6), mend=WHOLE),
    free(
        "tokens first",
        lambda m, x: m.l(x.transpose(0, 1)).transpose(0, 1).tanh(),
        parts=linear,
        options={"batch_first": False},
    ),
    _module("longer samples", lambda: _Linear(), longer),
    # functions, branches, checkpoints
    free("a backward of its own", lambda m, x: Own.apply(m.l(x)), parts=linear),  # pyright: ignore
    free("a branch on the sum of the batch", branching, parts=linear, refusal="not independent", mend=plainly),
    free(
        "checkpointed activations",
        lambda m, x: checkpoint(lambda z: m.l(z).tanh(), x, use_reentrant=False),  # pyright: ignore
        parts=linear,
        refusal="expected a forward without torch.utils.checkpoint",
        mend=plainly,
    ),
    free("under no_grad, then used", lambda m, x: m.l(x) * m.l(x).detach(), parts=linear),
    free("an activation in place", lambda m, x: F.relu(m.l(x), inplace=True) + 1, parts=linear, compiled=True),
    free("added in place", lambda m, x: m.l(x).add_(m.b).mul_(2.0), parts=linear, b=(4,), compiled=True),
    free(
        "a backward that torch refuses",
        lambda m, x: m.l(x).tanh().mul_(2.0),
        parts=linear,
        refusal="whose own backward",
        mend=instead(lambda m, x: m.l(x).tanh() * 2.0),
    ),
    free("written into a new tensor", lambda m, x: _written(m, x), parts=linear),
    # constants
    _module("constants as attributes", Attributes, TOKENS, compiled=True),
    free(
        "a constant made in the forward",
        lambda m, x: m.l(x) * torch.arange(5.0)[:, None].double(),
        parts=linear,
        compiled=True,
    ),
    free(
        "a buffer", lambda m, x: m.l(x) * m.c, parts=lambda: {"l": nn.Linear(6, 4), "c": torch.rand(4)}, compiled=True
    ),
    # state
    stateful("a frozen parameter, copied into", lambda m, h: m.last.copy_(h)),
    stateful("a frozen parameter, averaged", lambda m, h: m.last.mul_(0.9).add_(0.1 * h)),
    stateful("a frozen parameter, .data =", set_data),
    stateful("a frozen parameter, through .data", lambda m, h: m.last.data.add_(h)),
    stateful("a buffer that counts", lambda m, h: m.seen.add_(1.0)),
    stateful("a view of a buffer", lambda m, h: m.seen[1:].copy_(h[1:])),
    stateful("a buffer by out=", lambda m, h: torch.mul(h, 2.0, out=m.seen)),
    stateful("a trained weight, clamped", lambda m, h: m.l.weight.data.clamp_(-0.5, 0.5)),
    _module("a table that grows", Grows, longer, compiled=True),
    _module("activations kept in attributes", Notes, TOKENS, compiled=True),
    _module(
        "a memory",
        Remembers,
        TOKENS,
        refusal="stores something in ['memory']",
        mend=lambda case: case._replace(module=_Linear()),
    ),
    # randomness
    free("a random number that nobody uses", skipping, parts=linear, compiled=True),
    free("a random number", lambda m, x: m.l(x) + torch.randn(4), parts=linear, refusal=RANDOM, mend=plainly),
    free(
        "numpy's random numbers",
        lambda m, x: m.l(x) * numpy.random.rand(),
        parts=linear,
        refusal="draws random numbers, or stores something",
        mend=plainly,
    ),
    # orders
    _module("sorted by length", Sorted, padded, refusal=ORDER, mend=WHOLE),
    _module("packed sequences", Packed, padded),
    free(
        "the last token of each",
        lambda m, x: m.l(x)[torch.arange(len(x)), (x[..., 0] > 0).sum(1).clamp_max(4)],
        parts=linear,
    ),
    free("sorted by size", lambda m, x: _by_size(m, x), parts=linear, refusal=ORDER, mend=WHOLE),
    free("reversed samples", lambda m, x: m.l(x.flip(0)).flip(0).tanh(), parts=linear, refusal="", mend=WHOLE),
    # what mixes samples
    free(
        "a mean over the batch",
        lambda m, x: m.l(x) - m.l(x).mean(0),
        parts=linear,
        refusal="not independent",
        mend=plainly,
    ),
    free(
        "a loss over pairs",
        lambda m, x: m.l(x),
        parts=linear,
        loss=pairs,
        refusal="not independent",
        mend=lambda case: case._replace(loss=squares),
    ),
    free(
        "the largest of the batch",
        lambda m, x: m.l(x) / x.abs().amax(),
        parts=linear,
        refusal="not independent",
        mend=plainly,
    ),
    free(
        "normalised over the batch",
        lambda m, x: F.batch_norm(m.l(x).transpose(1, 2), None, None, training=True),
        parts=linear,
        refusal="fixed statistics",
        mend=plainly,
    ),
    # blocks
    _module(
        "layers one at a time",
        lambda: Stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()), head=True),
        TOKENS,
        options=BY_LAYER,
        compiled=True,
    ),
    _module(
        "layers that own all parameters",
        lambda: Stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()), head=False),
        TOKENS,
        options=BY_LAYER,
        compiled=True,
    ),
    _module(
        "layers with activations in place",
        lambda: Stack(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)), head=True),
        TOKENS,
        options=BY_LAYER,
        compiled=True,
    ),
    _module("layers whose tables grow", lambda: Stack(Grows, head=True), longer, options=BY_LAYER, compiled=True),
    # what cannot be taken
    _module(
        "no parameters",
        lambda: nn.Sequential(nn.Flatten(), nn.Tanh()),
        floats("input", 6),
        refusal="expected a module with parameters to train",
        mend=lambda case: case._replace(module=nn.Sequential(nn.Flatten(), nn.Linear(6, 3))),
    ),
    _module(
        "all frozen",
        lambda: nn.Linear(6, 3).requires_grad_(False),
        floats("input", 6),
        refusal="expected a parameter to train",
        mend=lambda case: case._replace(module=case.module.requires_grad_(True)),
    ),
    Kind(
        "DataParallel",
        lambda: Case(nn.DataParallel(_Linear()), TOKENS),
        refusal="give module.module",
        mend=lambda case: case._replace(module=case.module.module),
    ),
    Kind(
        "torch.compile",
        lambda: Case(torch.compile(_Linear(), backend="eager"), TOKENS),  # pyright: ignore
        refusal="give module._orig_mod",
        mend=lambda case: case._replace(module=case.module._orig_mod),
    ),
    Kind(
        "TorchScript",
        lambda: Case(nn.Sequential(torch.jit.script(nn.Linear(6, 4))), floats("input", 6)),
        refusal="got a TorchScript module",
        mend=lambda case: case._replace(module=nn.Sequential(nn.Linear(6, 4))),
    ),
]


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x).tanh()


def _recurrence(w: Tensor, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for token in x.unbind(1):
        h = torch.tanh(token + F.linear(h, w))
    return h


def _decay(a: Tensor, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for token in x.unbind(1):
        h = h * a.sigmoid() + token
    return h.tanh()


def _rotation(f: Tensor, x: Tensor) -> Tensor:
    turn = torch.polar(torch.ones(3, dtype=torch.float64), f)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (3, 2))) * turn).tanh()


def _written(m: Any, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), 5, 4)
    out[:, ::2] = m.l(x)[:, ::2]
    return out


def _by_size(m: Any, x: Tensor) -> Tensor:
    order = x.square().sum((1, 2)).argsort()
    return m.l(x[order])[order.argsort()].tanh()
