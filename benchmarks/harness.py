"""Sweep over cases and modes: check each, time it, record its memory, and write a row.

| file               | part                                                                                         |
|--------------------|----------------------------------------------------------------------------------------------|
| `modes.py`         | a case in a mode, behind ``step(tokens, key)``; why the learning rate is 0                   |
| `mode_checks.py`   | check that a mode computes what ``materialize`` computes, on a slice and at full size        |
| `measure.py`       | milliseconds and GiB of its steps: a row                                                     |
| `large_steps.py`   | the same for steps of many microbatches, and the search for the best microbatch              |
| `report.py`        | rows in a file and on a page, with hardware, versions and commit                             |
| `harness.py`       | the sweep: every mode in every case                                                          |
| `sweep_options.py` | the command line of a sweep                                                                  |
| `cold_start.py`    | seconds to a first step with empty caches                                                    |
| `device.py`        | a device's work, memory and attention kernel                                                 |

A mode that fails a check is not timed; its row says what was wrong. Modes are built one at a time in one process, and
each is freed before the next. The report is written after every cell, and a cell that it holds is not run again.

    >>> report = Report(path, benchmark="gpt2_large", device=device, layers=36)
    >>> sweep(report, cases, modes, device=device)
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch

from benchmarks.device import free
from benchmarks.large_steps import OUT_OF_MEMORY, measure_large_step
from benchmarks.measure import Limits, measure
from benchmarks.mode_checks import Checker, WrongError
from benchmarks.modes import Case, Row
from benchmarks.report import Report, line
from fdp.fast.out_of_memory import is_out_of_memory


def sweep(report: Report, cases: Iterable[Case], modes: Sequence[str], **options: Any) -> None:
    """Measure every mode in every case that the report does not hold yet; options as in ``sweep_cells``."""
    sweep_cells(report, product(cases, modes), **options)


def sweep_cells(
    report: Report,
    cells: Iterable[tuple[Case, str]],
    *,
    device: torch.device,
    limits: Limits = Limits(),  # noqa: B008
    budget: float = math.inf,
    profiled: bool = False,
    retry: bool = False,
) -> None:
    """Measure every case and mode that the report does not hold yet; start none after ``budget`` seconds.

    Cells are taken one at a time, so that which comes next may depend on the rows before. ``retry`` repeats cells that
    have failed.
    """
    checker, start = Checker(device), time.perf_counter()
    for case, mode in cells:
        row = report.find(case, mode)
        if row is not None and not (retry and "failed" in row):
            continue
        if time.perf_counter() - start > budget:
            print(f"stopped after {time.perf_counter() - start:.0f} s; run again for the rest", flush=True)
            return
        row, broken = cell(report, checker, case, mode, device, limits, profiled)
        report.add(row)
        print(line(row), flush=True)
        if broken:
            sys.exit("a CUDA error has made the GPU unusable for this process; run again for the rest")


def cell(
    report: Report, checker: Checker, case: Case, mode: str, device: torch.device, limits: Limits, profiled: bool
) -> tuple[Row, bool]:
    """Return the row of a cell, with the reason if it failed, and whether the GPU became unusable."""
    start = time.perf_counter()
    try:
        errors = report.checked(case, mode) or checker.check(case, mode)
        if case.samples is None:
            expected = report.expected_norms(case, mode)
            row = measure(case, mode, device, limits=limits, expected_norms=expected, profiled=profiled)
        else:
            row = measure_large_step(case, mode, device)
        row |= {"check": errors, "slice": case.slice}
    except WrongError as error:
        row = {"mode": mode, **case.cell, "failed": f"wrong: {error}"}
    except Exception as error:
        if is_out_of_memory(error):
            why = OUT_OF_MEMORY
        else:
            traceback.print_exc()
            why = f"{type(error).__name__}: {str(error)[:300]}"
        row = {"mode": mode, **case.cell, "failed": why}
    row["cell_s"] = time.perf_counter() - start
    try:
        free(device)
    except RuntimeError:
        return row, True
    return row, False
