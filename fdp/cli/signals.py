"""SIGINT and SIGTERM as requests to stop: the current step is finished and saved first. A second signal kills.

Schedulers send SIGTERM before they take a machine away. Ctrl-C in a terminal reaches every process, and torchrun then
forwards it to ranks that already have it: signals within ``ECHO_SECONDS`` of the first count as one. Of two nested
blocks, as around the runs of a search, both learn of a signal.

    >>> with stop_on_signals() as stop:
    ...     for state, record in steps(run, state, stop=stop.requested): ...
    >>> stop.exit_code                                  # 130 or 143 as in a shell, 0 without a signal
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
ECHO_SECONDS = 2.0


class StopRequest:
    """The first signal that asked the run to stop, if any."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._received_at = 0.0

    def requested(self) -> bool:
        """Return True if a signal has come."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a process ended by the signal; 0 if none came."""
        return 0 if self.signal is None else 128 + self.signal

    def copy_request(self, other: StopRequest) -> None:
        """Take over the request of another block, with its time."""
        if self.signal is None:
            self.signal, self._received_at = other.signal, other._received_at

    def receive(self, number: int, frame: Any) -> None:
        """Store the first signal; let the second one kill the process."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received_at = number, now
        elif now - self._received_at > ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a stop request inside the block; outside the main thread do nothing.

    A request of a block around this one holds in this one, and a request in this one holds around it.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.receive) for number in SIGNALS}
    outer = getattr(before[signal.SIGINT], "__self__", None)
    if isinstance(outer, StopRequest):
        stop.copy_request(outer)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if isinstance(outer, StopRequest):
            outer.copy_request(stop)
