"""Tokenizers: UTF-8 bytes, or a local folder in the transformers format.

    tokens = encode(text)                      no special token is added: a sample holds what the text holds
    tokens, spans = locate(text)               the same tokens, and the characters that each comes from

A tokenizer is part of the model: one that was trained on the private data already leaks it, and no noise undoes that.
It must be deterministic: one that drops merges or samples pieces at random is refused, since every run would train on
different data. Nothing is downloaded.

    >>> tokenizer = load_tokenizer("models/tiny")                    # or BYTES
    >>> tokenizer.encode("one two")
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fdp.data.array_store import ArrayWriter, narrowest_dtype
from fdp.data.text_files import check_text
from fdp.extras import missing_package
from fdp.types import FdpError

TEMPLATE_DATE = datetime(2024, 7, 26)
"""The date given to chat templates that ask for today's, so that a run resumed tomorrow has the same data."""

Span: TypeAlias = tuple[int, int]
"""The characters [first, end) of a text that a token comes from."""


class Tokenizer(NamedTuple):
    """A map from text to token ids below ``vocab_size``; ``end`` is the end-of-text token, if any.

    ``locate(text)`` returns the same tokens with their spans; None if it cannot. ``render(messages, prompt)`` writes a
    conversation as text by the tokenizer's template, with ``prompt`` up to where the assistant's next message begins;
    None without a template. ``template`` is its source, ``word`` the noun for a token. ``decode(tokens)`` is the text.
    """

    encode: Callable[[str], list[int]]
    vocab_size: int
    end: int | None = None
    locate: Callable[[str], tuple[list[int], list[Span]]] | None = None
    render: Callable[[Sequence[dict[str, Any]], bool], str] | None = None
    template: str = ""
    word: str = "token"
    decode: Callable[[Sequence[int]], str] | None = None


def _encode_bytes(text: str) -> list[int]:
    return list(text.encode())


def _locate_bytes(text: str) -> tuple[list[int], list[Span]]:
    return _encode_bytes(text), [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(token if token < 256 else 63 for token in tokens).decode(errors="replace")


BYTES = Tokenizer(_encode_bytes, 256, locate=_locate_bytes, word="byte", decode=_decode_bytes)
"""A token is a byte of the text's UTF-8 form."""


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer in a local folder, as ``transformers`` saved it."""
    if not Path(folder).is_dir():
        raise FdpError(
            f"tokenizer: expected a folder that exists, got {os.fspath(folder)!r}; save one there with "
            "tokenizer.save_pretrained(folder). Nothing is downloaded"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing_package("transformers", purpose="to read the folder of a tokenizer") from None
    try:
        found = AutoTokenizer.from_pretrained(os.fspath(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).partition("\n")[0]  # a page of installation advice follows
        raise FdpError(f"tokenizer: expected a tokenizer in {os.fspath(folder)!r}, got none: {why}") from None
    return tokenizer_of(found)


def tokenizer_of(tokenizer: Any) -> Tokenizer:
    """Wrap a loaded ``transformers`` tokenizer."""
    check_repeatable(tokenizer)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def locate(text: str) -> tuple[list[int], list[Span]]:
        found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        return found["input_ids"], found["offset_mapping"]

    template = getattr(tokenizer, "chat_template", None)
    own = {"chat_template": _fix_date(template)} if isinstance(template, str) else {}

    def render(messages: Sequence[dict[str, Any]], prompt: bool) -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt, **own)

    return Tokenizer(
        encode,
        max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0)),
        tokenizer.eos_token_id,
        locate if getattr(tokenizer, "is_fast", False) else None,
        None if template is None else render,
        str(template or ""),
        decode=lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True),
    )


def check_repeatable(tokenizer: Any) -> None:
    """Refuse a tokenizer that is not deterministic.

    Checks its settings (dropout of merges, sampling of pieces), and encodes a text of its own words a few times.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    sampling = (getattr(tokenizer, "sp_model_kwargs", None) or {}).get("enable_sampling", False)
    settings = {
        "dropout of merges ('dropout' in tokenizer.json)": getattr(model, "dropout", None),
        "sampling of pieces ('alpha' of its model)": getattr(model, "alpha", None),
        "sampling of pieces ('nbest_size' of its model)": getattr(model, "nbest_size", None),
        "sampling of pieces ('enable_sampling' in sp_model_kwargs)": sampling,
    }
    found = [name for name, value in settings.items() if value]
    if not found:
        words = " ".join(str(word) for word in list(tokenizer.get_vocab())[:500])
        tries = [tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"] for _ in range(4)]
        found = ["other tokens for the same text"] if any(each != tries[0] for each in tries) else []
    if found:
        raise FdpError(
            f"tokenizer: expected one that always gives the same tokens for a text, got one with {found[0]}: every "
            "run would train on different data. Switch it off, and save the tokenizer again"
        )


def _fix_date(template: str) -> str:
    """Replace the template's calls for today's date by ``TEMPLATE_DATE``."""
    return re.sub(
        r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""", lambda call: repr(TEMPLATE_DATE.strftime(call[2])), template
    )


def encode_text(tokenizer: Tokenizer, text: str, place: str) -> list[int]:
    """Return the tokens of a text; refuse text that is not Unicode or that the tokenizer fails on, naming its place."""
    return _call_safely(lambda: tokenizer.encode(text), text, place)


def locate_tokens(tokenizer: Tokenizer, text: str, place: str) -> tuple[list[int], list[Span]]:
    """Return the tokens of a text and the span of each; errors as in :func:`encode_text`."""
    if (locate := tokenizer.locate) is None:
        raise FdpError(
            "tokenizer: expected one that tells which characters a token comes from, so that prompts can be told from "
            "answers, got one in Python; save its fast version (tokenizer.json), or give texts"
        )
    return _call_safely(lambda: locate(text), text, place)


def _call_safely(work: Callable[[], Any], text: str, place: str) -> Any:
    check_text(text, place)
    try:
        return work()
    except Exception as error:  # raised again below: a library's message, or a chained error, may show the text
        why = type(error).__name__
    raise FdpError(f"{place}: expected text that the tokenizer takes, got an error in it ({why}); repair or drop it")


def token_stream(texts: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> np.ndarray:
    """Join texts, given with their places, to one row of tokens, separated by the end of text or else a newline.

    One text at a time is in memory; a row that is larger than memory becomes a mapped file (``fdp.data.array_store``).
    """
    gap = tokenizer.encode("\n") if tokenizer.end is None else [tokenizer.end]
    joined, began = ArrayWriter(narrowest_dtype(tokenizer.vocab_size)), False
    for place, text in texts:
        if began:
            joined.append(gap)
        joined.append(encode_text(tokenizer, text, place))
        began = True
    return joined.finish()
