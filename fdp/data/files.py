"""Files with texts or records: which there are, what they hold, and what cannot be read.

| name, in any case    | what it holds                                                            |
|----------------------|--------------------------------------------------------------------------|
| ``.jsonl .ndjson``   | a record on every line                                                   |
| ``.json``            | a list of records, or one record                                         |
| ``.npy .bin``        | tokens: not read here, but by ``fdp.data.datasets``                               |
| ``.csv .gz ...``     | refused: tables and archives                                             |
| any other            | a text                                                                   |

A folder holds texts or records, not both. Its files are read in the order of their paths, each once, by however many
links it is reached. What a record is read as is decided by an option or by the record alone, never by another record.

**Errors name file, line and field, and never show content**: no value, no field's name that the user did not give, no
message of a library about a record.

    >>> source = find_source("mail/")                          # mail/a.jsonl, mail/b.ndjson
    >>> for place, record in read_records(source): ...         # "mail/a.jsonl, line 7", {...}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from fdp.data.user_names import normal
from fdp.types import FdpError

LINES = (".jsonl", ".ndjson")
LIST = ".json"
TOKENS = (".npy", ".bin")
UNREAD = (".csv", ".tsv", ".parquet", ".arrow", ".feather", ".xlsx", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar")
"""Tables, of which a row is a record, and archives: read as a text, all of it would be one."""

USUAL = ("text", "content", "body", "prompt", "completion", "instruction", "response", "messages", "conversations")
"""Names of fields that are nobody's secret, and so may be shown."""


class Form(Enum):
    """What a record is read as: by what it holds, or as one of the others; ``FILE`` reads every file as one text."""

    AUTO = "auto"
    TEXT = "text"
    COMPLETION = "completion"
    MESSAGES = "messages"
    FILE = "file"


class Source(NamedTuple):
    """The files at a path, each once, and whether they hold records; ``links`` counts those that were there again."""

    path: Path
    files: tuple[Path, ...]
    records: bool
    links: int


def holds_records(path: Path) -> bool:
    """Return True if a file of this name holds records."""
    return path.suffix.lower() in (*LINES, LIST)


def holds_tokens(path: Path) -> bool:
    """Return True if a file of this name holds tokens."""
    return path.suffix.lower() in TOKENS


def find_source(path: str | os.PathLike[str], *, form: Form = Form.AUTO) -> Source:
    """Return the files at ``path``: itself, or all that are not empty or hidden in the folder and the folders in it.

    Guarantees:
      - no file is there twice, whatever links lead to it;
      - files of records and files of text are not mixed, unless ``form`` is ``FILE``: then all are texts.
    """
    root = Path(path)
    if not root.exists():
        raise FdpError(f"data: expected a path that exists, got {os.fspath(path)!r}")
    files, links = _once_each(_walk(root, {_identity(root)}) if root.is_dir() else [root])
    if not files:
        raise FdpError(f"{root}: expected text or records, got nothing (empty)")
    if form is Form.FILE:
        return Source(root, files, False, links)
    for file in files:
        if file.suffix.lower() in UNREAD:
            raise FdpError(
                f"{file}: expected text, .jsonl, .ndjson or .json, got a table or an archive; unpack it or write its "
                "rows as .jsonl records, or give --form file if all of it is one text"
            )
        if holds_tokens(file):
            raise FdpError(
                f"{file}: expected text or records, got a file of tokens; give it by itself, with --unit window"
            )
    kinds: dict[bool, Path] = {}
    for file in files:
        kinds.setdefault(holds_records(file), file)
    if len(kinds) > 1:
        raise FdpError(
            f"{root}: expected records only or texts only, got records in {kinds[True]} and text in {kinds[False]}; "
            "give them folders of their own, or --form file if every file is one text"
        )
    return Source(root, files, True in kinds, links)


