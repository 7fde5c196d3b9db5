"""Signs of life of every rank, in the run's store: who is silent when a collective fails.

    beat/r = how often rank r's thread has beaten, and the step that its main thread has reached

A process that was killed or stopped beats no more; one that is merely behind shows by its step. Counters are compared
with themselves a little later, never with a clock: clocks of machines differ, and jump.

    >>> heart = Heart(again(), rank=rank)
    >>> heart.step = 12
    >>> silent(again(), world=world)                      # [1]: rank 1 is dead, stopped or cut off
"""

from __future__ import annotations

import json
import threading
import time
from typing import NamedTuple

from torch.distributed import Store

EVERY = 0.5
"""Seconds between two beats."""
WATCH = 2.5
"""Seconds without a beat after which a rank is silent."""


class Beat(NamedTuple):
    """A rank's last sign of life."""

    count: int
    step: int


class Heart:
    """Beats for this rank from a thread, until :meth:`stop` or the end of the process."""

    def __init__(self, store: Store, *, rank: int) -> None:
        self.step = 0
        self._store, self._rank = store, rank
        self._ended = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="fdp-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._ended.set()

    def _run(self) -> None:
        count = 0
        while not self._ended.wait(EVERY):
            count += 1
            try:
                self._beat(count)
            except RuntimeError:  # the store is gone, and whoever kept it: the next collective says so
                return

    def _beat(self, count: int) -> None:
        self._store.set(f"beat/{self._rank}", json.dumps([count, self.step]))


def beats(store: Store, *, world: int) -> list[Beat | None]:
    """Read the last beat of every rank; None of one that never beat."""
    keys = [f"beat/{rank}" for rank in range(world)]
    return [Beat(*json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def silent(store: Store, *, world: int, watch: float = WATCH) -> list[int]:
    """Watch all ranks for ``watch`` seconds; return those that did not beat, fewer as soon as all have."""
    before, deadline = beats(store, world=world), time.monotonic() + watch
    while True:
        quiet = [rank for rank, beat in enumerate(beats(store, world=world)) if beat is None or beat == before[rank]]
        if not quiet or time.monotonic() > deadline:
            return quiet
        time.sleep(EVERY / 5)
