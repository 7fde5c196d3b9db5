"""Windows over a stream of bytes or tokens, which do not overlap:

    sample i = tokens[i (context + 1) : (i + 1) (context + 1)],

and **a sample, the unit of privacy, is one window**. No token is in two samples: inputs and targets overlap only
inside a window, so removing a window removes every use of its tokens. A document longer than a window is several
samples, and so less protected than if it were one.

    >>> dataset = windows(np.arange(1000), context=128, vocab_size=1000, where="notes.npy")
    >>> dataset.fetch(np.array([0, 6]))                # {'tokens': int64 (2, 129)}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdp.data.nouns import FILE
from fdp.data.person_fields import PersonField
from fdp.data.read_counts import ReadCounts
from fdp.data.token_files import Shards
from fdp.data.units import PrivacyUnit, UnitKind, privacy_unit
from fdp.types import FdpError

CHUNK_TOKENS = 1 << 24
"""Tokens checked at a time, so that a mapped file is never all in memory."""


class TextsRead(NamedTuple):
    """The counts of the texts that a stream was made of; see ``fdp.data.read_counts``."""

    texts: int = 0
    text: str = FILE
    links: int = 0
    person_field: PersonField | None = None
    unread: int = 0
    separated: str = ""


@dataclass(frozen=True)
class Windows:
    """Windows of ``context + 1`` tokens over a one-dimensional array, which may be a mapped file, or several.

    Guarantees:
      - windows do not overlap: a token is in at most one sample;
      - only the windows asked for are read.
    """

    tokens: np.ndarray | Shards = field(repr=False)
    context: int
    token: str = "token"
    texts: TextsRead = field(default=TextsRead(), repr=False)

    @property
    def reading(self) -> ReadCounts:
        """The counts of windows, and of tokens that are not trained on; covered by no budget."""
        tail, size = len(self.tokens) - len(self) * (self.context + 1), self.context + 1
        return ReadCounts(UnitKind.WINDOW, len(self), size, self.token, tail=tail, **self.texts._asdict())

    @property
    def unit(self) -> PrivacyUnit:
        """The unit of privacy, in words."""
        return privacy_unit(UnitKind.WINDOW, tokens=self.context + 1, word=self.token)

    def __len__(self) -> int:
        return len(self.tokens) // (self.context + 1)

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``{"tokens": int64 (n, context + 1)}`` for n indices."""
        size = self.context + 1
        if isinstance(self.tokens, Shards):
            return {"tokens": torch.from_numpy(self.tokens.windows(indices, size).astype(np.int64))}
        rows = self.tokens[: len(self) * size].reshape(len(self), size)
        return {"tokens": torch.from_numpy(rows[indices].astype(np.int64))}

    def content(self) -> list[tuple[str, np.ndarray | Shards]]:
        """Return the arrays that samples are made from, for ``fdp.data.digest``."""
        used, tokens = len(self) * (self.context + 1), self.tokens
        tokens = tokens.first(used) if isinstance(tokens, Shards) else tokens[:used]
        return [("tokens", tokens), ("context", np.array([self.context]))]


def windows(tokens: np.ndarray | Shards, *, context: int, vocab_size: int, where: str, token: str = "token") -> Windows:
    """Check tokens and split them into windows; ``where`` names the source. A shorter last window is dropped."""
    if context < 1:
        raise FdpError(f"context: expected at least 1, got {context}")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise FdpError(
            f"{where}: expected integers in one dimension, got {tokens.dtype} of shape {tokens.shape}; "
            "save token ids, not text or embeddings"
        )
    if len(tokens) == 0:
        raise FdpError(f"{where}: expected text or tokens, got nothing (empty); check that it is the file you meant")
    if len(tokens) < context + 1:
        raise FdpError(
            f"{where}: expected at least one window of {context + 1} {token}s, got {len(tokens)}; "
            "give more data or a shorter context"
        )
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        if int(chunk.max()) >= vocab_size or int(chunk.min()) < 0:
            first = int(np.argmax((chunk >= vocab_size) | (chunk < 0)))
            raise FdpError(
                f"{where}: expected token ids from 0 to {vocab_size - 1}, got another "
                f"at position {start + first}; use the model's tokenizer or a model with a larger vocabulary"
            )
    return Windows(tokens, context, token)
