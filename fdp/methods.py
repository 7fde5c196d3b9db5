"""Methods as plans: for every use of a parameter, how its norm is found and how its part of the sum is made.

Let x: (B, T, d) be the input and g: (B, T, p) the output gradient of a linear layer; W = 2BTdp flops make one ordinary
weight gradient.

| norm by  | flops of the norm    | kept until the sum        | flops of the sum      |
|----------|----------------------|---------------------------|-----------------------|
| VMAP     | W, one sample a time | B p d (any operation)     | B p d                 |
| KEEP     | W                    | B p d                     | B p d (a weighted sum)|
| DIRECT   | W                    | B T (p + d), or nothing   | W                     |
| GRAM     | 2 B T^2 (p + d)      | B T (p + d), or nothing   | W                     |

The sum is made by REUSE of kept per-sample gradients, from a kept PAIR (x, g) by one weighted matrix product, or by a
SECOND backward that recomputes the pairs block by block and keeps nothing.

    >>> plan = make_plan(model, params, microbatch, method=Method.AUTO)
    >>> print(explain(plan))
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

import torch

from fdp import tree
from fdp.model import Model, check_losses
from fdp.taps import EXPANDED, Use, batch_size_of, trace
from fdp.types import FdpError, Flat, Path, Tree


class Method(Enum):
    """The names of the command line."""

    NONE = "none"
    MATERIALIZE = "materialize"
    GHOST = "ghost"
    GHOST_BK = "ghost_bk"
    AUTO = "auto"


class NormBy(Enum):
    VMAP = "vmap"
    KEEP = "keep"
    DIRECT = "direct"
    GRAM = "gram"


class SumBy(Enum):
    REUSE = "reuse"
    PAIR = "pair"
    SECOND = "second backward"


class Choice(NamedTuple):
    """How one leaf's norm and sum are computed, with the predicted cost of both and the bytes kept in between."""

    norm: NormBy
    sum: SumBy
    flops: float
    kept_bytes: float


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


# Gram matrices are formed in float64, whatever the records; on the CPU that takes twice the time of float32.
GRAM_PENALTY = {torch.float32: 2.0, torch.float64: 1.0, torch.bfloat16: 2.0, torch.float16: 2.0}
# What moving one kept element costs, in flops of a matrix product that could have been done in the time.
FLOPS_PER_ELEMENT_MOVED = 32.0


