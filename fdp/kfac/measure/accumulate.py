"""Accumulation of the factors of all blocks, by layer and side.

The backward pass hands over the records of one block at a time. :mod:`fdp.kfac.measure.block_factors` turns them into
factors in one call of the runner, which may compile it. Inputs are the same in every pass and are added in the first
one only; output gradients are added in all.

    >>> sums = make_accumulator(estimator, mask, present, execution)
    >>> for i, found in backward(...): add_records(i, found, sums, inputs=True)
    >>> curvature_of(layer, sums)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.execution import Execution, Runner
from fdp.gradients.rules import Dense, Record
from fdp.kfac import factors
from fdp.kfac.factor_forms import Form
from fdp.kfac.layers import LeafUse, Survey
from fdp.kfac.measure.block_factors import Positions, Task, TokenMask, factor_from_rows, make_token_mask, run_tasks
from fdp.kfac.measure.estimator import Estimator, Sharing
from fdp.kfac.measure.fisher import by_term, term_weights
from fdp.kfac.types import Curvature, Factor, Layer
from fdp.model import Model, Outputs
from fdp.parallel import collectives
from fdp.types import Axis, FdpError, Path, Tree


class FactorKey(NamedTuple):
    """The factor that rows belong to: a side of a layer, of its inputs or (``inputs`` False) its output gradients."""

    layer: Layer
    left: bool
    inputs: bool


class BlockTasks(NamedTuple):
    """The tasks of a block: the records they read (leaf and number), and the factor that each one adds to.

    ``uses``: how many records each leaf must have.
    """

    uses: dict[Path, int]
    records: tuple[tuple[Path, int], ...]
    keys: tuple[FactorKey, ...]
    tasks: tuple[Task, ...]


class Accumulator(NamedTuple):
    """The factors of one microbatch so far, and what they are computed with. Its dictionaries are updated in place.

    ``layers``: by block. ``cuts``: how leaves are split over the tensor axis. ``tasks``: by block and ``inputs``,
    filled at first use. ``waiting``: rows that are squared once all uses of their layer have been added, and the number
    of uses they contain.
    """

    estimator: Estimator
    tokens: TokenMask
    layers: dict[int, dict[Layer, None]]
    cuts: dict[Path, tuple[Axis, int]]
    runner: Runner
    tasks: dict[tuple[int, bool], BlockTasks]
    factors: dict[FactorKey, Factor]
    waiting: dict[FactorKey, tuple[Tensor, int]]


def make_accumulator(
    estimator: Estimator,
    mask: Float[Tensor, " batch"],
    present: Float[Tensor, "batch tokens"] | None,
    execution: Execution,
) -> Accumulator:
    """Return an empty accumulator for one microbatch."""
    survey = estimator.survey
    layers: dict[int, dict[Layer, None]] = {}
    positions: dict[Positions, None] = {}
    for layer in estimator.measured.values():
        for use in survey.uses[layer]:
            layers.setdefault(use.block, {})[layer] = None
        if not survey.is_elementwise(layer):
            _check_positions(layer.weight, survey.uses[layer], present)
            positions |= {each: None for left in (True, False) if (each := _input_positions(survey, layer, left))}
    tokens = make_token_mask(mask, present, positions, survey.plan.dtype)
    leaves = {} if execution.sharding is None else execution.sharding.leaves
    cuts = {path: cut for path, leaf in leaves.items() for cut in leaf.sharded_dims if cut[0].name == "tensor"}
    return Accumulator(estimator, tokens, layers, cuts, execution.runner, {}, {}, {})


def present_tokens(model: Model, data: Tree) -> Float[Tensor, "batch tokens"] | None:
    """Return the mask of tokens that are not padding, as the model's last block defines it; None if all count."""
    outputs = model.blocks[-1].outputs
    present = None if outputs is None or outputs.present is None else outputs.present(data)
    return None if present is None else present.flatten(1)


def add_records(block: int, found: dict[Path, list[Record]], sums: Accumulator, *, inputs: bool) -> None:
    """Add all records of block number ``block``; with ``inputs`` False, their output gradients only.

    ``found`` is emptied, so that nothing of a block is alive while the next one is pulled.
    """
    work = sums.tasks.get((block, inputs))
    if work is None:
        work = sums.tasks[block, inputs] = _block_tasks(block, inputs, sums)
    for path, count in work.uses.items():
        assert len(found[path]) == count, f"{path}: expected {count} records of block {block}, got {len(found[path])}"
    records = [_gather_record(found[path][k], sums.cuts.get(path)) for path, k in work.records]
    found.clear()
    values = sums.runner.function(work.tasks, _function_of(work.tasks), records, sums.tokens)
    for key, task, value in zip(work.keys, work.tasks, values):
        if isinstance(value, Tensor):
            _add_rows(key, value, len(task.records), sums)
        else:
            _add_factor(key, value, sums)


def add_probabilities(outputs: Outputs, scores: Tensor, data: Tree, layer: Layer, sums: Accumulator) -> None:
    """Add the left side of a softmax head, ``1/N sum_b sum_t w_bt (diag(p) - p p^T)``, computed from its scores."""
    terms, keep = by_term(scores), sums.tokens.keep
    extra = torch.where(keep, term_weights(outputs, terms, data), 0.0)
    probabilities = torch.where(keep.unsqueeze(2), terms, 0.0).softmax(-1)
    factor = factors.softmax(probabilities, weight=sums.tokens.samples, extra=extra)
    _add_factor(FactorKey(layer, True, False), factor, sums)


