"""Counts of a dataset: how much was read, how much of it is not trained on, and the sentences that report it.

    1,799 records, each a sample of up to 513 tokens
    12 of 1,799 records are longer than the 513 tokens of a sample: their ends are not trained on

**Counts of private data are private.** They go to the screen and to ``summary.json``, which no budget covers, and
never to anything that is shared.

    >>> reading = read_counts_of(dataset)                  # None if the dataset has no counts
    >>> reading.line(), reading.warnings()
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fdp.data.units import UnitKind


class ReadCounts(NamedTuple):
    """The counts of a dataset; a sample, or a window of a user, holds at most ``tokens`` tokens.

    ``texts`` texts became ``samples`` samples with ``windows`` windows in total. ``cut`` texts lost their end, and
    ``unlearned`` of these all that would have been learned. ``capped`` users have ``left_out`` windows beyond those
    used. In ``silent`` samples nothing is learned. ``tail`` tokens fill no window. ``links`` files are links to others.
    """

    kind: UnitKind
    samples: int
    tokens: int
    word: str
    texts: int = 0
    windows: int = 0
    cut: int = 0
    unlearned: int = 0
    capped: int = 0
    left_out: int = 0
    silent: int = 0
    tail: int = 0
    links: int = 0

    def line(self) -> str:
        """Return one line about the data that was read."""
        size = f"{self.tokens:,} {self.word}s"
        if self.kind is UnitKind.WINDOW:
            rest = f"; {_count(self.tail, self.word)} at the end fill no window and are left out" if self.tail else ""
            return f"{_count(self.samples, 'window')} of {size}{rest}"
        texts = _count(self.texts, "file" if self.kind is UnitKind.FILE else "record")
        if self.kind is UnitKind.USER:
            return f"{texts} of {_count(self.samples, 'user')}, in {_count(self.windows, 'window')} of up to {size}"
        if self.kind is UnitKind.ROW:
            return f"{texts}, packed into {_count(self.samples, 'row')} of up to {size}"
        return f"{texts}, each a sample of up to {size}"

    def warnings(self) -> list[str]:
        """Return a sentence about each part that is not trained on, with its count and the option that changes it."""
        name = {UnitKind.USER: "user", UnitKind.ROW: "row", UnitKind.FILE: "file"}.get(self.kind, "record")
        texts = _count(self.texts, "file" if self.kind is UnitKind.FILE else "record")
        found: list[str] = []
        if self.cut:
            lost = f" ({self.unlearned:,} of them lose all that would be learned)" if self.unlearned else ""
            found.append(
                f"{self.cut:,} of {texts} are longer than the {self.tokens:,} {self.word}s of a sample: their ends are "
                f"not trained on{lost}; a longer --context keeps more of them"
            )
        if self.capped:
            most = (self.windows + self.left_out, "window")
            found.append(
                f"{self.capped:,} of {_count(self.samples, 'user')} have more windows than --windows-per-user: "
                f"{self.left_out:,} of {_count(*most)} are not trained on"
            )
        if self.silent:
            found.append(
                f"{self.silent:,} of {_count(self.samples, name)} hold nothing to learn (no answer, too short, or cut "
                "before it): they are sampled like the others and change nothing"
            )
        if self.links:
            found.append(f"{_count(self.links, 'file')} of the folder are links to others that are read: left out")
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the counts by name, for a file that no budget covers."""
        return self._asdict() | {"kind": self.kind.value}


def read_counts_of(dataset: Any) -> ReadCounts | None:
    """Return the counts of a dataset, or None if it has none."""
    found = getattr(dataset, "reading", None)
    return found if isinstance(found, ReadCounts) else None


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
