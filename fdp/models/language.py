"""Data layout, loss and attention shared by the language models.

    data["tokens"]     (batch, T + 1): a window of text; or (batch, windows, T + 1): all windows of one user
    data["loss_mask"]  (batch, T), per target: 0 if the next token is a prompt, padding or of another document
    data["segments"]   (batch, T), per input: the document of the row that a token belongs to and attends within

    loss_b = mean of -log p(next token) over the targets of sample b that count; 0 if none does

Mask and segments are optional, and have a dim of windows if tokens have. **Row b is one sample, whatever its shape**:
the tokens of all its windows are the tokens of one row of h, (batch, windows T, width).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fdp import ops
from fdp.model import Block, Likelihood, LossHead, Outputs
from fdp.parallel.tensor_parallel import leave
from fdp.types import Axis, FdpError, Path, Tree


def head_block(params: dict[str, Path], features: Callable[[Tree, Tree, Tree], Tensor]) -> Block:
    """Return the last block: cross-entropy of ``features(params, h, data) W^T``, W the leaf ``params["weight"]``."""

    def scores(p: Tree, h: Tensor, data: Tree) -> Float[Tensor, "batch tokens vocab"]:
        return ops.linear(features(p, h, data), p["weight"])

    def losses(p: Tree, h: Tensor, data: Tree) -> Float[Tensor, " batch"]:
        return token_losses(scores(p, h, data), data)

    outputs = Outputs(scores, Likelihood.SOFTMAX, targets_of, weights=weights_of, weight="weight", present=present_of)
    return Block("head", params, losses, LossHead(features, "weight", targets_of, mask_weights_of), outputs)


def inputs_of(data: Tree) -> Int[Tensor, "batch tokens"]:
    """Return all tokens but the last; refuse several windows or documents, for models without :func:`attend`."""
    if data["tokens"].ndim != 2 or "segments" in data:
        raise FdpError(
            "tokens: expected one window of one document per sample, (batch, tokens), got "
            f"{tuple(data['tokens'].shape)}"
            f"{' with segments' if 'segments' in data else ''}: this model would attend from one to another. Do not "
            "group by user or pack, or use a model whose layers call fdp.models.language.attend"
        )
    return data["tokens"][:, :-1]


def window_inputs_of(data: Tree) -> Int[Tensor, " batch *windows tokens"]:
    """Return all tokens of every window but its last, for a model whose layers call :func:`attend`."""
    return data["tokens"][..., :-1]


def targets_of(data: Tree) -> Int[Tensor, "batch tokens"]:
    """Return all tokens of every window but its first, window after window."""
    return data["tokens"][..., 1:].flatten(1)


def weights_of(data: Tree) -> Float[Tensor, "batch tokens"]:
    """Return the weight of each target in its sample's mean, in float64: ``mask_t / sum(mask)``; 0 if none counts."""
    if "loss_mask" not in data:
        targets = targets_of(data)
        return torch.full(targets.shape, 1 / targets.shape[1], dtype=torch.float64, device=targets.device)
    counts = (data["loss_mask"] != 0).flatten(1).double()
    return counts / counts.sum(1, keepdim=True).clamp_min(1)


def present_of(data: Tree) -> Bool[Tensor, "batch tokens"] | None:
    """Return which inputs a causal layer shows to a target that counts: all up to the last one of their document.

    Prompts are among them, padding is not. None if all are.
    """
    if "loss_mask" not in data:
        return None
    counted = data["loss_mask"] != 0
    length = counted.shape[-1]
    positions = torch.arange(length, device=counted.device)
    following = torch.where(counted, positions, length).flip(-1).cummin(-1).values.flip(-1)
    seen = following < length
    if "segments" in data:
        segments = data["segments"]
        seen = seen & (segments.gather(-1, following.clamp_max(length - 1)) == segments)
    return seen.flatten(1)


def mask_weights_of(data: Tree) -> Float[Tensor, "batch tokens"] | None:
    """Return :func:`weights_of`, or None for a mean over all tokens."""
    return weights_of(data) if "loss_mask" in data else None


def token_losses(logits: Float[Tensor, "batch tokens vocab"], data: Tree) -> Float[Tensor, " batch"]:
    """Return the mean cross-entropy of the next tokens that count, per sample, in float32 or better.

    Guarantees:
      - a target that does not count changes neither loss nor gradient; a sample without any has both exactly 0.
    """
    targets = targets_of(data)
    wide = logits if logits.element_size() >= 4 else logits.float()
    each = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    if "loss_mask" not in data:
        return each.mean(1)
    weights = weights_of(data).to(each.dtype)
    return (torch.where(weights > 0, each, each.new_zeros(())) * weights).sum(1)


def windows_of(data: Tree) -> int:
    """Return the number of windows of a sample."""
    return data["tokens"].shape[1] if "tokens" in data and data["tokens"].ndim == 3 else 1


def attend(
    q: Float[Tensor, "batch heads tokens features"],
    k: Float[Tensor, "batch key_heads tokens features"],
    v: Float[Tensor, "batch key_heads tokens features"],
    data: Tree,
) -> Float[Tensor, "batch heads tokens features"]:
    """Apply causal attention within each window and, inside it, within each document.

    Guarantees:
      - nothing of one window or document reaches another.
    """
    segments, windows = data["segments"].flatten(0, -2) if "segments" in data else None, windows_of(data)
    if windows == 1:
        return ops.attention(q, k, v, segments=segments)
    q, k, v = (x.unflatten(2, (windows, -1)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    mixed = ops.attention(q, k, v, segments=segments)
    return mixed.unflatten(0, (-1, windows)).transpose(1, 2).flatten(2, 3)


def places_of(segments: Int[Tensor, " batch *windows tokens"]) -> Int[Tensor, " batch *windows tokens"]:
    """Return the position of each token in its document, from 0, as if the document were alone in its row."""
    index = torch.arange(segments.shape[-1], device=segments.device).expand(segments.shape)
    first = torch.ones_like(segments[..., :1], dtype=torch.bool)
    begins = torch.cat([first, segments[..., 1:] != segments[..., :-1]], dim=-1)
    return index - torch.where(begins, index, 0).cummax(-1).values


def project(
    x: Float[Tensor, "batch tokens inputs"], weight: ops.Weight, bias: ops.Weight | None, tensor: Axis | None
) -> Float[Tensor, "batch tokens outputs"]:
    """Return ``x W^T + b``; with ``tensor``, inputs and columns of W are split over it, and the bias is added once."""
    if tensor is None:
        return ops.linear(x, weight, bias)
    y = leave(ops.linear(x, weight), tensor)
    return y if bias is None else ops.add(y, ops.bias_of(weight, bias))


def check_divides(tensor: Axis | None, **counts: int) -> None:
    """Refuse a tensor axis that does not divide heads or hidden units evenly."""
    for what, count in counts.items():
        if tensor is not None and count % tensor.size:
            raise FdpError(
                f"mesh: expected a tensor axis that divides the model's {count} {what}, got {tensor.size} ranks"
            )
