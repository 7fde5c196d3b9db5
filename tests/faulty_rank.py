"""Run ``fdp`` with a fault on rank 1: ``torchrun tests/faulty_rank.py FAULT train ...``."""

from __future__ import annotations

import os
import signal
import sys

import fdp.storage.checkpoint
from fdp.cli.main import main

fault, *words = sys.argv[1:]
if os.environ["RANK"] == "1" and fault == "dies-while-saving":
    write, saves = fdp.storage.checkpoint.write_shards, []

    def write_or_die(*args, **kwargs):
        saves.append(1)
        if len(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args, **kwargs)

    fdp.storage.checkpoint.write_shards = write_or_die
main(words)
