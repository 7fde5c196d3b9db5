"""Batches of ``transformers`` with labels (``input_ids``, ``attention_mask``, ``labels``) in the form of fdp's models.

    causal      {"tokens": input_ids, "loss_mask": labels[:, 1:] != -100}        computed block by block
    classifier  {"tokens" | "image", "mask", "label"}                            computed block by block
    others      logits and labels of the same positions, or of the same rows     computed as one block

The loss of a sample is the mean over its own labels, whatever the other samples are.

    >>> labelled = labelled_batches(module, batch)                 # None if the module is not one of transformers
    >>> data = labelled.convert(batch)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp.foreign.hub.hugging_face import CAUSAL, CLASSIFYING
from fdp.types import FdpError, Tree

IGNORED = -100
"""The label of a position that is not in the loss."""
LABELS = ("labels", "label", "label_ids")
SEQUENCE_TO_SEQUENCE = ("ForConditionalGeneration", "Seq2SeqLM")


class LabelledBatches(NamedTuple):
    """The form of the data and of the loss.

    If ``blocks``, the model of ``fdp.foreign.hub`` takes what ``convert`` returns. Otherwise ``call`` calls the module
    with what ``with_labels`` returns, ``losses`` are those of its outputs, and ``convert`` is ``with_labels``.
    """

    convert: Callable[[Tree], Tree]
    with_labels: Callable[[Tree], Tree]
    losses: Callable[[Any, Tree], Tensor]
    blocks: bool

    @property
    def call(self) -> Callable[[Callable[..., Any], Tree], Any]:
        """The function that calls the module without its labels."""
        return _call


def is_transformers(module: nn.Module) -> bool:
    """Return True for a module of transformers, also inside one of peft."""
    return hasattr(module, "config") and hasattr(module, "save_pretrained") and hasattr(module, "forward")


def labelled_batches(module: nn.Module, batch: Tree) -> LabelledBatches | None:
    """Return how batches like ``batch`` are given to a module of transformers; None if it is another module."""
    if not is_transformers(module) or not isinstance(batch, Mapping):
        return None
    kind = type(module).__name__
    named = next((name for name in LABELS if name in batch), None)
    if named is None:
        raise FdpError(
            f"dataset: expected an entry labels for {kind}, got {sorted(batch)}; add it (for a language model: labels "
            f"= input_ids, with {IGNORED} for padding, as DataCollatorForLanguageModeling(tokenizer, mlm=False) does), "
            f"or give loss=lambda module, batch: ..."
        )
    if kind.endswith(SEQUENCE_TO_SEQUENCE):
        raise FdpError(
            f"{kind}: expected a causal model, a classifier or a model with one score per label, got one with a "
            f"decoder of its own; give loss=lambda module, batch: ..., which returns one loss per sample"
        )
    inputs = set(batch) - {named}
    native = inputs <= {"input_ids", "attention_mask"}
    plain = partial(_plain_data, named=named)
    if kind.endswith(CAUSAL):
        convert = partial(_causal_data, named=named) if native else plain
        return LabelledBatches(convert, plain, _shifted_losses, native)
    native = (native or inputs == {"pixel_values"}) and kind.endswith(CLASSIFYING) and batch[named].ndim == 1
    convert = partial(_classifier_data, named=named) if native else plain
    return LabelledBatches(convert, plain, _label_losses, native)


def _causal_data(batch: Tree, named: str) -> Tree:
    """Return tokens and which of them count; refuse what the form of fdp cannot say."""
    tokens, labels = batch["input_ids"], batch[named]
    counted = labels != IGNORED
    if labels.shape != tokens.shape or bool((counted & (labels != tokens)).any()):
        raise FdpError(
            f"labels: expected the tokens of input_ids, or {IGNORED} where none is predicted, got others; the model "
            f"shifts them itself. For other labels give loss=lambda module, batch: ..."
        )
    present = batch.get("attention_mask")
    if present is not None:
        right = present.long().cummin(1).values == present.long()
        if not bool(right.all()):
            raise FdpError(
                "attention_mask: expected padding on the right, got it on the left or in between; set "
                "tokenizer.padding_side = 'right'"
            )
        counted = counted & (present != 0)
    return {"tokens": tokens, "loss_mask": counted[:, 1:].long()}


def _classifier_data(batch: Tree, named: str) -> Tree:
    names = {"input_ids": "tokens", "attention_mask": "mask", "pixel_values": "image", named: "label"}
    return {names[name]: leaf for name, leaf in batch.items()}


def _plain_data(batch: Tree, named: str) -> Tree:
    return {"batch": {"labels" if name == named else name: leaf for name, leaf in batch.items()}}


def _call(module: Callable[..., Any], data: Tree) -> Any:
    return module(**{name: leaf for name, leaf in data["batch"].items() if name != "labels"})


def _shifted_losses(outputs: Any, data: Tree) -> Tensor:
    return _token_losses(outputs.logits[:, :-1], data["batch"]["labels"][:, 1:])


def _label_losses(outputs: Any, data: Tree) -> Tensor:
    scores, labels = getattr(outputs, "logits", None), data["batch"]["labels"]
    if not isinstance(scores, Tensor):
        raise FdpError(
            f"loss: expected a module that returns logits, got {type(outputs).__name__} without any; give "
            f"loss=lambda module, batch: ..., which returns one loss per sample"
        )
    if labels.shape == scores.shape and labels.is_floating_point():
        return F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="none").flatten(1).mean(1)
    if labels.ndim == 1 and scores.shape[1:] == (1,):
        return (scores[:, 0] - labels).square()
    if labels.ndim == 1 and scores.ndim == 2:
        return F.cross_entropy(scores, labels, reduction="none")
    if scores.ndim == 3 and labels.shape == scores.shape[:2]:
        return _token_losses(scores, labels)
    raise FdpError(
        f"labels: expected one per sample or per position of the scores {tuple(scores.shape)}, got "
        f"{tuple(labels.shape)}; give loss=lambda module, batch: ..., which returns one loss per sample"
    )


def _token_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over a sample's own labels; 0 if it has none."""
    wide = scores if scores.element_size() >= 4 else scores.float()
    each = F.cross_entropy(wide.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
    counted = (labels != IGNORED).to(each.dtype)
    return torch.where(counted > 0, each, 0.0).sum(1) / counted.sum(1).clamp_min(1)
