"""Checkpoints: the full training state on disk, in shards, readable on any number of ranks.

    root/step-00000010/                      published by one rename: complete, or absent
        complete.json                        the record: the caller's meta, every leaf's shape and dtype, every
                                             counter, every file's size and SHA-256, and the SHA-256 of all this
        __0_0.distcp, __1_0.distcp, ...      each rank's shards of the leaves
        .metadata                            the index of the shards
    root/.step-00000020.partial/             being written, or left by a crash: never read, removed by the next save

A process killed at any moment leaves the last published checkpoint intact. A checkpoint that differs in any bit from
what was saved is refused. One run per root, on a file system that all ranks share.

    >>> group = make_group(timeout=600)                                     # once, by every rank
    >>> saving = start_save(root, state, meta=meta, keep=2, group=group)    # the state may change from here on
    >>> finish_save(saving)                                                 # root/step-00000010
    >>> state = load(list_published(root)[0], like=state)                        # any mesh, any number of ranks
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fdp import tree
from fdp.parallel.agree import gather_values, group_size, is_distributed, rank_in, run_in_unison
from fdp.parallel.dtensors import local_shard, shard_like
from fdp.parallel.offload import like_on_cpu
from fdp.storage.checkpoint_record import (
    RECORD,
    SEE_OLDER,
    Damaged,
    Verified,
    check_leaves,
    is_counter,
    make_record,
    named_leaves,
    read_record,
    record_digest,
)
from fdp.storage.dcp import OwnerOnlyFiles, digest_of, read_index, read_shards, write_shards
from fdp.storage.private_files import disk_errors, sync_folder
from fdp.types import FdpError, Flat, TrainState

PUBLISHED = re.compile(r"step-(\d{8,})")
LEFTOVER = re.compile(r"\.step-\d{8,}\.partial")


class SaveGroup(NamedTuple):
    """The resources of background saves: a process group of their own, and one thread that keeps saves in order."""

    ranks: ProcessGroup | None
    thread: ThreadPoolExecutor


class PendingSave(NamedTuple):
    """A save in the background."""

    published: Future[Path]


def make_group(*, timeout: float | None = None) -> SaveGroup:
    """Create the resources of :func:`start_save`; every rank calls it, once.

    The process group is a separate one, over gloo, since two threads on one group would take each other's messages.
    A rank waits at most ``timeout`` seconds for another (None: torch's default).
    """
    patience = None if timeout is None else timedelta(seconds=timeout)
    ranks = dist.new_group(backend="gloo", timeout=patience) if is_distributed() else None
    assert not isinstance(ranks, int)  # every rank is a member
    return SaveGroup(ranks, ThreadPoolExecutor(1, thread_name_prefix="fdp-checkpoint"))


def save(
    root: Path, state: TrainState, *, meta: Mapping[str, Any], keep: int, group: ProcessGroup | None = None
) -> Path:
    """Write ``root/step-<state.step>`` and keep the ``keep`` newest; every rank calls it, and waits for all.

    ``meta`` is anything JSON can hold; the first rank's is written. ``group`` defaults to all ranks.

    Guarantees:
      - the checkpoint appears by one rename, after every rank's files are on disk;
      - older ones are deleted after that, and never the one just written;
      - if any rank fails, every rank raises and nothing is published.
    """
    return _save(
        root, named_leaves(state), make_record(state, meta), _step_of(state), keep, group, copy_ahead=10_000_000
    )


def start_save(root: Path, state: TrainState, *, meta: Mapping[str, Any], keep: int, group: SaveGroup) -> PendingSave:
    """Start a :func:`save` in the background; every rank calls it, and :func:`finish_save` before it ends.

    Guarantees:
      - everything is copied before this returns: the state's tensors and ``meta`` may be overwritten.
    """
    named = named_leaves(state)
    staged = {path: shard_like(leaf, _copy_to_host(local_shard(leaf))) for path, leaf in named.items()}
    for device in {local_shard(leaf).device for leaf in named.values() if local_shard(leaf).is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    record, step = make_record(state, meta), _step_of(state)
    # No copying ahead: it would open a CUDA stream on the thread's device, which is the first one on every rank.
    return PendingSave(group.thread.submit(_save, root, staged, record, step, keep, group.ranks, copy_ahead=0))


def finish_save(saving: PendingSave) -> Path:
    """Wait until the checkpoint is published, or raise the error of the save; every rank calls it."""
    return saving.published.result()


def load(source: Path | Verified, like: TrainState, *, group: ProcessGroup | None = None) -> TrainState:
    """Load a state in the structure, placements, devices and dtypes of ``like``; every rank calls it.

    A path is verified first.

    Guarantees:
      - every element has the bits it was saved with, at any number of ranks;
      - a damaged, foreign or unfitting checkpoint raises on every rank, and ``like`` is never written to.
    """
    checked = source if isinstance(source, Verified) else verify(source, group=group)
    named = named_leaves(like)
    run_in_unison(lambda: check_leaves(checked, named), group)
    fresh = {name: shard_like(leaf, _empty_like(local_shard(leaf))) for name, leaf in named.items()}
    read_shards(checked.path, fresh, group)
    return tree.unflatten(like, fresh)


def verify(path: Path, *, group: ProcessGroup | None = None) -> Verified:
    """Compare every byte of a checkpoint with its record; every rank calls it and reads its share of the files.

    Guarantees:
      - raises :class:`Damaged` on every rank unless all files, the record itself and all counters are as saved.
    """
    checked = run_in_unison(lambda: Verified(path, read_record(path)), group)
    run_in_unison(lambda: _check_files(checked, rank_in(group), group_size(group)), group)
    run_in_unison(lambda: _check_counters(checked), group)
    return checked


def list_published(root: Path) -> list[Path]:
    """Return all published checkpoints, the one with the most steps first. Other entries of ``root`` are ignored."""
    found = _find_published(root)
    return [found[step] for step in sorted(found, reverse=True)]


def latest(root: Path) -> Path | None:
    """Return the published checkpoint with the most steps, or None."""
    return next(iter(list_published(root)), None)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that nothing takes it for a good one, and return its new path."""
    for number in range(1000):
        aside = path.with_name(f"{path.name}.damaged" + (f"-{number}" if number else ""))
        if not aside.exists():
            with disk_errors(path):
                path.rename(aside)
                sync_folder(path.parent)
            return aside
    raise FdpError(f"{path.parent}: holds too many damaged checkpoints; delete them")


def has_reached(root: Path, step: int) -> bool:
    """Return True if a checkpoint of ``step``, or of a later one, has been published."""
    return any(found >= step for found in _find_published(root))


def remove_leftovers(root: Path) -> None:
    """Remove the files of interrupted saves. No save may be running."""
    for entry in root.iterdir():
        if LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def _save(
    root: Path, named: Flat, record: str, step: int, keep: int, group: ProcessGroup | None, *, copy_ahead: int
) -> Path:
    final = root / f"step-{step:08d}"
    partial, first = _partial_path(final), rank_in(group) == 0
    run_in_unison(lambda: _begin(final, step, keep) if first else None, group)
    run_in_unison(lambda: _check_shared(partial), group)
    try:
        digests = write_shards(partial, named, group, copy_ahead=copy_ahead)
    except FdpError:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk is a likely reason
        raise
    known = {name: digest for theirs in gather_values(digests, group) for name, digest in theirs.items()}
    run_in_unison(lambda: _publish(final, record, known, keep) if first else None, group)
    return final


def _begin(final: Path, step: int, keep: int) -> None:
    root = final.parent
    if keep < 1:
        raise FdpError(f"{root}: expected keep to be at least 1, got {keep}")
    newest = max(_find_published(root), default=-1)
    if newest >= step or final.exists():
        raise FdpError(
            f"{root}: expected no checkpoint of step {step} or later, got step {max(newest, step)};"
            " resume from it, or give another directory"
        )
    with disk_errors(final):
        # Owner only, here and for every file: meta may hold the noise key, by which the noise could be subtracted.
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_leftovers(root)
        _partial_path(final).mkdir(mode=0o700)


def _check_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise FdpError(f"{partial.parent}: expected a directory that all ranks share, but this rank cannot see it")


def _publish(final: Path, record: str, digests: Mapping[str, str], keep: int) -> None:
    partial = _partial_path(final)
    with disk_errors(final):
        files = {
            entry.name: {"bytes": entry.stat().st_size, "sha256": digests[entry.name]}
            for entry in sorted(partial.iterdir())
        }
        complete = json.loads(record) | {"files": files}
        with OwnerOnlyFiles().create_stream(partial / RECORD, "wb") as file:
            file.write(json.dumps(complete | {"sha256": record_digest(complete)}, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(partial)
        partial.rename(final)
        sync_folder(final.parent)
    published = _find_published(final.parent)
    for step in sorted(published)[:-keep]:
        # Rename first: an interrupted deletion must not leave half a checkpoint under a good name.
        with disk_errors(published[step]):
            shutil.rmtree(published[step].rename(_partial_path(published[step])), ignore_errors=True)


def _partial_path(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def _find_published(root: Path) -> dict[int, Path]:
    if not root.is_dir():
        return {}
    matches = {entry: PUBLISHED.fullmatch(entry.name) for entry in root.iterdir()}
    return {int(match[1]): entry for entry, match in matches.items() if match and (entry / RECORD).is_file()}


def _check_files(checked: Verified, rank: int, ranks: int) -> None:
    """Compare the sizes of all files with the record, and the content of every ``ranks``-th one."""
    path, files = checked.path, checked.record["files"]
    for name, entry in files.items():
        got = (path / name).stat().st_size if (path / name).is_file() else "no file"
        if got != entry["bytes"]:
            raise Damaged(f"{path / name}: expected {entry['bytes']} bytes, got {got}; {SEE_OLDER}")
    for name in sorted(files)[rank::ranks]:
        if digest_of(path / name) != files[name]["sha256"]:
            raise Damaged(f"{path / name}: is not what was saved, by its SHA-256; {SEE_OLDER}")


def _check_counters(checked: Verified) -> None:
    """Compare the record's counters with the saved leaves, and the checkpoint's name with its step."""
    path, told = checked.path, checked.record["counters"]
    index = {name: entry for name, entry in read_index(path).items() if is_counter(*entry)}
    leaves = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in index.items()}
    read_shards(path, leaves, alone=True)
    found = {name: int(leaf) for name, leaf in leaves.items()}
    if found != told:
        odd = next(name for name in sorted(found | told) if found.get(name) != told.get(name))
        raise Damaged(f"{path}: {odd}: {told.get(odd)} by its {RECORD}, {found.get(odd)} by its leaf; {SEE_OLDER}")
    if (named := PUBLISHED.fullmatch(path.name)) and int(named[1]) != found["step"]:
        raise Damaged(f"{path}: holds the state after step {found['step']}, under the name of another; {SEE_OLDER}")


def _step_of(state: TrainState) -> int:
    return int(local_shard(state.step))


def _empty_like(part: Tensor) -> Tensor:
    return torch.empty_like(part, pin_memory=True) if part.is_pinned() else torch.empty_like(part)


def _copy_to_host(part: Tensor) -> Tensor:
    """Copy to host memory; from a GPU to pinned memory, complete only once the stream is synchronized."""
    return like_on_cpu(part, part.shape).copy_(part, non_blocking=True)
