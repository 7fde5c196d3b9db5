"""JSON records: a record on every line, or a list of records.

Errors name file, line and record, and never show content.

    >>> for place, record in read_lines(Path("mail/a.jsonl")): ...          # "mail/a.jsonl, line 7", {...}
    >>> for place, record in read_list(Path("mail/b.json")): ...            # "mail/b.json, line 1, record 7", {...}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fdp.data.record_fields import json_type
from fdp.data.text_files import GZIP_ERRORS, damaged_archive, open_bytes, read_bytes
from fdp.types import FdpError


def read_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the record of every line that is not blank, with its place."""
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        record, _ = _parse_json(_decode_utf8(line.rstrip(b"\r\n"), place), 0, place)
        yield place, _check_object(record, place)


def _lines(file: Path) -> Iterator[bytes]:
    with open_bytes(file) as lines:
        try:
            yield from lines
            return
        except GZIP_ERRORS:
            pass
    raise damaged_archive(file)


def read_list(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a JSON list, or the one record, with their places."""
    text = _decode_utf8(read_bytes(file), str(file))
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
        f"{place}: expected a JSON object in UTF-8, got a byte at position {position} that is not; convert the file, "
        f"for example: iconv -f latin1 -t utf-8 OLD > NEW, if it is Latin-1"
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
