"""Docstrings of fdp as Markdown: roles, examples and lists of files keep their look on the site.

:func:`clip_to`                 ->  `clip_to`
>>> an example, not indented    ->  a code block
name    what it is              ->  a code block, if the lines are aligned as a table
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:func|class|mod|meth|data|attr|obj|doc|term):`~?([^`]+)`")
ALIGNED = re.compile(r"^\S.*\S {2,}\S|^\S+ {2,}\S")


class PlainDocstrings(Extension):
    """Rewrite every docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring with roles as code, and with examples and aligned lines as code blocks."""
    lines, result, i = ROLE.sub(r"`\1`", text).split("\n"), [], 0
    while i < len(lines):
        block, language = code_block(lines, i)
        if not block:
            result.append(lines[i])
            i += 1
            continue
        indent = min(len(line) - len(line.lstrip()) for line in block if line.strip())
        opening = [] if not result or not result[-1] else [""]
        shown = (line[indent:].replace("``", "") for line in block)
        result += [*opening, f"```{language}", *shown, "```", ""]
        i += len(block)
    return "\n".join(result)


def code_block(lines: list[str], start: int) -> tuple[list[str], str]:
    """Return the lines from ``start`` on that are code, and their language; nothing if there are none."""
    first = lines[start]
    after_blank = start == 0 or not lines[start - 1].strip()
    if first.startswith(">>>"):
        return _until(lines, start, lambda line: bool(line.strip())), "pycon"
    if after_blank and first.startswith("    ") and not first.lstrip().startswith(("- ", "* ")):
        block = _until(lines, start, lambda line: not line.strip() or line.startswith("    "))
        while not block[-1].strip():
            block.pop()
        return block, "pycon" if first.lstrip().startswith(">>>") else "text"
    if after_blank and start and ALIGNED.match(first) and not first.startswith(("-", "|", "#")):
        block = _until(lines, start, lambda line: bool(line.strip()))
        wide = len(block) > 1 or " " * 4 in first.strip()
        if wide and all(ALIGNED.match(line) or line.startswith("  ") for line in block):
            return block, "text"
    return [], ""


def _until(lines: list[str], start: int, keep: Any) -> list[str]:
    end = start
    while end < len(lines) and keep(lines[end]):
        end += 1
    return lines[start:end]
