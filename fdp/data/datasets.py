"""Datasets from local files: windows over a stream of bytes or tokens, and a small set of images.

A stream of tokens is split into windows that do not overlap,

    sample i = tokens[i (context + 1) : (i + 1) (context + 1)],

and **a sample, the unit of privacy, is one window**. No token is in two samples: inputs and targets overlap only
inside a window, so removing a window removes every use of its tokens. A document longer than a window is several
samples, and so less protected than if it were one.

    >>> dataset = load("stdlib", context=128)          # the source of the running Python's standard library
    >>> dataset = load("notes.jsonl", context=128, field="body")
    >>> dataset = load("notes.txt", context=128, vocab_size=50257, tokenizer=load_tokenizer("models/tiny"))
    >>> dataset.fetch(np.array([0, 7]))                # {'tokens': int64 (2, 129)}
"""

from __future__ import annotations

import codecs
import difflib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdp.data import text
from fdp.data.array_store import ArrayWriter
from fdp.data.files import (
    GZIP_ERRORS,
    ZIPPED,
    RecordForm,
    Source,
    check_text,
    damaged_archive,
    find_source,
    find_token_files,
    open_bytes,
    read_text,
    to_utf8,
)
from fdp.data.nouns import FILE, text_noun
from fdp.data.person_fields import FieldCensus, PersonField
from fdp.data.read_counts import ReadCounts
from fdp.data.record_fields import text_field
from fdp.data.record_files import read_records
from fdp.data.table_records import name_separators
from fdp.data.token_files import Shards, map_file, read_tokens
from fdp.data.units import PrivacyUnit, UnitKind, privacy_unit
from fdp.data.user_fields import folders_of
from fdp.extras import missing_package
from fdp.types import FdpError

BYTE_VOCAB_SIZE = 256
"""Vocabulary of a text source without a tokenizer: a token is a byte of its UTF-8 form."""

NAMES = ("stdlib", "digits")
"""Datasets known by name; any other name is a path."""

CHUNK_ELEMENTS = 1 << 24
"""Elements checked at a time, so that a mapped file is never all in memory."""

# Tests, tables and demonstrations: most of the library's bytes, and hardly source text.
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings", "turtledemo", "ensurepip"}
_SKIPPED |= {"site-packages", "dist-packages", "__pycache__"}


class TextsRead(NamedTuple):
    """The counts of the texts that a stream was made of; see ``fdp.data.read_counts``."""

    texts: int = 0
    text: str = FILE
    links: int = 0
    person_field: PersonField | None = None
    unread: int = 0
    separated: str = ""


