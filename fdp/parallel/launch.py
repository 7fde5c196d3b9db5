"""The processes of one run: what ``torchrun`` started, joined into one group that starts and ends together.

    torchrun --nproc-per-node 4 -m fdp train --mesh shard=4

NCCL connects GPUs, gloo CPUs. No rank waits for another longer than ``timeout`` seconds, neither to join nor in any
collective; the error then says which rank is gone, silent or behind. Started again by torchrun, the ranks meet anew.

    >>> with joined("cpu", timeout=600) as ranks: mesh = make_mesh({"shard": 4}, device_type="cpu", timeout=600)
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from fdp.parallel import heartbeat, rendezvous
from fdp.parallel.agree import everyones
from fdp.parallel.heartbeat import Beat, Heart
from fdp.parallel.rendezvous import LostRank, Member
from fdp.types import FdpError

T = TypeVar("T")

TIMEOUT = 600.0
"""Seconds to wait for a rank, unless told otherwise."""
PRIVATE = ("number of samples", "content of the data", "content of the public data")
"""What ranks, and the attempts of a run, must agree on, and what no error may show."""
RESUME = "start the same command again to resume from the last checkpoint, if it saves any"


class Ranks(NamedTuple):
    """The processes of a run while they are joined."""

    members: list[Member]
    heart: Heart
    timeout: float


def world_size() -> int:
    """How many processes were started together: by torchrun's word, 1 if there is none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is."""
    return int(os.environ.get("RANK", "0"))


def started() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarted() -> bool:
    """Whether torchrun or Slurm started this process again, after a failure or a preemption."""
    return any(
        os.environ.get(name, "0") not in ("", "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )


def device_type(name: str) -> str:
    """``auto``, ``cpu`` or ``cuda`` as a kind of device."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


@contextmanager
def joined(device_type: str, *, timeout: float) -> Iterator[Ranks]:
    """Join all processes into one group, for as long as the block lasts; on GPUs, each with its own.

    Guarantees:
      - a rank that does not come, or stops answering, is an error on every other rank after at most ``timeout``
        seconds of waiting and a few seconds of looking who it is;
      - what an earlier attempt left in the store is not used.
    """
    try:
        _check_start(device_type, timeout)
    except FdpError as error:
        leave(str(error))
        raise
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    store = rendezvous.connect(timeout=timeout)
    name, members = rendezvous.meet(store, rank=rank(), world=world_size(), timeout=timeout)
    ranks = Ranks(members, Heart(PrefixStore(name, rendezvous.again()), rank=rank()), timeout)
    lost = False
    try:
        with _explained(ranks, name):
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
        if dist.is_initialized() and not lost:  # with a rank missing, it could wait for it
            dist.destroy_process_group()


def leave(words: str) -> None:
    """Tell the other ranks, which wait for this one to join, that it will not, and why."""
    if started() and world_size() > 1:
        with suppress(RuntimeError, NoAnswer, FdpError):
            _promptly(lambda: rendezvous.leave(rendezvous.connect(timeout=5), rank=rank(), words=words))


def _check_start(device_type: str, timeout: float) -> None:
    if not 0 < timeout < math.inf:
        raise FdpError(f"timeout: expected a positive number of seconds, got {timeout}; {TIMEOUT:g} is the default")
    if device_type == "cuda":
        here, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if here >= found:
            raise FdpError(f"ranks: expected a GPU for each process on this machine, found {found}; use --device cpu")
        torch.cuda.set_device(here)


@contextmanager
def _explained(ranks: Ranks, name: str) -> Iterator[None]:
    """Raise what went wrong between ranks as an error that says which of them is gone, silent or behind."""
    try:
        yield
    except LostRank:
        raise
    except (FdpError, OSError) as error:
        _say_why(name, error)
        raise
    except RuntimeError as error:
        if (words := _diagnosis(ranks, name, error)) is None:
            _say_why(name, error)
            raise
        raise LostRank(words) from error


def _diagnosis(ranks: Ranks, name: str, error: RuntimeError) -> str | None:
    """Say which ranks are the reason of ``error``; None if all are well and it is this one's own."""
    members, here = ranks.members, socket.gethostname()
    gone = [i for i, member in enumerate(members) if member.host == here and not _alive(member.pid)]
    keeper = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and 0 in gone
    try:
        if not keeper and (left := _promptly(lambda: _left(name, len(members)))):
            return "; ".join(f"rank {i} of {len(members)} left: {words}" for i, words in left.items()) + f"; {RESUME}"
        if gone:
            return _said(gone, members, "has ended", ranks)
        if quiet := _promptly(lambda: heartbeat.silent(_store(name), world=len(members))):
            return _said(quiet, members, "has stopped answering", ranks)
        last = _promptly(lambda: heartbeat.beats(_store(name), world=len(members)))
    except (RuntimeError, NoAnswer):
        return _said([0], members, "or its torchrun, which keep the store of the run, do not answer", ranks)
    return _behind(last, ranks) if "imed out" in str(error) else None


def _store(name: str) -> Store:
    return PrefixStore(name, rendezvous.again())


def _said(which: Sequence[int], members: Sequence[Member], what: str, ranks: Ranks) -> str:
    where = ", ".join(f"{i} (process {members[i].pid} on {members[i].host})" for i in which)
    return (
        f"rank {where} of {len(members)} {what}, and rank {rank()} ends with it (--timeout {ranks.timeout:g} seconds "
        f"is the longest that ranks wait); {RESUME}"
    )


def _behind(last: Sequence[Beat | None], ranks: Ranks) -> str | None:
    """Name the ranks that are behind, where all are alive and one waited for too long."""
    steps = [beat.step if beat else 0 for beat in last]
    behind = [i for i, step in enumerate(steps) if step == min(steps)] if min(steps) < max(steps) else []
    who = (
        f"rank {', '.join(map(str, behind))} is at step {min(steps)}, others at {max(steps)}"
        if behind
        else (f"all are at step {max(steps)}")
    )
    return (
        f"rank {rank()} waited for the others for longer than --timeout {ranks.timeout:g} seconds; all ranks are "
        f"alive, {who}: raise --timeout if a rank is only slow; {RESUME}"
    )


def _promptly(act: Callable[[], T]) -> T:
    """``act()`` in a thread that is given up after some seconds: a store can stop answering."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(act())
        except Exception as error:  # noqa: BLE001: whatever it is, it belongs to the caller
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(timeout=heartbeat.WATCH + 5)


def _say_why(name: str, error: Exception) -> None:
    """Leave the words of this rank's own error for the others, which lose the connection to it next."""
    with suppress(RuntimeError, NoAnswer):
        _promptly(lambda: _store(name).set(f"left/{rank()}", f"{type(error).__name__}: {error}"))


def _left(name: str, world: int) -> dict[int, str]:
    store = _store(name)
    return {i: store.get(f"left/{i}").decode() for i in range(world) if store.check([f"left/{i}"])}


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


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # ended, and not yet waited for by its parent
