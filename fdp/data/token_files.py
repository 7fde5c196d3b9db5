"""Files of tokens, mapped and never read whole: one file, or a folder of them as one long row of tokens.

| file         | content                                                                                       |
|--------------|-----------------------------------------------------------------------------------------------|
| ``.npy``     | one-dimensional, any integer type                                                             |
| ``.bin``     | little-endian numbers without a header: uint16, or what ``tokens.json`` beside them says      |
| tokens.json  | ``{"dtype": "uint32"}``, for all ``.bin`` of its folder; uint8, uint16, uint32, int32 or int64 |

A folder is the row that its files would be if they were written into one file, in the order of their paths: the same
windows, the same digest.

    >>> tokens = read_tokens(Path("shards"))                     # shards/000.npy, shards/001.npy, ...
    >>> len(tokens), tokens[7:12], tokens.windows(np.array([0, 3]), 129).shape
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fdp.data.file_kinds import TOKENS_MANIFEST
from fdp.data.files import find_token_files
from fdp.types import FdpError

BIN_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "uint32", "int32", "int64")}


class Shards:
    """Several one-dimensional arrays of integers as one. Slices are copied; nothing else is read."""

    ndim = 1

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = tuple(parts)
        self.starts = np.concatenate([[0], np.cumsum([len(part) for part in self.parts])])
        self.dtype = np.result_type(*(part.dtype for part in self.parts))

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, which: slice) -> np.ndarray:
        first, last, stride = which.indices(len(self))
        if stride != 1:
            raise FdpError(f"tokens: expected a slice without a stride, got one of {stride}")
        return np.concatenate(
            [part.astype(self.dtype) for part in self._pieces(first, last)] or [np.zeros(0, np.int64)]
        )

    def first(self, count: int) -> Shards:
        """Return the first ``count`` elements as shards of the same files."""
        return Shards(self._pieces(0, count))

    def windows(self, indices: np.ndarray, size: int) -> np.ndarray:
        """Return windows ``[i size, (i + 1) size)`` as rows."""
        return np.stack([self[i * size : (i + 1) * size] for i in map(int, indices)])

    def _pieces(self, first: int, last: int) -> list[np.ndarray]:
        found, number = [], int(np.searchsorted(self.starts, first, side="right")) - 1
        while first < last and number < len(self.parts):
            start, end = int(self.starts[number]), min(last, int(self.starts[number + 1]))
            if first < end:
                found.append(self.parts[number][first - start : end - start])
            first, number = max(first, end), number + 1
        return found


def read_tokens(path: Path) -> np.ndarray | Shards:
    """Map the tokens at a path: a file, or a folder of such files, which all hold integers in one dimension."""
    parts = [_map_tokens(file) for file in find_token_files(path)]
    if len(parts) == 1:
        return parts[0]
    for file, part in zip(find_token_files(path), parts):
        if part.ndim != 1 or not np.issubdtype(part.dtype, np.integer):
            raise FdpError(
                f"{file}: expected integers in one dimension, got {part.dtype} of shape {part.shape}; save token ids, "
                "not text or embeddings"
            )
    return Shards(parts)


def _map_tokens(file: Path) -> np.ndarray:
    if file.suffix.lower() == ".npy":
        return _map_npy(file)
    return map_file(file, _bin_dtype(file.parent / TOKENS_MANIFEST))


def _bin_dtype(manifest: Path) -> np.dtype:
    if not manifest.exists():
        return BIN_DTYPES["uint16"]
    try:
        name = json.loads(manifest.read_bytes())["dtype"]
    except (ValueError, KeyError, TypeError):
        name = None
    if name not in BIN_DTYPES:
        raise FdpError(
            f'{manifest}: expected {{"dtype": "uint16"}}, or another of {", ".join(BIN_DTYPES)}, got something else'
        )
    return BIN_DTYPES[name]


def _map_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):  # raised again below: NumPy's message may show the head of the file
        pass
    raise FdpError(f"{path}: expected a NumPy array of token ids, got a file that cannot be read as one; use np.save")


def map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    """Map a file of numbers."""
    size = path.stat().st_size
    if size == 0:
        raise FdpError(f"{path}: expected text or tokens, got an empty file; check that it is the file you meant")
    if size % dtype.itemsize:
        raise FdpError(
            f"{path}: expected whole {dtype.name} tokens, got {size} bytes; is it another dtype? Use .npy, or name it "
            f"in {TOKENS_MANIFEST}"
        )
    return np.memmap(path, dtype=dtype, mode="r")
