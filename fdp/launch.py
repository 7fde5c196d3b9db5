"""The processes of one run: what ``torchrun`` started, joined into one group that starts and ends together.

    torchrun --nproc-per-node 4 -m fdp train --mesh shard=4

NCCL connects GPUs, gloo CPUs. When a rank dies, torchrun stops the others within seconds; a rank that hangs without
dying is given up after ``timeout`` seconds of waiting for it.

    >>> with joined("cpu", timeout=600): mesh = make_mesh({"shard": 4}, device_type="cpu")
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fdp.types import FdpError
from fdp.unison import everyones

PRIVATE = ("number of samples", "content of the data", "content of the public data")
"""What ranks, and the attempts of a run, must agree on, and what no error may show."""


class Peer(NamedTuple):
    """Where a rank runs."""

    host: str
    pid: int


def world_size() -> int:
    """How many processes were started together: by torchrun's word, 1 if there is none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is."""
    return int(os.environ.get("RANK", "0"))


def started() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def device_type(name: str) -> str:
    """``auto``, ``cpu`` or ``cuda`` as a kind of device."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


@contextmanager
def joined(device_type: str, *, timeout: float) -> Iterator[None]:
    """All processes as one group, for as long as the block lasts; on GPUs, each with its own.

    An error that comes from a lost connection is raised as one that names the ranks that are gone, if they ran here.
    """
    if not 0 < timeout < math.inf:
        raise FdpError(f"timeout: expected a positive number of seconds, got {timeout}; 600 is the default")
    if device_type == "cuda":
        here, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if here >= found:
            raise FdpError(f"ranks: expected a GPU for each process on this machine, found {found}; use --device cpu")
        torch.cuda.set_device(here)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    peers = everyones(Peer(socket.gethostname(), os.getpid()), None)
    try:
        yield
    except RuntimeError as error:
        if gone := _gone(peers, patience=3.0):
            raise LostRank(
                f"rank {', '.join(map(str, gone))} of {len(peers)} stopped, and rank {rank()} with it; start the same "
                f"command again to resume from the last checkpoint, if it saves any"
            ) from error
        raise
    finally:
        dist.destroy_process_group()


class LostRank(RuntimeError):
    """Another process of the run is gone."""


def check_agreement(settings: Mapping[str, Any]) -> None:
    """Refuse ranks that were started with different settings, naming the first that differs and how."""
    for other, theirs in enumerate(everyones(dict(settings), None)):
        differing = {name for name in settings if theirs.get(name) != settings[name]} | (set(theirs) - set(settings))
        if differing:
            said = ", ".join(
                f"another {name} on rank {rank()} than on rank {other}"
                if name in PRIVATE
                else f"{name} {settings.get(name)!r} on rank {rank()}, {theirs.get(name)!r} on rank {other}"
                for name in sorted(differing)
            )
            error = FdpError(f"ranks: expected the same settings and data everywhere, got {said}")
            error.everywhere = True  # whoever differs from one is differed from
            raise error


def _gone(peers: list[Peer], *, patience: float) -> list[int]:
    """The ranks of this machine whose process has ended. A killed process takes a moment to be seen as such."""
    deadline = time.monotonic() + patience
    while True:
        here = [(i, peer) for i, peer in enumerate(peers) if peer.host == socket.gethostname()]
        gone = [i for i, peer in here if not _alive(peer.pid)]
        if gone or time.monotonic() > deadline:
            return gone
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # ended, and not yet waited for by its parent
