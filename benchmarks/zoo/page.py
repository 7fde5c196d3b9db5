"""The page of the zoo: every kind with its verdict, and the errors of those that are refused.

>>> publish(rows, Path("benchmarks/results"), backend="aot_eager")        # zoo_<hardware>_<yyyymm>.{md,json}
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.zoo.hold import EXACT, MENDED, REFUSED, Row
from benchmarks.zoo.kinds import GROUPS

CPU = torch.device("cpu")


def publish(rows: Sequence[Row], folder: Path, *, backend: str) -> Path:
    """Write the rows, merged with the stored rows of other kinds, and the page; return the page's path."""
    date = datetime.now(UTC).date().isoformat()
    source = folder / f"zoo_{report.slug(report.hardware(CPU))}_{date[:7].replace('-', '')}.json"
    old = [Row(**row) for row in json.loads(source.read_text())["rows"]] if source.exists() else []
    names = {(row.group, row.name): row for row in (*old, *rows)}
    every = [(group, kind.name) for group, kinds in GROUPS.items() for kind in kinds]
    rows = [names[place] for place in every if place in names]
    content = {
        "benchmark": "zoo",
        "hardware": report.hardware(CPU),
        "versions": report.versions(CPU),
        "commit": report.current_commit(),
        "command": "python -m benchmarks.zoo --publish",
        "date": date,
        "settings": {"dtype": "float64", "backend": backend},
        "rows": [row._asdict() for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    source.write_text(json.dumps(content, indent=1) + "\n")
    return report.publish(source, folder, page)


def page(content: dict[str, Any], *, name: str) -> str:
    """Render the page of a report's content."""
    rows = [Row(**row) for row in content["rows"]]
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in (EXACT, MENDED, REFUSED)}
    compiled = [row for row in rows if row.compiled]
    versions = ", ".join(f"{key} {value}" for key, value in content["versions"].items())
    head = textwrap.fill(
        f"{len(rows)} kinds of module and folder, each held against a loop of single-sample backwards in float64 "
        f"(losses, norms of every leaf, a clipped sum; 1e-7), and looked at for change, bit for bit: "
        f"{counts[EXACT]} exact, {counts[MENDED]} exact by the remedy that the refusal names, {counts[REFUSED]} "
        f"refused with a remedy that is another module. {len(compiled)} of them also compiled by block (backend "
        f"{content['settings']['backend']}): {sum(row.compiled == EXACT for row in compiled)} exact, the others as "
        f"eager or refused by name. {versions}; commit {content['commit']}. Rows: `{name}.json`; how: "
        f"`benchmarks/zoo/hold.py`.",
        width=120,
    )
    lines = [f"# The module zoo, {content['date']}", "", f"    {content['command']}", "", head, ""]
    for group in dict.fromkeys(row.group for row in rows):
        lines += [f"## {group}", "", "| kind | eager | compiled | largest error |", "|---|---|---|---|"]
        lines += [
            f"| {row.name} | {row.verdict} | {row.compiled or '-'} | {_error(row)} |"
            for row in rows
            if row.group == group
        ]
        lines += [""]
    lines += ["## What is refused, and the remedy", ""]
    lines += [f"- **{row.name}** ({row.verdict}): {row.words}" for row in rows if row.words]
    return "\n".join(lines) + "\n"


def _error(row: Row) -> str:
    return "-" if row.verdict == REFUSED else f"{row.error:.0e}"
