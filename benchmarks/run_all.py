"""Reproduce every GPU figure with one command: tests, sweeps, kernels, K-FAC, foreign models.

    python -m benchmarks.run_all --out runs/bench --minutes 25     # run it again to continue where it stopped
    python -m benchmarks.run_all --out runs/bench --pages          # write the pages from the rows; needs no GPU

It prints one line per part and writes the parts' rows and logs to ``--out``; ``--pages`` writes
``benchmarks/results/<name>_<hardware>_<yyyymm>.{md,json}``.

Parts run one at a time, most important first, because timings taken beside other work mean nothing. Only the tests,
which time nothing, run beside others: the plain modules of every length and two-layer models are compiled meanwhile,
which fills the compile caches for the parts that follow. A part that might not finish in the time left is not started.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpt2_large import CONTEXTS
from benchmarks.report import current_commit

METHODS = ("flash", "flash_bk", "ghost_bk")
"""Methods that are compared with each other; neither flash method may be slower than ``ghost_bk``."""


class Part(NamedTuple):
    """A command, its approximate duration, and commands that run beside it and whose results are not used."""

    name: str
    seconds: float
    command: tuple[str, ...]
    background: tuple[tuple[str, ...], ...] = ()


def parts(out: Path, commit: str) -> list[Part]:
    """Return all parts, most important first."""
    python = (sys.executable, "-m")
    label = ("--commit", commit, "--cap", "6")

    def large(*more: str, rows: str = "gpt2_large") -> tuple[str, ...]:
        return (*python, "benchmarks.gpt2_large", "--json", str(out / f"{rows}.json"), *label, *more)

    def regime(*names: str) -> tuple[str, ...]:
        return (*python, "benchmarks.regimes", "--json", str(out / "regimes.json"), *label, "--regimes", *names)

    compiled = (
        *(large("--modes", "module_graphs", "--contexts", str(T), rows=f"compiled_{T}") for T in CONTEXTS if T <= 4096),
        large("--layers", "2", "--modes", "none", "auto", rows="compiled_ours"),
        large("--layers", "2", "--modes", *METHODS, rows="compiled_methods"),
    )
    tests = (*python, "pytest", "-m", "gpu", "-n", "4", "-p", "no:cacheprovider", "-p", "no:benchmark")
    return [
        Part("tests", 300, tests, compiled),
        Part("private and plain", 180, large("--modes", "none", "auto")),
        Part("modules", 100, large("--modes", "module_graphs")),
        Part("methods", 200, large("--modes", *METHODS)),
        Part("regimes", 170, regime("large_batch", "llama_1b")),
        Part("cut batch", 40, (*regime("cut_batch"), "--modes", "auto")),
        Part("other regimes", 200, regime("llama_3b", "lora")),
        Part("opacus", 120, large("--modes", "opacus", "opacus_ghost", "--contexts", "512", "2048", "8192")),
        Part("kernels", 120, (*python, "benchmarks.kernels", "--out", str(out / "kernels"))),
        Part("first step", 70, large("--first-step", "auto", "--contexts", "512")),
        Part("kfac", 120, (*python, "benchmarks.kfac", "--gpu", "--out", str(out / "kfac.json"), "--commit", commit)),
        Part("foreign", 300, (*python, "benchmarks.foreign", "--json", str(out / "foreign.json"), *label)),
        Part("the rest", 400, large()),
    ]


def run_parts(todo: Sequence[Part], out: Path, *, seconds: float, commit: str, now: Callable[[], float]) -> list[str]:
    """Run the parts that fit into the time and are not done at this commit; return a line for every part.

    The output of a part goes to ``<name>.txt``. A part that fails, or is stopped at twice its duration or at the end of
    the time, counts as not done; what it has written stays.
    """
    out.mkdir(parents=True, exist_ok=True)
    record, end, lines = out / "done.json", now() + seconds, []
    done: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
    for part in todo:
        left = end - now()
        if done.get(part.name) == commit:
            lines.append(f"{part.name}: done before")
            continue
        if left < part.seconds:
            lines.append(f"{part.name}: not started, needs about {part.seconds:.0f} s, {max(left, 0.0):.0f} s left")
            continue
        began = now()
        code = run_part(part, out / f"{part.name.replace(' ', '_')}.txt", seconds=min(left, 2 * part.seconds))
        if code == 0:
            done[part.name] = commit
            record.write_text(json.dumps(done, indent=1) + "\n")
        how = {0: "done", None: "stopped"}.get(code, f"ended with {code}")
        lines.append(f"{part.name}: {how}, {now() - began:.0f} s")
        print(lines[-1], flush=True)
    return lines


def run_part(part: Part, log: Path, *, seconds: float) -> int | None:
    """Return the exit status of a part, None if it took too long. What runs beside it ends with it."""
    elsewhere = os.environ | {"FDP_CACHE": str(log.parent / "background")}  # no plan may use timings taken here
    processes = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=elsewhere)
        for command in part.background
    ]
    try:
        with log.open("w") as text:
            finished = subprocess.run(part.command, stdout=text, stderr=subprocess.STDOUT, timeout=seconds, check=False)
        return finished.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def pages(out: Path) -> None:
    """Write the pages of all existing rows into ``benchmarks/results``; the first page states how the tests ended."""
    log, first, done = out / "tests.txt", out / "gpt2_large.json", out / "done.json"
    if log.exists() and first.exists() and done.exists():
        ended = [line.strip("= ") for line in log.read_text().splitlines() if " passed" in line or " failed" in line]
        commit = json.loads(done.read_text()).get("tests", "a commit at which not all passed")
        summary = f"`pytest -m gpu` at {commit}: {ended[-1] if ended else 'did not end'}."
        first.write_text(json.dumps(json.loads(first.read_text()) | {"tests": summary}, indent=1) + "\n")
    for name in ("gpt2_large", "regimes", "foreign"):
        rows = out / f"{name}.json"
        if rows.exists():
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--render", str(rows)], check=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for rows and logs")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no part that would take longer")
    parser.add_argument("--commit", help="what the rows are labelled with where there is no git")
    parser.add_argument("--pages", action="store_true", help="only write the pages; needs no GPU")
    options = parser.parse_args(argv)
    if options.pages:
        pages(options.out)
        return
    commit = options.commit or current_commit()
    todo = parts(options.out, commit)
    lines = run_parts(todo, options.out, seconds=60 * options.minutes, commit=commit, now=time.monotonic)
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
