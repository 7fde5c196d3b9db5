"""Text and record files at a path: find them, tell what they hold, read texts.

| name, in any case    | content                                                                  |
|----------------------|--------------------------------------------------------------------------|
| ``.jsonl .ndjson``   | a record on every line                                                   |
| ``.json``            | a list of records, or one record                                         |
| ``.npy .bin``        | tokens: read by ``fdp.data.datasets``, not here                          |
| ``.csv .gz ...``     | refused: tables and archives                                             |
| any other            | a text                                                                   |

A folder holds texts or records, not both. Its files are read in the order of their paths, each once, even if several
links lead to it. Records are read by ``fdp.data.json_records``.

**Errors name file, line and field, and never show content**: no value, no field name that the user did not give, no
message of a library about a record.

    >>> source = find_source("mail/")                          # mail/a.jsonl, mail/b.ndjson
    >>> for place, record in read_records(source): ...         # "mail/a.jsonl, line 7", {...}
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from fdp.types import FdpError

LINE_SUFFIXES = (".jsonl", ".ndjson")
LIST_SUFFIX = ".json"
TOKEN_SUFFIXES = (".npy", ".bin")
REFUSED_SUFFIXES = (
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".feather",
    ".xlsx",
    ".gz",
    ".bz2",
    ".xz",
    ".zst",
    ".zip",
    ".tar",
)
"""Tables, whose rows are records, and archives: read as text, all of their records would be one."""


class RecordForm(Enum):
    """The way a record is read: by the fields it has (``AUTO``), or as named; ``FILE`` reads each file as one text."""

    AUTO = "auto"
    TEXT = "text"
    COMPLETION = "completion"
    MESSAGES = "messages"
    FILE = "file"


class Source(NamedTuple):
    """The files at a path, each once, and whether they hold records; ``links`` counts further links to them."""

    path: Path
    files: tuple[Path, ...]
    records: bool
    links: int


def holds_records(path: Path) -> bool:
    """Return True if a file of this name holds records."""
    return path.suffix.lower() in (*LINE_SUFFIXES, LIST_SUFFIX)


def holds_tokens(path: Path) -> bool:
    """Return True if a file of this name holds tokens."""
    return path.suffix.lower() in TOKEN_SUFFIXES


def find_source(path: str | os.PathLike[str], *, form: RecordForm = RecordForm.AUTO) -> Source:
    """Return the files at ``path``: the file itself, or all files of the folder tree that are not empty or hidden.

    Guarantees:
      - no file appears twice, whatever links lead to it;
      - files of records and files of text are not mixed, unless ``form`` is ``FILE``: then all are texts.
    """
    root = Path(path)
    if not root.exists():
        raise FdpError(f"data: expected a path that exists, got {os.fspath(path)!r}")
    files, links = _once_each(_walk(root, {_identity(root)}) if root.is_dir() else [root])
    if not files:
        raise FdpError(f"{root}: expected text or records, got nothing (empty)")
    if form is RecordForm.FILE:
        return Source(root, files, False, links)
    for file in files:
        if file.suffix.lower() in REFUSED_SUFFIXES:
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


def check_text(text: str, place: str) -> None:
    """Refuse text that is not Unicode, such as half of a surrogate pair."""
    try:
        text.encode()
        return
    except UnicodeEncodeError:  # raised again below, since a chained error would show the text
        pass
    raise FdpError(f"{place}: expected text, got a lone surrogate, which is half a character; repair the record")


def read_text(file: Path) -> str:
    """Read a UTF-8 text file."""
    content = file.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        position = error.start
    raise FdpError(f"{file}: expected UTF-8 text, got a byte that is not at position {position}; convert the file")


def _walk(folder: Path, above: set[tuple[int, int]]) -> Iterator[Path]:
    """Yield the files of a folder tree; follow links, but not in circles."""
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
    """Return each file by its first path, and the number of further paths that led to one of them."""
    found: dict[tuple[int, int], Path] = {}
    count = 0
    for path in paths:
        found.setdefault(_identity(path), path)
        count += 1
    return tuple(found.values()), count - len(found)
