"""Call a ``transformers`` model with attention masks made here, if they equal those it would make itself.

    causal   j <= i  [and i - j < window]  [and document_i = document_j]
    plain    if only causality is needed, layers get None, and the attention kernel applies it

A module left to itself reads the data to decide whether it needs a mask, which synchronises with the device, and
decides differently while a graph is traced. It accepts a 4-d mask as it is, so one is passed in; a mask that stands for
None takes no memory. An example shows whether layers get what they would have got otherwise.

    >>> call = causal_caller(module, example, pattern="auto")     # call(module, data) -> what the module returned
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from fdp.foreign.hub.prefix_cache import PrefixCache
from fdp.foreign.stack.block_functions import Caller
from fdp.foreign.stack.layer_calls import layer_calls
from fdp.models.language import places_of, window_inputs_of
from fdp.types import FdpError, Tree

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class TokensOnly:
    """A caller that passes tokens; the module makes its own masks and positions."""

    def __call__(self, module: Any, data: Tree) -> Any:
        return module(input_ids=window_inputs_of(data).flatten(1), use_cache=False)


@dataclass(frozen=True)
class CausalMasks:
    """A caller that passes masks for each kind of layer, and positions if ``positions`` or if there are documents.

    ``added``: masks are numbers to add to scores, not booleans, and None is not causal. ``prefix``: the number of keys
    before those of the tokens, which all tokens see; positions begin after it.
    """

    kinds: tuple[str, ...]
    window: int | None
    added: bool
    positions: bool
    prefix: int = 0

    def __call__(self, module: Any, data: Tree) -> Any:
        tokens, documents = window_inputs_of(data).flatten(1), documents_of(data)
        masks = {kind: self.mask(kind, tokens, documents) for kind in self.kinds}
        more: dict[str, Any] = {}
        if documents is not None or self.positions:
            more = {"position_ids": self.prefix + _positions(tokens, documents)}
        if self.prefix:
            more["past_key_values"] = PrefixCache(self.prefix)
        mask = masks if len(masks) > 1 else masks[self.kinds[0]]
        return module(input_ids=tokens, attention_mask=mask, use_cache=False, **more)

    def mask(self, kind: str, tokens: Tensor, documents: Tensor | None) -> Tensor:
        """Return the mask of one kind of layer, (batch or 1, 1, tokens, prefix + tokens)."""
        batch, length = tokens.shape
        window = self.window if kind == SLIDING else None
        if documents is None and not self.added and not self.prefix and (window is None or length < window):
            return none_mask(tokens, batch, 1, length, length)
        index = torch.arange(length, device=tokens.device)
        seen = in_window(index[:, None] - index, window)[None, None]
        if documents is not None:
            seen = seen & _same_document(documents)
        if self.prefix:
            # The distance to a virtual token is the position in the document, not in the row.
            virtual = torch.arange(self.prefix, device=tokens.device)
            before = self.prefix + _positions(tokens[:1] if documents is None else tokens, documents)
            before = in_window(before[:, None, :, None] - virtual, window)
            seen = torch.cat([before, seen.expand(len(before), -1, -1, -1)], dim=-1)
        return additive_mask(seen) if self.added else seen


def in_window(behind: Int[Tensor, "..."], window: int | None) -> Bool[Tensor, "..."]:
    """Return True where a key that is ``behind`` positions back is seen."""
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def none_mask(like: Tensor, *shape: int) -> Tensor:
    """Return a mask that stands for None and takes no memory."""
    return torch.zeros((), dtype=torch.bool, device=like.device).expand(shape)


def is_none_mask(tensor: Tensor) -> bool:
    """Return True if a tensor was made by :func:`none_mask`: many elements at one address."""
    return tensor.ndim == 4 and tensor.dtype == torch.bool and not any(tensor.stride())


def additive_mask(seen: Bool[Tensor, "..."]) -> Tensor:
    """Return 0 where a token is seen and the lowest float where it is not, as ``transformers`` does."""
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def documents_of(data: Tree) -> Int[Tensor, "batch windows tokens"] | None:
    """Return the number of the document of every token in its window, or None if each sample is one document."""
    tokens, segments = window_inputs_of(data), data.get("segments")
    if tokens.ndim == 2:
        return None if segments is None else segments[:, None]
    return torch.zeros_like(tokens) if segments is None else segments


def _same_document(documents: Int[Tensor, "batch windows tokens"]) -> Bool[Tensor, "batch 1 all_tokens all_tokens"]:
    """Return True where two tokens are in the same window and in the same segment of it."""
    _, windows, length = documents.shape
    segment = documents.flatten(1)
    same = segment[:, None, :, None] == segment[:, None, None, :]
    window = torch.arange(windows * length, device=documents.device) // length
    return same & (window[:, None] == window)


def _positions(tokens: Int[Tensor, "batch tokens"], documents: Tensor | None) -> Int[Tensor, "batch tokens"]:
    """Return the position of every token in its document."""
    if documents is not None:
        return places_of(documents).flatten(1)
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)


def adds_masks(module: nn.Module) -> bool:
    """Return True if attention is eager, so that masks are added to scores. Kernels other than torch's are refused."""
    chosen = module.config._attn_implementation  # pyright: ignore
    if chosen not in ("sdpa", "eager"):
        raise FdpError(
            f"{type(module).__name__}: expected attention 'sdpa' or 'eager', got {chosen!r}; load the model with "
            f"attn_implementation='sdpa'"
        )
    return chosen == "eager"


