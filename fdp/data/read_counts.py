"""Counts of a dataset: how much was read, how much of it is not trained on, and the sentences that report it.

    600 patients, 1,799 notes, 2,137 windows of up to 513 tokens; 12 patients capped at 8 windows; --pack would halve
    the windows
    1,799 records, each a sample of up to 513 tokens; 340 records cut at 513 tokens

**Counts of private data are private.** They go to the screen and to ``summary.json``, which no budget covers, and
never to anything that is shared.

    >>> reading = read_counts_of(dataset)                  # None if the dataset has no counts
    >>> reading.line(), reading.warnings()
"""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

import numpy as np

from fdp.data.nouns import FILE, RECORD, USER, count, plural
from fdp.data.person_fields import PersonField
from fdp.data.units import UnitKind

WORTH_PACKING = 0.1
"""Smallest part of the windows that packing must save to be mentioned."""


class SampleCounts(NamedTuple):
    """Counts of every sample: arrays with one entry per sample, named as in :class:`ReadCounts`."""

    texts: np.ndarray
    windows: np.ndarray
    cut: np.ndarray
    lost: np.ndarray
    unlearned: np.ndarray
    left_out: np.ndarray
    silent: np.ndarray
    packed: np.ndarray

    def select(self, indices: np.ndarray) -> SampleCounts:
        """Return the counts of some samples."""
        return SampleCounts(*(each[indices] for each in self))


