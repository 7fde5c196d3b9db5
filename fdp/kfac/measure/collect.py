"""The Kronecker factors of one microbatch, from one tapped backward whose records are summed block by block.

A layer has the gradient ``G_b = sum_s g_bs x_bs^T`` over the n_b positions s at which sample b uses it (tokens, patches
of an image, several uses of a tied weight). With the gradients g of a surrogate loss (``fdp.kfac.measure.fisher``):

    expand    L = 1/N sum_b sum_s g_bs g_bs^T       R = 1/N sum_b 1/n_b sum_s x_bs x_bs^T
    reduce    L = 1/N sum_b g_b g_b^T               R = 1/N sum_b x_b x_b^T        g_b = sum_s g_bs,  x_b = mean_s x_bs

These are the two approximations of Eschenhagen et al. 2023, arXiv 2311.00636, for the mean over samples of losses that
are means over tokens. A bias is the last column of R: the input of a position is (x, 1). Every factor is a sum over
samples and counts them, so that factors of parts of a batch, of ranks or of steps add up (``fdp.kfac.factors.add``).

Groups of a convolution and experts have inputs of their own, and so are layers of their own, with diagonal sides.

Some layers have sides other than (g, x):
  - an embedding has its inputs on the left. With expand, L is the diagonal of token frequencies, which is exact; with
    reduce, x_b holds the shares of all tokens of a sample, and L has one column per sample;
  - a leaf that is both embedding and head (tied) has both kinds of rows on both sides: the left factor is their mean,
    the right one their sum. This equals the sum of the two products if the two left factors are equal, as they are if
    the model's tokens are as frequent as the data's; if only their traces are equal, it has the right trace. (Scaling
    each product first would be closer in other cases, but the scales depend on the batch, and parts would no longer add
    up to the whole.)
  - small parameters have no sides: the left factor is the diagonal of their squared per-sample gradients.

    >>> estimator = Estimator(survey(model, params, data), forms, Fisher.SAMPLED, Sharing.EXPAND)
    >>> collect(model, params, data, mask, estimator=estimator, key=key)          # {Layer: Curvature}, this rank's part
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.gradients.block_loop import Weights, backward, forward, make_weights
from fdp.gradients.execution import LOCAL, Execution
from fdp.kfac.factor_forms import Form
from fdp.kfac.layers import Survey
from fdp.kfac.measure.accumulate import (
    Accumulator,
    add_probabilities,
    add_records,
    curvature_of,
    make_accumulator,
    present_tokens,
)
from fdp.kfac.measure.estimator import Estimator, Forms, Sharing, shard_of_samples
from fdp.kfac.measure.fisher import passes, surrogate, with_numbers
from fdp.kfac.types import Curvature, Layer
from fdp.model import Likelihood, Model
from fdp.types import FdpError, Key, Path, Tree


def collect(
    model: Model,
    params: Tree,
    data: Tree,
    mask: Float[Tensor, " batch"],
    *,
    estimator: Estimator,
    key: Key,
    execution: Execution = LOCAL,
) -> dict[Layer, Curvature]:
    """Return the curvature of every layer of ``estimator.forms`` on one microbatch.

    If execution is sharded, ``params`` are this rank's shards, ``data`` its samples, and the result covers these
    samples only; ``fdp.kfac.ranks.sum_factors`` adds up the ranks. ``key`` is for sampled labels.

    Guarantees:
      - a sample of mask 0 and a token that is padding are in no sum and no count, whatever they hold;
      - the factors of two parts of a batch add up to those of the batch (of sampled labels: to some draw of them);
      - rows in half precision are multiplied and added in float32.
    """
    survey, forms, fisher, sharing = estimator
    _check_mask(mask, survey)
    check_forms(model, survey, forms, sharing)
    plan, (rank, ranks) = estimator.plan, shard_of_samples(execution.sharding)
    sums = make_accumulator(estimator, mask, present_tokens(model, data), execution)
    shape, device = survey.scores_shape, mask.device
    draws = passes(model, fisher, shape, key=key, rank=rank, ranks=ranks, dtype=plan.dtype, device=device)
    stand_in = surrogate(model, fisher)
    for count, numbers in enumerate(draws if estimator.measured else ()):
        microbatch = with_numbers(data, numbers)
        weights = make_weights(stand_in, params, microbatch, plan, execution)
        losses, opened, carries = forward(weights, microbatch, plan)
        if count == 0:
            _add_head(weights, carries[-1], data, losses, sums)
        for i, found in backward(weights, None, opened, carries, microbatch, plan, token=losses):
            add_records(i, found, sums, inputs=count == 0)  # inputs are the same in every pass
    return {layer: curvature_of(layer, sums) for layer in forms}


def check_forms(model: Model, survey: Survey, forms: Forms, sharing: Sharing) -> None:
    """Raise an FdpError that names the leaf if a layer is not the model's or cannot have the given forms."""
    softmax = _softmax_path(model)
    for layer, both in forms.items():
        if layer not in survey.uses:
            raise FdpError(f"forms: expected layers of {model.name} (survey.layers), got {layer}")
        uses, names = survey.uses[layer], f"({both[0].value}, {both[1].value})"
        if survey.is_elementwise(layer):
            if both[0] not in (Form.DIAGONAL, Form.SKIP) or both[1] is not Form.SKIP:
                raise FdpError(
                    f"{layer.weight}: expected the forms (diagonal, skip) or (skip, skip) for a parameter without "
                    f"inputs and outputs, got {names}"
                )
            continue
        if any(use.groups > 1 for use in uses) and not set(both) <= {Form.DIAGONAL, Form.SKIP}:
            raise FdpError(
                f"{layer.weight}: expected diagonal or skip on both sides, because every group of a convolution and "
                f"every expert has inputs of its own, got {names}"
            )
        heads = [use for use in uses if not use.one_hot]
        scores = [use for use in heads if not use.inputs_left]
        is_only_head = layer.weight == softmax and len(scores) == len(heads) == 1
        if Form.SOFTMAX in both and (both[1] is Form.SOFTMAX or not is_only_head):
            raise FdpError(
                f"{layer.weight}: expected the form softmax only on the left of the layer whose output, used once, is "
                f"the scores of a softmax ({softmax or 'the model names none: Outputs.weight'}), got {names}"
            )
        tied = 0 < len(heads) < len(uses)
        if tied and sharing is Sharing.REDUCE and both[0] is Form.SOFTMAX:
            raise FdpError(
                f"{layer.weight}: expected columns, dense, diagonal or skip on the left of an embedding tied to a head "
                f"with sharing reduce, because a softmax can only be added to a diagonal; got {names}. The sharing "
                f"expand (--kfac-sharing) allows softmax"
            )
        if tied and sharing is Sharing.EXPAND and both[0] is Form.COLUMNS:
            raise FdpError(
                f"{layer.weight}: expected softmax, diagonal, skip or dense on the left of an embedding tied to a "
                f"head, because columns added to the embedding's diagonal would become a matrix; got {names}"
            )


def _add_head(weights: Weights, carry: Tree, data: Tree, token: Tensor, sums: Accumulator) -> None:
    """Compute the scores once more for a head whose left factor is a softmax."""
    block = weights.model.blocks[-1]
    for layer in (layer for layer, both in sums.estimator.forms.items() if both[0] is Form.SOFTMAX):
        assert block.outputs is not None
        gathered = weights.finish_gather(weights.start_gather(len(weights.model.blocks) - 1, token=token))
        with torch.no_grad():
            scores = block.outputs.scores(tree.select(gathered, block.params), carry, data)
        add_probabilities(block.outputs, scores, data, layer, sums)


def _softmax_path(model: Model) -> Path | None:
    last = model.blocks[-1]
    if last.outputs is None or last.outputs.likelihood is not Likelihood.SOFTMAX or last.outputs.weight is None:
        return None
    return last.params[last.outputs.weight]


def _check_mask(mask: Tensor, survey: Survey) -> None:
    if tuple(mask.shape) != (survey.plan.batch_size,):
        raise FdpError(
            f"mask: expected shape ({survey.plan.batch_size},), one number per sample, got {tuple(mask.shape)}"
        )