def curvature_of(layer: Layer, sums: Accumulator) -> Curvature:
    """Return both factors of a layer, with the number of samples as their weight."""
    return Curvature(_side(layer, True, sums), _side(layer, False, sums))


def _side(layer: Layer, left: bool, sums: Accumulator) -> Factor | None:
    """Return a side's factor; a tied leaf has the mean of inputs and gradients on the left, their sum on the right."""
    samples = sums.tokens.samples
    gradients, inputs = (sums.factors.get(FactorKey(layer, left, of_inputs)) for of_inputs in (False, True))
    if gradients is not None and inputs is not None:
        both = factors.add(gradients, inputs)
        return both._replace(weight=(2 * samples if left else samples).to(both.weight))
    only = inputs if gradients is None else gradients
    return None if only is None else only._replace(weight=samples.to(only.weight))


def _block_tasks(block: int, inputs: bool, sums: Accumulator) -> BlockTasks:
    """Return one task for every side of the block's layers, with separate tasks for inputs and output gradients."""
    survey, uses, index, chosen = sums.estimator.survey, {}, {}, []
    for layer in sums.layers.get(block, ()):
        elementwise = survey.is_elementwise(layer)
        here = list(enumerate(survey.uses_in(layer, block)))
        for left in (True,) if elementwise else (True, False):
            for of_inputs in (False, True) if inputs else (False,):
                key = FactorKey(layer, left, of_inputs)
                mine = [k for k, use in here if elementwise or (use.inputs_left == left) == of_inputs]
                if (elementwise and of_inputs) or not mine or _form(key, sums) in (Form.SKIP, Form.SOFTMAX):
                    continue
                numbers = tuple(index.setdefault((layer.weight, k), len(index)) for k in mine)
                chosen.append((key, _task(key, numbers, elementwise, sums)))
                uses[layer.weight] = len(here)
    return BlockTasks(uses, tuple(index), tuple(key for key, _ in chosen), tuple(task for _, task in chosen))


def _task(key: FactorKey, numbers: tuple[int, ...], elementwise: bool, sums: Accumulator) -> Task:
    return Task(
        numbers,
        key.left,
        key.inputs,
        _form(key, sums),
        bias=key.inputs and key.layer.bias is not None,
        elementwise=elementwise,
        reduced=elementwise or sums.estimator.sharing is Sharing.REDUCE,
        last=len(numbers) == _count_uses(key, sums),
        positions=_input_positions(sums.estimator.survey, key.layer, key.left) if key.inputs else (),
    )


def _count_uses(key: FactorKey, sums: Accumulator) -> int:
    """Return how many uses of a layer, in all blocks, add rows to the factor."""
    survey = sums.estimator.survey
    uses = survey.uses[key.layer]
    return (
        len(uses) if survey.is_elementwise(key.layer) else sum((u.inputs_left == key.left) == key.inputs for u in uses)
    )


def _input_positions(survey: Survey, layer: Layer, left: bool) -> Positions:
    return tuple(use.tokens for use in survey.uses[layer] if use.inputs_left == left)


def _function_of(tasks: tuple[Task, ...]) -> Callable[[list[Record], TokenMask], list[Factor | Tensor]]:
    def run(records: list[Record], tokens: TokenMask) -> list[Factor | Tensor]:
        return run_tasks(tasks, records, tokens)

    return run


def _add_factor(key: FactorKey, factor: Factor, sums: Accumulator) -> None:
    sums.factors[key] = factor if key not in sums.factors else factors.add(sums.factors[key], factor)


def _add_rows(key: FactorKey, rows: Float[Tensor, "batch n"], uses: int, sums: Accumulator) -> None:
    """Add the rows of some uses, and square them once all uses are there."""
    if key in sums.waiting:
        more, others = sums.waiting.pop(key)
        rows, uses = more + rows, others + uses
    if uses == _count_uses(key, sums):
        _add_factor(key, factor_from_rows(_form(key, sums), rows, sums.tokens), sums)
    else:
        sums.waiting[key] = rows, uses


def _form(key: FactorKey, sums: Accumulator) -> Form:
    """Return the side's form. An embedding tied to a softmax head has a diagonal, which is exact, for its inputs."""
    form = sums.estimator.forms[key.layer][0 if key.left else 1]
    return Form.DIAGONAL if form is Form.SOFTMAX and key.inputs else form


def _check_positions(path: Path, uses: tuple[LeafUse, ...], present: Tensor | None) -> None:
    if present is None:
        return
    for use in uses:
        if use.tokens not in (1, present.shape[1]):
            raise FdpError(
                f"{path}: expected a weight used at 1 or {present.shape[1]} positions of every sample, the tokens of "
                f"Outputs.present, got {use.tokens}; without Outputs.present all positions count"
            )


def _gather_record(record: Record, cut: tuple[Axis, int] | None) -> Record:
    """Gather the rows or columns of a leaf that is split over a tensor axis from all its ranks."""
    if cut is None or cut[0].size == 1:
        return record
    axis, dim = cut
    if isinstance(record, Dense):
        return Dense(_all_gather(record.gradient, dim + 1, axis))
    if dim > 0:
        return record._replace(right=_all_gather(record.right, -1, axis))
    assert isinstance(record.left, Tensor)
    return record._replace(left=_all_gather(record.left, -1, axis))


def _all_gather(x: Tensor, dim: int, axis: Axis) -> Tensor:
    return collectives.wait(collectives.all_gather(x.movedim(dim, 0), axis)).movedim(0, dim)
