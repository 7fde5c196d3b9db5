"""Fix rotary tables that depend on the data by what is public: the length of a row.

    longrope   frequencies = long if max over the microbatch of positions + 1 > original length else short
    dynamic    frequencies = f(max over the microbatch of positions + 1)       and they stay until a short microbatch

These tables depend on the longest position of *all* samples. With packed documents that position belongs to another
sample, so one sample's loss depends on its neighbours and no bound on its gradient holds. Every row of a run has the
same number of tokens, so the table is fixed to that of a full row, which is what the module itself uses for rows
without documents.

    >>> module = with_fixed_tables(module, length=512)               # a copy; the same module if there is no such table
    >>> call = FixedLengthCaller(call, rotary_tables(module), length=512)       # refuses rows that need another table
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fdp.foreign.placeholders import replace_submodules, shallow_copy
from fdp.foreign.stack.block_functions import Caller
from fdp.models.language import window_inputs_of
from fdp.types import FdpError, Tree


class RotaryTable(NamedTuple):
    """A part whose frequencies depend on the longest position; up to ``limit`` positions they are fixed."""

    part: str
    kind: str
    limit: int


def rotary_tables(module: nn.Module) -> tuple[RotaryTable, ...]:
    """Return the tables of a ``transformers`` module that depend on positions."""
    return tuple(
        RotaryTable(name, kind, _limit(part, layer))
        for name, part in module.named_modules()
        for layer, kind in _table_kinds(part).items()
        if _reads_positions(kind)
    )


def with_fixed_tables(module: nn.Module, *, length: int) -> nn.Module:
    """Return a copy of ``module`` whose tables are permanently those of ``length`` positions.

    Guarantees:
      - the module is not changed, and what it was called with before makes no difference.
    """
    parts = {
        name: _fix_table(part, length)
        for name, part in module.named_modules()
        if _reads_positions(*_table_kinds(part).values())
    }
    return replace_submodules(module, parts) if parts else module


@dataclass(frozen=True)
class FixedLengthCaller:
    """A caller that refuses rows whose tables would differ from those of ``length`` positions (``prefix`` included)."""

    call: Caller
    tables: tuple[RotaryTable, ...]
    length: int
    prefix: int = 0

    def __call__(self, module: Any, data: Tree) -> Any:
        got = self.prefix + window_inputs_of(data).shape[-1]
        for table in self.tables:
            if got != self.length and max(got, self.length) > table.limit:
                raise FdpError(
                    f"{table.part}: expected rows of {self.length - self.prefix} tokens, the length of the rotary "
                    f"table (rope_type {table.kind!r}), got rows of {got - self.prefix}; make the model with "
                    f"context={got - self.prefix}, or with an example of that length"
                )
        return self.call(module, data)


def _table_kinds(part: nn.Module) -> dict[str | None, str]:
    """Return the kinds of a part's rotary tables by the kind of layer they are for; None stands for all layers."""
    kinds = getattr(part, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {None: kinds} if isinstance(kinds, str) else {}


def _reads_positions(*kinds: str) -> bool:
    return any(kind == "longrope" or "dynamic" in kind for kind in kinds)


def _limit(part: Any, layer: str | None) -> int:
    """Return the number of positions up to which a table stays the same."""
    if "dynamic" in _table_kinds(part)[layer]:
        return int(part.original_max_seq_len)
    settings = part.config.rope_parameters
    return int((settings if layer is None else settings[layer])["original_max_position_embeddings"])


def _fix_table(part: Any, length: int) -> nn.Module:
    """Return the part with the table of ``length`` positions, which no longer depends on positions."""
    new: Any = shallow_copy(part)
    new.__dict__["_buffers"] = dict(part._buffers)
    new.__dict__["_non_persistent_buffers_set"] = set(part._non_persistent_buffers_set)
    new.max_seq_len_cached = new.original_max_seq_len
    for layer, kind in _table_kinds(part).items():
        prefix = "" if layer is None else f"{layer}_"
        first = getattr(part, f"{prefix}original_inv_freq")
        new._buffers[f"{prefix}inv_freq"] = first.clone()  # transformers >= 5.23 writes into it
        new.__dict__.pop(f"{prefix}long_inv_freq", None)
        if layer is not None:
            new.__dict__.pop(f"{prefix}max_seq_len_cached", None)
        if _reads_positions(kind):
            which = {} if layer is None else {"layer_type": layer}
            new(torch.zeros(1, device=first.device), torch.arange(length, device=first.device)[None], **which)
    new.rope_type = "default" if isinstance(part.rope_type, str) else dict.fromkeys(part.rope_type, "default")
    return new
