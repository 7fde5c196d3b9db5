"""Plans: for every trainable leaf, how its per-sample norms and its clipped sum are computed.

| method        | norms by                                  | sum by                                   |
|---------------|-------------------------------------------|------------------------------------------|
| none          | no norms: plain training                  | one ordinary backward                    |
| materialize   | VMAP, every sample's gradient in memory   | REUSE of the stored gradients            |
| ghost         | GRAM matrices                             | SECOND_BACKWARD, nothing stored          |
| ghost_bk      | GRAM matrices                             | stored PAIRs (x, g), a weighted product  |
| flash         | KEEP, gradients and norms by one kernel   | REUSE of the stored gradients            |
| flash_bk      | DIRECT or SYMMETRIC, the cheaper          | stored PAIRs                             |
| auto          | the cheapest of all                       | the one that goes with it                |

With ``stored_dtype=torch.int8``, ``auto`` may also store gradients rounded to 8 bits (KEEP_INT8).
If measured times are within 10 %, choose the option that stores least. For an embedding, ``flash`` takes the cheapest
of KEEP, DIRECT and SYMMETRIC, since KEEP stores one table per sample. For a leaf that is used several times, kernels
have one closed form for the norm of all uses together, whatever the option is called. Under a memory budget, ``auto``
and ``flash`` store a smaller form of a gradient, or nothing at the price of a second backward.

Predicted costs are in ``fdp.gradients.costs``, measured ones in ``fdp.gradients.timing``.

    >>> plan = make_plan(model, params, microbatch, method=Method.AUTO)
    >>> print(explain(plan))
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from fdp import tree
from fdp.gradients.costs import Choice, NormBy, Rates, SumBy, candidates, rates_of, second_backward
from fdp.gradients.tape import Use
from fdp.gradients.taps import batch_size_of
from fdp.gradients.timing import Timings, signature
from fdp.gradients.trace_uses import check_layouts, check_no_draws, retrace_layouts, trace_uses
from fdp.model import Model
from fdp.types import FdpError, Path, Tree


class Method(Enum):
    """Methods for per-sample clipping, by their names on the command line."""

    NONE = "none"
    MATERIALIZE = "materialize"
    GHOST = "ghost"
    GHOST_BK = "ghost_bk"
    FLASH = "flash"
    FLASH_BK = "flash_bk"
    AUTO = "auto"


TIMED_METHODS = (Method.AUTO, Method.FLASH, Method.FLASH_BK)
"""Methods that choose between options, and so gain from measured times."""
BUDGETED_METHODS = (Method.AUTO, Method.FLASH)
"""Methods that store less under a memory budget."""
TIE_RATIO = 1.1
"""Measured times within this ratio (10 %) count as equal: times in a step differ from isolated ones by as much."""
NORMS_BY_METHOD = {
    Method.GHOST: (NormBy.GRAM,),
    Method.GHOST_BK: (NormBy.GRAM,),
    Method.FLASH: (NormBy.KEEP, NormBy.DIRECT, NormBy.SYMMETRIC),
    Method.FLASH_BK: (NormBy.DIRECT, NormBy.SYMMETRIC),
    Method.AUTO: (NormBy.KEEP, NormBy.KEEP_INT8, NormBy.DIRECT, NormBy.GRAM, NormBy.SYMMETRIC),
}
"""Options for norms that a method may choose; a small parameter has only KEEP."""
STORED_DTYPES = (None, torch.int8)
"""Dtypes in which gradients may be stored between norm and sum; None: the compute dtype only."""


class CannotRound(FdpError):
    """Gradients that are to be stored in 8 bits cannot be: on this device, in this dtype, by this method."""


class Plan(NamedTuple):
    """The choices of a method for one model and one microbatch shape. ``choices`` is empty for plain training.

    ``smaller`` are plans with the same choices for smaller microbatches (:func:`add_smaller_sizes`). Stored gradients
    may be rounded to ``stored_dtype``, unless it is None; noise of its own goes with it.
    """

    method: Method
    uses: tuple[tuple[Use, ...], ...]
    choices: dict[Path, Choice]
    trainable: frozenset[Path]
    batch_size: int
    dtype: torch.dtype
    smaller: tuple[Plan, ...] = ()
    stored_dtype: torch.dtype | None = None

    def of_size(self, batch_size: int) -> Plan:
        """Return the plan for microbatches of ``batch_size`` samples; this one if there is none."""
        return next((plan for plan in self.smaller if plan.batch_size == batch_size), self)

    @property
    def private(self) -> bool:
        return self.method is not Method.NONE

    @property
    def rounded(self) -> tuple[Path, ...]:
        """The leaves whose gradients are stored in 8 bits, sorted."""
        return tuple(sorted(path for path, choice in self.choices.items() if choice.norm is NormBy.KEEP_INT8))

    @property
    def stored_bytes(self) -> float:
        return sum(choice.stored_bytes for choice in self.choices.values())


def make_plan(
    model: Model,
    params: Tree,
    microbatch: Tree,
    *,
    method: Method = Method.AUTO,
    memory_budget: float | None = None,
    dtype: torch.dtype = torch.float32,
    stored_dtype: torch.dtype | None = None,
    rounded: Collection[Path] | None = None,
    timings: Timings | None = None,
    device: torch.device | None = None,
) -> Plan:
    """Trace ``model`` on the shapes of ``microbatch`` and choose options for every trainable leaf.

    ``device`` is where the step will run, by default where the microbatch is. ``timings`` holds measured seconds, by
    which ``auto`` and the flash methods choose where there are any.

    ``memory_budget`` bounds the bytes that ``auto`` and ``flash`` store for all leaves between norms and sum. If they
    do not fit, pairs are recomputed in a second backward from the input of every block. Default: no bound.

    ``stored_dtype=torch.int8`` lets ``auto`` store gradients in 8 bits, where kernels do so (half precision on a Hopper
    GPU): each is then rounded by a few hundredths of its norm, which the noise hides and which training without noise
    would show. Norms and sums are of the rounded gradients. ``rounded`` are the leaves that are stored so, for a run
    that goes on with the noise it had; default: those for which that is cheapest.

    Guarantees:
      - every trainable leaf has a choice: one that no block uses is an error naming it, never a silent skip;
      - no model that draws random numbers has a second backward, whose gradients would be others than those measured.
    """
    if stored_dtype not in STORED_DTYPES:
        raise FdpError(f"stored_dtype: expected torch.int8, or None for the compute dtype, got {stored_dtype}")
    flat, batch_size = tree.flatten(params), _count_samples(microbatch)
    materialized, watched = _materialized(model, method), _watched(model, method)
    uses, layouts = trace_uses(model, flat, microbatch, dtype, watched)
    check_layouts(layouts, retrace_layouts(model, flat, microbatch, dtype, watched), batch_size)
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
    allowed = _allowed_by_method(found, method, stored_dtype, rounded)
    options = {path: _add_timings(allowed[path], by_leaf[path], dtype, timings) for path in by_leaf}
    choices = {path: _choose(options[path], by_leaf[path], method, rates) for path in by_leaf}
    if method in BUDGETED_METHODS and memory_budget is not None:
        choices = _fit_budget(choices, options, by_leaf, memory_budget - sum(sizes.values()), rates)
    if any(choice.sum is SumBy.SECOND_BACKWARD for choice in choices.values()):
        check_no_draws(model, flat, microbatch, dtype, watched, method.value)
    return Plan(method, uses, by_vmap | choices, model.trainable, batch_size, dtype, stored_dtype=stored_dtype)


def add_smaller_sizes(plan: Plan, model: Model, params: Tree, microbatch: Tree, *, sizes: Sequence[int]) -> Plan:
    """Return the plan with plans for the first ``sizes`` samples of ``microbatch``, which make the same choices."""
    flat, watched = tree.flatten(params), _watched(model, plan.method)

    def resize(size: int) -> Plan:
        few = tree.map(lambda leaf: leaf[:size], microbatch)
        uses, layouts = trace_uses(model, flat, few, plan.dtype, watched)
        if layouts:
            check_layouts(layouts, retrace_layouts(model, flat, few, plan.dtype, watched), size)
        return plan._replace(uses=uses, batch_size=size, smaller=())

    return plan._replace(smaller=tuple(resize(size) for size in sizes))


def choices_in_full(plan: Plan) -> dict[Path, Choice]:
    """Return the plan's choices, but with gradients stored in the compute dtype where it stores them in 8 bits."""
    return {
        path: choice._replace(norm=NormBy.KEEP) if choice.norm is NormBy.KEEP_INT8 else choice
        for path, choice in plan.choices.items()
    }


