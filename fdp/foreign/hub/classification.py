"""Classifiers of ``transformers`` as stacks: BERT, RoBERTa and similar ones on text, ViT on images.

    loss_b = -log softmax(scores_b)[label_b]            data {"tokens", "mask"?, "label"} or {"image", "label"}
    loss_b = (score_b - label_b)^2                      with a single score: a regression, labels are numbers

``mask`` (batch, tokens) is 1 for a token and 0 for padding.

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

from fdp.foreign.find_stack import AUTO, NotAStack
from fdp.foreign.hub.masks import (
    FULL,
    SLIDING,
    additive_mask,
    adds_masks,
    attention_kinds,
    in_window,
    is_none_mask,
    none_mask,
    same_calls,
    try_layer_calls,
)
from fdp.foreign.leaves import foreign_model
from fdp.foreign.stack.block_functions import AfterLayers, Caller
from fdp.foreign.stack.fast_paths import without_fast_paths
from fdp.foreign.stack.layer_calls import layer_calls, returns_output_of
from fdp.foreign.stack.one_block import ModuleLoss, one_block, one_block_remark
from fdp.foreign.stack.stack_blocks import stack_blocks
from fdp.model import Likelihood, Model, Outputs
from fdp.types import FdpError, Tree

EXAMPLE_TOKENS = 16
"""Tokens of the default example."""


def classifier(module: nn.Module, *, example: Tree | None = None, pattern: str = AUTO) -> Model:
    """Return the model of a ``...ForSequenceClassification`` or ``...ForImageClassification``.

    Leaves have the module's names. ``example`` is a batch with the entries and lengths of the data to come; by default
    images of the configured size, or tokens with a mask.
    """
    module = without_fast_paths(module)
    config: Any = module.config
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise FdpError(
            f"{type(module).__name__}: expected one label per sample, got several; use from_module with a loss"
        )
    images = getattr(module, "main_input_name", "") == "pixel_values"
    example = (_image_example(config) if images else _text_example(config)) if example is None else example
    finish = _squared_error if config.num_labels == 1 else _cross_entropy
    own: Caller = Images() if images else TokensAndPadding(_extra_arguments(module))
    try:
        call = own if images else _text_caller(module, example, pattern)
        *blocks, last = stack_blocks(
            module, call=call, finish=finish, example=example, pattern=pattern, absent=is_none_mask
        )
        remark, last = None, last._replace(name="head")
    except NotAStack as error:
        if pattern != AUTO:
            raise
        call, blocks, remark = own, [], one_block_remark(module, error)
        last = one_block(module, call=call, finish=finish, example=example)
    end = last.apply
    assert isinstance(end, AfterLayers | ModuleLoss)
    if config.num_labels > 1:
        weight = _weight_of_scores(module, call, example, last.params)
        scores = replace(end, finish=_scores)
        outputs = Outputs(scores, Likelihood.SOFTMAX, labels_of, weight=weight, present=mask_of)
        last = last._replace(outputs=outputs)
    return foreign_model(module, (*blocks, last), context=None, vocab_size=None, remark=remark)


@dataclass(frozen=True)
class Images:
    """A caller that passes images."""

    def __call__(self, module: Any, data: Tree) -> Any:
        return module(pixel_values=data["image"])


@dataclass(frozen=True)
class TokensAndPadding:
    """A caller that passes tokens and, if there is one, the padding mask, from which the module makes its own masks.

    ``more`` holds further arguments.
    """

    more: tuple[tuple[str, Any], ...] = ()

    def __call__(self, module: Any, data: Tree) -> Any:
        return _call_padded(module, input_ids=data["tokens"], attention_mask=data.get("mask"), **dict(self.more))


@dataclass(frozen=True)
class PaddingMasks:
    """A caller that passes the masks that the layers need: padding and, if ``causal``, causality.

    ``added``: masks are numbers to add to scores. ``kinds`` and ``window`` as in ``fdp.foreign.hub.masks``.
    """

    added: bool
    causal: bool
    kinds: tuple[str, ...] = (FULL,)
    window: int | None = None
    more: tuple[tuple[str, Any], ...] = ()

    def __call__(self, module: Any, data: Tree) -> Any:
        masks = {kind: self.mask(kind, data["tokens"], data.get("mask")) for kind in self.kinds}
        mask = masks if len(masks) > 1 else masks[self.kinds[0]]
        return _call_padded(module, input_ids=data["tokens"], attention_mask=mask, **dict(self.more))

    def mask(self, kind: str, tokens: Tensor, present: Tensor | None) -> Tensor:
        """Return the mask of one kind of layer, (batch, 1, tokens, tokens)."""
        batch, length = tokens.shape
        shape, window = (batch, 1, length, length), self.window if kind == SLIDING else None
        plain = not self.causal or (not self.added and (window is None or length < window))
        if present is None and plain:
            return none_mask(tokens, *shape)
        seen = torch.ones_like(tokens) if present is None else present
        seen = (seen != 0)[:, None, None, :].expand(shape)
        if self.causal:
            index = torch.arange(length, device=tokens.device)
            seen = seen & in_window(index[:, None] - index, window)
        return additive_mask(seen) if self.added else seen


def _call_padded(module: Any, **given: Any) -> Any:
    """Call the module; explain the error of a decoder that needs a padding token to find the last real one."""
    try:
        return module(**given)
    except ValueError as error:
        if "padding token" not in str(error):
            raise
        raise FdpError(
            "config: expected a pad_token_id, which a decoder needs to find its last token, got none; write one into "
            "config.json (module.config.pad_token_id = ...), and pad with it"
        ) from error


def labels_of(data: Tree) -> Tensor:
    return data["label"]


def mask_of(data: Tree) -> Tensor | None:
    """Return the mask of real tokens, if any: no real token attends to padding."""
    return data.get("mask")


def _text_caller(module: nn.Module, example: Tree, pattern: str) -> Caller:
    """Return the first caller whose layers get what they get when the module makes its own masks of the padding."""
    more, added, (kinds, window) = _extra_arguments(module), adds_masks(module), attention_kinds(module)
    own = TokensAndPadding(more)
    ways = [PaddingMasks(added, False, more=more)]
    if set(kinds) <= {FULL, SLIDING}:
        ways.append(PaddingMasks(added, True, kinds, window, more))
    if "mask" not in example:
        found, length = layer_calls(module, own, example, pattern=pattern), len(example["tokens"][0])
        same = (
            way
            for way in ways
            if same_calls(found, try_layer_calls(module, way, example, pattern), length * way.causal)
        )
        return next(same, own)
    tokens = example["tokens"]
    full = torch.ones_like(tokens)
    half = torch.arange(tokens.shape[1], device=tokens.device) <= tokens.shape[1] // 2
    padded, whole = example | {"mask": full * half}, example | {"mask": full}
    found = layer_calls(module, own, padded, pattern=pattern)
    for way in ways:
        if same_calls(found, try_layer_calls(module, way, padded, pattern), None):
            return way
    if not same_calls(found, try_layer_calls(module, own, whole, pattern), None, values=False):
        raise NotAStack(
            f"{type(module).__name__}: expected layers that are always given masks, got layers that are given masks "
            f"only if there is padding"
        )
    return own


def _extra_arguments(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return arguments that stop a decoder from filling a cache that nobody reads."""
    return (("use_cache", False),) if "use_cache" in inspect.signature(module.forward).parameters else ()


