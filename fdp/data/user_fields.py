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

from fdp.data.files import find_source
from fdp.data.nouns import words_of
from fdp.data.person_fields import LONGEST_NAME, PERSON_WORDS, is_plain_name
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

    Guarantees:
      - a name is returned only if at least two records were read and each of them has the field.
    """
    try:
        source = find_source(path)
        if not source.records:
            folders = {folder_of(file, source.path, all_named=True) for file in source.files}
            return (FOLDER,) if len(folders) > 1 else ()
        records = [record for _, record in islice(read_records(source), LOOKED_AT)]
    except (FdpError, OSError):  # reported when the data is read in full
        return ()
    if len(records) < 2:
        return ()
    common = [name for name in records[0] if all(_could_name(record.get(name)) for record in records)]
    shown = [name for name in common if name not in (text_field, *USUAL_FIELDS) and is_plain_name(name)]
    return tuple(sorted(shown, key=lambda name: not {*words_of(name)} & PERSON_WORDS))


def folder_of(file: Path, root: Path, *, all_named: bool) -> str:
    """Return the owner of a text: the normalized name of the folder in ``root`` that it is in, at any depth.

    A file beside these folders is its own owner if not ``all_named``; otherwise it is refused, since it could be
    anyone's.

    Guarantees:
      - files of one folder in ``root`` have one owner, whatever folders are inside it.
    """
    inside = file.relative_to(root).parts if root in file.parents else ()
    if len(inside) > 1 and (name := normalize_name(inside[0])):
        return name
    if not all_named:
        return str(file)
    raise FdpError(
        f"{file}: expected a file in a folder of its user, inside {root} (--user-field {FOLDER}), got one that is in "
        f"none, or in one whose name has no visible characters; move it into the folder of its user"
    )


def _could_name(value: Any) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= LONGEST_NAME
    return isinstance(value, int) and not isinstance(value, bool)
