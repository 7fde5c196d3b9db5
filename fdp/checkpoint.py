"""Checkpoints: the whole training state on disk, in parts, readable on any number of ranks.

    root/step-00000010/                      published by one rename: it is whole, or it is not there
        complete.json                        the caller's meta, every leaf's shape and dtype, every file's size
        __0_0.distcp, __1_0.distcp, ...      what each rank wrote: its own parts of the leaves
        .metadata                            which part is where
    root/.step-00000020.partial/             being written, or left by a crash: never read, removed by the next save

A process killed at any moment leaves the last published checkpoint as it was. One run per root, on a file system that
all ranks share.

    >>> group = make_group()                                                # once, by every rank
    >>> saving = start_save(root, state, meta=meta, keep=2, group=group)    # the state may change from here on
    >>> finish_save(saving)                                                 # root/step-00000010
    >>> state = load(latest(root), like=state)                              # any mesh, any number of ranks
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fdp import tree
from fdp.dcp import OwnersOnly, read_index, read_parts, write_parts
from fdp.types import FdpError, Flat, TrainState
from fdp.unison import in_place_of, in_unison, local, rank_in, several

FORMAT, VERSION, RECORD = "fdp-checkpoint", 1, "complete.json"
FIELDS = {"meta", "leaves", "files"}
PUBLISHED = re.compile(r"step-(\d{8,})")
LEFTOVER = re.compile(r"\.step-\d{8,}\.partial")


class SaveGroup(NamedTuple):
    """What background saves use: a process group of their own, and one thread, so that saves keep their order."""

    ranks: ProcessGroup | None
    thread: ThreadPoolExecutor


class Saving(NamedTuple):
    """A save under way."""

    published: Future[Path]


def make_group() -> SaveGroup:
    """What :func:`start_save` needs; every rank calls it, once.

    The process group is a separate one, over gloo: two threads that talk over one group take each other's messages.
    """
    ranks = dist.new_group(backend="gloo") if several() else None
    assert not isinstance(ranks, int)  # every rank is a member
    return SaveGroup(ranks, ThreadPoolExecutor(1, thread_name_prefix="fdp-checkpoint"))


def save(
    root: Path, state: TrainState, *, meta: Mapping[str, Any], keep: int, group: ProcessGroup | None = None
) -> Path:
    """Write ``root/step-<state.step>`` and keep the ``keep`` newest; every rank calls it, and waits for all.

    ``meta`` is anything JSON can hold; the first rank's is written. ``group`` is by default that of all ranks.

    Guarantees:
      - the checkpoint appears by one rename, after every rank's files are on disk;
      - older ones are deleted after that, and never the one just written;
      - if any rank fails, every rank raises and nothing is published.
    """
    return _save(root, _named(state), _record(state, meta), _step_of(state), keep, group, copy_ahead=10_000_000)


def start_save(root: Path, state: TrainState, *, meta: Mapping[str, Any], keep: int, group: SaveGroup) -> Saving:
    """The same in the background; every rank calls it, and :func:`finish_save` before it ends.

    Guarantees:
      - everything is copied before this returns: the state's tensors and ``meta`` may be overwritten.
    """
    named = _named(state)
    staged = {path: in_place_of(leaf, _staged(local(leaf))) for path, leaf in named.items()}
    for device in {local(leaf).device for leaf in named.values() if local(leaf).is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    record, step = _record(state, meta), _step_of(state)
    # No copying ahead: it would open a CUDA stream, and a new thread's device is the first one on every rank.
    return Saving(group.thread.submit(_save, root, staged, record, step, keep, group.ranks, copy_ahead=0))


def finish_save(saving: Saving) -> Path:
    """Wait until the checkpoint is published, or raise what went wrong; every rank calls it."""
    return saving.published.result()


def load(path: Path, like: TrainState, *, group: ProcessGroup | None = None) -> TrainState:
    """The state saved at ``path``, in the structure, placements, devices and dtypes of ``like``; every rank calls it.

    Guarantees:
      - every element has the bits it was saved with, at any number of ranks;
      - an incomplete, foreign or unfitting checkpoint raises on every rank, and ``like`` is never written to.
    """
    named = _named(like)
    in_unison(lambda: _check(path, named), group)
    fresh = {name: in_place_of(leaf, _empty_like(local(leaf))) for name, leaf in named.items()}
    read_parts(path, fresh, group)
    return tree.unflatten(like, fresh)


def latest(root: Path) -> Path | None:
    """The published checkpoint with the most steps; None if there is none. Whatever else is in ``root`` is ignored."""
    found = _published(root)
    return found[max(found)] if found else None


def holds(root: Path, step: int) -> bool:
    """Whether a checkpoint of ``step``, or of a later one, has been published."""
    return any(found >= step for found in _published(root))


def read_meta(path: Path) -> dict[str, Any]:
    """The ``meta`` a checkpoint was saved with."""
    return _read_record(path)["meta"]


def clean(root: Path) -> None:
    """Remove what interrupted saves left behind. No save may be under way."""
    for entry in root.iterdir():
        if LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last: a rename is on disk only once the folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the disk refuses, as an error about ``path``."""
    try:
        yield
    except OSError as error:
        raise FdpError(f"{path}: could not be written: {error}") from error


