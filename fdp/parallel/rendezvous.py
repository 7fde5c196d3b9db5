"""Rendezvous of all ranks of a run in a store that may hold entries of an earlier attempt.

torchrun restarts ranks with the store of the previous attempt, which still holds the addresses of dead processes. No
number that it hands out is the same on every machine, since each agent counts its own restarts. So the ranks agree on
a name for the attempt, and store everything else under that name.

    rank r    hello/r = a token of its own            overwrites the entry of an earlier process of this rank
    rank 0    roster  = a name and all ranks' tokens  written again whenever a token changes
    rank r    ack/name/r                              if its own token is on the roster
    rank 0    go/name                                 once all have acknowledged; a dead process never does

    >>> store = connect(timeout=600)
    >>> name, members = meet(store, rank=rank, world=world, timeout=600)
    >>> dist.init_process_group("gloo", store=PrefixStore(name, store), rank=rank, world_size=world)
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, Store, TCPStore

import fdp
from fdp.types import FdpError

POLL_S = 0.05
"""Seconds between two reads of the store."""


class LostRank(RuntimeError):
    """Another process of the run is gone, silent, or never joined."""


class Member(NamedTuple):
    """A process of the run: its host and process id, and the versions it runs."""

    host: str
    pid: int
    torch: str
    source: str


def this_process() -> Member:
    """Return the description of this process."""
    return Member(socket.gethostname(), os.getpid(), torch.__version__, source_digest())


@cache
def source_digest() -> str:
    """Return a digest of fdp's own Python files: two checkouts can differ under one version number."""
    digest = hashlib.sha256()
    root = Path(fdp.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def connect(*, timeout: float) -> Store:
    """Connect to the run's store: torchrun's own, or one that rank 0 hosts.

    The address comes from ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise FdpError(
            f"ranks: expected {' and '.join(missing)} in the environment; start with torchrun, which sets it"
        )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ["RANK"] == "0"
    try:
        store = TCPStore(
            host, port, is_master=ours, timeout=timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=ours
        )
    except RuntimeError as error:
        raise LostRank(
            f"rank 0 or its torchrun did not answer at {host}:{port} within --timeout {timeout:g} seconds; see what it "
            f"printed, and check that MASTER_ADDR and MASTER_PORT are its own"
        ) from error
    return PrefixStore("fdp", store)


def reconnect() -> Store:
    """Connect once more to a store that :func:`connect` has reached, for use by another thread."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(
        "fdp", TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
    )


def meet(store: Store, *, rank: int, world: int, timeout: float) -> tuple[str, list[Member]]:
    """Wait until all ranks have joined; return the attempt's name, the same on all, and the members.

    Raises:
      - :class:`LostRank` naming the ranks that did not join within ``timeout`` seconds, or that withdrew;
      - :class:`FdpError` on every rank if they do not run the same torch and the same fdp.
    """
    token, deadline = secrets.token_hex(8), time.monotonic() + timeout
    store.set(f"hello/{rank}", json.dumps({"token": token, "member": this_process()._asdict()}))
    acknowledged = ""
    while True:
        hellos = _hellos(store, world)
        if left := {r: hello["left"] for r, hello in hellos.items() if _withdrew_now(hello)}:
            raise LostRank(_describe(left, world))
        if rank == 0 and len(hellos) == world:
            _write_roster(store, hellos)
        roster = _read(store, "roster")
        if roster is not None and roster["tokens"][rank : rank + 1] == [token] and len(roster["tokens"]) == world:
            name = roster["name"]
            if name != acknowledged:
                store.set(f"ack/{name}/{rank}", "")
                acknowledged = name
            if rank == 0 and store.check([f"ack/{name}/{other}" for other in range(world)]):
                store.set(f"go/{name}", "")
            if store.check([f"go/{name}"]):
                members = [Member(**member) for member in roster["members"]]
                _check_versions(members)
                return name, members
        if time.monotonic() > deadline:
            absent = _absent(store, world)
            raise LostRank(
                f"rank {', '.join(map(str, absent))} of {world} did not join within --timeout {timeout:g} seconds; see "
                f"what it printed, or raise --timeout if it is only slow"
            )
        time.sleep(POLL_S)


def withdraw(store: Store, *, rank: int, words: str) -> None:
    """Tell the ranks that wait in :func:`meet` that this one will not join, and why."""
    attempt = {"host": socket.gethostname(), "restarts": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}
    store.set(f"hello/{rank}", json.dumps({"left": words, **attempt}))


def _withdrew_now(hello: Mapping[str, Any]) -> bool:
    """Return True if a rank withdrew in this attempt, and not in one that torchrun has since restarted."""
    if "left" not in hello:
        return False
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return True
    here = (socket.gethostname(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return (hello["host"], hello["restarts"]) == here


def _describe(left: Mapping[int, str], world: int) -> str:
    return "; ".join(f"rank {rank} of {world} left: {words}" for rank, words in left.items())


def _hellos(store: Store, world: int) -> dict[int, dict[str, Any]]:
    found = {rank: _read(store, f"hello/{rank}") for rank in range(world)}
    return {rank: hello for rank, hello in found.items() if hello is not None}


def _write_roster(store: Store, hellos: Mapping[int, Mapping[str, Any]]) -> None:
    tokens = [hellos[rank].get("token") for rank in sorted(hellos)]
    roster = _read(store, "roster")
    if roster is None or roster["tokens"] != tokens:
        members = [hellos[rank].get("member") for rank in sorted(hellos)]
        name = f"attempt-{secrets.token_hex(8)}"
        store.set("roster", json.dumps({"name": name, "tokens": tokens, "members": members}))


def _absent(store: Store, world: int) -> list[int]:
    hellos, roster = _hellos(store, world), _read(store, "roster")
    if absent := [rank for rank in range(world) if rank not in hellos]:
        return absent
    if roster is None:
        return [0]
    return [rank for rank in range(world) if not store.check([f"ack/{roster['name']}/{rank}"])] or [0]


def _read(store: Store, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


def _check_versions(members: Sequence[Member]) -> None:
    for what, words in (("torch", "torch {}"), ("source", "an fdp whose files have the digest {}")):
        values = [getattr(member, what) for member in members]
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            error = FdpError(
                f"ranks: expected the same torch and the same fdp everywhere, got {words.format(values[0])} on rank 0 "
                f"({members[0].host}) and {words.format(values[odd])} on rank {odd} ({members[odd].host}); install one "
                f"version on all machines"
            )
            error.everywhere = True  # every rank has read the same roster
            raise error
