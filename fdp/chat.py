"""Instructions and conversations: the prompt is read, the answer is learned.

    {"prompt": "...", "completion": "..."}                       tokens of the completion count, and the end after it
    {"messages": [{"role": "user", "content": "..."}, ...]}      tokens of what the assistant says, and the end of it

    loss_b = mean of the next token's cross-entropy over the tokens of record b that count

**A sample, the unit of privacy, is one record** (one conversation, all its turns) or, with ``user_field``, one user.
Prompts are protected as well as answers: they are inputs of the same sample's loss, whose whole gradient is clipped.

Prompt and answer are tokenised apart, so that no token holds a piece of both. A conversation is written by the
tokenizer's own template, message by message; without one as ``role: content`` lines. A record that is too long keeps
its first ``context + 1`` tokens; one whose answer is thereby lost stays a sample, with loss exactly 0.

    >>> documents = conversations("chat.jsonl", load_tokenizer("models/tiny"))
    >>> dataset = records(documents, context=512, vocab_size=50257)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fdp.documents import Documents, gather
from fdp.text import Tokenizer, encoded, lines, owner_of
from fdp.types import FdpError

Piece: TypeAlias = tuple[str, bool]
"""A stretch of text, and whether its tokens count in the loss."""

ASSISTANT = "assistant"
"""The role whose words are learned."""


def conversations(path: str | os.PathLike[str], tokenizer: Tokenizer, *, user_field: str | None = None) -> Documents:
    """Every record of a JSONL file as a document, owned by itself or by the user in ``user_field``."""
    owners: list[str] = []
    found: list[tuple[list[int], list[bool]]] = []
    for place, record in lines(Path(path)):
        tokens, counted = _tokens(pieces(record, tokenizer, place), tokenizer, place)
        if not ("messages" in record and tokenizer.render is not None):  # a template writes its own end
            tokens, counted = _ended(tokens, counted, tokenizer)
        found.append((tokens, counted))
        owners.append(owner_of(record, user_field, place))
    return gather(found, owners, source=os.fspath(path), word=tokenizer.word)


def is_conversation(record: dict[str, Any]) -> bool:
    """Whether a record has the fields of an instruction or of a conversation."""
    return "messages" in record or {"prompt", "completion"} <= set(record)


def pieces(record: dict[str, Any], tokenizer: Tokenizer, place: str) -> list[Piece]:
    """A record as stretches of text, in order; ``place`` names it in errors."""
    if "messages" in record:
        messages = _checked(record["messages"], place)
        return _by_lines(messages) if tokenizer.render is None else _by_template(messages, tokenizer, place)
    texts = [record.get(field) for field in ("prompt", "completion")]
    if not all(isinstance(text, str) for text in texts):
        raise FdpError(
            f"{place}: expected text in 'prompt' and 'completion', or a list in 'messages', got {sorted(record)}"
        )
    return [(str(texts[0]), False), (str(texts[1]), True)]


def _tokens(stretches: Sequence[Piece], tokenizer: Tokenizer, place: str) -> tuple[list[int], list[bool]]:
    """Tokens, and whether they count."""
    tokens: list[int] = []
    counted: list[bool] = []
    for text, counts in stretches:
        more = encoded(tokenizer, text, place)
        tokens += more
        counted += [counts] * len(more)
    return tokens, counted


def _ended(tokens: list[int], counted: list[bool], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """With the token that ends a text after an answer that ends the record."""
    if tokenizer.end is None or not counted or not counted[-1]:
        return tokens, counted
    return [*tokens, tokenizer.end], [*counted, True]


def _checked(messages: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise FdpError(f"{place}: expected a list of messages, got {messages!r}")
    for number, message in enumerate(messages, start=1):
        parts = message if isinstance(message, dict) else {}
        if not isinstance(parts.get("role"), str) or not isinstance(parts.get("content"), str):
            raise FdpError(f"{place}, message {number}: expected an object with text in 'role' and 'content'")
    return messages


def _by_lines(messages: list[dict[str, Any]]) -> list[Piece]:
    """``role: content`` and a newline for every message; of the assistant's, all after the role counts."""
    found: list[Piece] = []
    for message in messages:
        role, words = message["role"], f"{message['content']}\n"
        found += [(f"{role}: ", False), (words, True)] if role == ASSISTANT else [(f"{role}: {words}", False)]
    return found


def _by_template(messages: list[dict[str, Any]], tokenizer: Tokenizer, place: str) -> list[Piece]:
    """What each message adds to the text; of the assistant's, all after the template's prompt for it counts."""
    assert tokenizer.render is not None
    found: list[Piece] = []
    before = ""
    for number, message in enumerate(messages, start=1):
        if message["role"] == ASSISTANT:
            prompt = tokenizer.render(messages[: number - 1], True)
            found.append((_added(before, prompt, place, number), False))
            before = prompt
        text = tokenizer.render(messages[:number], False)
        found.append((_added(before, text, place, number), message["role"] == ASSISTANT))
        before = text
    return found


def _added(before: str, text: str, place: str, number: int) -> str:
    if not text.startswith(before):
        raise FdpError(
            f"{place}, message {number}: expected a chat template that only adds to the text, got one that changes "
            "what came before, so that prompts cannot be told from answers; give records with 'prompt' and 'completion'"
        )
    return text[len(before) :]
