"""Memory that a command frees stays with its process: counted in page faults, which do not depend on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fdp.cli import allocator

COUNT = """
import resource, sys
if sys.argv[1] == "keep":
    from fdp.cli.allocator import keep_freed_memory
    keep_freed_memory()
import numpy as np

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():  # 8 MiB each, as the per-sample gradients of a layer
    held = [np.ones(2 << 20, dtype=np.float32) for _ in range(2)]

for _ in range(3):
    step()
before = faults()
for _ in range(20):
    step()
print(faults() - before)
"""


def count_faults(how: str) -> int:
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", COUNT, how],
        env=environment | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library of Linux")
def test_freed_memory_is_used_again_without_asking_the_system():
    assert count_faults("keep") < count_faults("return it") / 5


def test_settings_of_the_user_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: object) -> None:
        raise AssertionError("expected no call of mallopt")

    monkeypatch.setattr(allocator.ctypes, "CDLL", refuse)
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "10")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    allocator.keep_freed_memory()
    assert os.environ["MIMALLOC_PURGE_DELAY"] == "10"
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.setattr(sys, "platform", "darwin")
    allocator.keep_freed_memory()


def test_the_command_line_keeps_memory_before_torch_is_loaded():
    root = Path(__file__).parents[2]
    text = "import os, sys, fdp.cli.main; print(os.environ.get('MIMALLOC_PURGE_DELAY'), 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=environment | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["-1", "False"]
