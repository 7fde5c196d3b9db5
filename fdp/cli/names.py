"""Names on the command line, and the values they stand for.

>>> choose("--method", "ghost", by_value(Method))   # Method.GHOST
>>> choose("--dtype", "float3", DTYPES)             # FdpError: ... Did you mean 'float32'?
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeVar

import torch

from fdp.cli.other_names import NO_FLOAT16
from fdp.parallel.mesh import AXES
from fdp.parallel.offload import Offload
from fdp.types import FdpError

T = TypeVar("T")
Member = TypeVar("Member", bound=Enum)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def nearest(name: str, known: Iterable[str], *, cutoff: float) -> str | None:
    """Return the name closest to ``name`` that shares at least ``cutoff`` of its letters, whatever their case."""
    folded = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else None


def choose(flag: str, name: str, known: Mapping[str, T]) -> T:
    """Return ``known[name]``, or raise an error that suggests the nearest name and lists all."""
    if name in known:
        return known[name]
    near = nearest(name, known, cutoff=0.5)
    hint = "" if near is None else f" Did you mean {near!r}?"
    raise FdpError(f"{flag}: expected one of {', '.join(known)}; got {name!r}.{hint}")


def choose_dtype(name: str) -> torch.dtype:
    """Return the dtype that ``--dtype`` names; say why float16 is not among them."""
    if name in ("float16", "fp16", "half"):
        raise FdpError(f"--dtype: expected one of {', '.join(DTYPES)}; got {name!r}. Use bfloat16: {NO_FLOAT16}")
    return choose("--dtype", name, DTYPES)


def by_value(members: type[Member]) -> dict[str, Member]:
    """Return the members of an Enum by their values as text."""
    return {str(member.value): member for member in members}


def parse_mesh(text: str) -> dict[str, int]:
    """Return ``shard=4,tensor=2`` as sizes by axis."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not size.isdigit() or name in axes:
            raise FdpError(f"--mesh: expected axes with sizes, such as shard=4 or replicate=2,shard=4, got {text!r}")
        choose("--mesh", name, dict.fromkeys(AXES))
        axes[name] = int(size)
    return axes


def parse_offload(text: str) -> Offload:
    """Return ``params,optimizer`` as what is kept on the CPU; ``none`` and ``all`` stand alone."""
    if text in ("none", "all"):
        return Offload(*[text == "all"] * 3)
    parts = {part.strip(): True for part in text.split(",")}
    for part in parts:
        choose("--offload", part, dict.fromkeys(("none", "all", *Offload._fields)))
    if {"none", "all"} & set(parts):
        raise FdpError(
            f"--offload: expected none or all alone, or a list of {', '.join(Offload._fields)}, got {text!r}"
        )
    return Offload(**parts)
