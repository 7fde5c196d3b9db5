"""The fields of records by name, kind and counts, and the one that seems to hold the text.

The counts are computed from private data and covered by no budget.

    >>> fields = describe_fields(find_source("notes.csv"))
    >>> likely_text_field(fields, but="patient")
    'note'
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from fdp.data.files import Source
from fdp.data.nouns import words_of
from fdp.data.person_fields import PERSON_WORDS, FieldCensus, FieldCounts, is_plain_name
from fdp.data.record_fields import MissingText, json_type
from fdp.data.record_files import read_records
from fdp.types import FdpError

LOOKED_AT = 10_000
"""Records that an error looks at for an example: a fraction of a second."""


def describe_fields(source: Source, *, most: int | None = None) -> list[dict[str, Any]]:
    """Return kind and counts of every field, in the first ``most`` records; None: in all.

    Fields whose names look like content are counted together, not named.
    """
    census, kinds = FieldCensus(), {}
    for _, record in census.watch(islice(read_records(source), most)):
        for name, value in record.items():
            if value is not None and is_plain_name(name):
                kinds.setdefault(name, set()).add(json_type(value))
    rows = [_field_row(name, ", ".join(sorted(kinds[name])), census.fields[name]) for name in kinds]
    if others := [counts for name, counts in census.fields.items() if name not in kinds]:
        rows.append(_field_row(f"{len(others)} fields whose names look like content", "", *others))
    return rows


def likely_text_field(fields: list[dict[str, Any]], *, but: str | None) -> str | None:
    """Return the field of texts with most long values, then most different ones, whose name is no person's; else None.

    A field that is not in all records, or in one alone, could itself be a secret, which an error does not tell.
    """
    most = max((row["present"] for row in fields), default=0)
    others = [row for row in fields if row["field"] != but and not {*words_of(row["field"])} & PERSON_WORDS]
    texts = [row for row in others if row["kind"] == "text" and row["present"] == most > 1]
    best = max(texts, key=lambda row: (row["present"] - row["short"], row["values"]), default=None)
    return None if best is None else best["field"]


def with_example(error: MissingText, source: Source, *, but: str | None) -> MissingText:
    """Return an error about a missing text that names the field that seems to hold it."""
    try:
        likely = likely_text_field(describe_fields(source, most=LOOKED_AT), but=but)
    except FdpError:  # a record further on is damaged: that is reported once the field is right
        likely = None
    return MissingText(error.problem, likely)


def _field_row(field: str, kind: str, *counts: FieldCounts) -> dict[str, Any]:
    return {
        "field": field,
        "kind": kind,
        "present": sum(each.present for each in counts),
        "short": sum(each.short for each in counts),
        "values": sum(len(each.hashes) for each in counts),
    }
