"""Tokens of instructions and conversations: the loss counts the answers and not the prompts.

    {"prompt": "...", "completion": "..."}                       counts the completion, and the end of text after it
    {"messages": [{"role": "user", "content": "..."}, ...]}      counts the assistant's messages, and their ends

    loss_b = mean cross-entropy of the next token over the tokens of record b that count

**A sample, the unit of privacy, is one record** (one conversation with all its turns) or, per user, one user.
Prompts are protected like answers: they are inputs of the same sample's loss, whose full gradient is clipped.

A record is rendered as one text, by the tokenizer's template or else as ``role: content`` lines, and tokenized once:
no space is added between a prompt and its answer. A token counts if any of its characters is to be learned. A record
that is too long keeps its first ``context + 1`` tokens; if that drops the whole answer, it stays a sample with loss 0.

    >>> tokens, counted = conversation_tokens(record, load_tokenizer("models/tiny"), "chat.jsonl, line 7")
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from fdp.data.record_fields import describe
from fdp.data.text import Tokenizer, locate_tokens
from fdp.data.text_files import check_text
from fdp.types import FdpError

Piece: TypeAlias = tuple[str, bool]
"""A stretch of text, and whether its tokens count in the loss."""

ASSISTANT = "assistant"
"""The role whose messages are learned."""
ROLES = (
    ASSISTANT, "user", "system", "developer", "tool", "function", "ipython", "environment", "observation",
)  # fmt: skip
"""The roles that templates know. Under another name an answer would be read but not learned."""


class Message(NamedTuple):
    """A checked message: its role, and all its fields with the role in lower case."""

    role: str
    fields: dict[str, Any]


def completion_tokens(record: dict[str, Any], tokenizer: Tokenizer, place: str) -> tuple[list[int], list[bool]]:
    """Return the tokens of a prompt and its completion, and whether each counts."""
    for field in ("prompt", "completion"):
        if not isinstance(record.get(field), str):
            raise FdpError(f"{place}: expected text in 'prompt' and 'completion', got {describe(record, field)}")
    return _append_end(*_tokens([(record["prompt"], False), (record["completion"], True)], tokenizer, place), tokenizer)


def conversation_tokens(record: dict[str, Any], tokenizer: Tokenizer, place: str) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and whether each counts; a template writes the end of text itself."""
    if not isinstance(record.get("messages"), list):
        raise FdpError(f"{place}: expected a list of messages in 'messages', got {describe(record, 'messages')}")
    tokens, counted = _tokens(message_pieces(record["messages"], tokenizer, place), tokenizer, place)
    return (tokens, counted) if tokenizer.render is not None else _append_end(tokens, counted, tokenizer)


def message_pieces(messages: list[Any], tokenizer: Tokenizer, place: str) -> list[Piece]:
    """Split a conversation into pieces of text that count or do not; ``place`` names it in errors."""
    checked = _check_messages(messages, place)
    return _pieces_by_lines(checked) if tokenizer.render is None else _pieces_by_template(checked, tokenizer, place)


def _tokens(pieces: Sequence[Piece], tokenizer: Tokenizer, place: str) -> tuple[list[int], list[bool]]:
    """Return the tokens of all pieces as one text, and whether any character of each counts."""
    tokens, spans = locate_tokens(tokenizer, "".join(text for text, _ in pieces), place)
    learned = [counts for text, counts in pieces for _ in text]
    before = [0, *accumulate(learned)]  # number of characters that count before each position
    return tokens, [before[last] > before[first] for first, last in map(_token_span, spans)]


def _token_span(span: tuple[int, int]) -> tuple[int, int]:
    """Return the characters of a token; if trimming spaces left none, the one before, or the first of the text."""
    first, last = span
    return (first, last) if first < last else (max(last - 1, 0), max(last, 1))


def _append_end(tokens: list[int], counted: list[bool], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Append the end-of-text token if the record ends with an answer."""
    if tokenizer.end is None or not counted or not counted[-1]:
        return tokens, counted
    return [*tokens, tokenizer.end], [*counted, True]


def _check_messages(messages: list[Any], place: str) -> list[Message]:
    if not messages:
        raise FdpError(f"{place}: expected a list of messages in 'messages', got an empty one; drop the record")
    found: list[Message] = []
    for number, message in enumerate(messages, start=1):
        parts = message if isinstance(message, dict) else {}
        if not isinstance(parts.get("role"), str) or not isinstance(parts.get("content"), str):
            raise FdpError(f"{place}, message {number}: expected an object with text in 'role' and 'content'")
        check_text(parts["content"], f"{place}, message {number}")
        role = parts["role"].strip().lower()
        if role not in ROLES:
            raise FdpError(
                f"{place}, message {number}: expected one of {', '.join(ROLES)} in 'role', got another; only what the "
                f"{ASSISTANT} says is learned: rename the role"
            )
        found.append(Message(role, parts | {"role": role}))
    return found


def _pieces_by_lines(messages: list[Message]) -> list[Piece]:
    """Write ``role: content`` and a newline per message; an assistant's message counts after the role."""
    found: list[Piece] = []
    for role, fields in messages:
        words = f"{fields['content']}\n"
        found += [(f"{role}: ", False), (words, True)] if role == ASSISTANT else [(f"{role}: {words}", False)]
    return found


def _pieces_by_template(messages: list[Message], tokenizer: Tokenizer, place: str) -> list[Piece]:
    """Render by the tokenizer's template; an assistant's message counts after the template's prompt for it."""
    found: list[Piece] = []
    before = ""
    for number, (role, _) in enumerate(messages, start=1):
        if role != ASSISTANT and number < len(messages):
            continue  # a template may refuse a conversation that ends there
        if role == ASSISTANT:
            prompt = _render(messages[: number - 1], tokenizer, place, prompt=True)
            found.append((_new_text(before, prompt, place, number), False))
            before = prompt
        text = _render(messages[:number], tokenizer, place, prompt=False)
        found.append((_new_text(before, text, place, number), role == ASSISTANT))
        before = text
    return found


def _render(messages: list[Message], tokenizer: Tokenizer, place: str, *, prompt: bool) -> str:
    assert tokenizer.render is not None
    if not messages:
        raise FdpError(
            f"{place}, message 1: expected a conversation that begins with the user or the system, got one that begins "
            f"with the {ASSISTANT}, before which a chat template has no prompt; put a message before it, or drop it"
        )
    try:
        return tokenizer.render([fields for _, fields in messages], prompt)
    except Exception as error:  # raised again below: a template's message, or a chained error, may show the record
        said = str(error).strip()
        why = f"{said!r}" if said and said in tokenizer.template else type(error).__name__
    roles = ", ".join(role for role, _ in messages[:4]) + (", ..." if len(messages) > 4 else "")
    raise FdpError(
        f"{place}, message {len(messages)}: expected a conversation that the tokenizer's chat template takes, got one "
        f"of {roles} that it refuses ({why}); change the record, or give another template"
    )


def _new_text(before: str, text: str, place: str, number: int) -> str:
    if not text.startswith(before):
        raise FdpError(
            f"{place}, message {number}: expected a chat template that only adds to the text, got one that changes "
            "what came before, so that prompts cannot be told from answers; give records with 'prompt' and 'completion'"
        )
    return text[len(before) :]
