"""Run ``fdp train`` on forked ranks, inject faults into them, and damage their files.

>>> with Job(folder / "run", ranks=2).start(Fault("killed", rank=1, stage="writing parts")) as attempt:
...     attempt.wait(seconds=60)
>>> flip_bit(checkpoints(folder / "run")[-1] / "__0_0.distcp", random.Random(0))
"""

from __future__ import annotations

import errno
import importlib
import json
import multiprocessing as mp
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

COMMON = shlex.split(
    "--model mlp --data digits --noise-multiplier 1 --seed 0 --batch-size 24 --microbatch 12 --warmup 1 --device cpu"
)
STAGES = {
    "joining": ("fdp.parallel.rendezvous", "meet"),
    "reading the settings": ("fdp.cli.session", "configure"),
    "checking the model": ("fdp.run.prepare_run", "check_model"),
    "making the folder": ("fdp.cli.run_files", "write_config"),
    "replacing a file": ("fdp.storage.private_files", "sync_folder"),
    "verifying a checkpoint": ("fdp.storage.checkpoint", "_check_files"),
    "loading a checkpoint": ("fdp.storage.checkpoint", "read_shards"),
    "drawing samples": ("fdp.run.training_run", "draw_batch"),
    "summing up a step": ("fdp.run.flight", "step_numbers"),
    "writing metrics": ("fdp.cli.run_files", "_json_line"),
    "beginning a save": ("fdp.storage.checkpoint", "_begin"),
    "finding the folder": ("fdp.storage.checkpoint", "_check_shared"),
    "writing parts": ("fdp.storage.checkpoint", "write_shards"),
    "amid a part": ("fdp.storage.dcp", "_HashingFile.write"),
    "publishing": ("fdp.storage.checkpoint", "_publish"),
    "amid publishing": ("fdp.storage.checkpoint", "sync_folder"),
    "pruning": ("fdp.storage.checkpoint", "_partial_path"),
    "exporting": ("fdp.cli.session", "export_model"),
    "drawing the report": ("fdp.report.figure", "write_report"),
    "writing the summary": ("fdp.cli.run_files", "write_summary"),
}
"""Places at which a fault can be injected, and the function that is called there."""


class Fault(NamedTuple):
    """A fault of ``rank`` at the ``count``-th call of the function of ``stage``.

    ``act`` is killed, stopped, terminated, interrupted, disk full, slow disk, clock jump or NaN samples. It happens
    ``late`` seconds after the call, so that it can hit anywhere in what follows.
    """

    act: str
    rank: int = 0
    stage: str = "drawing samples"
    count: int = 1
    late: float = 0.0


SIGNALS = {
    "killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "terminated": signal.SIGTERM,
    "interrupted": signal.SIGINT,
}


class Attempt:
    """The processes of one attempt at a run."""

    def __init__(self, processes: Sequence[BaseProcess], logs: Sequence[Path]) -> None:
        self.processes, self.logs = processes, logs
        self.began = time.monotonic()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def wait(self, *, seconds: float, ranks: Sequence[int] | None = None) -> list[int | None]:
        """Wait for these ranks, by default all; return the exit codes of all ranks, None for one that still runs."""
        deadline = self.began + seconds
        for rank in range(len(self.processes)) if ranks is None else ranks:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank if it still runs."""
        process = self.processes[rank]
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)

    def text(self) -> str:
        """Return the output of all ranks on one line."""
        return " ".join(" ".join(log.read_text(errors="replace") for log in self.logs if log.exists()).split())


class Job(NamedTuple):
    """A run of ``fdp train`` in ``out``; ``words`` are its options in addition to the common ones."""

    out: Path
    ranks: int = 2
    words: tuple[str, ...] = ("--steps", "12", "--save-every", "2")
    timeout: float = 8.0

    def start(
        self, *faults: Fault, ranks: int | None = None, by_rank: Mapping[int, Sequence[str]] | None = None
    ) -> Attempt:
        """Start or restart the run; ``by_rank`` are additional options of single ranks."""
        count = self.ranks if ranks is None else ranks
        mesh = ["--mesh", f"shard={count}", "--timeout", str(self.timeout)] if count > 1 else []
        words = ["train", *COMMON, *self.words, *mesh, "--json", "--out", str(self.out)]
        context, port = forkserver(), free_port()
        logs = [self.out.parent / f"{self.out.name}.{rank}.log" for rank in range(count)]
        processes = []
        for rank, log in enumerate(logs):
            log.unlink(missing_ok=True)
            own = [*words, *(by_rank or {}).get(rank, ())]
            mine = [fault for fault in faults if fault.rank == rank]
            arguments = (rank if count > 1 else None, count, port, own, str(log), mine)
            processes.append(context.Process(target=_run_rank, args=arguments))
            processes[-1].start()
        return Attempt(processes, logs)

    def summary(self) -> dict[str, Any] | None:
        """Return the summary, None if the run has not ended."""
        path = self.out / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None


def forkserver() -> Any:
    """Return a context that forks processes from one that has already imported everything."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(job: Job, *options: str) -> subprocess.Popen[str]:
    """Start the run with torchrun."""
    root = Path(__file__).parent.parent
    words = ["train", *COMMON, *job.words, "--mesh", f"shard={job.ranks}", "--timeout", str(job.timeout), "--json"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks), *options]
    paths = [str(root), str(root / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [*command, "-m", "fdp", *words, "--out", str(job.out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )


def _run_rank(rank: int | None, count: int, port: int, words: list[str], log: str, faults: list[Fault]) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the forking process ignores it
    if rank is not None:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), **address}
    import torch

    torch.set_num_threads(1)
    for fault in faults:
        inject(fault)
    from fdp.cli.main import main

    main(words)


def inject(fault: Fault) -> None:
    """Replace the function of the fault's stage by one that triggers the fault, in this process."""
    module, name = STAGES[fault.stage]
    holder: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    original, calls = getattr(holder, last), []

    def faulty(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == fault.count or (fault.act in ("slow disk", "NaN samples") and len(calls) >= fault.count):
            if fault.act == "NaN samples":
                return _with_nan(original(*args, **kwargs))
            if fault.late:
                threading.Timer(fault.late, _trigger, (fault,)).start()
            else:
                _trigger(fault)
        return original(*args, **kwargs)

    setattr(holder, last, faulty)


def _trigger(fault: Fault) -> None:
    if fault.act in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault.act])
    elif fault.act == "disk full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif fault.act == "slow disk":
        time.sleep(0.02)
    elif fault.act == "clock jump":
        now = time.time
        time.time = lambda: now() - 86400 * 365
    else:
        raise ValueError(fault.act)


