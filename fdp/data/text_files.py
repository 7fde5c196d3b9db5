"""Files opened, unpacked if they are ``.gz``, and read as UTF-8 text.

Errors say how to convert or repair a file, and never show content.

    >>> read_text(Path("notes.txt.gz"))
    >>> to_utf8(Path("old.txt"))
    'iconv -f latin1 -t utf-8 OLD > NEW, if it is Latin-1'
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from fdp.data.file_kinds import BINARY_SUFFIXES, TABLE_SUFFIXES, ZIPPED, suffix_of
from fdp.types import FdpError

LOOKED_AT_BYTES = 1 << 16
"""Bytes of a file that are checked to be UTF-8 where other files are refused anyway."""
GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)


def open_bytes(file: Path) -> IO[bytes]:
    """Open a file for reading, unpacked if it is named ``.gz`` and is compressed; for errors see ``GZIP_ERRORS``."""
    if file.suffix.lower() == ZIPPED:
        with file.open("rb") as content:
            is_zipped = content.read(2) == b"\x1f\x8b"
        if is_zipped:
            return cast("IO[bytes]", gzip.open(file, "rb"))
    return file.open("rb")


def read_bytes(file: Path) -> bytes:
    """Read a whole file, unpacked."""
    try:
        with open_bytes(file) as content:
            return content.read()
    except GZIP_ERRORS:
        pass
    raise damaged_archive(file)


def damaged_archive(file: Path) -> FdpError:
    """Return the error about a compressed file that cannot be unpacked."""
    return FdpError(f"{file}: expected a file compressed by gzip, got one that is damaged or cut off; copy it again")


def read_text(file: Path) -> str:
    """Read a UTF-8 text file."""
    content = read_bytes(file)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        position = error.start
    raise FdpError(
        f"{file}: expected UTF-8 text, got a byte at position {position} that is not; convert the file: {to_utf8(file)}"
    )


def check_text(text: str, place: str) -> None:
    """Refuse text that is not Unicode, such as half of a surrogate pair."""
    try:
        text.encode()
        return
    except UnicodeEncodeError:  # raised again below, since a chained error would show the text
        pass
    raise FdpError(f"{place}: expected text, got a lone surrogate, which is half a character; repair the record")


def is_not_utf8(file: Path) -> bool:
    """Return True if the beginning of a text, or of records in a text, is not UTF-8."""
    if suffix_of(file) in BINARY_SUFFIXES:
        return False
    try:
        with open_bytes(file) as content:
            codecs.getincrementaldecoder("utf-8")().decode(content.read(LOOKED_AT_BYTES))
    except UnicodeDecodeError:
        return True
    except (*GZIP_ERRORS, OSError):  # reported when the file is read
        pass
    return False


def to_utf8(file: Path) -> str:
    """Return how to convert a file that is not UTF-8; its first bytes tell whether Windows wrote it as UTF-16."""
    with suppress(*GZIP_ERRORS, OSError), open_bytes(file) as content:
        if content.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return _conversion(file, "utf-16", "")
    return _conversion(file, "latin1", ", if it is Latin-1")


def _conversion(file: Path, encoding: str, condition: str) -> str:
    excel = "in Excel save it as CSV UTF-8, or " if suffix_of(file) in TABLE_SUFFIXES else ""
    return f"{excel}iconv -f {encoding} -t utf-8 OLD > NEW{condition}"