class ReadCounts(NamedTuple):
    """The counts of a dataset; a sample, or a window of a user or record, holds at most ``tokens`` tokens.

    ``texts`` texts became ``samples`` samples with ``windows`` windows in total, at most ``most`` each. ``cut`` texts
    lost their end, ``lost`` tokens in all, and ``unlearned`` of these all that would have been learned. ``capped``
    samples have ``left_out`` windows beyond those used. In ``silent`` samples nothing is learned. ``tail`` tokens fill
    no window. ``links`` files are links to others, ``unread`` ones empty or hidden. ``packed`` windows would be left if
    short texts of a user shared one; 0 if that does not apply. ``person`` and ``text`` are nouns; ``person_field``
    seems to name a person although the unit is smaller. ``public`` are the counts of public data that is mixed in.
    ``separated`` names the separators of tables, if they are unusual.
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
    lost: int = 0
    packed: int = 0
    most: int = 1
    person: str = USER
    text: str = RECORD
    person_field: PersonField | None = None
    public: ReadCounts | None = None
    unread: int = 0
    separated: str = ""

    def total(self, counts: SampleCounts) -> ReadCounts:
        """Return these counts with the sums of the samples in ``counts``."""
        sums = {name: int(each.sum()) for name, each in counts._asdict().items()}
        return self._replace(samples=len(counts.windows), capped=int((counts.left_out > 0).sum()), **sums)

    def line(self) -> str:
        """Return one line about the data: what there is, what is not trained on, and whether packing would help."""
        separated = f"separated by {self.separated}" if self.separated else ""
        parts = [self._contents(), separated, ", ".join(self._losses()), self._packing()]
        if self.public is not None:
            parts.append(f"and public: {self.public.line()}")
        return "; ".join(part for part in parts if part)

    def warnings(self) -> list[str]:
        """Return a sentence about each part that is not trained on, with its count and the option that changes it."""
        found = [self._cut_warning(), self._capped_warning(), self._silent_warning()]
        if self.links:
            what = "is a link to another that is" if self.links == 1 else "are links to others that are"
            found.append(f"{count(self.links, FILE)} of the folder {what} read: left out")
        if self.unread:
            found.append(
                f"{count(self.unread, FILE)} of the folder {'is' if self.unread == 1 else 'are'} empty, or hidden by a "
                f"name that begins with a dot: left out"
            )
        if (hint := self.person_field) is not None:
            where = f"the records have a field {hint.field!r} ({hint.values:,} values in {count(hint.records, RECORD)})"
            if self.text == FILE:
                where = f"the {count(hint.records, FILE)} are in {hint.values:,} folders; if each is a person's"
            unit = UnitKind.RECORD.value if self.kind is UnitKind.FILE else self.kind.value  # as --unit names it
            found.append(
                f"{where}: --unit user --user-field {shlex.quote(hint.field)} protects the person, "
                f"--unit {unit} only a {self.kind.value}"
            )
        return [each for each in found if each]

    def as_json(self) -> dict[str, Any]:
        """Return the counts by name, for a file that no budget covers."""
        nested = {
            "kind": self.kind.value,
            "person_field": None if self.person_field is None else self.person_field._asdict(),
            "public": None if self.public is None else self.public.as_json(),
        }
        return self._asdict() | nested

    @property
    def sample(self) -> str:
        """The noun for a sample."""
        nouns = {UnitKind.USER: self.person, UnitKind.ROW: "row", UnitKind.FILE: FILE, UnitKind.RECORD: self.text}
        return nouns.get(self.kind, self.kind.value)

    def _contents(self) -> str:
        size, texts = f"{self.tokens:,} {plural(self.word)}", count(self.texts, self.text)
        if self.kind is UnitKind.WINDOW:
            return f"{count(self.samples, 'window')} of {size}" + (f" in {texts}" if self.texts else "")
        if self.kind in (UnitKind.IMAGE, UnitKind.SAMPLE):
            return count(self.samples, self.sample)
        if self.kind is UnitKind.USER:
            return f"{count(self.samples, self.person)}, {texts}, {count(self.windows, 'window')} of up to {size}"
        if self.kind is UnitKind.ROW:
            return f"{texts}, packed into {count(self.samples, 'row')} of up to {size}"
        if self.most > 1:
            return f"{texts}, {count(self.windows, 'window')} of up to {size}"
        return f"{texts}, each a sample of up to {size}"

    def _losses(self) -> list[str]:
        found: list[str] = []
        if self.tail:
            found.append(f"{count(self.tail, self.word)} at the end {self._tail_verbs()} left out")
        if self.capped:
            found.append(f"{count(self.capped, self.sample)} capped at {count(self.most, 'window')}")
        if self.cut:
            found.append(f"{count(self.cut, self.text)} cut at {self.tokens:,} {plural(self.word)}")
        return found

    def _tail_verbs(self) -> str:
        return "fills no window and is" if self.tail == 1 else "fill no window and are"

    def _packing(self) -> str:
        every = self.windows + self.left_out
        if not self.packed or every - self.packed < WORTH_PACKING * every:
            return ""
        saved = 1 - self.packed / every
        how = "halve the windows" if 0.45 <= saved <= 0.55 else f"save {saved:.0%} of the windows"
        return f"--pack would {how}"

    def _cut_warning(self) -> str:
        if not self.cut:
            return ""
        what = "window" if self.kind is UnitKind.USER else "sample"
        none = (
            f" ({self.unlearned:,} of them lose{'s' * (self.unlearned == 1)} all that would be learned)"
            if self.unlearned
            else ""
        )
        return (
            f"{self.cut:,} of {count(self.texts, self.text)} {'is' if self.cut == 1 else 'are'} longer than the "
            f"{self.tokens:,} {plural(self.word)} of a {what}: {'its end' if self.cut == 1 else 'their ends'}, "
            f"{count(self.lost, self.word)}, {'is' if self.cut == 1 else 'are'} not trained on{none}; a longer "
            f"--context or --long split keeps more of {'it' if self.cut == 1 else 'them'}"
        )

    def _capped_warning(self) -> str:
        if not self.capped:
            return ""
        every = count(self.windows + self.left_out, "window")
        return (
            f"{self.capped:,} of {count(self.samples, self.sample)} {'has' if self.capped == 1 else 'have'} more "
            f"windows than --windows-per-user: {self.left_out:,} of {every} "
            f"{'is' if self.left_out == 1 else 'are'} not trained on"
        )

    def _silent_warning(self) -> str:
        if not self.silent:
            return ""
        hold, they, change = ("holds", "it is", "changes") if self.silent == 1 else ("hold", "they are", "change")
        return (
            f"{self.silent:,} of {count(self.samples, self.sample)} {hold} nothing to learn (no answer, too short, or "
            f"cut before it): {they} sampled like the others and {change} nothing"
        )


def read_counts_of(dataset: Any) -> ReadCounts | None:
    """Return the counts of a dataset, or None if it has none."""
    found = getattr(dataset, "reading", None)
    return found if isinstance(found, ReadCounts) else None


def select_counts(dataset: Any, indices: np.ndarray) -> ReadCounts | None:
    """Return the counts of some samples of a dataset, or None if it has none."""
    reading, counts = read_counts_of(dataset), getattr(dataset, "counts", None)
    if reading is None or not isinstance(counts, SampleCounts):
        return None if reading is None else reading._replace(samples=len(indices), tail=0, texts=0)
    return reading.total(counts.select(indices))
