"""The record of a checkpoint, ``complete.json``: what was saved, so that damage is noticed before a value is used.

{"format", "version", "meta", "leaves": {path: shape, dtype}, "counters", "files": {name: size, SHA-256}, "sha256"}

>>> record = read_record(root / "step-00000010")       # raises Damaged unless its own SHA-256 agrees
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp import tree
from fdp.parallel.dtensors import local_shard
from fdp.storage.dcp import read_index
from fdp.types import FdpError, Flat, TrainState

FORMAT, VERSION, RECORD = "fdp-checkpoint", 2, "complete.json"
RECORD_FIELDS = {"meta", "leaves", "counters", "files"}
SEE_OLDER = (
    "fdp.storage.checkpoint.list_published(root) lists the others, newest first; fdp train takes the newest good one "
    "by itself"
)


class Damaged(FdpError):
    """The error for a checkpoint that differs from what was saved."""


class Verified(NamedTuple):
    """A checkpoint whose every byte was compared with its record, and the record."""

    path: Path
    record: dict[str, Any]

    @property
    def meta(self) -> dict[str, Any]:
        """The caller's values saved with the state."""
        return self.record["meta"]

    @property
    def step(self) -> int:
        """The number of steps of the saved state, which the checkpoint's name agrees with."""
        return self.record["counters"]["step"]


def make_record(state: TrainState, meta: Mapping[str, Any]) -> str:
    """Return the record of a state as JSON, without the files, which are written later."""
    named = named_leaves(state)
    leaves = {path: _leaf_entry(leaf.shape, leaf.dtype) for path, leaf in named.items()}
    counters = {path: int(local_shard(leaf)) for path, leaf in named.items() if is_counter(leaf.shape, leaf.dtype)}
    record = {"format": FORMAT, "version": VERSION, "meta": {**meta}, "leaves": leaves, "counters": counters}
    try:
        return json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FdpError(f"meta: expected values that JSON can hold, got {error}") from error


def read_record(path: Path) -> dict[str, Any]:
    """Read the record of a checkpoint; raise :class:`Damaged` unless it is complete and as saved."""
    what = f"{path}: expected a checkpoint of fdp"
    try:
        record = json.loads((path / RECORD).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{what}, found no {RECORD} in it; {SEE_OLDER}") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{what}, could not read its {RECORD}: {error}; {SEE_OLDER}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise Damaged(f"{what}, its {RECORD} is not a record of fdp; {SEE_OLDER}")
    if record.get("version") != VERSION:
        raise FdpError(f"{what} of version {VERSION}, got version {record.get('version')}; use the fdp that wrote it")
    if missing := sorted(RECORD_FIELDS - record.keys()):
        raise Damaged(f"{what}, its {RECORD} lacks {missing}; {SEE_OLDER}")
    if record.pop("sha256", None) != record_digest(record):
        raise Damaged(f"{path / RECORD}: is not what was saved, by its SHA-256; {SEE_OLDER}")
    return record


def record_digest(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record, which is stored in it."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def is_counter(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True for a scalar int64 leaf, such as the number of steps."""
    return tuple(shape) == () and dtype == torch.int64


def check_leaves(checked: Verified, named: Flat) -> None:
    """Raise unless the checkpoint holds exactly the leaves ``named``."""
    path, record = checked
    expected = {name: _leaf_entry(leaf.shape, leaf.dtype) for name, leaf in named.items()}
    index = {name: _leaf_entry(*entry) for name, entry in read_index(path).items()}
    empty = {name: leaf for name, leaf in record["leaves"].items() if 0 in leaf["shape"]}
    for stored in (record["leaves"], index | empty):
        if wrong := [name for name in sorted(expected | stored) if expected.get(name) != stored.get(name)]:
            leaves = [
                f"{name}: expected {_describe(expected.get(name))}, got {_describe(stored.get(name))}" for name in wrong
            ]
            more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise FdpError(
                f"{path}: {'; '.join(leaves[:4])}{more}. Load into a state made with the model, optimizer and clipping"
                " that it was saved with"
            )


def _describe(leaf: Mapping[str, Any] | None) -> str:
    return "no such leaf" if leaf is None else f"{leaf['dtype']} of shape {tuple(leaf['shape'])}"


def _leaf_entry(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}


def named_leaves(state: TrainState) -> Flat:
    """Return the state as ``{path: leaf}``, since ``torch.distributed.checkpoint`` does not look inside tuples."""
    flat = tree.flatten(state)
    for path, leaf in flat.items():
        if not isinstance(leaf, Tensor):
            raise FdpError(f"{path}: expected a tensor, got a {type(leaf).__name__}; put other values into meta")
    return flat
