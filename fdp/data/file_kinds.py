"""Kinds of data files, by the suffixes of their names.

| name, in any case      | content                                                                            |
|------------------------|------------------------------------------------------------------------------------|
| ``.jsonl .ndjson``     | a record on every line                                                             |
| ``.json``              | a list of records, or one record                                                   |
| ``.csv .tsv``          | a header, and a record on every row                                                |
| ``.parquet``           | a record on every row; read by ``pyarrow``                                         |
| ``.arrow .feather``    | the same; a folder saved by ``datasets.save_to_disk`` is its ``.arrow`` files      |
| ``.npy .bin``          | tokens; read by ``fdp.data.token_files``                                           |
| ``.xlsx .pdf .zip ...``| refused: other tables, documents that are not plain text, and archives             |
| any other              | a text                                                                             |

Texts, ``.json``, JSON lines and tables in text form may be compressed: ``notes.jsonl.gz``.

    >>> suffix_of(Path("Mail.JSONL.gz")), refusal_of(Path("mail.zip")).remedy
    ('.jsonl', 'unpack it')
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

LINE_SUFFIXES = (".jsonl", ".ndjson")
LIST_SUFFIX = ".json"
TABLE_SUFFIXES = (".csv", ".tsv")
PARQUET_SUFFIX = ".parquet"
ARROW_SUFFIXES = (".arrow", ".feather")
RECORD_SUFFIXES = (*LINE_SUFFIXES, LIST_SUFFIX, *TABLE_SUFFIXES, PARQUET_SUFFIX, *ARROW_SUFFIXES)
TOKEN_SUFFIXES = (".npy", ".bin")
TOKENS_MANIFEST = "tokens.json"
"""The file that says of which type the ``.bin`` files of its folder are."""
ZIPPED = ".gz"
BINARY_SUFFIXES = (PARQUET_SUFFIX, *ARROW_SUFFIXES, *TOKEN_SUFFIXES)
"""Files that compress themselves or are mapped: not read from ``.gz``."""


class Refusal(NamedTuple):
    """A kind of files that are not read, and what to do with one and with several."""

    one: str
    several: str
    remedy: str
    remedies: str


TABLE = Refusal("another table", "other tables", "write its rows as .csv or .jsonl", "write tables as .csv or .jsonl")
DOCUMENT = Refusal("a document", "documents", "save it as plain text", "save documents as plain text")
ARCHIVE = Refusal("an archive", "archives", "unpack it", "unpack archives")
TOKENS = Refusal(
    "a file of tokens",
    "files of tokens",
    "give it by itself, or a folder of nothing else, with --unit window",
    "give tokens a folder of their own, with --unit window",
)
REFUSED: dict[str, Refusal] = {
    suffix: kind
    for kind, suffixes in {
        TABLE: (".xlsx", ".xls", ".ods"),
        DOCUMENT: (".pdf", ".doc", ".docx", ".rtf", ".odt", ".epub"),
        ARCHIVE: (".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz"),
    }.items()
    for suffix in suffixes
}
"""Other tables, whose rows are records, documents of other programs, and archives: read as text, all of their records
would be one, and markup would be learned."""


def suffix_of(path: Path) -> str:
    """Return the suffix of a file in lower case, of ``notes.jsonl.gz`` that of ``notes.jsonl``."""
    name = path.name.lower()
    return Path(name.removesuffix(ZIPPED)).suffix


def holds_records(path: Path) -> bool:
    """Return True if a file of this name holds records."""
    return suffix_of(path) in RECORD_SUFFIXES


def holds_tokens(path: Path) -> bool:
    """Return True if a file of this name holds tokens."""
    return path.suffix.lower() in TOKEN_SUFFIXES


def refusal_of(file: Path) -> Refusal | None:
    """Return the kind of a table, a document or an archive that is not read, or of tokens, read by themselves."""
    outer, inner = file.suffix.lower(), suffix_of(file)
    if outer == ZIPPED and (inner in BINARY_SUFFIXES or not inner):
        return ARCHIVE
    return REFUSED.get(outer) or REFUSED.get(inner) or (TOKENS if holds_tokens(file) else None)
