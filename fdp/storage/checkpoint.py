"""Checkpoints: the whole training state on disk, in parts, readable on any number of ranks.

    root/step-00000010/                      published by one rename: it is whole, or it is not there
        complete.json                        the caller's meta, every leaf's shape and dtype, every counter's value,
                                             every file's size and SHA-256, and one of all this
        __0_0.distcp, __1_0.distcp, ...      what each rank wrote: its own parts of the leaves
        .metadata                            which part is where
    root/.step-00000020.partial/             being written, or left by a crash: never read, removed by the next save

A process killed at any moment leaves the last published checkpoint as it was. No value is taken from one that is not,
bit by bit, what was saved. One run per root, on a file system that all ranks share.

    >>> group = make_group(timeout=600)                                     # once, by every rank
    >>> saving = start_save(root, state, meta=meta, keep=2, group=group)    # the state may change from here on
    >>> finish_save(saving)                                                 # root/step-00000010
    >>> state = load(published(root)[0], like=state)                        # any mesh, any number of ranks
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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
from fdp.storage.dcp import OwnersOnly, digest_of, read_index, read_parts, write_parts
from fdp.storage.private_files import sync_folder
from fdp.types import FdpError, Flat, TrainState

FORMAT, VERSION, RECORD = "fdp-checkpoint", 2, "complete.json"
FIELDS = {"meta", "leaves", "counters", "files"}
OLDER = (
    "fdp.storage.checkpoint.published(root) lists the others, newest first; fdp train takes the newest good one by "
    "itself"
)
PUBLISHED = re.compile(r"step-(\d{8,})")
LEFTOVER = re.compile(r"\.step-\d{8,}\.partial")


class SaveGroup(NamedTuple):
    """What background saves use: a process group of their own, and one thread, so that saves keep their order."""

    ranks: ProcessGroup | None
    thread: ThreadPoolExecutor


class Saving(NamedTuple):
    """A save under way."""

    published: Future[Path]


class Damaged(FdpError):
    """A checkpoint that is not, bit by bit, what was saved."""


class Verified(NamedTuple):
    """A checkpoint whose every byte was compared with its record, and what the record says."""

    path: Path
    record: dict[str, Any]

    @property
    def meta(self) -> dict[str, Any]:
        """What the caller saved beside the state."""
        return self.record["meta"]

    @property
    def step(self) -> int:
        """The number of steps, as the checkpoint's name and its state tell it."""
        return self.record["counters"]["step"]


