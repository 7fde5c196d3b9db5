"""Write a trained module: in the format of ``transformers`` if it is one of its modules, else as one safetensors file.

folder/config.json, model.safetensors       as save_pretrained writes them (adapters of peft alone)
folder/model.safetensors                    any other module: its state_dict, buffers included
folder/fdp_privacy.json                     what was promised, for whoever trains it again

>>> save_module(module, folder, guarantees=[guarantee])
>>> safetensors.torch.load_model(module, folder / "model.safetensors")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from torch import nn

from fdp.parallel.agree import rank_in, run_in_unison
from fdp.privacy.guarantee import MARKER, Guarantee, marker_text, read_marker
from fdp.privacy.several_runs import once_each
from fdp.run.labelled_batches import is_transformers
from fdp.run.trained_runs import promises_about
from fdp.storage.private_files import disk_errors
from fdp.storage.safetensors import export_safetensors
from fdp.types import FdpError, Tree


def save_module(module: nn.Module, folder: str | os.PathLike[str], *, guarantees: Sequence[Guarantee]) -> Path:
    """Write the module as it is, and the marker; every rank calls it, the first one writes."""

    def write(path: Path) -> None:
        if is_transformers(module):
            module.save_pretrained(path)  # type: ignore[operator]
        else:
            save_model(module, str(path / "model.safetensors"))

    return _write(Path(folder), write, guarantees)


def save_params(params: Tree, folder: str | os.PathLike[str], *, guarantees: Sequence[Guarantee]) -> Path:
    """Write the parameters of a model of fdp, and the marker; every rank calls it."""
    path = _write(Path(folder), lambda path: None, guarantees)
    export_safetensors(params, path / "model.safetensors")
    return path


def earlier_guarantees(module: Any) -> tuple[Guarantee, ...]:
    """Return the guarantees of the runs that trained a module, as far as they are known.

    Those of this process are remembered (:mod:`fdp.run.trained_runs`). Those of others are read from the folder that a
    module of transformers was loaded from; an adapter of peft does not tell its folder.
    """
    name = getattr(getattr(module, "config", None), "_name_or_path", None)
    found = read_marker(Path(name)) if isinstance(name, str) and name and Path(name).is_dir() else ()
    return once_each([*found, *(promises_about(module) if isinstance(module, nn.Module) else ())])


def _write(folder: Path, write: Any, guarantees: Sequence[Guarantee]) -> Path:
    run_in_unison(lambda: _create(folder) if rank_in(None) == 0 else None, None)
    if rank_in(None) == 0:
        with disk_errors(folder):
            write(folder)
            (folder / MARKER).write_text(marker_text(guarantees))
    return folder


def _create(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FdpError(f"{folder}: expected a new or empty folder to save to, got one in use; give another name")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
