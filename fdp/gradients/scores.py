"""Moments of the scores (logits) of every sample, from one forward pass computed as the step computes it.

    sum_b = sum over positions and classes of z_b,   squares_b = sum of z_b^2,   count_b

A head that is fused with its loss never stores its logits. :mod:`fdp.run.compare` needs them, one microbatch at a time.

    >>> moments = score_moments(model, params, data, plan, execution)            # (3, batch), or None
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.gradients.block_loop import forward, make_weights
from fdp.gradients.execution import Execution
from fdp.gradients.plan import Plan
from fdp.model import Model, Outputs
from fdp.types import Tree


def score_moments(
    model: Model, params: Tree, data: Tree, plan: Plan, execution: Execution
) -> Float[Tensor, "3 batch"] | None:
    """Return each sample's sum of scores, sum of their squares, and their number, in float64, without padding.

    None if the last block does not say what its losses are made of (``fdp.model.Outputs``).
    """
    last = model.blocks[-1]
    if last.outputs is None:
        return None
    weights = make_weights(model, params, data, plan, execution)
    losses, _, carries = forward(weights, data, plan)
    full = weights.finish_gather(weights.start_gather(len(model.blocks) - 1, token=losses))
    with torch.no_grad():
        scores = last.outputs.scores(tree.select(full, last.params), carries[-1], data).detach().double()
    wide = scores.reshape(len(scores), -1, scores.shape[-1])
    counted = _counted(last.outputs, data, wide)
    wide = torch.where(counted.unsqueeze(2), wide, 0.0)
    count = counted.sum(1) * wide.shape[2]
    return torch.stack([wide.sum((1, 2)), wide.square().sum((1, 2)), count.to(wide)])


def _counted(outputs: Outputs, data: Tree, scores: Float[Tensor, "batch terms classes"]) -> Tensor:
    """Return a (batch, terms) mask, True where a position is not padding."""
    present = None if outputs.present is None else outputs.present(data)
    if present is None or present.flatten(1).shape != scores.shape[:2]:
        return torch.ones(scores.shape[:2], dtype=torch.bool, device=scores.device)
    return present.flatten(1) > 0
