"""Command line options that the sweeps share, and how they become a report, a speed and a sweep.

Options that change the figures (kernels, compilation, capture) are stored in the report, which refuses rows taken with
other options.

    >>> options = arguments("What is measured.", modes=MODES).parse_args()
    >>> run_sweep(open_report(options, "gpt2_large", device), cases, options, device)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import torch

from benchmarks.device import GIB, SDPA
from benchmarks.harness import sweep_cells
from benchmarks.measure import Limits
from benchmarks.modes import Case, Speed
from benchmarks.report import Report
from fdp.fast.compile_modes import Compile


def arguments(description: str, *, modes: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that all sweeps share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--modes", nargs="+", default=list(modes), metavar="MODE", help=f"of {', '.join(modes)}")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try things")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file of the rows; existing rows are kept")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="start no cell after this time"
    )
    parser.add_argument(
        "--cap", type=float, default=Limits().cap, metavar="SECONDS", help="longest time to time one mode"
    )
    parser.add_argument("--profile", action="store_true", help="also record milliseconds by class of kernel")
    parser.add_argument("--retry", action="store_true", help="run failed cells again")
    parser.add_argument(
        "--memory-budget", type=float, metavar="GIB", help="memory that auto and flash may store between norms and sum"
    )
    parser.add_argument("--commit", help="label of the rows if there is no git")
    parser.add_argument(
        "--compile", choices=[c.value for c in Compile], default=Compile.BLOCK.value, help="fdp's modes"
    )
    parser.add_argument("--no-cuda-graph", action="store_true", help="run fdp's modes without a CUDA graph")
    parser.add_argument("--no-timed-plan", action="store_true", help="make fdp's choices by the cost model alone")
    parser.add_argument("--sdpa", choices=SDPA, default="default", help="the attention kernel, for every mode")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--render", type=Path, metavar="JSON", help="write the page of these rows; needs no GPU")
    return parser


def speed_of(options: argparse.Namespace) -> Speed:
    return Speed(Compile(options.compile), not options.no_cuda_graph, not options.no_timed_plan)


def budget_of(options: argparse.Namespace) -> float | None:
    """Return ``--memory-budget`` in bytes."""
    return None if options.memory_budget is None else options.memory_budget * GIB


def open_report(options: argparse.Namespace, benchmark: str, device: torch.device) -> Report:
    """Open the report of these options; rows taken with other options are refused."""
    return Report(
        options.json or Path(f"runs/{benchmark}.json"),
        benchmark=benchmark,
        device=device,
        commit=options.commit,
        sdpa=options.sdpa,
        compile=options.compile,
        cuda_graph=not options.no_cuda_graph,
        timed_plan=not options.no_timed_plan,
    )


def run_sweep(report: Report, cases: Sequence[Case], options: argparse.Namespace, device: torch.device) -> None:
    """Sweep over the cases and the chosen modes, within the chosen limits."""
    run_cells(report, product(cases, options.modes), options, device)


def run_cells(
    report: Report, cells: Iterable[tuple[Case, str]], options: argparse.Namespace, device: torch.device
) -> None:
    """Sweep over cells, within the chosen limits."""
    sweep_cells(
        report,
        cells,
        device=device,
        limits=Limits(cap=options.cap),
        budget=options.budget,
        profiled=options.profile,
        retry=options.retry,
    )