def read_records(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every record, with the words that name its place."""
    for file in source.files:
        yield from _listed(file) if file.suffix.lower() == LIST else _by_line(file)


def record_form(record: dict[str, Any], field: str, place: str) -> Form:
    """Return what a record can be read as, by the fields it has; an empty field (null) counts as none.

    Guarantees:
      - the answer is a function of the record alone; a record that could be read in two ways is refused.
    """
    there = {name for name, value in record.items() if value is not None}
    found = {
        Form.TEXT: field in there,
        Form.COMPLETION: {"prompt", "completion"} <= there,
        Form.MESSAGES: "messages" in there,
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
            f"{place}: expected a record that can be read in one way, got one that can be read as {ways}; say which is "
            f"meant with --form {' or --form '.join(form.value for form in fits)}"
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
    """Return what stands in a field, without its content, and which of the usual fields there are if it is missing."""
    if field in record:
        return f"{json_type(record[field])} there"
    usual = [repr(name) for name in USUAL if name in record]
    return f"no such field among its {len(record)}" + (f" ({', '.join(usual)} there)" if usual else "")


def json_type(value: Any) -> str:
    """Return the kind of a JSON value in words."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    known = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return known.get(type(value), "something else")


def owner_of(record: dict[str, Any], user_field: str | None, place: str) -> str:
    """Return who owns a record: the user it names, in the one form of all spellings, or without a field itself.

    The number 7 is the user "7". A record that does not name its user is refused: it could be anyone's.
    """
    if user_field is None:
        return place
    user = record.get(user_field)
    if isinstance(user, str):
        check_text(user, f"{place}, field {user_field!r}")
    name = normal(str(user)) if isinstance(user, (str, int)) and not isinstance(user, bool) else ""
    if not name:
        got = "a name of which nothing is seen" if isinstance(user, str) else describe(record, user_field)
        raise FdpError(
            f"{place}: expected a user's name or number in field {user_field!r}, got {got}; name the field with "
            "--user-field, or leave out records of no known user"
        )
    return name


def check_text(text: str, place: str) -> None:
    """Refuse text that is no Unicode: half of a pair of surrogates."""
    try:
        text.encode()
        return
    except UnicodeEncodeError:  # raised again below, since a chained error would show the text
        pass
    raise FdpError(f"{place}: expected text, got a lone surrogate, which is half a character; repair the record")


def read_text(file: Path) -> str:
    """Return the text of a file."""
    content = file.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        position = error.start
    raise FdpError(f"{file}: expected UTF-8 text, got a byte that is not at position {position}; convert the file")


def _walk(folder: Path, above: set[tuple[int, int]]) -> Iterator[Path]:
    """Yield the files of a folder and the folders in it, links followed but not in circles."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if (identity := _identity(path)) not in above:
                yield from _walk(path, above | {identity})
        elif path.is_file() and path.stat().st_size:
            yield path


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _once_each(paths: Iterator[Path] | list[Path]) -> tuple[tuple[Path, ...], int]:
    """The files, each by its first path, and how many paths led to one that was there already."""
    found: dict[tuple[int, int], Path] = {}
    count = 0
    for path in paths:
        found.setdefault(_identity(path), path)
        count += 1
    return tuple(found.values()), count - len(found)


def _by_line(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            record, _ = _decoded(_utf8(line.rstrip(b"\r\n"), place), 0, place)
            yield place, _checked(record, place)


def _listed(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a list, or the one record."""
    text = _utf8(file.read_bytes(), str(file))
    at, line, number = _skip(text, 0), 1, 0
    several = text[at : at + 1] == "["
    at = _skip(text, at + 1) if several else at
    counted = 0
    while not (several and text[at : at + 1] == "]"):
        number += 1
        line, counted = line + text.count("\n", counted, at), at
        place = f"{file}, line {line}, record {number}"
        record, at = _decoded(text, at, place, whole=not several)
        yield place, _checked(record, place)
        at = _skip(text, at)
        if not several:
            return
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise FdpError(f"{place}: expected a comma or the end of the list after it, got something else")
    if text[at + 1 :].strip():
        raise FdpError(f"{file}: expected one list of records, got more after it; name a file of JSON lines .jsonl")


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\n", "\r"):
        at += 1
    return at


def _utf8(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        position = error.start
    raise FdpError(
        f"{place}: expected a JSON object in UTF-8, got a byte that is not at position {position}; convert the file"
    )


def _decoded(text: str, at: int, place: str, *, whole: bool = True) -> tuple[Any, int]:
    """The JSON value that begins at ``at``, and where it ends; ``whole``: nothing may follow."""
    try:
        value, end = _DECODER.raw_decode(text, _skip(text, at))
        if not whole or _skip(text, end) == len(text):
            return value, end
        why = "more after it (is it JSON lines? then name the file .jsonl)"
    except json.JSONDecodeError as error:  # its own words may show a character of the record
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        why = f"what is none from {line}column {error.colno} on"
    except RecursionError:
        why = "one that is nested too deeply"
    except _Twice:
        why = "one with a field twice"
    except ValueError:
        why = "one with a number of too many digits"
    raise FdpError(f"{place}: expected a JSON object in UTF-8, got {why}; repair or drop the record")


def _checked(record: Any, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise FdpError(f"{place}: expected a JSON object, got {json_type(record)}")
    return record


class _Twice(ValueError):
    """A field twice in one object, of which a reader would take either."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
