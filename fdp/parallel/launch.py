"""Launching: join the processes that ``torchrun`` started into one group, and explain lost ranks.

    torchrun --nproc-per-node 4 -m fdp train --mesh shard=4

NCCL connects GPUs, gloo connects CPUs. No rank waits longer than ``timeout`` seconds for another, neither to join nor
in a collective; the error then names the rank that is gone, silent or behind. Ranks restarted by torchrun meet again.

    >>> with join_ranks("cpu", timeout=600) as ranks: mesh = make_mesh({"shard": 4}, device_type="cpu", timeout=600)
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from fdp.parallel import heartbeat, rendezvous
from fdp.parallel.heartbeat import Beat, Heartbeat
from fdp.parallel.rendezvous import LostRank, Member
from fdp.types import FdpError

T = TypeVar("T")

TIMEOUT_S = 600.0
"""Default number of seconds to wait for a rank."""
TO_RESUME = "start the same command again to resume from the last checkpoint, if it saves any"


class Ranks(NamedTuple):
    """The joined processes of a run."""

    members: list[Member]
    heart: Heartbeat
    timeout: float


def world_size() -> int:
    """Return the number of processes that torchrun started together, or 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank that torchrun gave to this process, or 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def started_by_torchrun() -> bool:
    """Return True if torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_restart() -> bool:
    """Return True if torchrun or Slurm started this process again, after a failure or a preemption."""
    return any(
        os.environ.get(name, "0") not in ("", "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )


def device_type(name: str) -> str:
    """Return ``cpu`` or ``cuda`` for ``auto``, ``cpu`` or ``cuda``."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


@contextmanager
def join_ranks(device_type: str, *, timeout: float) -> Iterator[Ranks]:
    """Join all processes into one group for the duration of the ``with`` block; each gets its own GPU, if any.

    Guarantees:
      - a rank that does not join, or stops answering, is an error on every other rank after at most ``timeout``
        seconds of waiting and a few seconds of diagnosis;
      - entries of an earlier attempt in the store are not used.
    """
    try:
        _check_start(device_type, timeout)
    except FdpError as error:
        withdraw(str(error))
        raise
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    store = rendezvous.connect(timeout=timeout)
    name, members = rendezvous.meet(store, rank=rank(), world=world_size(), timeout=timeout)
    ranks = Ranks(members, Heartbeat(PrefixStore(name, rendezvous.reconnect()), rank=rank()), timeout)
    lost = False
    try:
        with _explain_failures(ranks, name):
            dist.init_process_group(
                backend,
                store=PrefixStore(f"{name}/groups", store),
                rank=rank(),
                world_size=world_size(),
                timeout=timedelta(seconds=timeout),
            )
            yield ranks
    except LostRank:
        lost = True
        raise
    finally:
        ranks.heart.stop()
        if dist.is_initialized() and not lost:  # with a rank missing, this could wait for it
            dist.destroy_process_group()


def withdraw(words: str) -> None:
    """Tell the other ranks that this one will not join, and why, so that they do not wait for it."""
    if started_by_torchrun() and world_size() > 1:
        with suppress(RuntimeError, NoAnswer, FdpError):
            _promptly(lambda: rendezvous.withdraw(rendezvous.connect(timeout=5), rank=rank(), words=words))


def _check_start(device_type: str, timeout: float) -> None:
    if not 0 < timeout < math.inf:
        raise FdpError(f"timeout: expected a positive number of seconds, got {timeout}; {TIMEOUT_S:g} is the default")
    if device_type == "cuda":
        here, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if here >= found:
            raise FdpError(f"ranks: expected a GPU for each process on this machine, found {found}; use --device cpu")
        torch.cuda.set_device(here)


