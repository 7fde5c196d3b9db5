"""Output of the command line that never ends in a traceback, whatever its encoding and whoever reads it.

A character that a stream cannot encode is written as ASCII: "…" as "...", "é" as "\\xe9". If the reader of a pipe is
gone, as in ``fdp ledger | head -1``, the command ends quietly, with the exit code of a program that SIGPIPE ended.

    >>> protect_streams()
    >>> print("3.5210 → 3.1877 …")                      # in ASCII: 3.5210 -> 3.1877 ...
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import NoReturn

CLOSED_PIPE = 141
"""128 + SIGPIPE, as a shell reports it."""
ERRORS = "fdp_as_ascii"
"""The name of :func:`write_as_ascii` among the error handlers of codecs."""
AS_ASCII = {
    "…": "...", "→": "->", "±": "+/-", "\N{MULTIPLICATION SIGN}": "x", "·": "-", "•": "*",
    "─": "-", "━": "-", "═": "=", "│": "|", "┃": "|", "║": "|", **dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#")),
}  # fmt: skip
"""ASCII for the characters that fdp prints."""
CORNERS = range(0x250C, 0x2580)
"""Corners and crossings of boxes: U+250C to U+257F, but for the lines above."""


def protect_streams() -> None:
    """Let stdout and stderr write what they cannot encode as ASCII, and end the process if nobody reads them.

    Streams that are not Python's own, such as those of a test or a notebook, are left alone.
    """
    codecs.register_error(ERRORS, write_as_ascii)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            setattr(sys, name, _Output(stream))


def flush_streams() -> None:
    """Write what is left; the interpreter would report a closed pipe."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Output):
            stream.flush()


def write_as_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return ASCII for the first character that could not be encoded, and the position after it."""
    assert isinstance(error, UnicodeEncodeError)
    character, after = error.object[error.start], error.start + 1
    if (known := AS_ASCII.get(character)) is not None:
        return known, after
    if ord(character) in CORNERS:
        return "+", after
    if "\udc80" <= character <= "\udcff":  # a byte of a path that the locale cannot decode
        return character.encode("ascii", "surrogateescape"), after
    return codecs.backslashreplace_errors(
        UnicodeEncodeError(error.encoding, error.object, error.start, after, error.reason)
    )


class _Output(io.TextIOWrapper):
    """A stream that writes into the buffer of another one, which stays as it is."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=ERRORS,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            self._end()

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._end()

    def _end(self) -> NoReturn:
        """Exit; what is still in the buffer goes nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        sys.exit(CLOSED_PIPE)
