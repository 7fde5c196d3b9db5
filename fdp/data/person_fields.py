"""The fields of records by name, and the field that seems to name a person.

If records have a field such as ``patient_id`` and the unit is a window, the guarantee is about a window, although the
person could be protected. :class:`FieldCensus` watches records as they are read and counts, per field, how many values
there are. Values are only counted: none is stored, and none is shown. Dates, times and fractions name nobody.

    >>> census = FieldCensus()
    >>> for place, record in census.watch(read_records(source)): ...
    >>> census.person(read=("text",))
    PersonField(field='patient_id', values=600, records=1799)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fdp.data.nouns import words_of

LONGEST_NAME = 64
"""Characters of a value that may be a name."""
MOST_VALUES = 1 << 20
"""Values that are told apart in a field."""
FEWEST_PEOPLE = 10
"""Values of a field that may be people although its name does not say so."""
MOST_MISSING = 0.1
"""Largest part of the records in which a field with names may be missing."""
PERSON_WORDS = frozenset(
    {
        "author", "user", "patient", "sender", "account", "customer", "client", "person", "speaker", "member",
        "employee", "student", "subscriber", "writer", "username", "userid", "uid", "email", "participant",
        "respondent", "applicant", "caller", "citizen", "donor", "reviewer", "poster", "login", "owner", "subject",
        "patientid", "authorid", "customerid", "clientid", "screenname", "nick", "nickname",
    }
)  # fmt: skip
_OTHER_WORDS = frozenset(
    {
        "date", "time", "timestamp", "year", "month", "day", "hour", "lang", "language", "label", "class", "category",
        "topic", "source", "type", "url", "link", "title", "status", "version", "split", "score", "rating", "count",
        "length", "line", "page", "city", "country", "state", "place", "subreddit", "domain", "tag", "tags", "file",
        "model", "size", "price", "index", "text", "prompt", "completion", "messages",
    }
)  # fmt: skip
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_CLOCK = r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?(?: ?[AaPp][Mm])?(?:Z| ?[+-]\d\d:?\d\d)?"
_DATES = rf"\d{{4}}([-/.]){_DAY}\1{_DAY}|{_DAY}([./-]){_DAY}\2(?:\d{{4}}|\d{{2}})"
_MOMENT_OR_FRACTION = re.compile(rf"(?:{_DATES})(?:(?:T|,? ){_CLOCK})?|{_CLOCK}|[+-]?\d*[.,]\d+(?:[eE][+-]?\d+)?")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_ .-]{0,31}")


class PersonField(NamedTuple):
    """A field that seems to name a person: ``values`` different ones in ``records`` records."""

    field: str
    values: int
    records: int


@dataclass
class FieldCounts:
    """Counts of one field: the records in which it is not null, its short values, as hashes, and those of nobody."""

    present: int = 0
    short: int = 0
    nobody: int = 0
    hashes: set[int] = field(default_factory=set, repr=False)


class FieldCensus:
    """Counts of the fields of all records that were watched."""

    def __init__(self) -> None:
        self.records = 0
        self.fields: dict[str, FieldCounts] = {}

    def watch(self, stream: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Pass the records on, and count their fields."""
        for place, record in stream:
            self.add(record)
            yield place, record

    def add(self, record: dict[str, Any]) -> None:
        """Count the fields of a record."""
        self.records += 1
        for name, value in record.items():
            if value is None:
                continue
            counts = self.fields.setdefault(name, FieldCounts())
            counts.present += 1
            if isinstance(value, bool) or not isinstance(value, (str, int)):
                continue
            words = str(value)
            if len(words) <= LONGEST_NAME and words.strip() and "\n" not in words:
                counts.short += 1
                counts.nobody += names_nobody(words)
                if len(counts.hashes) < MOST_VALUES:
                    counts.hashes.add(hash(words.strip().casefold()))

    def person(self, *, read: Iterable[str] = ()) -> PersonField | None:
        """Return the field that seems to name a person, by its name or by repeated short values; None without one.

        ``read`` are fields that are read as text.
        """
        likely: list[tuple[int, int, PersonField]] = []
        for name, counts in self.fields.items():
            if name in read or counts.short < (1 - MOST_MISSING) * self.records or not is_plain_name(name):
                continue
            if counts.nobody == counts.short:
                continue
            words, values = set(words_of(name)), len(counts.hashes)
            named = bool(words & PERSON_WORDS)
            repeated = FEWEST_PEOPLE <= values <= self.records / 2 and not words & _OTHER_WORDS
            if (named and values > 1) or repeated:
                likely.append((int(named), int("id" in words) + values, PersonField(name, values, self.records)))
        return max(likely)[-1] if likely else None


def names_nobody(value: str) -> bool:
    """Return True for a date, a time, or a number with a fraction: 2024-01-31, 31.1.2024, 1/31/2024 8:15, 36,5."""
    return _MOMENT_OR_FRACTION.fullmatch(value.strip()) is not None


def is_plain_name(name: str) -> bool:
    """Return True if a field's name looks like one, and not like the value in the first row of a table."""
    return _PLAIN_NAME.fullmatch(name) is not None
