"""Keys and values in front of those of a layer's tokens, handed to it where ``transformers`` hands a cache.

    attention(q, [P_k; k], [P_v; v])                         P_k, P_v (batch, heads, length, features), one per sample

A layer that is given a cache asks it for all keys and values, its own included, and nothing else. This one keeps
nothing of what it sees.

    >>> layer(hidden, past_key_values=Prefix(length, keys, values), attention_mask=mask)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdp.types import FdpError


class Prefix:
    """``length`` keys and values; without tensors they are zeros, to see what a layer would do."""

    def __init__(self, length: int, keys: Tensor | None = None, values: Tensor | None = None):
        self.length, self.keys, self.values = length, keys, values
        self.asked = 0

    def __repr__(self) -> str:
        return f"Prefix({self.length})"

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer: what ``transformers`` calls."""
        self.asked += 1
        return self._before(self.keys, key), self._before(self.values, value)

    def get_seq_length(self, layer: int = 0) -> int:
        """How many positions are taken before the first token."""
        return self.length

    def _before(self, held: Tensor | None, own: Tensor) -> Tensor:
        shape = (own.shape[0], own.shape[1], self.length, own.shape[3])
        held = own.new_zeros(shape) if held is None else held
        if tuple(held.shape) != shape:
            raise FdpError(
                f"prefix: expected keys and values of shape {shape} for a layer of {own.shape[1]} key heads of "
                f"{own.shape[3]} features, got {tuple(held.shape)}; this model's config.json says something else"
            )
        return torch.cat([held, own], dim=2)
