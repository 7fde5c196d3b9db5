"""JSON records: read them from files, tell their form, and take out texts and owners.

The form of a record is decided by an option or by the record alone, never by another record. Errors name file, line
and field, and never show content.

    >>> for place, record in read_records(find_source("mail/")): ...         # "mail/a.jsonl, line 7", {...}
    >>> record_form(record, "text", place), owner_of(record, "sender", place)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fdp.data.files import LIST_SUFFIX, RecordForm, Source, check_text
from fdp.data.user_names import normalize_name
from fdp.types import FdpError

USUAL_FIELDS = (
    "text", "content", "body", "prompt", "completion", "instruction", "response", "messages", "conversations",
)  # fmt: skip
"""Names of fields that are no secret, and so may be shown."""


def read_records(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every record with its place, such as "mail/a.jsonl, line 7"."""
    for file in source.files:
        yield from _read_list(file) if file.suffix.lower() == LIST_SUFFIX else _read_lines(file)


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
        raise FdpError(
            f"{place}: expected text in field {field!r}, or in 'prompt' and 'completion', or a list in 'messages', got "
            f"{describe(record, field)}; name the field with --field"
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
        raise FdpError(
            f"{place}: expected text in field {field!r}, got {describe(record, field)}; name the field with --field"
        )
    return record[field]


def describe(record: dict[str, Any], field: str) -> str:
    """Describe a field by its JSON type, without its content; if it is missing, list the usual fields there are."""
    if field in record:
        return f"{json_type(record[field])} there"
    usual = [repr(name) for name in USUAL_FIELDS if name in record]
    return f"no such field among its {len(record)}" + (f" ({', '.join(usual)} there)" if usual else "")


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
            "--user-field, or drop records without a known user"
        )
    return name


def _read_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            record, _ = _parse_json(_decode_utf8(line.rstrip(b"\r\n"), place), 0, place)
            yield place, _check_object(record, place)


def _read_list(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a JSON list, or the one record."""
    text = _decode_utf8(file.read_bytes(), str(file))
    at, line, number = _skip_spaces(text, 0), 1, 0
    several = text[at : at + 1] == "["
    at = _skip_spaces(text, at + 1) if several else at
    counted = 0
    while not (several and text[at : at + 1] == "]"):
        number += 1
        line, counted = line + text.count("\n", counted, at), at
        place = f"{file}, line {line}, record {number}"
        record, at = _parse_json(text, at, place, whole=not several)
        yield place, _check_object(record, place)
        at = _skip_spaces(text, at)
        if not several:
            return
        if text[at : at + 1] == ",":
            at = _skip_spaces(text, at + 1)
        elif text[at : at + 1] != "]":
            raise FdpError(f"{place}: expected a comma or the end of the list after it, got something else")
    if text[at + 1 :].strip():
        raise FdpError(f"{file}: expected one list of records, got more after it; name a file of JSON lines .jsonl")


def _skip_spaces(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\n", "\r"):
        at += 1
    return at


def _decode_utf8(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        position = error.start
    raise FdpError(
        f"{place}: expected a JSON object in UTF-8, got a byte that is not at position {position}; convert the file"
    )


def _parse_json(text: str, at: int, place: str, *, whole: bool = True) -> tuple[Any, int]:
    """Return the JSON value that begins at ``at``, and its end; if ``whole``, nothing may follow it."""
    try:
        value, end = _DECODER.raw_decode(text, _skip_spaces(text, at))
        if not whole or _skip_spaces(text, end) == len(text):
            return value, end
        why = "more after it (is it JSON lines? then name the file .jsonl)"
    except json.JSONDecodeError as error:  # its message may show a character of the record
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        why = f"invalid JSON from {line}column {error.colno} on"
    except RecursionError:
        why = "one that is nested too deeply"
    except _DuplicateField:
        why = "one with a field twice"
    except ValueError:
        why = "one with a number of too many digits"
    raise FdpError(f"{place}: expected a JSON object in UTF-8, got {why}; repair or drop the record")


def _check_object(record: Any, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise FdpError(f"{place}: expected a JSON object, got {json_type(record)}")
    return record


class _DuplicateField(ValueError):
    """A field that occurs twice in one object, so that two readers may take different values."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _DuplicateField
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
