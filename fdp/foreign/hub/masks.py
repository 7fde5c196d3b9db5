"""How a ``transformers`` model is called: with masks made here once, if they are those it would make itself.

    causal   j <= i  [and i - j < window]  [and document_i = document_j]
    plain    where nothing but causality is asked for, layers get None, and an attention kernel knows what to do

A module left to itself looks at the data to see whether it needs a mask, which waits for the device, and decides
differently while a graph is traced. It takes a mask of four dims as it is: so one is handed in, without memory where
it stands for None. Whether layers then get what they would have got is compared on an example.

    >>> call = caller(module, example)                       # call(module, data) -> what the module returned
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from fdp.foreign.hub.cache import Prefix
from fdp.foreign.stack.parts import Caller
from fdp.foreign.stack.skeleton import calls_of
from fdp.models.language import places_of, window_inputs_of
from fdp.types import FdpError, Tree

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class OwnMasks:
    """The module is given tokens and makes its own masks and positions."""

    def __call__(self, module: Any, data: Tree) -> Any:
        return module(input_ids=window_inputs_of(data).flatten(1), use_cache=False)


@dataclass(frozen=True)
class CausalMasks:
    """The module is given masks of its kinds of layers, and positions if ``positions`` or if there are documents.

    ``added``: masks are numbers to be added to scores, not booleans, and None is not causal. ``prefix``: how many keys
    come before those of the tokens, and are seen by all of them; positions begin after it.
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
            more = {"position_ids": self.prefix + _places(tokens, documents)}
        if self.prefix:
            more["past_key_values"] = Prefix(self.prefix)
        mask = masks if len(masks) > 1 else masks[self.kinds[0]]
        return module(input_ids=tokens, attention_mask=mask, use_cache=False, **more)

    def mask(self, kind: str, tokens: Tensor, documents: Tensor | None) -> Tensor:
        """(batch or 1, 1, tokens, prefix + tokens)"""
        batch, length = tokens.shape
        window = self.window if kind == SLIDING else None
        if documents is None and not self.added and not self.prefix and (window is None or length < window):
            return none_of(tokens, batch, 1, length, length)
        index = torch.arange(length, device=tokens.device)
        seen = within(index[:, None] - index, window)[None, None]
        if documents is not None:
            seen = seen & _same_document(documents)
        if self.prefix:
            # How far behind a virtual token is, a token's place in its document says, not its place in the row.
            virtual = torch.arange(self.prefix, device=tokens.device)
            before = self.prefix + _places(tokens[:1] if documents is None else tokens, documents)
            before = within(before[:, None, :, None] - virtual, window)
            seen = torch.cat([before, seen.expand(len(before), -1, -1, -1)], dim=-1)
        return additive(seen) if self.added else seen


def within(behind: Int[Tensor, "..."], window: int | None) -> Bool[Tensor, "..."]:
    """Whether a key so far behind is seen."""
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def none_of(like: Tensor, *shape: int) -> Tensor:
    """A tensor that stands for None."""
    return torch.zeros((), dtype=torch.bool, device=like.device).expand(shape)


def stands_for_none(tensor: Tensor) -> bool:
    """Whether a tensor was made by :func:`none_of`: many elements, one address."""
    return tensor.ndim == 4 and tensor.dtype == torch.bool and not any(tensor.stride())


def additive(seen: Bool[Tensor, "..."]) -> Tensor:
    """0 where a token is seen, and the least number where it is not, as ``transformers`` has it."""
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def documents_of(data: Tree) -> Int[Tensor, "batch windows tokens"] | None:
    """Which document of its window every token is of; None: each sample is one document."""
    tokens, segments = window_inputs_of(data), data.get("segments")
    if tokens.ndim == 2:
        return None if segments is None else segments[:, None]
    return torch.zeros_like(tokens) if segments is None else segments


def _same_document(documents: Int[Tensor, "batch windows tokens"]) -> Bool[Tensor, "batch 1 all_tokens all_tokens"]:
    """Whether two tokens are of one document: of one window and, in it, of one segment, whatever its number."""
    _, windows, length = documents.shape
    segment = documents.flatten(1)
    same = segment[:, None, :, None] == segment[:, None, None, :]
    window = torch.arange(windows * length, device=documents.device) // length
    return same & (window[:, None] == window)


