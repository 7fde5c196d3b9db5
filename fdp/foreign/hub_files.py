"""Folders in the format of ``transformers``: config, tokenizer, and weights in one or several safetensors files.

    folder = config.json + model.safetensors                                        or
             config.json + model.safetensors.index.json {weight_map: {name: file}} + the files

The module is built without memory. Each rank reads its own window of every tensor, one after the other, straight from
the files.

    >>> module = empty_module(folder)                                               # shapes, and real buffers
    >>> params = read_params(folder, module, model, sharding, dtype=torch.float32)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fdp import tree
from fdp.foreign.stack import leaf_paths
from fdp.model import Model
from fdp.safetensors_io import FLOATS, Window
from fdp.sharding import Sharding, as_dtensor
from fdp.types import FdpError, Tree
from fdp.unison import in_unison

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Stored:
    """The tensors of a folder by the names they are stored under, each read when it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = _weight_map(folder)
        self.open: dict[str, Any] = {}

    def part(self, name: str, window: Window | None = None) -> Tensor:
        """A tensor, or a window of it; nothing else is read. It may be a view of the file: copy it."""
        stored = self._file(name)
        if not window:  # the whole of it, or a scalar, which has nothing to slice
            return stored.get_tensor(name)
        return stored.get_slice(name)[tuple(slice(start, start + length) for start, length in window)]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape, or one that is no floats."""
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
                raise FdpError(f"{self.folder / file}: expected a whole file of safetensors, got {error}") from error
        return self.open[file]


def empty_module(folder: Path) -> nn.Module:
    """The module that ``config.json`` describes, in eval mode: parameters without memory, buffers with their values."""
    transformers = import_transformers()
    if not (folder / "config.json").exists():
        raise FdpError(f"{folder}: expected a folder with a config.json, got none; save a model there first")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    architecture = str((config.architectures or [None])[0])
    if not hasattr(transformers, architecture):
        raise FdpError(f"{folder}: expected an architecture of transformers in config.json, got {architecture!r}")
    with torch.device("meta"):
        module = getattr(transformers, architecture)._from_config(config)
    return _with_buffers(module.eval(), Stored(folder))


def read_params(
    folder: Path,
    module: nn.Module,
    model: Model,
    sharding: Sharding | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tree:
    """The stored values of the model's leaves: whole, or with ``sharding`` this rank's parts, as DTensors.

    ``device`` is by default that of the mesh, or the CPU. Every rank calls it.

    Guarantees:
      - a rank holds its parts and, while it is converted, one part as it is stored; it reads nothing else;
      - leaves that are missing or of another shape raise on every rank.
    """
    there = _device(sharding) if device is None else torch.device(device)

    def read() -> dict[str, Tensor]:
        stored = Stored(folder)
        paths = leaf_paths(module)
        keys: dict[str, str] = {}
        for key, name in stored_names(stored.files, module).items():
            if name in paths:
                keys.setdefault(paths[name], key)
        if missing := sorted(set(model.leaves) - set(keys)):
            raise FdpError(f"{folder}: expected leaves {missing[:4]}, {len(missing)} in all, got no such tensors")
        flat = {}
        for path, leaf in model.leaves.items():
            stored.check(keys[path], tuple(leaf.shape))
            window = None if sharding is None else sharding.leaves[path].window
            part = stored.part(keys[path], window).to(there, dtype, copy=True)
            flat[path] = part if sharding is None else as_dtensor(part, path, sharding)
        return flat

    return tree.nest(in_unison(read, None))


def stored_names(keys: Iterable[str], module: nn.Module) -> dict[str, str]:
    """By the name of a stored tensor, that of the parameter or buffer it is for; those for none are left out.

    Names may be stored without the prefix of the base model, or be older than the module's: ``transformers`` knows.
    """
    own = set(dict(module.named_parameters(remove_duplicate=False))) | set(dict(module.named_buffers()))
    found = {key: key for key in keys if key in own}
    rest = [key for key in keys if key not in own]
    if not rest:
        return found
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = get_model_conversion_mapping(module)  # pyright: ignore[reportArgumentType]
    renamings = [entry for entry in known if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in known if isinstance(entry, loading.WeightConverter)]
    state: Any = dict.fromkeys(own, True)
    for key in rest:
        prefix: Any = module.base_model_prefix
        name, converter = loading.rename_source_key(key, renamings, converters, prefix, state)
        if converter is not None:
            raise FdpError(
                f"{key}: expected a tensor that is one of the module's, got one of several that make up {name}; load "
                f"the model with transformers and save it with save_pretrained(..., save_original_format=False)"
            )
        if name in own:
            found[key] = name
    return found


def import_transformers() -> Any:
    """``transformers``, which fdp can do without."""
    try:
        import transformers
    except ImportError:
        raise FdpError("a folder in the format of transformers is read by it: pip install transformers") from None
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


def _with_buffers(module: nn.Module, stored: Stored) -> nn.Module:
    """Buffers as they are stored, else as the module's own initialisation makes them."""
    keys = {name: key for key, name in stored_names(stored.files, module).items()}
    for prefix, part in module.named_modules():
        lost = {name: buffer for name, buffer in part._buffers.items() if buffer is not None and buffer.is_meta}
        made = [_initialised(module, part, lost, start) for start in (0, 1)]
        for name in lost:
            path = f"{prefix}.{name}".removeprefix(".")
            if path in keys:
                part._buffers[name] = stored.part(keys[path]).clone()
            elif not torch.equal(made[0][name], made[1][name]):  # what it held before shows: it was not written
                raise FdpError(
                    f"{path}: expected a buffer that {type(module).__name__} initialises, got one it does not"
                )
    return module


def _initialised(module: nn.Module, part: nn.Module, lost: dict[str, Tensor], start: int) -> dict[str, Tensor]:
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
