"""Render the tables of figures in README.md and docs/benchmarks.md from benchmarks/results/*.json.

    python -m benchmarks.readme_tables            # rewrite every table in place
    python -m benchmarks.readme_tables --check    # change nothing; exit code 1 if a page is out of date

A page marks the place of a table. What stands between the markers is a caption (unit, model, hardware, versions,
command, commit, link to the rows) and the table:

    <!-- table: gpt2_large -->
    ...
    <!-- end of table -->

``tests/test_readme.py`` compares every page with what this command renders.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.tables import TABLES, Table

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
WIDTH = 120
MACHINES = {
    "NVIDIA H200": "one NVIDIA H200",
    "1 threads of neoverse-n1": "one core of a Neoverse-N1",
    "aarch64": "an aarch64 CPU",
}
"""Hardware as the files name it, and as a sentence does."""
HIDDEN = r" --(json|commit|out|cap|modes|regimes)( [^-\s]\S*)+"
"""Arguments that a caption leaves out of a command: where rows go and which of them to measure."""


def render(table: Table, page: Path) -> str:
    """Return the caption and the table as markdown; links are relative to ``page``."""
    lines = [_cells(table.columns), _cells(["---"] * len(table.columns)), *map(_cells, table.rows)]
    unbroken = re.sub(r"`[^`]*`|\[[^]]*\]", lambda match: match[0].replace(" ", "\0"), caption_of(table, page))
    caption = textwrap.fill(unbroken, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\0", " ")
    return "\n".join([caption, "", *lines, ""])


def caption_of(table: Table, page: Path) -> str:
    """Return one paragraph: unit and model, hardware, versions, command, commit, and a link to all rows."""
    content = table.results.content
    hardware = content.get("hardware") or content["device"]
    versions = content.get("versions", content)
    used = ", ".join(f"{name} {versions[name]}" for name in table.packages if name in versions)
    command = re.sub(HIDDEN, "", content["command"])
    origin = (
        f"{table.how} on {MACHINES.get(hardware, hardware)} ({used}) by `{command}` at commit {table.results.commit}."
    )
    link = f"[All rows]({os.path.relpath(table.results.path, page.parent)})."
    return " ".join(filter(None, [table.title, origin, table.note, link]))


def rendered_page(page: Path) -> str:
    """Return the text of ``page`` with every table rendered anew."""

    def replace(match: re.Match[str]) -> str:
        return match[1] + render(TABLES[match[2]](), page) + match[3]

    return MARKED.sub(replace, page.read_text())


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page is out of date")
    options = parser.parse_args(argv)
    old = [page for page in PAGES if rendered_page(page) != page.read_text()]
    for page in old:
        print(f"{page.relative_to(ROOT)}: {'out of date' if options.check else 'rendered'}")
        if not options.check:
            page.write_text(rendered_page(page))
    sys.exit(int(options.check and bool(old)))


if __name__ == "__main__":
    main()
