"""Work of the host beside the work of the device: batches drawn ahead, and numbers read while the next step computes.

    host      draw t+1 | launch t+1 | record of step t | draw t+2 | launch t+2 | record of step t+1
    device             step t       | step t+1                    | step t+2

A step on a GPU is launched and computes while the host goes on. The batch of a step is a function of (key, t), so it
may be drawn at any time; the thread that draws touches no GPU, since a recording in another thread would fail.

    >>> with Draws(draw, first=0, end=100) as draws: batch = draws.take(0)
    >>> numbers = send_to_host(metrics)                     # returns at once
    >>> numbers.wait()                                      # the same tree, on the CPU
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

import torch

from fdp import tree
from fdp.types import Batch, FdpError, Tree

DEPTH = 2
"""Batches that are drawn before they are needed."""


class Arrival(NamedTuple):
    """Tensors on their way to the host; ``done`` is None if they are there."""

    values: Tree
    done: torch.cuda.Event | None

    def wait(self) -> Any:
        """Return the tensors once all are there."""
        if self.done is not None:
            self.done.synchronize()
        return self.values


def send_to_host(values: Tree) -> Arrival:
    """Start to copy a tree of tensors to the host, without waiting for the work that computes them.

    The copies keep the values of this moment, even if a later step overwrites the tensors.
    """
    on_gpu = any(leaf.is_cuda for leaf in tree.leaves(values))
    copies = tree.map(lambda leaf: leaf.detach().to("cpu", non_blocking=True, copy=True), values)
    if not on_gpu:
        return Arrival(copies, None)
    done = torch.cuda.Event()
    done.record()
    return Arrival(copies, done)


def send_to_device(values: Tree, device: torch.device) -> Tree:
    """Copy a tree to the device; to a GPU through pinned memory, without waiting for the work before it."""

    def send(leaf: torch.Tensor) -> torch.Tensor:
        if device.type != "cuda" or leaf.device.type != "cpu":
            return leaf.to(device)
        return leaf.contiguous().pin_memory().to(device, non_blocking=True)

    return tree.map(send, values)


class Draws:
    """Batches of the steps ``first`` to ``end - 1``, drawn in order by a thread of their own.

    Guarantees:
      - ``take(t)`` is ``draw(t)``, whenever it was drawn; an error of ``draw(t)`` is raised by ``take(t)``.
    """

    def __init__(self, draw: Callable[[int], Batch], *, first: int, end: int) -> None:
        self._draw, self._next, self._end = draw, first, end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fdp-draws")
        self._drawn: deque[tuple[int, Future[Batch]]] = deque()
        self._fill()

    def take(self, t: int) -> Batch:
        """Return the batch of step ``t``; steps are asked for in order."""
        number, batch = self._drawn.popleft() if self._drawn else (None, None)
        if number != t or batch is None:
            raise FdpError(f"draws: expected steps to be asked for in order, got step {t} after step {number}")
        self._fill()
        return batch.result()

    def _fill(self) -> None:
        while self._next < self._end and len(self._drawn) < DEPTH:
            self._drawn.append((self._next, self._thread.submit(self._draw, self._next)))
            self._next += 1

    def __enter__(self) -> Draws:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
