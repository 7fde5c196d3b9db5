"""Classifiers of ``transformers`` as stacks: BERT, RoBERTa and their like on text, ViT on images.

    loss_b = -log softmax(scores_b)[label_b]            data {"tokens", "mask"?, "label"} or {"image", "label"}
    loss_b = (score_b - label_b)^2                      one score only: a regression, labels are numbers

``mask`` (batch, tokens) is 1 where a token is there and 0 where it is padding.

    >>> model = classifier(module)                                       # a BertForSequenceClassification, ...
    >>> losses = model.loss(params_of(module, model), {"tokens": tokens, "label": labels})
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fdp.foreign.leaves import foreign_model
from fdp.foreign.masks import additive, adds_masks, none_of, same_calls, stands_for_none
from fdp.foreign.parts import After, Caller
from fdp.foreign.skeleton import calls_of, returns, stack_blocks
from fdp.foreign.stack import AUTO
from fdp.model import Likelihood, Model, Outputs
from fdp.types import FdpError, Tree

SHORT = 16
"""Tokens of the example, where none is given."""


def classifier(module: nn.Module, *, example: Tree | None = None, pattern: str = AUTO) -> Model:
    """The model of a ``...ForSequenceClassification`` or ``...ForImageClassification``. Leaves have the module's names.

    ``example`` is a batch with the entries and lengths of the data to come; by default images of the configured size,
    or tokens with a mask.
    """
    config: Any = module.config
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise FdpError(f"{type(module).__name__}: expected one label per sample, got several; give from_module a loss")
    images = getattr(module, "main_input_name", "") == "pixel_values"
    example = (_images(config) if images else _texts(config)) if example is None else example
    call = Images() if images else _text_caller(module, example, pattern)
    finish = _squares if config.num_labels == 1 else _cross_entropy
    *blocks, last = stack_blocks(
        module, call=call, finish=finish, example=example, pattern=pattern, absent=stands_for_none
    )
    end = last.apply
    assert isinstance(end, After)
    if config.num_labels > 1:
        weight = _weight_of_scores(module, call, example, last.params)
        scores = replace(end, finish=_scores)
        outputs = Outputs(scores, Likelihood.SOFTMAX, labels_of, weight=weight, present=mask_of)
        last = last._replace(outputs=outputs)
    return foreign_model(module, (*blocks, last._replace(name="head")), context=None, vocab_size=None)


@dataclass(frozen=True)
class Images:
    """The module is given images."""

    def __call__(self, module: Any, data: Tree) -> Any:
        return module(pixel_values=data["image"])


@dataclass(frozen=True)
class OwnMasks:
    """The module is given tokens and, if there is one, the mask of padding, and makes its own of it."""

    def __call__(self, module: Any, data: Tree) -> Any:
        return module(input_ids=data["tokens"], attention_mask=data.get("mask"))


@dataclass(frozen=True)
class PaddingMasks:
    """The module is given the mask that its layers need; ``added``: as numbers to be added to scores."""

    added: bool

    def __call__(self, module: Any, data: Tree) -> Any:
        tokens = data["tokens"]
        if "mask" not in data:
            return module(input_ids=tokens, attention_mask=none_of(tokens, *_mask_shape(tokens)))
        seen = (data["mask"] != 0)[:, None, None, :].expand(_mask_shape(tokens))
        return module(input_ids=tokens, attention_mask=additive(seen) if self.added else seen)


def labels_of(data: Tree) -> Tensor:
    return data["label"]


def mask_of(data: Tree) -> Tensor | None:
    """Padding is seen by no token that counts."""
    return data.get("mask")


def _text_caller(module: nn.Module, example: Tree, pattern: str) -> Caller:
    own = calls_of(module, OwnMasks(), example, pattern=pattern)
    ours = PaddingMasks(adds_masks(module))
    try:
        got = calls_of(module, ours, example, pattern=pattern)
    except Exception:  # whatever it raises: this is no way to call it
        got = []
    return ours if same_calls(own, got, None) else OwnMasks()


def _weight_of_scores(module: nn.Module, call: Caller, example: Tree, params: dict[str, str]) -> str | None:
    """The name of the linear layer's weight whose output the scores are."""
    linear = (name for name, part in module.named_modules() if isinstance(part, nn.Linear))
    ours = (name for name in linear if f"{name}.weight" in params)
    return next((f"{name}.weight" for name in ours if returns(module, name, call, _scores, example)), None)


def _mask_shape(tokens: Tensor) -> tuple[int, ...]:
    batch, length = tokens.shape
    return batch, 1, length, length


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
