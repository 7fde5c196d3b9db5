"""Docstrings start like sentences of a manual, functions are short, and files are one idea each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FDP = sorted((ROOT / "fdp").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
BAD_STARTS = {"What", "Which", "Where", "How", "Whether", "Of", "Who", "Whose", "When"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def bad_starts(source: str) -> Iterator[str]:
    """Yield ``line: first words`` of every docstring that starts with one of ``BAD_STARTS``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].strip("`:,.") in BAD_STARTS:
                yield f"line {getattr(node, 'lineno', 1)}: {' '.join(words[:6])} ..."


def long_functions(source: str) -> Iterator[str]:
    """Yield ``name: number of lines`` of every function longer than ``MAX_FUNCTION_LINES``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                yield f"{node.name}: {lines} lines"


@pytest.mark.parametrize("path", FDP + KERNELS, ids=relative)
def test_docstrings_start_with_a_verb_a_noun_or_an_equation(path: Path) -> None:
    found = list(bad_starts(path.read_text()))
    assert not found, (
        f"{relative(path)}: expected docstrings that start with a verb ('Return', 'Clip'), a noun phrase or an "
        f"equation, got {found}; put the subject first"
    )


@pytest.mark.parametrize("path", FDP, ids=relative)
def test_functions_fit_on_a_screen(path: Path) -> None:
    found = list(long_functions(path.read_text()))
    assert not found, (
        f"{relative(path)}: expected functions of at most {MAX_FUNCTION_LINES} lines, got {found}; split them"
    )


@pytest.mark.parametrize("path", FDP, ids=relative)
def test_files_are_one_idea(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, (
        f"{relative(path)}: expected at most {MAX_FILE_LINES} lines, got {lines}; move one idea to a file of its own"
    )


def test_bad_starts_and_long_functions_are_found() -> None:
    body = "    pass\n" * MAX_FUNCTION_LINES
    source = '"""What this does."""\ndef f():\n    """Return it."""\nclass A:\n    """Whether it is."""\n'
    source += f"def g():\n{body}"
    assert list(bad_starts(source)) == ["line 1: What this does. ...", "line 4: Whether it is. ..."]
    assert list(long_functions(source)) == [f"g: {MAX_FUNCTION_LINES + 1} lines"]
