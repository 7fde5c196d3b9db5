"""Files of texts, records or tokens at a path, each once.

A folder holds texts or records, not both; records of several formats may share a folder. Its files are read in the
order of their paths, each once, even if several links lead to it. Records are read by ``fdp.data.record_files``.

**Errors name file, line and field, and never show content**: no value, no field name that the user did not give, no
message of a library about a record.

    >>> source = find_source("mail/")                          # mail/a.jsonl, mail/b.csv.gz
    >>> for place, record in read_records(source): ...         # "mail/a.jsonl, line 7", {...}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from fdp.data.file_kinds import TOKENS, TOKENS_MANIFEST, Refusal, holds_records, holds_tokens, refusal_of
from fdp.data.nouns import FILE, count
from fdp.data.text_files import is_not_utf8, to_utf8
from fdp.types import FdpError

NAMED = 3
"""Files of a kind that an error names."""
SAVED_SPLITS, SAVED_STATE, SAVED_INFO = "dataset_dict.json", "state.json", "dataset_info.json"
"""Files by which a folder that ``datasets`` saved to disk is recognised: of several splits, or of one."""


class RecordForm(Enum):
    """The way a record is read: by the fields it has (``AUTO``), or as named; ``FILE`` reads each file as one text."""

    AUTO = "auto"
    TEXT = "text"
    COMPLETION = "completion"
    MESSAGES = "messages"
    FILE = "file"


class Source(NamedTuple):
    """The files at a path, each once, and whether they hold records.

    ``links`` counts further links to them, ``unread`` files that are empty or hidden.
    """

    path: Path
    files: tuple[Path, ...]
    records: bool
    links: int
    unread: int = 0


def find_token_files(path: Path) -> tuple[Path, ...]:
    """Return the files of tokens at a path: the file, or all of a folder, in the order of their paths.

    Empty if it holds anything else; ``tokens.json`` may be among them.
    """
    if path.is_file():
        return (path,) if holds_tokens(path) else ()
    if not path.is_dir():
        return ()
    files, _ = _once_each(_walk(path, {_identity(path)}))
    files = tuple(file for file in files if file.name != TOKENS_MANIFEST)
    return files if all(holds_tokens(file) for file in files) else ()


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
        raise FdpError(f"{root}: expected text or records, got nothing (empty); check that it is the one you meant")
    unread = _count_unread(root)
    if form is RecordForm.FILE:
        return Source(root, files, False, links, unread)
    refused = {file: kind for file in files if (kind := refusal_of(file)) is not None}
    records = tuple(file for file in files if file not in refused and holds_records(file))
    texts = tuple(file for file in files if file not in refused and not holds_records(file))
    if refused or (records and texts):
        raise _refuse(root, refused, records, texts)
    return Source(root, files, bool(records), links, unread)


def _refuse(root: Path, refused: Mapping[Path, Refusal], records: Sequence[Path], texts: Sequence[Path]) -> FdpError:
    """Return one error about all files that are refused: how many of each kind, and the first ones."""
    mixed = bool(records and texts)
    foreign = [file for file in (*records, *texts) if is_not_utf8(file)]
    if len(refused) == 1 and not mixed and not foreign:
        ((file, kind),) = refused.items()
        if kind is TOKENS:
            return FdpError(f"{file}: expected text or records, got {kind.one}; {kind.remedy}")
        return FdpError(
            f"{file}: expected text, .jsonl, .json, .csv, .tsv or .parquet, got {kind.one}; {kind.remedy}"
            f"{'' if file == root else ', or move it out of the folder'} (if it is a plain text with such a name, give "
            f"--form file)"
        )
    got, todo = [], []
    for kind in dict.fromkeys(refused.values()):
        found = [file for file, its in refused.items() if its is kind]
        got.append(f"{kind.one if len(found) == 1 else f'{len(found):,} {kind.several}'} ({_named(found, root)})")
        todo.append(kind.remedies)
    if foreign:
        got.append(f"{count(len(foreign), FILE)} not in UTF-8 ({_named(foreign, root)})")
        todo.append(f"convert others to UTF-8: {to_utf8(foreign[0])}")
    if mixed:
        got.append(
            f"records in {count(len(records), FILE)} ({_named(records, root)}) and text in "
            f"{count(len(texts), FILE)} ({_named(texts, root)})"
        )
        todo.append("give records and texts folders of their own, or --form file if every file is one text")
    what = "records only or texts only" if mixed else "text, .jsonl, .json, .csv, .tsv or .parquet"
    away = ", or move them out of the folder" * bool(refused)
    return FdpError(f"{root}: expected {what}, got {', '.join(got)}; {'; '.join(todo)}{away}")


def _named(files: Sequence[Path], root: Path) -> str:
    """Return the first of some files in a folder, and how many more there are."""
    shown = ", ".join(str(file.relative_to(root)) for file in files[:NAMED])
    return shown + (f" and {len(files) - NAMED:,} more" if len(files) > NAMED else "")


def _walk(folder: Path, above: set[tuple[int, int]]) -> Iterator[Path]:
    """Yield the files of a folder tree; follow links, but not in circles."""
    if (saved := _saved_dataset(folder)) is not None:
        yield from saved
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if (identity := _identity(path)) not in above:
                yield from _walk(path, above | {identity})
        elif path.is_file() and path.stat().st_size:
            yield path


def _count_unread(root: Path) -> int:
    """Return how many files in a folder tree are empty or hidden; hidden folders are not looked into."""
    unread, seen = 0, set()
    for folder, folders, files in os.walk(root, followlinks=True):
        if (identity := _identity(Path(folder))) in seen:
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = [name for name in folders if not name.startswith(".")]
        found = [path for name in files if (path := Path(folder, name)).is_file()]  # no link that leads nowhere
        unread += sum(path.name.startswith(".") or not path.stat().st_size for path in found)
    return unread


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _once_each(paths: Iterator[Path] | list[Path]) -> tuple[tuple[Path, ...], int]:
    """Return each file by its first path, and the number of further paths that led to one of them."""
    found: dict[tuple[int, int], Path] = {}
    every = 0
    for path in paths:
        found.setdefault(_identity(path), path)
        every += 1
    return tuple(found.values()), every - len(found)


def _saved_dataset(folder: Path) -> list[Path] | None:
    """Return the files of a folder that ``datasets.save_to_disk`` wrote, in their order; None for another folder."""
    if (folder / SAVED_SPLITS).is_file():
        splits = sorted(each.name for each in folder.iterdir() if (each / SAVED_STATE).is_file())
        named = ", ".join(str(folder / name) for name in splits[:4]) or "the folder of one of them"
        raise FdpError(f"{folder}: expected one split of a saved dataset, got a folder of several; name one: {named}")
    if not ((folder / SAVED_STATE).is_file() and (folder / SAVED_INFO).is_file()):
        return None
    try:
        listed = [each["filename"] for each in json.loads((folder / SAVED_STATE).read_bytes())["_data_files"]]
        files = [folder / name for name in listed]
    except (ValueError, KeyError, TypeError):
        files = []
    missing = [file for file in files if not file.is_file()]
    if not files or missing:
        got = f"no {missing[0].name}" if missing else f"a {SAVED_STATE} that lists none"
        raise FdpError(f"{folder}: expected the .arrow files of a saved dataset, got {got}; save it again")
    return files
