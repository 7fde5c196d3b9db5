"""Names of people in data: fields of records, and folders of texts.

    >>> user_fields("notes.jsonl", text_field="text")       # ("author", "ward"), for the error about a missing one
    >>> user_fields("notes/", text_field="text")            # ("folder",): notes/ada/1.txt, notes/bob/1.txt, ...
    >>> folder_of(Path("notes/Ada/2024/1.txt"), Path("notes"), all_named=True)
    'ada'

Only names of fields are returned, never values, and only of fields that every record has: a field of one record could
itself be a secret, a field of all of them is the format of the data.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from fdp.data.files import Source, find_source
from fdp.data.nouns import words_of
from fdp.data.person_fields import (
    FEWEST_PEOPLE,
    LONGEST_NAME,
    PERSON_WORDS,
    PersonField,
    is_plain_name,
    names_nobody,
)
from fdp.data.record_fields import USUAL_FIELDS
from fdp.data.record_files import read_records
from fdp.data.user_names import normalize_name
from fdp.types import FdpError

FOLDER = "folder"
"""The only ``--user-field`` of texts."""
LOOKED_AT = 100
"""Records that are read."""


def user_fields(path: str | os.PathLike[str], *, text_field: str) -> tuple[str, ...]:
    """Return the fields of the records at ``path`` that could name a person, likely ones first; () if none is found.

    A field is left out if all of its values are dates, times or fractions, or if no two of them are equal while those
    of another field are, unless its name is that of a person.

    Guarantees:
      - a name is returned only if at least two records were read and each of them has the field.
    """
    try:
        source = find_source(path)
        if not source.records:
            return (FOLDER,) if len(_users_by_folder(source)) > 1 else ()
        records = [record for _, record in islice(read_records(source), LOOKED_AT)]
    except (FdpError, OSError):  # reported when the data is read in full
        return ()
    if len(records) < 2:
        return ()
    common = [name for name in records[0] if all(_could_name(record.get(name)) for record in records)]
    shown = [name for name in common if name not in (text_field, *USUAL_FIELDS) and is_plain_name(name)]
    values = {name: [str(record[name]) for record in records] for name in shown}
    shown = [name for name in shown if not all(map(names_nobody, values[name]))]
    named = [name for name in shown if {*words_of(name)} & PERSON_WORDS]
    others = [name for name in shown if name not in named]
    repeated = {name for name in shown if len(set(map(normalize_name, values[name]))) < len(records)}
    return (*named, *(name for name in others if name in repeated or not repeated))


def folder_of(file: Path, root: Path, *, all_named: bool) -> str:
    """Return the owner of a text: the normalized name of the folder in ``root`` that it is in, at any depth.

    A file beside these folders is its own owner if not ``all_named``; otherwise it is refused, since it could be
    anyone's.

    Guarantees:
      - files of one folder in ``root`` have one owner, whatever folders are inside it.
    """
    inside = file.relative_to(root).parts if root in file.parents else ()
    if not all_named and len(inside) < 2:
        return str(file)
    if root not in file.parents:
        raise FdpError(
            f"{file}: expected a folder with a folder for every user (--user-field {FOLDER}), got one text; name the "
            f"folder that holds the users' folders"
        )
    if len(inside) < 2:
        raise FdpError(
            f"{file}: expected it in a folder, which names its user (--user-field {FOLDER}), got it by itself; move it "
            f"into a folder of its user inside {root}, or out of {root} if it is no user's. (--unit record would "
            f"protect files, not users; --eval-fraction holds out users of --data)"
        )
    if name := _user_of(inside[0]):
        return name
    raise FdpError(f"{file}: expected a folder that names its user, got a name without visible characters; rename it")


def folders_of(source: Source) -> PersonField | None:
    """Return the folders of texts as a field that seems to name a person, if all files are in one of at least ten."""
    users = _users_by_folder(source)
    return PersonField(FOLDER, len(users), len(source.files)) if len(users) >= FEWEST_PEOPLE else None


def _users_by_folder(source: Source) -> set[str]:
    """Return the users of :func:`folder_of`, every folder looked at once; none if a file has no user."""
    folders: set[str] = set()
    for file in source.files:
        if source.path not in file.parents or file.parent == source.path:
            return set()
        folders.add(file.relative_to(source.path).parts[0])
    users = {_user_of(folder) for folder in folders}
    return set() if "" in users else users


def _user_of(folder: str) -> str:
    """Return the user that a folder's name stands for; bytes that are no text, lone surrogates here, are spelt out."""
    return normalize_name(folder.encode(errors="backslashreplace").decode())


def _could_name(value: Any) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= LONGEST_NAME
    return isinstance(value, int) and not isinstance(value, bool)
