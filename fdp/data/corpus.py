"""Files of texts or conversations as a dataset of whole units: records, users, or packed rows.

| ``per_user`` | ``pack``       | a sample, the unit of privacy                                              |
|--------------|----------------|----------------------------------------------------------------------------|
| None         | None           | one record (or text file): its first ``context + 1`` tokens                |
| given        | None           | one user: windows, each of one record or a piece of one                    |
| given        | PackUnit.OWNER | one user: windows, each of as many of the user's records as fit            |
| None         | PackUnit.ROW   | one packed row of anyone's records: promises nothing about a record        |

With ``windows_per_record`` above 1, a record is a sample of that many windows. With ``PerUser(long=Long.CUT)``, a
user's window is the beginning of a record.

For texts as one stream, where a sample is a window, see ``fdp.data.datasets.load``.

    >>> dataset = load("chat.jsonl", context=512, vocab_size=50257, tokenizer=load_tokenizer("models/tiny"))
    >>> dataset = load("mail.jsonl", context=512, vocab_size=256, per_user=PerUser("sender", windows=8, key=key))
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fdp.data import chat, text
from fdp.data.array_store import narrowest_dtype
from fdp.data.document_packing import PackUnit
from fdp.data.document_packing import pack as pack_rows
from fdp.data.documents import (
    Documents,
    Long,
    Records,
    check_documents,
    cut_rows,
    join_documents,
    records,
    rows_with_loss,
    split_rows,
)
from fdp.data.files import RecordForm, Source, find_source
from fdp.data.nouns import FILE, RECORD, person_noun, text_noun
from fdp.data.person_fields import FieldCensus, is_plain_name
from fdp.data.record_fields import owner_of, record_form, text_field
from fdp.data.record_files import read_records
from fdp.data.table_records import name_separators
from fdp.data.text_files import read_text
from fdp.data.units import A_FOLDER, UnitKind, named_by
from fdp.data.user_fields import FOLDER, folder_of, folders_of
from fdp.data.users import Users, by_record, by_user
from fdp.types import FdpError, Key

Piece: TypeAlias = tuple[Sequence[int], Sequence[bool] | np.ndarray]
"""The tokens of a document, and whether each counts."""


class PerUser(NamedTuple):
    """Grouping by user: the field that names the user, the windows used of each, and the key that chooses them.

    ``long`` says what becomes of a record longer than a window. If not ``all_named``, a record without the field, or
    a text in no folder, is its own owner: for public data only, since in private data it could be anyone's.
    """

    field: str
    windows: int
    key: Key
    long: Long = Long.SPLIT
    all_named: bool = True


def load(
    path: str | os.PathLike[str],
    *,
    context: int,
    vocab_size: int,
    tokenizer: text.Tokenizer = text.BYTES,
    form: RecordForm = RecordForm.AUTO,
    field: str = "text",
    per_user: PerUser | None = None,
    pack: PackUnit | None = None,
    windows_per_record: int = 1,
) -> Records | Users:
    """Load a dataset whose sample is a record, a user (``per_user``), or a packed row; see the table above.

    Records with ``messages``, or with ``prompt`` and ``completion``, are conversations; from others, ``field`` is
    read. ``form`` decides for records that could be read in two ways.
    """
    if context < 1:
        raise FdpError(f"context: expected at least 1, got {context}")
    user_field = None if per_user is None else per_user.field
    if pack is PackUnit.OWNER and user_field is None:
        raise FdpError("pack: expected a user field, whose records share rows, got none; a record alone is one row")
    if pack is PackUnit.ROW and user_field is not None:
        raise FdpError(
            f"pack: expected rows of one owner with user field {user_field!r}, got PackUnit.ROW: a row of several "
            "users' records would be the unit, and not the user. Use PackUnit.OWNER"
        )
    all_named = per_user is None or per_user.all_named
    documents, kind = read(path, tokenizer, form=form, field=field, user_field=user_field, all_named=all_named)
    check_documents(documents, context=context, vocab_size=vocab_size)
    if not rows_with_loss(documents, context=None).any():
        raise FdpError(
            f"{documents.source}: expected something to learn, got records or files without it: no answer of an "
            "assistant, or one token each; see --form and --field"
        )
    sizes = {"context": context, "vocab_size": vocab_size}
    if per_user is not None:
        return _group_by_user(documents, per_user, pack, sizes)
    if pack is PackUnit.ROW:
        rows = pack_rows(documents, context=context, unit=pack)
        return records(rows, kind=UnitKind.ROW, **sizes)
    if windows_per_record > 1:
        rows = split_rows(documents, length=context + 1)
        return by_record(rows, windows=windows_per_record, kind=kind, **sizes)
    return records(documents, kind=kind, **sizes)


def _group_by_user(documents: Documents, by: PerUser, pack: PackUnit | None, sizes: dict[str, int]) -> Users:
    """Cut or split long records, pack short ones if asked to, and make one sample per user."""
    length = sizes["context"] + 1
    rows = cut_rows(documents, length=length) if by.long is Long.CUT else documents
    rows = pack_rows(rows, context=length - 1, unit=pack) if pack else split_rows(rows, length=length)
    if documents.text == FILE:
        which = A_FOLDER if by.field == FOLDER else ""
    else:
        which = named_by(by.field) if is_plain_name(by.field) else ""
    person = person_noun(by.field)
    return by_user(rows, windows=by.windows, key=by.key, person=person, long=by.long, which=which, **sizes)


def read(
    path: str | os.PathLike[str],
    tokenizer: text.Tokenizer,
    *,
    form: RecordForm = RecordForm.AUTO,
    field: str = "text",
    user_field: str | None = None,
    all_named: bool = True,
) -> tuple[Documents, UnitKind]:
    """Read every record or file as a document; return them, and whether a document is a record or a file.

    In a text all tokens but the first are predicted; in a conversation, those of the answers. With ``user_field``, a
    document's owner is the user named there; of a text, which has no fields, it can only be ``folder``
    (:func:`fdp.data.user_fields.folder_of`). Without it, or if not ``all_named`` and a record or file names no user,
    the document is its own owner.

    Guarantees:
      - a document depends on its own record and on the options, and on no other record;
      - ``RecordForm.AUTO`` accepts records of one form; otherwise the error names file and line of two that differ.
    """
    source, dtype = find_source(path, form=form), narrowest_dtype(tokenizer.vocab_size)
    if not source.records:
        if (user_field not in (None, FOLDER) and all_named) or form in (RecordForm.COMPLETION, RecordForm.MESSAGES):
            wanted = f"field {user_field!r}" if user_field is not None else f"the fields of --form {form.value}"
            texts = (
                f"; of a folder of texts, --user-field {FOLDER} makes every folder in it a user" * source.path.is_dir()
            )
            raise FdpError(
                f"{source.path}: expected .jsonl, .json, .csv or .parquet, whose records have {wanted}, got a text"
                f"{texts}"
            )
        owners = [
            folder_of(file, source.path, all_named=all_named) if user_field == FOLDER else str(file)
            for file in source.files
        ]
        pieces = _read_files(source, tokenizer)
        documents = join_documents(pieces, owners, source=str(source.path), word=tokenizer.word, dtype=dtype)
        person = folders_of(source) if user_field is None else None
        found = documents._replace(links=source.links, unread=source.unread, text=FILE, person=person)
        return found, UnitKind.FILE
    reader = _Reader(source, tokenizer, form, field, user_field=user_field, all_named=all_named)
    documents = join_documents(
        reader.pieces(), reader.owners, source=str(source.path), word=tokenizer.word, dtype=dtype
    )
    noun = text_noun(field) if reader.first is not None and reader.first[0] is RecordForm.TEXT else RECORD
    person = reader.census.person(read=(field,)) if user_field is None else None
    found = documents._replace(links=source.links, unread=source.unread, text=noun, person=person)
    return found._replace(separated=name_separators(source.files)), UnitKind.RECORD


def _read_files(source: Source, tokenizer: text.Tokenizer) -> Iterator[Piece]:
    """Yield the tokens of every text file, read one after another, and that each counts."""
    for file in source.files:
        tokens = text.encode_text(tokenizer, read_text(file), str(file))
        yield tokens, np.ones(len(tokens), dtype=bool)


class _Reader:
    """The records of a source, read one after another; ``owners``, ``first`` and ``census`` grow with them."""

    def __init__(
        self,
        source: Source,
        tokenizer: text.Tokenizer,
        form: RecordForm,
        field: str,
        *,
        user_field: str | None,
        all_named: bool,
    ) -> None:
        self.source, self.tokenizer, self.form, self.field = source, tokenizer, form, field
        self.user_field, self.all_named = user_field, all_named
        self.owners: list[str] = []
        self.first: tuple[RecordForm, str] | None = None
        self.census = FieldCensus()

    def pieces(self) -> Iterator[Piece]:
        """Yield the tokens of every record, and whether each counts."""
        for place, record in self.census.watch(read_records(self.source)):
            own = record_form(record, self.field, place) if self.form is RecordForm.AUTO else self.form
            first = self.first = (own, place) if self.first is None else self.first
            if own is not first[0]:
                raise FdpError(
                    f"{place}: expected {first[0].value} like {first[1]}, got {own.value}; a source holds records of "
                    f"one form: split it, or give --form {first[0].value} or --form {own.value} if every record has "
                    f"both"
                )
            named = self.user_field if self.all_named or record.get(self.user_field or "") is not None else None
            self.owners.append(owner_of(record, named, place))
            yield _tokens(own, record, self.tokenizer, self.field, place)


def _tokens(form: RecordForm, record: dict[str, Any], tokenizer: text.Tokenizer, field: str, place: str) -> Piece:
    """Return the tokens of a record read as ``form``, and whether each counts."""
    if form is RecordForm.COMPLETION:
        return chat.completion_tokens(record, tokenizer, place)
    if form is RecordForm.MESSAGES:
        return chat.conversation_tokens(record, tokenizer, place)
    tokens = text.encode_text(tokenizer, text_field(record, field, place), place)
    return tokens, np.ones(len(tokens), dtype=bool)
