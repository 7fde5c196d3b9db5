"""A file of texts or conversations to a dataset of whole units: records, users, or packed rows.

| ``user_field`` | ``pack``     | a sample, the unit of privacy                                            |
|----------------|--------------|--------------------------------------------------------------------------|
| None           | None         | one record (of texts: one file): its first ``context + 1`` tokens        |
| a field        | None         | one user: windows, each of one record or a piece of one                  |
| a field        | Unit.OWNER   | one user: windows, each of as many of the user's records as fit          |
| None           | Unit.ROW     | one packed row of anyone's records: says nothing about a record          |

Texts without a unit of their own, as one stream, are ``fdp.data.datasets.load``'s: there a sample is a window.

    >>> dataset = load("chat.jsonl", context=512, vocab_size=50257, tokenizer=load_tokenizer("models/tiny"))
    >>> dataset = load("mail.jsonl", context=512, vocab_size=256, user_field="sender", windows=8, key=key)
"""

from __future__ import annotations

import os
from typing import Any

from fdp.data import chat, text
from fdp.data.document_packing import Unit
from fdp.data.document_packing import pack as packed
from fdp.data.documents import Documents, Records, check, cut, gather, records, rows_with_loss
from fdp.data.files import Form, find_source, owner_of, read_records, read_text, record_form, text_field
from fdp.data.units import Kind
from fdp.data.users import Users, by_user
from fdp.types import FdpError, Key


def load(
    path: str | os.PathLike[str],
    *,
    context: int,
    vocab_size: int,
    tokenizer: text.Tokenizer = text.BYTES,
    form: Form = Form.AUTO,
    field: str = "text",
    user_field: str | None = None,
    windows: int | None = None,
    pack: Unit | None = None,
    key: Key | None = None,
) -> Records | Users:
    """The dataset that was asked for. ``windows`` (for each user) and ``key`` (which of them) go with ``user_field``.

    Records with ``messages``, or with ``prompt`` and ``completion``, are conversations; of others ``field`` is read.
    ``form`` says which, for records that could be read in two ways.
    """
    if context < 1:
        raise FdpError(f"context: expected at least 1, got {context}")
    if (user_field is None) != (windows is None) or (user_field is None) != (key is None):
        raise FdpError(
            "data: expected a user field, windows per user and a key together, or none of them, got "
            f"user_field={user_field!r}, windows={windows}, a key: {key is not None}"
        )
    if pack is Unit.OWNER and user_field is None:
        raise FdpError("pack: expected a user field, whose records share rows, got none; a record alone is one row")
    if pack is Unit.ROW and user_field is not None:
        raise FdpError(
            f"pack: expected rows of one owner with user field {user_field!r}, got Unit.ROW: a row of several users' "
            "records would be the unit, and not the user. Use Unit.OWNER"
        )
    documents, kind = read(path, tokenizer, form=form, field=field, user_field=user_field)
    check(documents, context=context, vocab_size=vocab_size)
    if not rows_with_loss(documents, context=None).any():
        raise FdpError(
            f"{documents.source}: expected something to learn, got records or files without any: no answer of an "
            "assistant, or one token each; see --form and --field"
        )
    if windows is not None and key is not None:
        rows = packed(documents, context=context, unit=pack) if pack else cut(documents, length=context + 1)
        return by_user(rows, context=context, vocab_size=vocab_size, windows=windows, key=key)
    if pack is Unit.ROW:
        rows = packed(documents, context=context, unit=pack)
        return records(rows, context=context, vocab_size=vocab_size, kind=Kind.ROW)
    return records(documents, context=context, vocab_size=vocab_size, kind=kind)


def read(
    path: str | os.PathLike[str],
    tokenizer: text.Tokenizer,
    *,
    form: Form = Form.AUTO,
    field: str = "text",
    user_field: str | None = None,
) -> tuple[Documents, Kind]:
    """Read every record or file as a document; return them, and whether a document is a record or a file.

    All tokens but the first of a text are predicted, and of a conversation those of the answers. With ``user_field``,
    which only records have, a document's owner is the user named there; without, every document is its own.

    Guarantees:
      - a document depends on its own record and on the options, and on no other record;
      - ``Form.AUTO`` takes records of one form; of others, file and line of both are named.
    """
    source = find_source(path, form=form)
    if not source.records:
        if user_field is not None or form in (Form.COMPLETION, Form.MESSAGES):
            wanted = f"field {user_field!r}" if user_field is not None else f"the fields of --form {form.value}"
            raise FdpError(f"{source.path}: expected .jsonl, .ndjson or .json, whose records have {wanted}, got a text")
        texts = ((str(file), read_text(file)) for file in source.files)
        found = ((place, text.encoded(tokenizer, words, place)) for place, words in texts)
        named = [(place, (tokens, [True] * len(tokens))) for place, tokens in found]
        owners = [place for place, _ in named]
        documents = gather((each for _, each in named), owners, source=str(source.path), word=tokenizer.word)
        return documents._replace(links=source.links), Kind.FILE
    pieces: list[tuple[list[int], list[bool]]] = []
    owners: list[str] = []
    first: tuple[Form, str] | None = None
    for place, record in read_records(source):
        own = record_form(record, field, place) if form is Form.AUTO else form
        first = (own, place) if first is None else first
        if own is not first[0]:
            raise FdpError(
                f"{place}: expected {first[0].value} like {first[1]}, got {own.value}; a source holds records of one "
                f"form: split it, or give --form {first[0].value} or --form {own.value} if every record has both"
            )
        pieces.append(_tokens(own, record, tokenizer, field, place))
        owners.append(owner_of(record, user_field, place))
    documents = gather(pieces, owners, source=str(source.path), word=tokenizer.word)
    return documents._replace(links=source.links), Kind.RECORD


def _tokens(
    form: Form, record: dict[str, Any], tokenizer: text.Tokenizer, field: str, place: str
) -> tuple[list[int], list[bool]]:
    """The tokens of a record read as ``form``, and whether each counts."""
    if form is Form.COMPLETION:
        return chat.completion_tokens(record, tokenizer, place)
    if form is Form.MESSAGES:
        return chat.conversation_tokens(record, tokenizer, place)
    tokens = text.encoded(tokenizer, text_field(record, field, place), place)
    return tokens, [True] * len(tokens)
