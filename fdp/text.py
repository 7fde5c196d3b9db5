"""Text as tokens: fdp's bytes, or the tokenizer of a local folder in the transformers format.

    tokens = encode(text)                      no special token is added: what is in a sample is what is in the text

A tokenizer is part of the model: one that was trained on the data to be protected has told of them already, and no
noise takes that back. Nothing is downloaded.

    >>> tokenizer = load_tokenizer("models/tiny")                    # or BYTES
    >>> documents = read("notes.jsonl", tokenizer, field="body")     # one document per record
    >>> documents = read("notes.jsonl", tokenizer, field="body", user_field="author")

**A document is no sample yet.** Who owns it is the unit of privacy: the record (or file) itself or, with
``user_field``, the user; ``fdp.documents.records`` and ``fdp.users.by_user`` make samples of whole units.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fdp.documents import Documents, gather
from fdp.types import FdpError


class Tokenizer(NamedTuple):
    """Text to numbers below ``vocab_size``; ``end`` is the token that ends a text, where there is one.

    ``render(messages, prompt)`` is a conversation as text by the tokenizer's own template, with ``prompt`` up to where
    the assistant's next words begin; None: it has no template. ``word`` is what a token is called.
    """

    encode: Callable[[str], list[int]]
    vocab_size: int
    end: int | None = None
    render: Callable[[Sequence[dict[str, Any]], bool], str] | None = None
    word: str = "token"


def _encode_bytes(text: str) -> list[int]:
    return list(text.encode())


BYTES = Tokenizer(_encode_bytes, 256, word="byte")
"""A token is a byte of the text's UTF-8 form."""


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a local folder, as ``transformers`` saved it."""
    if not Path(folder).is_dir():
        raise FdpError(
            f"tokenizer: expected a folder that exists, got {os.fspath(folder)!r}; save one there with "
            "tokenizer.save_pretrained(folder). Nothing is downloaded"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise FdpError("tokenizer: a folder is read by transformers: pip install transformers") from None
    try:
        found = AutoTokenizer.from_pretrained(os.fspath(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).partition("\n")[0]  # a page of what else could be installed follows
        raise FdpError(f"tokenizer: expected a tokenizer in {os.fspath(folder)!r}, got none: {why}") from None
    return tokenizer_of(found)


def tokenizer_of(tokenizer: Any) -> Tokenizer:
    """A ``transformers`` tokenizer at hand."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def render(messages: Sequence[dict[str, Any]], prompt: bool) -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)

    has_template = getattr(tokenizer, "chat_template", None) is not None
    return Tokenizer(encode, len(tokenizer), tokenizer.eos_token_id, render if has_template else None)


def read(
    path: str | os.PathLike[str], tokenizer: Tokenizer, *, field: str = "text", user_field: str | None = None
) -> Documents:
    """Every text of a source as a document: the records of a ``.jsonl`` file, a text file, or the files of a folder.

    All tokens but the first of a document are predicted. With ``user_field``, which only records have, a document's
    owner is the user named there; without, every document is its own.
    """
    source = Path(path)
    if source.suffix != ".jsonl" and user_field is not None:
        raise FdpError(f"{source}: expected a .jsonl file, whose records have a field {user_field!r}, got another file")
    texts: list[list[int]] = []
    owners: list[str] = []
    for place, text, owner in _texts(source, field, user_field):
        texts.append(encoded(tokenizer, text, place))
        owners.append(owner)
    return gather(((tokens, [True] * len(tokens)) for tokens in texts), owners, source=str(source), word=tokenizer.word)


def stream(path: str | os.PathLike[str], tokenizer: Tokenizer, *, field: str = "text") -> np.ndarray:
    """All documents of a source in a row, with the token that ends a text (else a newline) between them."""
    documents = read(path, tokenizer, field=field)
    between = tokenizer.encode("\n") if tokenizer.end is None else [tokenizer.end]
    gap = np.asarray(between, dtype=documents.tokens.dtype)
    pieces = [part for i in range(len(documents.owners)) for part in (documents.row(i), gap)]
    return np.concatenate(pieces[:-1])


def lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record of a JSONL file that is not blank, with the words that name its place."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                record = json.loads(line, object_pairs_hook=_once_each)
            except ValueError as error:
                raise FdpError(f"{place}: expected a JSON object in UTF-8, got {error}") from None
            if not isinstance(record, dict):
                raise FdpError(f"{place}: expected a JSON object, got {type(record).__name__}")
            yield place, record


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; one with a field twice, of which a reader would take either, is an error."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a field twice among {[name for name, _ in pairs]}")
    return found


def owner_of(record: dict[str, Any], user_field: str | None, place: str) -> str:
    """Who owns a record: the user it names (7 is "7"), or without a field itself.

    Names that look alike because Unicode writes them in several ways, or that differ by spaces around them and by
    characters that are not seen, are one user's: were they two, one person would be two units. Capitals count.
    A record that does not name its user is refused: it could be anyone's.
    """
    if user_field is None:
        return place
    user = record.get(user_field)
    name = _plain(str(user)) if isinstance(user, (str, int)) and not isinstance(user, bool) else ""
    if not name:
        raise FdpError(
            f"{place}: expected a user's name or number in field {user_field!r}, got {user!r} among {sorted(record)}; "
            "name the field with --user-field, or leave out records of no known user"
        )
    return name


def _plain(name: str) -> str:
    seen = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf")
    return " ".join(seen.split())


def encoded(tokenizer: Tokenizer, text: str, place: str) -> list[int]:
    """The tokens of a text; one that is no Unicode is refused with its place."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FdpError(f"{place}: expected text, got a lone surrogate: {error}") from None
    return tokenizer.encode(text)


def _texts(source: Path, field: str, user_field: str | None) -> Iterator[tuple[str, str, str]]:
    """Place, text and owner of every document."""
    if not source.exists():
        raise FdpError(f"data: expected a path that exists, got {str(source)!r}")
    if source.suffix == ".jsonl":
        for place, record in lines(source):
            if not isinstance(record.get(field), str):
                raise FdpError(
                    f"{place}: expected an object with text in field {field!r}, got {sorted(record)}; "
                    "name the field with --field"
                )
            yield place, record[field], owner_of(record, user_field, place)
        return
    files = [source]
    if source.is_dir():
        found = (file for file in sorted(source.rglob("*")) if file.is_file() and file.stat().st_size)
        shown = (file for file in found if not any(part.startswith(".") for part in file.relative_to(source).parts))
        once: dict[Path, Path] = {}
        for file in shown:
            once.setdefault(file.resolve(), file)  # a link to a file is no other document
        files = list(once.values())
    for file in files:
        try:
            yield str(file), file.read_bytes().decode(), str(file)
        except UnicodeDecodeError as error:
            raise FdpError(f"{file}: expected UTF-8 text, got {error}; convert the file") from None
