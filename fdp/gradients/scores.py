"""The scores, or logits, that a step's forward ends in, and what they come to: one pass, in the step's own way.

    sum_b = sum over positions and classes of z_b,   squares_b = sum of z_b^2,   count_b

A head that is fused with its loss never has them whole; they are made here, a microbatch at a time, for whoever wants
to look at them: :mod:`fdp.run.compare`.

    >>> moments = score_moments(model, params, data, plan, sharding, memory, blocks)            # (3, batch), or None
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.fast.compiled import Blocks
from fdp.gradients.block_loop import Memory, forward, make_weights
from fdp.gradients.plan import Plan
from fdp.model import Model, Outputs
from fdp.parallel.sharding import Sharding
from fdp.types import Tree


def score_moments(
    model: Model,
    params: Tree,
    data: Tree,
    plan: Plan,
    sharding: Sharding | None,
    memory: Memory,
    blocks: Blocks | None,
) -> Float[Tensor, "3 batch"] | None:
    """Each sample's sum of scores, sum of their squares, and their number, in float64; padding is left out.

    None: the last block does not say what its losses are made of (``fdp.model.Outputs``).
    """
    last = model.blocks[-1]
    if last.outputs is None:
        return None
    weights = make_weights(model, params, data, plan, sharding, memory, blocks)
    losses, _, carries = forward(weights, data, plan)
    whole = weights.finish(weights.start(len(model.blocks) - 1, token=losses))
    with torch.no_grad():
        scores = last.outputs.scores(tree.select(whole, last.params), carries[-1], data).detach().double()
    wide = scores.reshape(len(scores), -1, scores.shape[-1])
    counted = _counted(last.outputs, data, wide)
    wide = torch.where(counted.unsqueeze(2), wide, 0.0)
    count = counted.sum(1) * wide.shape[2]
    return torch.stack([wide.sum((1, 2)), wide.square().sum((1, 2)), count.to(wide)])


def _counted(outputs: Outputs, data: Tree, scores: Float[Tensor, "batch terms classes"]) -> Tensor:
    """(batch, terms): which positions are not padding."""
    present = None if outputs.present is None else outputs.present(data)
    if present is None or present.flatten(1).shape != scores.shape[:2]:
        return torch.ones(scores.shape[:2], dtype=torch.bool, device=scores.device)
    return present.flatten(1) > 0
