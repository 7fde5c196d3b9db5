"""One block's records into sums: a function of tensors alone, compiled once for every kind of block.

    expand    each place's row is squared by itself
    reduce    a sample's rows are added up over all places first, and wait until the last use of the layer has come

Rows of padding are made exactly 0, whatever they hold, and inputs are divided by the number of a sample's places. A
:class:`Task` names no leaf and no block, so that the layers of a stack have equal ones; all that depends on the mask
alone is made once, as :class:`Places`. The equations are those of ``fdp.kfac.measure.collect``.

    >>> places = make_places(mask, present, uses, dtype)
    >>> sums_of(tasks, records, places)                        # a Factor, or rows that wait, for every task
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
from fdp.kfac.factors import ALIGNED, HALF, widened, wider
from fdp.kfac.forms import Form
from fdp.kfac.types import ColumnsFactor, DenseFactor, DiagonalFactor, Factor

Uses: TypeAlias = tuple[int, ...]
"""The tokens of every use of a layer, in any block, that has its inputs on one side."""

Made: TypeAlias = DenseFactor | ColumnsFactor | DiagonalFactor
"""What rows can be made into."""


class Task(NamedTuple):
    """What some records of a block, uses of one layer, add to one side of it.

    ``inputs``: the side is that of inputs (else of output gradients), which ``uses`` share. ``bias``: a column of ones
    comes last. ``small``: there are no sides, only per-sample gradients. ``reduced``: a sample's rows are added up;
    ``last``: no use of the layer is elsewhere, so that they need not wait.
    """

    records: tuple[int, ...]
    left: bool
    inputs: bool
    form: Form
    bias: bool
    small: bool
    reduced: bool
    last: bool
    uses: Uses


class Places(NamedTuple):
    """What counts in a microbatch: its samples and, in them, tokens that are not padding.

    ``lengths``: how many of a sample's tokens are ``present``. ``ones``: the column of a bias where no token is
    padding, and some of zeros, for rows as wide as a GPU wants them. ``shares``: ``1 / n_b`` by uses, what each place
    of a sample counts; 0 for a sample without any.
    """

    keep: Bool[Tensor, "batch 1"]
    present: Bool[Tensor, "batch tokens"] | None
    samples: Float[Tensor, ""]
    lengths: Float[Tensor, "batch 1"]
    ones: Float[Tensor, "batch 1 columns"]
    zero: Float[Tensor, ""]
    shares: dict[Uses, Float[Tensor, "batch 1"]]


def make_places(
    mask: Float[Tensor, " batch"],
    present: Bool[Tensor, "batch tokens"] | None,
    uses: Iterable[Uses],
    dtype: torch.dtype,
) -> Places:
    """What ``mask`` and ``present`` let count, for rows in ``dtype``. ``uses``: those that tasks will have."""
    keep = (mask > 0).unsqueeze(1)
    counted = keep if present is None else keep & (present > 0)
    wide = wider(dtype)
    ones = F.pad(keep.to(dtype).unsqueeze(2), (0, ALIGNED - 1))
    lengths = counted.sum(1, keepdim=True, dtype=wide)
    zero, samples = ones.new_zeros(()), keep.sum(dtype=wide)
    places = Places(keep, None if present is None else counted, samples, lengths, ones, zero, {})
    for each in dict.fromkeys(uses):
        number = torch.stack([_number(use, places) for use in each]).sum(0)
        places.shares[each] = torch.where(number > 0, 1 / number, 0.0)
    return places


def sums_of(tasks: Sequence[Task], records: Sequence[Record], places: Places) -> list[Factor | Tensor]:
    """What each task adds: a factor, or rows (batch, n) that wait for the other uses of their layer.

    A factor's weight is that of its uses, each of which has all samples: who adds up a layer counts them once.

    Guarantees:
      - a sample of mask 0 and a token that is padding are in no sum and no count, whatever they hold;
      - rows in half precision are multiplied and added in float32.
    """
    return [_sum(task, [records[i] for i in task.records], places) for task in tasks]


def made(form: Form, rows: Float[Tensor, "*places n"], places: Places) -> Made:
    """The factor of rows, in its form."""
    make = {Form.DENSE: factors.dense, Form.COLUMNS: factors.columns, Form.DIAGONAL: factors.diagonal}[form]
    return make(rows, weight=places.samples)


def _sum(task: Task, records: list[Record], places: Places) -> Factor | Tensor:
    first, *others = records
    if not task.reduced:
        factor = _expanded(task, first, places)
        for record in others:
            factor = factors.add(factor, _expanded(task, record, places))
        return factor
    rows = _reduced(task, first, places)
    if others or not task.last:
        rows = widened(rows)  # they are added up
    for record in others:
        rows = rows + _reduced(task, record, places)
    return made(task.form, rows, places) if task.last else rows


def _expanded(task: Task, record: Record, places: Places) -> Factor:
    assert isinstance(record, Pair)
    side = record.left if task.left else record.right
    if isinstance(side, OneHot):
        each = _each(record, task, places)
        return factors.one_hot(side.ids, record.shape[0], weight=places.samples, extra=each)
    rows = _rows(side, places)
    if not task.inputs:
        return made(task.form, rows, places)
    if places.present is None:  # the same for all samples: the sum is scaled, and rows may stay in half precision
        factor = _with_ones(task, record, rows, None, places)
        return _scaled(factor, 1 / sum(task.uses))
    root = places.shares[task.uses].sqrt()
    return _with_ones(task, record, rows * root.unsqueeze(2), root, places)


def _with_ones(
    task: Task,
    record: Pair,
    rows: Float[Tensor, "batch places n"],
    root: Float[Tensor, "batch 1"] | None,
    places: Places,
) -> Made:
    """The factor of rows of inputs and, for a bias, each place's 1 at their end, times ``root`` as they were."""
    if not task.bias:
        return made(task.form, rows, places)
    _, groups, tokens, _ = record.right.shape
    if task.form is Form.DIAGONAL:
        every = tokens * places.samples
        last = every if root is None else (_number(tokens, places) * root * root).sum()
        total, weight = factors.diagonal(rows, weight=places.samples)
        return DiagonalFactor(_with_last(total, last.reshape(1).to(total), groups), weight)
    size = rows.shape[2] + 1
    spare = -size % ALIGNED if task.form is Form.DENSE and rows.dtype in HALF else 0
    ones = places.ones[..., : 1 + spare] if root is None else (_mask(tokens, places) * root).unsqueeze(2)
    joined = torch.cat([rows, ones.to(rows.dtype).expand(-1, tokens, -1)], -1)
    return factors.dense(joined, weight=places.samples, size=size) if spare else made(task.form, joined, places)


