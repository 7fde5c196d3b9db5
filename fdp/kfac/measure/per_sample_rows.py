"""The rows of every sample's factors, kept sample by sample so that their norms can be clipped.

    A_b = X_b^T X_b,    X_b: one row per position of sample b, of its inputs or of its output gradients

Rows of an embedding's inputs are one-hot and kept as token ids with weights. Padding has no row. An input counts ``1 /
n_b`` of the sample's ``n_b`` positions, so that a longer sample weighs no more than a shorter one. Small parameters
(norm scales, biases) have one row, their gradient.

    >>> per_sample_rows(model, params, data, estimator=estimator, key=key)                 # {FactorKey: Rows}
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import tree
from fdp.gradients.block_loop import backward, forward, make_weights
from fdp.gradients.execution import LOCAL, Execution
from fdp.gradients.rules import OneHot, Pair, Record, per_sample_gradient
from fdp.kfac.factor_forms import Form
from fdp.kfac.layers import LeafUse, Survey
from fdp.kfac.measure.accumulate import FactorKey, present_tokens
from fdp.kfac.measure.estimator import Estimator, shard_of_samples
from fdp.kfac.measure.fisher import passes, surrogate, with_numbers
from fdp.kfac.types import Layer
from fdp.model import Model
from fdp.types import FdpError, Key, Path, Tree


class OneHotRows(NamedTuple):
    """One-hot rows: the column of each row's one, and its weight."""

    ids: Int[Tensor, "batch positions"]
    weights: Float[Tensor, "batch positions"]


Rows: TypeAlias = Float[Tensor, "batch positions n"] | OneHotRows


class PositionWeights(NamedTuple):
    """The weights of a sample's positions, from the mask of tokens that are not padding (None: all count)."""

    present: Float[Tensor, "batch tokens"] | None
    survey: Survey

    def of_gradients(self, path: Path, batch: int, tokens: int) -> Float[Tensor, "batch tokens"]:
        """Return 1, or 0 where a token is padding."""
        if self.present is None or tokens == 1:
            return torch.ones(batch, tokens, dtype=torch.float64)
        if self.present.shape[1] != tokens:
            raise FdpError(
                f"{path}: expected a weight used at 1 or {self.present.shape[1]} positions, the tokens of "
                f"Outputs.present, got {tokens}"
            )
        return (self.present > 0).double()

    def of_inputs(self, layer: Layer, left: bool, batch: int) -> Float[Tensor, "batch 1"]:
        """Return ``1 / n_b``, the weight of one position on the side of inputs."""
        uses = [use for use in self.survey.uses[layer] if use.inputs_left == left]
        counts = sum(self.of_gradients(layer.weight, batch, use.tokens).sum(1, keepdim=True) for use in uses)
        return 1 / torch.as_tensor(counts).clamp_min(1)


def factor_keys(estimator: Estimator) -> list[FactorKey]:
    """Return the key of every factor of the estimator's layers."""
    survey, found = estimator.survey, []
    for layer, both in estimator.forms.items():
        for left, form in zip((True, False), both):
            if form is not Form.SKIP:
                uses = survey.uses[layer]
                kinds = {False} if survey.is_elementwise(layer) else {use.inputs_left == left for use in uses}
                found += [FactorKey(layer, left, inputs) for inputs in sorted(kinds)]
    return found


def per_sample_rows(
    model: Model,
    params: Tree,
    data: Tree,
    *,
    estimator: Estimator,
    key: Key,
    execution: Execution = LOCAL,
) -> dict[FactorKey, Rows]:
    """Return the rows of every factor in float64, from one backward; all rows of the microbatch stay in memory."""
    survey, plan, wanted = estimator.survey, estimator.plan, estimator.measured
    weigh = PositionWeights(present_tokens(model, data), survey)
    shape, device = survey.scores_shape, tree.leaves(data)[0].device
    rank, ranks = shard_of_samples(execution.sharding)
    draws = passes(model, estimator.fisher, shape, key=key, rank=rank, ranks=ranks, dtype=plan.dtype, device=device)
    microbatch = with_numbers(data, next(iter(draws)))
    stand_in = surrogate(model, estimator.fisher)
    weights = make_weights(stand_in, params, microbatch, plan, Execution(execution.sharding, execution.memory))
    losses, opened, carries = forward(weights, microbatch, plan)
    found: dict[FactorKey, list[Rows]] = {}
    for i, records in backward(weights, None, opened, carries, microbatch, plan, token=losses):
        for path, those in records.items():
            if path in wanted:  # a block with materialised per-sample gradients has them for all its leaves
                for record, use in zip(those, survey.uses_in(wanted[path], i), strict=True):
                    _add(record, wanted[path], use, weigh, estimator, found)
    return {each: _join(found[each], survey.is_elementwise(each.layer)) for each in factor_keys(estimator)}


def _add(
    record: Record,
    layer: Layer,
    use: LeafUse,
    weigh: PositionWeights,
    estimator: Estimator,
    found: dict[FactorKey, list[Rows]],
) -> None:
    if estimator.survey.is_elementwise(layer):
        gradient = per_sample_gradient(record).double()
        found.setdefault(FactorKey(layer, True, False), []).append(gradient.reshape(len(gradient), 1, -1))
        return
    assert isinstance(record, Pair)
    batch, _, tokens, _ = record.right.shape
    for left in (True, False):
        if estimator.forms[layer][0 if left else 1] is Form.SKIP:
            continue
        side = record.left if left else record.right
        key = FactorKey(layer, left, inputs=left == use.inputs_left)
        each = weigh.of_gradients(layer.weight, batch, tokens).to(record.right.device)
        each = each * weigh.of_inputs(layer, left, batch).to(each) if key.inputs else each
        if isinstance(side, OneHot):
            found.setdefault(key, []).append(OneHotRows(side.ids.long(), each))
            continue
        weight = each[:, None, :, None]
        rows = torch.where(weight > 0, side.double() * weight.sqrt(), 0.0)
        # Groups, which share nothing, are put side by side as columns.
        found.setdefault(key, []).append(rows.transpose(1, 2).flatten(2))


def _join(parts: list[Rows], elementwise: bool) -> Rows:
    """Concatenate the positions of all uses of a layer; the gradients of a small parameter are added up instead."""
    ids = [part.ids for part in parts if isinstance(part, OneHotRows)]
    if ids:
        weights = [part.weights for part in parts if isinstance(part, OneHotRows)]
        return OneHotRows(torch.cat(ids, 1), torch.cat(weights, 1))
    rows = [part for part in parts if isinstance(part, Tensor)]
    return torch.stack(rows).sum(0) if elementwise else torch.cat(rows, 1)
