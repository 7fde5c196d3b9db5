"""Classifiers of ``transformers`` as stacks: BERT, RoBERTa and their like on text, ViT on images.

    loss_b = -log softmax(scores_b)[label_b]            data {"tokens", "mask"?, "label"} or {"image", "label"}
    loss_b = (score_b - label_b)^2                      one score only: a regression, labels are numbers

``mask`` (batch, tokens) is 1 where a token is there and 0 where it is padding.

    >>> model = classifier(module)                                       # a BertForSequenceClassification, ...
    >>> losses = model.loss(params_of(module, model), {"tokens": tokens, "label": labels})
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fdp.foreign.hub.masks import (
    FULL,
    SLIDING,
    additive,
    adds_masks,
    kinds_of,
    none_of,
    same_calls,
    stands_for_none,
    within,
)
from fdp.foreign.layout import AUTO, NotAStack
from fdp.foreign.leaves import foreign_model
from fdp.foreign.stack.fast_paths import without_fast_paths
from fdp.foreign.stack.one_block import Whole, one_block, remark_of
from fdp.foreign.stack.parts import After, Caller
from fdp.foreign.stack.skeleton import calls_of, returns, stack_blocks
from fdp.model import Likelihood, Model, Outputs
from fdp.types import FdpError, Tree

SHORT = 16
"""Tokens of the example, where none is given."""


def classifier(module: nn.Module, *, example: Tree | None = None, pattern: str = AUTO) -> Model:
    """The model of a ``...ForSequenceClassification`` or ``...ForImageClassification``. Leaves have the module's names.

    ``example`` is a batch with the entries and lengths of the data to come; by default images of the configured size,
    or tokens with a mask.
    """
    module = without_fast_paths(module)
    config: Any = module.config
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise FdpError(f"{type(module).__name__}: expected one label per sample, got several; give from_module a loss")
    images = getattr(module, "main_input_name", "") == "pixel_values"
    example = (_images(config) if images else _texts(config)) if example is None else example
    finish = _squares if config.num_labels == 1 else _cross_entropy
    own: Caller = Images() if images else OwnMasks(_more(module))
    try:
        call = own if images else _text_caller(module, example, pattern)
        *blocks, last = stack_blocks(
            module, call=call, finish=finish, example=example, pattern=pattern, absent=stands_for_none
        )
        remark, last = None, last._replace(name="head")
    except NotAStack as error:
        if pattern != AUTO:
            raise
        call, blocks, remark = own, [], remark_of(module, error)
        last = one_block(module, call=call, finish=finish, example=example)
    end = last.apply
    assert isinstance(end, After | Whole)
    if config.num_labels > 1:
        weight = _weight_of_scores(module, call, example, last.params)
        scores = replace(end, finish=_scores)
        outputs = Outputs(scores, Likelihood.SOFTMAX, labels_of, weight=weight, present=mask_of)
        last = last._replace(outputs=outputs)
    return foreign_model(module, (*blocks, last), context=None, vocab_size=None, remark=remark)


@dataclass(frozen=True)
class Images:
    """The module is given images."""

    def __call__(self, module: Any, data: Tree) -> Any:
        return module(pixel_values=data["image"])


@dataclass(frozen=True)
class OwnMasks:
    """The module is given tokens and, if there is one, the mask of padding, and makes its own of it.

    ``more``: what it is given besides.
    """

    more: tuple[tuple[str, Any], ...] = ()

    def __call__(self, module: Any, data: Tree) -> Any:
        return _padded(module, input_ids=data["tokens"], attention_mask=data.get("mask"), **dict(self.more))


@dataclass(frozen=True)
class PaddingMasks:
    """The module is given the masks that its layers need: who is padding and, if ``causal``, what comes before.

    ``added``: as numbers to be added to scores. ``kinds`` and ``window`` as in ``fdp.foreign.hub.masks``.
    """

    added: bool
    causal: bool
    kinds: tuple[str, ...] = (FULL,)
    window: int | None = None
    more: tuple[tuple[str, Any], ...] = ()

    def __call__(self, module: Any, data: Tree) -> Any:
        masks = {kind: self.mask(kind, data["tokens"], data.get("mask")) for kind in self.kinds}
        mask = masks if len(masks) > 1 else masks[self.kinds[0]]
        return _padded(module, input_ids=data["tokens"], attention_mask=mask, **dict(self.more))

    def mask(self, kind: str, tokens: Tensor, present: Tensor | None) -> Tensor:
        """(batch, 1, tokens, tokens)"""
        batch, length = tokens.shape
        shape, window = (batch, 1, length, length), self.window if kind == SLIDING else None
        plain = not self.causal or (not self.added and (window is None or length < window))
        if present is None and plain:
            return none_of(tokens, *shape)
        seen = torch.ones_like(tokens) if present is None else present
        seen = (seen != 0)[:, None, None, :].expand(shape)
        if self.causal:
            index = torch.arange(length, device=tokens.device)
            seen = seen & within(index[:, None] - index, window)
        return additive(seen) if self.added else seen


def _padded(module: Any, **given: Any) -> Any:
    """What the module returns; a decoder looks for padding tokens to find the last one that counts."""
    try:
        return module(**given)
    except ValueError as error:
        if "padding token" not in str(error):
            raise
        raise FdpError(
            "config: expected a pad_token_id, by which a decoder's last token is found, got none; write one into "
            "config.json (module.config.pad_token_id = ...), and pad with it"
        ) from error


def labels_of(data: Tree) -> Tensor:
    return data["label"]


def mask_of(data: Tree) -> Tensor | None:
    """Padding is seen by no token that counts."""
    return data.get("mask")


def _text_caller(module: nn.Module, example: Tree, pattern: str) -> Caller:
    """The first way of calling the module that gives its layers what they get if it makes masks of padding itself."""
    more, added, (kinds, window) = _more(module), adds_masks(module), kinds_of(module)
    own = OwnMasks(more)
    ways = [PaddingMasks(added, False, more=more)]
    if set(kinds) <= {FULL, SLIDING}:
        ways.append(PaddingMasks(added, True, kinds, window, more))
    if "mask" not in example:
        found, length = calls_of(module, own, example, pattern=pattern), len(example["tokens"][0])
        same = (way for way in ways if same_calls(found, _calls(module, way, example, pattern), length * way.causal))
        return next(same, own)
    tokens = example["tokens"]
    full = torch.ones_like(tokens)
    half = torch.arange(tokens.shape[1], device=tokens.device) <= tokens.shape[1] // 2
    padded, whole = example | {"mask": full * half}, example | {"mask": full}
    found = calls_of(module, own, padded, pattern=pattern)
    for way in ways:
        if same_calls(found, _calls(module, way, padded, pattern), None):
            return way
    if not same_calls(found, _calls(module, own, whole, pattern), None, values=False):
        raise NotAStack(
            f"{type(module).__name__}: expected layers that are given masks whether or not there is padding, got some "
            f"that are given them only where there is"
        )
    return own


def _calls(module: nn.Module, way: Caller, data: Tree, pattern: str) -> list[Any]:
    try:
        return calls_of(module, way, data, pattern=pattern)
    except Exception:  # whatever it raises: this is no way to call it
        return []


def _more(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """A decoder would fill a cache, in vain."""
    return (("use_cache", False),) if "use_cache" in inspect.signature(module.forward).parameters else ()


def _weight_of_scores(module: nn.Module, call: Caller, example: Tree, params: dict[str, str]) -> str | None:
    """The name of the linear layer's weight whose output the scores are."""
    config: Any = module.config

    def fits(name: str, part: nn.Module) -> bool:
        return isinstance(part, nn.Linear) and part.out_features == config.num_labels and f"{name}.weight" in params

    for name in [name for name, part in module.named_modules() if fits(name, part)]:
        try:
            if returns(module, name, call, _scores, example):
                return f"{name}.weight"
        except NotAStack:  # it is for something else, and what follows it needs its shape
            continue
    return None


def _texts(config: Any) -> Tree:
    tokens = torch.zeros(2, SHORT, dtype=torch.int64)
    there = torch.arange(SHORT).expand(2, SHORT) < SHORT // 2  # some padding, or the module would leave out its mask
    return {"tokens": tokens + 3 * there, "mask": there.long(), "label": torch.zeros(2, dtype=torch.int64)}


def _images(config: Any) -> Tree:
    size = config.image_size if isinstance(config.image_size, tuple | list) else (config.image_size, config.image_size)
    return {"image": torch.zeros(2, config.num_channels, *size), "label": torch.zeros(2, dtype=torch.int64)}


def _scores(out: Any, data: Tree) -> Float[Tensor, "batch classes"]:
    return out.logits


def _wide(scores: Tensor) -> Tensor:
    return scores if scores.element_size() >= 4 else scores.float()


def _cross_entropy(out: Any, data: Tree) -> Float[Tensor, " batch"]:
    return F.cross_entropy(_wide(out.logits), data["label"], reduction="none")


def _squares(out: Any, data: Tree) -> Float[Tensor, " batch"]:
    return (_wide(out.logits)[:, 0] - data["label"]).square()
