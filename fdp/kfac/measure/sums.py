"""Which block adds what to which side of which layer, and what has been added up so far.

A block's records become sums by :mod:`fdp.kfac.measure.block_sums`, as a whole: one compiled function, where blocks are
compiled. Inputs are the same in every pass and are added in the first; output gradients in all.

    >>> sums = make_sums(known, forms, sharing, mask, present, sharding, runner)
    >>> for i, found in backward(...): add_records(i, found, sums, inputs=True)
    >>> curvature_of(layer, sums)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.execution import Runner
from fdp.gradients.rules import Dense, Record
from fdp.kfac import factors
from fdp.kfac.forms import Form
from fdp.kfac.layers import Met, Survey
from fdp.kfac.measure.block_sums import Places, Task, Uses, made, make_places, sums_of
from fdp.kfac.measure.fisher import by_term, term_weights
from fdp.kfac.types import Curvature, Factor, Layer
from fdp.model import Model, Outputs
from fdp.parallel import collectives
from fdp.parallel.sharding import Sharding
from fdp.types import Axis, FdpError, Path, Tree


class Sharing(Enum):
    """How the places at which a sample uses a weight count: each by itself, or all as one."""

    EXPAND = "expand"
    REDUCE = "reduce"


Forms: TypeAlias = Mapping[Layer, tuple[Form, Form]]
"""What is kept of the left and the right side of every layer; layers that are not named are left out."""


class Slot(NamedTuple):
    """Where rows go: a side of a layer, and whether they are inputs (else output gradients)."""

    layer: Layer
    left: bool
    inputs: bool


class Work(NamedTuple):
    """What is to be done with a block's records: which they are, by leaf and number, and each task's slot.

    ``uses``: how many records each leaf must have.
    """

    uses: dict[Path, int]
    records: tuple[tuple[Path, int], ...]
    slots: tuple[Slot, ...]
    tasks: tuple[Task, ...]


class Sums(NamedTuple):
    """What holds for one microbatch, and what has been added up of it so far.

    ``layers``: those met by every block. ``runner`` computes on the records of a block;
    ``work``: what that is, as far as it came to it. ``waiting``: rows that are squared once all uses of their layer
    have come, and of how many they are.
    """

    known: Survey
    forms: Forms
    sharing: Sharing
    places: Places
    layers: dict[int, dict[Layer, None]]
    cuts: dict[Path, tuple[Axis, int]]
    runner: Runner
    work: dict[tuple[int, bool], Work]
    factors: dict[Slot, Factor]
    waiting: dict[Slot, tuple[Tensor, int]]


def make_sums(
    known: Survey,
    forms: Forms,
    sharing: Sharing,
    mask: Float[Tensor, " batch"],
    present: Float[Tensor, "batch tokens"] | None,
    sharding: Sharding | None,
    runner: Runner,
) -> Sums:
    """Nothing added up yet."""
    layers: dict[int, dict[Layer, None]] = {}
    uses: dict[Uses, None] = {}
    for layer in (layer for layer, both in forms.items() if set(both) != {Form.SKIP}):
        for use in known.met[layer]:
            layers.setdefault(use.block, {})[layer] = None
        if not known.small(layer):
            _check_places(layer.weight, known.met[layer], present)
            uses |= {each: None for left in (True, False) if (each := _uses_with_inputs(known, layer, left))}
    places = make_places(mask, present, uses, known.plan.dtype)
    leaves = {} if sharding is None else sharding.leaves
    cuts = {path: cut for path, leaf in leaves.items() for cut in leaf.sharded_dims if cut[0].name == "tensor"}
    return Sums(known, forms, sharing, places, layers, cuts, runner, {}, {}, {})


def present_of(model: Model, data: Tree) -> Float[Tensor, "batch tokens"] | None:
    """Which tokens are not padding, by the model's last block; None: all."""
    outputs = model.blocks[-1].outputs
    present = None if outputs is None or outputs.present is None else outputs.present(data)
    return None if present is None else present.flatten(1)


def add_records(block: int, found: dict[Path, list[Record]], sums: Sums, *, inputs: bool) -> None:
    """What the backward of block number ``block`` found, all of it. ``inputs`` False: output gradients only.

    The records are taken out of ``found``: nothing of a block is alive while the next one is pulled.
    """
    work = sums.work.get((block, inputs))
    if work is None:
        work = sums.work[block, inputs] = _work(block, inputs, sums)
    for path, count in work.uses.items():
        assert len(found[path]) == count, f"{path}: expected {count} records of block {block}, got {len(found[path])}"
    records = [_whole(found[path][k], sums.cuts.get(path)) for path, k in work.records]
    found.clear()
    run = _run_of(work.tasks)
    values = sums.runner.function(work.tasks, run, records, sums.places)
    for slot, task, value in zip(work.slots, work.tasks, values):
        if isinstance(value, Tensor):
            _wait(slot, value, len(task.records), sums)
        else:
            _add(slot, value, sums)


def add_probabilities(outputs: Outputs, scores: Tensor, data: Tree, layer: Layer, sums: Sums) -> None:
    """The left side of a head, ``1/N sum_b sum_t w_bt (diag(p) - p p^T)``, from its scores."""
    terms, keep = by_term(scores), sums.places.keep
    extra = torch.where(keep, term_weights(outputs, terms, data), 0.0)
    probabilities = torch.where(keep.unsqueeze(2), terms, 0.0).softmax(-1)
    _add(Slot(layer, True, False), factors.softmax(probabilities, weight=sums.places.samples, extra=extra), sums)


