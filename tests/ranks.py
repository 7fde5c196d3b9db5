"""Several ranks on one machine: run a function of this repository on each, over gloo, and collect what they return."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Ranks are forked from a process that has imported torch, once, and done nothing with it.
mp.get_context("forkserver").set_forkserver_preload(["tests.preload"])


def run_on_ranks(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """``[fn(*args) on rank 0, on rank 1, ...]``. ``fn`` must be importable; a rank that fails fails the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_enter, (fn, ranks, port, folder, args), nprocs=ranks, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _enter(rank: int, fn: Callable[..., Any], ranks: int, port: int, folder: str, args: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        torch.save(fn(*args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
