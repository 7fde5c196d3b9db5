"""Methods as plans: for every use of a parameter, how its norm is found and how its part of the sum is made.

| method        | norms by                                  | sum by                                   |
|---------------|-------------------------------------------|------------------------------------------|
| none          | no norms: plain training                  | one ordinary backward                    |
| materialize   | VMAP, every sample's gradient in memory   | REUSE of what was kept                   |
| ghost         | GRAM matrices                             | SECOND backward, nothing kept            |
| ghost_bk      | GRAM matrices                             | kept PAIRs (x, g), one weighted product  |
| flash         | KEEP, gradients and norms by one kernel   | REUSE of what was kept; one backward     |
| flash_bk      | DIRECT or SYMMETRIC, the cheaper          | kept PAIRs                               |
| auto          | the cheapest of all                       | the one that goes with it                |

Of ways whose measured times are about the same that is taken which keeps least. Of an embedding ``flash`` takes the
cheapest of KEEP, DIRECT and SYMMETRIC: whole tables, one per sample, only if small. A head, tied or not, is kept by
``auto`` and ``flash`` where kernels fuse it with its loss. Both go by a budget: what would not fit is kept in a smaller
form, or else nothing is, at the price of a SECOND backward.

What each costs is in ``fdp.gradients.costs``; what it cost on this device, once timed, in ``fdp.gradients.timing``.

    >>> plan = make_plan(model, params, microbatch, method=Method.AUTO)
    >>> print(explain(plan))
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fdp import tree
from fdp.gradients.costs import Choice, NormBy, Rates, SumBy, candidates, rates_of, second_backward
from fdp.gradients.taps import Tape, Use, batch_size_of, traced
from fdp.gradients.timing import Timings, signature
from fdp.model import Block, Model, check_losses
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


OTHERS = (1009, 1013)
"""Numbers of samples with which a model is traced again: primes, which no extent of a model is a multiple of."""
CHOOSING = (Method.AUTO, Method.FLASH, Method.FLASH_BK)
"""Methods that choose between ways, and so gain from knowing what they take."""
BUDGETED = (Method.AUTO, Method.FLASH)
"""Methods that keep less where a memory budget asks for it."""
ABOUT = 1.1
"""Measured times no further apart count as one, and that way is taken which keeps least: in a step, at a device's power
limit, they differ by as much from what they are alone."""
WAYS = {
    Method.GHOST: (NormBy.GRAM,),
    Method.GHOST_BK: (NormBy.GRAM,),
    Method.FLASH: (NormBy.KEEP, NormBy.DIRECT, NormBy.SYMMETRIC),
    Method.FLASH_BK: (NormBy.DIRECT, NormBy.SYMMETRIC),
    Method.AUTO: (NormBy.KEEP, NormBy.DIRECT, NormBy.GRAM, NormBy.SYMMETRIC),
}
"""The ways to a norm that a method may take; a small parameter has one only, which is KEEP."""


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

    ``memory_budget`` (bytes) bounds what ``auto`` and ``flash`` keep of all leaves between norms and sum; beyond it
    pairs are recomputed in a second backward, from the input of every block. Default: no bound.

    Guarantees:
      - every trainable leaf has a choice: one that no block uses is an error naming it, never a silent skip.
    """
    flat = tree.flatten(params)
    batch_size = batch_size_of(microbatch)
    if batch_size == 0:
        raise FdpError(
            "microbatch: expected at least one sample, got none; an empty batch is a microbatch of padding with a "
            "mask, as fdp.sample_batch makes it"
        )
    materialized = _materialized(model, method)
    watched = model.trainable - materialized if method is not Method.NONE else frozenset()
    uses, layouts = _trace_model(model, flat, microbatch, dtype, watched)
    # Once more with another number of samples: a dimension that only happens to be as long, or a multiple, is then
    # refused.
    size = next(other for other in OTHERS if batch_size % other)
    more = tree.map(lambda leaf: leaf[:1].expand(size, *leaf.shape[1:]), microbatch)
    _check_layouts(layouts, _trace_model(model, flat, more, dtype, watched)[1], batch_size)
    if method is Method.NONE:
        return Plan(method, uses, {}, model.trainable, batch_size, dtype)
    sizes = {path: batch_size * flat[path].numel() * dtype.itemsize for path in flat if path in materialized}
    by_vmap = {path: Choice(NormBy.VMAP, SumBy.REUSE, math.nan, size) for path, size in sizes.items()}
    if method is Method.MATERIALIZE:
        return Plan(method, uses, by_vmap, model.trainable, batch_size, dtype)

    by_leaf: dict[Path, list[Use]] = {path: [] for path in flat if path in watched}
    for use in (use for block in uses for use in block):
        by_leaf[use.path].append(use)
    if unused := [path for path, leaf_uses in by_leaf.items() if not leaf_uses]:
        raise FdpError(f"{model.name}: the loss never uses {unused}; freeze them (Model.frozen) or remove them")
    rates = rates_of(tree.leaves(microbatch)[0].device if device is None else device, dtype)
    found = {path: candidates(uses, dtype=dtype, rates=rates) for path, uses in by_leaf.items()}
    ways = {path: _timed(_of_method(found[path], method), by_leaf[path], dtype, timings) for path in by_leaf}
    choices = {path: _choose(ways[path], by_leaf[path], method, rates) for path in by_leaf}
    if method in BUDGETED and rates.kernels:
        # A head whose per-sample gradients are kept is fused with its loss: no logits to hold, or to write and read.
        heads = {block.params[block.head.weight] for block in model.blocks if block.head is not None}
        choices |= {path: ways[path][NormBy.KEEP] for path in heads & set(choices)}
    if method in BUDGETED and memory_budget is not None:
        choices = _within(choices, ways, by_leaf, memory_budget - sum(sizes.values()), rates)
    return Plan(method, uses, by_vmap | choices, model.trainable, batch_size, dtype)


