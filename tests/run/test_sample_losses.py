"""Losses of torch, sample by sample: equal to the loss of each sample alone, and losses over a batch are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp.run.sample_losses import sample_losses, takes_module
from fdp.types import FdpError

SCORES = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 2, 1, 1, 0])
POSITIONS = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([[0, 1, 2, -100], [1, 1, -100, -100], [2, 0, 0, 0], [1, 2, 0, -100], [0, 0, 0, 1]])

CASES: dict[str, tuple[Any, Tensor, Tensor]] = {
    "module": (nn.CrossEntropyLoss(), SCORES, CLASSES),
    "function": (F.cross_entropy, SCORES, CLASSES),
    "partial": (partial(F.cross_entropy, label_smoothing=0.2), SCORES, CLASSES),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), SCORES, CLASSES),
    "positions, some ignored": (nn.CrossEntropyLoss(), POSITIONS, LABELS),
    "squared": (nn.MSELoss(), SCORES, SCORES + 1.5),
    "binary": (F.binary_cross_entropy_with_logits, SCORES, (SCORES > 0).float()),
    "own mean": (lambda outputs, targets: F.cross_entropy(outputs, targets), SCORES, CLASSES),
    "own sum": (lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum"), SCORES, CLASSES),
    "own, by sample": (
        lambda outputs, targets: F.nll_loss(outputs.log_softmax(1), targets, reduction="none"),
        SCORES,
        CLASSES,
    ),
    "no batching rule": (
        lambda outputs, targets: outputs[targets != 1].sum() / len(outputs) + outputs.sum() * 0,
        SCORES,
        CLASSES,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_sample_is_that_of_the_sample_alone(name: str):
    loss, outputs, targets = CASES[name]
    losses = sample_losses(loss, outputs, targets)(outputs, targets)
    assert losses.shape == (5,)
    alone = torch.stack([loss(outputs[b : b + 1], targets[b : b + 1]).sum() for b in range(5)])
    torch.testing.assert_close(losses, alone)


def test_gradients_flow_and_stay_with_their_sample():
    loss = sample_losses(lambda outputs, targets: F.cross_entropy(outputs, targets), SCORES, CLASSES)
    (gradient,) = torch.autograd.grad(loss(scores := SCORES.clone().requires_grad_(), CLASSES)[1], scores)
    assert bool((gradient[1] != 0).any())
    assert bool((gradient[[0, 2, 3, 4]] == 0).all())


def test_class_weights_weigh_samples():
    weight = torch.tensor([1.0, 5.0, 2.0])
    losses = sample_losses(nn.CrossEntropyLoss(weight=weight), SCORES, CLASSES)(SCORES, CLASSES)
    torch.testing.assert_close(losses, weight[CLASSES] * F.cross_entropy(SCORES, CLASSES, reduction="none"))


def test_the_loss_that_was_given_is_not_changed():
    loss = nn.CrossEntropyLoss()
    sample_losses(loss, SCORES, CLASSES)
    assert loss.reduction == "mean"


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda outputs, targets: F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs))), "compares samples"),
        (lambda outputs, targets: F.cross_entropy(outputs - outputs.mean(0), targets), "compares samples"),
        (lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")[:, None], r"flatten\(1\)"),
        (lambda outputs, targets: 1.0, "expected a tensor"),
    ],
)
def test_a_loss_over_the_batch_is_refused(loss: Any, words: str):
    with pytest.raises(FdpError, match=words):
        sample_losses(loss, SCORES, CLASSES)


def test_a_mean_over_the_labels_of_all_samples_is_refused():
    """It weighs a sample by the number of labels that the other samples have."""
    with pytest.raises(FdpError, match="weighs them by the batch"):
        sample_losses(lambda outputs, targets: F.cross_entropy(outputs, targets), POSITIONS, LABELS)


def test_a_loss_that_calls_the_module_is_known_by_its_first_argument():
    assert takes_module(lambda module, batch: None)
    assert takes_module(lambda model, inputs: None)
    assert not takes_module(lambda outputs, targets: None)
    assert not takes_module(nn.CrossEntropyLoss())
    assert not takes_module(F.cross_entropy)
