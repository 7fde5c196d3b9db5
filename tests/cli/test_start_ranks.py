"""``--nproc N``: ranks by torch's launcher, one message, the exit code of the rank that failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fdp.cli.options import build, options_of, to_words
from fdp.cli.start_ranks import is_launcher
from fdp.cli.train_options import TrainOptions
from fdp.types import FdpError
from tests.cli.train_runs import SMALL

pytestmark = pytest.mark.ranks
COMMAND = [sys.executable, "-m", "fdp", "train", *SMALL, "--nproc", "2", "--json"]


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": f"{root}:{root / 'kernels'}"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, *words], cwd=cwd, env=env, text=True, stdout=pipe, stderr=pipe)


def test_words_give_the_same_options() -> None:
    values = {"lr": -1.0, "data": "--odd name", "kfac_damping": 0.5, "as_json": True, "out": "runs/a b"}
    words = to_words(build(TrainOptions, values))
    assert words == ["--data=--odd name", "--lr=-1.0", "--kfac-damping=0.5", "--out=runs/a b", "--json"]
    assert to_words(TrainOptions()) == []
    assert to_words(build(TrainOptions, {"sample": ["a b", "c"]})) == ["--sample=a b", "--sample=c"]
    assert to_words(TrainOptions(), always={"steps", "seed", "quiet"}) == ["--steps=110"]
    assert all(option.default is False for option in options_of(TrainOptions).values() if option.value_type is bool)


@pytest.mark.long
def test_two_ranks_train(tmp_path: Path) -> None:
    run = start("--steps", "2", "--out", "run", cwd=tmp_path)
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["world_size"] == 2
    assert "ranks            2: shard=2, ZeRO-3" in out
    settings = (tmp_path / "run" / "config.toml").read_text()
    assert 'mesh = "shard=2"' in settings
    assert "nproc = 2" in settings


@pytest.mark.slow
def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    run = start("--steps", "2", "--batch-size", "5000", "--out", "other", cwd=tmp_path)
    _, err = run.communicate(timeout=300)
    assert run.returncode == 2
    assert err.count("--batch-size: expected at most") == 1, err
    assert err.startswith("fdp: --batch-size")
    assert len(err.splitlines()) == 1, err


@pytest.mark.slow
def test_an_interrupt_is_passed_on_and_the_ranks_save(tmp_path: Path) -> None:
    run = start("--steps", "100000", "--save-every", "50000", "--out", "run", cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=240)
    assert run.returncode == 130, err
    assert "interrupted after" in out
    assert "the same command resumes" in out
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_ranks_of_torchrun_are_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options = build(TrainOptions, {"nproc": 2})
    assert is_launcher(options)
    assert not is_launcher(build(TrainOptions, {"nproc": 1}))
    assert not is_launcher(TrainOptions())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_launcher(options)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(FdpError, match="--nproc: expected the 4 processes that torchrun has started, got 2"):
        is_launcher(options)
