"""The unit of privacy in words: what one sample is, and what that means for the author of a text.

    window   one window of 129 bytes                      a longer text is several samples
    record   one record (its first 129 bytes)             a person's ten records are ten samples
    user     one user (up to 8 windows of 129 bytes)      all of a user's records are one sample

Every text that names the unit (the header of a run, docs/data.md) takes it from :func:`privacy_unit`.

    >>> sentence(dataset_unit(dataset), change="added or removed")
    'one window of 129 bytes, added or removed; a longer text is several samples, ...'
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple


class UnitKind(Enum):
    """The unit of privacy: what one sample is."""

    WINDOW = "window"
    RECORD = "record"
    FILE = "file"
    USER = "user"
    ROW = "row"
    IMAGE = "image"
    SAMPLE = "sample"


class PrivacyUnit(NamedTuple):
    """The unit as a noun phrase (``one``), and its meaning for a person or a longer text (``note``)."""

    one: str
    note: str


def privacy_unit(kind: UnitKind, *, tokens: int = 0, word: str = "token", windows: int = 0) -> PrivacyUnit:
    """Describe a unit whose sample or window holds up to ``tokens`` tokens.

    ``word`` is the noun for a token; ``windows`` is the largest number of windows used per user.
    """
    size = f"{tokens} {word}s"
    return {
        UnitKind.WINDOW: PrivacyUnit(
            f"one window of {size}",
            "a longer text is several samples, a text across a window border is two, and a person's ten texts are "
            "ten or more",
        ),
        UnitKind.RECORD: PrivacyUnit(
            f"one record (its first {size})",
            "the whole record is protected, whatever its length; a person's ten records are ten samples",
        ),
        UnitKind.FILE: PrivacyUnit(
            f"one file (its first {size})",
            "the whole file is protected, whatever its length; a person's ten files are ten samples",
        ),
        UnitKind.USER: PrivacyUnit(
            f"one user (up to {windows} window{'' if windows == 1 else 's'} of {size})",
            "all of a user's records are one sample, however many and long; a person with two names is two users",
        ),
        UnitKind.ROW: PrivacyUnit(
            f"one packed row of anyone's records (up to {size})",
            "a record or a person is not protected at the stated epsilon",
        ),
        UnitKind.IMAGE: PrivacyUnit("one labelled image", "a person's ten images are ten samples"),
        UnitKind.SAMPLE: PrivacyUnit("one sample", "the dataset decides what a sample contains"),
    }[kind]


def dataset_unit(dataset: Any) -> PrivacyUnit:
    """Return the unit that a dataset states, or "one sample" if it states none."""
    unit = getattr(dataset, "unit", None)
    return unit if isinstance(unit, PrivacyUnit) else privacy_unit(UnitKind.SAMPLE)


def sentence(unit: PrivacyUnit, *, change: str) -> str:
    """Return the unit with the ``change`` that makes two datasets neighbours, such as "added or removed"."""
    return f"{unit.one}, {change}; {unit.note}"
