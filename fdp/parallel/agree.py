"""Exchanges between ranks outside the step: small Python values, and errors that every rank must hear of.

Reading and writing files can fail on one rank alone. The other ranks must learn of it, or they wait forever. So an
action that can fail runs in unison: an error on any rank is raised on every rank.

    >>> run_in_unison(lambda: check(path), group)          # raises on every rank, or on none
    >>> gather_values(digest, group)                       # [digest of rank 0, digest of rank 1, ...]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fdp.types import FdpError

T = TypeVar("T")

PRIVATE_SETTINGS = (
    "number of samples",
    "content of the data",
    "content of the public data",
    "content of the held-out data",
)
"""Settings that the ranks, and the attempts of a run, must agree on but that no error may show."""


def is_distributed() -> bool:
    """Return True if there is a process group."""
    return dist.is_available() and dist.is_initialized()


def rank_in(group: ProcessGroup | None) -> int:
    """Return this process's rank in ``group`` (None: the default group), or 0 without a process group."""
    return dist.get_rank(group) if is_distributed() else 0


def group_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks in ``group`` (None: the default group), or 1 without a process group."""
    return dist.get_world_size(group) if is_distributed() else 1


def gather_values(value: T, group: ProcessGroup | None) -> list[T]:
    """Return the value of every rank, in rank order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def run_in_unison(act: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run ``act()`` on every rank and return its value.

    Guarantees:
      - if it fails on any rank, every rank raises an :class:`FdpError`, with the class and message of the first that
        failed.
    """
    if not is_distributed():
        return act()
    result: Any = None
    problem: FdpError | None = None
    try:
        result = act()
    except FdpError as error:
        problem = error
    except Exception as error:  # any other error too: the other ranks wait to hear of it
        problem = FdpError(f"{type(error).__name__}: {error}")
        problem.__cause__ = error
    for rank, told in enumerate(gather_values(None if problem is None else (type(problem), str(problem)), group)):
        if told is not None:
            kind, words = told
            shared = problem if problem and rank == rank_in(group) else kind(f"rank {rank}: {words}")
            shared.everywhere = True  # so that only one rank needs to print it
            raise shared
    return result


def check_agreement(settings: Mapping[str, Any]) -> None:
    """Refuse ranks that were started with different settings; name those that differ, without private content."""
    own = rank_in(None)
    for other, theirs in enumerate(gather_values(dict(settings), None)):
        differing = {name for name in settings if theirs.get(name) != settings[name]} | (set(theirs) - set(settings))
        if differing:
            said = ", ".join(
                f"another {name} on rank {own} than on rank {other}"
                if name in PRIVATE_SETTINGS
                else f"{name} {settings.get(name)!r} on rank {own}, {theirs.get(name)!r} on rank {other}"
                for name in sorted(differing)
            )
            error = FdpError(f"ranks: expected the same settings and data everywhere, got {said}")
            error.everywhere = True  # a rank that differs from another raises it, and so does the other
            raise error