def _with_nan(batch: Any) -> Any:
    from fdp import tree

    def add_nan(leaf: Any) -> Any:
        if leaf.is_floating_point():
            leaf = leaf.clone()
            leaf[0, 0] = float("nan")
        return leaf

    return batch._replace(data=tree.map(add_nan, batch.data))


def checkpoints(out: Path) -> list[Path]:
    """Return the published checkpoints of a run, newest last."""
    return sorted(path for path in (out / "checkpoints").glob("step-*") if path.suffix == "")


def flip_bit(path: Path, chance: random.Random) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def write_zeros(path: Path, chance: random.Random) -> None:
    """Overwrite up to 4 KiB of a file with zeros, where it is not zero already."""
    data = bytearray(path.read_bytes())
    start = chance.randrange(max(1, len(data) - 4096))
    if not any(data[start : start + 4096]):
        start = next(i for i, byte in enumerate(data) if byte)
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    path.write_bytes(data)


def truncate(path: Path, chance: random.Random) -> None:
    """Truncate a file."""
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def lengthen(path: Path, chance: random.Random) -> None:
    """Append bytes to a file."""
    with path.open("ab") as file:
        file.write(chance.randbytes(17))


def remove(path: Path, chance: random.Random) -> None:
    """Delete a file."""
    path.unlink()


CORRUPTIONS: dict[str, Callable[[Path, random.Random], None]] = {
    "bit flipped": flip_bit,
    "zeroed": write_zeros,
    "truncated": truncate,
    "lengthened": lengthen,
    "removed": remove,
}


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the record of a checkpoint and its digest, as someone who knows the format could."""
    from fdp.storage.checkpoint_record import RECORD, record_digest

    record = json.loads((path / RECORD).read_text())
    record.pop("sha256")
    change(record)
    (path / RECORD).write_text(json.dumps(record | {"sha256": record_digest(record)}, indent=1))


def lower_step(record: dict[str, Any]) -> None:
    """Lower the step of the meta data."""
    record["meta"]["step"] -= 2


def lower_all_steps(record: dict[str, Any]) -> None:
    """Lower every copy of the step in the record."""
    meta = record["meta"]
    meta["step"] -= 2
    meta["sampler"]["next_step"] -= 2
    meta["accountant"]["steps"] -= 2
    record["counters"]["step"] -= 2


def lower_accountant(record: dict[str, Any]) -> None:
    """Lower the steps that the accountant has counted."""
    record["meta"]["accountant"]["steps"] = 0


def replace_key(record: dict[str, Any]) -> None:
    """Replace the key."""
    record["meta"]["key"] = [word ^ 1 for word in record["meta"]["key"]]


FORGERIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "step lowered": lower_step,
    "every step lowered": lower_all_steps,
    "accountant lowered": lower_accountant,
    "other key": replace_key,
}