def explain(plan: Plan) -> str:
    """The plan as a table: one line per use of a leaf, with its choice and why (seconds, bytes kept)."""
    lines = [f"method {plan.method.value}, microbatch {plan.batch_size}, {str(plan.dtype).removeprefix('torch.')}"]
    lines.append(
        f"{'leaf':40} {'use':10} {'input':18} {'norm':10} {'sum':16} {'predicted ms':>12} {'measured ms':>11} "
        f"{'kept MiB':>9}"
    )
    rows = [use for block in plan.uses for use in block]
    used = {use.path for use in rows}
    for use in rows + [Use(path, path, "any", (), (), ()) for path in plan.choices if path not in used]:
        choice = plan.choices[use.path]
        shape = "x".join(map(str, use.input_shape))
        measured = "" if choice.measured is None else f"{choice.measured * 1e3:.3f}"
        lines.append(
            f"{use.path:40} {use.rule:10} {shape:18} {choice.norm.value:10} {choice.sum.value:16} "
            f"{choice.seconds * 1e3:12.3f} {measured:>11} {choice.kept_bytes / 2**20:9.2f}"
        )
    lines.append(f"kept between norms and sum: {plan.kept_bytes / 2**20:.1f} MiB")
    return "\n".join(lines)


def _materialized(model: Model, method: Method) -> frozenset[Path]:
    """The trainable leaves of all blocks whose gradients are made whole: of those that hold one that must be."""
    if method in (Method.NONE, Method.MATERIALIZE):
        return model.trainable if method is Method.MATERIALIZE else frozenset()
    found = model.materialized & model.trainable
    of_blocks = [frozenset(tree.leaves(block.params)) & model.trainable for block in model.blocks]
    while more := [leaves for leaves in of_blocks if leaves & found and not leaves <= found]:
        found = found.union(*more)
    return found


def trace_model(
    model: Model, flat: Flat, microbatch: Tree, dtype: torch.dtype, watched: frozenset[Path]
) -> tuple[list[Tape | None], Tree]:
    """What every block's tape saw of the leaves ``watched``, and what the last block was given; nothing is computed.

    None: a block of which nothing is watched and whose inner shapes depend on the data.
    """
    meta = {path: leaf.new_empty((), dtype=dtype).expand(leaf.shape) for path, leaf in flat.items()}
    carry: Tree = ()
    tapes: list[Tape | None] = []
    for block in model.blocks:
        last = carry
        try:
            tape, carry = traced(block, meta, watched, carry, microbatch)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            tape, carry = None, _guessed(model, block, carry, microbatch, watched, dtype, error)
        except RuntimeError as error:  # an operation that says nothing of shapes in this dtype
            if watched & frozenset(tree.leaves(block.params)):
                raise
            tape, carry = None, _guessed(model, block, carry, microbatch, watched, dtype, error)
        tapes.append(tape)
    check_losses(model, carry, batch_size_of(microbatch))
    return tapes, last


