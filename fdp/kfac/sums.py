"""Rows into factors: what every use of a layer adds to its two sides, and when.

    expand    each place's row is squared by itself, as soon as it is there
    reduce    a sample's rows are added up over all places first, and wait until the last use of the layer has come

Rows of padding are made exactly 0, and inputs are divided by the number of a sample's places. The equations are those
of ``fdp.kfac.collect``, which drives this.

    >>> sums = make_sums(known, forms, sharing, mask, present, sharding)
    >>> for i, found in backward(...): add_records(i, found, sums, inputs=True)
    >>> curvature_of(layer, sums)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import collectives
from fdp.collectives import Axis
from fdp.kfac import factors
from fdp.kfac.fisher import by_term, term_weights
from fdp.kfac.forms import Form
from fdp.kfac.layers import Met, Survey
from fdp.kfac.types import Curvature, Factor, Layer
from fdp.model import Model, Outputs
from fdp.rules import Dense, OneHot, Pair, Record, per_sample_gradient
from fdp.sharding import Sharding
from fdp.types import FdpError, Path, Tree


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


class Sums(NamedTuple):
    """What holds for one microbatch, and what has been added up of it so far.

    ``keep``: 1 for a sample, 0 for padding. ``waiting``: rows that are squared once all uses of their layer have come;
    ``met``: how many have.
    """

    known: Survey
    forms: Forms
    sharing: Sharing
    keep: Float[Tensor, " batch"]
    present: Float[Tensor, "batch tokens"] | None
    cuts: dict[Path, tuple[Axis, int]]
    factors: dict[Slot, Factor]
    waiting: dict[Slot, Tensor]
    met: dict[Layer, int]


def make_sums(
    known: Survey,
    forms: Forms,
    sharing: Sharing,
    mask: Float[Tensor, " batch"],
    present: Float[Tensor, "batch tokens"] | None,
    sharding: Sharding | None,
) -> Sums:
    """Nothing added up yet."""
    keep = (mask > 0).to(torch.promote_types(known.plan.dtype, torch.float32))
    leaves = {} if sharding is None else sharding.leaves
    cuts = {path: cut for path, leaf in leaves.items() for cut in leaf.cuts if cut[0].name == "tensor"}
    return Sums(known, forms, sharing, keep, None if present is None else present.to(keep), cuts, {}, {}, {})


def present_of(model: Model, data: Tree) -> Float[Tensor, "batch tokens"] | None:
    """Which tokens are not padding, by the model's last block; None: all."""
    outputs = model.blocks[-1].outputs
    present = None if outputs is None or outputs.present is None else outputs.present(data)
    return None if present is None else present.flatten(1)


def add_records(block: int, found: dict[Path, list[Record]], sums: Sums, *, inputs: bool) -> None:
    """What the backward of block number ``block`` found, all of it. ``inputs`` False: output gradients only.

    The records are taken out of ``found``: nothing of a block is alive while the next one is pulled.
    """
    layers = {layer.weight: layer for layer in sums.forms}
    while found:
        path, records = found.popitem()
        if path not in layers:  # a block whose per-sample gradients are made whole has them of all its leaves
            continue
        layer = layers[path]
        for record, use in zip(records, sums.known.uses_in(layer, block), strict=True):
            _add_record(_whole(record, sums.cuts.get(path)), layer, use, sums, inputs)


def add_probabilities(outputs: Outputs, scores: Tensor, data: Tree, layer: Layer, sums: Sums) -> None:
    """The left side of a head, ``1/N sum_b sum_t w_bt (diag(p) - p p^T)``, from its scores."""
    terms = by_term(scores)
    extra = _kept(term_weights(outputs, terms, data), sums.keep)
    probabilities = _kept(terms, sums.keep).softmax(-1)
    _add(Slot(layer, True, False), factors.softmax(probabilities, weight=0.0, extra=extra), sums)


def curvature_of(layer: Layer, sums: Sums) -> Curvature:
    """Both sides of a layer, counting the samples."""
    return Curvature(_side(layer, True, sums), _side(layer, False, sums))


def _side(layer: Layer, left: bool, sums: Sums) -> Factor | None:
    """Of inputs and output gradients of a tied leaf: their mean on the left, their sum on the right."""
    samples = sums.keep.sum()
    gradients, inputs = (sums.factors.get(Slot(layer, left, of_inputs)) for of_inputs in (False, True))
    if gradients is not None and inputs is not None:
        both = factors.add(gradients, inputs)
        return both._replace(weight=(2 * samples if left else samples).to(both.weight))
    only = inputs if gradients is None else gradients
    return None if only is None else only._replace(weight=samples.to(only.weight))


