"""The unit of privacy in words: what one sample is, and what that means for the author of a text.

    window   one window of 129 bytes                      a longer text is in several windows
    record   one record (its first 129 bytes)             a person's ten records are ten samples
    user     one user (up to 8 windows of 129 bytes)      all of a user's records are one sample
             one user, named by patient (up to ...)       the same; users by another field are another unit
             one user, a folder of texts (up to ...)      all files of a folder are one sample

Every text that names the unit (the header of a run, the statement, docs/data.md) takes it from :func:`privacy_unit`.
Nothing here depends on the data: the unit is named in files that are shared.

    >>> sentence(dataset_unit(dataset), change="added or removed")
    'one window of 129 bytes, added or removed; a longer text is in several windows, ...'
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


A_FOLDER = "a folder of texts"
"""What a user is if ``--user-field folder`` names them."""


class PrivacyUnit(NamedTuple):
    """The unit as a noun phrase (``one``), and its meaning for a person or a longer text (``note``)."""

    one: str
    note: str


def named_by(field: str) -> str:
    """Return which users they are that a field names: the users of two fields are different units."""
    return f"named by {field}"


def privacy_unit(
    kind: UnitKind, *, tokens: int = 0, word: str = "token", windows: int = 1, filled: str = "", which: str = ""
) -> PrivacyUnit:
    """Describe a unit whose sample or window holds up to ``tokens`` tokens.

    ``word`` is the noun for a token, ``windows`` the largest number of windows used of a user or a record, ``filled``
    what a user's window holds, such as "each the beginning of a record", and ``which`` says which users they are:
    :func:`named_by` a field, or ``A_FOLDER``.
    """
    size = f"{tokens} {word}s"
    first = f"its first {size}" if windows == 1 else f"its first {windows} windows of {size}"
    several = f"up to {windows} window{'' if windows == 1 else 's'} of {size}" + (f", {filled}" if filled else "")
    return {
        UnitKind.WINDOW: PrivacyUnit(
            f"one window of {size}",
            "a longer text is in several windows, a shorter one in one or two, beside others; a person's ten texts "
            "may be in ten windows or more",
        ),
        UnitKind.RECORD: PrivacyUnit(
            f"one record ({first})",
            "the whole record is protected, whatever its length; a person's ten records are ten samples",
        ),
        UnitKind.FILE: PrivacyUnit(
            f"one file ({first})",
            "the whole file is protected, whatever its length; a person's ten files are ten samples",
        ),
        UnitKind.USER: PrivacyUnit(
            f"one user{', ' * bool(which)}{which} ({several})",
            "all files in a folder, at any depth, are one sample, however many and long; a person with texts in two "
            "folders is two users"
            if which == A_FOLDER
            else "all of a user's records are one sample, however many and long; a person with two names is two users",
        ),
        UnitKind.ROW: PrivacyUnit(
            f"one packed row of anyone's records (up to {size})",
            "one record more or less can change many rows: neither a record nor a person is protected at the stated "
            "epsilon",
        ),
        UnitKind.IMAGE: PrivacyUnit("one labelled image", "a person's ten images are ten samples"),
        UnitKind.SAMPLE: PrivacyUnit("one sample", "the dataset decides what a sample contains"),
    }[kind]


def beside_public(unit: PrivacyUnit) -> PrivacyUnit:
    """Return the unit of private data that is trained on together with public data."""
    return PrivacyUnit(f"{unit.one} of the private data", f"{unit.note}; the public data is not protected")


def dataset_unit(dataset: Any) -> PrivacyUnit:
    """Return the unit that a dataset states, or "one sample" if it states none."""
    unit = getattr(dataset, "unit", None)
    return unit if isinstance(unit, PrivacyUnit) else privacy_unit(UnitKind.SAMPLE)


def sentence(unit: PrivacyUnit, *, change: str) -> str:
    """Return the unit with the ``change`` that makes two datasets neighbours, such as "added or removed"."""
    return f"{unit.one}, {change}; {unit.note}"


def statement(unit: PrivacyUnit, *, change: str) -> str:
    """Return the unit as sentences for a privacy statement."""
    return (
        f"The unit of privacy is {unit.one}. Neighbouring datasets differ in one unit, {change}. {_start(unit.note)}."
    )


def _start(words: str) -> str:
    return words[:1].upper() + words[1:]
