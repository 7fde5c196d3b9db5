"""Write trained leaves as a folder in the format of ``transformers``, with the names and files of the source folder.

    new folder = old folder, every stored tensor that is a leaf replaced by the leaf's value

Everything else is copied: tensors that the loss does not use, buffers, config, tokenizer. Whoever can read the old
folder can read the new one: ``AutoModelForCausalLM.from_pretrained(path)``.

    >>> write_folder(path, params, source=folder)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fdp import tree
from fdp.foreign.hub.read_folder import INDEX, StoredTensors, empty_module
from fdp.foreign.hub.tensor_names import StoredSlice, locate_stored
from fdp.foreign.leaves import leaf_paths
from fdp.parallel.agree import rank_in, run_in_unison
from fdp.parallel.dtensors import full_tensor
from fdp.storage.private_files import disk_errors, sync_folder
from fdp.types import FdpError, Flat, Tree

NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".gguf", ".onnx")
"""Suffixes of weight files, which are not copied: the source's weights would contradict the new ones."""


def write_folder(
    path: Path,
    params: Tree,
    *,
    source: Path,
    dtype: torch.dtype | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write ``params`` as ``source`` stores them; ``dtype`` is by default the stored one. Every rank calls it.

    ``files`` are further text files to write, by name; they replace the source's files of the same name.

    Guarantees:
      - ``path`` appears complete, by one rename; an existing one is refused;
      - leaves that the source does not store raise on every rank, before anything is written;
      - full tensors are gathered one at a time; rank 0 holds those of one file until it is written.
    """
    flat, first = tree.flatten(params), rank_in(None) == 0
    partial = path.with_name(f".{path.name}.partial")
    stored, keys = run_in_unison(lambda: _prepare(path, partial, flat, source, first), None)
    for file in dict.fromkeys(stored.files.values()):
        values: Flat = {}
        gathered: Flat = {}  # leaves of which the file stores several slices
        for key in (key for key, where in stored.files.items() if where == file):
            name, place = keys.get(key, ("", StoredSlice("")))
            leaf = flat.get(name)
            value = gathered[name] if name in gathered else None if leaf is None else full_tensor(leaf)
            if value is not None and place.index is not None:
                gathered[name] = value
            if first:
                old = stored.part(key)
                as_stored = dtype if dtype is not None and old.is_floating_point() else old.dtype
                values[key] = old if value is None else place.of(value.detach()).to("cpu", as_stored).contiguous()
            value = leaf = None
        run_in_unison(lambda: _write(partial / file, values) if first else None, None)  # noqa: B023
    run_in_unison(lambda: _publish(path, partial, stored, dtype, files or {}) if first else None, None)


def _prepare(
    path: Path, partial: Path, flat: Flat, source: Path, first: bool
) -> tuple[StoredTensors, dict[str, tuple[str, StoredSlice]]]:
    """Prepare the folder; return the stored tensors, and by stored name the leaf and the slice of it that is stored."""
    if path.exists():
        raise FdpError(f"{path}: expected no folder of this name, got an existing one; give another name")
    stored, module = StoredTensors(source), empty_module(source)
    paths = leaf_paths(module)
    places = locate_stored(stored.files, module)
    keys = {key: (paths[place.name], place) for key, place in places.items() if place.name in paths}
    if unknown := sorted(set(flat) - {leaf for leaf, _ in keys.values()}):
        raise FdpError(
            f"{source}: expected to hold the leaves to save, got none of {unknown[:4]}; give the folder they came from"
        )
    for key, (leaf, place) in keys.items():
        if leaf in flat:
            stored.check(key, place.shape(tuple(flat[leaf].shape)))
    if first:
        with disk_errors(path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for file in source.iterdir():
                if file.is_file() and file.suffix not in NOT_COPIED and file.name != INDEX:
                    shutil.copy(file, partial / file.name)
    return stored, keys


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    with disk_errors(file):
        save_file(tensors, file, metadata={"format": "pt"})


def _publish(
    path: Path, partial: Path, stored: StoredTensors, dtype: torch.dtype | None, files: Mapping[str, str]
) -> None:
    with disk_errors(path):
        for name, text in files.items():
            (partial / name).write_text(text)
        if (stored.folder / INDEX).exists():
            index = json.loads((stored.folder / INDEX).read_text())
            parts = {partial / file for file in stored.files.values()}
            index.setdefault("metadata", {})["total_size"] = sum(part.stat().st_size for part in parts)
            (partial / INDEX).write_text(json.dumps(index, indent=2))
        if dtype is not None:
            config = json.loads((partial / "config.json").read_text())
            config["dtype"] = str(dtype).removeprefix("torch.")
            (partial / "config.json").write_text(json.dumps(config, indent=2))
        partial.rename(path)
        sync_folder(path.parent)
