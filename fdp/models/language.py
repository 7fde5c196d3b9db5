"""What language models share: a sample is a window of ``context + 1`` tokens, its loss the mean over next tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fdp import ops
from fdp.collectives import Axis
from fdp.model import Block, Likelihood, LossHead, Outputs
from fdp.parallel import leave
from fdp.types import FdpError, Path, Tree


def head_block(params: dict[str, Path], features: Callable[[Tree, Tree, Tree], Tensor]) -> Block:
    """The last block: the cross-entropy of ``features(params, h, data) W^T``, W the leaf ``params["weight"]``."""

    def scores(p: Tree, h: Tensor, data: Tree) -> Float[Tensor, "batch tokens vocab"]:
        return ops.linear(features(p, h, data), p["weight"])

    def losses(p: Tree, h: Tensor, data: Tree) -> Float[Tensor, " batch"]:
        return token_losses(scores(p, h, data), data)

    outputs = Outputs(scores, Likelihood.SOFTMAX, targets_of, weight="weight")
    return Block("head", params, losses, LossHead(features, "weight", targets_of), outputs)


def inputs_of(data: Tree) -> Int[Tensor, "batch tokens"]:
    """All tokens but the last."""
    return data["tokens"][:, :-1]


def targets_of(data: Tree) -> Int[Tensor, "batch tokens"]:
    """All tokens but the first."""
    return data["tokens"][:, 1:]


def token_losses(logits: Float[Tensor, "batch tokens vocab"], data: Tree) -> Float[Tensor, " batch"]:
    """Mean cross-entropy of the next token, per sample, in float32 or better."""
    targets = targets_of(data)
    wide = logits if logits.element_size() >= 4 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def project(
    x: Float[Tensor, "batch tokens inputs"], weight: ops.Weight, bias: ops.Weight | None, tensor: Axis | None
) -> Float[Tensor, "batch tokens outputs"]:
    """``x W^T + b``; with ``tensor``, of inputs and columns of W that are cut over it, the bias added once."""
    if tensor is None:
        return ops.linear(x, weight, bias)
    y = leave(ops.linear(x, weight), tensor)
    return y if bias is None else ops.add(y, ops.bias_of(weight, bias))


def check_divides(tensor: Axis | None, **counts: int) -> None:
    """Refuse to cut heads or hidden units into parts that are not equal."""
    for what, count in counts.items():
        if tensor is not None and count % tensor.size:
            raise FdpError(
                f"mesh: expected a tensor axis that divides the model's {count} {what}, got {tensor.size} ranks"
            )
