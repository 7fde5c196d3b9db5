"""The lock on a run's folder: one process at a time, on one machine and on several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fdp.cli import folder_lock
from fdp.cli.folder_lock import LOCK_FILE, lock_folder
from fdp.types import FdpError


def test_one_process_locks_a_folder_at_a_time(tmp_path: Path) -> None:
    first = lock_folder(tmp_path)
    first.check()
    with pytest.raises(FdpError, match=rf"belongs to a run that has not ended, process {os.getpid()} on .*kill"):
        lock_folder(tmp_path)
    assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o600
    first.release()
    assert not (tmp_path / LOCK_FILE).exists()
    lock_folder(tmp_path).release()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
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


def test_an_owner_on_another_machine_is_watched_and_respected_while_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "WATCH_SECONDS", 2.0)
    there = {"host": "elsewhere", "pid": 7, "token": "t", "count": 0}
    (tmp_path / LOCK_FILE).write_text(json.dumps(there))
    began = time.monotonic()
    lock_folder(tmp_path).release()  # its counter stands still: it is dead
    assert time.monotonic() - began >= 2.0

    (tmp_path / LOCK_FILE).write_text(json.dumps(there))
    threading.Timer(0.7, lambda: (tmp_path / LOCK_FILE).write_text(json.dumps(there | {"count": 1}))).start()
    with pytest.raises(FdpError, match="process 7 on elsewhere; wait for it"):
        lock_folder(tmp_path)


def test_a_run_that_lost_its_folder_stops(tmp_path: Path) -> None:
    owner = lock_folder(tmp_path)
    (tmp_path / LOCK_FILE).write_text(json.dumps({"host": "elsewhere", "pid": 7, "token": "t", "count": 0}))
    with pytest.raises(FdpError, match="it belongs to process 7 on elsewhere now; this run stops here"):
        owner.check()
    owner.release()
    assert (tmp_path / LOCK_FILE).exists()  # it is the other owner's
