"""One way to measure a training step: check it, time it, note its memory, write the row; the next run goes on.

| file            | part                                                                                            |
|-----------------|-------------------------------------------------------------------------------------------------|
| `modes.py`      | what is measured: a case in a mode, behind ``step(tokens, key)``; why the learning rate is 0    |
| `checks.py`     | that it computes what ``materialize`` computes, on a slice and at full size                     |
| `measure.py`    | milliseconds and GiB of its steps: a row                                                        |
| `report.py`     | rows in a file and on a page, and where they come from                                          |
| `harness.py`    | this: every mode in every case                                                                  |
| `options.py`    | the command line of a sweep                                                                     |
| `cold_start.py` | seconds to a first step with empty caches                                                       |
| `device.py`     | a device's work, memory and attention kernel                                                    |

A mode that fails a check is not timed: its row says what was wrong. Modes are built one at a time in one process, and
what a mode made is freed before the next. The report is written after every cell, and a cell that it holds is not run
again.

    >>> report = Report(path, benchmark="gpt2_large", device=device, layers=36)
    >>> sweep(report, cases, modes, device=device)
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Iterable, Sequence

import torch

from benchmarks.checks import Checker, WrongError
from benchmarks.device import free
from benchmarks.measure import Limits, measure
from benchmarks.modes import Case, Row
from benchmarks.report import Report, line


def sweep(
    report: Report,
    cases: Iterable[Case],
    modes: Sequence[str],
    *,
    device: torch.device,
    limits: Limits = Limits(),  # noqa: B008
    budget: float = math.inf,
    profiled: bool = False,
    retry: bool = False,
) -> None:
    """Measure every mode in every case that the report does not hold yet; start none after ``budget`` seconds.

    ``retry`` runs cells again that have failed.
    """
    checker, begun = Checker(device), time.perf_counter()
    for case in cases:
        for mode in modes:
            row = report.find(case, mode)
            if row is not None and not (retry and "failed" in row):
                continue
            if time.perf_counter() - begun > budget:
                print(f"stopped after {time.perf_counter() - begun:.0f} s; run again for the rest", flush=True)
                return
            row, broken = cell(report, checker, case, mode, device, limits, profiled)
            report.add(row)
            print(line(row), flush=True)
            if broken:
                sys.exit("the GPU reports an error of the program, which ends with it; run again for the rest")


def cell(
    report: Report, checker: Checker, case: Case, mode: str, device: torch.device, limits: Limits, profiled: bool
) -> tuple[Row, bool]:
    """The row of a cell, or why there is none; and whether the GPU can still be used."""
    begun = time.perf_counter()
    try:
        errors = report.checked(case, mode) or checker.check(case, mode)
        expected = report.expected_norms(case, mode)
        row = measure(case, mode, device, limits=limits, expected_norms=expected, profiled=profiled)
        row["check"] = errors
    except WrongError as error:
        row = {"mode": mode, **case.cell, "failed": f"wrong: {error}"}
    except Exception as error:
        if out_of_memory(error):
            why = "out of memory"
        else:
            traceback.print_exc()
            why = f"{type(error).__name__}: {str(error)[:300]}"
        row = {"mode": mode, **case.cell, "failed": why}
    row["cell_s"] = time.perf_counter() - begun
    try:
        free(device)
    except RuntimeError:
        return row, True
    return row, False


def out_of_memory(error: BaseException | None) -> bool:
    """Whether this is it, or came of it: a capture that ran out of memory ends with another error."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or out_of_memory(error.__context__))
