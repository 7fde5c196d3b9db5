"""Parts of leaves on disk, by ``torch.distributed.checkpoint``; the one door to it.

Every rank writes its own parts of a flat ``{path: tensor or DTensor}`` into one file, and an index says which part is
where; reading takes from any files what a rank's present parts overlap. Three things differ from the library as it
comes: files are readable by their owner only, a digest is taken of every byte on its way to disk, and the index, a
pickle, is read without giving it anything to call.

    >>> digests = write_parts(folder, named, group, copy_ahead=0)           # of this rank's files
    >>> read_parts(folder, named, group)                        # in place
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

# The public save and load are these two, and a warning on every call without a process group that cannot be silenced
# from a background thread: warning filters belong to the process.
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from fdp.parallel.agree import is_distributed
from fdp.parallel.dtensors import local_shard
from fdp.storage.private_files import open_private
from fdp.types import FdpError, Flat

INDEX = ".metadata"
# What an index is made of, besides the classes of the library's own metadata and torch's dtypes.
PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


def write_parts(folder: Path, named: Flat, group: ProcessGroup | None, *, copy_ahead: int) -> dict[str, str]:
    """Write every rank's parts into ``folder`` and sync them to disk; returns when all ranks have finished.

    The result is the SHA-256 of each file that this rank wrote, by name, taken from memory. ``copy_ahead`` bytes are
    copied from a GPU while others are written; 0 for leaves in host memory.
    """
    files = OwnersOnly()
    writer = _Writer(folder, per_thread_copy_ahead=copy_ahead, sync_files=True)
    writer.fs = files
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        _save_state_dict(_held(named), writer, process_group=group, no_dist=not is_distributed(), planner=planner)
    except CheckpointException as error:
        raise FdpError(f"{folder}: could not be written: {_cause(error)}") from error
    return files.digests


def read_parts(folder: Path, named: Flat, group: ProcessGroup | None = None, *, alone: bool = False) -> None:
    """Fill this rank's parts of ``named`` from ``folder``: one saved part at a time, those that overlap only.

    Every rank calls it; or one does, for itself: ``alone``.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    by_itself = alone or not is_distributed()
    try:
        _load_state_dict(_held(named), _Reader(folder), process_group=group, no_dist=by_itself, planner=planner)
    except CheckpointException as error:
        raise FdpError(f"{folder}: expected readable parts, got {_cause(error)}") from error


def read_index(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every leaf that has any element in ``folder``."""
    try:
        stored = _Reader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle of something else can fail in any way
        raise FdpError(f"{folder / INDEX}: expected an index of parts, got {error}") from error
    leaves = {}
    for path, entry in stored.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise FdpError(f"{folder / INDEX}: {path}: expected a tensor, got {type(entry).__name__}")
        leaves[path] = (tuple(entry.size), entry.properties.dtype)
    return leaves


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class OwnersOnly(FileSystem):
    """Files that nobody but their owner can read; ``digests`` of those that were written, by name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.refused: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[IO[Any]]:  # type: ignore[override]
        """Open a file; one that is written has mode 0600."""
        with open_private(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            hashed = _Hashed(stream, self)
            yield hashed  # type: ignore[misc]
        self.digests[Path(path).name] = hashed.digest.hexdigest()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """Rename a file, and what is known of it."""
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _Hashed:
    """A file that is written from front to back, and the digest of what was given to it."""

    def __init__(self, stream: IO[bytes], files: OwnersOnly) -> None:
        self._stream, self._files = stream, files
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        try:
            written = self._stream.write(data)
        except OSError as error:
            self._files.refused = error  # torch's writer says something else in its place
            raise
        self.digest.update(data)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Writer(FileSystemWriter):
    """The library's writer, with the disk's own words for what the disk refused."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            refused = self.fs.refused if isinstance(self.fs, OwnersOnly) else None
            if refused is None:
                raise
            free = shutil.disk_usage(self.path).free
            raise OSError(refused.errno, f"{refused.strerror} ({free / 2**20:,.0f} MiB free)") from error


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / INDEX).open("rb") as file:
            return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", Metadata.__module__) or (module, name) in PLAIN:
            found = super().find_class(module, name)
            own = isinstance(found, type) and found.__module__ == Metadata.__module__
            if own or isinstance(found, torch.dtype) or (module, name) in PLAIN:
                return found
        raise FdpError(f"a reference to {module}.{name}, which no index has")


def _held(named: Flat) -> dict[str, Tensor]:
    """The leaves of which this rank has any element. Of an empty part there is nothing to write or read."""
    return {path: leaf for path, leaf in named.items() if local_shard(leaf).numel()}


def _cause(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"{type(cause).__name__} on rank {rank}: {cause}"
