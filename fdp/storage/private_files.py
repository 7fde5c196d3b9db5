"""Files that only their owner can read, for results computed on private data and for noise keys.

A file has mode 0600 from the moment it exists, whatever the umask. An existing file gets the mode before anything is
written to it.

    >>> with open_private(folder / "metrics.jsonl", "w") as file: ...
    >>> write_private(folder / "summary.json", text)                        # complete, or absent
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
    """Open a file as ``open`` does, text as UTF-8; a written file has mode 0600 and is not a link.

    Guarantees:
      - others cannot read the content at any moment;
      - if the file system cannot ensure that, it is an error, before anything is written.
    """

    def open_owner_only(name: str, flags: int) -> int:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return os.open(name, flags)
        handle = os.open(name, flags | os.O_NOFOLLOW, OWNER_ONLY)
        try:
            if os.fstat(handle).st_mode & 0o777 != OWNER_ONLY:
                os.fchmod(handle, OWNER_ONLY)
            if (found := os.fstat(handle).st_mode & 0o777) != OWNER_ONLY:
                raise FdpError(
                    f"{name}: expected a file that its owner alone can read (mode 600), got {found:o}: the file system "
                    f"does not keep modes. The file would hold results of private data: write to another place"
                )
        except BaseException:
            os.close(handle)
            raise
        return handle

    # A path that the locale cannot decode has lone surrogates: written as the bytes that they stand for.
    encoding, errors = (None, None) if "b" in mode else ("utf-8", "surrogateescape")
    with open(path, mode, opener=open_owner_only, encoding=encoding, errors=errors) as stream:
        yield stream


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600 atomically, replacing one of that name.

    Guarantees:
      - a process that is killed at any moment leaves the full text or the previous file, never a part.
    """
    partial = path.with_name(f".{path.name}.partial")
    with open_private(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk: until then, a rename in it may be lost."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into an :class:`FdpError` about ``path``."""
    try:
        yield
    except OSError as error:
        raise FdpError(f"{path}: could not be written: {error}") from error
