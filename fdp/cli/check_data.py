"""Checks of the data against the model before anything is spent: the tokenizer, the context, long records.

>>> tokenizer = load_tokenizer(options, model)              # None: bytes of a preset's data
>>> check_context(folder, options.data.context)             # an error names the longest context that works
"""

from __future__ import annotations

from pathlib import Path

from fdp.cli.names import by_value, choose
from fdp.cli.reading_options import ReadingOptions
from fdp.data import datasets, text
from fdp.data.documents import Long
from fdp.data.files import find_token_files
from fdp.foreign.hub.positions import longest_context
from fdp.foreign.hub.read_folder import read_config
from fdp.types import FdpError

BYTES = "bytes"
"""The value of ``--tokenizer`` for UTF-8 bytes as tokens."""
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model", "sentencepiece*", "*.tiktoken")


def load_tokenizer(name: str | None, folder: Path | None, data: str) -> text.Tokenizer | None:
    """Return the tokenizer that ``--tokenizer`` names, else that of the model's ``folder``; None for bytes.

    A folder without one is refused for ``data`` that is text: tokens would be bytes, which its model never saw.
    """
    is_tokens = bool(find_token_files(Path(data)))
    if name == BYTES:
        return None if data in datasets.NAMES else text.BYTES
    if name is not None:
        return text.load_tokenizer(name)
    if folder is None:
        return None
    if any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return text.load_tokenizer(folder)
    if not is_tokens:
        raise FdpError(
            f"--model {folder}: expected a tokenizer in the folder for the text of --data {data}, got none; save the "
            f"model's own there (tokenizer.save_pretrained), or name its folder with --tokenizer, or give --tokenizer "
            f"{BYTES} if the model reads bytes"
        )
    return None


def check_context(folder: Path, context: int | None) -> None:
    """Refuse a ``--context`` beyond the positions of the model in a folder."""
    if context is None or not (folder / "config.json").exists():
        return
    most = longest_context(read_config(folder))
    if most is not None and context > most:
        raise FdpError(
            f"--context {context}: expected at most {most}, the positions of the model in {folder}; give --context "
            f"{most} or less, or leave it out"
        )


def parse_long(given: ReadingOptions, *, unit: str) -> Long:
    """Return what ``--long`` says, or the default of the unit: a record is cut, the records of a user are split."""
    if given.long is not None:
        return choose("--long", given.long, by_value(Long))
    return Long.SPLIT if unit == "user" else Long.CUT


def check_public_data(public: str, private: str) -> None:
    """Refuse to name the private data as public."""
    one, other = Path(public), Path(private)
    if public == private or (one.exists() and other.exists() and one.resolve() == other.resolve()):
        raise FdpError(
            f"--public-data {public}: expected other data than --data, got the same; what is private must not be named "
            "public: leave one of them out"
        )
