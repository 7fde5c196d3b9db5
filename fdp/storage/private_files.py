"""Files that nobody but their owner can read: what was computed on private data, and keys of the noise.

The mode is 0600 from the moment a file exists, whatever the umask. One that was there before is made so while it is
still empty.

    >>> with open_private(folder / "metrics.jsonl", "w") as file: ...
    >>> write_private(folder / "summary.json", text)                        # whole, or not there
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fdp.types import FdpError

OWNER_ONLY = 0o600


@contextmanager
def open_private(path: str | os.PathLike[str], mode: str) -> Iterator[IO[Any]]:
    """Open a file as ``open`` does; one that is written has mode 0600, and is no link to a file elsewhere.

    Guarantees:
      - not for a moment can others read what is written;
      - where that cannot be had, it is an error, before anything is written.
    """

    def opened(name: str, flags: int) -> int:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return os.open(name, flags)
        handle = os.open(name, flags | os.O_NOFOLLOW, OWNER_ONLY)
        try:
            if os.fstat(handle).st_mode & 0o777 != OWNER_ONLY:
                os.fchmod(handle, OWNER_ONLY)
            if (found := os.fstat(handle).st_mode & 0o777) != OWNER_ONLY:
                raise FdpError(
                    f"{name}: expected a file that its owner alone can read (mode 600), got {found:o}: the file system "
                    f"does not keep modes. It would hold what private data shows: write to another place"
                )
        except BaseException:
            os.close(handle)
            raise
        return handle

    with open(path, mode, opener=opened) as stream:
        yield stream


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600 in one piece, in place of one of that name.

    Guarantees:
      - a process that is killed at any moment leaves the whole text or what was there before, never a part.
    """
    partial = path.with_name(f".{path.name}.partial")
    with open_private(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last: a rename is on disk only once the folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