def attention_kinds(module: nn.Module) -> tuple[tuple[str, ...], int | None]:
    """Return the kinds of attention of a module's layers, and the window of those that have one."""
    config: Any = module.config
    window = getattr(config, "sliding_window", None)
    return tuple(sorted(set(getattr(config, "layer_types", None) or [SLIDING if window else FULL]))), window


def causal_caller(module: nn.Module, example: Tree, *, pattern: str, prefix: int = 0) -> Caller:
    """Return the first caller whose layers get what they get when the module is given tokens alone.

    With a ``prefix``, the caller then also gives the layers this many keys before those of the tokens.
    """
    added, (kinds, window) = adds_masks(module), attention_kinds(module)
    several = documents_of(example)
    tokens = window_inputs_of(example)
    tokens = tokens if tokens.ndim == 2 else tokens[:, 0]  # all windows together may exceed its context
    alone = {"tokens": torch.cat([tokens, tokens[:, -1:]], dim=1)}
    own = layer_calls(module, TokensOnly(), alone, pattern=pattern)
    given = alone if several is None else alone | {"segments": torch.ones_like(tokens)}
    for positions in (True,) if prefix else (False, True):
        ours = CausalMasks(kinds, window, added, positions)
        if set(kinds) <= {FULL, SLIDING} and same_calls(
            own, try_layer_calls(module, ours, given, pattern), len(tokens[0])
        ):
            return replace(ours, prefix=prefix)
    if prefix:
        raise FdpError(
            f"{type(module).__name__}: expected a model that takes masks and positions, which a prefix needs, got one "
            f"that does not; use LoRA instead"
        )
    return tokens_only(module, example)


def tokens_only(module: nn.Module, example: Tree) -> Caller:
    """Return the caller for a module that makes its own masks and positions; each sample must be one document."""
    if documents_of(example) is not None:
        raise FdpError(
            f"{type(module).__name__}: expected a model that takes masks and positions, which several documents in a "
            f"row need, got one that does not; do not pack documents or group windows by user"
        )
    return TokensOnly()


def try_layer_calls(module: nn.Module, ours: Caller, data: Tree, pattern: str) -> list[Any]:
    """Return the arguments of the layers' calls, or an empty list if the module cannot be called this way."""
    try:
        return layer_calls(module, ours, data, pattern=pattern)
    except Exception:  # whatever it raises, the module cannot be called this way
        return []


def same_calls(own: list[Any], ours: list[Any], length: int | None, *, values: bool = True) -> bool:
    """Return True if two runs called their layers alike.

    With a ``length``, None equals a causal mask of it. Without ``values``, tensors with the same number of dims and the
    same dtype are alike.
    """
    causal = torch.ones(length or 0, length or 0, dtype=torch.bool).tril()

    def same(mine: Any, theirs: Any) -> bool:
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor) and not is_none_mask(theirs):
            fits = mine.ndim == theirs.ndim and mine.dtype == theirs.dtype
            return fits and (not values or bool((mine == theirs).all()))
        if isinstance(theirs, Tensor) and mine is None:
            given = length is not None and theirs.shape[-2:] == causal.shape and theirs.dtype == torch.bool
            return is_none_mask(theirs) or (given and bool((theirs == causal).all()))
        if isinstance(mine, dict) and isinstance(theirs, dict):
            return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
        if type(mine) in (tuple, list) and type(mine) is type(theirs) and len(mine) == len(theirs):
            return all(same(a, b) for a, b in zip(mine, theirs))
        return mine is theirs or (type(mine) is type(theirs) and not isinstance(mine, Tensor) and mine == theirs)

    return len(own) == len(ours) and all(same(a, b) for a, b in zip(own, ours))
