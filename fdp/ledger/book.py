"""The ledger file: every run that was started on private data, and how it ended. Lines are only ever appended.

    {"event": "start", "run": ..., "promise": {...}, "folder": ..., "mac": ...}     on disk before the first step;
                                                                a run of fdp search names that: "search": ...
    {"event": "end",   "run": ..., "steps": 40, "how": "finished", "mac": ...}      absent if the process was killed

    mac_n = HMAC(key, mac_{n-1}, line n)

so that a line that was changed, removed or put elsewhere is noticed, and so is a file of another key. (Lines missing at
the end are not.) A line is one write under an exclusive lock. What a crash leaves of a line is removed by the
next writer: its run had not begun.

    >>> book = Book(folder, load_key(folder))
    >>> book.start(promise, folder=out)                     # promise.run names it
    >>> book.end(promise.run, steps=40, how="finished")
    >>> book.runs()
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from fdp.ledger.data_key import DataKey
from fdp.privacy.guarantee import Guarantee, guarantee_from_json, guarantee_to_json
from fdp.privacy.several_runs import releases_the_same
from fdp.storage.private_files import disk_errors, open_private
from fdp.types import FdpError

LEDGER_FILE = "ledger.jsonl"


class Entry(NamedTuple):
    """A run in the ledger. ``steps`` is how many it really made, None if it did not end in an orderly way.

    ``search`` is the name of the search that it is one of; None also for a search of an older fdp.
    """

    promise: Guarantee
    folder: str
    steps: int | None = None
    how: str | None = None
    search: str | None = None

    @property
    def began(self) -> bool:
        """False if the run ended before its first step, so that it released nothing."""
        return self.steps != 0

    def made(self) -> Guarantee:
        """Return the promise for the steps that were really made: valid if nothing that was seen led to the stop."""
        if self.steps is None or self.promise.releases is None:
            return self.promise
        return self.promise._replace(releases=tuple(each.within(self.steps) for each in self.promise.releases))


class Book:
    """A ledger in a folder, opened with its key."""

    def __init__(self, folder: Path, key: DataKey) -> None:
        self.path, self.key = folder / LEDGER_FILE, key

    def runs(self) -> list[Entry]:
        """Return every run, in the order of their starts.

        Guarantees:
          - a line that was damaged, changed, removed from between others or signed by another key is an error;
          - a run that goes on never has fewer steps than when it ended before, nor 0 if it was killed before.
        """
        if not self.path.exists():
            return []
        with self._locked("rb", fcntl.LOCK_SH) as file:
            lines, _ = self._read(file)
        found: dict[str, Entry] = {}
        most: dict[str, int] = {}
        for line in lines:
            name = line["run"]
            if line["event"] == "start":
                entry = Entry(guarantee_from_json(line["promise"]), line["folder"], search=line.get("search"))
                found.setdefault(name, entry)
            elif line["event"] == "resume":
                if found[name].steps is None:  # it was killed, perhaps after its first step
                    most[name] = max(most.get(name, 0), 1)
                found[name] = found[name]._replace(steps=None, how=None)
            else:
                most[name] = max(most.get(name, 0), line["steps"])
                found[name] = found[name]._replace(steps=most[name], how=line["how"])
        return list(found.values())

    def start(self, promise: Guarantee, *, folder: Path, search: str | None = None) -> None:
        """Record that a run starts, or goes on; on disk when this returns. ``search`` names the search it is one of.

        Guarantees:
          - a run that goes on with another promise than it began with is an error, since its entry would not count it.
        """
        began = [entry.promise for entry in self.runs() if entry.promise.run == promise.run]
        if not all(releases_the_same(one, promise) for one in began):
            raise FdpError(
                f"{self.path}: expected run {promise.run} to go on with the data, noise and steps that it began with, "
                f"got others, which spend a budget of their own; give another --out"
            )
        known = bool(began)
        line = {"event": "resume" if known else "start", "run": promise.run, "date": now()}
        more = {} if known else {"promise": guarantee_to_json(promise), "folder": str(folder.resolve())}
        named = {} if known or search is None else {"search": search}
        self._append(line | more | named)

    def end(self, run: str, *, steps: int, how: str) -> None:
        """Record how a run ended and how many steps it made, in all."""
        self._append({"event": "end", "run": run, "date": now(), "steps": steps, "how": how})

    def _append(self, line: dict[str, Any]) -> None:
        with disk_errors(self.path):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked("a+b", fcntl.LOCK_EX) as file:
            lines, complete = self._read(file)
            mac = self.key.sign(_signed(lines[-1]["mac"] if lines else "", line))
            file.truncate(complete)
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(line | {"mac": mac}, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _locked(self, mode: str, kind: int) -> Iterator[IO[bytes]]:
        with disk_errors(self.path), open_private(self.path, mode) as file:
            fcntl.flock(file, kind)
            yield file

    def _read(self, file: IO[bytes]) -> tuple[list[dict[str, Any]], int]:
        """Return the lines, checked, and the length of the file up to the last complete one."""
        file.seek(0)
        content = file.read()
        complete = content.rfind(b"\n") + 1
        lines, before = [], ""
        for number, text in enumerate(content[:complete].splitlines(), start=1):
            try:
                line = json.loads(text)
                mac = line.pop("mac")
                fits = mac == self.key.sign(_signed(before, line))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise self._damaged(number, "a line that fdp did not write") from None
            if not fits:
                got = (
                    "a key other than the one it was written with" if number == 1 else "a line changed, or one missing"
                )
                raise self._damaged(number, got)
            lines.append(line | {"mac": mac})
            before = mac
        return lines, complete

    def _damaged(self, number: int, got: str) -> FdpError:
        return FdpError(
            f"{self.path}, line {number}: expected the ledger as it was written, got {got}. What was spent on your "
            f"data is no longer certain: put a good copy back (with its ledger.key), or begin a new one with --ledger "
            f"FOLDER and add up by hand what was spent before"
        )


def now() -> str:
    """Return the date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _signed(before: str, line: dict[str, Any]) -> str:
    return f"{before} {json.dumps(line, sort_keys=True, allow_nan=False)}"
