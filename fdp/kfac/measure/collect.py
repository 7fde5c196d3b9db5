"""The Kronecker factors of one microbatch: one backward with taps, each block's pairs turned into sums and dropped.

A layer has the gradient ``G_b = sum_s g_bs x_bs^T`` over the n_b places s at which sample b uses it (tokens, patches of
an image, several uses of a tied weight). With the gradients g of a surrogate loss (``fdp.kfac.measure.fisher``):

    expand    L = 1/N sum_b sum_s g_bs g_bs^T       R = 1/N sum_b 1/n_b sum_s x_bs x_bs^T
    reduce    L = 1/N sum_b g_b g_b^T               R = 1/N sum_b x_b x_b^T        g_b = sum_s g_bs,  x_b = mean_s x_bs

the two ways of Eschenhagen et al. 2023, arXiv 2311.00636, for the mean over samples of losses that are means over
tokens. A bias is the last column of R, a place's input being (x, 1). Every factor is a sum over samples and counts
them, so that factors of parts, of ranks or of steps, add up (``fdp.kfac.factors.add``) to those of the whole.

Groups of a convolution and experts, whose inputs are their own, are layers of their own, each with both diagonals.

Two sides that are not (g, x):
  - an embedding has its inputs on the left: by expand L is the diagonal of how often each token occurs, which is exact;
    by reduce x_b holds the shares of all tokens of a sample, and L is no diagonal but columns, one for each sample;
  - a leaf that is embedding *and* head (tied) has both kinds on both sides: the left one is their mean, the right one
    their sum. Where the two left sides agree, as they do if the model's tokens are as frequent as the data's, that is
    the sum of the two products; where their traces agree it has its trace. (Scaling each product first would be closer
    in other cases, but what scale depends on the batch: parts would no longer add up to the whole.)
Small parameters have no sides: the left factor is the diagonal of their per-sample squared gradients.

    >>> curvatures = collect(model, params, data, mask, forms=forms, fisher=Fisher.SAMPLED, sharing=Sharing.EXPAND,
    ...                      key=key)                       # {Layer: Curvature}, this rank's samples only
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.gradients.block_loop import Weights, backward, forward, make_weights
from fdp.gradients.execution import EAGER, STORE_ALL, Execution, Memory, Runner
from fdp.kfac.forms import Form
from fdp.kfac.layers import Survey, survey
from fdp.kfac.measure.fisher import Fisher, passes, surrogate, with_numbers
from fdp.kfac.measure.sums import (
    Forms,
    Sharing,
    Sums,
    add_probabilities,
    add_records,
    curvature_of,
    make_sums,
    present_of,
)
from fdp.kfac.types import Curvature, Layer
from fdp.model import Likelihood, Model
from fdp.parallel.sharding import Sharding, abstract_params
from fdp.types import FdpError, Key, Path, Tree


def collect(
    model: Model,
    params: Tree,
    data: Tree,
    mask: Float[Tensor, " batch"],
    *,
    forms: Forms,
    fisher: Fisher,
    sharing: Sharing,
    key: Key,
    dtype: torch.dtype = torch.float32,
    known: Survey | None = None,
    sharding: Sharding | None = None,
    memory: Memory = STORE_ALL,
    runner: Runner = EAGER,
) -> dict[Layer, Curvature]:
    """The curvature of every layer of ``forms`` on one microbatch.

    ``known`` is ``survey(model, params, data)``, to be made once for all microbatches of a shape; without one it is
    made in compute dtype ``dtype``. With ``sharding``, ``params`` are this rank's parts, ``data`` its samples, and so
    the sums: what other ranks hold is for ``fdp.kfac.ranks.add_factors`` to add. ``key`` is for sampled labels: one
    key, one draw.

    Guarantees:
      - a sample of mask 0 and a token that is padding are in no sum and no count, whatever they hold;
      - the factors of two parts of a batch add up to those of the batch (of sampled labels: to some draw of them);
      - rows in half precision are multiplied and added in float32.
    """
    if known is None:
        known = survey(model, abstract_params(model, sharding, device=mask.device), data, dtype=dtype)
    _check_mask(mask, known)
    check_forms(model, known, forms, sharing)
    wanted = frozenset(layer.weight for layer, both in forms.items() if set(both) != {Form.SKIP})
    uses = tuple(tuple(use for use in block if use.path in wanted) for block in known.plan.uses)
    plan = known.plan._replace(uses=uses, trainable=wanted)
    present = present_of(model, data)
    sums = make_sums(known, forms, sharing, mask, present, sharding, runner)
    rank, ranks = (0, 1) if sharding is None else (sharding.rank, sharding.ranks)
    many = passes(model, fisher, known.scores, key=key, rank=rank, ranks=ranks, dtype=plan.dtype, device=mask.device)
    stand_in = surrogate(model, fisher)
    for count, numbers in enumerate(many if wanted else ()):
        told = with_numbers(data, numbers)
        weights = make_weights(stand_in, params, told, plan, Execution(sharding, memory, runner))
        losses, opened, carries = forward(weights, told, plan)
        if count == 0:
            _add_head(weights, carries[-1], data, losses, sums)
        for i, found in backward(weights, None, opened, carries, told, plan, token=losses):
            add_records(i, found, sums, inputs=count == 0)  # inputs are the same in every pass
    return {layer: curvature_of(layer, sums) for layer in forms}


def check_forms(model: Model, known: Survey, forms: Forms, sharing: Sharing) -> None:
    """Refuse layers that the model has not, and forms that a layer cannot have; the error names the leaf."""
    softmax = _softmax_path(model)
    for layer, both in forms.items():
        if layer not in known.met:
            raise FdpError(f"forms: expected layers of {model.name} (known.layers), got {layer}")
        met, names = known.met[layer], f"({both[0].value}, {both[1].value})"
        if known.small(layer):
            if both[0] not in (Form.DIAGONAL, Form.SKIP) or both[1] is not Form.SKIP:
                raise FdpError(
                    f"{layer.weight}: a parameter without inputs and outputs: expected the form (diagonal, skip) or "
                    f"(skip, skip), got {names}"
                )
            continue
        if any(use.groups > 1 for use in met) and not set(both) <= {Form.DIAGONAL, Form.SKIP}:
            raise FdpError(
                f"{layer.weight}: every group of a convolution, and every expert, has inputs of its own, and so there "
                f"is no one product: expected diagonal or skip on both sides, got {names}"
            )
        heads = [use for use in met if not use.one_hot]
        scores = [use for use in heads if not use.inputs_left]
        alone = layer.weight == softmax and len(scores) == len(heads) == 1
        if Form.SOFTMAX in both and (both[1] is Form.SOFTMAX or not alone):
            raise FdpError(
                f"{layer.weight}: expected the form softmax on the left of the layer whose output is a softmax's "
                f"scores, used once as such ({softmax or 'the model names none: Outputs.weight'}), got {names}"
            )
        mixed = 0 < len(heads) < len(met)
        if mixed and sharing is Sharing.REDUCE and both[0] is Form.SOFTMAX:
            raise FdpError(
                f"{layer.weight}: an embedding and a head in one has columns in its left side if a sample's tokens are "
                f"added up (sharing reduce), and a softmax takes a diagonal beside it; expected columns, dense, "
                f"diagonal or skip, or the sharing expand (--kfac-sharing), got {names}"
            )
        if mixed and sharing is Sharing.EXPAND and both[0] is Form.COLUMNS:
            raise FdpError(
                f"{layer.weight}: an embedding and a head in one has a diagonal in its left side, and columns beside "
                f"it would have to be formed into a matrix; expected softmax, diagonal, skip or dense, got {names}"
            )


def _add_head(weights: Weights, carry: Tree, data: Tree, token: Tensor, sums: Sums) -> None:
    """The scores once more, for a head whose left side is made of them."""
    block = weights.model.blocks[-1]
    for layer in (layer for layer, both in sums.forms.items() if both[0] is Form.SOFTMAX):
        assert block.outputs is not None
        whole = weights.finish_gather(weights.start_gather(len(weights.model.blocks) - 1, token=token))
        with torch.no_grad():
            scores = block.outputs.scores(tree.select(whole, block.params), carry, data)
        add_probabilities(block.outputs, scores, data, layer, sums)


def _softmax_path(model: Model) -> Path | None:
    last = model.blocks[-1]
    if last.outputs is None or last.outputs.likelihood is not Likelihood.SOFTMAX or last.outputs.weight is None:
        return None
    return last.params[last.outputs.weight]


def _check_mask(mask: Tensor, known: Survey) -> None:
    if tuple(mask.shape) != (known.plan.batch_size,):
        raise FdpError(f"mask: expected shape ({known.plan.batch_size},), one for each sample, got {tuple(mask.shape)}")
