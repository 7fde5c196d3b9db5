"""Rotary tables that look at the data, fixed by what is public: the length of a row.

    longrope   frequencies = long if max over the microbatch of positions + 1 > original length else short
    dynamic    frequencies = f(max over the microbatch of positions + 1)       and they stay until a short microbatch

Left to themselves these take the longest position among *all* samples at hand, which is someone else's where documents
are packed, and then one sample's loss depends on its neighbours: no bound on its gradient would hold. Every row of a
run has the same number of tokens, so the table is the one for a row that is filled to its end, whoever is in it. It is
the table that the module itself takes for rows without documents.

    >>> module = with_fixed_tables(module, length=512)               # a copy; the same module if there is no such table
    >>> call = FixedLength(call, tables_of(module), length=512)      # refuses rows for which the table would be another
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fdp.foreign.placeholders import shallow, with_parts
from fdp.foreign.stack.parts import Caller
from fdp.models.language import window_inputs_of
from fdp.types import FdpError, Tree


class Table(NamedTuple):
    """A part whose frequencies depend on the longest position: its name, its kind, and up to which length it is one."""

    part: str
    kind: str
    limit: int


def tables_of(module: nn.Module) -> tuple[Table, ...]:
    """The tables in a module of ``transformers`` that look at positions."""
    return tuple(
        Table(name, kind, _limit(part, layer))
        for name, part in module.named_modules()
        for layer, kind in _kinds(part).items()
        if _looks(kind)
    )


def with_fixed_tables(module: nn.Module, *, length: int) -> nn.Module:
    """A copy of ``module`` whose tables are, for good, those it takes for ``length`` positions.

    Guarantees:
      - the module is not changed, and what it was called with before makes no difference.
    """
    parts = {name: _fixed(part, length) for name, part in module.named_modules() if _looks(*_kinds(part).values())}
    return with_parts(module, parts) if parts else module


@dataclass(frozen=True)
class FixedLength:
    """``call``, of rows for which the ``tables`` are those of ``length`` positions, ``prefix`` ones among them."""

    call: Caller
    tables: tuple[Table, ...]
    length: int
    prefix: int = 0

    def __call__(self, module: Any, data: Tree) -> Any:
        got = self.prefix + window_inputs_of(data).shape[-1]
        for table in self.tables:
            if got != self.length and max(got, self.length) > table.limit:
                raise FdpError(
                    f"{table.part}: expected rows of {self.length - self.prefix} tokens, for which the rotary table "
                    f"(rope_type {table.kind!r}) was made, got rows of {got - self.prefix}; make the model with "
                    f"context={got - self.prefix}, or with an example of that length"
                )
        return self.call(module, data)


def _kinds(part: nn.Module) -> dict[str | None, str]:
    """Kinds of rotary tables of a part, by the kind of layer they are for; None: all layers."""
    kinds = getattr(part, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {None: kinds} if isinstance(kinds, str) else {}


def _looks(*kinds: str) -> bool:
    return any(kind == "longrope" or "dynamic" in kind for kind in kinds)


def _limit(part: Any, layer: str | None) -> int:
    """Up to how many positions a table is the same."""
    if "dynamic" in _kinds(part)[layer]:
        return int(part.original_max_seq_len)
    settings = part.config.rope_parameters
    return int((settings if layer is None else settings[layer])["original_max_position_embeddings"])


def _fixed(part: Any, length: int) -> nn.Module:
    """The part as it was made, called with ``length`` positions, and from then on one that looks at nothing."""
    new: Any = shallow(part)
    new.__dict__["_buffers"] = dict(part._buffers)
    new.__dict__["_non_persistent_buffers_set"] = set(part._non_persistent_buffers_set)
    new.max_seq_len_cached = new.original_max_seq_len
    for layer, kind in _kinds(part).items():
        prefix = "" if layer is None else f"{layer}_"
        first = getattr(part, f"{prefix}original_inv_freq")
        new._buffers[f"{prefix}inv_freq"] = first
        new.__dict__.pop(f"{prefix}long_inv_freq", None)
        if layer is not None:
            new.__dict__.pop(f"{prefix}max_seq_len_cached", None)
        if _looks(kind):
            which = {} if layer is None else {"layer_type": layer}
            new(torch.zeros(1, device=first.device), torch.arange(length, device=first.device)[None], **which)
    new.rope_type = "default" if isinstance(part.rope_type, str) else dict.fromkeys(part.rope_type, "default")
    return new
