"""A ``transformers`` cache that puts fixed keys and values in front of a layer's own.

    attention(q, [P_k; k], [P_v; v])                         P_k, P_v (batch, heads, length, features), one per sample

A layer that is given a cache asks it only for all keys and values, its own included. This cache stores nothing of what
it sees.

    >>> layer(hidden, past_key_values=PrefixCache(length, keys, values), attention_mask=mask)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdp.types import FdpError


class PrefixCache:
    """A cache of ``length`` keys and values. Without tensors they are zeros, to see how a layer uses its cache."""

    def __init__(self, length: int, keys: Tensor | None = None, values: Tensor | None = None):
        self.length, self.keys, self.values = length, keys, values
        self.asked = 0

    def __repr__(self) -> str:
        return f"Prefix({self.length})"

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer; ``transformers`` calls this method."""
        self.asked += 1
        return self._before(self.keys, key), self._before(self.values, value)

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of positions before the first token."""
        return self.length

    def _before(self, held: Tensor | None, own: Tensor) -> Tensor:
        shape = (own.shape[0], own.shape[1], self.length, own.shape[3])
        held = own.new_zeros(shape) if held is None else held
        if tuple(held.shape) != shape:
            raise FdpError(
                f"prefix: expected keys and values of shape {shape} for a layer with {own.shape[1]} key heads of "
                f"{own.shape[3]} features, got {tuple(held.shape)}; the model's config.json does not match its layers"
            )
        return torch.cat([held, own], dim=2)
