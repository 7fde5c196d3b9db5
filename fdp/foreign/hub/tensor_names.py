"""Map the tensors of a folder to parameters of a module, or to slices of them.

    stored                                                        in the module
    model.layers.0.block_sparse_moe.experts.3.w1.weight           model.layers.0.mlp.experts.gate_up_proj[3, :inner]

Stored names may lack the prefix of the base model, be older than the module's, or name one expert's matrix where the
module has one tensor for all experts. ``transformers`` knows the mapping.

    >>> places = locate_stored(stored.files, module)              # {stored name: StoredSlice(name, index, start, stop)}
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from fdp.types import FdpError


class StoredSlice(NamedTuple):
    """The slice of a parameter or buffer that a stored tensor holds: all of it or, with an ``index``, rows of an
    entry.
    """

    name: str
    index: int | None = None
    start: int = 0
    stop: int = 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored tensor, given the shape of the parameter."""
        return whole if self.index is None else (self.stop - self.start, *whole[2:])

    def of(self, value: Any) -> Any:
        """Return the slice of ``value`` that is stored."""
        return value if self.index is None else value[self.index, self.start : self.stop]


def locate_stored(keys: Iterable[str], module: nn.Module) -> dict[str, StoredSlice]:
    """Return, by stored name, the slice that a tensor holds; tensors that the module does not have are left out."""
    own = {name: tuple(leaf.shape) for name, leaf in module.named_parameters(remove_duplicate=False)}
    own |= {name: tuple(buffer.shape) for name, buffer in module.named_buffers()}
    found = {key: StoredSlice(key) for key in keys if key in own}
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
            found[key] = StoredSlice(name)
            continue
        converter = next(entry for entry in converters if pattern in entry.source_patterns)
        renamed = loading.apply_renamings(key, renamings)
        found[key] = _part(key, name, own[name], renamed, pattern, converter)
    return found


def _part(key: str, name: str, shape: tuple[int, ...], renamed: str, pattern: str, converter: Any) -> StoredSlice:
    """Return the slice of one expert's matrix in the tensor of all experts (stacked, or concatenated and stacked)."""
    steps = [(type(step).__name__, step.dim) for step in converter.operations if hasattr(step, "dim")]
    sources = converter.source_patterns
    stacked = steps == [("MergeModulelist", 0)] and len(sources) == 1
    above = steps == [("MergeModulelist", 0), ("Concatenate", 1)] and len(shape) == 3 and shape[1] % len(sources) == 0
    number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), renamed)
    if len(steps) != len(converter.operations) or not (stacked or above) or number is None or not number.groups():
        raise FdpError(
            f"{key}: expected a tensor of the module, or one expert's slice of one, got one of several tensors that "
            f"are combined into {name}; load the model with transformers and save it with save_pretrained(..., "
            f"save_original_format=False)"
        )
    rows, i = shape[1] // len(sources), sources.index(pattern)
    return StoredSlice(name, int(number.group(1)), i * rows, (i + 1) * rows)
