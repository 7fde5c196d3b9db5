"""``fdp ledger``: what was spent on which data, by every run that this ledger knows of.

    fdp ledger                              every run, and the total of each data set
    fdp ledger --data notes.jsonl           the runs on this data, whatever tokenizer and unit they used
    fdp ledger --json                       the same as one JSON object, for scripts

The ledger is on this machine only, beside the key by which data is recognised: back up both, and share neither.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.text import Text

from fdp.cli.options import Flag, expand_groups
from fdp.cli.train_options import train_flag

if TYPE_CHECKING:
    from fdp.cli.ledger_totals import KnownSearch
    from fdp.ledger.book import Entry

HEADINGS: tuple[str, ...] = ("date", "run", "data", "epsilon", "delta", "steps", "ended", "unit", "folder")
CAPTION = "A run counts with all its planned steps, once it has begun."
MARK_OF_SEARCHES = " (search)"
CAPTION_OF_SEARCHES = (
    "(search): a run of fdp search, with the epsilon of its own noise. The model that was chosen has the price of the "
    "search, which the total counts."
)
LEAST_OF_A_FOLDER = 12
"""Characters of a folder's path that are shown at least."""
LEFT_OUT = ("unit", "data", "folder", "ended")
"""Columns of words, in the order in which they make room."""
GAP = "  "


@dataclass(frozen=True)
class LedgerListOptions:
    """The ledger, and which of its runs to show."""

    data: Annotated[str | None, Flag("Show only runs on this data: a path, or a name such as stdlib.")] = None
    ledger: Annotated[str | None, train_flag("ledger", help="The folder of the ledger.")] = None
    as_json: Annotated[bool, Flag("Print the runs and totals as one JSON object, last.", name="--json")] = False


@expand_groups
def ledger_command(options: LedgerListOptions) -> None:
    """List every private run that was started, the data it was on, and what the runs spent together."""
    # torch takes seconds to import; --help should not wait for it.
    from fdp.cli.ledger_totals import find_searches, total_of
    from fdp.ledger.book import LEDGER_FILE, Book
    from fdp.ledger.data_key import OFF, ledger_folder, load_key
    from fdp.privacy.several_runs import linked_data
    from fdp.types import FdpError

    folder = ledger_folder(options.ledger)
    if folder is None:
        raise FdpError(f"--ledger: expected the folder of a ledger, got {OFF}: nothing is recorded")
    if options.data is not None and not (Path(options.data).exists() or options.data in ("stdlib", "digits")):
        raise FdpError(f"--data: expected a path that exists, or stdlib or digits, got {options.data!r}")
    console = Console(highlight=False)
    entries: list[Entry] = []
    others = 0
    wanted: set[str] | None = None
    if (folder / LEDGER_FILE).exists():
        book = Book(folder, load_key(folder, create=False))
        if options.data is not None:
            from fdp.cli.bookkeeping import data_fingerprints

            given = data_fingerprints(book.key, options.data)
            wanted = linked_data(given, [entry.promise for entry in book.runs()])
        every = book.runs()
        entries = [entry for entry in every if wanted is None or _sides(entry, wanted)]
        others = len(every) - len(entries)
    searches = find_searches(entries)
    totals = [total_of(group, searches) for group in group_by_data(entries, wanted)]
    if not entries:
        nothing = f"no run on this data, and {others} on other data" if others else "no run yet"
        console.print(f"{folder / LEDGER_FILE}: {nothing}", soft_wrap=True)
    else:
        _show(console, folder / LEDGER_FILE, entries, totals, searches)
    if options.as_json:
        print(json.dumps({"ledger": str(folder / LEDGER_FILE), "runs": _rows(entries, searches), "totals": totals}))


def group_by_data(entries: Sequence[Entry], wanted: set[str] | None = None) -> list[list[Entry]]:
    """Return the private runs in groups of certainly the same data and the same kind of unit, in order.

    An entry of a group has the promise about its data: a run that trained on some data and released noised evaluations
    of other data is in two groups. Runs on the data of a group that promise it nothing are in it, too. ``wanted`` are
    the fingerprints of the data to look at; None: all data.
    """
    from fdp.privacy.guarantee import promise_about
    from fdp.privacy.several_runs import linked_data, unit_kind

    runs = [entry.promise for entry in entries]
    groups: dict[tuple[frozenset[str], str], list[Entry]] = {}
    without_promise: dict[frozenset[str], list[Entry]] = {}
    for entry in entries:
        linked = dict.fromkeys(frozenset(linked_data(side, runs)) for side in _sides(entry, wanted))
        for data in linked:
            promise = promise_about(entry.promise, data) or entry.promise
            # Without a fingerprint it is not known to be on the same data as any other.
            about, kept = data or frozenset([f"run {promise.run}"]), entry._replace(promise=promise)
            if promise.private:
                groups.setdefault((about, unit_kind(promise.unit)), []).append(kept)
            else:
                without_promise.setdefault(about, []).append(kept)
    return [[*group, *without_promise.get(data, [])] for (data, _), group in groups.items()]


