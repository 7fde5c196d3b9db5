"""Datasets by name or path: windows over texts or tokens, or images.

| source                 | dataset                                                                            |
|------------------------|------------------------------------------------------------------------------------|
| ``stdlib``             | windows over the bytes of the running Python's standard library                    |
| ``digits``             | scikit-learn's images of digits, for classifiers                                   |
| texts, records         | windows over all of them as one stream, of bytes or of a tokenizer's tokens        |
| ``.npy .bin``          | windows over tokens, which are mapped                                              |

See ``fdp.data.windows`` and ``fdp.data.images`` for what a sample is. Nothing is downloaded.

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
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fdp.data import text
from fdp.data.array_store import ArrayWriter
from fdp.data.file_kinds import ZIPPED
from fdp.data.files import RecordForm, Source, find_source, find_token_files
from fdp.data.images import Examples, examples
from fdp.data.nouns import FILE, text_noun
from fdp.data.person_fields import FieldCensus
from fdp.data.record_fields import text_field
from fdp.data.record_files import read_records
from fdp.data.table_records import name_separators
from fdp.data.text_files import GZIP_ERRORS, check_text, damaged_archive, open_bytes, read_text, to_utf8
from fdp.data.token_files import map_file, read_tokens
from fdp.data.user_fields import folders_of
from fdp.data.windows import TextsRead, Windows, windows
from fdp.extras import missing_package
from fdp.types import FdpError

BYTE_VOCAB_SIZE = 256
"""Vocabulary of a text source without a tokenizer: a token is a byte of its UTF-8 form."""

NAMES = ("stdlib", "digits")
"""Datasets known by name; any other name is a path."""

CHUNK_BYTES = 1 << 24
"""Bytes of text read at a time, so that a mapped file is never all in memory."""

# Tests, tables and demonstrations: most of the library's bytes, and hardly source text.
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings", "turtledemo", "ensurepip"}
_SKIPPED |= {"site-packages", "dist-packages", "__pycache__"}


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
    - a file or folder of UTF-8 text, or of records (see ``fdp.data.file_kinds``), from which ``field`` is read; texts
      are joined by a newline, or by the end of text of ``tokenizer``;
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
            for start in range(0, len(words), CHUNK_BYTES):
                joined.append(words[start : start + CHUNK_BYTES])
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
    for start in range(0, len(tokens), CHUNK_BYTES):
        pending = len(decoder.getstate()[0])
        chunk = tokens[start : start + CHUNK_BYTES]
        try:
            decoder.decode(chunk.tobytes(), final=start + CHUNK_BYTES >= len(tokens))
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
            while chunk := content.read(CHUNK_BYTES):
                unpacked.append(np.frombuffer(chunk, np.uint8))
        return unpacked.finish()
    except GZIP_ERRORS:
        pass
    raise damaged_archive(path)
