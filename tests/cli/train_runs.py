"""Start small runs of ``fdp train`` in this process."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from fdp.cli import session
from fdp.cli.main import main
from fdp.cli.options import build
from fdp.cli.train_options import TrainOptions
from fdp.run import training_run as runs

SMALL = shlex.split("--model logistic --data digits --noise-multiplier 1 --batch-size 32 --microbatch 16 --warmup 1")
FILES = {
    "config.json",
    "config.toml",
    "plan.json",
    "fdp_privacy.json",
    "metrics.jsonl",
    "summary.json",
    "model.safetensors",
    "report.png",
}


def call(*words: str) -> int:
    """Run ``fdp`` with these words and return the exit code."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


def train(out: Path, *words: str, steps: int = 3) -> int:
    """Train the smallest model into ``out`` and return the exit code."""
    return call("train", *SMALL, "--steps", str(steps), "--out", str(out), *words)


def last_json(text: str) -> dict[str, Any]:
    """Return the JSON object on the last line of an output."""
    return json.loads(text.splitlines()[-1])


def small_options(**changes: Any) -> TrainOptions:
    """Return the defaults of the command line, for the smallest model."""
    small = {"model": "logistic", "data": "digits", "noise_multiplier": 1.0, "steps": 4, "warmup": 1}
    return build(TrainOptions, small | changes)


def interrupt_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every run receive SIGINT so that it ends after ``steps`` steps."""

    def interrupted(run, state, **options):
        for after, record in runs.steps(run, state, **options):
            if record.step == steps - 1:
                os.kill(os.getpid(), signal.SIGINT)  # the next step is finished
            yield after, record

    monkeypatch.setattr(session, "steps", interrupted)