def _weight_of_scores(module: nn.Module, call: Caller, example: Tree, params: dict[str, str]) -> str | None:
    """Return the name of the weight of the linear layer whose output is the scores."""
    config: Any = module.config

    def fits(name: str, part: nn.Module) -> bool:
        return isinstance(part, nn.Linear) and part.out_features == config.num_labels and f"{name}.weight" in params

    for name in [name for name, part in module.named_modules() if fits(name, part)]:
        try:
            if returns_output_of(module, name, call, _scores, example):
                return f"{name}.weight"
        except NotAStack:  # the layer serves another purpose, and what follows it needs its shape
            continue
    return None


def _text_example(config: Any) -> Tree:
    tokens = torch.zeros(2, EXAMPLE_TOKENS, dtype=torch.int64)
    there = (
        torch.arange(EXAMPLE_TOKENS).expand(2, EXAMPLE_TOKENS) < EXAMPLE_TOKENS // 2
    )  # without padding the module would drop its mask
    return {"tokens": tokens + 3 * there, "mask": there.long(), "label": torch.zeros(2, dtype=torch.int64)}


def _image_example(config: Any) -> Tree:
    size = config.image_size if isinstance(config.image_size, tuple | list) else (config.image_size, config.image_size)
    return {"image": torch.zeros(2, config.num_channels, *size), "label": torch.zeros(2, dtype=torch.int64)}


def _scores(out: Any, data: Tree) -> Float[Tensor, "batch classes"]:
    return out.logits


def _at_least_float32(scores: Tensor) -> Tensor:
    return scores if scores.element_size() >= 4 else scores.float()


def _cross_entropy(out: Any, data: Tree) -> Float[Tensor, " batch"]:
    return F.cross_entropy(_at_least_float32(out.logits), data["label"], reduction="none")


def _squared_error(out: Any, data: Tree) -> Float[Tensor, " batch"]:
    return (_at_least_float32(out.logits)[:, 0] - data["label"]).square()
