"""Read a folder in the format of ``transformers``: config and weights in one or several safetensors files.

    folder = config.json + model.safetensors                                        or
             config.json + model.safetensors.index.json {weight_map: {name: file}} + the files

The module is built without memory. Each rank reads only its own window of every tensor, one tensor at a time, straight
from the files.

    >>> module = empty_module(folder)                                               # shapes, and real buffers
    >>> params = read_params(folder, module, model, sharding, dtype=torch.float32)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fdp import tree
from fdp.extras import missing_package
from fdp.foreign.hub.tensor_names import StoredSlice, locate_stored
from fdp.foreign.leaves import leaf_paths
from fdp.keys import Window
from fdp.ledger.data_key import files_digest
from fdp.model import Model
from fdp.parallel.agree import run_in_unison
from fdp.parallel.dtensors import as_dtensor
from fdp.parallel.sharding import Sharding
from fdp.storage.safetensors import FLOATS
from fdp.types import FdpError, Tree

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredTensors:
    """The tensors of a folder by stored name, each read when it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = _weight_map(folder)
        self.open: dict[str, Any] = {}

    def part(self, name: str, window: Window | None = None) -> Tensor:
        """Read a tensor, or a window of it, and nothing else. The result may be a view of the file: copy it."""
        stored = self._file(name)
        if not window:  # the full tensor, or a scalar, which cannot be sliced
            return stored.get_tensor(name)
        return stored.get_slice(name)[tuple(slice(start, start + length) for start, length in window)]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape, or of a dtype that is not floating-point."""
        values = self._file(name).get_slice(name)
        if (got := tuple(values.get_shape())) != shape:
            raise FdpError(f"{self.folder}: {name}: expected shape {shape}, as in config.json, got {got}")
        if (dtype := values.get_dtype()) not in FLOATS:
            raise FdpError(
                f"{self.folder}: {name}: expected values of a dtype among {FLOATS}, got {dtype}; quantised weights "
                f"cannot be trained"
            )

    def _file(self, name: str) -> Any:
        file = self.files[name]
        if file not in self.open:
            try:
                self.open[file] = safe_open(self.folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise FdpError(f"{self.folder / file}: expected a complete safetensors file, got {error}") from error
        return self.open[file]


def empty_module(folder: Path) -> nn.Module:
    """Return the module that ``config.json`` describes, in eval mode: parameters without memory, real buffers."""
    transformers, config = import_transformers(), read_config(folder)
    architecture = str((config.architectures or [None])[0])
    if not hasattr(transformers, architecture):
        raise FdpError(f"{folder}: expected an architecture of transformers in config.json, got {architecture!r}")
    with torch.device("meta"):
        module = getattr(transformers, architecture)._from_config(config)
    return _with_buffers(module.eval(), StoredTensors(folder))


def read_config(folder: Path) -> Any:
    """Return the configuration in a folder, as ``transformers`` reads it."""
    if not (folder / "config.json").exists():
        raise FdpError(f"{folder}: expected a folder with a config.json, got none; save a model there first")
    try:
        return import_transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise FdpError(
            f"{folder / 'config.json'}: expected the configuration of a model of transformers, as save_pretrained "
            f"writes it, got another file: {why}"
        ) from error


def folder_digest(folder: Path) -> str:
    """Return SHA-256 of the config and of the weights in a folder; all of them are read."""
    weights = sorted({folder / file for file in StoredTensors(folder).files.values()})
    index = [folder / INDEX] if (folder / INDEX).exists() else []
    return files_digest([folder / "config.json", *index, *weights])


def read_params(
    folder: Path,
    module: nn.Module,
    model: Model,
    sharding: Sharding | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tree:
    """Return the stored values of the model's leaves: full or, with ``sharding``, this rank's shards as DTensors.

    ``device`` is by default that of the mesh, or the CPU. Every rank calls it.

    Guarantees:
      - a rank holds its shards and, while converting, one shard as it is stored; it reads nothing else;
      - leaves that are missing or of another shape raise on every rank.
    """
    there = _device(sharding) if device is None else torch.device(device)

    def read() -> dict[str, Tensor]:
        stored = StoredTensors(folder)
        paths = leaf_paths(module)
        places: dict[str, dict[StoredSlice, str]] = {}
        for key, place in locate_stored(stored.files, module).items():
            if place.name in paths:
                places.setdefault(paths[place.name], {}).setdefault(place._replace(name=""), key)
        if missing := sorted(set(model.leaves) - set(places)):
            raise FdpError(f"{folder}: expected leaves {missing[:4]}, {len(missing)} in all, got no such tensors")
        flat = {}
        for path, leaf in model.leaves.items():
            window = None if sharding is None else sharding.leaves[path].window
            part = _read_leaf(stored, path, places[path], tuple(leaf.shape), window).to(there, dtype, copy=True)
            flat[path] = part if sharding is None else as_dtensor(part, path, sharding)
        return flat

    return tree.nest(run_in_unison(read, None))


def _read_leaf(
    stored: StoredTensors, path: str, places: dict[StoredSlice, str], shape: tuple[int, ...], window: Window | None
) -> Tensor:
    """Read a leaf, or a window of it, from the tensors that are stored for it; nothing else is read."""
    for place, key in places.items():
        stored.check(key, place.shape(shape))
    if (whole := places.get(StoredSlice(""))) is not None:
        return stored.part(whole, window)
    rows = sum(place.stop - place.start for place in places)
    if rows != shape[0] * shape[1]:
        raise FdpError(
            f"{stored.folder}: {path}: expected {shape[0]} experts of {shape[1]} rows, as in config.json, got {rows} "
            f"rows in all"
        )
    (first, count), (top, height), *rest = window or tuple((0, extent) for extent in shape)
    made = None
    for place, key in places.items():
        assert place.index is not None
        start, stop = max(place.start, top), min(place.stop, top + height)
        if not first <= place.index < first + count or start >= stop:
            continue
        part = stored.part(key, ((start - place.start, stop - start), *rest))
        if made is None:
            made = torch.empty(count, height, *part.shape[1:], dtype=part.dtype)
        made[place.index - first, start - top : stop - top] = part
    return torch.empty(count, height, *(length for _, length in rest)) if made is None else made


def import_transformers() -> Any:
    """Import ``transformers``, an optional dependency."""
    try:
        import transformers
    except ImportError:
        raise missing_package("transformers", purpose="to read a model folder in its format") from None
    return transformers


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        if (folder / INDEX).exists():
            return json.loads((folder / INDEX).read_text())["weight_map"]
        with safe_open(folder / WEIGHTS, framework="pt") as stored:
            return dict.fromkeys(stored.keys(), WEIGHTS)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise FdpError(
            f"{folder}: expected weights in {WEIGHTS} or in files named by {INDEX}, got {error}; save the model with "
            f"save_pretrained(folder)"
        ) from error


def _with_buffers(module: nn.Module, stored: StoredTensors) -> nn.Module:
    """Fill the buffers from the folder or, if they are not stored, by the module's own initialisation."""
    keys = {place.name: key for key, place in locate_stored(stored.files, module).items()}
    for prefix, part in module.named_modules():
        lost = {name: buffer for name, buffer in part._buffers.items() if buffer is not None and buffer.is_meta}
        made = [_initialise_buffers(_owner(module, prefix), part, lost, start) for start in (0, 1)]
        for name in lost:
            path = f"{prefix}.{name}".removeprefix(".")
            if path in keys:
                part._buffers[name] = stored.part(keys[path]).clone()
            elif not torch.equal(made[0][name], made[1][name]):  # initialisation did not write it
                raise FdpError(
                    f"{path}: expected a buffer that {type(module).__name__} initialises, got one that it does not"
                )
    return module


def _owner(module: nn.Module, prefix: str) -> nn.Module:
    """Return the innermost model that contains a part: it initialises the part."""
    names = prefix.split(".") if prefix else []
    inner = (module.get_submodule(".".join(names[:i])) for i in range(len(names), -1, -1))
    return next((part for part in inner if hasattr(part, "_init_weights")), module)


def _initialise_buffers(module: nn.Module, part: nn.Module, lost: dict[str, Tensor], start: int) -> dict[str, Tensor]:
    for name, buffer in lost.items():
        part._buffers[name] = torch.full(buffer.shape, start, dtype=buffer.dtype)
    if lost:
        with torch.no_grad():
            module._init_weights(part)  # pyright: ignore[reportCallIssue]
    return {name: part._buffers[name].clone() for name in lost}  # pyright: ignore[reportOptionalMemberAccess]


def _device(sharding: Sharding | None) -> torch.device:
    if sharding is None or sharding.mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(sharding.mesh.device_type, torch.cuda.current_device())
