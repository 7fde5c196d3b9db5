"""Text as tokens: fdp's bytes, or the tokenizer of a local folder in the transformers format.

    tokens = encode(text)                      no special token is added: what is in a sample is what is in the text
    tokens, spans = locate(text)               the same tokens, and the characters that each of them comes from

A tokenizer is part of the model: one that was trained on the data to be protected has told of them already, and no
noise takes that back. It must be a function: one that drops merges or samples pieces at random is refused, since the
data would be other data in every run. Nothing is downloaded.

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

from fdp.data.files import check_text
from fdp.types import FdpError

TODAY = datetime(2024, 7, 26)
"""The day on which chat templates that tell the date are written: a run that is resumed tomorrow has the same data."""

Span: TypeAlias = tuple[int, int]
"""The characters of a text that a token comes from: the first, and the one after the last."""


class Tokenizer(NamedTuple):
    """Text to numbers below ``vocab_size``; ``end`` is the token that ends a text, where there is one.

    ``locate(text)`` is the same tokens with their spans; None: it cannot tell. ``render(messages, prompt)`` is a
    conversation as text by the tokenizer's own template, with ``prompt`` up to where the assistant's next words begin;
    None: it has no template. ``template`` is the source of that, ``word`` what a token is called.
    """

    encode: Callable[[str], list[int]]
    vocab_size: int
    end: int | None = None
    locate: Callable[[str], tuple[list[int], list[Span]]] | None = None
    render: Callable[[Sequence[dict[str, Any]], bool], str] | None = None
    template: str = ""
    word: str = "token"


def _encode_bytes(text: str) -> list[int]:
    return list(text.encode())


def _locate_bytes(text: str) -> tuple[list[int], list[Span]]:
    return _encode_bytes(text), [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]


BYTES = Tokenizer(_encode_bytes, 256, locate=_locate_bytes, word="byte")
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
        raise FdpError("tokenizer: a folder is read by transformers: pip install transformers") from None
    try:
        found = AutoTokenizer.from_pretrained(os.fspath(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).partition("\n")[0]  # a page of what else could be installed follows
        raise FdpError(f"tokenizer: expected a tokenizer in {os.fspath(folder)!r}, got none: {why}") from None
    return tokenizer_of(found)


def tokenizer_of(tokenizer: Any) -> Tokenizer:
    """Take a ``transformers`` tokenizer at hand."""
    check_repeatable(tokenizer)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def locate(text: str) -> tuple[list[int], list[Span]]:
        found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        return found["input_ids"], found["offset_mapping"]

    template = getattr(tokenizer, "chat_template", None)
    own = {"chat_template": _dated(template)} if isinstance(template, str) else {}

    def render(messages: Sequence[dict[str, Any]], prompt: bool) -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt, **own)

    return Tokenizer(
        encode,
        len(tokenizer),
        tokenizer.eos_token_id,
        locate if getattr(tokenizer, "is_fast", False) else None,
        None if template is None else render,
        str(template or ""),
    )


def check_repeatable(tokenizer: Any) -> None:
    """Refuse a tokenizer that gives other tokens for the same text from time to time.

    By its settings (dropout of merges, sampling of pieces), and by encoding a text of its own words a few times.
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
            f"tokenizer: expected one that always gives the same tokens for a text, got one with {found[0]}: the data "
            "would be other data in every run. Switch it off, and save the tokenizer again"
        )


def _dated(template: str) -> str:
    """The template, with the date of ``TODAY`` for the one it would ask the clock for."""
    return re.sub(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""", lambda call: repr(TODAY.strftime(call[2])), template)


def encoded(tokenizer: Tokenizer, text: str, place: str) -> list[int]:
    """Return the tokens of a text; what is no Unicode, or fails in the tokenizer, is refused with its place."""
    return _guarded(lambda: tokenizer.encode(text), text, place)


def located(tokenizer: Tokenizer, text: str, place: str) -> tuple[list[int], list[Span]]:
    """Return the tokens of a text and where each comes from; see :func:`encoded`."""
    if (locate := tokenizer.locate) is None:
        raise FdpError(
            "tokenizer: expected one that tells which characters a token comes from, so that prompts can be told from "
            "answers, got one in Python; save its fast version (tokenizer.json), or give texts"
        )
    return _guarded(lambda: locate(text), text, place)


def _guarded(work: Callable[[], Any], text: str, place: str) -> Any:
    check_text(text, place)
    try:
        return work()
    except Exception as error:  # raised again below: the words of a library, and a chained error, may show the text
        why = type(error).__name__
    raise FdpError(f"{place}: expected text that the tokenizer takes, got an error in it ({why}); repair or drop it")


def stream(texts: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> np.ndarray:
    """Join texts (with their places) to one row of tokens, with the one that ends a text (else a newline) between."""
    gap = np.asarray(tokenizer.encode("\n") if tokenizer.end is None else [tokenizer.end], dtype=np.int64)
    pieces: list[np.ndarray] = []
    for place, text in texts:
        pieces += [np.asarray(encoded(tokenizer, text, place), dtype=np.int64), gap]
    return np.concatenate(pieces[:-1]) if pieces else np.zeros(0, dtype=np.int64)
