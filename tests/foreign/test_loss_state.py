"""A loss that remembers samples is refused, wherever it keeps them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fdp
from fdp.foreign.loss_state import reach_of, without_memory
from fdp.types import FdpError

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
SEEN: list[float] = []
COUNTS = torch.zeros(2)


def plain(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class Balanced(nn.Module):
    """Counts labels, and weighs classes by them only after many calls: no comparison of losses would see it."""

    def __init__(self, *, in_place: bool):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        new = F.one_hot(targets, 2).to(outputs.dtype).sum(0).detach()
        if self.in_place:
            self.seen += new
        else:
            self.seen = self.seen + new
        many = self.seen.sum() > 10_000
        return plain(outputs, targets) * torch.where(many, self.seen[targets] / self.seen.sum(), 1.0)


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return plain(outputs, targets)

    def method(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self(outputs, targets)


def with_list(outputs: Tensor, targets: Tensor) -> Tensor:
    SEEN.append(float(outputs.detach().sum()))
    return plain(outputs, targets)


def with_global_tensor(outputs: Tensor, targets: Tensor) -> Tensor:
    COUNTS.add_(1)
    return plain(outputs, targets)


def with_variable() -> Callable[..., Tensor]:
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return plain(outputs, targets)

    return loss


def with_dictionary(outputs: Tensor, targets: Tensor, kept: dict[str, Any]) -> Tensor:
    kept["last"] = outputs.detach()
    return plain(outputs, targets)


KEPT: dict[str, Any] = {}
REMEMBERING: dict[str, Callable[..., Tensor]] = {
    "a buffer, in place": Balanced(in_place=True),
    "a buffer, replaced": Balanced(in_place=False),
    "an attribute": Counting(),
    "a method": Counting().method,
    "a global list": with_list,
    "a global tensor": with_global_tensor,
    "a variable": with_variable(),
    "a bound argument": functools.partial(with_dictionary, kept=KEPT),
    "inside another function": lambda outputs, targets: with_list(outputs, targets) + 0,
}


@pytest.mark.parametrize("loss", REMEMBERING.values(), ids=REMEMBERING)
def test_a_loss_that_remembers_samples_is_refused(loss: Any):
    with pytest.raises(FdpError, match="loss: expected one that depends on the outputs and the targets alone"):
        without_memory(loss)(X[:4, :2], Y[:4])


def test_what_can_be_restored_is_restored():
    counting = Counting()
    KEPT.clear()
    for loss in (counting, functools.partial(with_dictionary, kept=KEPT)):
        with pytest.raises(FdpError, match=r"calls|last"):
            without_memory(loss)(X[:4, :2], Y[:4])
    assert (counting.calls, KEPT) == (0, {})


@pytest.mark.parametrize("loss", [plain, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])), F.cross_entropy])
def test_a_loss_without_memory_is_called_as_it_is(loss: Any):
    assert torch.equal(without_memory(loss)(X[:4, :2], Y[:4]), loss(X[:4, :2], Y[:4]))


def test_reach_stops_at_torch_and_finds_variables():
    assert reach_of(F.cross_entropy) == ({}, [])
    assert [variable.name for variable in reach_of(with_variable()).variables] == ["calls"]


@pytest.mark.parametrize("in_place", [True, False])
def test_private_training_refuses_a_loss_that_counts_labels(in_place: bool):
    settings = {"noise_multiplier": 1.0, "delta": 1e-6, "steps": 2, "batch_size": 8, "microbatch": 8}
    with pytest.raises(FdpError, match="seen"):
        fdp.private(nn.Linear(3, 2), (X, Y), loss=Balanced(in_place=in_place), **settings)


def test_a_loss_that_calls_the_module_and_remembers_is_refused():
    losses: list[Tensor] = []

    def loss(module: Any, batch: Any) -> Tensor:
        found = plain(module(batch[0]), batch[1])
        losses.append(found.detach())
        return found

    with pytest.raises(FdpError, match="losses"):
        fdp.private(nn.Linear(3, 2), (X, Y), loss=loss, noise_multiplier=1.0, delta=1e-6, steps=2, batch_size=8)