def _reduced(task: Task, record: Record, places: Places) -> Float[Tensor, "batch n"]:
    if task.small:
        gradient = per_sample_gradient(record).flatten(1)
        return torch.where(places.keep, gradient, places.zero.to(gradient.dtype))
    assert isinstance(record, Pair)
    side = record.left if task.left else record.right
    if isinstance(side, OneHot):
        each = _each(record, task, places)
        return each.new_zeros(len(each), record.shape[0]).scatter_add(1, side.ids.long(), each)
    rows = _rows(side, places)
    total = rows.sum(1, dtype=wider(rows.dtype))
    if task.bias and task.inputs:
        _, groups, tokens, _ = record.right.shape
        total = _with_last(total, _number(tokens, places).to(total), groups)
    return total * places.shares[task.uses] if task.inputs else total


def _rows(side: Float[Tensor, "batch groups tokens n"], places: Places) -> Float[Tensor, "batch places columns"]:
    """The rows that count, exactly 0 for the others. Groups, which share nothing, are columns side by side."""
    mask = _mask(side.shape[2], places)
    rows = torch.where(mask[:, None, :, None], side, places.zero.to(side.dtype))
    return rows.transpose(1, 2).flatten(2)


def _with_last(
    x: Float[Tensor, "*batch columns"], last: Float[Tensor, "*batch 1"], groups: int
) -> Float[Tensor, "*batch more"]:
    """``x`` with ``last`` at the end of the columns of every group."""
    if groups == 1:
        return torch.cat([x, last], -1)
    apart = x.unflatten(-1, (groups, -1))
    return torch.cat([apart, last.unsqueeze(-2).expand(*apart.shape[:-1], 1)], -1).flatten(-2)


def _mask(tokens: int, places: Places) -> Bool[Tensor, "batch tokens"]:
    """Which places count, of a use at ``tokens`` places of a sample; one for all of them where they are alike."""
    return places.keep if places.present is None or tokens == 1 else places.present


def _number(tokens: int, places: Places) -> Float[Tensor, "batch 1"]:
    """At how many places that count a sample uses a layer; of groups, each of them."""
    if places.present is None or tokens == 1:
        return places.keep.to(places.lengths.dtype) * tokens
    return places.lengths


def _each(record: Pair, task: Task, places: Places) -> Float[Tensor, "batch tokens"]:
    """What each place of a one-hot side counts."""
    tokens = record.right.shape[2]
    return (_mask(tokens, places) * places.shares[task.uses]).expand(-1, tokens)


def _scaled(factor: Made, by: float) -> Made:
    """The matrix times ``by``, of the same weight. (Written out: torch 2.11 does not compile ``_replace``.)"""
    match factor:
        case DenseFactor():
            return DenseFactor(factor.total * by, factor.weight)
        case DiagonalFactor():
            return DiagonalFactor(factor.total * by, factor.weight)
        case ColumnsFactor():
            return ColumnsFactor(widened(factor.columns) * by**0.5, factor.weight)
