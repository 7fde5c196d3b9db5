"""Arrays that are written piece by piece and may be larger than memory.

    at most IN_MEMORY_BYTES     an ordinary array
    more                        a mapped file without a name, which the system deletes when the process ends

The file lies in ``$FDP_CACHE`` (default ``~/.cache/fdp``), readable by nobody else, and never has a name, not even
after a crash: no copy of private data stays behind. Pages of a mapped file are read when they are used, and the system
drops them when memory is short.

    >>> writer = ArrayWriter(np.dtype("u2"))
    >>> for tokens in texts: writer.append(tokens)
    >>> writer.finish()                                  # one array of all pieces, in order
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from typing import IO

import numpy as np
from fdp_kernels.cache_folder import cache_folder

from fdp.types import FdpError

IN_MEMORY_BYTES = 1 << 28
"""Size up to which an array is kept in memory."""
PIECE_BYTES = 1 << 22
"""Size up to which pieces are collected before they are written."""
UNSIGNED = tuple(np.dtype(name) for name in ("u1", "u2", "u4", "u8"))


def narrowest_dtype(size: int) -> np.dtype:
    """Return the narrowest type that holds the numbers below ``size``, such as the tokens of a vocabulary."""
    return next(dtype for dtype in UNSIGNED if size - 1 <= np.iinfo(dtype).max)


class ArrayWriter:
    """A one-dimensional array that grows at its end, in bounded memory.

    Guarantees:
      - ``finish()`` returns all that was appended, in order;
      - no more than ``IN_MEMORY_BYTES`` and one piece are held in memory.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = np.dtype(dtype)
        self.size = 0
        self._pieces: list[np.ndarray] = []
        self._held = 0
        self._file: IO[bytes] | None = None

    def append(self, values: np.ndarray | Sequence[int] | Sequence[bool]) -> None:
        """Add values at the end; refuse those that the type cannot hold."""
        piece = np.asarray(values)
        if piece.dtype != self.dtype:
            piece = self._cast(piece)
        self.size += len(piece)
        self._held += piece.nbytes
        self._pieces.append(piece)
        if len(self._pieces) > 1 << 16:  # short pieces: an array each is more than its content
            self._pieces = [np.concatenate(self._pieces)]
        if self._held > (IN_MEMORY_BYTES if self._file is None else PIECE_BYTES):
            self._write()

    def finish(self) -> np.ndarray:
        """Return the array; the writer must not be used again."""
        if self._file is None:
            return np.concatenate(self._pieces) if self._pieces else np.zeros(0, self.dtype)
        self._write()
        with self._file as file:
            file.flush()
            return np.memmap(file, dtype=self.dtype, mode="r", shape=(self.size,))

    def _cast(self, piece: np.ndarray) -> np.ndarray:
        integers = np.issubdtype(self.dtype, np.integer) and len(piece)
        if integers and not (int(piece.min()) >= 0 and int(piece.max()) <= np.iinfo(self.dtype).max):
            raise FdpError(
                f"tokens: expected numbers from 0 to {np.iinfo(self.dtype).max}, got another from the tokenizer; its "
                "vocabulary must hold all tokens that it makes"
            )
        return piece.astype(self.dtype)

    def _write(self) -> None:
        try:
            if self._file is None:
                folder = cache_folder()
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            for piece in self._pieces:
                self._file.write(np.ascontiguousarray(piece).data)
        except OSError as error:
            raise FdpError(
                f"{cache_folder()}: expected room for the tokens of the data, which are more than fit into memory, got "
                f"{error.strerror}; set FDP_CACHE to a folder on a larger disk"
            ) from error
        self._pieces, self._held = [], 0


def join_arrays(pieces: Iterable[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Return the pieces one after another as one array, in memory or, if it is large, in a mapped file."""
    writer = ArrayWriter(dtype)
    for piece in pieces:
        writer.append(piece)
    return writer.finish()
