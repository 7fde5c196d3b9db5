"""The example in ``docs/statement.md``: ``python -m tests.report.example_statement`` writes it anew."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from fdp.report.documents import as_text
from fdp.report.run_facts import read_facts
from fdp.report.statement import make_statement
from fdp.run.run_folder import read_run_folder
from tests.report.test_statement import write_run

PAGE = Path(__file__).parents[2] / "docs" / "statement.md"
MARKED = re.compile(r"(<!-- example -->\n).*?(<!-- end of example -->)", re.DOTALL)


def example() -> str:
    """Return the statement of a small run, as text."""
    with tempfile.TemporaryDirectory() as folder:
        run = read_run_folder(write_run(Path(folder) / "notes", summary={}, population=1500))
        return as_text(
            make_statement(read_facts(run), tuning="Defaults; nothing was tuned.", records_per_person=4).document
        )


def rendered_page() -> str:
    """Return the page with the example as it is now."""
    return MARKED.sub(lambda match: f"{match[1]}```text\n{example()}```\n{match[2]}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(rendered_page())
