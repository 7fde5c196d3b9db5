"""A wish to stop, and the order that a second one is; one owner of a folder at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fdp.cli import folder_lock, signals
from fdp.cli.folder_lock import LOCK_FILE, lock_folder
from fdp.cli.signals import stop_on_signals
from fdp.types import FdpError


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_a_wish_and_its_echo_is_none(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop.requested()
        assert stop.exit_code == 0
        for _ in range(3):  # torchrun passes on what the terminal has already sent
            os.kill(os.getpid(), number)
        assert stop.requested()
        assert stop.exit_code == code
    assert signal.getsignal(number) is before


def test_asked_twice_it_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_outside_of_the_main_thread_nothing_is_heeded() -> None:
    found = []

    def inside() -> None:
        with stop_on_signals() as stop:
            found.append(stop.requested())

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    first = lock_folder(tmp_path)
    first.check()
    with pytest.raises(FdpError, match=rf"belongs to a run that has not ended, process {os.getpid()} on .*kill"):
        lock_folder(tmp_path)
    assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o600
    first.release()
    assert not (tmp_path / LOCK_FILE).exists()
    lock_folder(tmp_path).release()


def test_an_owner_that_was_killed_is_none(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time; from fdp.cli.folder_lock import lock_folder\n"
        "lock_folder(pathlib.Path(sys.argv[1])); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as process:
        while not (tmp_path / LOCK_FILE).exists() or not (tmp_path / LOCK_FILE).read_text():
            assert process.poll() is None
            time.sleep(0.05)
        with pytest.raises(FdpError, match=f"process {process.pid} on"):
            lock_folder(tmp_path)
        process.kill()
    assert (tmp_path / LOCK_FILE).exists()
    lock_folder(tmp_path).release()


def test_an_owner_on_another_machine_is_watched_and_believed_while_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "WATCH_SECONDS", 2.0)
    there = {"host": "elsewhere", "pid": 7, "token": "t", "count": 0}
    (tmp_path / LOCK_FILE).write_text(json.dumps(there))
    began = time.monotonic()
    lock_folder(tmp_path).release()  # it never beat: it is dead
    assert time.monotonic() - began >= 2.0

    (tmp_path / LOCK_FILE).write_text(json.dumps(there))
    threading.Timer(0.7, lambda: (tmp_path / LOCK_FILE).write_text(json.dumps(there | {"count": 1}))).start()
    with pytest.raises(FdpError, match="process 7 on elsewhere; wait for it"):
        lock_folder(tmp_path)


def test_who_lost_the_folder_writes_nothing_more(tmp_path: Path) -> None:
    owner = lock_folder(tmp_path)
    (tmp_path / LOCK_FILE).write_text(json.dumps({"host": "elsewhere", "pid": 7, "token": "t", "count": 0}))
    with pytest.raises(FdpError, match="it belongs to process 7 on elsewhere now; this run stops here"):
        owner.check()
    owner.release()
    assert (tmp_path / LOCK_FILE).exists()  # the other one's
