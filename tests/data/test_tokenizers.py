"""Prompt and answer are tokenized as one text, without added spaces, by deterministic tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fdp.data import chat, corpus, text
from fdp.types import FdpError
from tests.data.test_text import make_tokenizer, write

TEXTS = ["one two three two", "question answer yes no", "a b c hello world", "user: hi assistant: ho"] * 3
SPECIAL = ["[unk]", "</s>"]


def metaspace(dropout: float | None = None) -> RawTokenizer:
    """Pieces with a mark before every word, as in SentencePiece, also before the first word of a text."""
    raw = RawTokenizer(models.BPE(unk_token="[unk]", dropout=dropout))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    raw.decoder = decoders.Metaspace()  # type: ignore[assignment]
    raw.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=SPECIAL, vocab_size=90, show_progress=False))
    return raw


def prepended() -> RawTokenizer:
    """The same by a normalizer, as in Llama's tokenizer."""
    raw = RawTokenizer(models.BPE(unk_token="[unk]"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    raw.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=SPECIAL, vocab_size=90, show_progress=False))
    return raw


def byte_level(*, trim: bool) -> RawTokenizer:
    """Bytes and merges of them, as in GPT-2; spans with or without the space before a word."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.post_processor = processors.ByteLevel(trim_offsets=trim)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=SPECIAL, vocab_size=330, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(TEXTS, trainer)
    return raw


def of(raw: RawTokenizer) -> text.Tokenizer:
    return text.tokenizer_of(PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[unk]", eos_token="</s>"))


TOKENIZERS = {
    "bytes": text.BYTES._replace(end=0),
    "metaspace": of(metaspace()),
    "prepended": of(prepended()),
    "byte level": of(byte_level(trim=False)),
    "byte level, trimmed": of(byte_level(trim=True)),
}
WORDS = st.lists(st.sampled_from(["one", "two", " two", "hel", "lo", "yes", " ", "  ", "\n", "é", ":", ""]), max_size=5)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(prompt=WORDS.map("".join), completion=WORDS.map("".join))
def test_the_tokens_of_a_record_are_those_of_its_text(name: str, prompt: str, completion: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens, counted = chat.completion_tokens({"prompt": prompt, "completion": completion}, tokenizer, "here")
    whole = tokenizer.encode(prompt + completion)
    assert tokens == (whole if not completion or not whole else [*whole, tokenizer.end])
    assert len(counted) == len(tokens)
    if completion and whole:
        assert counted[-1]
    assert not any(counted) or counted == sorted(counted), "answers come last"
    border = _border(tokenizer, prompt, completion)
    assert counted[:border] == [False] * border, "what holds nothing of the completion does not count"
    assert all(counted[border:])


def _border(tokenizer: text.Tokenizer, prompt: str, completion: str) -> int:
    """Return the number of tokens of the full text that end within the prompt."""
    assert tokenizer.locate is not None
    if not prompt:
        return 0
    tokens, spans = tokenizer.locate(prompt + completion)
    return sum(end <= len(prompt) for _, end in spans) if len(tokens) else 0


@pytest.mark.parametrize("name", ["metaspace", "prepended"])
def test_no_space_is_added_between_prompt_and_completion(name: str) -> None:
    """Apart, "hel" and "lo" are the tokens of "hel lo"."""
    tokenizer = TOKENIZERS[name]
    tokens, _ = chat.completion_tokens({"prompt": "hel", "completion": "lo"}, tokenizer, "here")
    assert tokens == [*tokenizer.encode("hello"), tokenizer.end]
    assert tokens != [*tokenizer.encode("hel"), *tokenizer.encode("lo"), tokenizer.end]
    said = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    tokens, counted = chat.conversation_tokens(said, tokenizer, "here")
    assert tokens == [*tokenizer.encode("user: hi\nassistant: ho\n"), tokenizer.end]
    assert any(counted)
    assert not all(counted)


@pytest.mark.parametrize("name", ["byte level", "byte level, trimmed"])
def test_a_word_is_learned_if_its_leading_space_is_in_the_prompt(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens, counted = chat.completion_tokens({"prompt": "one: ", "completion": "two"}, tokenizer, "here")
    (two,) = tokenizer.encode(" two")
    assert tokens[-2:] == [two, tokenizer.end]
    assert counted[-2:] == [True, True]
    assert not any(counted[:-2])


def test_a_token_of_spaces_counts_by_the_side_it_is_on() -> None:
    tokenizer = TOKENIZERS["byte level, trimmed"]
    for prompt, completion in (("one\n", "\ntwo"), ("one \n", "two"), ("one", "\n \ntwo")):
        tokens, counted = chat.completion_tokens({"prompt": prompt, "completion": completion}, tokenizer, "here")
        plain = TOKENIZERS["byte level"]
        assert (tokens, counted) == chat.completion_tokens({"prompt": prompt, "completion": completion}, plain, "here")
        assert 1 < sum(counted) < len(tokens)


def test_a_tokenizer_without_spans_takes_texts_but_no_conversations(tmp_path: Path) -> None:
    blind = text.BYTES._replace(locate=None)
    assert len(corpus.read(write(tmp_path / "a.jsonl", {"text": "a"}), blind)[0].owners) == 1
    with pytest.raises(FdpError, match="expected one that tells which characters a token comes from"):
        corpus.read(write(tmp_path / "b.jsonl", {"prompt": "a", "completion": "b"}), blind)


def test_a_tokenizer_with_dropout_is_refused(tmp_path: Path) -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=metaspace(dropout=0.1), unk_token="[unk]")
    made.save_pretrained(tmp_path)
    words = r"always gives the same tokens for a text, got one with dropout of merges .'dropout' in tokenizer.json"
    with pytest.raises(FdpError, match=words):
        text.load_tokenizer(tmp_path)
    assert of(metaspace(dropout=0.0)).encode("one two") == of(metaspace()).encode("one two")


def test_sampled_pieces_are_refused() -> None:
    class Sampled:
        """Gives different tokens every time, without a setting that tells."""

        def __init__(self, **settings: Any) -> None:
            self.sp_model_kwargs = settings
            self.draw = np.random.default_rng(0)

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1}

        def __call__(self, _: str, **__: Any) -> dict[str, list[int]]:
            return {"input_ids": self.draw.integers(0, 2, 20).tolist()}

    with pytest.raises(FdpError, match="got one with other tokens for the same text"):
        text.check_repeatable(Sampled())
    with pytest.raises(FdpError, match=r"sampling of pieces .'enable_sampling' in sp_model_kwargs"):
        text.check_repeatable(Sampled(enable_sampling=True, alpha=0.1))


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate, after ' + m.content) }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def said(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            said(("system", "be"), ("user", "hello"), ("assistant", "bye")),
            r"line 2, message 2: expected a conversation that the tokenizer's chat template takes, got one of system, "
            r"user that it refuses \('System role not supported'\); change the record, or give another template",
        ),
        (
            said(("user", "hello"), ("user", "hi"), ("assistant", "bye")),
            r"line 2, message 2: .* refuses \(TemplateError\)",
        ),
        (
            said(("assistant", "bye"), ("user", "hello")),
            "line 2, message 1: expected a conversation that begins with the user or the system, got one that begins",
        ),
        (
            said(("user", "hello"), ("gpt", "bye")),
            "line 2, message 2: expected one of assistant, user, .* rename the role",
        ),
        (said(("user", "\ud800"), ("assistant", "bye")), "line 2, message 1: expected text, got a lone surrogate"),
    ],
)
def test_conversations_that_the_template_rejects_are_refused(record: dict, message: str, tmp_path: Path) -> None:
    tokenizer = text.load_tokenizer(make_tokenizer(tmp_path / "tokenizer", template=NO_SYSTEM))
    path = write(tmp_path / "chat.jsonl", said(("user", "hello"), ("assistant", "bye")), record)
    with pytest.raises(FdpError, match=message):
        corpus.read(path, tokenizer)


def test_a_template_renders_complete_turns_only(tmp_path: Path) -> None:
    """A template that rejects a lone system message accepts it before a user's."""
    picky = (
        "{% if messages | length == 1 and messages[0].role == 'system' %}{{ raise_exception('no query') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    tokenizer = text.load_tokenizer(make_tokenizer(tmp_path / "tokenizer", template=picky))
    path = write(
        tmp_path / "chat.jsonl", said(("system", "how"), ("user", "hello"), ("assistant", "bye"), ("user", "hi"))
    )
    documents, _ = corpus.read(path, tokenizer)
    assert [int(token) for token in documents.tokens[documents.counted]] == tokenizer.encode("bye <end>")


def test_a_template_that_asks_for_the_date_gets_a_fixed_one(tmp_path: Path) -> None:
    dated = (
        "{% set day = strftime_now( \"%d %b %Y\" ) %}{{ strftime_now('%Y-%m-%d') }} {{ day }} {{ messages[0].content }}"
    )
    tokenizer = text.load_tokenizer(make_tokenizer(tmp_path, template=dated))
    assert tokenizer.render is not None
    assert tokenizer.render(said(("user", "hello"))["messages"], False) == "2024-07-26 26 Jul 2024 hello"


@pytest.mark.parametrize("role", ["Assistant", "ASSISTANT", " assistant\n"])
def test_the_assistant_role_is_recognised_in_any_case(role: str, tmp_path: Path) -> None:
    """With a capitalised role, answers would be read but not learned."""
    path = write(tmp_path / "chat.jsonl", said(("User", "hi"), (role, "ho")))
    assert corpus.load(path, context=30, vocab_size=256).reading.silent == 0
    documents, _ = corpus.read(path, text.BYTES)
    assert documents.tokens[documents.counted].astype(np.uint8).tobytes() == b"ho\n"
    assert documents.tokens.astype(np.uint8).tobytes() == b"user: hi\nassistant: ho\n"
