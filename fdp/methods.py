"""Methods as plans: for every use of a parameter, how its norm is found and how its part of the sum is made.

| method        | norms by                                  | sum by                                   |
|---------------|-------------------------------------------|------------------------------------------|
| none          | no norms: plain training                  | one ordinary backward                    |
| materialize   | VMAP, every sample's gradient in memory   | REUSE of what was kept                   |
| ghost         | GRAM matrices                             | SECOND backward, nothing kept            |
| ghost_bk      | GRAM matrices                             | kept PAIRs (x, g), one weighted product  |
| flash         | DIRECT or SYMMETRIC, the cheaper          | SECOND backward                          |
| flash_bk      | DIRECT or SYMMETRIC, the cheaper          | kept PAIRs                               |
| auto          | the cheapest of all, under a budget       | the one that goes with it                |

What each costs is in ``fdp.costs``; what it cost on this device, once timed, in ``fdp.timing``.

    >>> plan = make_plan(model, params, microbatch, method=Method.AUTO)
    >>> print(explain(plan))
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

import torch

from fdp import tree
from fdp.costs import Choice, NormBy, Rates, SumBy, candidates, rates_of, second_backward
from fdp.model import Model, check_losses
from fdp.taps import Use, batch_size_of, trace
from fdp.timing import Timings, signature
from fdp.types import FdpError, Flat, Path, Tree


class Method(Enum):
    """The names of the command line."""

    NONE = "none"
    MATERIALIZE = "materialize"
    GHOST = "ghost"
    GHOST_BK = "ghost_bk"
    FLASH = "flash"
    FLASH_BK = "flash_bk"
    AUTO = "auto"


CHOOSING = (Method.AUTO, Method.FLASH, Method.FLASH_BK)
"""Methods that choose between ways, and so gain from knowing what they take."""


class Plan(NamedTuple):
    """A method spelled out for one model and one microbatch shape. ``choices`` is empty for plain training."""

    method: Method
    uses: tuple[tuple[Use, ...], ...]
    choices: dict[Path, Choice]
    trainable: frozenset[Path]
    batch_size: int
    dtype: torch.dtype

    @property
    def private(self) -> bool:
        return self.method is not Method.NONE

    @property
    def kept_bytes(self) -> float:
        return sum(choice.kept_bytes for choice in self.choices.values())


def make_plan(
    model: Model,
    params: Tree,
    microbatch: Tree,
    *,
    method: Method = Method.AUTO,
    memory_budget: float | None = None,
    dtype: torch.dtype = torch.float32,
    timings: Timings | None = None,
    device: torch.device | None = None,
) -> Plan:
    """Trace ``model`` on the shapes of ``microbatch`` and decide for every trainable leaf.

    ``device`` is where the step will run, by default where the microbatch is. ``timings`` gives measured seconds of
    choices for ``auto`` and the flash methods to go by, where it has any.

    ``memory_budget`` (bytes) bounds what ``auto`` keeps of all leaves between norms and sum; beyond it pairs are
    recomputed in a second backward, from the input of every block. Default: no bound.

    Guarantees:
      - every trainable leaf has a choice: one that no block uses is an error naming it, never a silent skip.
    """
    flat = tree.flatten(params)
    batch_size = batch_size_of(microbatch)
    watched = model.trainable if method not in (Method.NONE, Method.MATERIALIZE) else frozenset()
    uses = _trace_model(model, flat, microbatch, dtype, watched)
    # Once more with another number of samples: a dimension that only happens to be as long is then refused.
    more = tree.map(lambda leaf: leaf[:1].expand(batch_size + 1, *leaf.shape[1:]), microbatch)
    _trace_model(model, flat, more, dtype, watched)
    if method is Method.NONE:
        return Plan(method, uses, {}, model.trainable, batch_size, dtype)
    if method is Method.MATERIALIZE:
        sizes = {path: batch_size * leaf.numel() * dtype.itemsize for path, leaf in flat.items()}
        every = {path: Choice(NormBy.VMAP, SumBy.REUSE, math.nan, sizes[path]) for path in flat}
        choices = {path: choice for path, choice in every.items() if path in model.trainable}
        return Plan(method, uses, choices, model.trainable, batch_size, dtype)

    by_leaf: dict[Path, list[Use]] = {path: [] for path in flat if path in model.trainable}
    for use in (use for block in uses for use in block):
        by_leaf[use.path].append(use)
    if unused := [path for path, leaf_uses in by_leaf.items() if not leaf_uses]:
        raise FdpError(f"{model.name}: the loss never uses {unused}; freeze them (Model.frozen) or remove them")
    rates = rates_of(tree.leaves(microbatch)[0].device if device is None else device, dtype)
    ways = {
        path: _timed(candidates(uses, dtype=dtype, rates=rates), uses, dtype, timings) for path, uses in by_leaf.items()
    }
    choices = {path: _choose(ways[path], by_leaf[path], method, rates) for path in by_leaf}
    if method is Method.AUTO and rates.kernels:
        # A head whose per-sample gradients are kept is fused with its loss: no logits to hold, or to write and read.
        heads = {block.params[block.head.weight] for block in model.blocks if block.head is not None}
        choices |= {path: ways[path][NormBy.KEEP] for path in heads & set(choices)}
    if method is Method.AUTO and memory_budget is not None:
        choices = _within(choices, ways, by_leaf, memory_budget, rates)
    return Plan(method, uses, choices, model.trainable, batch_size, dtype)


def explain(plan: Plan) -> str:
    """The plan as a table: one line per use of a leaf, with its choice and why (seconds, bytes kept)."""
    lines = [f"method {plan.method.value}, microbatch {plan.batch_size}, {str(plan.dtype).removeprefix('torch.')}"]
    lines.append(
        f"{'leaf':40} {'use':10} {'input':18} {'norm':10} {'sum':16} {'predicted ms':>12} {'measured ms':>11} "
        f"{'kept MiB':>9}"
    )
    rows = [use for block in plan.uses for use in block] or [
        Use(path, path, "any", (), (), ()) for path in plan.choices
    ]
    for use in rows:
        choice = plan.choices[use.path]
        shape = "x".join(map(str, use.input_shape))
        measured = "" if choice.measured is None else f"{choice.measured * 1e3:.3f}"
        lines.append(
            f"{use.path:40} {use.rule:10} {shape:18} {choice.norm.value:10} {choice.sum.value:16} "
            f"{choice.seconds * 1e3:12.3f} {measured:>11} {choice.kept_bytes / 2**20:9.2f}"
        )
    lines.append(f"kept between norms and sum: {plan.kept_bytes / 2**20:.1f} MiB")
    return "\n".join(lines)


def _trace_model(
    model: Model, flat: Flat, microbatch: Tree, dtype: torch.dtype, watched: frozenset[Path]
) -> tuple[tuple[Use, ...], ...]:
    meta = {path: leaf.new_empty((), dtype=dtype).expand(leaf.shape) for path, leaf in flat.items()}
    carry: Tree = ()
    uses = []
    for block in model.blocks:
        block_uses, carry = trace(block, meta, watched, carry, microbatch)
        uses.append(block_uses)
    check_losses(model, carry, batch_size_of(microbatch))
    return tuple(uses)


def _timed(
    ways: dict[NormBy, Choice], uses: list[Use], dtype: torch.dtype, timings: Timings | None
) -> dict[NormBy, Choice]:
    if timings is None or len(uses) != 1:
        return ways
    return {by: way._replace(measured=timings.get(signature(uses[0], by, dtype))) for by, way in ways.items()}


def _choose(ways: dict[NormBy, Choice], uses: list[Use], method: Method, rates: Rates) -> Choice:
    """The cheapest choice for one leaf among those of the method. Small parameters have one way only."""
    allowed = {
        Method.GHOST: (NormBy.GRAM,),
        Method.GHOST_BK: (NormBy.GRAM,),
        Method.FLASH: (NormBy.DIRECT, NormBy.SYMMETRIC),
        Method.FLASH_BK: (NormBy.DIRECT, NormBy.SYMMETRIC),
        Method.AUTO: tuple(ways),
    }[method]
    best = min((ways[by] for by in allowed if by in ways), key=lambda way: way.price, default=ways[NormBy.KEEP])
    return second_backward(best, uses, rates=rates) if method in (Method.GHOST, Method.FLASH) else best


def _within(
    choices: dict[Path, Choice],
    ways: dict[Path, dict[NormBy, Choice]],
    by_leaf: dict[Path, list[Use]],
    budget: float,
    rates: Rates,
) -> dict[Path, Choice]:
    """Keep less, largest saving per extra second first; if that is not enough, keep nothing and go back twice."""
    choices = dict(choices)
    smaller = []
    for path, choice in choices.items():
        other = min(ways[path].values(), key=lambda way: (way.kept_bytes, way.price))
        if other.kept_bytes < choice.kept_bytes:
            price = (other.price - choice.price) / (choice.kept_bytes - other.kept_bytes)
            smaller.append((price, path, other))
    for _, path, other in sorted(smaller, key=lambda entry: entry[:2]):
        if sum(choice.kept_bytes for choice in choices.values()) <= budget:
            return choices
        choices[path] = other
    if sum(choice.kept_bytes for choice in choices.values()) <= budget:
        return choices
    return {path: second_backward(choice, by_leaf[path], rates=rates) for path, choice in choices.items()}
