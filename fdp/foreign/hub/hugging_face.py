"""Load and save models in the format of ``transformers``, from modules or from folders.

    folder -> (Model, params) -> training -> folder, which ``AutoModelForCausalLM.from_pretrained`` reads

    >>> model, params = load("models/tiny")
    >>> save("models/trained", params, source="models/tiny")

On several ranks, make the model first, then its sharding; each rank then reads its own shard of the values:

    >>> model = load_model(folder)
    >>> sharding = make_sharding(model, mesh, zero=Zero.THREE)
    >>> model, params = load(folder, sharding=sharding)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from fdp.foreign.hub.causal import causal_lm as causal_lm
from fdp.foreign.hub.classification import classifier as classifier
from fdp.foreign.hub.read_folder import empty_module, read_params
from fdp.foreign.hub.write_folder import write_folder
from fdp.foreign.leaves import params_of as params_of
from fdp.model import Model
from fdp.parallel.sharding import Sharding
from fdp.types import FdpError, Tree

CAUSAL = ("ForCausalLM", "LMHeadModel")
CLASSIFYING = ("ForSequenceClassification", "ForImageClassification")


def model_of(module: nn.Module, *, context: int | None = None, example: Tree | None = None) -> Model:
    """Return the model of a ``transformers`` module, chosen by its class name."""
    kind = type(module).__name__
    if kind.endswith(CAUSAL):
        return causal_lm(module, context=context, example=example)
    if kind.endswith(CLASSIFYING):
        return classifier(module, example=example)
    raise FdpError(
        f"{kind}: expected a model whose name ends in one of {(*CAUSAL, *CLASSIFYING)}, got another; use "
        f"from_module(module, loss=...)"
    )


def load_model(path: str | os.PathLike[str], *, context: int | None = None, example: Tree | None = None) -> Model:
    """Return the model in a folder, without its values."""
    return model_of(empty_module(Path(path)), context=context, example=example)


def load(
    path: str | os.PathLike[str],
    *,
    sharding: Sharding | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    context: int | None = None,
    example: Tree | None = None,
) -> tuple[Model, Tree]:
    """Return the model in a folder and its values: full, or as the DTensors of a ``sharding`` of the same model.

    See :func:`causal_lm` for ``context`` and ``example``. ``device`` is by default the mesh's, or the CPU.

    Guarantees:
      - a rank reads only its shards, and never holds more than them and one tensor.
    """
    module = empty_module(Path(path))
    model = model_of(module, context=context, example=example)
    if sharding is not None and set(sharding.leaves) != set(model.leaves):
        raise FdpError(f"sharding: expected one of the model in {os.fspath(path)!r}, got one with other leaves")
    return model, read_params(Path(path), module, model, sharding, dtype=dtype, device=device)


def save(
    path: str | os.PathLike[str],
    params: Tree,
    *,
    source: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a folder like ``source``, with the values of ``params``; see ``fdp.foreign.hub.write_folder``.

    ``dtype`` is by default that in which ``source`` stores each tensor; ``files`` are further text files to write, by
    name. Every rank calls it.
    """
    write_folder(Path(path), params, source=Path(source), dtype=dtype, files=files)
