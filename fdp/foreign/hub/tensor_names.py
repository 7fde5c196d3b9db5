"""Which tensor of a folder is which parameter of a module, or which part of one.

    stored                                                        in the module
    model.layers.0.block_sparse_moe.experts.3.w1.weight           model.layers.0.mlp.experts.gate_up_proj[3, :inner]

Names may be stored without the prefix of the base model, be older than the module's, or name an expert's matrix of its
own where the module has one tensor for all experts. ``transformers`` knows which.

    >>> places = stored_places(stored.files, module)              # {stored name: Place(name, index, start, stop)}
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from fdp.types import FdpError


class Place(NamedTuple):
    """Where in a parameter or buffer a stored tensor belongs: all of it or, with an ``index``, rows of one entry."""

    name: str
    index: int | None = None
    start: int = 0
    stop: int = 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is stored, that of the whole tensor given."""
        return whole if self.index is None else (self.stop - self.start, *whole[2:])

    def of(self, value: Any) -> Any:
        """The part of ``value`` that is stored here."""
        return value if self.index is None else value[self.index, self.start : self.stop]


def stored_places(keys: Iterable[str], module: nn.Module) -> dict[str, Place]:
    """By the name of a stored tensor, the place it is for; those for none are left out."""
    own = {name: tuple(leaf.shape) for name, leaf in module.named_parameters(remove_duplicate=False)}
    own |= {name: tuple(buffer.shape) for name, buffer in module.named_buffers()}
    found = {key: Place(key) for key in keys if key in own}
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
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state)
        if name not in own:
            continue
        if pattern is None:
            found[key] = Place(name)
            continue
        converter = next(entry for entry in converters if pattern in entry.source_patterns)
        renamed = loading.apply_renamings(key, renamings)
        found[key] = _part(key, name, own[name], renamed, pattern, converter)
    return found


def _part(key: str, name: str, shape: tuple[int, ...], renamed: str, pattern: str, converter: Any) -> Place:
    """The place of an expert's matrix in the tensor of all: they are stacked, or put one above another and stacked."""
    steps = [(type(step).__name__, step.dim) for step in converter.operations if hasattr(step, "dim")]
    sources = converter.source_patterns
    stacked = steps == [("MergeModulelist", 0)] and len(sources) == 1
    above = steps == [("MergeModulelist", 0), ("Concatenate", 1)] and len(shape) == 3 and shape[1] % len(sources) == 0
    number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), renamed)
    if len(steps) != len(converter.operations) or not (stacked or above) or number is None or not number.groups():
        raise FdpError(
            f"{key}: expected a tensor that is one of the module's, or an expert's of one, got one of several that "
            f"make up {name}; load the model with transformers and save it with save_pretrained(..., "
            f"save_original_format=False)"
        )
    rows, i = shape[1] // len(sources), sources.index(pattern)
    return Place(name, int(number.group(1)), i * rows, (i + 1) * rows)
