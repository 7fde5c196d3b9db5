"""What language models share: a sample is a window of ``context + 1`` tokens, its loss the mean over next tokens."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fdp.types import Tree


def inputs_of(data: Tree) -> Int[Tensor, "batch tokens"]:
    """All tokens but the last."""
    return data["tokens"][:, :-1]


def token_losses(logits: Float[Tensor, "batch tokens vocab"], data: Tree) -> Float[Tensor, " batch"]:
    """Mean cross-entropy of the next token, per sample, in float32 or better."""
    targets = data["tokens"][:, 1:]
    wide = logits if logits.element_size() >= 4 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)
