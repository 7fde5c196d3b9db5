"""``fdp train`` started by torchrun: the same numbers, ranks that die or disagree, and resuming."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import faults
from tests.faults import Fault, Job

ROOT = Path(__file__).parents[2]
COMMON = shlex.split(
    "--model mlp --data digits --noise-multiplier 1 --seed 0 --batch-size 24 --microbatch 12 --warmup 1 "
    "--json --device cpu"
)


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def start(ranks: int, *words: str, script: tuple[str, ...] = ("-m", "fdp")) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, *script, "train", *COMMON, "--mesh", f"shard={ranks}", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=ROOT
    )


def finished(process: subprocess.Popen[str], *, seconds: float = 120) -> tuple[int, str]:
    text, _ = process.communicate(timeout=seconds)
    return process.returncode, text


def torchrun(ranks: int, *words: str, **options: Any) -> dict[str, Any]:
    code, text = finished(start(ranks, *words, **options))
    assert code == 0, text
    return json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))


def alone(out: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fdp", "train", *COMMON, "--quiet", "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of the ranks, in order of their rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    rank = {}
    for child in children:
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found = [value for value in variables if value.startswith(b"RANK=")]
        if found:
            rank[int(found[0][5:])] = int(child)
    return [rank[i] for i in sorted(rank)]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_same_losses_and_parameters_as_without_torchrun(ranks, tmp_path):
    expected = alone(tmp_path / "alone", "--steps", "5")
    got = torchrun(ranks, "--steps", "5", "--zero", "3", "--out", str(tmp_path / "run"))
    assert got["world_size"] == ranks
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert got["parameter_norm"] == pytest.approx(expected["parameter_norm"], rel=1e-5)
    assert got["epsilon"] == expected["epsilon"]
    names = {"config.json", "plan.json", "metrics.jsonl", "summary.json", "model.safetensors", "report.png"}
    names |= {"fdp_privacy.json"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == names


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_restarted_by_torchrun_after_a_killed_rank_gives_the_same_bits(tmp_path):
    job = Job(tmp_path / "run", words=("--steps", "40", "--save-every", "2"), timeout=60.0)
    process = faults.torchrun(job, "--standalone", "--max-restarts", "2")
    deadline = time.monotonic() + 90
    while not (job.out / "checkpoints" / "step-00000004").exists():
        assert time.monotonic() < deadline, "no checkpoint appeared"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    code, text = finished(process)
    assert code == 0, text
    assert "resumed after step" in text
    got, whole = job.summary(), job._replace(out=tmp_path / "whole")
    with whole.start() as attempt:
        assert attempt.wait(seconds=100) == [0, 0], attempt.text()
    expected = whole.summary()
    assert got is not None
    assert expected is not None
    assert got["steps"] == 40
    assert got["parameter_sha256"] == expected["parameter_sha256"]
    assert losses(job.out) == losses(whole.out)


@pytest.mark.long
@pytest.mark.ranks
def test_a_rank_that_is_killed_while_saving_leaves_the_last_checkpoint_and_other_ranks_resume(tmp_path):
    job = Job(tmp_path / "run", words=("--steps", "9", "--save-every", "3"))
    with job.start(Fault("killed", 1, "writing parts", 2)) as attempt:
        assert attempt.wait(seconds=90) == [1, -signal.SIGKILL]
    assert "rank 1 (process" in attempt.text()
    held = {path.name for path in (job.out / "checkpoints").iterdir()}
    assert "step-00000003" in held, attempt.text()
    assert "step-00000006" not in held
    alone = job._replace(out=tmp_path / "alone", ranks=1)
    for each in (alone, job._replace(ranks=1)):  # saved on two ranks, taken up on one
        with each.start() as attempt:
            assert attempt.wait(seconds=90) == [0], attempt.text()
    got, expected = job.summary(), alone.summary()
    assert got is not None
    assert expected is not None
    assert got["parameter_norm"] == pytest.approx(expected["parameter_norm"], rel=1e-5)
    assert losses(job.out) == pytest.approx(losses(alone.out), rel=1e-5)
    left = {path.name for path in (job.out / "checkpoints").iterdir()}
    assert left == {"step-00000006", "step-00000009"}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_of_four_ranks_resumes_on_fewer(ranks, tmp_path):
    words = ["--steps", "9", "--save-every", "3"]
    script = (str(ROOT / "tests" / "faulty_rank.py"), "dies-while-saving")
    finished(start(4, *words, "--out", str(tmp_path / "run"), script=script), seconds=120)
    got = torchrun(ranks, *words, "--out", str(tmp_path / "run"))
    expected = alone(tmp_path / "alone", *words)
    assert got["parameter_norm"] == pytest.approx(expected["parameter_norm"], rel=1e-5)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@pytest.mark.ranks
def test_ranks_that_disagree_are_refused_before_anything_is_written(tmp_path):
    job = Job(tmp_path / "run", words=("--steps", "3"))
    with job.start(by_rank={1: ("--lr", "0.125")}) as attempt:
        codes = attempt.wait(seconds=60)
    assert all(codes), codes
    assert "expected the same settings and data everywhere" in attempt.text()
    assert "0.125" in attempt.text()
    assert not job.out.exists()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_mesh_that_does_not_fit_the_ranks_is_refused_once(tmp_path):
    code, text = finished(start(2, "--mesh", "shard=3", "--out", str(tmp_path / "run")), seconds=60)
    assert code != 0
    assert " ".join(text.split()).count("expected sizes that multiply to the 2 processes") == 2  # stderr, and --json
    assert not (tmp_path / "run").exists()