def _places(tokens: Int[Tensor, "batch tokens"], documents: Tensor | None) -> Int[Tensor, "batch tokens"]:
    """The place of every token in its document."""
    if documents is not None:
        return places_of(documents).flatten(1)
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)


def adds_masks(module: nn.Module) -> bool:
    """Whether attention is written out, so that masks are added to scores; kernels that are not torch's are refused."""
    chosen = module.config._attn_implementation  # pyright: ignore
    if chosen not in ("sdpa", "eager"):
        raise FdpError(
            f"{type(module).__name__}: expected attention by 'sdpa' or 'eager', got {chosen!r}; load it with "
            f"attn_implementation='sdpa'"
        )
    return chosen == "eager"


def kinds_of(module: nn.Module) -> tuple[tuple[str, ...], int | None]:
    """The kinds of attention that a module's layers have, and the window of those that have one."""
    config: Any = module.config
    window = getattr(config, "sliding_window", None)
    return tuple(sorted(set(getattr(config, "layer_types", None) or [SLIDING if window else FULL]))), window


def causal_caller(module: nn.Module, example: Tree, *, pattern: str, prefix: int = 0) -> Caller:
    """The first way of calling the module that gives its layers what they get when it is given tokens alone.

    With a ``prefix`` it is then called so that its layers have this many keys before those of the tokens.
    """
    added, (kinds, window) = adds_masks(module), kinds_of(module)
    several = documents_of(example)
    tokens = window_inputs_of(example)
    tokens = tokens if tokens.ndim == 2 else tokens[:, 0]  # all windows in a row may be longer than it takes
    alone = {"tokens": torch.cat([tokens, tokens[:, -1:]], dim=1)}
    own = calls_of(module, OwnMasks(), alone, pattern=pattern)
    given = alone if several is None else alone | {"segments": torch.ones_like(tokens)}
    for positions in (True,) if prefix else (False, True):
        ours = CausalMasks(kinds, window, added, positions)
        if set(kinds) <= {FULL, SLIDING} and same_calls(own, _calls(module, ours, given, pattern), len(tokens[0])):
            return replace(ours, prefix=prefix)
    if prefix:
        raise FdpError(
            f"{type(module).__name__}: expected a model that takes masks and positions, to put a prefix before its "
            f"tokens; tune it by LoRA"
        )
    return own_masks(module, example)


def own_masks(module: nn.Module, example: Tree) -> Caller:
    """The way of calling a module that makes its own masks and positions: its samples are one document each."""
    if documents_of(example) is not None:
        raise FdpError(
            f"{type(module).__name__}: expected a model that takes masks and positions, to keep documents apart; do "
            f"not pack, nor group windows by user"
        )
    return OwnMasks()


def _calls(module: nn.Module, ours: Caller, data: Tree, pattern: str) -> list[Any]:
    try:
        return calls_of(module, ours, data, pattern=pattern)
    except Exception:  # whatever it raises: this is no way to call it
        return []


def same_calls(own: list[Any], ours: list[Any], length: int | None, *, values: bool = True) -> bool:
    """Whether two runs called their layers alike; with a ``length``, None is a causal mask of it. Without ``values``
    tensors are alike that have as many dims and one dtype."""
    causal = torch.ones(length or 0, length or 0, dtype=torch.bool).tril()

    def same(mine: Any, theirs: Any) -> bool:
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor) and not stands_for_none(theirs):
            fits = mine.ndim == theirs.ndim and mine.dtype == theirs.dtype
            return fits and (not values or bool((mine == theirs).all()))
        if isinstance(theirs, Tensor) and mine is None:
            given = length is not None and theirs.shape[-2:] == causal.shape and theirs.dtype == torch.bool
            return stands_for_none(theirs) or (given and bool((theirs == causal).all()))
        if isinstance(mine, dict) and isinstance(theirs, dict):
            return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
        if type(mine) in (tuple, list) and type(mine) is type(theirs) and len(mine) == len(theirs):
            return all(same(a, b) for a, b in zip(mine, theirs))
        return mine is theirs or (type(mine) is type(theirs) and not isinstance(mine, Tensor) and mine == theirs)

    return len(own) == len(ours) and all(same(a, b) for a, b in zip(own, ours))
