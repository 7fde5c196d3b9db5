"""Hold every kind of module in the zoo against a loop of single-sample backwards in float64, and print what was seen.

    python -m benchmarks.zoo                                  # all kinds; fails if one crashes, differs or is changed
    python -m benchmarks.zoo --only 'layer*' --compile all    # some, each compiled by block, too
    python -m benchmarks.zoo --publish                        # and write the page under benchmarks/results

How a kind is held: ``benchmarks/zoo/hold.py``. A verdict is one of: exact; refused with a remedy; exact by that remedy.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import warnings
from pathlib import Path

from rich.console import Console

from benchmarks.zoo.hold import Kind, Row, hold
from benchmarks.zoo.kinds import GROUPS
from benchmarks.zoo.page import publish

COMPILE = {"some": None, "all": True, "none": False}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    warnings.simplefilter("ignore")  # a module may warn of itself: what it computes is looked at, not what it says
    console, rows = Console(), []
    kinds = chosen(options.only)
    for group, kind in kinds[: options.at_most]:
        row = hold(kind, group=group, backend=options.backend, compiled=COMPILE[options.compile])
        rows.append(row)
        console.print(line(row), markup=False, highlight=False, soft_wrap=True)
    console.print(summary(rows), markup=False, highlight=False)
    if options.publish is not None:
        console.print(f"wrote {publish(rows, options.publish, backend=options.backend)}", markup=False)
    return 0 if all(row.good for row in rows) else 1


def chosen(only: str | None = None) -> list[tuple[str, Kind]]:
    """Return the kinds whose name or group matches a pattern; without one, all kinds."""
    every = [(group, kind) for group, kinds in GROUPS.items() for kind in kinds]
    return [pair for pair in every if only is None or any(fnmatch.fnmatch(n, only) for n in (pair[0], pair[1].name))]


def line(row: Row) -> str:
    """Format a row for the terminal."""
    compiled = f"; compiled: {row.compiled}" if row.compiled else ""
    words = f": {row.words}" if row.words and not row.good else ""
    return f"{row.group:14} {row.name:44} {row.verdict}{compiled} ({row.seconds:.1f} s){words}"


def summary(rows: list[Row]) -> str:
    """Count the rows of each verdict."""
    counts = {
        verdict: sum(row.verdict == verdict for row in rows) for verdict in dict.fromkeys(r.verdict for r in rows)
    }
    compiled = sum(bool(row.compiled) for row in rows)
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{len(rows)} kinds: {found}; {compiled} of them compiled, too"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("--only", help="a pattern of names or groups")
    parser.add_argument("--at-most", type=int, help="the first so many of them")
    parser.add_argument("--compile", choices=COMPILE, default="some", help="which to compile by block, too")
    parser.add_argument("--backend", default="aot_eager", help="torch.compile's")
    parser.add_argument("--publish", type=Path, nargs="?", const=Path("benchmarks/results"), help="write the page here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
