"""Threads that wait sleep soon, unless the environment says how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fdp.cli.waiting_threads import SPINS, limit_spinning

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_the_environment_has_the_last_word(given, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    limit_spinning()
    found = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert found == (given or {"GOMP_SPINCOUNT": str(SPINS)})


def test_the_command_line_says_so_before_torch_is_imported():
    program = "import sys, os, fdp.cli.main; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", str(SPINS)]