def _save(
    root: Path, named: Flat, record: str, step: int, keep: int, group: ProcessGroup | None, *, copy_ahead: int
) -> Path:
    final = root / f"step-{step:08d}"
    partial, first = _hidden(final), rank_in(group) == 0
    in_unison(lambda: _begin(final, step, keep) if first else None, group)
    in_unison(lambda: _check_shared(partial), group)
    try:
        write_parts(partial, named, group, copy_ahead=copy_ahead)
    except FdpError:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk is a likely reason
        raise
    in_unison(lambda: _publish(final, record, keep) if first else None, group)
    return final


def _begin(final: Path, step: int, keep: int) -> None:
    root = final.parent
    if keep < 1:
        raise FdpError(f"{root}: expected keep to be at least 1, got {keep}")
    newest = max(_published(root), default=-1)
    if newest >= step or final.exists():
        raise FdpError(
            f"{root}: expected no checkpoint of step {step} or later, got step {max(newest, step)};"
            " resume from it, or give another directory"
        )
    with writing(final):
        # Owner only, here and for every file: meta may hold the noise key, and with it the noise can be subtracted.
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        clean(root)
        _hidden(final).mkdir(mode=0o700)


def _check_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise FdpError(f"{partial.parent}: expected a directory that all ranks share, but this rank cannot see it")


def _publish(final: Path, record: str, keep: int) -> None:
    partial = _hidden(final)
    with writing(final):
        files = {entry.name: entry.stat().st_size for entry in sorted(partial.iterdir())}
        with OwnersOnly().create_stream(partial / RECORD, "wb") as file:
            file.write(json.dumps(json.loads(record) | {"files": files}, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(partial)
        partial.rename(final)
        sync_folder(final.parent)
    published = _published(final.parent)
    for step in sorted(published)[:-keep]:
        # Out of sight first: a deletion that is interrupted must not leave half a checkpoint under a good name.
        with writing(published[step]):
            shutil.rmtree(published[step].rename(_hidden(published[step])), ignore_errors=True)


def _hidden(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def _published(root: Path) -> dict[int, Path]:
    if not root.is_dir():
        return {}
    matches = {entry: PUBLISHED.fullmatch(entry.name) for entry in root.iterdir()}
    return {int(match[1]): entry for entry, match in matches.items() if match and (entry / RECORD).is_file()}


def _record(state: TrainState, meta: Mapping[str, Any]) -> str:
    leaves = {path: _described(leaf.shape, leaf.dtype) for path, leaf in _named(state).items()}
    try:
        return json.dumps({"format": FORMAT, "version": VERSION, "meta": {**meta}, "leaves": leaves}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FdpError(f"meta: expected values that JSON can hold, got {error}") from error


def _read_record(path: Path) -> dict[str, Any]:
    what = f"{path}: expected a checkpoint of fdp"
    try:
        record = json.loads((path / RECORD).read_bytes())
    except FileNotFoundError:
        raise FdpError(f"{what}, found no {RECORD} in it; give a directory that latest() returns") from None
    except (OSError, ValueError) as error:
        raise FdpError(f"{what}, could not read its {RECORD}: {error}; use an older checkpoint") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise FdpError(f"{what}, its {RECORD} is of something else; give a directory that latest() returns")
    if record.get("version") != VERSION:
        raise FdpError(f"{what} of version {VERSION}, got version {record.get('version')}; use the fdp that wrote it")
    if missing := sorted(FIELDS - record.keys()):
        raise FdpError(f"{what}, its {RECORD} lacks {missing}; use an older checkpoint")
    return record


def _check(path: Path, named: Flat) -> None:
    """Raise unless the checkpoint is whole and holds exactly the leaves ``named``."""
    record = _read_record(path)
    for name, size in record["files"].items():
        got = (path / name).stat().st_size if (path / name).is_file() else "no file"
        if got != size:
            raise FdpError(f"{path / name}: expected {size} bytes, got {got}; use an older checkpoint")
    expected = {name: _described(leaf.shape, leaf.dtype) for name, leaf in named.items()}
    index = {name: _described(*entry) for name, entry in read_index(path).items()}
    empty = {name: leaf for name, leaf in record["leaves"].items() if 0 in leaf["shape"]}
    for stored in (record["leaves"], index | empty):
        if wrong := [name for name in sorted(expected | stored) if expected.get(name) != stored.get(name)]:
            leaves = [f"{name}: expected {_said(expected.get(name))}, got {_said(stored.get(name))}" for name in wrong]
            more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise FdpError(
                f"{path}: {'; '.join(leaves[:4])}{more}. Load into a state made with the model, optimizer and clipping"
                " that it was saved with"
            )


def _said(leaf: Mapping[str, Any] | None) -> str:
    return "no such leaf" if leaf is None else f"{leaf['dtype']} of shape {tuple(leaf['shape'])}"


def _described(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}


def _named(state: TrainState) -> Flat:
    """The state as ``{path: leaf}``: ``torch.distributed.checkpoint`` does not look inside tuples."""
    flat = tree.flatten(state)
    for path, leaf in flat.items():
        if not isinstance(leaf, Tensor):
            raise FdpError(f"{path}: expected a tensor, got a {type(leaf).__name__}; put other values into meta")
    return flat


def _step_of(state: TrainState) -> int:
    return int(local(state.step))


def _empty_like(part: Tensor) -> Tensor:
    return torch.empty_like(part, pin_memory=True) if part.is_pinned() else torch.empty_like(part)


def _staged(part: Tensor) -> Tensor:
    """A copy in host memory; from a GPU by way of pinned memory, there only once the stream is done."""
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda).copy_(part, non_blocking=True)
