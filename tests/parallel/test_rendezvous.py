"""Rendezvous in a store: with entries of dead ranks, and with ranks that never join, withdraw, or differ."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, Store

import fdp
from fdp.parallel import heartbeat, rendezvous
from fdp.parallel.heartbeat import Heartbeat, silent_ranks
from fdp.parallel.rendezvous import LostRank, Member, meet, source_digest, this_process, withdraw
from fdp.types import FdpError


def meeting(store: Store, ranks: int, *, world: int | None = None, timeout: float = 60.0) -> list[Any]:
    """Return the result of :func:`meet` on each of these ranks, or the error that it raises."""

    def one(rank: int) -> Any:
        try:
            return meet(store, rank=rank, world=world or ranks, timeout=timeout)
        except (LostRank, FdpError) as error:
            return error

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, range(ranks)))


def test_all_ranks_get_one_name_and_the_same_members() -> None:
    found = meeting(HashStore(), 4)
    assert len({name for name, _ in found}) == 1
    assert all(members == [this_process()] * 4 for _, members in found)


def test_entries_of_an_earlier_attempt_are_not_taken_for_ranks() -> None:
    store = HashStore()
    names = {meeting(store, 3)[0][0] for _ in range(5)}  # every attempt finds the last one's tokens, roster and go
    assert len(names) == 5
    # Two new ranks and the token of a dead third one: nobody goes ahead.
    first, second = meeting(store, 2, world=3, timeout=0.7)
    assert isinstance(first, LostRank)
    assert "rank 2 of 3 did not join within --timeout 0.7 seconds" in str(first)
    assert "rank 2 of 3 did not join" in str(second)


def test_a_rank_that_comes_late_is_waited_for() -> None:
    store = HashStore()
    meeting(store, 2)
    late: list[Any] = []
    thread = threading.Thread(target=lambda: (time.sleep(0.5), late.append(meet(store, rank=1, world=2, timeout=60))))
    thread.start()
    name, _ = meet(store, rank=0, world=2, timeout=60)
    thread.join()
    assert late[0][0] == name


def test_a_rank_that_withdraws_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    withdraw(store, rank=1, words="No such option: --stpes")
    began = time.monotonic()
    error = meeting(store, 1, world=2, timeout=30)[0]
    assert time.monotonic() - began < 5
    assert str(error) == "rank 1 of 2 left: No such option: --stpes"
    # One that left in an attempt that torchrun has started again is not.
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "did not join" in str(meeting(store, 1, world=2, timeout=0.3)[0])


def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    members = {
        0: Member("a", 1, "2.13.0", "abc"),
        1: Member("b", 2, "2.11.0", "abc"),
        2: Member("c", 3, "2.13.0", "xyz"),
    }
    seen = threading.local()
    monkeypatch.setattr(rendezvous, "this_process", lambda: members[seen.rank])

    def one(rank: int, as_member: int, store: Store) -> Any:
        seen.rank = as_member
        with pytest.raises(FdpError) as caught:
            meet(store, rank=rank, world=2, timeout=60)
        assert caught.value.everywhere
        return str(caught.value)

    other_torch = "torch 2.13.0 on rank 0 (a) and torch 2.11.0 on rank 1 (b)"
    for other, said in ((1, other_torch), (2, "the digest xyz on rank 1 (c)")):
        store = HashStore()
        with ThreadPoolExecutor(2) as threads:
            words = [thread.result() for thread in [threads.submit(one, r, m, store) for r, m in ((0, 0), (1, other))]]
        assert words[0] == words[1]
        assert said in words[0]


def test_the_digest_depends_on_every_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(source_digest()) == 12
    monkeypatch.setattr(fdp, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "package").mkdir()
    digests = set()
    for text in ("x = 1", "x = 2"):
        (tmp_path / "package" / "module.py").write_text(text)
        digests.add(source_digest.__wrapped__())
    assert len(digests) == 2


def test_a_stopped_heartbeat_is_silent_and_a_running_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.05)
    store = HashStore()
    hearts = [Heartbeat(store, rank=rank) for rank in range(3)]
    hearts[0].step = 7
    assert silent_ranks(store, world=3, watch=2.0) == []
    hearts[1].stop()
    time.sleep(0.2)
    assert silent_ranks(store, world=4, watch=0.5) == [1, 3]  # the last one never was
    assert json.loads(store.get("beat/0"))[1] == 7
    for heart in hearts:
        heart.stop()
