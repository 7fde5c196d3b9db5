"""A file of texts or conversations to a dataset of whole units: records, users, or packed rows.

| ``user_field`` | ``pack``     | a sample, the unit of privacy                                            |
|----------------|--------------|--------------------------------------------------------------------------|
| None           | None         | one record: its first ``context + 1`` tokens                             |
| a field        | None         | one user: windows, each of one record or a piece of one                  |
| a field        | Unit.OWNER   | one user: windows, each of as many of the user's records as fit          |
| None           | Unit.ROW     | one packed row of anyone's records: says nothing about a record          |

Texts without a unit of their own, as one stream, are ``fdp.data.load``'s: there a sample is a window.

    >>> dataset = load("chat.jsonl", context=512, vocab_size=50257, tokenizer=load_tokenizer("models/tiny"))
    >>> dataset = load("mail.jsonl", context=512, vocab_size=256, user_field="sender", windows=8, key=key)
"""

from __future__ import annotations

import os
from pathlib import Path

from fdp import chat, text
from fdp.documents import Documents, Records, cut, records
from fdp.packing import Unit
from fdp.packing import pack as packed
from fdp.types import FdpError, Key
from fdp.units import Kind
from fdp.users import Users, by_user


def load(
    path: str | os.PathLike[str],
    *,
    context: int,
    vocab_size: int,
    tokenizer: text.Tokenizer = text.BYTES,
    field: str = "text",
    user_field: str | None = None,
    windows: int | None = None,
    pack: Unit | None = None,
    key: Key | None = None,
) -> Records | Users:
    """The dataset that was asked for. ``windows`` (for each user) and ``key`` (which of them) go with ``user_field``.

    Records with ``messages``, or with ``prompt`` and ``completion``, are conversations; of others ``field`` is read.
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
    documents = read(path, tokenizer, field=field, user_field=user_field)
    if windows is not None and key is not None:
        rows = packed(documents, context=context, unit=pack) if pack else cut(documents, length=context + 1)
        return by_user(rows, context=context, vocab_size=vocab_size, windows=windows, key=key)
    if pack is Unit.ROW:
        rows = packed(documents, context=context, unit=pack)
        return records(rows, context=context, vocab_size=vocab_size, kind=Kind.ROW)
    return records(documents, context=context, vocab_size=vocab_size)


def read(
    path: str | os.PathLike[str], tokenizer: text.Tokenizer, *, field: str = "text", user_field: str | None = None
) -> Documents:
    """The documents of a file: conversations if its first record is one and has no ``field``, else texts."""
    if not Path(path).exists():
        raise FdpError(f"data: expected a path that exists, got {os.fspath(path)!r}")
    if Path(path).suffix == ".jsonl":
        first = next(text.lines(Path(path)), None)
        if first is not None and field not in first[1] and chat.is_conversation(first[1]):
            return chat.conversations(path, tokenizer, user_field=user_field)
    return text.read(path, tokenizer, field=field, user_field=user_field)
