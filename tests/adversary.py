"""An adversary: models whose inputs and output gradients a sample chooses freely, samples made to break them, how far
each moves the clipped sum, and a search for worse ones.

    ratio = |S(everyone) - S(everyone but one)| / stated sensitivity             at most 1, whatever the one holds

A leaf is used once, or by two rules, in one block or in two. Every use has *levers*, data that are its input and its
output gradient: the loss is ``sum(output * g)``. Attacks set them token by token. Several attackers share a microbatch
with ordinary samples; each is measured against the ordinary ones alone, all others masked.

    >>> arena = ARENAS["linear+add"]()
    >>> target = attacked(arena, torch.float32)
    >>> for way, plan in plans_of(target, torch.float32).items():
    ...     found = measure(target, plan, clipping.flat(max_norm=1.0))          # {attack: ratio}
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp import keys, ops, tree
from fdp.attention import fast_attention
from fdp.fast.compiled import CompiledRunner
from fdp.foreign.adapters.lora import lora
from fdp.foreign.module import from_module
from fdp.foreign.uses.einsum import EINSUM
from fdp.foreign.uses.products import LINEAR_ROWS
from fdp.foreign.uses.rarer_products import BILINEAR
from fdp.foreign.uses.routing import ROUTED, pack
from fdp.gradients.costs import Choice, NormBy, SumBy
from fdp.gradients.execution import EAGER, STORE_ALL, Execution, Memory
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.gradients.tape import EXPANDED
from fdp.init import constant
from fdp.model import Block, LeafSpec, Model
from fdp.models import GPTConfig, gpt
from fdp.privacy import clipping
from fdp.privacy.clipping import ClipStyle
from fdp.types import Clip, Path, Tree
from tests.conftest import summed

WIDTH, TOKENS = 4, 8
BEFORE, AFTER = 5, 2
"""Ordinary samples before and after the attackers: a shared accumulator that is wiped out loses those before."""
SLACK = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""What a sample may move the sum by above the stated sensitivity."""
BOUND = 1.0
STYLES: dict[str, Callable[[Iterable[Path]], ClipStyle]] = {
    "flat": lambda paths: clipping.flat(max_norm=BOUND),
    "per-layer": lambda paths: clipping.per_layer(max_norm=BOUND),
    "per-group": lambda paths: _two_groups(sorted(paths)),
    "automatic": lambda paths: clipping.automatic(max_norm=BOUND),
    "quantile": lambda paths: clipping.quantile(
        max_norm=BOUND, target_quantile=0.5, learning_rate=0.2, count_noise=1.0
    ),
}


def _two_groups(paths: list[Path]) -> ClipStyle:
    first, rest = paths[:1], paths[1:]
    groups = {"first": first} | ({"rest": rest} if rest else {})
    return clipping.per_group(groups=groups, max_norms={name: 0.6 for name in groups})


# ---------------------------------------------------------------- levers


class Kind(NamedTuple):
    """A way to use a leaf, and what a sample holds to steer it.

    ``apply(levers, weight)`` is the output that ``levers["g"]`` multiplies. ``fill(x, g)`` are the levers of one sample
    for which token t adds ``x_t g_t`` to every element of the leaf's gradient (``one_sided``: ``x_t sign(g_t)``).
    ``once``: the tokens that together touch every element once.
    """

    shape: tuple[int, ...]
    apply: Callable[[Mapping[str, Tensor], ops.Weight], Tensor]
    fill: Callable[[Tensor, Tensor], dict[str, Tensor]]
    once: int = 1
    one_sided: bool = False


def _rows(z: Tensor, *more: int) -> Tensor:
    """One number for every token as equal rows."""
    return z.view(-1, *[1] * len(more)).expand(-1, *more).clone()


def _columns(z: Tensor, channels: int, repeat: int) -> Tensor:
    return z.repeat_interleave(repeat).expand(channels, -1).clone()


def _one(x: Tensor, g: Tensor) -> Tensor:
    return x * torch.where(g < 0, -1.0, 1.0) * torch.where(g == 0, 0.0, 1.0)


