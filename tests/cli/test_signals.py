"""SIGINT and SIGTERM stop a run after its step; a second signal kills it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fdp.cli import signals
from fdp.cli.signals import stop_on_signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_a_request_and_its_echo_is_ignored(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop.requested()
        assert stop.exit_code == 0
        for _ in range(3):  # torchrun passes on what the terminal has already sent
            os.kill(os.getpid(), number)
        assert stop.requested()
        assert stop.exit_code == code
    assert signal.getsignal(number) is before


def test_a_second_signal_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import os, signal, time; from fdp.cli import signals; signals.ECHO_SECONDS = 0.1\n"
        "with signals.stop_on_signals():\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.3)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], timeout=50, check=False)
    assert done.returncode == -signal.SIGTERM
    assert time.monotonic() - began < 40
    assert signals.ECHO_SECONDS == 2.0


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    found = []

    def inside() -> None:
        with stop_on_signals() as stop:
            found.append(stop.requested())

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [False]


def test_nested_blocks_share_a_request() -> None:
    with stop_on_signals() as outer:
        with stop_on_signals() as first:
            os.kill(os.getpid(), signal.SIGINT)
            assert first.requested()
            assert not outer.requested()
        assert outer.exit_code == 130
        with stop_on_signals() as second:
            assert second.exit_code == 130
    with stop_on_signals() as alone:
        assert not alone.requested()