def explain(plan: Plan) -> str:
    """Return the plan as a table: one line per use of a leaf, with its choice and its cost (seconds, stored bytes)."""
    lines = [f"method {plan.method.value}, microbatch {plan.batch_size}, {str(plan.dtype).removeprefix('torch.')}"]
    lines.append(
        f"{'leaf':40} {'use':10} {'input':18} {'norm':10} {'sum':16} {'predicted ms':>12} {'measured ms':>11} "
        f"{'kept MiB':>9}"
    )
    for use, choice in explain_rows(plan):
        shape = "x".join(map(str, use.input_shape))
        measured = "" if choice.measured is None else f"{choice.measured * 1e3:.3f}"
        lines.append(
            f"{use.path:40} {use.rule:10} {shape:18} {choice.norm.value:10} {choice.sum.value:16} "
            f"{choice.seconds * 1e3:12.3f} {measured:>11} {choice.stored_bytes / 2**20:9.2f}"
        )
    lines.append(f"kept between norms and sum: {plan.stored_bytes / 2**20:.1f} MiB")
    return "\n".join(lines)


def explain_rows(plan: Plan) -> list[tuple[Use, Choice]]:
    """Return the uses of the trainable leaves with their choices; a leaf whose block runs under ``vmap`` is one row."""
    uses = [use for block in plan.uses for use in block if use.path in plan.choices]
    used = {use.path for use in uses}
    uses += [Use(path, path, "any", (), (), ()) for path in plan.choices if path not in used]
    return [(use, plan.choices[use.path]) for use in uses]


