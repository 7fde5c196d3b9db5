"""Records of ``.csv`` and ``.tsv`` files: a header with the names of the fields, then a record on every row.

The format is that of Python's ``csv``: fields in double quotes may hold separators and line breaks. Every value is a
text. A row with more or fewer fields than the header is refused, since its values would be in the wrong fields.

If the header of a ``.csv`` file has no comma outside quotes, and semicolons or tabs but not both, these are its
separators, as where Excel writes decimal commas.

    >>> for place, record in read_table(Path("mail.csv")): ...          # "mail.csv, line 8, row 7", {"text": "..."}
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fdp.data.file_kinds import suffix_of
from fdp.data.text_files import GZIP_ERRORS, LOOKED_AT_BYTES, damaged_archive, open_bytes, to_utf8
from fdp.types import FdpError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
OTHERS = (";", "\t")
"""Separators that a ``.csv`` file may have instead."""
LONGEST_FIELD = 2**31 - 1
"""Characters of a field; the library's own limit of 131,072 is less than a long document."""


class _Row(NamedTuple):
    """The values of a row, and the line on which it begins."""

    line: int
    values: list[str]


def read_table(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the record of every row below the header, with its place; blank lines are left out."""
    separator = find_separator(file)
    rows = _rows(file, separator)
    header = next(rows, None)
    if header is None:
        raise FdpError(f"{file}: expected a header and a record on every row, got nothing (empty); check the file")
    names = _check_header(header.values, file, separator)
    for number, row in enumerate(rows, start=1):
        place = f"{file}, line {row.line}, row {number}"
        if len(row.values) != len(names):
            raise FdpError(
                f"{place}: expected {len(names)} fields, as in the header, got {len(row.values)}; put fields with "
                "separators, quotes or line breaks in double quotes"
            )
        yield place, dict(zip(names, row.values))


def find_separator(file: Path) -> str:
    """Return the separator of a table, by its name and its header.

    Guarantees:
      - if the header has several fields by the separator of the file's name, it is that one.
    """
    named = SEPARATORS[suffix_of(file)]
    head = ""
    with suppress(*GZIP_ERRORS, OSError), open_bytes(file) as content:  # reported when the file is read in full
        head = codecs.getincrementaldecoder("utf-8-sig")("replace").decode(content.read(LOOKED_AT_BYTES))
    if named != "," or _count_fields(head, named) > 1:
        return named
    found = [other for other in OTHERS if _count_fields(head, other) > 1]
    return found[0] if len(found) == 1 else named


def name_separators(files: Sequence[Path]) -> str:
    """Return the separators of the tables among some files in words; nothing if all are as the names say."""
    tables = [file for file in files if suffix_of(file) in SEPARATORS]
    found = dict.fromkeys((SEPARATORS[suffix_of(file)], find_separator(file)) for file in tables)
    if all(named == separator for named, separator in found):
        return ""
    return " and ".join(dict.fromkeys(_name(separator) for _, separator in found))


def _count_fields(head: str, separator: str) -> int:
    """Return the number of fields in the header of a table that begins with ``head``; 0 if it has no such header."""
    csv.field_size_limit(LONGEST_FIELD)
    try:
        return len(next(filter(None, csv.reader(io.StringIO(head, newline=""), delimiter=separator, strict=True)), []))
    except csv.Error:
        return 0


def _rows(file: Path, separator: str) -> Iterator[_Row]:
    """Yield the rows that are not blank, the header among them."""
    csv.field_size_limit(LONGEST_FIELD)
    line = 1
    with open_bytes(file) as content, io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines, delimiter=separator, strict=True)
        try:
            for values in rows:
                if values:
                    yield _Row(line, values)
                line = rows.line_num + 1
            return
        except UnicodeDecodeError:  # raised again below: these errors may show the content
            why = f"a byte that is not UTF-8 there or soon after; convert the file: {to_utf8(file)}"
        except csv.Error:
            why = "a quote that is not closed, or something after a closing quote; write two quotes for one in a text"
        except GZIP_ERRORS:
            why = None
    if why is None:
        raise damaged_archive(file)
    raise FdpError(f"{file}, line {line}: expected fields separated by {_name(separator)}, got {why}")


def _check_header(names: list[str], file: Path, separator: str) -> list[str]:
    if len(names) == 1 and (others := [each for each in ";,\t|" if each != separator and each in names[0]]):
        raise FdpError(
            f"{file}, line 1: expected a header with fields separated by {_name(separator)}, got one field with "
            f"{_name(others[0])} in it; {_rewrite(others[0], separator)}"
        )
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise FdpError(
            f"{file}, line 1: expected a header that names every field once, got a field without a name or a name "
            "twice; repair the first line"
        )
    return names


def _rewrite(found: str, separator: str) -> str:
    """Return how to separate the fields of a table as its name says; ``sed`` would also change the texts."""
    for suffix, named in SEPARATORS.items():
        if found == named:
            return f"give it a name that ends in {suffix}"
    to = "" if separator == "," else ', delimiter="\\t"'
    return (
        f"write the table again with {_name(separator)} between the fields, for example by: python -c "
        f"'import csv, sys; "
        f'csv.writer(sys.stdout{to}).writerows(csv.reader(sys.stdin, delimiter="{found}"))\' < OLD > NEW'
    )


def _name(separator: str) -> str:
    return {",": "commas", "\t": "tabs", ";": "semicolons"}.get(separator, "bars")
