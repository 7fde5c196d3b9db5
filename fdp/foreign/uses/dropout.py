"""Dropout whose mask is a function of the sample's key, so that running a forward twice gives the same result.

    y_bi = x_bi [h(key_b, call, i) >= p 2^32] / (1 - p)              h: 32 bits; call: the number of the dropout call

A second backward must use the mask that the first one used, and a sample's mask must not depend on the rest of the
batch; torch's generator guarantees neither. The bits are two rounds of a mixing function, Wellons' ``lowbias32``
(nullprogram.com/blog/2018/07/31), in plain integer operations that run anywhere: no secret depends on them.

    >>> data = with_keys(data, key)                                  # data["dropout"]: (batch, 8), one key per sample
    >>> losses = model.loss(params, data)                            # the module in train()
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import keys as fdp_keys
from fdp.foreign.uses.tracking import ALWAYS_FIRST, SHARED, CallTrace, Tracked
from fdp.gradients.taps import batch_size_of
from fdp.types import FdpError, Key, Tree

DROPOUT_KEYS = "dropout"
"""The entry of the data that holds the keys."""
_LOW, _WORD = 0xFFFFFFFF, 1 << 32
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - _WORD  # minus 2^32, so that products of 32 bits fit into int64


def with_keys(data: dict[str, Any], key: Key) -> dict[str, Any]:
    """Return ``data`` with a key for every sample. Use a ``key`` for one batch only: fold in the step."""
    if not isinstance(data, dict):
        raise FdpError(f"data: expected a dictionary, to add the dropout keys to, got {type(data).__name__}")
    return data | {DROPOUT_KEYS: fdp_keys.split(key, batch_size_of(data)).to(next(iter(data.values())).device)}


def keys_of(data: Tree) -> Tensor | None:
    """Return the samples' keys, or None if the data hold none."""
    return data.get(DROPOUT_KEYS) if isinstance(data, dict) else None


def next_keys(keys: Int[Tensor, "batch 8"]) -> Int[Tensor, "batch 8"]:
    """Return new keys for the next block of a stack, so that equal blocks draw different masks."""
    words = torch.arange(8, device=keys.device)
    return _mix(_seed(keys, 0x51)[:, None] + words) ^ _mix(keys)


def apply_dropout(
    x: Float[Tensor, " batch *shape"], keys: Int[Tensor, "batch 8"], call: int, p: float
) -> Float[Tensor, " batch *shape"]:
    """Return ``x`` with a share ``p`` of each sample's elements zeroed and the rest scaled by ``1 / (1 - p)``."""
    places = torch.arange(x.numel() // len(keys), device=x.device)
    bits = _mix(_mix(places ^ _seed(keys, 2 * call)[:, None]) + _seed(keys, 2 * call + 1)[:, None])
    kept = (bits >= int(p * _WORD)).view(x.shape)
    return torch.where(kept, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)


def dropout(
    trace: CallTrace, x: Tensor | Tracked, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """``F.dropout`` with a mask from the samples' keys."""
    if not training or p == 0.0:
        return x if isinstance(x, Tensor) else x.value
    layout, dim = _layout(trace, x, dims=3)
    return trace.restore_layout(draw_dropout(trace, trace.samples_first(x, layout, dim), p), layout, dim, DROPOUT_KEYS)  # type: ignore[arg-type]


def dropout_channels(
    trace: CallTrace, x: Tensor | Tracked, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """``F.dropout1d``, ``2d`` and ``3d``: drop whole channels of (samples, channels, ...)."""
    if not training or p == 0.0:
        return x if isinstance(x, Tensor) else x.value
    layout, dim = _layout(trace, x, dims=ALWAYS_FIRST)
    first = trace.samples_first(x, layout, dim)  # type: ignore[arg-type]
    maps = len(x.shape) - 2
    channels = first.shape[: first.ndim - maps]
    return trace.restore_layout(
        first * draw_dropout(trace, first.new_ones(channels), p).reshape(*channels, *[1] * maps),
        layout,
        dim,
        DROPOUT_KEYS,
    )


def _layout(trace: CallTrace, x: Tensor | Tracked, *, dims: int) -> tuple[str, int]:
    found = (SHARED, 0) if isinstance(x, Tracked) else trace.find_layout(x, path=DROPOUT_KEYS, dims=dims)
    if found[0] == SHARED:
        raise FdpError(
            f"dropout: expected a tensor of shape (batch, ...), since every sample has its own mask, got one of shape "
            f"{tuple(x.shape)} without samples; expand it over the batch first, or put the module in eval()"
        )
    return found


def draw_dropout(trace: CallTrace, x: Float[Tensor, " batch *shape"], p: float) -> Float[Tensor, " batch *shape"]:
    """Apply the next dropout of this call to samples in dim 0."""
    if trace.keys is None:
        raise FdpError(
            f"dropout: expected a key per sample, from which masks are drawn, got none for p = {p} in a module in "
            f"training mode; put the module in eval(), or add keys: data = "
            f"fdp.foreign.uses.dropout.with_keys(data, key)"
        )
    trace.dropout_calls += 1
    return apply_dropout(x, trace.keys, trace.dropout_calls, p)


def _seed(keys: Tensor, number: int) -> Int[Tensor, " batch"]:
    """Return 32 bits that depend on all words of a key and on a number."""
    seed = torch.full_like(keys[:, 0], number)
    for i in range(8):
        seed = _mix(seed + (keys[:, i] & _LOW) + i)
    return seed


def _mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    x = x & _LOW
    x = ((x ^ (x >> 16)) * _FIRST) & _LOW
    x = ((x ^ (x >> 15)) * _SECOND) & _LOW
    return x ^ (x >> 16)