def curvature_of(layer: Layer, sums: Sums) -> Curvature:
    """Both sides of a layer, counting the samples."""
    return Curvature(_side(layer, True, sums), _side(layer, False, sums))


def _side(layer: Layer, left: bool, sums: Sums) -> Factor | None:
    """Of inputs and output gradients of a tied leaf: their mean on the left, their sum on the right."""
    samples = sums.places.samples
    gradients, inputs = (sums.factors.get(Slot(layer, left, of_inputs)) for of_inputs in (False, True))
    if gradients is not None and inputs is not None:
        both = factors.add(gradients, inputs)
        return both._replace(weight=(2 * samples if left else samples).to(both.weight))
    only = inputs if gradients is None else gradients
    return None if only is None else only._replace(weight=samples.to(only.weight))


def _work(block: int, inputs: bool, sums: Sums) -> Work:
    """The tasks of a block: one for every side of its layers, inputs and output gradients apart."""
    known, uses, index, made_of = sums.known, {}, {}, []
    for layer in sums.layers.get(block, ()):
        met, small = known.met[layer], known.small(layer)
        here = [(k, use) for k, use in enumerate(use for use in met if use.block == block)]
        for left in (True,) if small else (True, False):
            for of_inputs in (False, True) if inputs else (False,):
                slot = Slot(layer, left, of_inputs)
                mine = [k for k, use in here if small or (use.inputs_left == left) == of_inputs]
                if (small and of_inputs) or not mine or _form(slot, sums) in (Form.SKIP, Form.SOFTMAX):
                    continue
                numbers = tuple(index.setdefault((layer.weight, k), len(index)) for k in mine)
                made_of.append((slot, _task(slot, numbers, small, sums)))
                uses[layer.weight] = len(here)
    return Work(uses, tuple(index), tuple(slot for slot, _ in made_of), tuple(task for _, task in made_of))


def _task(slot: Slot, numbers: tuple[int, ...], small: bool, sums: Sums) -> Task:
    return Task(
        numbers,
        slot.left,
        slot.inputs,
        _form(slot, sums),
        bias=slot.inputs and slot.layer.bias is not None,
        small=small,
        reduced=small or sums.sharing is Sharing.REDUCE,
        last=len(numbers) == _uses(slot, sums),
        uses=_uses_with_inputs(sums.known, slot.layer, slot.left) if slot.inputs else (),
    )


def _uses(slot: Slot, sums: Sums) -> int:
    """How many uses of a layer, in all blocks, have rows for a slot."""
    met = sums.known.met[slot.layer]
    small = sums.known.small(slot.layer)
    return len(met) if small else sum((use.inputs_left == slot.left) == slot.inputs for use in met)


def _uses_with_inputs(known: Survey, layer: Layer, left: bool) -> Uses:
    return tuple(use.tokens for use in known.met[layer] if use.inputs_left == left)


def _run_of(tasks: tuple[Task, ...]) -> Callable[[list[Record], Places], list[Factor | Tensor]]:
    def run(records: list[Record], places: Places) -> list[Factor | Tensor]:
        return sums_of(tasks, records, places)

    return run


def _add(slot: Slot, factor: Factor, sums: Sums) -> None:
    sums.factors[slot] = factor if slot not in sums.factors else factors.add(sums.factors[slot], factor)


def _wait(slot: Slot, rows: Float[Tensor, "batch n"], uses: int, sums: Sums) -> None:
    """Rows of some uses; once all have come they are squared."""
    if slot in sums.waiting:
        more, others = sums.waiting.pop(slot)
        rows, uses = more + rows, others + uses
    if uses == _uses(slot, sums):
        _add(slot, made(_form(slot, sums), rows, sums.places), sums)
    else:
        sums.waiting[slot] = rows, uses


def _form(slot: Slot, sums: Sums) -> Form:
    """The side's form. Beside a softmax of probabilities, an embedding's inputs are a diagonal, and exactly so."""
    form = sums.forms[slot.layer][0 if slot.left else 1]
    return Form.DIAGONAL if form is Form.SOFTMAX and slot.inputs else form


def _check_places(path: Path, met: tuple[Met, ...], present: Tensor | None) -> None:
    if present is None:
        return
    for use in met:
        if use.tokens not in (1, present.shape[1]):
            raise FdpError(
                f"{path}: used at {use.tokens} places of every sample, but Outputs.present says which of "
                f"{present.shape[1]} tokens are padding; expected as many, or one"
            )


def _whole(record: Record, cut: tuple[Axis, int] | None) -> Record:
    """The record of the whole leaf, where the leaf is cut over a tensor axis: rows or columns from all its ranks."""
    if cut is None or cut[0].size == 1:
        return record
    axis, dim = cut
    if isinstance(record, Dense):
        return Dense(_gathered(record.gradient, dim + 1, axis))
    if dim > 0:
        return record._replace(right=_gathered(record.right, -1, axis))
    assert isinstance(record.left, Tensor)
    return record._replace(left=_gathered(record.left, -1, axis))


def _gathered(x: Tensor, dim: int, axis: Axis) -> Tensor:
    return collectives.wait(collectives.all_gather(x.movedim(dim, 0), axis)).movedim(0, dim)