@dataclass(frozen=True)
class Windows:
    """Windows of ``context + 1`` tokens over a one-dimensional array, which may be a mapped file, or several.

    Guarantees:
      - windows do not overlap: a token is in at most one sample;
      - only the windows asked for are read.
    """

    tokens: np.ndarray | Shards = field(repr=False)
    context: int
    token: str = "token"
    texts: TextsRead = field(default=TextsRead(), repr=False)

    @property
    def reading(self) -> ReadCounts:
        """The counts of windows, and of tokens that are not trained on; covered by no budget."""
        tail, size = len(self.tokens) - len(self) * (self.context + 1), self.context + 1
        return ReadCounts(UnitKind.WINDOW, len(self), size, self.token, tail=tail, **self.texts._asdict())

    @property
    def unit(self) -> PrivacyUnit:
        """The unit of privacy, in words."""
        return privacy_unit(UnitKind.WINDOW, tokens=self.context + 1, word=self.token)

    def __len__(self) -> int:
        return len(self.tokens) // (self.context + 1)

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``{"tokens": int64 (n, context + 1)}`` for n indices."""
        size = self.context + 1
        if isinstance(self.tokens, Shards):
            return {"tokens": torch.from_numpy(self.tokens.windows(indices, size).astype(np.int64))}
        rows = self.tokens[: len(self) * size].reshape(len(self), size)
        return {"tokens": torch.from_numpy(rows[indices].astype(np.int64))}

    def content(self) -> list[tuple[str, np.ndarray | Shards]]:
        """Return the arrays that samples are made from, for ``fdp.data.digest``."""
        used, tokens = len(self) * (self.context + 1), self.tokens
        tokens = tokens.first(used) if isinstance(tokens, Shards) else tokens[:used]
        return [("tokens", tokens), ("context", np.array([self.context]))]


@dataclass(frozen=True)
class Examples:
    """Labelled images held in memory; a sample is one image with its label."""

    image: Tensor = field(repr=False)
    label: Tensor = field(repr=False)

    @property
    def reading(self) -> ReadCounts:
        """The number of images; covered by no budget."""
        return ReadCounts(UnitKind.IMAGE, len(self), 0, "pixel")

    @property
    def unit(self) -> PrivacyUnit:
        """The unit of privacy, in words."""
        return privacy_unit(UnitKind.IMAGE)

    def __len__(self) -> int:
        return len(self.label)

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``{"image": float32 (n, ...), "label": int64 (n,)}`` for n indices."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return {"image": self.image.index_select(0, rows), "label": self.label.index_select(0, rows)}

    def content(self) -> list[tuple[str, Tensor]]:
        """Return the arrays that samples are made from, for ``fdp.data.digest``."""
        return [("image", self.image), ("label", self.label)]


def load(
    name_or_path: str | os.PathLike[str],
    *,
    context: int | None,
    form: RecordForm = RecordForm.AUTO,
    field: str = "text",
    vocab_size: int = BYTE_VOCAB_SIZE,
    tokenizer: text.Tokenizer | None = None,
) -> Windows | Examples:
    """Load a dataset by name or by path.

    - ``stdlib``, or ``digits`` (for classifiers, with ``context=None``);
    - a file or folder of UTF-8 text, or of records (see ``fdp.data.files``), from which ``field`` is read; texts are
      joined by a newline, or by the end of text of ``tokenizer``;
    - ``.npy`` or ``.bin`` token files, or a folder of them, which are mapped (``fdp.data.token_files``). Beside a
      ``tokenizer`` they must hold tokens of its vocabulary.

    With ``RecordForm.FILE`` every file is a text, whatever its name. The named datasets refuse a ``tokenizer``. Every
    token is checked to be in ``[0, vocab_size)`` here, before any training.
    """
    source = os.fspath(name_or_path)
    path = Path(source)
    _check_exists(source)
    is_tokens = bool(find_token_files(path))
    if tokenizer is not None and source in NAMES:
        raise FdpError(f"data {source!r}: expected text to go with a tokenizer, got a dataset of its own kind")
    if source == "digits":
        if context is not None:
            raise FdpError(
                "data 'digits' is images: expected a classifier (mlp, logistic, cnn), got a language model; "
                "give --model mlp, or other --data"
            )
        return digits()[0]
    if context is None:
        raise FdpError(
            f"data {source!r} is text: expected a language model, got a classifier, whose data is 'digits'; give a "
            "language model, such as --model gpt-nano"
        )
    if source == "stdlib":
        return windows(stdlib(), context=context, vocab_size=vocab_size, where="stdlib", token="byte")
    if form not in (RecordForm.AUTO, RecordForm.TEXT, RecordForm.FILE):
        raise FdpError(
            f"--form {form.value}: expected --unit record or user to go with it, got windows: add --unit record"
        )
    if is_tokens:
        tokens = read_tokens(path)
        known = vocab_size if tokenizer is None else min(vocab_size, tokenizer.vocab_size)
        return windows(tokens, context=context, vocab_size=known, where=source)
    return _load_texts(path, context, vocab_size, form=form, field=field, tokenizer=tokenizer)


def _load_texts(
    path: Path, context: int, vocab_size: int, *, form: RecordForm, field: str, tokenizer: text.Tokenizer | None
) -> Windows:
    """Return the windows over a stream of texts: of files, or of a field of records."""
    found, census = find_source(path, form=form), FieldCensus()
    texts = _texts(found, field, census)
    if tokenizer is not None:
        tokens, token = text.token_stream(texts, tokenizer), tokenizer.word
    elif found.records:
        tokens, token = _join_texts(np.frombuffer(words.encode(), np.uint8) for _, words in texts), "byte"
    elif len(found.files) > 1:
        tokens, token = _join_texts(_read_text(file) for file in found.files), "byte"
    else:
        tokens, token = _read_text(next(iter(found.files))), "byte"
    dataset = windows(tokens, context=context, vocab_size=vocab_size, where=str(path), token=token)
    read = TextsRead(len(found.files), FILE, found.links, folders_of(found))
    if found.records:
        read = TextsRead(census.records, text_noun(field), found.links, census.person(read=(field,)))
        read = read._replace(separated=name_separators(found.files))
    return replace(dataset, texts=read._replace(unread=found.unread))


def _check_exists(source: str) -> None:
    if source not in NAMES and not Path(source).exists():
        near = difflib.get_close_matches(source, NAMES, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Check the path; nothing is downloaded"
        raise FdpError(f"data: expected {' or '.join(NAMES)}, or a path that exists, got {source!r}. {hint}")


def windows(tokens: np.ndarray | Shards, *, context: int, vocab_size: int, where: str, token: str = "token") -> Windows:
    """Check tokens and split them into windows; ``where`` names the source. A shorter last window is dropped."""
    if context < 1:
        raise FdpError(f"context: expected at least 1, got {context}")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise FdpError(
            f"{where}: expected integers in one dimension, got {tokens.dtype} of shape {tokens.shape}; "
            "save token ids, not text or embeddings"
        )
    if len(tokens) == 0:
        raise FdpError(f"{where}: expected text or tokens, got nothing (empty); check that it is the file you meant")
    if len(tokens) < context + 1:
        raise FdpError(
            f"{where}: expected at least one window of {context + 1} {token}s, got {len(tokens)}; "
            "give more data or a shorter context"
        )
    for start in range(0, len(tokens), CHUNK_ELEMENTS):
        chunk = tokens[start : start + CHUNK_ELEMENTS]
        if int(chunk.max()) >= vocab_size or int(chunk.min()) < 0:
            first = int(np.argmax((chunk >= vocab_size) | (chunk < 0)))
            raise FdpError(
                f"{where}: expected token ids from 0 to {vocab_size - 1}, got another "
                f"at position {start + first}; use the model's tokenizer or a model with a larger vocabulary"
            )
    return Windows(tokens, context, token)


def examples(image: Tensor, label: Tensor, *, where: str) -> Examples:
    """Check images and labels and return them as a dataset; ``where`` names the source in errors."""
    if len(image) != len(label) or len(label) == 0:
        raise FdpError(f"{where}: expected as many labels as images, got {len(image)} images and {len(label)} labels")
    bad = ~torch.isfinite(image).flatten(1).all(1)
    if bool(bad.any()):
        raise FdpError(
            f"{where}: expected finite pixels, got NaN or infinity in image {int(bad.int().argmax())} "
            f"and {int(bad.sum()) - 1} others; repair or drop them"
        )
    return Examples(image.float(), label.long())


def stdlib() -> np.ndarray:
    """Return the bytes of Python's standard library, ``*.py`` in sorted order, without tests and large tables."""
    root = sysconfig.get_path("stdlib")
    pieces: list[bytes] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        pieces.extend(Path(folder, name).read_bytes() for name in sorted(names) if name.endswith(".py"))
    if not any(pieces):
        raise FdpError(f"stdlib: expected Python sources under {root}, got none; give a text file with --data instead")
    return np.frombuffer(b"\n".join(pieces), dtype=np.uint8)


