"""Factors from the records of one block: a function of tensors alone, compiled once per kind of block.

    expand    each position's row is squared by itself
    reduce    a sample's rows are added up over all positions first; if other blocks use the layer too, the sum is
              returned as rows, to be squared once all uses have been added

Rows of padding are set to exactly 0, whatever they hold. Inputs are divided by the sample's number of positions. A
:class:`Task` names neither leaf nor block, so equal blocks have equal tasks. Everything that depends on the mask alone
is computed once, as :class:`TokenMask`. The equations are in ``fdp.kfac.measure.collect``.

    >>> tokens = make_token_mask(mask, present, uses, dtype)
    >>> run_tasks(tasks, records, tokens)                   # for each task, a Factor or the rows to wait for other uses
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from fdp.gradients.rules import OneHot, Pair, Record, per_sample_gradient
from fdp.kfac import factors
from fdp.kfac.factor_forms import Form
from fdp.kfac.factors import ALIGNMENT_ELEMENTS, HALF, sum_dtype, upcast
from fdp.kfac.types import ColumnsFactor, DenseFactor, DiagonalFactor, Factor

Positions: TypeAlias = tuple[int, ...]
"""The number of positions of every use of a layer, in any block, that has its inputs on one side."""

RowsFactor: TypeAlias = DenseFactor | ColumnsFactor | DiagonalFactor
"""The factors that can be computed from rows."""


class Task(NamedTuple):
    """The contribution of some records of a block, all of one layer, to one side of that layer.

    ``records``: their numbers in the block. ``inputs``: rows are inputs, else output gradients. ``bias``: append a
    column of ones. ``elementwise``: the layer has no sides, only per-sample gradients. ``reduced``: add up a sample's
    rows. ``last``: no other block uses the layer, so reduced rows can be squared at once. ``positions``: of all uses
    that share the side of inputs.
    """

    records: tuple[int, ...]
    left: bool
    inputs: bool
    form: Form
    bias: bool
    elementwise: bool
    reduced: bool
    last: bool
    positions: Positions


class TokenMask(NamedTuple):
    """The samples and tokens of a microbatch that count, and how many they are.

    ``keep``: samples that are not padding. ``present``: tokens that are not padding, of these samples; None if all are.
    ``samples``: their number. ``lengths``: tokens per sample. ``ones``: the column of ones of a bias, followed by zeros
    up to the alignment. ``shares``: ``1 / n_b`` for each entry of ``Positions``, 0 for a sample without tokens.
    """

    keep: Bool[Tensor, "batch 1"]
    present: Bool[Tensor, "batch tokens"] | None
    samples: Float[Tensor, ""]
    lengths: Float[Tensor, "batch 1"]
    ones: Float[Tensor, "batch 1 columns"]
    zero: Float[Tensor, ""]
    shares: dict[Positions, Float[Tensor, "batch 1"]]


def make_token_mask(
    mask: Float[Tensor, " batch"],
    present: Bool[Tensor, "batch tokens"] | None,
    uses: Iterable[Positions],
    dtype: torch.dtype,
) -> TokenMask:
    """Return the mask for rows in ``dtype``. ``uses``: the ``positions`` of all tasks that will read it."""
    keep = (mask > 0).unsqueeze(1)
    counted = keep if present is None else keep & (present > 0)
    wide = sum_dtype(dtype)
    ones = F.pad(keep.to(dtype).unsqueeze(2), (0, ALIGNMENT_ELEMENTS - 1))
    lengths = counted.sum(1, keepdim=True, dtype=wide)
    zero, samples = ones.new_zeros(()), keep.sum(dtype=wide)
    tokens = TokenMask(keep, None if present is None else counted, samples, lengths, ones, zero, {})
    for each in dict.fromkeys(uses):
        number = torch.stack([_count(use, tokens) for use in each]).sum(0)
        tokens.shares[each] = torch.where(number > 0, 1 / number, 0.0)
    return tokens


def run_tasks(tasks: Sequence[Task], records: Sequence[Record], tokens: TokenMask) -> list[Factor | Tensor]:
    """Return, for each task, a factor, or rows (batch, n) that wait for the other uses of their layer.

    The weight of a factor is the number of samples, for each use; whoever adds up a layer counts them once.

    Guarantees:
      - a sample of mask 0 and a token that is padding are in no sum and no count, whatever they hold;
      - rows in half precision are multiplied and added in float32.
    """
    return [_run_task(task, [records[i] for i in task.records], tokens) for task in tasks]


def factor_from_rows(form: Form, rows: Float[Tensor, "*positions n"], tokens: TokenMask) -> RowsFactor:
    """Return the factor of the rows in the given form."""
    make = {Form.DENSE: factors.dense, Form.COLUMNS: factors.columns, Form.DIAGONAL: factors.diagonal}[form]
    return make(rows, weight=tokens.samples)


def _run_task(task: Task, records: list[Record], tokens: TokenMask) -> Factor | Tensor:
    first, *others = records
    if not task.reduced:
        factor = _expand(task, first, tokens)
        for record in others:
            factor = factors.add(factor, _expand(task, record, tokens))
        return factor
    rows = _reduce(task, first, tokens)
    if others or not task.last:
        rows = upcast(rows)  # more rows will be added
    for record in others:
        rows = rows + _reduce(task, record, tokens)
    return factor_from_rows(task.form, rows, tokens) if task.last else rows


def _expand(task: Task, record: Record, tokens: TokenMask) -> Factor:
    assert isinstance(record, Pair)
    side = record.left if task.left else record.right
    if isinstance(side, OneHot):
        each = _one_hot_weights(record, task, tokens)
        return factors.one_hot(side.ids, record.shape[0], weight=tokens.samples, extra=each)
    rows = _masked_rows(side, tokens)
    if not task.inputs:
        return factor_from_rows(task.form, rows, tokens)
    if tokens.present is None:  # 1 / n_b is the same for all samples: scale the sum, and leave rows in half precision
        factor = _with_bias(task, record, rows, None, tokens)
        return _scale_factor(factor, 1 / sum(task.positions))
    root = tokens.shares[task.positions].sqrt()
    return _with_bias(task, record, rows * root.unsqueeze(2), root, tokens)


def _with_bias(
    task: Task,
    record: Pair,
    rows: Float[Tensor, "batch positions n"],
    root: Float[Tensor, "batch 1"] | None,
    tokens: TokenMask,
) -> RowsFactor:
    """Return the factor of input rows, with a last column of ones (times ``root``, as the rows are) for a bias."""
    if not task.bias:
        return factor_from_rows(task.form, rows, tokens)
    _, groups, positions, _ = record.right.shape
    if task.form is Form.DIAGONAL:
        every = positions * tokens.samples
        last = every if root is None else (_count(positions, tokens) * root * root).sum()
        total, weight = factors.diagonal(rows, weight=tokens.samples)
        return DiagonalFactor(_append_to_groups(total, last.reshape(1).to(total), groups), weight)
    size = rows.shape[2] + 1
    spare = -size % ALIGNMENT_ELEMENTS if task.form is Form.DENSE and rows.dtype in HALF else 0
    ones = tokens.ones[..., : 1 + spare] if root is None else (_mask(positions, tokens) * root).unsqueeze(2)
    extended = torch.cat([rows, ones.to(rows.dtype).expand(-1, positions, -1)], -1)
    if spare:
        return factors.dense(extended, weight=tokens.samples, size=size)
    return factor_from_rows(task.form, extended, tokens)


def _reduce(task: Task, record: Record, tokens: TokenMask) -> Float[Tensor, "batch n"]:
    if task.elementwise:
        gradient = per_sample_gradient(record).flatten(1)
        return torch.where(tokens.keep, gradient, tokens.zero.to(gradient.dtype))
    assert isinstance(record, Pair)
    side = record.left if task.left else record.right
    if isinstance(side, OneHot):
        each = _one_hot_weights(record, task, tokens)
        return each.new_zeros(len(each), record.shape[0]).scatter_add(1, side.ids.long(), each)
    rows = _masked_rows(side, tokens)
    total = rows.sum(1, dtype=sum_dtype(rows.dtype))
    if task.bias and task.inputs:
        _, groups, positions, _ = record.right.shape
        total = _append_to_groups(total, _count(positions, tokens).to(total), groups)
    return total * tokens.shares[task.positions] if task.inputs else total


def _masked_rows(
    side: Float[Tensor, "batch groups positions n"], tokens: TokenMask
) -> Float[Tensor, "batch positions columns"]:
    """Set rows of padding to exactly 0, and put groups, which share nothing, side by side as columns."""
    mask = _mask(side.shape[2], tokens)
    rows = torch.where(mask[:, None, :, None], side, tokens.zero.to(side.dtype))
    return rows.transpose(1, 2).flatten(2)


def _append_to_groups(
    x: Float[Tensor, "*batch columns"], last: Float[Tensor, "*batch 1"], groups: int
) -> Float[Tensor, "*batch more"]:
    """Append ``last`` to the columns of every group."""
    if groups == 1:
        return torch.cat([x, last], -1)
    by_group = x.unflatten(-1, (groups, -1))
    return torch.cat([by_group, last.unsqueeze(-2).expand(*by_group.shape[:-1], 1)], -1).flatten(-2)


def _mask(positions: int, tokens: TokenMask) -> Bool[Tensor, "batch positions"]:
    """Return the mask of a use at ``positions`` positions of a sample, or (batch, 1) if all have the same."""
    return tokens.keep if tokens.present is None or positions == 1 else tokens.present


def _count(positions: int, tokens: TokenMask) -> Float[Tensor, "batch 1"]:
    """Return at how many positions that count each sample uses a layer (each group of it, if there are groups)."""
    if tokens.present is None or positions == 1:
        return tokens.keep.to(tokens.lengths.dtype) * positions
    return tokens.lengths


def _one_hot_weights(record: Pair, task: Task, tokens: TokenMask) -> Float[Tensor, "batch positions"]:
    """Return the weight of each position of a one-hot side."""
    positions = record.right.shape[2]
    return (_mask(positions, tokens) * tokens.shares[task.positions]).expand(-1, positions)


def _scale_factor(factor: RowsFactor, by: float) -> RowsFactor:
    """Multiply the matrix and leave the weight. (Written out because torch 2.11 does not compile ``_replace``.)"""
    match factor:
        case DenseFactor():
            return DenseFactor(factor.total * by, factor.weight)
        case DiagonalFactor():
            return DiagonalFactor(factor.total * by, factor.weight)
        case ColumnsFactor():
            return ColumnsFactor(upcast(factor.columns) * by**0.5, factor.weight)
