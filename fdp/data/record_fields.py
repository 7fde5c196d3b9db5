"""The fields of a record: tell its form, and take out its text and its owner.

The form of a record is decided by an option or by the record alone, never by another record. Errors name file, line
and field, and never show content.

    >>> record_form(record, "text", place), text_field(record, "text", place), owner_of(record, "sender", place)
"""

from __future__ import annotations

import shlex
from difflib import get_close_matches
from typing import Any

from fdp.data.files import RecordForm
from fdp.data.person_fields import is_plain_name
from fdp.data.text_files import check_text
from fdp.data.user_names import normalize_name
from fdp.types import FdpError

USUAL_FIELDS = (
    "text", "content", "body", "prompt", "completion", "instruction", "response", "messages", "conversations",
)  # fmt: skip
"""Names of fields that are no secret, and so may be shown."""
CLOSE = 0.7
"""Part of the letters that a name shares with a mistyped one, at least."""
SHOWN_BY = "fdp inspect --data shows the fields"


class MissingText(FdpError):
    """A record has no text in the field that should hold it; ``problem`` is the message without its remedy.

    ``likely`` is a field that seems to hold it.
    """

    def __init__(self, problem: str, likely: str | None = None) -> None:
        super().__init__(f"{problem}; name the field with --field{example_of(likely)} ({SHOWN_BY})")
        self.problem = problem


def example_of(field: str | None) -> str:
    """Return a field as an example of ``--field``; empty without one."""
    return "" if field is None else f", such as --field {shlex.quote(field)}"


def record_form(record: dict[str, Any], field: str, place: str) -> RecordForm:
    """Return the form of a record, given the fields it has; a null field counts as missing.

    Guarantees:
      - the answer is a function of the record alone; a record that could be read in two ways is refused.
    """
    there = {name for name, value in record.items() if value is not None}
    found = {
        RecordForm.TEXT: field in there,
        RecordForm.COMPLETION: {"prompt", "completion"} <= there,
        RecordForm.MESSAGES: "messages" in there,
    }
    fits = [form for form, fit in found.items() if fit]
    if not fits:
        raise MissingText(
            f"{place}: expected text in field {field!r}, or in 'prompt' and 'completion', or a list in 'messages', got "
            f"{describe(record, field)}"
        )
    if len(fits) > 1:
        ways = " and as ".join(form.value for form in fits)
        raise FdpError(
            f"{place}: expected a record that can be read in one way, got one that can be read as {ways}; choose one "
            f"with --form {' or --form '.join(form.value for form in fits)}"
        )
    return fits[0]


def text_field(record: dict[str, Any], field: str, place: str) -> str:
    """Return the text in a field; ``place`` names the record in errors."""
    if not isinstance(record.get(field), str):
        raise MissingText(f"{place}: expected text in field {field!r}, got {describe(record, field)}")
    return record[field]


def describe(record: dict[str, Any], field: str) -> str:
    """Describe a field by its JSON type, without its content; if it is missing, list the usual fields there are.

    A field whose name is close to a mistyped one is named too, unless its name looks like content or ``field`` is a
    usual one, which nobody may have typed.
    """
    if field in record:
        return f"{json_type(record[field])} there"
    usual = [repr(name) for name in USUAL_FIELDS if name in record]
    plain = [name for name in record if is_plain_name(name)] if field not in USUAL_FIELDS else []
    close = get_close_matches(field, plain, n=1, cutoff=CLOSE)
    meant = f" (did you mean {close[0]!r}?)" if close else f" ({', '.join(usual)} there)" if usual else ""
    return f"no such field among its {len(record)}{meant}"


def json_type(value: Any) -> str:
    """Return the type of a JSON value in words."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    known = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return known.get(type(value), "something else")


def owner_of(record: dict[str, Any], user_field: str | None, place: str) -> str:
    """Return the owner of a record: the normalized name of its user, or its own place without a ``user_field``.

    The number 7 is the user "7". A record that does not name its user is refused: it could be anyone's.
    """
    if user_field is None:
        return place
    user = record.get(user_field)
    if isinstance(user, str):
        check_text(user, f"{place}, field {user_field!r}")
    name = normalize_name(str(user)) if isinstance(user, (str, int)) and not isinstance(user, bool) else ""
    if not name:
        got = "a name without visible characters" if isinstance(user, str) else describe(record, user_field)
        raise FdpError(
            f"{place}: expected a user's name or number in field {user_field!r}, got {got}; name the field with "
            f"--user-field ({SHOWN_BY}), or drop records without a known user"
        )
    return name
