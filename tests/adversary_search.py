"""A search for the sample that moves a clipped sum the most: mutate attacks, keep what is worse, start again.

    score = excess of the ratio over 1, else how far others' part of the sum is disturbed

A sample that is clipped moves the sum by just under the bound, whatever it holds; what tells a better attack from a
worse one below it is how much rounding it leaves in what all samples share. Attackers of a generation share one
microbatch, so that one plan, and one compilation, serves the whole search.

    >>> search = Search(ARENAS["linear+add"](), torch.float32, seed=0)
    >>> for way, plan in search.plans().items():
    ...     found = search.climb("w", plan, seconds=2.0)                # Found(ratio, disturbed, tokens, tried)
"""

from __future__ import annotations

import math
import random
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp.fast.compiled import CompiledRunner
from fdp.gradients.plan import Plan
from fdp.types import Path
from tests.adversary import (
    STYLES,
    Arena,
    Target,
    Tokens,
    attacks_on,
    levers_of,
    measure,
    mirror,
    on,
    ordinary_ones,
    plans_of,
    push,
    rounds_most,
    sums_of,
    together,
)

GENERATION = 16
"""Attackers in a microbatch."""
PATIENCE = 12
"""Generations without a worse one, after which the search starts again."""


class Found(NamedTuple):
    """A sample: how far it moved the sum, how far it disturbed the others, what it is; and how many were tried."""

    ratio: float
    disturbed: float
    tokens: list[Tokens]
    tried: int = 1

    @property
    def score(self) -> float:
        return math.inf if not math.isfinite(self.ratio) else 1e6 * max(self.ratio - 1, 0.0) + self.disturbed


