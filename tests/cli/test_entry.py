"""The entry point of ``fdp``: Ctrl-C before the command line is loaded."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EPSILON = "fdp epsilon --population 1000 --batch-size 10 --steps 10 --noise-multiplier 1 --delta 1e-6"


@pytest.mark.parametrize(
    "module",
    [
        "typer",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("rich.text", "fdp.cli.train", "fdp.privacy.accounting")
        ),
    ],
)
def test_an_interruption_while_modules_are_imported_gives_no_traceback(module: str) -> None:
    """The finder of modules raises what Ctrl-C raises there; the last module is one that the command imports."""
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"sys.argv = {EPSILON.split()}\n"
        "import runpy; runpy.run_module('fdp', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    in_command = module == "fdp.privacy.accounting"
    assert done.stderr == ("" if in_command else "fdp: interrupted\n")


def test_the_command_starts_at_the_entry_point() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"fdp": "fdp.cli.entry:main"}
