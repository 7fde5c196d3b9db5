"""``fdp statement``: the privacy statement of a run, for a review board or beside a published model.

    fdp statement runs/notes
    fdp statement runs/notes --format markdown --out PRIVACY.md --tuning "learning rate from a public data set"
    fdp statement runs/notes --records-per-person 10 --format json

The statement holds no count, loss, path or text of the private data, and no seed: it may be published.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument

from fdp.cli.options import Flag, expand_groups
from fdp.cli.train_options import train_flag

if TYPE_CHECKING:
    from fdp.ledger.book import Entry
    from fdp.privacy.guarantee import Guarantee
    from fdp.report.run_facts import RunFacts


class Format(StrEnum):
    """The forms of a statement."""

    text = "text"
    markdown = "markdown"
    json = "json"


@dataclass(frozen=True)
class StatementOptions:
    """The facts that the author knows and fdp does not, and the form of the statement."""

    tuning: Annotated[
        str | None,
        Flag(
            "How hyper-parameters were chosen and how many runs were tried, in your words.",
            default_text="from search.json, else left to be stated",
        ),
    ] = None
    records_per_person: Annotated[
        int | None, Flag("The most units (windows, records, ...) that one person has: gives the epsilon of a person.")
    ] = None
    ledger: Annotated[
        str | None,
        train_flag(
            "ledger",
            help="The ledger with other runs on the same data, or off.",
            default_text="the one the run was given, else $FDP_LEDGER, else ~/.config/fdp",
        ),
    ] = None
    format: Annotated[Format, Flag("text, markdown or json.")] = Format.text
    out: Annotated[Path | None, Flag("Write to this file, which must not exist.", default_text="the screen")] = None


@expand_groups
def statement_command(
    run: Annotated[Path, Argument(metavar="RUN", help="The folder of a run of fdp train.")], options: StatementOptions
) -> None:
    """Write the privacy statement of a run: guarantee, mechanism, what is covered, curves, totals and checklists."""
    # torch takes seconds to import; --help and mistakes on the command line should not wait for it.
    from fdp.report.documents import as_markdown, as_text
    from fdp.report.run_facts import read_facts
    from fdp.report.statement import describe_run, make_statement
    from fdp.run.run_folder import read_run_folder
    from fdp.types import FdpError

    if options.out is not None and (options.out.exists() or not options.out.parent.is_dir()):
        why = "which exists" if options.out.exists() else "whose folder does not exist"
        raise FdpError(f"--out: expected a new file in a folder that exists, got {options.out}, {why}; give another")
    facts = read_facts(read_run_folder(run))
    statement = make_statement(
        facts,
        tuning=options.tuning,
        records_per_person=options.records_per_person,
        **other_runs(facts, options.ledger)._asdict(),
    )
    if facts.search is not None:
        # Beside the statement, which may be published and leaves the number of a chosen run out.
        print(f"{run}: {describe_run(facts)}", file=sys.stderr)
    if options.format is Format.json:
        text = json.dumps(statement.facts, indent=2, allow_nan=False) + "\n"
    else:
        text = (as_text if options.format is Format.text else as_markdown)(statement.document)
    if options.out is None:
        print(text, end="")
        return
    options.out.write_text(text, encoding="utf-8", errors="surrogateescape")
    print(f"written to {options.out}")


class OtherRuns(NamedTuple):
    """The promises of other runs in the ledger of a run: those that began, and those that link data only.

    ``searches`` are the names of the searches that some of them are of, by the names of the runs.
    """

    others: list[Guarantee]
    links: list[Guarantee]
    ledger_read: bool
    searches: dict[str, str]


def other_runs(facts: RunFacts, ledger: str | None = None) -> OtherRuns:
    """Return the other runs of the ledger that is given, else of that in the run's settings."""
    entries = _read_ledger(facts, ledger)
    named = [entry.promise.run == facts.promise.run for entry in entries]
    others = [entry for entry, same in zip(entries, named) if not same]
    return OtherRuns(
        others=[entry.promise for entry in others if entry.began],
        links=[entry.promise for entry in others if not entry.began],
        # Any other ledger, such as one with another key, cannot tell whether there are other runs on the same data.
        ledger_read=any(named),
        searches={entry.promise.run: entry.search for entry in others if entry.promise.run and entry.search},
    )


def _read_ledger(facts: RunFacts, given: str | None) -> list[Entry]:
    """Return the runs of the ledger ``given``, else of that in the run's settings."""
    from fdp.ledger.book import LEDGER_FILE, Book
    from fdp.ledger.data_key import ledger_folder, load_key

    folder = ledger_folder(facts.settings.get("ledger") if given is None else given)
    if folder is None or not (folder / LEDGER_FILE).exists():
        return []
    return Book(folder, load_key(folder, create=False)).runs()