@contextmanager
def _explain_failures(ranks: Ranks, name: str) -> Iterator[None]:
    """Turn a failed collective into an error that says which rank is gone, silent or behind."""
    try:
        yield
    except LostRank:
        raise
    except (FdpError, OSError) as error:
        _publish_error(name, error)
        if isinstance(error, FdpError) and rank() > 0:
            error.everywhere = error.everywhere or _first_left_with(name, error)
        raise
    except RuntimeError as error:
        if (words := _diagnosis(ranks, name, error)) is None:
            _publish_error(name, error)
            raise
        raise LostRank(words) from error


def _diagnosis(ranks: Ranks, name: str, error: RuntimeError) -> str | None:
    """Say which ranks caused ``error``; None if all are well and the error is this rank's own."""
    members, here = ranks.members, socket.gethostname()
    gone = [i for i, member in enumerate(members) if member.host == here and not _alive(member.pid)]
    keeper = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and 0 in gone
    try:
        if not keeper and (left := _promptly(lambda: _left(name, len(members)))):
            return (
                "; ".join(f"rank {i} of {len(members)} left: {words}" for i, words in left.items()) + f"; {TO_RESUME}"
            )
        if gone:
            return _describe(gone, members, "has ended", ranks)
        if quiet := _promptly(lambda: heartbeat.silent_ranks(_store(name), world=len(members))):
            return _describe(quiet, members, "has stopped answering", ranks)
        last = _promptly(lambda: heartbeat.read_beats(_store(name), world=len(members)))
    except (RuntimeError, NoAnswer):
        return _describe([0], members, "or its torchrun, which keep the store of the run, do not answer", ranks)
    return _behind(last, ranks) if "imed out" in str(error) else None


def _store(name: str) -> Store:
    return PrefixStore(name, rendezvous.reconnect())


def _describe(which: Sequence[int], members: Sequence[Member], what: str, ranks: Ranks) -> str:
    where = ", ".join(f"{i} (process {members[i].pid} on {members[i].host})" for i in which)
    return (
        f"rank {where} of {len(members)} {what}, and rank {rank()} ends with it (--timeout {ranks.timeout:g} seconds "
        f"is the longest that ranks wait); {TO_RESUME}"
    )


def _behind(last: Sequence[Beat | None], ranks: Ranks) -> str | None:
    """Name the ranks that are behind, given that all are alive and one waited too long."""
    steps = [beat.step if beat else 0 for beat in last]
    behind = [i for i, step in enumerate(steps) if step == min(steps)] if min(steps) < max(steps) else []
    who = (
        f"rank {', '.join(map(str, behind))} is at step {min(steps)}, others at {max(steps)}"
        if behind
        else (f"all are at step {max(steps)}")
    )
    return (
        f"rank {rank()} waited for the others for longer than --timeout {ranks.timeout:g} seconds; all ranks are "
        f"alive, {who}: raise --timeout if a rank is only slow; {TO_RESUME}"
    )


def _promptly(act: Callable[[], T]) -> T:
    """Run ``act()`` in a thread and give up after some seconds, since a store can stop answering."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(act())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(timeout=heartbeat.SILENCE_S + 5)


def _publish_error(name: str, error: Exception) -> None:
    """Store the message of this rank's own error for the others, which lose the connection to it next."""
    with suppress(RuntimeError, NoAnswer):
        _promptly(lambda: _store(name).set(f"left/{rank()}", f"{type(error).__name__}: {error}"))


def _first_left_with(name: str, error: Exception) -> bool:
    """Return True if rank 0 leaves with the same error, which it prints."""
    with suppress(RuntimeError, NoAnswer):
        store = _store(name)
        _promptly(lambda: store.wait(["left/0"], timedelta(seconds=2)))
        return _promptly(lambda: store.get("left/0")).decode() == f"{type(error).__name__}: {error}"
    return False


def _left(name: str, world: int) -> dict[int, str]:
    store = _store(name)
    return {i: store.get(f"left/{i}").decode() for i in range(world) if store.check([f"left/{i}"])}


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # ended, but not yet reaped by its parent
