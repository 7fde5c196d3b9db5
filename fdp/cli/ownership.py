"""One owner at a time for the folder of a run.

The owner holds a lock on ``.lock`` for as long as its process lives: the kernel lets go of it when the process ends,
however it ends, so that nothing has to be cleaned up. A process that is merely paused keeps it. Some shared file
systems lock on each machine apart; there the file says who the owner is, and a counter in it shows whether that owner
is alive: it is watched for a while, not compared with a clock.

    >>> owner = own(folder)                            # or an error that says who has it
    >>> owner.check()                                  # before every write: an error if somebody else took over
    >>> owner.release()
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fdp.types import FdpError

LOCK = ".lock"
EVERY = 2.0
"""Seconds between two signs of life of the owner."""
WATCH = 15.0
"""Seconds for which the owner on another machine is watched before it is taken for dead."""
CANNOT_LOCK = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class Owner:
    """The owner of a folder: this process."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle = path, handle
        self._said = {"host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}
        self._ended = threading.Event()
        self._write(0)
        self._thread = threading.Thread(target=self._live, name="fdp-owner", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if the folder has come to belong to somebody else, as after a long pause."""
        found = _read(self._path)
        if found is None or found.get("token") != self._said["token"]:
            who = "nobody" if found is None else _named(found)
            raise FdpError(
                f"{self._path.parent}: expected this run to be its only owner, but it belongs to {who} now; this run "
                f"stops here and writes nothing more"
            )

    def release(self) -> None:
        """Give the folder up."""
        self._ended.set()
        self._thread.join()
        found = _read(self._path)
        if found is not None and found.get("token") == self._said["token"]:
            self._path.unlink(missing_ok=True)
        os.close(self._handle)

    def _live(self) -> None:
        count = 0
        while not self._ended.wait(EVERY):
            count += 1
            with suppress(OSError):  # a full or read-only disk: the run itself will say so
                self._write(count)

    def _write(self, count: int) -> None:
        line = json.dumps(self._said | {"count": count}).ljust(256) + "\n"
        os.pwrite(self._handle, line.encode(), 0)


def own(folder: Path) -> Owner:
    """Become the owner of ``folder``, which exists; raise an error that names the owner if there is one."""
    path = folder / LOCK
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise FdpError(f"{path}: could not be written: {error}") from error
        try:
            locked = _lock(handle, path)
            # The last owner may have deleted the file between the two calls: then this lock is on nothing.
            if path.exists() and os.stat(path).st_ino == os.fstat(handle).st_ino:
                _check_stale(path, locked)
                return Owner(path, handle)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path) -> bool:
    """Lock the file; False where the file system cannot."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken(path, _read(path) or {}) from None
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise FdpError(f"{path}: could not be locked: {error}") from error
        return False
    return True


def _check_stale(path: Path, locked: bool) -> None:
    """Raise if the owner that the file names is alive, as far as the lock has not already told."""
    found = _read(path)
    if found is None:
        return
    here = found.get("host") == socket.gethostname()
    if here and locked:
        return  # its process has ended, or the lock were not ours
    if here:
        if Path(f"/proc/{found.get('pid')}").exists() and found.get("pid") != os.getpid():
            raise _taken(path, found)
        return
    deadline = time.monotonic() + WATCH
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if _read(path) not in (found, None):
            raise _taken(path, found)


def _taken(path: Path, found: dict[str, Any]) -> FdpError:
    stop = f", or stop it: kill {found['pid']}" if found.get("host") == socket.gethostname() else ""
    return FdpError(
        f"--out: {path.parent} belongs to a run that has not ended, {_named(found)}; wait for it{stop}. Two runs in "
        f"one folder would lose each other's steps"
    )


def _named(found: dict[str, Any]) -> str:
    return f"process {found.get('pid', '?')} on {found.get('host', '?')}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):  # none, or one that is just being made
        return None
    return found if isinstance(found, dict) else None
