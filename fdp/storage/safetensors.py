"""Export and import of parameters as one ``model.safetensors``, from and to any mesh.

    8 bytes: length of the header | header: JSON {path: dtype, shape, (start, end)} | float32 values, leaf after leaf

https://github.com/huggingface/safetensors. The header depends on shapes only, so leaves are written one at a time: each
is gathered on the first rank, written and freed. When reading, each rank reads its own shard of every leaf.

    >>> export_safetensors(params, Path("model.safetensors"))
    >>> params = import_safetensors(Path("model.safetensors"), like=params)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed import ProcessGroup

from fdp import tree
from fdp.keys import Window
from fdp.parallel.agree import gather_values, rank_in, run_in_unison
from fdp.parallel.dtensors import local_shard, shard_like, shard_window
from fdp.storage.private_files import disk_errors, sync_folder
from fdp.types import FdpError, Flat, ShardWindow, Tree

FLOATS = ("F64", "F32", "F16", "BF16")


def export_safetensors(params: Tree, file: Path, *, group: ProcessGroup | None = None) -> None:
    """Write every leaf in float32, named by its path; every rank calls it.

    Guarantees:
      - ``file`` appears complete, by one rename; an existing file is refused;
      - at most one full leaf is in memory, in the host memory of the first rank only.
    """
    flat, first = tree.flatten(params), rank_in(group) == 0
    partial = file.with_name(f".{file.name}.partial")
    run_in_unison(lambda: _begin(file, partial, flat) if first else None, group)
    held = gather_values({path: shard_window(leaf) for path, leaf in flat.items()}, group)
    problem: OSError | None = None
    for path, leaf in flat.items():
        full = _gather_leaf(leaf, [windows[path] for windows in held], group)
        if full is not None and problem is None:
            # The other ranks keep sending after an error here: receive everything first, then report it.
            try:
                with partial.open("ab") as out:
                    out.write(full.numpy().data)
            except OSError as error:
                problem = error
    run_in_unison(lambda: _publish(file, partial, problem) if first else None, group)


def import_safetensors(file: Path, like: Tree, *, group: ProcessGroup | None = None) -> Tree:
    """Load the leaves of ``file`` in the structure, placements, devices and dtypes of ``like``; every rank calls it.

    Guarantees:
      - each rank reads its own shard of every leaf and no more;
      - leaves that are missing, unknown or of another shape raise on every rank.
    """
    return tree.unflatten(like, run_in_unison(lambda: _read(file, tree.flatten(like)), group))


def _begin(file: Path, partial: Path, flat: Flat) -> None:
    _refuse_existing(file)
    entries, end = {}, 0
    for path, leaf in flat.items():
        start, end = end, end + 4 * leaf.numel()
        entries[path] = {"dtype": "F32", "shape": list(leaf.shape), "data_offsets": [start, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    header += b" " * (-len(header) % 8)  # values begin at a multiple of 8
    with disk_errors(file):
        partial.write_bytes(len(header).to_bytes(8, "little") + header)


def _publish(file: Path, partial: Path, problem: OSError | None) -> None:
    with disk_errors(file):
        if problem is not None:
            partial.unlink(missing_ok=True)
            raise problem
        with partial.open("rb") as done:
            os.fsync(done.fileno())
        _refuse_existing(file)
        partial.rename(file)
        sync_folder(file.parent)


def _refuse_existing(file: Path) -> None:
    if file.exists():
        raise FdpError(f"{file}: expected no file of this name, got one; give another name")


def _gather_leaf(leaf: Tensor, shard_windows: list[ShardWindow], group: ProcessGroup | None) -> Tensor | None:
    """Return the full leaf on the first rank, None on the others. Of ranks with the same shard, the first sends it."""
    rank = rank_in(group)
    senders: dict[Window, int] = {}
    for sender, held in enumerate(shard_windows):
        if all(length for _, length in held.window):
            senders.setdefault(held.window, sender)
    if rank > 0:
        if senders.get(shard_windows[rank].window) == rank:
            dist.send(local_shard(leaf).float().to(_wire(group)).contiguous(), group=group, group_dst=0)
        return None
    full = torch.empty(leaf.shape)
    for window, sender in senders.items():
        if sender == 0:
            full[_slices(window)] = local_shard(leaf).float().cpu()
        else:
            part = torch.empty([length for _, length in window], device=_wire(group))
            dist.recv(part, group=group, group_src=sender)
            full[_slices(window)] = part.cpu()
    return full


def _wire(group: ProcessGroup | None) -> torch.device:
    """Return the device from which the group can send tensors: NCCL cannot send host memory."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _slices(window: Window) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in window)


def _read(file: Path, like: Flat) -> Flat:
    try:
        with safe_open(file, framework="pt") as stored:
            names = set(stored.keys())
            if missing := sorted(like.keys() - names):
                raise FdpError(f"{file}: expected leaves {missing[:4]}, {len(missing)} in all, got no such leaves")
            if extra := sorted(names - like.keys()):
                raise FdpError(f"{file}: expected the leaves of the model only, got also {extra[:4]}")
            return {path: _read_leaf(f"{file}: {path}", stored, path, leaf) for path, leaf in like.items()}
    except (OSError, SafetensorError) as error:
        raise FdpError(f"{file}: expected a complete safetensors file, got {error}") from error


def _read_leaf(where: str, stored: Any, path: str, leaf: Tensor) -> Tensor:
    shape, window = shard_window(leaf)
    values = stored.get_slice(path)
    if (got := tuple(values.get_shape())) != shape:
        raise FdpError(f"{where}: expected shape {shape}, got {got}; give the model's own sizes")
    if values.get_dtype() not in FLOATS:
        raise FdpError(f"{where}: expected values of a dtype among {FLOATS}, got {values.get_dtype()}")
    part = torch.empty_like(local_shard(leaf))
    if part.numel():
        # Copy, since the values may be a view of the file, which could change. A scalar has nothing to slice.
        part.copy_(values[_slices(window)] if shape else stored.get_tensor(path))
    return shard_like(leaf, part)
