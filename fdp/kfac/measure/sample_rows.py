"""What every sample's statistics are made of: rows of inputs and of output gradients, sample by sample.

    A_b = X_b^T X_b,  X_b the rows of sample b's tokens; of an embedding, where its ones are and how much each counts

A token that is padding has no row; one of an input's side counts ``1 / n_b`` of the sample's ``n_b`` places, so that a
longer sample says no more about inputs than a shorter one. Norm parameters and biases have one row, the
gradient.

    >>> rows = rows_of(model, params, data, known, forms, Fisher.SAMPLED, key, sharding, STORE_ALL)   # {Slot: Rows}
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import tree
from fdp.gradients.block_loop import backward, forward, make_weights
from fdp.gradients.execution import Execution, Memory
from fdp.gradients.rules import OneHot, Pair, Record, per_sample_gradient
from fdp.kfac.forms import Form
from fdp.kfac.layers import Met, Survey
from fdp.kfac.measure.fisher import Fisher, passes, surrogate, with_numbers
from fdp.kfac.measure.sums import Forms, Slot, present_of
from fdp.kfac.types import Layer
from fdp.model import Model
from fdp.parallel.sharding import Sharding
from fdp.types import FdpError, Key, Path, Tree


class Counts(NamedTuple):
    """One-hot rows: where each sample's ones are, and how much each counts."""

    ids: Int[Tensor, "batch places"]
    each: Float[Tensor, "batch places"]


Rows: TypeAlias = Float[Tensor, "batch places n"] | Counts


class Share(NamedTuple):
    """A sample's part of the places of a layer: which tokens count, and how many places there are of each use."""

    present: Float[Tensor, "batch tokens"] | None
    known: Survey

    def counts(self, path: Path, batch: int, tokens: int) -> Float[Tensor, "batch tokens"]:
        """1, or 0 where a token is padding."""
        if self.present is None or tokens == 1:
            return torch.ones(batch, tokens, dtype=torch.float64)
        if self.present.shape[1] != tokens:
            raise FdpError(f"{path}: used at {tokens} places, but Outputs.present is of {self.present.shape[1]} tokens")
        return (self.present > 0).double()

    def inputs(self, layer: Layer, left: bool, batch: int) -> Float[Tensor, "batch 1"]:
        """``1 / n_b``: what one place of a sample counts on an input's side."""
        met = [use for use in self.known.met[layer] if use.inputs_left == left]
        places = sum(self.counts(layer.weight, batch, use.tokens).sum(1, keepdim=True) for use in met)
        return 1 / torch.as_tensor(places).clamp_min(1)


def slots(known: Survey, forms: Forms) -> list[Slot]:
    """Every statistic of these layers."""
    found: list[Slot] = []
    for layer, both in forms.items():
        for left, form in zip((True, False), both):
            if form is not Form.SKIP:
                kinds = {False} if known.small(layer) else {use.inputs_left == left for use in known.met[layer]}
                found += [Slot(layer, left, inputs) for inputs in sorted(kinds)]
    return found


def rows_of(
    model: Model,
    params: Tree,
    data: Tree,
    known: Survey,
    forms: Forms,
    fisher: Fisher,
    key: Key,
    sharding: Sharding | None,
    memory: Memory,
) -> dict[Slot, Rows]:
    """What every sample's statistics are made of, in float64: one backward, all rows of the microbatch kept."""
    wanted = {layer.weight: layer for layer, both in forms.items() if set(both) != {Form.SKIP}}
    uses = tuple(tuple(use for use in block if use.path in wanted) for block in known.plan.uses)
    plan = known.plan._replace(uses=uses, trainable=frozenset(wanted))
    present = present_of(model, data)
    share = Share(present, known)
    device = tree.leaves(data)[0].device
    rank, ranks = (0, 1) if sharding is None else (sharding.rank, sharding.ranks)
    many = passes(model, fisher, known.scores, key=key, rank=rank, ranks=ranks, dtype=plan.dtype, device=device)
    told = with_numbers(data, next(iter(many)))
    weights = make_weights(surrogate(model, fisher), params, told, plan, Execution(sharding, memory))
    losses, opened, carries = forward(weights, told, plan)
    found: dict[Slot, list[Rows]] = {}
    for i, records in backward(weights, None, opened, carries, told, plan, token=losses):
        for path, each in records.items():
            if path in wanted:  # a block whose per-sample gradients are made whole has them of all its leaves
                for record, use in zip(each, known.uses_in(wanted[path], i), strict=True):
                    _add(record, wanted[path], use, share, forms, found)
    return {slot: _joined(found[slot], known.small(slot.layer)) for slot in slots(known, forms)}


def _add(record: Record, layer: Layer, use: Met, share: Share, forms: Forms, found: dict[Slot, list[Rows]]) -> None:
    if share.known.small(layer):
        gradient = per_sample_gradient(record).double()
        found.setdefault(Slot(layer, True, False), []).append(gradient.reshape(len(gradient), 1, -1))
        return
    assert isinstance(record, Pair)
    batch, _, tokens, _ = record.right.shape
    for left in (True, False):
        if forms[layer][0 if left else 1] is Form.SKIP:
            continue
        side = record.left if left else record.right
        slot = Slot(layer, left, inputs=left == use.inputs_left)
        counts = share.counts(layer.weight, batch, tokens).to(record.right.device)
        each = counts * share.inputs(layer, left, batch).to(counts) if slot.inputs else counts
        if isinstance(side, OneHot):
            found.setdefault(slot, []).append(Counts(side.ids.long(), each))
            continue
        weight = each[:, None, :, None]
        rows = torch.where(weight > 0, side.double() * weight.sqrt(), 0.0)
        # Groups, which share nothing, are columns side by side.
        found.setdefault(slot, []).append(rows.transpose(1, 2).flatten(2))


def _joined(parts: list[Rows], small: bool) -> Rows:
    """All uses of a layer: more places, or of a small parameter one gradient."""
    ids = [part.ids for part in parts if isinstance(part, Counts)]
    if ids:
        return Counts(torch.cat(ids, 1), torch.cat([part.each for part in parts if isinstance(part, Counts)], 1))
    rows = [part for part in parts if isinstance(part, Tensor)]
    return torch.stack(rows).sum(0) if small else torch.cat(rows, 1)
