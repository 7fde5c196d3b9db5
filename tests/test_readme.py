"""The README's program runs as it is printed, with smaller numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_program_in_the_readme_runs(capsys: pytest.CaptureFixture[str]):
    program = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "import fdp" in block)
    smaller = {
        "context=128": "context=16",
        "=256)": "=8)",
        "microbatch_size=64": "microbatch_size=4",
        "arange(64)": "arange(4)",
        "range(500)": "range(2)",
    }
    for printed, small in smaller.items():
        assert printed in program
        program = program.replace(printed, small)
    scope: dict = {}
    exec(program, scope)
    assert int(scope["state"].step) == 2
    assert "embed.tokens" in capsys.readouterr().out