def _norm_fill(x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Normalised inputs are +-1: all size is in g."""
    signs = torch.tensor([1.0, -1.0]).repeat(WIDTH // 2)
    return {"x": _rows(torch.ones_like(x), WIDTH) * signs, "g": _rows(_one(x, g), WIDTH) * signs}


def _added(levers: Mapping[str, Tensor], weight: ops.Weight) -> Tensor:
    return ops.add(torch.zeros_like(levers["g"]), weight)


def _add(*shape: int) -> Kind:
    return Kind(shape, _added, lambda x, g: {"g": _rows(_one(x, g), *shape)}, one_sided=True)


def _scale(*shape: int) -> Kind:
    return Kind(
        shape,
        lambda levers, w: ops.scale(levers["x"], w),
        lambda x, g: {"x": _rows(x, *shape), "g": _rows(g, *shape)},
    )


def _product(apply: Callable[..., Tensor], *shape: int, inputs: int = WIDTH, outputs: int = WIDTH) -> Kind:
    return Kind(shape, apply, lambda x, g: {"x": _rows(x, inputs), "g": _rows(g, outputs)})


def _experts(x: Tensor, g: Tensor) -> dict[str, Tensor]:
    return {"x": _rows(x, WIDTH).expand(2, -1, -1).clone(), "g": _rows(g, WIDTH).expand(2, -1, -1).clone()}


SQUARE = (WIDTH, WIDTH)
MATRIX = {
    "linear": _product(lambda levers, w: ops.linear(levers["x"], w), *SQUARE),
    "matmul": _product(lambda levers, w: ops.matmul(levers["x"], w), *SQUARE),
    "rows": _product(lambda levers, w: ops.use(LINEAR_ROWS, levers["x"], w, start=0, stop=WIDTH), *SQUARE),
    "embedding": Kind(
        SQUARE,
        lambda levers, w: ops.embedding(levers["ids"], w),
        lambda x, g: {"ids": torch.arange(len(x)) % WIDTH, "g": _rows(_one(x, g), WIDTH)},
        once=WIDTH,
        one_sided=True,
    ),
    "scale": _scale(*SQUARE),
    "add": _add(*SQUARE),
}
VECTOR = {
    "scale": _scale(WIDTH),
    "add": _add(WIDTH),
    "layer_norm": Kind((WIDTH,), lambda levers, w: ops.layer_norm(levers["x"], w), _norm_fill, one_sided=True),
    "rms_norm": Kind((WIDTH,), lambda levers, w: ops.rms_norm(levers["x"], w), _norm_fill, one_sided=True),
}
LINE = {
    "conv1d": Kind(
        (WIDTH, WIDTH, 2),
        lambda levers, w: ops.conv1d(levers["x"], w, stride=2),
        lambda x, g: {"x": _columns(x, WIDTH, 2), "g": _columns(g, WIDTH, 1)},
    ),
    "grouped": Kind(
        (WIDTH, 2, 2),
        lambda levers, w: ops.conv1d(levers["x"], w, stride=2, groups=2),
        lambda x, g: {"x": _columns(x, WIDTH, 2), "g": _columns(g, WIDTH, 1)},
    ),
}
PLANE = {
    "conv2d": Kind(
        (WIDTH, WIDTH, 1, 2),
        lambda levers, w: ops.conv2d(levers["x"], w, stride=(1, 2)),
        lambda x, g: {"x": _columns(x, WIDTH, 2).unsqueeze(1), "g": _columns(g, WIDTH, 1).unsqueeze(1)},
    )
}
CUBE = {
    "experts": Kind((2, *SQUARE), lambda levers, w: ops.use(ops.EXPERTS, levers["x"], w), _experts),
    "einsum": Kind(
        (2, *SQUARE),
        lambda levers, w: ops.use(EINSUM, levers["x"], w, x_of="betd", w_of="edf", y_of="betf"),
        _experts,
    ),
    "whole": Kind(  # letters of W in an order that is no product of matrices: its record is a gradient
        (2, *SQUARE),
        lambda levers, w: ops.use(EINSUM, levers["x"], w, x_of="btd", w_of="edf", y_of="btef"),
        lambda x, g: {"x": _rows(x, WIDTH), "g": _rows(g, 2, WIDTH)},
    ),
    "add": _add(2, *SQUARE),
}
ADJOINT = {
    "conv_transpose": Kind(
        (WIDTH, WIDTH, 2),
        lambda levers, w: ops.conv_transpose1d(levers["x"], w, stride=2),
        lambda x, g: {"x": _columns(x, WIDTH, 1), "g": _columns(g, WIDTH, 2)},
    )
}
FORM = {"bilinear": _product(lambda levers, w: ops.use(BILINEAR, levers["x"], w), WIDTH, 2, 2)}
ROUTES = {
    "routed": Kind(
        (2, *SQUARE),
        lambda levers, w: ops.use(ROUTED, pack(levers["x"], levers["ids"]), w, transposed=False),
        lambda x, g: {"ids": torch.arange(len(x)) % 2, "x": _rows(x, WIDTH), "g": _rows(g, WIDTH)},
        once=2,
    )
}
ONE = {"one output": _product(lambda levers, w: ops.linear(levers["x"], w), 1, WIDTH, outputs=1)}
WINDOWS = {  # several windows of a user in one sample
    "windows": Kind(
        SQUARE,
        lambda levers, w: ops.linear(levers["x"], w),
        lambda x, g: {"x": _rows(x, WIDTH).view(2, -1, WIDTH), "g": _rows(g, WIDTH).view(2, -1, WIDTH)},
    )
}
FAMILIES = {
    "matrix": MATRIX,
    "vector": VECTOR,
    "line": {"conv1d": LINE["conv1d"], "add": _add(WIDTH, WIDTH, 2)},
    "grouped": {"grouped": LINE["grouped"], "scale": _scale(WIDTH, 2, 2)},
    "plane": PLANE,
    "cube": CUBE,
    "adjoint": ADJOINT,
    "form": FORM,
    "routes": ROUTES,
    "one": ONE,
    "windows": WINDOWS,
}


class Arena(NamedTuple):
    """Leaves and how each is used; the model of it takes its levers as data, ``<leaf>.<use>.<lever>``."""

    name: str
    leaves: dict[Path, tuple[Kind, ...]]
    model: Model
    params: Tree
    tokens: int


def make_arena(name: str, leaves: Mapping[Path, Sequence[Kind]], *, blocks: int = 1, tokens: int = TOKENS) -> Arena:
    """A model of these uses, the i-th use of every leaf in block ``i mod blocks``."""

    def part(which: int) -> Callable[[Tree, Tree, Tree], Tensor]:
        def apply(params: Tree, carry: Tree, data: Tree) -> Tensor:
            total = carry if isinstance(carry, Tensor) else 0.0
            for path, kinds in leaves.items():
                for i, kind in enumerate(kinds):
                    if i % blocks == which:
                        levers = {lever: data[f"{path}.{i}.{lever}"] for lever in ("x", "g", "ids")
                                  if f"{path}.{i}.{lever}" in data}  # fmt: skip
                        out = kind.apply(levers, params[path]) * levers["g"]
                        total = total + out.flatten(1).sum(1)
            return torch.as_tensor(total)

        return apply

    specs = {path: LeafSpec(kinds[0].shape, constant(0.0)) for path, kinds in leaves.items()}
    used = [{p: p for p, kinds in leaves.items() if len(range(w, len(kinds), blocks))} for w in range(blocks)]
    model = Model(name, specs, tuple(Block(f"part{w}", used[w], part(w)) for w in range(blocks)))
    draw = torch.Generator().manual_seed(11)
    params = {path: 0.1 * torch.randn(spec.shape, generator=draw) for path, spec in specs.items()}
    return Arena(name, {path: tuple(kinds) for path, kinds in leaves.items()}, model, tree.nest(params), tokens)


def _arenas() -> dict[str, Callable[[], Arena]]:
    found: dict[str, Callable[[], Arena]] = {}
    for family, kinds in FAMILIES.items():
        for name, kind in kinds.items():
            own = name if family not in ("vector", "cube", "line", "grouped") or name not in ("scale", "add") else None
            if own is not None:
                found[own] = lambda own=own, kind=kind: make_arena(own, {"w": [kind]})
        for (a, one), (b, other) in itertools.combinations_with_replacement(kinds.items(), 2):
            for blocks in (1, 2):
                own = f"{a}{'+' if blocks == 1 else '|'}{b}" + ("" if family == "matrix" else f" {family}")
                found[own] = lambda own=own, uses=(one, other), n=blocks: make_arena(own, {"w": uses}, blocks=n)
    tied = (MATRIX["embedding"], MATRIX["linear"])  # as in a language model: the head is pulled back first
    found["embedding|linear"] = lambda: make_arena("embedding|linear", {"w": tied}, blocks=2)
    return found


ARENAS = _arenas()
"""By name: a rule alone, ``a+b`` two uses in one block, ``a|b`` in two blocks."""


MANY = (
    "linear", "embedding", "one output", "conv1d", "experts", "linear+linear", "linear+embedding", "linear+scale",
    "linear+add", "embedding+add", "embedding+embedding", "add|add", "layer_norm|rms_norm vector", "whole+whole cube",
    "windows",
)  # fmt: skip


def joined(names: Sequence[str] = MANY, *, blocks: int = 2, tokens: int = TOKENS) -> Arena:
    """Several arenas as the leaves of one model: one compilation for all of them."""
    leaves = {_path(name): ARENAS[name]().leaves["w"] for name in names}
    return make_arena("joined", leaves, blocks=blocks, tokens=tokens)


def _path(name: str) -> Path:
    return name.replace("+", "_").replace("|", "_").replace(" ", "_")


# ---------------------------------------------------------------- samples

Tokens = tuple[Tensor, Tensor]
"""Of one use, what every token has for an input and for an output gradient: (x, g), each (TOKENS,) float64."""


def push(kind: Kind, x: float, g: float = 1.0, *, tokens: int = TOKENS) -> Tokens:
    """Every element of the use's gradient is ``x g``."""
    here = torch.arange(tokens) < kind.once
    return torch.where(here, x, 0.0).double(), torch.where(here, g, 0.0).double()


def mirror(x: float, g: float = 1.0, *, tokens: int = TOKENS) -> Tokens:
    """The second half of the tokens is the negative of the first: they cancel exactly."""
    signs = torch.where(torch.arange(tokens) < tokens // 2, 1.0, -1.0).double()
    return x * signs, torch.full((tokens,), g, dtype=torch.float64)


def nothing(tokens: int = TOKENS) -> Tokens:
    return torch.zeros(tokens, dtype=torch.float64), torch.zeros(tokens, dtype=torch.float64)


SEEDS = (20, 121, 147, 152, 161)
"""Of numbers whose Gram matrices, eight tokens in float64, lose all of the remainder or more."""


def remainder(e: float, tokens: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """Numbers of no pattern, exact in ``dtype``, whose sum is ``e`` or what rounding the last leaves of it."""
    x = torch.randn(tokens, generator=torch.Generator().manual_seed(seed)).to(dtype).double()
    x[-2:] = 0.0
    for last in (-2, -1):
        x[last] = ((e if last == -1 else 0.0) - x.sum()).to(dtype).double()
    return x


@cache
def rounds_most(dtype: torch.dtype, *, up: bool) -> float:
    """A number in [1, 1.4] whose square in ``dtype`` is rounded the most, relative to itself."""
    values = torch.linspace(1, 1.4, 20001).to(dtype).unique()
    error = ((values * values).double() - values.double().square()) / values.double().square()
    return float(values[(error if up else -error).argmax()])


MAGNITUDES = (1.0, 2.0**10, 1e4, 1e6, 1e8, 1e10, 2.0**40, 1e15, 2.0**60, 1e20, 1e25, 2.0**99, 1e30)
FEW = (1e4, 1e8, 2.0**40, 1e20, 1e30)


def attacks_on(
    kinds: Sequence[Kind], dtype: torch.dtype, *, few: bool = False, tokens: int = TOKENS
) -> dict[str, list[Tokens]]:
    """Named attacks on the uses of one leaf."""
    half, wide = tokens // 2, torch.finfo(dtype).max
    root = math.sqrt(wide)
    found: dict[str, list[Tokens]] = {}

    def everywhere(name: str, x: Tensor, g: Tensor) -> None:
        found[name] = [(x.clone(), g.clone()) for _ in kinds]

    def alike(x: float, g: float) -> Tokens:
        return torch.full((tokens,), x, dtype=torch.float64), torch.full((tokens,), g, dtype=torch.float64)

    def pushed(i: int, x: float, g: float = 1.0) -> Tokens:
        return push(kinds[i], x, g, tokens=tokens)

    mirrored = partial(mirror, tokens=tokens)
    for M in FEW if few else MAGNITUDES:
        everywhere(f"tokens +-{M:g}", *mirrored(M))
        everywhere(f"tokens +-{M:g}, gradients 1/{M:g}", *mirrored(M, 1 / M))
        if M <= 1e18:
            everywhere(f"tokens +-{M:g}, gradients {M:g}", *mirrored(M, M))
        x, g = mirrored(M)
        x[:half], x[half:], g[half:] = 3 * M, -M, 3.0
        everywhere(f"tokens 3 {M:g} and -{M:g}, gradients 1 and 3", x, g)
        x, g = mirrored(M)
        x[1] *= 1 + 1e-3
        everywhere(f"tokens +-{M:g} but for 1e-3", x, g)
        if len(kinds) == 2:
            e = 2.0 ** (-10 if dtype is torch.float32 else -4)
            found[f"uses +-{M:g}"] = [pushed(0, M), pushed(1, -M)]
            found[f"uses +-{M:g}, tokens {M:g}, gradients 1/{M:g}"] = [pushed(0, M, 1 / M), pushed(1, -1.0)]
            found[f"uses +-{M:g} but for {e:g}"] = [pushed(0, M), pushed(1, -M * (1 + e))]
            found[f"second use +-{M:g}"] = [nothing(tokens), mirrored(M)]
    for k in (26, 27, 28) if few else (22, 24, 25, 26, 27, 28, 30):
        # What is left is of the size of what rounding takes from a Gram matrix.
        for M in (2.0**66,) if few else (2.0**27, 2.0**66, 2.0**99):
            x = M * remainder(2.0**-k, tokens, dtype, seed=SEEDS[k % len(SEEDS)])
            everywhere(f"tokens of {M:g} that leave 2^-{k} of it", x, torch.ones_like(x))
            if len(kinds) == 2:
                found[f"second use of {M:g} that leaves 2^-{k} of it"] = [nothing(tokens), (x, torch.ones_like(x))]
                left = pushed(1, -M)
                left[0][kinds[1].once : 2 * kinds[1].once] = M * 2.0**-k
                left[1][kinds[1].once : 2 * kinds[1].once] = 1.0
                found[f"uses +-{M:g} and 2^-{k} of it"] = [pushed(0, M), left]
    for up in (True, False):
        v, way = rounds_most(dtype, up=up), "up" if up else "down"
        square = float((torch.tensor(v, dtype=dtype) ** 2).double())
        for scale in (1.0, 2.0**20) if few else (1.0, 2.0**10, 2.0**20, 2.0**30):
            everywhere(f"{way}-rounded +-{scale:g}", *mirrored(scale * v, scale * v))
            for k in () if len(kinds) == 1 else (0.0, 1.0) if few else (0.0, 0.5, 1.0, 2.0):
                # Here a squared norm that mixes rounded and exact numbers is least, and may be 0.
                rest = -scale * scale * (square - k * math.sqrt(2 * abs(square - v * v) * square))
                name = f"{way}-rounded squares of {scale:g} less {k:g}"
                found[name] = [pushed(0, scale * v, scale * v), pushed(1, rest)]
                found[f"{name}, turned"] = [pushed(0, rest), pushed(1, scale * v, scale * v)]
    for name, value in {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "denormal": 1e-40}.items():
        for side in (0, 1):
            both = mirrored(1.0)
            both[side][2] = value
            everywhere(f"one {name} {('token', 'gradient')[side]}", *both)
    everywhere("infinite tokens without gradients", *alike(math.inf, 0.0))
    everywhere("all equal", *alike(3.0, 2.0))
    everywhere("zeros", *nothing(tokens))
    everywhere("denormals", *mirrored(1e-40, 1e-40))
    everywhere("largest", *alike(0.9 * wide, 1.0))
    everywhere("largest, cancelling", *mirrored(0.9 * wide))
    everywhere("products just above the largest", *mirrored(1.1 * root, root))
    everywhere("products just below the largest", *mirrored(0.9 * root, root))
    x, g = mirrored(1e-6)
    x[0] = 1e12
    everywhere("one huge among tiny", x, g)
    everywhere("huge loss", torch.arange(1.0, tokens + 1).double(), alike(0.0, 1e12)[1])
    return found


class Target(NamedTuple):
    """A model and a microbatch of ordinary samples and attackers, each of which has a name."""

    name: str
    model: Model
    params: Tree
    data: dict[str, Tensor]
    attackers: tuple[str, ...]
    quiet: dict[str, Tensor]
    """The same microbatch with ordinary samples in the attackers' places."""
    before: int = BEFORE
    after: int = AFTER

    @property
    def size(self) -> int:
        return self.before + len(self.attackers) + self.after


def levers_of(arena: Arena, path: Path, tokens: Sequence[Tokens], dtype: torch.dtype) -> dict[str, Tensor]:
    """One sample that attacks ``path``; the levers of all other leaves are 0."""
    sample: dict[str, Tensor] = {}
    for leaf, kinds in arena.leaves.items():
        for i, kind in enumerate(kinds):
            x, g = tokens[i] if leaf == path else nothing(arena.tokens)
            for lever, value in kind.fill(x, g).items():
                sample[f"{leaf}.{i}.{lever}"] = value if lever == "ids" else value.to(dtype)
    return sample


_ORDINARY: dict[Any, list[dict[str, Tensor]]] = {}


def ordinary(arena: Arena, count: int, dtype: torch.dtype, *, seed: int = 0) -> list[dict[str, Tensor]]:
    """Samples of no malice, some below the bound and some above; the same for the same arguments."""
    key = (tuple(arena.leaves.items()), arena.tokens, count, dtype, seed)
    if key not in _ORDINARY:
        _ORDINARY[key] = _draw_ordinary(arena, count, dtype, seed)
    return _ORDINARY[key]


def _draw_ordinary(arena: Arena, count: int, dtype: torch.dtype, seed: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    sizes = [1.0, 0.01, 3.0, 0.3, 1.0, 0.1, 10.0]
    found = []
    for b in range(count):
        sample = levers_of(arena, "", (), dtype)
        for name, lever in sample.items():
            if lever.is_floating_point():
                size = sizes[b % len(sizes)] if name.endswith("g") else 1.0
                sample[name] = (size * (torch.randn(lever.shape, generator=draw) + 0.5)).to(dtype)
            else:
                sample[name] = torch.randint(0, WIDTH, lever.shape, generator=draw)
        found.append(sample)
    return found


def together(name: str, arena: Arena, attackers: Mapping[str, dict[str, Tensor]], dtype: torch.dtype) -> Target:
    """Attackers among ordinary samples."""
    others = ordinary(arena, BEFORE + AFTER + len(attackers), dtype)
    before, after, instead = others[:BEFORE], others[BEFORE : BEFORE + AFTER], others[BEFORE + AFTER :]

    def stacked(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {lever: torch.stack([sample[lever] for sample in samples]) for lever in samples[0]}

    data = stacked([*before, *attackers.values(), *after])
    return Target(name, arena.model, arena.params, data, tuple(attackers), stacked([*before, *instead, *after]))


def neighbours(arena: Arena, path: Path, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Two uses by one rule, of elements without a pattern, that differ by one unit in the last place of each."""
    kinds = arena.leaves[path]
    uses = [push(kind, sign * 2.0**60, tokens=arena.tokens) for kind, sign in zip(kinds, (1.0, -1.0))]
    sample = levers_of(arena, path, uses, dtype)
    one, other = (f"{path}.{i}.g" for i in range(2))
    draw = torch.Generator().manual_seed(seed)
    sample[one] = sample[one] * (1 + torch.rand(sample[one].shape, generator=draw)).to(dtype)
    sign = -1.0 if kinds[0].one_sided else 1.0  # where g alone says which way
    sample[other] = sign * torch.nextafter(sample[one], torch.full_like(sample[one], math.inf))
    return sample


def attacked(arena: Arena, dtype: torch.dtype, *, few: bool = False, parts: Sequence[str] | None = None) -> Target:
    """Every attack on every leaf of the arena; with ``parts``, those whose names have one of them."""
    samples: dict[str, dict[str, Tensor]] = {}
    for path, kinds in arena.leaves.items():
        for attack, tokens in attacks_on(kinds, dtype, few=few, tokens=arena.tokens).items():
            if parts is not None and not any(part in attack for part in parts):
                continue
            samples[f"{path}: {attack}"] = levers_of(arena, path, tokens, dtype)
        if parts is None and len(kinds) == 2 and kinds[0] is kinds[1]:
            samples[f"{path}: neighbours"] = neighbours(arena, path, dtype, seed=0)
    return together(arena.name, arena, samples, dtype)


def crowded(arena: Arena, path: Path, dtype: torch.dtype, *, size: int, M: float = 2.0**40, honest: int = 16) -> Target:
    """Ordinary samples, one at a time, in a crowd of ``size`` that all cancel.

    A norm with a floor lets a sample that cancels have parts far above the bound; what many of them share is coarser.
    """
    kinds = arena.leaves[path]
    uses = [mirror(M, M, tokens=arena.tokens)]
    if len(kinds) == 2:
        uses = [push(kind, sign * M, M, tokens=arena.tokens) for kind, sign in zip(kinds, (1.0, -1.0))]
        uses = [(x * M, g / M) if kind.one_sided else (x, g) for kind, (x, g) in zip(kinds, uses)]
    one = levers_of(arena, path, uses, dtype)
    others = ordinary(arena, honest, dtype, seed=5)
    samples = [{name: 100 * z if name.endswith(".g") else z for name, z in sample.items()} for sample in others]

    def stacked(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        before = {name: z.expand(size - AFTER, *z.shape) for name, z in one.items()}
        after = {name: z.expand(AFTER, *z.shape) for name, z in one.items()}
        return {name: torch.cat([before[name], torch.stack([each[name] for each in samples]), after[name]])
                for name in one}  # fmt: skip

    names = tuple(f"{path}: one honest of {size} that cancel, {i}" for i in range(honest))
    return Target(arena.name, arena.model, arena.params, stacked(samples), names, stacked([one] * honest), size - AFTER)


# ---------------------------------------------------------------- whole models, adapters, foreign modules


def among(
    name: str, model: Model, params: Tree, samples: Mapping[str, Tensor], attackers: Mapping[str, Mapping[str, Tensor]]
) -> Target:
    """``samples`` (enough of them) with what ``attackers`` change of one sample each."""
    quiet = {field: leaf[: BEFORE + len(attackers) + AFTER].clone() for field, leaf in samples.items()}
    data = {field: leaf.clone() for field, leaf in quiet.items()}
    for k, changes in enumerate(attackers.values()):
        for field, value in changes.items():
            data[field][BEFORE + k] = value
    return Target(name, model, params, data, tuple(attackers), quiet)


GAINS = (1.0, -1.0, 0.0, 1e-40, 1e6, -1e12, 1e20, 1e30, 3e38, math.nan, math.inf, -math.inf)


def with_gain(model: Model) -> Model:
    """Each sample's loss times its own ``gain``: a sample as extreme as we like."""
    *blocks, last = model.blocks
    head = last.head
    assert head is not None

    def weights(data: Tree) -> Tensor:
        own = None if head.weights is None else head.weights(data)
        each = torch.full_like(head.targets(data), 1, dtype=torch.float32) / head.targets(data).shape[1]
        return (each if own is None else own) * data["gain"].unsqueeze(1)

    def apply(params: Tree, carry: Tree, data: Tree) -> Tensor:
        return last.apply(params, carry, data) * data["gain"]

    return model._replace(blocks=(*blocks, last._replace(apply=apply, head=head._replace(weights=weights))))


def language(*, tied: bool, windows: int = 0, packed: bool = False, adapters: bool = False) -> Target:
    """A small language model; several windows of a user, or several documents, in a sample; adapters alone trained."""
    context, words = 6, 11
    config = GPTConfig(layers=1, width=8, heads=2, context=context, vocab_size=words, tied=tied)
    model = with_gain(gpt(config))
    key, draw = keys.key(0), torch.Generator().manual_seed(4)
    shaken = {p: w + 0.5 * keys.normal(keys.fold_in(key, p), tuple(w.shape))
              for p, w in tree.flatten(model.init(key)).items()}  # fmt: skip
    params = tree.nest(shaken)
    if adapters:
        model, params = lora(model, params, rank=2, alpha=4.0, targets=("*qkv", "*out"), key=key)
        drawn = {p: 0.5 * torch.randn(w.shape, generator=draw) for p, w in tree.flatten(params).items() if "lora" in p}
        params = tree.nest(tree.flatten(params) | drawn)
    count = BEFORE + len(GAINS) + AFTER
    shape = (count, windows, context + 1) if windows else (count, context + 1)
    samples = {"tokens": torch.randint(0, words, shape, generator=draw), "gain": torch.ones(count)}
    if windows or packed:
        samples["loss_mask"] = torch.rand(*shape[:-1], context, generator=draw) < 0.8
        samples["loss_mask"][..., 0] = True
    if packed:
        segments = torch.tensor([1, 1, 1, 2, 2, 3, 3]).expand(shape)
        samples["segments"] = segments[..., :-1].clone()
        samples["loss_mask"] = samples["loss_mask"] & (segments[..., 1:] == segments[..., :-1])
    words_of = [w for w, on in {"tied": tied, "untied": not tied, "windows": windows, "packed": packed}.items() if on]
    name = "gpt " + " ".join([*words_of, *(["lora"] if adapters else [])])
    return among(name, model, params, samples, {f"gain {gain:g}": {"gain": torch.tensor(gain)} for gain in GAINS})


def adapted(dtype: torch.dtype) -> Target:
    """Adapters of one linear layer whose inputs and output gradients a sample chooses."""
    arena = ARENAS["linear"]()
    model, params = lora(arena.model, arena.params, rank=2, alpha=4.0, targets=("w",), key=keys.key(1))
    draw = torch.Generator().manual_seed(8)
    params = {p: torch.randn(w.shape, generator=draw) for p, w in tree.flatten(params).items()}
    return attacked(arena._replace(name="lora", model=model, params=tree.nest(params)), dtype, few=True)


class Foreign(nn.Module):
    """A module that uses its weights in every way that modules do; it returns its losses."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)

        def leaf(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.3 * torch.randn(shape, generator=draw))

        self.square, self.bias, self.scale = leaf(*SQUARE), leaf(WIDTH), leaf(WIDTH)
        self.experts, self.kernel, self.packed = leaf(2, *SQUARE), leaf(WIDTH, WIDTH, 2), leaf(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, g: Tensor, ids: Tensor) -> Tensor:
        y = F.linear(x, self.square, self.bias) + F.embedding(ids, self.square) + x @ self.square + x * self.scale
        y = y + torch.einsum("btd,edf->btef", x, self.experts).sum(2) + F.rms_norm(x, (WIDTH,), self.scale)
        y = y + F.linear(x, self.packed[:WIDTH]) + self.bias
        line = F.conv1d(x.transpose(1, 2), self.kernel, stride=2) * g.transpose(1, 2)[..., ::2]
        return (y * g).sum((1, 2)) + line.sum((1, 2))


def foreign(dtype: torch.dtype) -> Target:
    """The module above under the attacks on a linear layer."""
    kind = MATRIX["linear"]
    attacks = attacks_on([kind], dtype, few=True)
    attackers = {name: {lever: value.to(dtype) for lever, value in kind.fill(*tokens[0]).items()}
                 for name, tokens in attacks.items()}  # fmt: skip
    draw, count = torch.Generator().manual_seed(6), BEFORE + len(attackers) + AFTER
    samples = {lever: torch.randn(count, TOKENS, WIDTH, generator=draw).to(dtype) for lever in ("x", "g")}
    samples["ids"] = (torch.arange(TOKENS) % WIDTH).expand(count, TOKENS).clone()
    example = {name: leaf[:3].float() if leaf.is_floating_point() else leaf[:3] for name, leaf in samples.items()}
    model, params = from_module(Foreign(), example=example, check=False)
    return among("foreign module", model, params, samples, attackers)


class Pooled(nn.Module):
    """Tokens encoded, averaged, classified."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.head = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enc(x).mean(1))


def pooled(dtype: torch.dtype) -> Target:
    """An ordinary module with an ordinary loss; one sample's tokens are +M and -M."""
    attackers: dict[str, dict[str, Tensor]] = {}
    for M in MAGNITUDES:
        x = torch.zeros(TOKENS, 8)
        x[0], x[1] = M, -M
        attackers[f"tokens +-{M:g}"] = {"x": x.to(dtype)}
        x = x.clone()
        x[2:] = 1.0
        attackers[f"tokens +-{M:g} among ones"] = {"x": x.to(dtype)}
    draw, count = torch.Generator().manual_seed(6), BEFORE + len(attackers) + AFTER
    samples = {"x": (torch.randn(count, TOKENS, 8, generator=draw) + 1).to(dtype), "label": torch.arange(count) % 4}
    example = {"x": samples["x"][:3].float(), "label": samples["label"][:3]}

    def loss(out: Tensor, data: Tree) -> Tensor:
        return F.cross_entropy(out, data["label"], reduction="none")

    model, params = from_module(Pooled(), loss=loss, example=example, check=False)
    return among("pooled module", model, params, samples, attackers)


TARGETS: dict[str, Callable[[torch.dtype], Target]] = {
    "gpt-tied": lambda dtype: language(tied=True),
    "gpt-untied": lambda dtype: language(tied=False),
    "gpt-windows": lambda dtype: language(tied=True, windows=2),
    "gpt-packed": lambda dtype: language(tied=True, packed=True),
    "gpt-windows-packed": lambda dtype: language(tied=False, windows=2, packed=True),
    "gpt-lora": lambda dtype: language(tied=True, adapters=True),
    "lora": adapted,
    "foreign": foreign,
    "pooled": pooled,
}


# ---------------------------------------------------------------- ways to norms and sums

WAYS = (
    (NormBy.KEEP, SumBy.REUSE),
    (NormBy.DIRECT, SumBy.PAIR),
    (NormBy.GRAM, SumBy.PAIR),
    (NormBy.SYMMETRIC, SumBy.PAIR),
    (NormBy.DIRECT, SumBy.SECOND_BACKWARD),
    (NormBy.GRAM, SumBy.SECOND_BACKWARD),
    (NormBy.SYMMETRIC, SumBy.SECOND_BACKWARD),
)


IN_8_BITS = (NormBy.KEEP_INT8, SumBy.REUSE)
"""For a leaf that is used once, or as a head and embeddings where kernels run."""


def forced(plan: Plan, norm: NormBy, sum: SumBy, *, leaves: Iterable[Path] | None = None) -> Plan:
    """The plan with this choice for ``leaves`` (default: all), or the nearest that a leaf may have.

    Small parameters are kept, or measured directly where a second backward makes them again.
    """
    rules: dict[Path, set[str]] = {}
    for use in itertools.chain.from_iterable(plan.uses):
        rules.setdefault(use.path, set()).add(use.rule)
    choices = dict(plan.choices)
    for path in choices if leaves is None else leaves:
        if choices[path].norm is NormBy.VMAP:
            continue
        small = rules[path] == {EXPANDED}
        if small:
            by = (NormBy.DIRECT, SumBy.SECOND_BACKWARD) if sum is SumBy.SECOND_BACKWARD else (NormBy.KEEP, SumBy.REUSE)
        else:
            by = (norm, sum)
        choices[path] = Choice(*by, 0.0, 0.0)
    return plan._replace(choices=choices)


def named(choice: Choice) -> str:
    return f"{choice.norm.value}/{choice.sum.value}"


def plans_of(
    target: Target, dtype: torch.dtype, *, methods: bool = True, device: torch.device | None = None
) -> dict[str, Plan]:
    """Every way that all leaves can go, by name; with ``methods``, also those that methods and budgets choose, and
    every leaf by a way of its own."""
    model, params, data = target.model, target.params, target.data

    def planned(method: Method, budget: float | None = None) -> Plan:
        return make_plan(model, params, data, method=method, memory_budget=budget, dtype=dtype, device=device)

    auto = planned(Method.AUTO)
    found: dict[str, Plan] = {}

    def add(name: str, plan: Plan) -> None:
        own = [choice[:2] for choice in plan.choices.values()]
        if all(own != [choice[:2] for choice in old.choices.values()] for old in found.values()):
            found[name] = plan

    for norm, total in WAYS:
        add(f"{norm.value}/{total.value}", forced(auto, norm, total))
    if methods:
        add("vmap", planned(Method.MATERIALIZE))
        half = auto.stored_bytes / 2
        for method in (Method.AUTO, Method.FLASH):
            for budget in (None, 0.0, half):
                add(f"{method.value} within {budget}", planned(method, budget))
        for method in (Method.GHOST, Method.GHOST_BK, Method.FLASH_BK):
            add(method.value, planned(method))
        if len(auto.choices) > 1:
            mixed = auto
            for i, path in enumerate(auto.choices):
                mixed = forced(mixed, *WAYS[i % len(WAYS)], leaves=[path])
            add("mixed", mixed)
    return found


# ---------------------------------------------------------------- measurement


class Seen(NamedTuple):
    """By attack, how far it moved the sum; and, where asked for, how far the others' part: over the sensitivity."""

    ratios: dict[str, float]
    disturbed: dict[str, float]

    def worst(self) -> tuple[str, float]:
        return max(self.ratios.items(), key=lambda entry: entry[1])


def measure(
    target: Target,
    plan: Plan,
    style: ClipStyle,
    *,
    disturbed: bool = False,
    only: Sequence[str] | None = None,
    replaced: Mapping[Path, Tensor] | None = None,
    **how: Any,
) -> Seen:
    """Add every attacker (or those of ``only``) to the ordinary samples, one at a time, and compare sums in float64.

    Absent is an attacker whose mask is 0, and one in whose place another sample stood (``replaced``, if at hand, is the
    sum of that): the larger movement counts. ``disturbed``: also |S(with) - S(without) - S(the attacker alone)|, which
    is 0 but for rounding in what is shared. ``how``: as in :func:`sums_of`.
    """
    sums = sums_of(target, target.data, plan, style, **how)
    mask = ordinary_ones(target)
    masked, sensitivity = sums(mask)
    if replaced is None:
        replaced, _ = sums_of(target, target.quiet, plan, style, **how)(mask)
    absent = [masked] if all(torch.equal(masked[p], replaced[p]) for p in masked) else [masked, replaced]
    ratios, disturbance = {}, {}
    for k, name in enumerate(target.attackers):
        if only is not None and name not in only:
            continue
        one = torch.zeros_like(mask)
        one[target.before + k] = 1.0
        present, _ = sums(mask + one)
        ratios[name] = max(_distance(present, other) for other in absent) / sensitivity
        if disturbed:
            disturbance[name] = _distance(present, masked, sums(one)[0]) / sensitivity
    return Seen(ratios, disturbance)


def ordinary_ones(target: Target) -> Tensor:
    """The mask of the ordinary samples."""
    mask = torch.zeros(target.size, device=next(iter(target.data.values())).device)
    mask[: target.before], mask[target.before + len(target.attackers) :] = 1.0, 1.0
    return mask


def sums_of(
    target: Target,
    data: Tree,
    plan: Plan,
    style: ClipStyle,
    *,
    blocks: CompiledRunner | None = None,
    lazy: bool = False,
    memory: Memory = STORE_ALL,
    leaf: Path | None = None,
    **how: Any,
) -> Callable[[Tensor], tuple[dict[Path, Tensor], float]]:
    """One pass for the norms; then the clipped sum of any samples, by their mask, and its sensitivity.

    ``leaf``: of this leaf only, where attackers leave all others alone.
    """
    device = next(iter(target.data.values())).device
    again = any(choice.sum is SumBy.SECOND_BACKWARD for choice in plan.choices.values())
    with fast_attention(device, repeatable=again):  # as in a step: a second backward must find what the first measured
        _, norms, stash = per_sample_norms(
            target.model,
            target.params,
            data,
            plan=plan,
            execution=Execution(memory=memory, runner=blocks or EAGER),
            **how,
        )
    clip: Clip = style.clip(norms, tree.map(lambda state: state.to(norms.total().device), style.init()))
    if leaf is not None:
        rest = Choice(NormBy.KEEP, SumBy.REUSE, 0.0, 0.0)
        choices = {path: choice if path == leaf else rest for path, choice in plan.choices.items()}
        records = {path: found for path, found in stash.records.items() if path == leaf}
        stash = stash._replace(records=records, plan=plan._replace(choices=choices))
        clip = Clip({leaf: clip.factors[leaf]}, clip.sensitivity)

    def total(mask: Tensor) -> tuple[dict[Path, Tensor], float]:
        with fast_attention(device, repeatable=again):
            found = summed(stash, clip.masked(mask), lazy=lazy)
        return {path: value.double() for path, value in found.value.items()}, float(found.sensitivity)

    return total


def _distance(a: Mapping[Path, Tensor], *others: Mapping[Path, Tensor]) -> float:
    """The norm of ``a`` less all others; infinite where anything is not finite."""
    left = [leaf - torch.stack([other[path] for other in others]).sum(0) for path, leaf in a.items()]
    size = float(torch.stack([part.square().sum() for part in left]).sum().sqrt())
    return size if math.isfinite(size) else math.inf


def breaches(
    target: Target, ways: Mapping[str, Plan], styles: Iterable[str], dtype: torch.dtype, **how: Any
) -> list[str]:
    """One line for every attack that moved the sum too far."""
    found = []
    for way, plan in ways.items():
        for style in styles:
            seen = measure(target, plan, STYLES[style](target.model.trainable), **how)
            found += [
                f"{target.name}, {attack}, {way}, {style}, {str(dtype).removeprefix('torch.')}: {ratio:.9g}"
                for attack, ratio in seen.ratios.items()
                if not ratio <= 1 + SLACK[dtype]
            ]
    return found


def on(target: Target, device: torch.device) -> Target:
    """The same on another device."""
    params = tree.map(lambda leaf: leaf.to(device), target.params)
    data, quiet = ({name: leaf.to(device) for name, leaf in part.items()} for part in (target.data, target.quiet))
    return target._replace(params=params, data=data, quiet=quiet)
