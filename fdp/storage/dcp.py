"""Shards of leaves on disk, by ``torch.distributed.checkpoint``; the only module that uses it.

Every rank writes its shards of a flat ``{path: tensor or DTensor}`` to one file, and an index locates them; reading
takes from all files the pieces that overlap a rank's shards. Three things differ from the library's defaults: only
their owner can read the files, every byte is hashed on its way to disk, and the index, a pickle, is read by an
unpickler that can call nothing.

    >>> digests = write_shards(folder, named, group, copy_ahead=0)           # of this rank's files
    >>> read_shards(folder, named, group)                        # in place
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

# The public save and load wrap these two, and without a process group warn on every call. A background thread cannot
# silence that, since warning filters belong to the process.
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from fdp.parallel.agree import is_distributed
from fdp.parallel.dtensors import local_shard
from fdp.storage.private_files import open_private
from fdp.types import FdpError, Flat

INDEX = ".metadata"
# The classes in an index besides the library's metadata classes and torch's dtypes.
INDEX_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


def write_shards(folder: Path, named: Flat, group: ProcessGroup | None, *, copy_ahead: int) -> dict[str, str]:
    """Write every rank's shards into ``folder`` and sync them to disk; return when all ranks have finished.

    Returns the SHA-256 of each file that this rank wrote, by name, computed from memory. ``copy_ahead`` bytes are
    copied from a GPU while others are written; 0 for leaves in host memory.
    """
    files = OwnerOnlyFiles()
    writer = _Writer(folder, per_thread_copy_ahead=copy_ahead, sync_files=True)
    writer.fs = files
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        _save_state_dict(_nonempty(named), writer, process_group=group, no_dist=not is_distributed(), planner=planner)
    except CheckpointException as error:
        raise FdpError(f"{folder}: could not be written: {_cause(error)}") from error
    return files.digests


def read_shards(folder: Path, named: Flat, group: ProcessGroup | None = None, *, alone: bool = False) -> None:
    """Fill this rank's shards of ``named`` from ``folder``, reading one overlapping saved shard at a time.

    Every rank calls it; with ``alone``, a single rank may.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    by_itself = alone or not is_distributed()
    try:
        _load_state_dict(_nonempty(named), _Reader(folder), process_group=group, no_dist=by_itself, planner=planner)
    except CheckpointException as error:
        raise FdpError(f"{folder}: expected readable parts, got {_cause(error)}") from error


def read_index(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every leaf that has any element in ``folder``."""
    try:
        stored = _Reader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # an arbitrary pickle can fail in any way
        raise FdpError(f"{folder / INDEX}: expected an index of parts, got {error}") from error
    leaves = {}
    for path, entry in stored.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise FdpError(f"{folder / INDEX}: {path}: expected a tensor, got {type(entry).__name__}")
        leaves[path] = (tuple(entry.size), entry.properties.dtype)
    return leaves


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class OwnerOnlyFiles(FileSystem):
    """A file system whose files only their owner can read; ``digests`` holds those of written files, by name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.refused: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[IO[Any]]:  # type: ignore[override]
        """Open a file; written files have mode 0600."""
        with open_private(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            hashed = _HashingFile(stream, self)
            yield hashed  # type: ignore[misc]
        self.digests[Path(path).name] = hashed.digest.hexdigest()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """Rename a file and its digest."""
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _HashingFile:
    """A file written sequentially, and the digest of its content."""

    def __init__(self, stream: IO[bytes], files: OwnerOnlyFiles) -> None:
        self._stream, self._files = stream, files
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        try:
            written = self._stream.write(data)
        except OSError as error:
            self._files.refused = error  # torch's writer replaces it by an error of its own
            raise
        self.digest.update(data)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Writer(FileSystemWriter):
    """The library's writer, raising the disk's own error if the disk refused a write."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            refused = self.fs.refused if isinstance(self.fs, OwnerOnlyFiles) else None
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
        if module in ("torch", Metadata.__module__) or (module, name) in INDEX_CLASSES:
            found = super().find_class(module, name)
            own = isinstance(found, type) and found.__module__ == Metadata.__module__
            if own or isinstance(found, torch.dtype) or (module, name) in INDEX_CLASSES:
                return found
        raise FdpError(f"a reference to {module}.{name}, which no index has")


def _nonempty(named: Flat) -> dict[str, Tensor]:
    """Return the leaves of which this rank has any element."""
    return {path: leaf for path, leaf in named.items() if local_shard(leaf).numel()}


def _cause(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"{type(cause).__name__} on rank {rank}: {cause}"
