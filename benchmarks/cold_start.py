"""Seconds from the start of a process to the end of a mode's first step, with nothing compiled before.

It needs its own process: imports and the start of CUDA are part of the time. ``benchmarks.gpt2_large --first-step``
runs it and adds the result to its report.

    >>> empty_caches(folder)     # before anything is compiled
    >>> first_step(report, case, "auto", device)
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

from benchmarks.device import synchronize
from benchmarks.modes import Case, build, feed
from benchmarks.report import Report


def first_step(report: Report, case: Case, mode: str, device: torch.device) -> None:
    """Add to the report the seconds from the start of this process to the end of the mode's first step.

    Call it in a new process with empty compile caches: see ``empty_caches``.
    """
    imported_s = seconds_since_start()
    start = time.perf_counter()
    tokens, step_keys = feed(case.model, case.batch_size, device, batches=1)
    candidate = build(case, mode, device)
    candidate.step(tokens[0], step_keys[0])
    synchronize(device)
    row = {
        "mode": mode,
        **case.cell,
        "imported_s": imported_s,
        "built_s": time.perf_counter() - start,
        "first_step_s": seconds_since_start(),
        "commit": report.commit,
    }
    report.first_steps.append(row)
    report.write()
    print(json.dumps(row), flush=True)


def empty_caches(folder: str) -> None:
    """Point the compile caches of Inductor and Triton to an empty folder; call it before anything is compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
    os.environ["XDG_CACHE_HOME"] = folder


def seconds_since_start() -> float:
    """Return the age of this process in seconds."""
    clock = os.sysconf("SC_CLK_TCK")
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / clock
    return float(Path("/proc/uptime").read_text().split()[0]) - started