def digits() -> tuple[Examples, Examples]:
    """Return scikit-learn's digits, (1, 8, 8) in [0, 1]: always the same 1437 for training and 360 for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing_package("sklearn", purpose="for the data 'digits'") from None
    pixels, classes = load_digits(return_X_y=True)
    image = torch.from_numpy(np.asarray(pixels)).float().reshape(-1, 1, 8, 8) / 16
    label = torch.from_numpy(np.asarray(classes)).long()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(label)))
    train, test = order[:1437], order[1437:]
    return (
        examples(image[train], label[train], where="digits"),
        examples(image[test], label[test], where="digits (test)"),
    )


def _join_texts(texts: Iterator[np.ndarray]) -> np.ndarray:
    """Return the bytes of all texts that are not empty, with a newline between two."""
    joined = ArrayWriter(np.dtype(np.uint8))
    for words in texts:
        if len(words):
            joined.append(np.frombuffer(b"\n" if joined.size else b"", np.uint8))
            for start in range(0, len(words), CHUNK_ELEMENTS):
                joined.append(words[start : start + CHUNK_ELEMENTS])
    return joined.finish()


def _texts(source: Source, field: str, census: FieldCensus) -> Iterator[tuple[str, str]]:
    """Yield every text of a source with its place: a field of each record, or each file; count the fields."""
    if not source.records:
        yield from ((str(file), read_text(file)) for file in source.files)
        return
    for place, record in census.watch(read_records(source)):
        words = text_field(record, field, place)
        check_text(words, place)
        yield place, words


def _read_text(path: Path) -> np.ndarray:
    """Map a file's bytes, or unpack them, after checking that they are UTF-8."""
    is_zipped = path.suffix.lower() == ZIPPED
    tokens = _unpack(path) if is_zipped else map_file(path, np.dtype(np.uint8))
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(tokens), CHUNK_ELEMENTS):
        pending = len(decoder.getstate()[0])
        chunk = tokens[start : start + CHUNK_ELEMENTS]
        try:
            decoder.decode(chunk.tobytes(), final=start + CHUNK_ELEMENTS >= len(tokens))
            continue
        except UnicodeDecodeError as error:  # raised again below, since a chained error would hold the text
            position = start - pending + error.start
        raise FdpError(
            f"{path}: expected UTF-8 text, got a byte at position {position} that is not; convert the file "
            f"({to_utf8(path)}), or give token ids as .npy or .bin"
        )
    return tokens


def _unpack(path: Path) -> np.ndarray:
    """Return the bytes of a compressed file, some at a time."""
    unpacked = ArrayWriter(np.dtype(np.uint8))
    try:
        with open_bytes(path) as content:
            while chunk := content.read(CHUNK_ELEMENTS):
                unpacked.append(np.frombuffer(chunk, np.uint8))
        return unpacked.finish()
    except GZIP_ERRORS:
        pass
    raise damaged_archive(path)
