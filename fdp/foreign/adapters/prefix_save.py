"""Save a trained prefix as a folder that ``peft`` reads.

adapter_config.json + adapter_model.safetensors {"prompt_embeddings": (tokens, layers * 2 * heads * features)}

>>> save_prefix("runs/prefix", params, base="models/tiny")
>>> peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("models/tiny"), "runs/prefix")
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from fdp import tree
from fdp.foreign.adapters.prefix import prefix_paths
from fdp.parallel.agree import rank_in, run_in_unison
from fdp.parallel.dtensors import full_tensor
from fdp.storage.private_files import disk_errors, sync_folder
from fdp.types import FdpError, Tree


def save_prefix(
    path: str | os.PathLike[str],
    params: Tree,
    *,
    base: str | os.PathLike[str] | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write the prefix in ``params``. Every rank calls it.

    ``base`` is the location of the model it belongs to; ``files`` are further text files to write, by name.

    Guarantees:
      - ``path`` appears complete, by one rename; an existing one is refused.
    """
    folder, flat = Path(path), tree.flatten(params)
    layers = [flat[leaf] for leaf in prefix_paths(flat)]
    values = torch.stack([full_tensor(leaf) for leaf in layers]).detach().cpu()
    first = rank_in(None) == 0
    run_in_unison(lambda: _write(folder, values, base, files or {}) if first else None, None)


def _write(
    folder: Path,
    values: Float[Tensor, "layers 2 heads tokens features"],
    base: str | os.PathLike[str] | None,
    files: Mapping[str, str],
) -> None:
    if folder.exists():
        raise FdpError(f"{folder}: expected no folder of this name, got an existing one; give another name")
    layers, _, heads, tokens, features = values.shape
    config = {
        "peft_type": "PREFIX_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else os.fspath(base),
        "num_virtual_tokens": tokens,
        "num_layers": layers,
        "num_attention_heads": heads,
        "token_dim": heads * features,
        "encoder_hidden_size": heads * features,
        "num_transformer_submodules": 1,
        "prefix_projection": False,
        "inference_mode": True,
    }
    rows = values.permute(3, 0, 1, 2, 4).flatten(1).contiguous()
    partial = folder.with_name(f".{folder.name}.partial")
    with disk_errors(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, text in {"adapter_config.json": json.dumps(config, indent=2), **files}.items():
            (partial / name).write_text(text)
        save_file({"prompt_embeddings": rows}, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        partial.rename(folder)
        sync_folder(folder.parent)
