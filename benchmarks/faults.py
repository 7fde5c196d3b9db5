"""Inject faults of real machines into ``fdp train``, in a loop, and check that nothing is lost.

    make faults                                                            # prints a table
    python -m benchmarks.faults --count 300 --out benchmarks/results/faults    # also writes faults.json and faults.md
    python -m benchmarks.faults --soak 500                                 # one long run, killed every 20 steps

A job is a private run on two ranks that saves every two steps. It is started, hit by a fault, started again, hit by the
next one, and at the end left alone; the kinds of fault take turns. After every fault:

    no hang       every rank that can end has ended within a stated time
    nothing half  every published checkpoint is complete, bit by bit, and records as many steps as its name
    nothing lost  the newest good checkpoint is never older than the save before the last; ``metrics.jsonl`` has no gaps

and after every job the hash of the parameters and the stated epsilon equal those of an undisturbed run. Any other
outcome is a failure: the command prints it and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import fault_kinds
from benchmarks.fault_kinds import TIMEOUT_S, Lab, Outcome, soak
from benchmarks.report import current_commit, hardware, versions

SHARES = {
    "every_stage": 0,
    "killed": 70,
    "terminated": 24,
    "interrupted": 16,
    "corrupted": 88,
    "deleted": 6,
    "stopped": 8,
    "full_disk": 12,
    "read_only": 6,
    "slow_disk": 6,
    "two_runs": 8,
    "bad_batches": 4,
    "clock_jumps": 4,
    "other_ranks": 9,
    "restarts": 20,
}
"""Faults of each kind among 300, besides one kill at every stage."""
FAULTS_PER_PORTION = 12
"""Faults that one worker injects at a time."""


def plan(count: int) -> list[tuple[str, int]]:
    """Return (kind, number of faults) in portions for the workers."""
    portions = [("every_stage", 0), ("every_stage", 1)]
    for kind, share in SHARES.items():
        number = max(2, round(share * count / 300)) if share else 0
        portions += [(kind, min(FAULTS_PER_PORTION, number - done)) for done in range(0, number, FAULTS_PER_PORTION)]
    return portions


def inject(kind: str, number: int, seed: int) -> list[Outcome]:
    """Inject faults of one kind in their own folder; return the outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        lab, began = Lab(Path(folder), seed), time.monotonic()
        if kind in ("killed", "terminated", "interrupted"):
            fault_kinds.signals(lab, kind, number)
        else:
            getattr(fault_kinds, kind)(lab, number)
    bad = sum(outcome.problem is not None for outcome in lab.outcomes)
    seconds = time.monotonic() - began
    print(f"{kind}: {len(lab.outcomes)} faults, {bad} failures, {seconds:.0f} s", flush=True)
    return lab.outcomes


def summary_of(outcomes: list[Outcome]) -> dict[str, dict[str, Any]]:
    """Return per kind: faults, failures, and the longest time until all ranks had ended."""
    rows: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        row = rows.setdefault(outcome.kind, {"faults": 0, "failures": 0, "longest_s": 0.0})
        row["faults"] += outcome.detail != "the result"
        row["failures"] += outcome.problem is not None
        row["longest_s"] = max(row["longest_s"], round(outcome.seconds, 1))
    return rows


def main() -> None:
    """Inject faults, print a table, write it to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="portions at a time; each needs two cores")
    parser.add_argument("--kinds", nargs="+", choices=list(SHARES), help="only these kinds")
    parser.add_argument("--soak", type=int, metavar="STEPS", help="instead, one run of STEPS steps, killed every 20")
    parser.add_argument("--out", type=Path, help="a name without a suffix; writes .json and .md")
    options = parser.parse_args()
    if options.soak:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(soak(Lab(Path(folder), options.seed), steps=options.soak, every=20), indent=1))
        return
    began = time.monotonic()
    portions = [(kind, number) for kind, number in plan(options.count) if kind in (options.kinds or SHARES)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn) as workers:
        asked = [workers.submit(inject, *portion, options.seed + i) for i, portion in enumerate(portions)]
        outcomes = [outcome for each in asked for outcome in each.result()]
    rows = summary_of(outcomes)
    total, failures = (sum(row[name] for row in rows.values()) for name in ("faults", "failures"))
    table = Table("fault", "injected", "failures", "longest, s", title=f"{total} faults, {failures} failures")
    for kind, row in rows.items():
        table.add_row(kind, str(row["faults"]), str(row["failures"]), f"{row['longest_s']:.1f}")
    Console().print(table)
    if options.out is not None:
        write(options.out, rows, outcomes, seconds=time.monotonic() - began)
    sys.exit(1 if failures else 0)


def write(out: Path, rows: dict[str, dict[str, Any]], outcomes: list[Outcome], *, seconds: float) -> None:
    """Write the table as a page, and every outcome as JSON."""
    cpu = torch.device("cpu")
    about = {"commit": current_commit(), "hardware": hardware(cpu), "versions": versions(cpu)}
    about["seconds"] = round(seconds)
    value = about | {"rows": rows, "outcomes": [outcome._asdict() for outcome in outcomes]}
    out.with_suffix(".json").write_text(json.dumps(value, indent=1) + "\n")
    total, failures = (sum(row[name] for row in rows.values()) for name in ("faults", "failures"))
    lines = [
        "# Faults injected into `fdp train` on two ranks",
        "",
        f"`make faults` at {about['commit']}, {about['hardware']}, {about['versions']}; {about['seconds']} s.",
        "",
        f"{total} faults, {failures} failures. A failure is a rank that hangs, a published checkpoint that is "
        "incomplete, steps that are lost beyond the last save, or a result whose hash, epsilon or metrics differ from "
        "those of an undisturbed run. The last column is the longest time from the start of an attempt until every "
        f"rank that can end had ended; `--timeout` was {TIMEOUT_S:g} s.",
        "",
        "| fault | injected | failures | longest, s |",
        "|---|---|---|---|",
        *(f"| {kind} | {row['faults']} | {row['failures']} | {row['longest_s']:.1f} |" for kind, row in rows.items()),
        "",
    ]
    out.with_suffix(".md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