def make_plan(
    model: Model,
    params: Tree,
    microbatch: Tree,
    *,
    method: Method = Method.AUTO,
    memory_budget: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Plan:
    """Trace ``model`` on the shapes of ``microbatch`` and decide for every trainable leaf.

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
    choices = {path: _choose(leaf_uses, method, dtype) for path, leaf_uses in by_leaf.items()}
    if method is Method.AUTO and memory_budget is not None:
        choices = _within(choices, by_leaf, memory_budget, dtype)
    return Plan(method, uses, choices, model.trainable, batch_size, dtype)


def explain(plan: Plan) -> str:
    """The plan as a table: one line per use of a leaf, with its choice and why (flops, bytes kept)."""
    lines = [f"method {plan.method.value}, microbatch {plan.batch_size}, {str(plan.dtype).removeprefix('torch.')}"]
    lines.append(f"{'leaf':40} {'use':10} {'input':18} {'norm':8} {'sum':16} {'Mflop':>9} {'kept MiB':>9}")
    rows = [use for block in plan.uses for use in block] or [
        Use(path, path, "any", (), (), ()) for path in plan.choices
    ]
    for use in rows:
        choice = plan.choices[use.path]
        shape = "x".join(map(str, use.input_shape))
        lines.append(
            f"{use.path:40} {use.rule:10} {shape:18} {choice.norm.value:8} {choice.sum.value:16} "
            f"{choice.flops / 1e6:9.1f} {choice.kept_bytes / 2**20:9.2f}"
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


def _choose(uses: list[Use], method: Method, dtype: torch.dtype) -> Choice:
    """The cheapest choice for one leaf; ``ghost`` and ``ghost_bk`` fix the norm to GRAM and differ in the sum."""
    keep, pair = _keep(uses, dtype), _pair(uses, dtype)
    if uses[0].rule == EXPANDED and len({use.rule for use in uses}) == 1:
        return keep if method is not Method.GHOST else _second(pair, uses)
    if method is Method.GHOST_BK:
        return pair
    if method is Method.GHOST:
        return _second(pair, uses)
    return min(keep, pair, _direct(uses, dtype), key=lambda choice: choice.flops)


def _within(
    choices: dict[Path, Choice], by_leaf: dict[Path, list[Use]], budget: float, dtype: torch.dtype
) -> dict[Path, Choice]:
    """Keep less, largest saving per extra flop first; if that is not enough, keep nothing and go back twice."""
    choices = dict(choices)
    smaller = []
    for path, choice in choices.items():
        other = min(_keep(by_leaf[path], dtype), _pair(by_leaf[path], dtype), key=lambda c: c.kept_bytes)
        if other.kept_bytes < choice.kept_bytes:
            price = (other.flops - choice.flops) / (choice.kept_bytes - other.kept_bytes)
            smaller.append((price, path, other))
    for _, path, other in sorted(smaller, key=lambda entry: entry[:2]):
        if sum(choice.kept_bytes for choice in choices.values()) <= budget:
            return choices
        choices[path] = other
    if sum(choice.kept_bytes for choice in choices.values()) <= budget:
        return choices
    return {path: _second(choice, by_leaf[path]) for path, choice in choices.items()}


def _sizes(use: Use) -> tuple[int, int, int, int]:
    """B, T, and the two sides of the leaf as a matrix: rows p and columns d (per group for convolutions)."""
    batch, *_ = use.input_shape
    rows = use.leaf_shape[0] if use.leaf_shape else 1
    columns = math.prod(use.leaf_shape[1:])
    if use.rule == EXPANDED:
        return batch, 1, rows, columns
    width = columns if use.rule == "embedding" else rows
    return batch, max(1, math.prod(use.output_shape[1:]) // max(1, width)), rows, columns


def _gradient_flops(use: Use) -> float:
    batch, tokens, rows, columns = _sizes(use)
    if use.rule == EXPANDED:
        return 0.0
    return 2.0 * batch * tokens * columns * (1 if use.rule == "embedding" else rows)


def _keep(uses: list[Use], dtype: torch.dtype) -> Choice:
    batch, _, rows, columns = _sizes(uses[0])
    elements = batch * rows * columns
    moved = elements * FLOPS_PER_ELEMENT_MOVED * (len(uses) + 1)
    flops = sum(_gradient_flops(use) for use in uses) + moved
    return Choice(NormBy.KEEP, SumBy.REUSE, flops, elements * dtype.itemsize)


def _pair_bytes(uses: list[Use], dtype: torch.dtype) -> float:
    total = 0.0
    for use in uses:
        batch, tokens, rows, columns = _sizes(use)
        if use.rule == EXPANDED:
            total += batch * rows * columns * dtype.itemsize
        elif use.rule == "embedding":
            total += batch * tokens * (columns * dtype.itemsize + 8)
        else:
            total += batch * tokens * (rows + columns) * dtype.itemsize
    return total


def _pair(uses: list[Use], dtype: torch.dtype) -> Choice:
    """Gram norms, cross terms between all uses included."""
    flops = 0.0
    for i, use in enumerate(uses):
        batch, tokens, rows, columns = _sizes(use)
        left = 1 if use.rule == "embedding" else rows
        for other in uses[: i + 1]:
            products = 2.0 * batch * tokens * _sizes(other)[1] * (left + columns)
            flops += products * GRAM_PENALTY[dtype]
        flops += _gradient_flops(use)
    return Choice(NormBy.GRAM, SumBy.PAIR, flops, _pair_bytes(uses, dtype))


def _direct(uses: list[Use], dtype: torch.dtype) -> Choice:
    batch, _, rows, columns = _sizes(uses[0])
    moved = batch * rows * columns * FLOPS_PER_ELEMENT_MOVED
    flops = 2 * sum(_gradient_flops(use) for use in uses) + moved
    return Choice(NormBy.DIRECT, SumBy.PAIR, flops, _pair_bytes(uses, dtype))


def _second(choice: Choice, uses: list[Use]) -> Choice:
    norm = NormBy.DIRECT if choice.norm is NormBy.KEEP else choice.norm
    return Choice(norm, SumBy.SECOND, choice.flops + 2 * sum(_gradient_flops(use) for use in uses), 0.0)