def _count_samples(microbatch: Tree) -> int:
    size = batch_size_of(microbatch)
    if size == 0:
        raise FdpError(
            "microbatch: expected at least one sample, got none; an empty batch is a microbatch of padding with a "
            "mask, as fdp.sample_batch makes it"
        )
    return size


def _materialized(model: Model, method: Method) -> frozenset[Path]:
    """Return the trainable leaves of all blocks that hold a leaf without a rule: these blocks run under ``vmap``."""
    if method in (Method.NONE, Method.MATERIALIZE):
        return model.trainable if method is Method.MATERIALIZE else frozenset()
    found = model.materialized & model.trainable
    of_blocks = [frozenset(tree.leaves(block.params)) & model.trainable for block in model.blocks]
    while more := [leaves for leaves in of_blocks if leaves & found and not leaves <= found]:
        found = found.union(*more)
    return found


def _watched(model: Model, method: Method) -> frozenset[Path]:
    """Return the leaves whose uses are recorded."""
    return frozenset() if method is Method.NONE else model.trainable - _materialized(model, method)


def _add_timings(
    options: dict[NormBy, Choice], uses: list[Use], dtype: torch.dtype, timings: Timings | None
) -> dict[NormBy, Choice]:
    if timings is None or len(uses) != 1:
        return options
    return {by: option._replace(measured=timings.get(signature(uses[0], by, dtype))) for by, option in options.items()}


def _allowed_by_method(
    found: dict[Path, dict[NormBy, Choice]],
    method: Method,
    stored_dtype: torch.dtype | None,
    rounded: Collection[Path] | None,
) -> dict[Path, dict[NormBy, Choice]]:
    """Return the options that the method may choose, for every leaf."""
    norms = [by for by in NORMS_BY_METHOD[method] if by is not NormBy.KEEP_INT8 or stored_dtype == torch.int8]
    allowed = {path: {by: each for by, each in options.items() if by in norms} for path, options in found.items()}
    allowed = {path: options or {NormBy.KEEP: found[path][NormBy.KEEP]} for path, options in allowed.items()}
    return allowed if rounded is None else _round_only(allowed, rounded)


def _round_only(
    options: dict[Path, dict[NormBy, Choice]], rounded: Collection[Path]
) -> dict[Path, dict[NormBy, Choice]]:
    """Return the options with which the gradients of these leaves, and of no other, are stored in 8 bits."""
    if unable := sorted(path for path in rounded if NormBy.KEEP_INT8 not in options.get(path, ())):
        raise CannotRound(
            f"rounded: expected leaves whose gradients can be stored in 8 bits, which takes stored_dtype=torch.int8, "
            f"half precision and a Hopper GPU, got {unable[:3]}"
        )
    return {
        path: {by: option for by, option in found.items() if (by is NormBy.KEEP_INT8) == (path in rounded)}
        for path, found in options.items()
    }


def _choose(options: dict[NormBy, Choice], uses: list[Use], method: Method, rates: Rates) -> Choice:
    """Return the cheapest option for one leaf; ``flash`` stores everything but embeddings."""
    if method is Method.FLASH and all(use.rule != "embedding" for use in uses):
        return options[NormBy.KEEP]
    least = min(option.price for option in options.values())
    ties = [
        option for option in options.values() if option.price <= least * (1 if option.measured is None else TIE_RATIO)
    ]
    best = min(ties, key=lambda option: (option.stored_bytes, option.price))
    return second_backward(best, uses, rates=rates) if method is Method.GHOST else best


def _fit_budget(
    choices: dict[Path, Choice],
    options: dict[Path, dict[NormBy, Choice]],
    by_leaf: dict[Path, list[Use]],
    budget: float,
    rates: Rates,
) -> dict[Path, Choice]:
    """Store less, largest saving per extra second first; if that is not enough, store nothing and go back twice.

    A leaf that must be stored in 8 bits is.
    """
    choices = dict(choices)
    smaller = []
    for path, choice in choices.items():
        other = min(options[path].values(), key=lambda option: (option.stored_bytes, option.price))
        if other.stored_bytes < choice.stored_bytes:
            price = (other.price - choice.price) / (choice.stored_bytes - other.stored_bytes)
            smaller.append((price, path, other))
    for _, path, other in sorted(smaller, key=lambda entry: entry[:2]):
        if sum(choice.stored_bytes for choice in choices.values()) <= budget:
            return choices
        choices[path] = other
    if sum(choice.stored_bytes for choice in choices.values()) <= budget:
        return choices
    by_pair = {path: [each for each in found.values() if each.sum is SumBy.PAIR] for path, found in options.items()}
    norms = {path: min(by_pair[path], key=lambda each: each.price, default=choices[path]) for path in choices}
    again = {path: second_backward(choice, by_leaf[path], rates=rates) for path, choice in norms.items()}
    return again | {path: choices[path] for path, found in options.items() if set(found) == {NormBy.KEEP_INT8}}
