"""What was read, and what of it is not trained on: counts, and the sentences that say them before a run.

    1,799 records in as many samples of up to 513 tokens
    12 of 1,799 records are longer than the 513 tokens of a sample: their ends are not trained on

**Counts of private data are private**: they are for the screen and for ``summary.json``, which no budget covers, and
never for anything that is shared.

    >>> reading = reading_of(dataset)                      # None: a dataset that does not count
    >>> reading.line(), reading.warnings()
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fdp.data.units import Kind


class Reading(NamedTuple):
    """Counts of a dataset as it was read. ``tokens`` is what a sample, or a window of a user's, holds at most.

    ``texts`` were read into ``samples`` of ``windows`` windows together. ``cut`` lost their end, ``unlearned`` of them
    all that would have been learned; ``capped`` users have ``left_out`` windows more than are used; in ``silent``
    samples nothing is learned; ``tail`` tokens fill no window; ``links`` files led to others that are there already.
    """

    kind: Kind
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
        """Return what was read, in one line."""
        size = f"{self.tokens:,} {self.word}s"
        if self.kind is Kind.WINDOW:
            rest = f"; {_count(self.tail, self.word)} at the end fill no window and are left out" if self.tail else ""
            return f"{_count(self.samples, 'window')} of {size}{rest}"
        texts = _count(self.texts, "file" if self.kind is Kind.FILE else "record")
        if self.kind is Kind.USER:
            return f"{texts} of {_count(self.samples, 'user')}, in {_count(self.windows, 'window')} of up to {size}"
        if self.kind is Kind.ROW:
            return f"{texts}, packed into {_count(self.samples, 'row')} of up to {size}"
        return f"{texts}, each a sample of up to {size}"

    def warnings(self) -> list[str]:
        """Return what is not trained on, each with its number and what changes it."""
        name = {Kind.USER: "user", Kind.ROW: "row", Kind.FILE: "file"}.get(self.kind, "record")
        texts = _count(self.texts, "file" if self.kind is Kind.FILE else "record")
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
        """Return the counts by name, for a file that the budget does not cover."""
        return self._asdict() | {"kind": self.kind.value}


def reading_of(dataset: Any) -> Reading | None:
    """Return the counts of a dataset that has them."""
    found = getattr(dataset, "reading", None)
    return found if isinstance(found, Reading) else None


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
