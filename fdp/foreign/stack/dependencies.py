"""Find the parameters, and the uses of parameters, that a loss depends on.

The module is run twice: once for what comes before its layers and once for what comes after, which repeats the first
part for nothing. A parameter that takes part in both (an embedding table that is also the head) then has uses that no
result depends on. They are found once, by differentiating with respect to shape-only taps, and skipped by number.

    >>> names, _ = needed_parameters(run, shapes, data)        # parameters that some result depends on
    >>> dead = dead_uses(run, leaves, data)                    # {name: numbers of the uses that reach no result}
    >>> run(skip_uses(params, dead), data)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fdp import tree
from fdp.gradients.rules import Rule
from fdp.gradients.tape import EXPANDED, Tape, Watched
from fdp.gradients.taps import batch_size_of
from fdp.types import FdpError, Path, Tree

Weights: TypeAlias = Mapping[str, Tensor | Watched]
Shapes: TypeAlias = dict[str, tuple[int, ...]]


def needed_parameters(
    run: Callable[[Weights, Tree], list[Tensor]], shapes: Shapes, example: Tree
) -> tuple[list[str], list[bool]]:
    """Return the parameters that the results of ``run`` depend on, and for each result whether it depends on any."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        params = {name: torch.empty(shape, requires_grad=True) for name, shape in shapes.items()}
        outputs = run(params, tree.map(torch.empty_like, example))
        differentiable = [out for out in outputs if out.requires_grad]
        if not differentiable or not params:
            return [], [False] * len(outputs)
        ones = [torch.ones_like(out) for out in differentiable]
        grads = torch.autograd.grad(differentiable, list(params.values()), ones, allow_unused=True)
    needed = [name for name, grad in zip(params, grads) if grad is not None]
    return needed, [out.requires_grad for out in outputs]


def dead_uses(
    run: Callable[[Weights, Tree], list[Tensor]],
    leaves: Mapping[str, tuple[Path, tuple[int, ...]]],
    data: Tree,
) -> dict[str, frozenset[int]]:
    """Return, by parameter, the numbers of its uses that no result of ``run`` depends on.

    ``leaves`` holds the path and the shape of every parameter. Parameters without dead uses are left out. If a use has
    no rule, return an empty dictionary: making a plan will raise the error.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = {path: torch.empty(shape) for path, shape in leaves.values()}
        data = tree.map(torch.empty_like, data)

        def run_taped(taps: dict[str, Tensor] | None) -> tuple[Tape, list[Tensor]]:
            tape = Tape(batch_size_of(data), taps)
            watched = {path: Watched(value, path, tape) for path, value in values.items()}
            return tape, run({name: watched[path] for name, (path, _) in leaves.items()}, data)

        try:
            with torch.no_grad():
                uses = run_taped(None)[0].uses
        except FdpError:
            return {}
        taps = {use.name: torch.zeros(use.output_shape, requires_grad=True) for use in uses}
        with torch.enable_grad():
            outputs = [out for out in run_taped(taps)[1] if out.requires_grad]
            ones = [torch.ones_like(out) for out in outputs]
            grads = torch.autograd.grad(outputs, list(taps.values()), ones, allow_unused=True)
    unreached = {name for name, grad in zip(taps, grads) if grad is None}
    dead = {}
    for name, (path, _) in leaves.items():
        own = [use.name for use in uses if use.path == path and use.rule != EXPANDED]
        if numbers := frozenset(i for i, use in enumerate(own) if use in unreached):
            dead[name] = numbers
    return dead


def skip_uses(params: Weights, dead: Mapping[str, frozenset[int]]) -> dict[str, Tensor | Watched]:
    """Return the same parameters with a tape that does not record their ``dead`` uses."""
    return {
        name: Watched(leaf.value, leaf.path, SkippingTape(leaf.tape, dead[name]))  # pyright: ignore[reportArgumentType]
        if isinstance(leaf, Watched) and name in dead
        else leaf
        for name, leaf in params.items()
    }


class SkippingTape:
    """A wrapper of ``tape`` that does not record the uses of one leaf whose numbers are in ``dead``."""

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
