"""Work on a second stream: it starts after what the main stream was given, and the main stream waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fdp.gradients import beside, clipped_sum
from fdp.gradients.beside import Beside
from fdp.gradients.clipped_sum import lazy_clipped_sum
from fdp.gradients.lazy_sum import evaluate
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.models import GPTConfig, gpt
from fdp.privacy.clipping import clip_to
from fdp.types import NO_SAMPLES, ClippedSum
from tests.conftest import SAMPLES, random_like


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


@pytest.mark.parametrize("onto", [None, NO_SAMPLES], ids=["lazy", "evaluated"])
def test_sums_that_run_beside_are_read_after_the_wait_and_hold_their_records(
    onto: ClippedSum | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt(GPTConfig(layers=9, width=8, heads=2, context=5, vocab_size=7))
    params, data = random_like(model), {"tokens": torch.randint(0, 7, (SAMPLES, 6))}
    plan = make_plan(model, params, data, method=Method.GHOST_BK, dtype=torch.float64)
    _, norms, stash = per_sample_norms(model, params, data, plan=plan)
    clip = clip_to(norms, max_norm=0.1)
    expected = evaluate(lazy_clipped_sum(stash.copy(), clip)).value
    opened: list[Beside] = []

    class Late(Beside):
        """A second stream whose work is seen to have been waited for."""

        @contextmanager
        def branch(self) -> Iterator[None]:
            self.is_open = True
            opened.append(self)
            yield

        def join(self) -> None:
            self.is_open = False

    def read(stream: Any, *more: Any, **options: Any) -> Any:
        def checked() -> Iterator[Any]:
            for sums in stream:
                assert not any(each.is_open for each in opened)
                yield sums

        return add_blocks(checked(), *more, **options)

    add_blocks = clipped_sum._add_blocks
    monkeypatch.setattr(clipped_sum, "Beside", Late)
    monkeypatch.setattr(clipped_sum, "_outweigh_sums", lambda records: True)
    monkeypatch.setattr(clipped_sum, "_add_blocks", read)
    found = evaluate(lazy_clipped_sum(stash, clip, onto)).value
    assert len(opened) == len(model.blocks) // 2
    torch.testing.assert_close(found, expected)