def make_group(*, timeout: float | None = None) -> SaveGroup:
    """What :func:`start_save` needs; every rank calls it, once.

    The process group is a separate one, over gloo: two threads that talk over one group take each other's messages.
    None of them waits longer than ``timeout`` seconds for another; None: torch's default.
    """
    patience = None if timeout is None else timedelta(seconds=timeout)
    ranks = dist.new_group(backend="gloo", timeout=patience) if is_distributed() else None
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
    staged = {path: shard_like(leaf, _staged(local_shard(leaf))) for path, leaf in named.items()}
    for device in {local_shard(leaf).device for leaf in named.values() if local_shard(leaf).is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    record, step = _record(state, meta), _step_of(state)
    # No copying ahead: it would open a CUDA stream, and a new thread's device is the first one on every rank.
    return Saving(group.thread.submit(_save, root, staged, record, step, keep, group.ranks, copy_ahead=0))


def finish_save(saving: Saving) -> Path:
    """Wait until the checkpoint is published, or raise what went wrong; every rank calls it."""
    return saving.published.result()


def load(source: Path | Verified, like: TrainState, *, group: ProcessGroup | None = None) -> TrainState:
    """The state saved there, in the structure, placements, devices and dtypes of ``like``; every rank calls it.

    A path is verified first.

    Guarantees:
      - every element has the bits it was saved with, at any number of ranks;
      - a damaged, foreign or unfitting checkpoint raises on every rank, and ``like`` is never written to.
    """
    checked = source if isinstance(source, Verified) else verify(source, group=group)
    named = _named(like)
    run_in_unison(lambda: _check_leaves(checked, named), group)
    fresh = {name: shard_like(leaf, _empty_like(local_shard(leaf))) for name, leaf in named.items()}
    read_parts(checked.path, fresh, group)
    return tree.unflatten(like, fresh)


def verify(path: Path, *, group: ProcessGroup | None = None) -> Verified:
    """Compare every byte of a checkpoint with its record; every rank calls it and reads its share of the files.

    Guarantees:
      - raises :class:`Damaged` on every rank unless all files, the record itself and all counters are as saved.
    """
    checked = run_in_unison(lambda: Verified(path, _read_record(path)), group)
    run_in_unison(lambda: _check_files(checked, rank_in(group), group_size(group)), group)
    run_in_unison(lambda: _check_counters(checked), group)
    return checked


def published(root: Path) -> list[Path]:
    """All published checkpoints, that of the most steps first. Whatever else is in ``root`` is ignored."""
    found = _published(root)
    return [found[step] for step in sorted(found, reverse=True)]


def latest(root: Path) -> Path | None:
    """The published checkpoint of the most steps; None if there is none."""
    return next(iter(published(root)), None)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that nothing takes it for a good one; the new name."""
    for number in range(1000):
        aside = path.with_name(f"{path.name}.damaged" + (f"-{number}" if number else ""))
        if not aside.exists():
            with writing(path):
                path.rename(aside)
                sync_folder(path.parent)
            return aside
    raise FdpError(f"{path.parent}: holds too many damaged checkpoints; delete them")


def holds(root: Path, step: int) -> bool:
    """Whether a checkpoint of ``step``, or of a later one, has been published."""
    return any(found >= step for found in _published(root))


def clean(root: Path) -> None:
    """Remove what interrupted saves left behind. No save may be under way."""
    for entry in root.iterdir():
        if LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


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
    run_in_unison(lambda: _begin(final, step, keep) if first else None, group)
    run_in_unison(lambda: _check_shared(partial), group)
    try:
        digests = write_parts(partial, named, group, copy_ahead=copy_ahead)
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


def _publish(final: Path, record: str, digests: Mapping[str, str], keep: int) -> None:
    partial = _hidden(final)
    with writing(final):
        files = {
            entry.name: {"bytes": entry.stat().st_size, "sha256": digests[entry.name]}
            for entry in sorted(partial.iterdir())
        }
        whole = json.loads(record) | {"files": files}
        with OwnersOnly().create_stream(partial / RECORD, "wb") as file:
            file.write(json.dumps(whole | {"sha256": _digest(whole)}, indent=1).encode())
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
    named = _named(state)
    leaves = {path: _described(leaf.shape, leaf.dtype) for path, leaf in named.items()}
    counters = {path: int(local_shard(leaf)) for path, leaf in named.items() if _is_counter(leaf.shape, leaf.dtype)}
    record = {"format": FORMAT, "version": VERSION, "meta": {**meta}, "leaves": leaves, "counters": counters}
    try:
        return json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FdpError(f"meta: expected values that JSON can hold, got {error}") from error


def _read_record(path: Path) -> dict[str, Any]:
    what = f"{path}: expected a checkpoint of fdp"
    try:
        record = json.loads((path / RECORD).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{what}, found no {RECORD} in it; {OLDER}") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{what}, could not read its {RECORD}: {error}; {OLDER}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise Damaged(f"{what}, its {RECORD} is of something else; {OLDER}")
    if record.get("version") != VERSION:
        raise FdpError(f"{what} of version {VERSION}, got version {record.get('version')}; use the fdp that wrote it")
    if missing := sorted(FIELDS - record.keys()):
        raise Damaged(f"{what}, its {RECORD} lacks {missing}; {OLDER}")
    if record.pop("sha256", None) != _digest(record):
        raise Damaged(f"{path / RECORD}: is not what was saved, by its SHA-256; {OLDER}")
    return record


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _check_files(checked: Verified, rank: int, ranks: int) -> None:
    """Compare the sizes of all files with the record, and the content of every ``ranks``-th one."""
    path, files = checked.path, checked.record["files"]
    for name, entry in files.items():
        got = (path / name).stat().st_size if (path / name).is_file() else "no file"
        if got != entry["bytes"]:
            raise Damaged(f"{path / name}: expected {entry['bytes']} bytes, got {got}; {OLDER}")
    for name in sorted(files)[rank::ranks]:
        if digest_of(path / name) != files[name]["sha256"]:
            raise Damaged(f"{path / name}: is not what was saved, by its SHA-256; {OLDER}")


def _check_counters(checked: Verified) -> None:
    """Compare the record's copies of the state's counters with the leaves themselves, and its name with its step."""
    path, told = checked.path, checked.record["counters"]
    index = {name: entry for name, entry in read_index(path).items() if _is_counter(*entry)}
    leaves = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in index.items()}
    read_parts(path, leaves, alone=True)
    found = {name: int(leaf) for name, leaf in leaves.items()}
    if found != told:
        odd = next(name for name in sorted(found | told) if found.get(name) != told.get(name))
        raise Damaged(f"{path}: {odd}: {told.get(odd)} by its {RECORD}, {found.get(odd)} by its leaf; {OLDER}")
    if (named := PUBLISHED.fullmatch(path.name)) and int(named[1]) != found["step"]:
        raise Damaged(f"{path}: holds the state after step {found['step']}, under the name of another; {OLDER}")


def _is_counter(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return tuple(shape) == () and dtype == torch.int64


def _check_leaves(checked: Verified, named: Flat) -> None:
    """Raise unless the checkpoint holds exactly the leaves ``named``."""
    path, record = checked
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
    return int(local_shard(state.step))


def _empty_like(part: Tensor) -> Tensor:
    return torch.empty_like(part, pin_memory=True) if part.is_pinned() else torch.empty_like(part)


def _staged(part: Tensor) -> Tensor:
    """A copy in host memory; from a GPU by way of pinned memory, there only once the stream is done."""
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda).copy_(part, non_blocking=True)
