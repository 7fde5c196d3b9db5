"""Leaves by the names that people type: patterns of paths, or the bare names of modules.

--lora-targets '*.attn.*'                a pattern: * stands for anything
--lora-targets q_proj,v_proj             names: every matrix with that name in its path
--lora-targets all-linear                every matrix of the repeated blocks, as without the option

>>> lora_targets(model, "q_proj,v_proj")  # ("model.layers.0.self_attn.q_proj.weight", ...)
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from fdp import tree
from fdp.model import Model
from fdp.types import FdpError

EVERYTHING = "all-linear"
"""The name that peft gives to every linear layer except the head."""


def lora_targets(model: Model, words: str | None) -> tuple[str, ...]:
    """Return the matrices that ``--lora-targets`` names, by default those of the repeated blocks."""
    if words is None or words.strip() in ("", EVERYTHING):
        return _matrices_of_blocks(model)
    matrices = tuple(path for path, leaf in model.leaves.items() if len(leaf.shape) == 2)
    return named_leaves(model, "--lora-targets", words, matrices)


def named_leaves(model: Model, flag: str, words: str, leaves: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns in ``words`` unchanged, and a bare name as the ``leaves`` that have it in their path.

    A word that fits no leaf is an error that lists what there is.
    """
    found: list[str] = []
    for word in (word.strip() for word in words.split(",")):
        if fnmatch.filter(model.leaves, word):
            found.append(word)
        elif with_name := [path for path in leaves if word in path.split(".")]:
            found += with_name
        elif word:
            raise FdpError(
                f"{flag}: expected a name or a pattern of leaves of {model.name}, got {word!r}, which fits none; there "
                f"are {', '.join(_patterns(leaves))}"
            )
    if not found:
        raise FdpError(f"{flag}: expected a name or a pattern of leaves of {model.name}, got none")
    return tuple(found)


def _patterns(paths: Sequence[str]) -> list[str]:
    """Return the paths with their layer's number as ``*``, each once and in order."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", path) for path in paths))


def _matrices_of_blocks(model: Model) -> tuple[str, ...]:
    """Return the matrices of the repeated blocks: no embedding and no head.

    In a model of one block, return the matrices without a vocabulary dimension.
    """
    if len(model.blocks) == 1:
        matrices = (path for path, leaf in model.leaves.items() if len(leaf.shape) == 2)
        return tuple(sorted(path for path in matrices if model.vocab_size not in model.leaves[path].shape))
    inner = {path for block in model.blocks[1:-1] for path in tree.leaves(block.params)}
    outer = {path for block in (model.blocks[0], model.blocks[-1]) for path in tree.leaves(block.params)}
    return tuple(sorted(path for path in inner - outer if len(model.leaves[path].shape) == 2))
