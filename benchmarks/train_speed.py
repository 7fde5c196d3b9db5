"""Samples per second of ``fdp train`` beside those of its bare step.

    python -m benchmarks.train_speed                           # on a GPU: gpt2 64 x 512 and gpt-nano, a minute
    python -m benchmarks.train_speed --only gpt-nano -- --method none    # words after -- go to fdp train

The command is run as a user types it, in this process. When its loop is about to begin, the batches of all its steps
are drawn, and the step function of the very same run is called on them in a loop, with a copy of the state: that is
the bare step. Then the command goes on. Both make the same steps, draw for draw; the first ones, which compile and
record, are left out. A ratio of 1 says that sampling, loading, metrics, display and files cost nothing.

| case       | model                                | expected batch x tokens | target |
|------------|--------------------------------------|-------------------------|--------|
| `gpt2`     | GPT-2 (124M), head tied              | 64 x 512                | 0.97   |
| `gpt-nano` | GPT-nano, bytes                      | 256 x 128               | 0.97   |
| `tiny`     | GPT-nano; the default on a CPU       | 4 x 16                  |        |
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdp import tree
from fdp.cli import session
from fdp.cli.main import main as fdp_main
from fdp.run import training_run
from fdp.run.prepare_run import Run
from fdp.run.step_record import StepRecord
from fdp.types import TrainState

TARGET = 0.97


class Case(NamedTuple):
    """A command, the windows of tokens that it trains on, and the steps that are left out and measured."""

    words: str
    windows: int
    context: int
    vocab_size: int
    warm: int
    measured: int


CASES = {
    "gpt2": Case("--model gpt2 --batch-size 64 --microbatch 64", 200_000, 512, 50257, 30, 60),
    "gpt-nano": Case("--model gpt-nano --batch-size 256 --microbatch 64", 400_000, 128, 256, 30, 200),
    "tiny": Case("--model gpt-nano --batch-size 4 --microbatch 4 --device cpu", 20_000, 16, 256, 2, 6),
}


class Speed(NamedTuple):
    """Samples per second of the bare step and of the command, and the command's seconds per step."""

    bare: float
    command: float
    seconds: float

    @property
    def ratio(self) -> float:
        """The speed of the command as a share of the bare step's."""
        return self.command / self.bare


def measure(case: Case, more: Sequence[str] = ()) -> Speed:
    """Run the command of a case with more words, and its bare step inside it."""
    found: dict[str, Any] = {}

    def timed_steps(run: Run, state: TrainState, **options: Any) -> Iterator[tuple[TrainState, StepRecord]]:
        found["bare"] = time_bare_steps(run, state, case)
        samples, began = 0, 0.0
        for after, record in training_run.steps(run, state, **options):
            samples += record.samples if record.step > case.warm else 0
            yield after, record
            if record.step == case.warm:
                began = time.perf_counter()  # the consumer has taken the last record that is left out
        found["command"], found["samples"] = time.perf_counter() - began, samples

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "tokens.npy")
        numbers = np.random.default_rng(0)
        tokens = numbers.integers(0, case.vocab_size, case.windows * (case.context + 1), dtype=np.uint16)
        np.save(data, tokens)
        words = [
            "train", *shlex.split(case.words), "--context", str(case.context), "--data", str(data), "--out",
            str(Path(folder, "run")), "--noise-multiplier", "1", "--steps", str(case.warm + case.measured), "--seed",
            "1", "--ledger", "off", "--on-divergence", "continue", *more,
        ]  # fmt: skip
        plain, session.steps = session.steps, timed_steps
        try:
            fdp_main(words)
        except SystemExit as end:
            if end.code:
                raise
        finally:
            session.steps = plain
    bare, command = found["samples"] / found["bare"], found["samples"] / found["command"]  # of the same draws
    return Speed(bare, command, found["command"] / case.measured)


def time_bare_steps(run: Run, state: TrainState, case: Case) -> float:
    """Return the seconds of the measured steps on batches that were drawn before; ``state`` is not changed."""
    state, key = tree.map(Tensor.clone, state), run.key.to(run.config.device)
    batches = [training_run.draw_batch(run, t) for t in range(case.warm + case.measured)]
    began = 0.0
    for t, batch in enumerate(batches):
        if t == case.warm:
            _wait(run)
            began = time.perf_counter()
        state, _ = run.step(state, batch, key)
    _wait(run)
    return time.perf_counter() - began


def _wait(run: Run) -> None:
    if run.config.device.type == "cuda":
        torch.cuda.synchronize(run.config.device)


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    own, more = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description="Samples per second of fdp train beside those of its bare step.")
    default = ("gpt2", "gpt-nano") if torch.cuda.is_available() else ("tiny",)
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=default, metavar="CASE")
    lines = []
    for name in parser.parse_args(own).only:
        speed = measure(CASES[name], more)
        lines.append(
            f"{name:10}  bare step {speed.bare:10,.1f} samples/s   fdp train {speed.command:10,.1f} samples/s "
            f"({speed.seconds * 1e3:.1f} ms a step)   ratio {speed.ratio:.3f} (target {TARGET})"
        )
        print(lines[-1], flush=True)
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
