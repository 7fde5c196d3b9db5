"""Heartbeats of every rank in the run's store, so that a failed collective can name the silent rank.

    beat/r = (number of beats of rank r's thread, step that its main thread has reached)

A process that was killed or stopped beats no more; one that is only behind shows it by its step. Counters are compared
with their own later values, never with a clock: the clocks of machines differ, and jump.

    >>> heart = Heartbeat(reconnect(), rank=rank)
    >>> heart.step = 12
    >>> silent_ranks(reconnect(), world=world)            # [1]: rank 1 is dead, stopped or unreachable
"""

from __future__ import annotations

import json
import threading
import time
from typing import NamedTuple

from torch.distributed import Store

INTERVAL_S = 0.5
"""Seconds between two beats."""
SILENCE_S = 2.5
"""Seconds without a beat after which a rank counts as silent."""


class Beat(NamedTuple):
    """The last beat of a rank."""

    count: int
    step: int


class Heartbeat:
    """A thread that beats for this rank until :meth:`stop` or the end of the process."""

    def __init__(self, store: Store, *, rank: int) -> None:
        self.step = 0
        self._store, self._rank = store, rank
        self._ended = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="fdp-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop beating."""
        self._ended.set()

    def _run(self) -> None:
        count = 0
        while not self._ended.wait(INTERVAL_S):
            count += 1
            try:
                self._beat(count)
            except RuntimeError:  # the store's process is gone: the next collective raises the error
                return

    def _beat(self, count: int) -> None:
        self._store.set(f"beat/{self._rank}", json.dumps([count, self.step]))


def read_beats(store: Store, *, world: int) -> list[Beat | None]:
    """Read the last beat of every rank; None for a rank that never beat."""
    keys = [f"beat/{rank}" for rank in range(world)]
    return [Beat(*json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def silent_ranks(store: Store, *, world: int, watch: float = SILENCE_S) -> list[int]:
    """Watch all ranks for up to ``watch`` seconds and return those that did not beat; stop early once all have."""
    before, deadline = read_beats(store, world=world), time.monotonic() + watch
    while True:
        beats = read_beats(store, world=world)
        quiet = [rank for rank, beat in enumerate(beats) if beat is None or beat == before[rank]]
        if not quiet or time.monotonic() > deadline:
            return quiet
        time.sleep(INTERVAL_S / 5)
