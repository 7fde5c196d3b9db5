"""Records of all formats through one reader: an iterator of (place, record).

    .jsonl .ndjson .json    fdp.data.json_records       "mail.jsonl, line 7"
    .csv .tsv               fdp.data.table_records      "mail.csv, line 8, row 7"
    .parquet .arrow         fdp.data.arrow_records      "mail.parquet, row 7"

Options that speak of fields (``--field``, ``--user-field``, ``--form``) mean the same in all of them. Records are read
one after another; only a ``.json`` list is held in memory as a whole.

    >>> for place, record in read_records(find_source("mail/")): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fdp.data.arrow_records import read_arrow, read_parquet
from fdp.data.file_kinds import ARROW_SUFFIXES, LIST_SUFFIX, PARQUET_SUFFIX, TABLE_SUFFIXES, suffix_of
from fdp.data.files import Source
from fdp.data.json_records import read_lines, read_list
from fdp.data.table_records import read_table
from fdp.types import FdpError


def read_records(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every record with its place, such as "mail/a.jsonl, line 7"."""
    nothing = True
    for file in source.files:
        for each in _read_file(file):
            nothing = False
            yield each
    tables = [file for file in source.files if suffix_of(file) in TABLE_SUFFIXES]
    if nothing and tables:
        raise FdpError(f"{tables[0]}: expected a header and a record on every row, got a header and no rows")


def _read_file(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    suffix = suffix_of(file)
    if suffix == LIST_SUFFIX:
        return read_list(file)
    if suffix in TABLE_SUFFIXES:
        return read_table(file)
    if suffix == PARQUET_SUFFIX:
        return read_parquet(file)
    return read_arrow(file) if suffix in ARROW_SUFFIXES else read_lines(file)
