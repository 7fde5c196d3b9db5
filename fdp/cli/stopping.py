"""SIGINT and SIGTERM as a wish: the step at hand is finished and saved first. Asked twice, it is an order.

Schedulers send SIGTERM before they take a machine away, and a terminal's Ctrl-C reaches every process of it. torchrun
passes either on to ranks that have had it already: what comes within ``SAME`` seconds counts as one.

    >>> with heeding() as stop:
    ...     for state, record in steps(run, state, stop=stop.asked): ...
    >>> stop.code                                       # 130 or 143 as a shell counts it, 0 if nobody asked
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME = 2.0
"""Seconds within which a second signal is taken for an echo of the first."""


class Stop:
    """Whether somebody asked the run to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0

    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @property
    def code(self) -> int:
        """The exit code of a process that a signal ended; 0 if none came."""
        return 0 if self.signal is None else 128 + self.signal

    def receive(self, number: int, frame: Any) -> None:
        """Note the first signal; end the process at once by the second."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
        elif now - self._since > SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def heeding() -> Iterator[Stop]:
    """Take SIGINT and SIGTERM as a wish while the block lasts; outside of the main thread do nothing."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.receive) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
