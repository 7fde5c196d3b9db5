"""Dropout whose mask is a function of the sample's key: a forward run twice is the same, whatever the batch.

    y_bi = x_bi [h(key_b, call, i) >= p 2^32] / (1 - p)              h: 32 bits; call: the number of the draw in the run

A second backward must meet the mask that the first one measured, and a sample's mask must not depend on who else is in
the batch; torch's generator gives neither. The bits are two rounds of a mixing function, Wellons' ``lowbias32``
(nullprogram.com/blog/2018/07/31): no secret depends on them. Plain integer operations, so that they run anywhere.

    >>> data = with_keys(data, key)                                  # data["dropout"]: (batch, 8), one key per sample
    >>> losses = model.loss(params, data)                            # the module in train()
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import keys as fdp_keys
from fdp.foreign.uses.tracking import ALWAYS_FIRST, SHARED, Run, Tracked
from fdp.gradients.taps import batch_size_of
from fdp.types import FdpError, Key, Tree

NAME = "dropout"
"""The entry of the data that holds the keys."""
_LOW, _WORD = 0xFFFFFFFF, 1 << 32
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - _WORD  # the second less 2^32: a product of 32 bits never leaves int64


def with_keys(data: dict[str, Any], key: Key) -> dict[str, Any]:
    """``data`` with a key of its own for every sample. ``key`` is for this batch alone: fold in the step."""
    if not isinstance(data, dict):
        raise FdpError(
            f"data: expected a dictionary, to which the keys of dropout are added, got {type(data).__name__}"
        )
    return data | {NAME: fdp_keys.split(key, batch_size_of(data)).to(next(iter(data.values())).device)}


def keys_of(data: Tree) -> Tensor | None:
    """The keys of the samples, if the data hold any."""
    return data.get(NAME) if isinstance(data, dict) else None


def next_keys(keys: Int[Tensor, "batch 8"]) -> Int[Tensor, "batch 8"]:
    """Other keys, for the next block of a stack: like blocks draw unlike masks."""
    words = torch.arange(8, device=keys.device)
    return _mixed(_seed(keys, 0x51)[:, None] + words) ^ _mixed(keys)


def dropped(
    x: Float[Tensor, " batch *shape"], keys: Int[Tensor, "batch 8"], call: int, p: float
) -> Float[Tensor, " batch *shape"]:
    """``x`` with a share ``p`` of each sample's elements zeroed, the rest scaled by ``1 / (1 - p)``."""
    places = torch.arange(x.numel() // len(keys), device=x.device)
    bits = _mixed(_mixed(places ^ _seed(keys, 2 * call)[:, None]) + _seed(keys, 2 * call + 1)[:, None])
    kept = (bits >= int(p * _WORD)).view(x.shape)
    return torch.where(kept, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)


def dropout(run: Run, x: Tensor | Tracked, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``F.dropout``, its mask from the samples' keys."""
    if not training or p == 0.0:
        return x if isinstance(x, Tensor) else x.value
    layout, dim = _layout(run, x, dims=3)
    return run.back(draw(run, run.first(x, layout, dim), p), layout, dim, NAME)  # type: ignore[arg-type]


def dropout_maps(run: Run, x: Tensor | Tracked, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``F.dropout1d``, ``2d`` and ``3d``: whole channels, of what has samples and channels in front."""
    if not training or p == 0.0:
        return x if isinstance(x, Tensor) else x.value
    layout, dim = _layout(run, x, dims=ALWAYS_FIRST)
    first = run.first(x, layout, dim)  # type: ignore[arg-type]
    maps = len(x.shape) - 2
    channels = first.shape[: first.ndim - maps]
    return run.back(first * draw(run, first.new_ones(channels), p).reshape(*channels, *[1] * maps), layout, dim, NAME)


def _layout(run: Run, x: Tensor | Tracked, *, dims: int) -> tuple[str, int]:
    found = (SHARED, 0) if isinstance(x, Tracked) else run.layout(x, path=NAME, dims=dims)
    if found[0] == SHARED:
        raise FdpError(
            f"dropout of a tensor of shape {tuple(x.shape)} without samples: expected (batch, ...), since every sample "
            f"draws its own mask; expand it over the batch first, or put the module in eval()"
        )
    return found


def draw(run: Run, x: Float[Tensor, " batch *shape"], p: float) -> Float[Tensor, " batch *shape"]:
    """The next dropout of this run, on samples in dim 0."""
    if run.keys is None:
        raise FdpError(
            f"dropout with p = {p} in a module that is in training mode: expected keys, one per sample, from which to "
            f"draw its mask; put the module in eval(), or add them: data = "
            f"fdp.foreign.uses.dropout.with_keys(data, key)"
        )
    run.draws += 1
    return dropped(x, run.keys, run.draws, p)


def _seed(keys: Tensor, number: int) -> Int[Tensor, " batch"]:
    """32 bits of all words of a key and a number."""
    seed = torch.full_like(keys[:, 0], number)
    for i in range(8):
        seed = _mixed(seed + (keys[:, i] & _LOW) + i)
    return seed


def _mixed(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    x = x & _LOW
    x = ((x ^ (x >> 16)) * _FIRST) & _LOW
    x = ((x ^ (x >> 15)) * _SECOND) & _LOW
    return x ^ (x >> 16)
