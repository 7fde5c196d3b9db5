"""Rows of a benchmark in a JSON file and on a page, with hardware, versions, commit, command and date.

The file is written after every row. Existing rows are kept; a file with other hardware or settings is refused.

    >>> report = Report(path, benchmark="gpt2_large", device=device, sdpa="default")
    >>> report.add(row)
    >>> written = publish(path, folder, page)
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.modes import Case, Row


class Report:
    """Rows in a JSON file, written after each; existing rows are kept."""

    def __init__(self, path: Path, *, benchmark: str, device: torch.device, commit: str | None = None, **settings: Any):
        self.path = path
        old = json.loads(path.read_text()) if path.exists() else {}
        self.rows: list[Row] = old.get("rows", [])
        self.first_steps: list[Row] = old.get("first_steps", [])
        self.commit = commit or current_commit()
        self.head = {
            "benchmark": benchmark,
            "hardware": hardware(device),
            "versions": versions(device),
            "commit": self.commit,
            "command": " ".join(["python", "-m", f"benchmarks.{benchmark}", *map(_without_folders, sys.argv[1:])]),
            "date": datetime.now(UTC).date().isoformat(),
            "settings": settings,
        }
        same = ("benchmark", "hardware", "settings")
        if old and [old[name] for name in same] != [self.head[name] for name in same]:
            raise ValueError(
                f"{path}: expected rows of {[self.head[name] for name in same]}, found {[old[name] for name in same]}; "
                f"choose another file"
            )

    def find(self, case: Case, mode: str) -> Row | None:
        wanted = {"mode": mode, **case.cell}
        return next((row for row in self.rows if all(row[name] == value for name, value in wanted.items())), None)

    def expected_norms(self, case: Case, mode: str) -> Sequence[float] | None:
        """Return the norms of the case's first two steps by ``materialize`` or, if it was not run, by ``auto``."""
        found = (self.find(case, reference) for reference in ("materialize", "auto") if reference != mode)
        return next((row["norms"] for row in found if row and "norms" in row), None)

    def checked(self, case: Case, mode: str) -> dict[str, float] | None:
        """Return the result of a check of the same slice at the same commit, so that a resumed run skips it."""
        if self.commit == "unknown" or self.commit.endswith("+"):
            return None
        wanted = {"mode": mode, "slice": case.slice, "commit": self.commit}
        same = (row for row in self.rows if "check" in row and all(row.get(name) == wanted[name] for name in wanted))
        return next((row["check"] for row in same), None)

    def add(self, row: Row) -> None:
        """Add the row, replacing one of the same cell, and write the file."""
        cell = ("mode", "regime", "context", "batch_size", "layers")
        self.rows = [old for old in self.rows if any(old[name] != row[name] for name in cell)]
        self.rows.append(row | {"commit": self.commit})
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {**self.head, "rows": self.rows, "first_steps": self.first_steps}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.path)


def line(row: Row) -> str:
    """Format a row for the terminal."""
    where = f"{row['regime']} {row['context']:5} x {row['batch_size']:<3} {row['mode']:20}"
    if "failed" in row:
        return f"{where} not timed: {row['failed']}"
    peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:7.2f} GiB"
    spread = f"({row['ms_p20']:.1f}-{row['ms_p80']:.1f})"
    return (
        f"{where} {row['ms']:9.2f} ms {spread:16} {peak}  first {row['first_step_s']:.1f} s, cell {row['cell_s']:.0f} s"
    )


def overstatements(rows: Sequence[Row]) -> list[str]:
    """Return the note on modes whose norms exceed the reference; empty if there are none."""
    above = [row for row in rows if "overstated" in row]
    if not above:
        return []
    which = "; ".join(
        f"{row['regime']}, T = {row['context']}, {row['mode']}: {100 * row['overstated']:.0f} %" for row in above
    )
    return [
        "",
        "Norms from Gram matrices include the largest possible rounding error, so that none is understated. They clip "
        f"more than necessary; they exceed the reference by up to ({which}).",
    ]


def publish(source: Path, folder: Path, page: Callable[..., str]) -> Path:
    """Write page and rows of a report as ``<benchmark>_<hardware>_<yyyymm>.{md,json}``; return the page's path."""
    content = json.loads(source.read_text())
    name = f"{content['benchmark']}_{slug(content['hardware'])}_{content['date'][:7].replace('-', '')}"
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{name}.md"
    written.write_text(page(content, name=name))
    if source.resolve() != (folder / f"{name}.json").resolve():
        shutil.copyfile(source, folder / f"{name}.json")
    return written


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def slug(name: str) -> str:
    """Return a hardware name as part of a file name: ``NVIDIA H200`` becomes ``h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


def versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "opacus", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    return found


def _without_folders(argument: str) -> str:
    """Return an argument as pages show it: a path without its folders."""
    return Path(argument).name if "/" in argument else argument


def current_commit() -> str:
    """Return the commit of the working tree, with ``+`` if files differ; ``unknown`` outside a checkout."""
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def head_of_page(content: dict[str, Any], *, name: str, title: str) -> list[str]:
    """Return the beginning of a page: title, command, versions, commits, and the file that says what is measured."""
    return [
        *title_and_command(content, title=title),
        f"{versions_and_commits(content)}. Rows: `{name}.json`.",
        f"What is measured: `benchmarks/{content['benchmark']}.py`.",
        "",
    ]


def title_and_command(content: dict[str, Any], *, title: str) -> list[str]:
    """Return the first lines of a page: what it is about, on which hardware and when, and how it was measured."""
    return [f"# {title} on one {content['hardware']}, {content['date']}", "", f"    {content['command']}", ""]


def versions_and_commits(content: dict[str, Any]) -> str:
    """Return the versions of a report and the commits of its rows, in words."""
    versions = ", ".join(f"{what} {which}" for what, which in content["versions"].items())
    return f"{versions}; commit {', '.join(sorted({row['commit'] for row in content['rows']}))}"