def _add_record(record: Record, layer: Layer, use: Met, sums: Sums, inputs: bool) -> None:
    sums.met[layer] = sums.met.get(layer, 0) + 1
    if sums.known.small(layer):
        gradient = factors.widened(per_sample_gradient(record))
        _wait(Slot(layer, True, False), _kept(gradient.flatten(1), sums.keep), sums)
    else:
        assert isinstance(record, Pair)
        for left in (True, False):
            slot = Slot(layer, left, inputs=left == use.inputs_left)
            if _form(slot, sums) is not Form.SKIP and (inputs or not slot.inputs):
                _add_side(record, slot, sums)
    if sums.met[layer] == len(sums.known.met[layer]):
        del sums.met[layer]
        for slot in [slot for slot in sums.waiting if slot.layer == layer]:
            _add(slot, _made(_form(slot, sums), sums.waiting.pop(slot)), sums)


def _add_side(record: Pair, slot: Slot, sums: Sums) -> None:
    form = _form(slot, sums)
    if form is Form.SOFTMAX:
        return  # made of probabilities
    side = record.left if slot.left else record.right
    counts = _counts(slot.layer.weight, record.right.shape[2], sums)
    if isinstance(side, OneHot):
        each = (counts * _share(slot, sums)).expand(side.ids.shape)
        if sums.sharing is Sharing.EXPAND:
            _add(slot, factors.one_hot(side.ids, record.shape[0], weight=0.0, extra=each), sums)
        else:
            _wait(slot, each.new_zeros(len(each), record.shape[0]).scatter_add(1, side.ids.long(), each), sums)
        return
    rows = _kept(side, counts.unsqueeze(1))
    if slot.layer.bias is not None and slot.inputs:
        ones = counts.to(rows.dtype)[:, None, :, None].expand(*rows.shape[:-1], 1)
        rows = torch.cat([rows, ones], -1)
    # Groups are rows of their own on the left; on the right they are places, like tokens.
    rows = rows.transpose(1, 2).flatten(2) if slot.left else rows.flatten(1, 2)
    if sums.sharing is Sharing.REDUCE:
        total = rows.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32))
        _wait(slot, total * _share(slot, sums) if slot.inputs else total, sums)
    elif not slot.inputs:
        _add(slot, _made(form, rows), sums)
    elif sums.present is None:  # the same for all samples: the sum is scaled, and rows may stay in half precision
        _add(slot, factors.decayed(_made(form, rows), 1 / _places(slot, sums)), sums)
    else:
        _add(slot, _made(form, factors.widened(rows) * _share(slot, sums).sqrt().unsqueeze(2)), sums)


def _add(slot: Slot, factor: Factor, sums: Sums) -> None:
    sums.factors[slot] = factor if slot not in sums.factors else factors.add(sums.factors[slot], factor)


def _wait(slot: Slot, rows: Float[Tensor, "batch n"], sums: Sums) -> None:
    sums.waiting[slot] = rows if slot not in sums.waiting else sums.waiting[slot] + rows


def _form(slot: Slot, sums: Sums) -> Form:
    """The side's form. Beside a softmax of probabilities, an embedding's inputs are a diagonal."""
    form = sums.forms[slot.layer][0 if slot.left else 1]
    return Form.DIAGONAL if form is Form.SOFTMAX and slot.inputs else form


def _made(form: Form, rows: Float[Tensor, "*places n"]) -> Factor:
    make = {Form.DENSE: factors.dense, Form.COLUMNS: factors.columns, Form.DIAGONAL: factors.diagonal}[form]
    return make(rows, weight=0.0)


def _counts(path: Path, tokens: int, sums: Sums) -> Float[Tensor, "batch tokens"]:
    """1 where a sample counts and its token is not padding; 0 elsewhere."""
    if sums.present is None or tokens == 1:
        return sums.keep.unsqueeze(1).expand(-1, tokens)
    if sums.present.shape[1] != tokens:
        raise FdpError(
            f"{path}: used at {tokens} places of every sample, but Outputs.present says which of "
            f"{sums.present.shape[1]} tokens are padding; expected as many, or one"
        )
    return sums.keep.unsqueeze(1) * (sums.present > 0)


def _places(slot: Slot, sums: Sums) -> int:
    """At how many places a sample uses the layer with its inputs on this side, padding included."""
    return sum(use.groups * use.tokens for use in sums.known.met[slot.layer] if use.inputs_left == slot.left)


def _share(slot: Slot, sums: Sums) -> Float[Tensor, "batch 1"]:
    """``1 / n_b``: what each place of a sample counts; 0 for a sample without any."""
    if sums.present is None:
        return torch.full_like(sums.keep, 1 / _places(slot, sums)).unsqueeze(1)
    places = torch.stack(
        [
            use.groups * _counts(slot.layer.weight, use.tokens, sums).sum(1, keepdim=True)
            for use in sums.known.met[slot.layer]
            if use.inputs_left == slot.left
        ]
    ).sum(0)
    return torch.where(places > 0, 1 / places, 0.0)


def _kept(rows: Tensor, keep: Tensor) -> Tensor:
    """The rows that count, exactly 0 for the others, whatever they hold."""
    keep = keep.reshape(*keep.shape, *[1] * (rows.ndim - keep.ndim))
    return torch.where(keep > 0, rows, rows.new_zeros(()))


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