def _trace_model(
    model: Model, flat: Flat, microbatch: Tree, dtype: torch.dtype, watched: frozenset[Path]
) -> tuple[tuple[tuple[Use, ...], ...], list[tuple[Path, str]]]:
    tapes, _ = trace_model(model, flat, microbatch, dtype, watched)
    uses = tuple(() if tape is None else tuple(tape.uses) for tape in tapes)
    return uses, [layout for tape in tapes if tape is not None for layout in tape.layouts]


def _guessed(
    model: Model,
    block: Block,
    carry: Tree,
    microbatch: Tree,
    watched: frozenset[Path],
    dtype: torch.dtype,
    error: Exception,
) -> Tree:
    """What a materialised block returns whose inner shapes depend on the data: losses, or a carry like its own."""
    if watched & frozenset(tree.leaves(block.params)):
        raise FdpError(
            f"{block.name}: {error} has a shape or a branch that depends on the data, so that no uses can be planned; "
            f"send the block through the materialised path, exact and slower (from_module(..., materialize=...), or "
            f"the method 'materialize'), or compute the same for every sample (experts by einsum over all of them)"
        ) from error
    if block is not model.blocks[-1] and not tree.leaves(carry):
        raise FdpError(
            f"{block.name}: {error} has a shape that depends on the data, so that what it returns is not known before "
            f"it runs; take the module as one block (blocks=None)"
        ) from error
    last = block is model.blocks[-1]
    return tree.leaves(microbatch)[0].new_empty(batch_size_of(microbatch), dtype=dtype) if last else carry


def _check_layouts(found: list[tuple[Path, str]], again: list[tuple[Path, str]], batch_size: int) -> None:
    """Samples of a foreign module are found by the shapes of its tensors: of any number, in the same places."""
    if batch_size == 1 or found == again:  # one sample is everywhere and nowhere
        return
    pairs = zip(found, again)
    (path, here), (_, there) = next((pair for pair in pairs if pair[0] != pair[1]), (found[-1], again[-1]))
    raise FdpError(
        f"{path}: with {batch_size} samples its input was taken for one with samples ({here}), with another number it "
        f"was not ({there}): some other extent happens to be {batch_size}, or a multiple. Use another microbatch size"
    )


def _timed(
    ways: dict[NormBy, Choice], uses: list[Use], dtype: torch.dtype, timings: Timings | None
) -> dict[NormBy, Choice]:
    if timings is None or len(uses) != 1:
        return ways
    return {by: way._replace(measured=timings.get(signature(uses[0], by, dtype))) for by, way in ways.items()}


def _of_method(ways: dict[NormBy, Choice], method: Method) -> dict[NormBy, Choice]:
    """The ways that the method may take."""
    return {by: way for by, way in ways.items() if by in WAYS[method]} or {NormBy.KEEP: ways[NormBy.KEEP]}


def _choose(ways: dict[NormBy, Choice], uses: list[Use], method: Method, rates: Rates) -> Choice:
    """The method's choice for one leaf: the cheapest of its ways, but ``flash`` keeps all that is no embedding."""
    if method is Method.FLASH and all(use.rule != "embedding" for use in uses):
        return ways[NormBy.KEEP]
    least = min(way.price for way in ways.values())
    near = [way for way in ways.values() if way.price <= least * (1 if way.measured is None else ABOUT)]
    best = min(near, key=lambda way: (way.kept_bytes, way.price))
    return second_backward(best, uses, rates=rates) if method is Method.GHOST else best


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
    paired = {path: [way for way in found.values() if way.sum is SumBy.PAIR] for path, found in ways.items()}
    norms = {path: min(paired[path], key=lambda way: way.price, default=choices[path]) for path in choices}
    return {path: second_backward(choice, by_leaf[path], rates=rates) for path, choice in norms.items()}
