"""A loss that remembers samples is refused, wherever it keeps them."""

from __future__ import annotations

import functools
import logging
import types
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
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
HISTOGRAM = np.zeros(2)
calls = 0


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


def with_global_number(outputs: Tensor, targets: Tensor) -> Tensor:
    global calls
    calls += 1
    return plain(outputs, targets)


class Meter:
    seen: ClassVar[list[int]] = []
    total = 0

    def __init__(self) -> None:
        self.sum, self.recent = 0.0, deque[float](maxlen=2)

    def update(self, value: float) -> None:
        self.sum += value


METER = Meter()
PROJECT = types.ModuleType("a_module_of_the_user")
PROJECT.meter = METER  # type: ignore[attr-defined]


class InForward(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return with_list(outputs, targets)


class WithPart(nn.Module):
    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.part(outputs, targets)


class InClass(Meter):
    def __init__(self, *, number: bool) -> None:
        super().__init__()
        self.number = number

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.number:
            type(self).total += 1
        else:
            self.seen.append(1)
        return plain(outputs, targets)


class Slotted:
    """Has no dictionary of attributes. What is not an attribute yet is one after the first call."""

    __slots__ = ("counts", "last", "seen")

    def __init__(self, kind: str) -> None:
        self.seen, self.counts = 0, {kind: 0}

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        (kind,) = self.counts
        if kind == "number":
            self.seen += 1
        elif kind == "dictionary":
            self.counts[kind] += 1
        elif kind == "new":
            self.last = outputs.detach()
        return plain(outputs, targets)


class SlottedPart(Slotted):
    """Slots of a base class, beside a dictionary."""


def with_attribute(outputs: Tensor, targets: Tensor) -> Tensor:
    with_attribute.calls = getattr(with_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
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
    "inside a function of its own": lambda outputs, targets: (lambda: with_list(outputs, targets))(),
    "inside forward": InForward(),
    "inside a part": WithPart(WithPart(InForward())),
    "a global number": with_global_number,
    "a global object": lambda outputs, targets: METER.update(1.0) or plain(outputs, targets),
    "an object of a module": lambda outputs, targets: PROJECT.meter.update(1.0) or plain(outputs, targets),
    "a deque": lambda outputs, targets: METER.recent.append(1.0) or plain(outputs, targets),
    "a list of a class": InClass(number=False),
    "a number of a class": InClass(number=True),
    "an attribute of a function": with_attribute,
    "a slot": Slotted("number"),
    "a dictionary in a slot": Slotted("dictionary"),
    "a slot that had no value": Slotted("new"),
    "a slot of a base class": SlottedPart("number"),
    "a slot of a part": functools.partial(lambda part, *given: part(*given), Slotted("number")),
    "a compiled function": torch.compile(with_list, backend="eager"),
    "a decorated function": torch.no_grad()(with_list),
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
    slotted = Slotted("new")
    with pytest.raises(FdpError, match="last"):
        without_memory(slotted)(X[:4, :2], Y[:4])
    assert not hasattr(slotted, "last")


def test_memory_outside_of_the_loss_is_restored_too():
    for name in ("a global number", "a global object", "a deque", "a number of a class", "a list of a class"):
        with pytest.raises(FdpError):
            without_memory(REMEMBERING[name])(X[:4, :2], Y[:4])
    assert (calls, METER.sum, list(METER.recent), InClass.total, InClass.seen) == (0, 0.0, [], 0, [])


class Quiet:
    """Assigns the same constants at every call, and asks a logger that remembers its levels."""

    def __init__(self) -> None:
        self.logger = logging.getLogger("of a loss")
        self.shape, self.smallest = (4, 2), 2.0**-23

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.logger.debug("called")
        self.shape, self.smallest = tuple(outputs.shape), torch.finfo(outputs.dtype).eps
        return plain(outputs, targets)


@functools.lru_cache
def constant_mask(classes: int) -> Tensor:
    return torch.ones(classes)


SETTINGS = types.SimpleNamespace(weight=2.0, classes={"a": [1, 2]})


@pytest.mark.parametrize(
    "loss",
    [
        Quiet(),
        lambda outputs, targets: plain(outputs, targets) * constant_mask(2)[targets],
        lambda outputs, targets: plain(outputs, targets) * SETTINGS.weight,
        Slotted("nothing"),
        functools.partial(F.cross_entropy, reduction="none", label_smoothing=0.1),
        torch.compile(plain, backend="eager"),
        torch.compile(nn.CrossEntropyLoss(reduction="none"), backend="eager"),
        torch.autocast("cpu", torch.bfloat16, enabled=False)(plain),
    ],
    ids=[
        "the same constants",
        "a cached constant",
        "settings",
        "slots",
        "a partial function",
        "compiled",
        "module",
        "autocast",
    ],
)
def test_a_loss_that_keeps_only_constants_is_no_mistake(loss: Any):
    checked = without_memory(loss)
    assert torch.equal(checked(X[:4, :2], Y[:4]), checked(X[:4, :2], Y[:4]))


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


def write_into_array(outputs: Tensor, targets: Tensor) -> Tensor:
    HISTOGRAM[0] += 1
    return plain(outputs, targets)


def write_into_data(outputs: Tensor, targets: Tensor) -> Tensor:
    COUNTS.data.add_(1)
    return plain(outputs, targets)


@pytest.mark.parametrize(("loss", "name"), [(write_into_array, "HISTOGRAM"), (write_into_data, "COUNTS")])
def test_writes_that_torch_does_not_count_are_refused(loss: Any, name: str):
    with pytest.raises(FdpError, match=f"loss: expected one that depends .* changes .'{name}'"):
        fdp.private(nn.Linear(3, 2), (X, Y), loss=loss, noise_multiplier=1.0, delta=1e-6, steps=2, batch_size=8)


def test_a_loss_that_calls_the_module_and_remembers_is_refused():
    losses: list[Tensor] = []

    def loss(module: Any, batch: Any) -> Tensor:
        found = plain(module(batch[0]), batch[1])
        losses.append(found.detach())
        return found

    with pytest.raises(FdpError, match="losses"):
        fdp.private(nn.Linear(3, 2), (X, Y), loss=loss, noise_multiplier=1.0, delta=1e-6, steps=2, batch_size=8)
