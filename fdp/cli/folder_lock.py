"""A lock on the folder of a run: one process writes to it at a time.

The process holds an ``flock`` on ``.lock`` for as long as it lives. The kernel releases it when the process ends, so
nothing needs cleaning up; a paused process keeps it. Some shared file systems lock per machine only: for them the file
names the owner and holds a counter that the owner increments. Another machine watches the counter for a while to see
whether the owner is alive; it never compares clocks.

    >>> lock = lock_folder(folder)                      # or an error that names the owner
    >>> lock.check()                                    # before every write: an error if another process took over
    >>> lock.release()
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

LOCK_FILE = ".lock"
HEARTBEAT_SECONDS = 2.0
"""Time between two increments of the owner's counter."""
WATCH_SECONDS = 15.0
"""Time without an increment after which an owner on another machine counts as dead."""
CANNOT_LOCK = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class FolderLock:
    """The lock that this process holds on a folder."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle = path, handle
        self._owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}
        self._released = threading.Event()
        self._write(0)
        self._thread = threading.Thread(target=self._beat, name="fdp-folder-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if another process has taken the folder over, as can happen after a long pause."""
        found = _read_owner(self._path)
        if found is None or found.get("token") != self._owner["token"]:
            who = "nobody" if found is None else _describe(found)
            raise FdpError(
                f"{self._path.parent}: expected this run to be its only owner, but it belongs to {who} now; this run "
                f"stops here and writes nothing more"
            )

    def release(self) -> None:
        """Release the lock, and remove the file if it is still this process's."""
        self._released.set()
        self._thread.join()
        found = _read_owner(self._path)
        if found is not None and found.get("token") == self._owner["token"]:
            self._path.unlink(missing_ok=True)
        os.close(self._handle)

    def _beat(self) -> None:
        count = 0
        while not self._released.wait(HEARTBEAT_SECONDS):
            count += 1
            with suppress(OSError):  # a full or read-only disk: the run itself reports it
                self._write(count)

    def _write(self, count: int) -> None:
        line = json.dumps(self._owner | {"count": count}).ljust(256) + "\n"
        os.pwrite(self._handle, line.encode(), 0)


def lock_folder(folder: Path) -> FolderLock:
    """Lock an existing folder; raise an error that names the owner if another process holds it."""
    path = folder / LOCK_FILE
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise FdpError(f"{path}: could not be written: {error}") from error
        try:
            locked = _flock(handle, path)
            # The last owner may have deleted the file between the two calls; this lock would then be on a deleted file.
            if path.exists() and os.stat(path).st_ino == os.fstat(handle).st_ino:
                _check_no_live_owner(path, locked)
                return FolderLock(path, handle)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _flock(handle: int, path: Path) -> bool:
    """Lock the file; return False if the file system cannot lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken(path, _read_owner(path) or {}) from None
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise FdpError(f"{path}: could not be locked: {error}") from error
        return False
    return True


def _check_no_live_owner(path: Path, locked: bool) -> None:
    """Raise if the owner named in the file is alive, where the lock alone does not tell."""
    found = _read_owner(path)
    if found is None:
        return
    here = found.get("host") == socket.gethostname()
    if here and locked:
        return  # that process has ended, or we could not have locked
    if here:
        if Path(f"/proc/{found.get('pid')}").exists() and found.get("pid") != os.getpid():
            raise _taken(path, found)
        return
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if _read_owner(path) not in (found, None):
            raise _taken(path, found)


def _taken(path: Path, owner: dict[str, Any]) -> FdpError:
    stop = f", or stop it: kill {owner['pid']}" if owner.get("host") == socket.gethostname() else ""
    return FdpError(
        f"--out: {path.parent} belongs to a run that has not ended, {_describe(owner)}; wait for it{stop}. Two runs in "
        f"one folder would lose each other's steps"
    )


def _describe(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def _read_owner(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):  # no file, or one that is being created
        return None
    return found if isinstance(found, dict) else None
