"""Work on a second stream: it starts after what the main stream was given, and the main stream waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fdp.gradients import beside
from fdp.gradients.beside import Beside


class FakeStream:
    """A stream that notes who waits for whom."""

    def __init__(self, name: str, events: list[str]):
        self.name, self.events, self.device = name, events, torch.device("cuda")

    def wait_stream(self, other: FakeStream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    side = FakeStream("side", found)

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        found.append(f"on {stream.name}")
        yield
        found.append(f"off {stream.name}")

    monkeypatch.setattr(beside, "_side_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("main", found))
    monkeypatch.setattr(torch.cuda, "stream", on)
    return found


def test_a_branch_starts_after_the_main_stream_which_waits_for_it_once(events: list[str]) -> None:
    work = Beside(torch.device("cuda"))
    for _ in range(2):
        with work.branch():
            events.append("work")
    work.join()
    work.join()
    once = ["side waits for main", "on side", "work", "off side"]
    assert events == [*once, *once, "main waits for side"]


def test_without_a_gpu_a_branch_is_run_in_place() -> None:
    work = Beside(torch.device("cpu"))
    with work.branch():
        total = torch.ones(2).sum()
    work.join()
    assert total == 2
