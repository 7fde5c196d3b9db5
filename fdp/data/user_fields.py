"""Fields of records that could name a person, for the error about a missing ``--user-field``.

    >>> user_fields("notes.jsonl", text_field="text")       # ("author", "ward")

Only names of fields are returned, never values, and only of fields that every record has: a field of one record could
itself be a secret, a field of all of them is the format of the data.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

from fdp.data.files import find_source
from fdp.data.nouns import words_of
from fdp.data.person_fields import LONGEST_NAME, PERSON_WORDS, is_plain_name
from fdp.data.record_fields import USUAL_FIELDS
from fdp.data.record_files import read_records
from fdp.types import FdpError

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
            return ()
        records = [record for _, record in islice(read_records(source), LOOKED_AT)]
    except (FdpError, OSError):  # reported when the data is read in full
        return ()
    if len(records) < 2:
        return ()
    common = [name for name in records[0] if all(_could_name(record.get(name)) for record in records)]
    shown = [name for name in common if name not in (text_field, *USUAL_FIELDS) and is_plain_name(name)]
    return tuple(sorted(shown, key=lambda name: not {*words_of(name)} & PERSON_WORDS))


def _could_name(value: Any) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= LONGEST_NAME
    return isinstance(value, int) and not isinstance(value, bool)
