"""Uses of parameters that no result depends on: left out, because they have no part in the loss.

A module that is run for what comes after its layers does again what comes before them, for nothing. Where a parameter
has a part in both (a table of embeddings that is also the head), the uses that are for nothing are told apart once,
by differentiating with respect to taps without memory, and skipped by their number.

    >>> dead = dead_uses(run, params, data)                    # {name: numbers of the uses that reach no result}
    >>> run(skipping(params, dead), data)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fdp import tree
from fdp.gradients.rules import Rule
from fdp.gradients.taps import EXPANDED, Tape, Watched, batch_size_of
from fdp.types import FdpError, Path, Tree


class Skipping:
    """A tape that does not record some uses of one leaf, by their number; else the ``tape`` itself."""

    def __init__(self, tape: Any, dead: frozenset[int]):
        self.tape = tape
        self.dead = dead
        self.count = 0

    def output(self, rule: Rule, x: Tensor, leaf: Watched, options: dict[str, Any]) -> Tensor:
        self.count += 1
        if self.count - 1 in self.dead:
            return rule.forward(x, leaf.value, **options)
        return self.tape.output(rule, x, leaf, options)

    def output_with_bias(self, rule: Rule, x: Tensor, leaf: Watched, bias: Watched) -> Tensor:
        self.count += 1
        if self.count - 1 in self.dead:
            return rule.forward(x, leaf.value, bias.value)
        return self.tape.output_with_bias(rule, x, leaf, bias)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tape, name)


def skipping(params: Mapping[str, Tensor | Watched], dead: Mapping[str, frozenset[int]]) -> dict[str, Tensor | Watched]:
    """The same parameters, whose ``dead`` uses are not recorded."""
    return {
        name: Watched(leaf.value, leaf.path, Skipping(leaf.tape, dead[name]))  # pyright: ignore[reportArgumentType]
        if isinstance(leaf, Watched) and name in dead
        else leaf
        for name, leaf in params.items()
    }


def dead_uses(
    run: Callable[[Mapping[str, Any], Tree], list[Tensor]],
    leaves: Mapping[str, tuple[Path, tuple[int, ...]]],
    data: Tree,
) -> dict[str, frozenset[int]]:
    """By parameter, the numbers of its uses on which no result of ``run`` depends; those without any are left out.

    ``leaves``: the path and the shape of every parameter. A use without a rule is for whoever makes a plan to refuse.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = {path: torch.empty(shape) for path, shape in leaves.values()}
        data = tree.map(torch.empty_like, data)

        def ran(taps: dict[str, Tensor] | None) -> tuple[Tape, list[Tensor]]:
            tape = Tape(batch_size_of(data), taps)
            watched = {path: Watched(value, path, tape) for path, value in values.items()}
            return tape, run({name: watched[path] for name, (path, _) in leaves.items()}, data)

        try:
            with torch.no_grad():
                uses = ran(None)[0].uses
        except FdpError:
            return {}
        taps = {use.name: torch.zeros(use.output_shape, requires_grad=True) for use in uses}
        with torch.enable_grad():
            outs = [out for out in ran(taps)[1] if out.requires_grad]
            ones = [torch.ones_like(out) for out in outs]
            found = torch.autograd.grad(outs, list(taps.values()), ones, allow_unused=True)
    lost = {name for name, slope in zip(taps, found) if slope is None}
    dead = {}
    for name, (path, _) in leaves.items():
        own = [use.name for use in uses if use.path == path and use.rule != EXPANDED]
        if numbers := frozenset(i for i, use in enumerate(own) if use in lost):
            dead[name] = numbers
    return dead