class Search:
    """Attacks on the leaves of one arena; the same seed tries the same samples in the same order."""

    def __init__(
        self,
        arena: Arena,
        dtype: torch.dtype,
        *,
        seed: int,
        device: torch.device | None = None,
        blocks: CompiledRunner | None = None,
        generation: int = GENERATION,
        few: bool = False,
    ):
        self.arena, self.dtype, self.device, self.blocks = arena, dtype, device, blocks
        self.draw, self.generation, self.few = random.Random(seed), generation, few
        self._attacks: dict[Path, dict[str, list[Tokens]]] = {}
        self._replaced: dict[tuple[str, str, Path], dict[Path, Tensor]] = {}

    def attacks(self, path: Path) -> dict[str, list[Tokens]]:
        """The named attacks on a leaf."""
        if path not in self._attacks:
            kinds, tokens = self.arena.leaves[path], self.arena.tokens
            self._attacks[path] = attacks_on(kinds, self.dtype, few=self.few, tokens=tokens)
        return self._attacks[path]

    def plans(self) -> dict[str, Plan]:
        """Every way to norms and sums, for microbatches of this search."""
        path = next(iter(self.arena.leaves))
        target = self._target(path, list(self.attacks(path).values())[: self.generation])
        return plans_of(target, self.dtype, methods=False, device=self.device)

    def all_named(self, path: Path, plan: Plan, style: str = "flat") -> dict[str, Found]:
        """Every named attack on a leaf."""
        attacks = self.attacks(path)
        return dict(zip(attacks, self._tried(path, plan, style, list(attacks.values()))))

    def climb(self, path: Path, plan: Plan, *, seconds: float, style: str = "flat") -> Found:
        """The worst sample found in ``seconds``; at least one generation is tried."""
        until = time.perf_counter() + seconds
        attacks = list(self.attacks(path).values())
        best: Found | None = None
        tried = 0
        while best is None or time.perf_counter() < until:
            here = self._worst(path, plan, style, self.draw.sample(attacks, min(self.generation, len(attacks))))
            tried, idle = tried + here.tried, 0
            while idle < PATIENCE and time.perf_counter() < until:
                others = [self._mutated(here.tokens, path) for _ in range(self.generation)]
                found = self._worst(path, plan, style, others)
                tried += found.tried
                here, idle = (found, 0) if found.score > here.score else (here, idle + 1)
            best = here if best is None or here.score > best.score else best
        return best._replace(tried=tried)

    def _target(self, path: Path, attacks: list[list[Tokens]]) -> Target:
        samples = {str(i): levers_of(self.arena, path, tokens, self.dtype) for i, tokens in enumerate(attacks)}
        target = together(self.arena.name, self.arena, samples, self.dtype)
        return target if self.device is None else on(target, self.device)

    def _worst(self, path: Path, plan: Plan, style: str, attacks: list[list[Tokens]]) -> Found:
        found = self._tried(path, plan, style, attacks)
        return max(found, key=lambda each: each.score)._replace(tried=len(found))

    def _tried(self, path: Path, plan: Plan, style: str, attacks: list[list[Tokens]]) -> list[Found]:
        how: dict[str, Any] = {"blocks": self.blocks, "leaf": path if len(self.arena.leaves) > 1 else None}
        by = STYLES[style](self.arena.model.trainable)
        key = (str([choice[:2] for choice in plan.choices.values()]), style, path)
        found: list[Found] = []
        for first in range(0, len(attacks), self.generation):
            some = attacks[first : first + self.generation]
            target = self._target(path, some + some[:1] * (self.generation - len(some)))
            if key not in self._replaced:
                self._replaced[key], _ = sums_of(target, target.quiet, plan, by, **how)(ordinary_ones(target))
            seen = measure(target, plan, by, disturbed=True, replaced=self._replaced[key], **how)
            found += [Found(seen.ratios[str(i)], seen.disturbed[str(i)], each) for i, each in enumerate(some)]
        return found

    def _mutated(self, uses: list[Tokens], path: Path) -> list[Tokens]:
        """Another attack, one to three changes away."""
        uses = [(x.clone(), g.clone()) for x, g in uses]
        for _ in range(self.draw.randint(1, 3)):
            change = self.draw.choice(
                [self._resize, self._trade, self._mirror, self._turn, self._nudge, self._special, self._borrow,
                 self._oppose, self._rest, self._powers]
            )  # fmt: skip
            change(uses, path)
        return uses

    def _one(self, uses: list[Tokens]) -> Tokens:
        return self.draw.choice(uses)

    def _resize(self, uses: list[Tokens], path: Path) -> None:
        """One side of a use, or of all, times a power of two."""
        side, factor = self.draw.randint(0, 1), 2.0 ** self.draw.randint(-30, 30)
        for use in [self._one(uses)] if self.draw.random() < 0.5 else uses:
            use[side].mul_(factor)

    def _trade(self, uses: list[Tokens], path: Path) -> None:
        """Larger inputs, smaller output gradients, or the other way round: the same gradient."""
        x, g = self._one(uses)
        factor = 2.0 ** self.draw.randint(-60, 60)
        x.mul_(factor)
        g.div_(factor)

    def _mirror(self, uses: list[Tokens], path: Path) -> None:
        x, g = self._one(uses)
        half, factor = len(x) // 2, 2.0 ** self.draw.randint(-4, 4)
        x[half:], g[half:] = -factor * x[:half], g[:half] / factor

    def _turn(self, uses: list[Tokens], path: Path) -> None:
        """Tokens that cancel although both their sides differ: x g - g x."""
        x, g = self._one(uses)
        half = len(x) // 2
        x[half:], g[half:] = -g[:half].clone(), x[:half].clone()

    def _nudge(self, uses: list[Tokens], path: Path) -> None:
        """One number by one unit in the last place of the dtype."""
        z = self._one(uses)[self.draw.randint(0, 1)]
        t = self.draw.randrange(len(z))
        narrow = z[t].to(self.dtype)
        z[t] = torch.nextafter(narrow, torch.full_like(narrow, self.draw.choice([-math.inf, math.inf]))).double()

    def _special(self, uses: list[Tokens], path: Path) -> None:
        z = self._one(uses)[self.draw.randint(0, 1)]
        info = torch.finfo(self.dtype)
        values = [0.0, 1.0, info.max, math.sqrt(info.max), info.tiny, info.tiny * info.eps, 2.0**24, 2.0**53,
                  rounds_most(self.dtype, up=True), rounds_most(self.dtype, up=False)]  # fmt: skip
        if self.draw.random() < 0.05:
            values = [math.nan, math.inf, -math.inf]
        z[self.draw.randrange(len(z))] = self.draw.choice([-1, 1]) * self.draw.choice(values)

    def _borrow(self, uses: list[Tokens], path: Path) -> None:
        """A use of another attack in the place of one."""
        i = self.draw.randrange(len(uses))
        x, g = self.draw.choice(list(self.attacks(path).values()))[i]
        uses[i] = (x.clone(), g.clone())

    def _oppose(self, uses: list[Tokens], path: Path) -> None:
        """Two uses that add up to nothing, or to what rounding leaves of it."""
        if len(uses) < 2:
            return self._mirror(uses, path)
        kinds = self.arena.leaves[path]
        x, g = (self._size() for _ in range(2))
        exact = torch.tensor(x, dtype=self.dtype).double() * torch.tensor(g, dtype=self.dtype).double()
        value = float(exact if self.draw.random() < 0.5 else exact.to(self.dtype))
        a, b = self.draw.sample([0, 1], 2)
        uses[a] = push(kinds[a], x, g, tokens=self.arena.tokens)
        uses[b] = push(kinds[b], -value, tokens=self.arena.tokens)

    def _rest(self, uses: list[Tokens], path: Path) -> None:
        """All but a small part cancels."""
        x, _ = self._one(uses)
        x[self.draw.randrange(len(x))] *= 1 + 2.0 ** self.draw.randint(-24, -1)

    def _powers(self, uses: list[Tokens], path: Path) -> None:
        i = self.draw.randrange(len(uses))
        uses[i] = mirror(self._size(), self._size(), tokens=self.arena.tokens)

    def _size(self) -> float:
        mantissa = self.draw.choice([1.0, 1.0, rounds_most(self.dtype, up=True), 1 + self.draw.random()])
        return mantissa * 2.0 ** self.draw.randint(-40, 60)


def as_written(tokens: list[Tokens]) -> list[dict[str, list[str]]]:
    """Exact and short: what a report keeps of a sample."""

    def numbers(z: Tensor) -> list[str]:
        return [float(value).hex() for value in z]

    return [{"x": numbers(x), "g": numbers(g)} for x, g in tokens]
