"""Forward passes without gradients, block by block, from full or sharded parameters.

    carry_i = block_i(weights_i, carry_{i-1});   losses = carry_n,   scores = scores(weights_n, carry_{n-1})

Weights are gathered one block ahead, as in the step (``fdp.gradients.block_loop``), and nothing is saved for a
backward. On several ranks every rank calls these functions equally often, each with its own samples.

    >>> weights = forward_weights(model, params, dtype=torch.float32, device=device, sharding=None)
    >>> losses, scores = losses_and_scores(weights, data)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.attention import fast_attention
from fdp.gradients.block_loop import Weights
from fdp.gradients.execution import LOCAL
from fdp.gradients.taps import batch_size_of
from fdp.model import Model, check_losses
from fdp.parallel.dtensors import localize
from fdp.parallel.sharding import Sharding
from fdp.types import FdpError, Flat, Tree


def forward_weights(
    model: Model, params: Tree, *, dtype: torch.dtype, device: torch.device, sharding: Sharding | None
) -> Weights:
    """Return the source of a block's weights: ``params``, or this rank's shards of them, cast to ``dtype``."""
    return Weights(model, tree.flatten(localize(params)), dtype, device, LOCAL._replace(sharding=sharding))


def sample_losses(weights: Weights, data: Tree) -> Float[Tensor, " batch"]:
    """Return the loss of every sample."""
    carry, full = _run_blocks(weights, data)
    return _losses(weights, full, carry, data)


def losses_and_scores(weights: Weights, data: Tree) -> tuple[Float[Tensor, " batch"], Tensor]:
    """Return the loss of every sample, and the scores (logits) of ``fdp.model.Outputs``."""
    carry, full = _run_blocks(weights, data)
    return _losses(weights, full, carry, data), _scores(weights, full, carry, data)


def scores(weights: Weights, data: Tree) -> Tensor:
    """Return the scores (logits) of ``fdp.model.Outputs``, (batch, *positions, classes)."""
    carry, full = _run_blocks(weights, data)
    return _scores(weights, full, carry, data)


def _run_blocks(weights: Weights, data: Tree) -> tuple[Tree, Flat]:
    """Return the input of the last block, and its weights."""
    count = len(weights.model.blocks)
    carry: Tree = ()
    pending = weights.start_gather(0, token=())
    with torch.no_grad(), fast_attention(weights.device, repeatable=False):
        for i, block in enumerate(weights.model.blocks[:-1]):
            full = weights.finish_gather(pending)
            pending = weights.start_gather(i + 1, token=carry)
            carry = block.apply(tree.select(full, block.params), carry, data)
        assert count
        return carry, weights.finish_gather(pending)


def _losses(weights: Weights, full: Flat, carry: Tree, data: Tree) -> Tensor:
    last = weights.model.blocks[-1]
    with torch.no_grad(), fast_attention(weights.device, repeatable=False):
        losses = last.apply(tree.select(full, last.params), carry, data)
    return check_losses(weights.model, losses, batch_size_of(data)).detach()


def _scores(weights: Weights, full: Flat, carry: Tree, data: Tree) -> Tensor:
    last = weights.model.blocks[-1]
    if last.outputs is None:
        raise FdpError(
            f"{weights.model.name}: expected a model that names its scores, got a loss alone; give its last block "
            "outputs=fdp.model.Outputs(...)"
        )
    with torch.no_grad(), fast_attention(weights.device, repeatable=False):
        return last.outputs.scores(tree.select(full, last.params), carry, data).detach()
