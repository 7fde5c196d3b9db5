"""A document as data, written as plain text or as markdown: sections of paragraphs, lists and tables.

>>> document = Document("Title", (Section("Part", ("A paragraph.", Bullets(("one", "two")))),))
>>> as_text(document), as_markdown(document)
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

WIDTH = 100


class Bullets(NamedTuple):
    """A list of sentences."""

    items: tuple[str, ...]


class Rows(NamedTuple):
    """A table."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block: TypeAlias = str | Bullets | Rows


class Section(NamedTuple):
    """A heading and what stands below it."""

    title: str
    blocks: tuple[Block, ...]


class Document(NamedTuple):
    """A title and sections."""

    title: str
    sections: tuple[Section, ...]


def as_text(document: Document) -> str:
    """Return the document as plain text, in lines of at most 100 characters, except in tables."""
    parts = [document.title, "=" * len(document.title)]
    for number, section in enumerate(document.sections, start=1):
        heading = f"{number}. {section.title}"
        parts += ["", heading, "-" * len(heading), *_blocks(section.blocks, textwrap.fill, _text_table, "  - ")]
    return "\n".join(parts) + "\n"


def as_markdown(document: Document) -> str:
    """Return the document as markdown."""
    parts = [f"# {document.title}"]
    for number, section in enumerate(document.sections, start=1):
        parts += ["", f"## {number}. {section.title}"]
        parts += _blocks(section.blocks, lambda text, **_: text, _markdown_table, "- ")
    return "\n".join(parts) + "\n"


def _blocks(
    blocks: Sequence[Block], fill: Callable[..., str], table: Callable[[Rows], list[str]], dash: str
) -> list[str]:
    lines: list[str] = []
    for block in blocks:
        lines.append("")
        if isinstance(block, str):
            lines.append(fill(block, width=WIDTH))
        elif isinstance(block, Bullets):
            indent = {"width": WIDTH, "initial_indent": dash, "subsequent_indent": " " * len(dash)}
            lines += [fill(item, **indent) if fill is textwrap.fill else f"{dash}{item}" for item in block.items]
        else:
            lines += table(block)
    return lines


def _text_table(table: Rows) -> list[str]:
    rows = [table.headings, *table.rows]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.headings))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [lines[0], "  " + "  ".join("-" * width for width in widths), *lines[1:]]


def _markdown_table(table: Rows) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in (table.headings, *table.rows)]
    return [lines[0], "|" + " --- |" * len(table.headings), *lines[1:]]
