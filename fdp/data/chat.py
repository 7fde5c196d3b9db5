"""Instructions and conversations: the prompt is read, the answer is learned.

    {"prompt": "...", "completion": "..."}                       tokens of the completion count, and the end after it
    {"messages": [{"role": "user", "content": "..."}, ...]}      tokens of what the assistant says, and the end of it

    loss_b = mean of the next token's cross-entropy over the tokens of record b that count

**A sample, the unit of privacy, is one record** (one conversation, all its turns) or, with ``user_field``, one user.
Prompts are protected as well as answers: they are inputs of the same sample's loss, whose whole gradient is clipped.

A record is written as one text, by the tokenizer's own template or without one as ``role: content`` lines, and
tokenised once, as a whole: the tokens are those of the text, with no space invented between a prompt and its answer. A
token counts if any of its characters is to be learned. A record that is too long keeps its first ``context + 1``
tokens; one whose answer is thereby lost stays a sample, with loss exactly 0.

    >>> tokens, counted = conversation_tokens(record, load_tokenizer("models/tiny"), "chat.jsonl, line 7")
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from fdp.data.files import check_text, describe
from fdp.data.text import Tokenizer, located
from fdp.types import FdpError

Piece: TypeAlias = tuple[str, bool]
"""A stretch of text, and whether its tokens count in the loss."""

ASSISTANT = "assistant"
"""The role whose words are learned."""
ROLES = (
    ASSISTANT, "user", "system", "developer", "tool", "function", "ipython", "environment", "observation",
)  # fmt: skip
"""The roles that templates know; by another name an answer would be read and not learned."""


class Message(NamedTuple):
    """A message whose role is known, and the message itself with the role in its usual spelling."""

    role: str
    whole: dict[str, Any]


def completion_tokens(record: dict[str, Any], tokenizer: Tokenizer, place: str) -> tuple[list[int], list[bool]]:
    """Return the tokens of a prompt and its completion, and whether each counts."""
    for field in ("prompt", "completion"):
        if not isinstance(record.get(field), str):
            raise FdpError(f"{place}: expected text in 'prompt' and 'completion', got {describe(record, field)}")
    return _ended(*_tokens([(record["prompt"], False), (record["completion"], True)], tokenizer, place), tokenizer)


def conversation_tokens(record: dict[str, Any], tokenizer: Tokenizer, place: str) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and whether each counts; a template writes its own end."""
    if not isinstance(record.get("messages"), list):
        raise FdpError(f"{place}: expected a list of messages in 'messages', got {describe(record, 'messages')}")
    tokens, counted = _tokens(message_pieces(record["messages"], tokenizer, place), tokenizer, place)
    return (tokens, counted) if tokenizer.render is not None else _ended(tokens, counted, tokenizer)


def message_pieces(messages: list[Any], tokenizer: Tokenizer, place: str) -> list[Piece]:
    """Return a conversation as stretches of text, in order; ``place`` names it in errors."""
    checked = _checked(messages, place)
    return _by_lines(checked) if tokenizer.render is None else _by_template(checked, tokenizer, place)


def _tokens(pieces: Sequence[Piece], tokenizer: Tokenizer, place: str) -> tuple[list[int], list[bool]]:
    """The tokens of all pieces as one text, and whether any character of each counts."""
    tokens, spans = located(tokenizer, "".join(text for text, _ in pieces), place)
    learned = [counts for text, counts in pieces for _ in text]
    before = [0, *accumulate(learned)]  # characters that count, before each
    return tokens, [before[last] > before[first] for first, last in map(_held, spans)]


def _held(span: tuple[int, int]) -> tuple[int, int]:
    """The characters of a token; where spaces were trimmed and nothing is left, the one before."""
    first, last = span
    return (first, last) if first < last else (max(last - 1, 0), last)


def _ended(tokens: list[int], counted: list[bool], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """With the token that ends a text after an answer that ends the record."""
    if tokenizer.end is None or not counted or not counted[-1]:
        return tokens, counted
    return [*tokens, tokenizer.end], [*counted, True]


def _checked(messages: list[Any], place: str) -> list[Message]:
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


def _by_lines(messages: list[Message]) -> list[Piece]:
    """``role: content`` and a newline for every message; of the assistant's, all after the role counts."""
    found: list[Piece] = []
    for role, whole in messages:
        words = f"{whole['content']}\n"
        found += [(f"{role}: ", False), (words, True)] if role == ASSISTANT else [(f"{role}: {words}", False)]
    return found


def _by_template(messages: list[Message], tokenizer: Tokenizer, place: str) -> list[Piece]:
    """What the template writes; of an assistant's message, all after the template's prompt for it counts."""
    found: list[Piece] = []
    before = ""
    for number, (role, _) in enumerate(messages, start=1):
        if role != ASSISTANT and number < len(messages):
            continue  # a template may refuse a conversation that ends there
        if role == ASSISTANT:
            prompt = _rendered(messages[: number - 1], tokenizer, place, prompt=True)
            found.append((_added(before, prompt, place, number), False))
            before = prompt
        text = _rendered(messages[:number], tokenizer, place, prompt=False)
        found.append((_added(before, text, place, number), role == ASSISTANT))
        before = text
    return found


def _rendered(messages: list[Message], tokenizer: Tokenizer, place: str, *, prompt: bool) -> str:
    assert tokenizer.render is not None
    if not messages:
        raise FdpError(
            f"{place}, message 1: expected a conversation that begins with the user or the system, got one that begins "
            f"with the {ASSISTANT}, before which a chat template has no prompt; put a message before it, or drop it"
        )
    try:
        return tokenizer.render([whole for _, whole in messages], prompt)
    except Exception as error:  # raised again below: a template's words, and a chained error, may show the record
        said = str(error).strip()
        why = f"{said!r}" if said and said in tokenizer.template else type(error).__name__
    roles = ", ".join(role for role, _ in messages[:4]) + (", ..." if len(messages) > 4 else "")
    raise FdpError(
        f"{place}, message {len(messages)}: expected a conversation that the tokenizer's chat template takes, got one "
        f"of {roles} that it refuses ({why}); change the record, or give another template"
    )


def _added(before: str, text: str, place: str, number: int) -> str:
    if not text.startswith(before):
        raise FdpError(
            f"{place}, message {number}: expected a chat template that only adds to the text, got one that changes "
            "what came before, so that prompts cannot be told from answers; give records with 'prompt' and 'completion'"
        )
    return text[len(before) :]