def _sides(entry: Entry, wanted: set[str] | None) -> list[set[str]]:
    """Return the fingerprints of the data that a run trained on, and of other data that it evaluated on."""
    trained, held_out = set(entry.promise.data), set(entry.promise.evaluated)
    sides = [trained, *([held_out] if held_out else [])]
    return sides if wanted is None else [side for side in sides if side & wanted]


def _rows(entries: Sequence[Entry], searches: Mapping[str, KnownSearch]) -> list[dict[str, Any]]:
    from fdp.privacy.guarantee import guarantee_to_json, held_out_epsilon

    return [
        guarantee_to_json(entry.promise)
        | {"epsilon_held_out": held_out_epsilon(entry.promise)}
        | {"folder": entry.folder, "steps_planned": entry.promise.steps, "steps_made": entry.steps, "ended": entry.how}
        | {"search": None if (search := searches.get(entry.promise.run or "")) is None else search.name}
        for entry in entries
    ]


def _show(
    console: Console,
    path: Path,
    entries: Sequence[Entry],
    totals: Sequence[dict[str, Any]],
    searches: Mapping[str, KnownSearch],
) -> None:
    from fdp.cli.ledger_totals import total_in_words

    console.print(str(path), soft_wrap=True)
    headings, *lines, caption = _table(entries, console.width, searches)
    console.print(Text(headings, style="bold"), soft_wrap=True)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    console.print(Text(caption, style="italic"), soft_wrap=True)
    for total in totals:
        console.print(total_in_words(total), soft_wrap=True)
    if len(totals) > 1:
        console.print(
            "different data may hold the same people, and different units do not add up: for a person, what is spent "
            "on every data set that holds them composes",
            soft_wrap=True,
        )


def _table(entries: Sequence[Entry], width: int, searches: Mapping[str, KnownSearch]) -> list[str]:
    """Return the lines of the table, two for a run with an epsilon of its own for units held out.

    Figures are never cut. If the columns do not fit, units are left out, which the totals state, then the beginnings of
    folders, then other columns of words; a table of figures alone may be wider than the window.
    """
    rows = [dict(zip(HEADINGS, _cells(entry, searches))) for entry in entries]
    wide = {name: max(_widest(name), *(_widest(row[name]) for row in rows)) for name in HEADINGS}
    shown = list(HEADINGS)

    def spare(folder: int) -> int:
        return width + len(GAP) - sum((folder if name == "folder" else wide[name]) + len(GAP) for name in shown)

    for name in LEFT_OUT:
        if spare(wide["folder"] if name == "unit" else min(wide["folder"], LEAST_OF_A_FOLDER)) >= 0:
            break
        shown.remove(name)
    wide["folder"] = min(wide["folder"], max(LEAST_OF_A_FOLDER, spare(0)))
    for row in rows:
        row["folder"] = shorten_path(row["folder"], wide["folder"])
    lines = [_line({name: name for name in shown}, wide)]
    for row in rows:
        cells = {name: row[name].split("\n") for name in shown}
        for number in range(max(map(len, cells.values()))):
            parts = {name: cell[number] if number < len(cell) else "" for name, cell in cells.items()}
            lines.append(_line(parts, wide))
    left_out = [name for name in HEADINGS if name not in shown]
    hidden = f" Not shown for want of room: {', '.join(left_out)} (--json shows all)." if left_out else ""
    marked = f" {CAPTION_OF_SEARCHES}" if any(entry.promise.run in searches for entry in entries) else ""
    return [*lines, f"{CAPTION}{marked}{hidden}"]


def shorten_path(path: str, width: int) -> str:
    """Return the end of a path, which tells runs apart, in ``width`` characters: cut at a slash if there is one."""
    if len(path) <= width:
        return path
    end = path[1 - width :]
    return f"…{end[max(0, end.find('/')) :]}"


def _widest(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def _line(cells: dict[str, str], wide: dict[str, int]) -> str:
    return GAP.join(cell.ljust(wide[name]) for name, cell in cells.items()).rstrip()


def _cells(entry: Entry, searches: Mapping[str, KnownSearch]) -> tuple[str, ...]:
    """Return what the table says of a run, by heading."""
    from fdp.cli.ledger_totals import short_fingerprint
    from fdp.privacy.guarantee import held_out_epsilon, short_name
    from fdp.privacy.shown_numbers import shown_delta, shown_epsilon

    promise, folder, steps, how, _ = entry
    epsilon = "not private" if promise.epsilon is None else shown_epsilon(promise.epsilon)
    epsilon += MARK_OF_SEARCHES * (promise.run in searches)
    if (held_out := held_out_epsilon(promise)) is not None:
        epsilon += f"\n{shown_epsilon(held_out)} held out"
    delta = "" if promise.delta is None else shown_delta(promise.delta)
    made = f"{'?' if steps is None else steps} of {promise.steps or '?'}"
    unit = promise.unit.partition(" (")[0]  # the totals below state it in full
    begun = (promise.date or "")[:10], short_name(promise), short_fingerprint(promise)
    return *begun, epsilon, delta, made, how or "no word of it", unit, folder
