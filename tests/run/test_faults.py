"""One of each fault that ``make faults`` injects: a run that is hit ends with the same result as an undisturbed one."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults import CORRUPTIONS, FORGERIES, Fault, Job, checkpoints, rewrite

pytestmark = pytest.mark.ranks
WORDS = ("--steps", "6", "--save-every", "1", "--keep", "3")
SECONDS = 100.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of an undisturbed run on one rank."""
    return ended(Job(tmp_path_factory.mktemp("undisturbed") / "run", ranks=1, words=WORDS))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a run on one rank that was asked to stop after four steps."""
    job = Job(tmp_path_factory.mktemp("interrupted") / "run", ranks=1, words=WORDS)
    with job.start(Fault("terminated", 0, "drawing samples", 4)) as attempt:
        assert attempt.wait(seconds=SECONDS) == [128 + signal.SIGTERM], attempt.text()
    assert "the same command resumes" in attempt.text()
    assert [path.name for path in checkpoints(job.out)] == ["step-00000002", "step-00000003", "step-00000004"]
    return job


def ended(job: Job, said: str = "") -> dict[str, Any]:
    with job.start() as attempt:
        codes = attempt.wait(seconds=SECONDS)
    assert codes == [0] * job.ranks, attempt.text()
    assert said in attempt.text()
    summary = job.summary()
    assert summary is not None
    return summary


def copied(job: Job, tmp_path: Path) -> Job:
    shutil.copytree(job.out, tmp_path / "run")
    return job._replace(out=tmp_path / "run")


def same(got: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(got[name] == expected[name] for name in ("parameter_sha256", "epsilon", "steps"))


def test_sigterm_saves_and_the_same_command_resumes_bit_equal(interrupted, undisturbed, tmp_path):
    job = copied(interrupted, tmp_path)
    assert same(ended(job, "resumed after step 4"), undisturbed)
    assert [json.loads(line)["step"] for line in (job.out / "metrics.jsonl").read_text().splitlines()] == [*range(1, 7)]


@pytest.mark.parametrize("way", [*CORRUPTIONS, *FORGERIES, "an older one under its name"])
def test_a_damaged_or_forged_checkpoint_is_passed_over_with_a_message(way, interrupted, undisturbed, tmp_path):
    job = copied(interrupted, tmp_path)
    older, newest = checkpoints(job.out)[-2:]
    if way in CORRUPTIONS:
        CORRUPTIONS[way](newest / "__0_0.distcp", random.Random(1))
    elif way in FORGERIES:
        rewrite(newest, FORGERIES[way])
    else:
        shutil.rmtree(newest)
        shutil.copytree(older, newest)
    got = ended(job, "resumed after step 3")
    assert same(got, undisturbed)
    assert (job.out / "checkpoints" / "step-00000004.damaged").is_dir()


def test_a_run_without_a_good_checkpoint_does_not_start_again(interrupted, tmp_path):
    job = copied(interrupted, tmp_path)
    for path in checkpoints(job.out):
        rewrite(path, FORGERIES["other key"])
    with job.start() as attempt:
        assert attempt.wait(seconds=SECONDS) == [2]
    assert "expected a good checkpoint, got damaged ones only" in attempt.text()
    assert "holds the key of another run" in attempt.text()
    shutil.rmtree(job.out / "checkpoints")
    with job.start() as attempt:
        assert attempt.wait(seconds=SECONDS) == [2]
    assert "metrics.jsonl holds 4 steps, saved every 1: put the checkpoints back" in attempt.text()


def test_a_seed_that_does_not_give_the_stored_key_is_refused(interrupted, tmp_path):
    job = copied(interrupted, tmp_path)
    config = json.loads((job.out / "config.json").read_text())
    config["settings"]["seed"] = 5  # as on the command line below
    (job.out / "config.json").write_text(json.dumps(config))
    for path in checkpoints(job.out):
        rewrite(path, lambda record: record["meta"]["settings"].update(seed=5))
    with job._replace(words=(*job.words, "--seed", "5")).start() as attempt:
        assert attempt.wait(seconds=SECONDS) == [2]
    assert "holds a key that --seed 5 does not give" in attempt.text()


@pytest.mark.parametrize("text", ["{", "[]", '{"settings": {}}'])
def test_a_damaged_config_is_refused_and_says_what_to_do(text, interrupted, tmp_path):
    job = copied(interrupted, tmp_path)
    (job.out / "config.json").write_text(text)
    with job.start() as attempt:
        assert attempt.wait(seconds=SECONDS) == [2]
    assert "expected the settings of a run of this fdp" in attempt.text()
    assert "Traceback" not in attempt.text()


@pytest.mark.long
def test_if_one_of_two_ranks_gets_sigterm_both_stop_and_resume(tmp_path):
    job = Job(tmp_path / "run", words=WORDS)
    with job.start(Fault("terminated", 1, "drawing samples", 3)) as attempt:
        assert attempt.wait(seconds=SECONDS) == [143, 143], attempt.text()
    assert checkpoints(job.out)[-1].name == "step-00000003"
    assert same(ended(job, "resumed after step 3"), ended(job._replace(out=tmp_path / "whole")))


@pytest.mark.long
@pytest.mark.parametrize("stage", ["writing parts", pytest.param("drawing samples", marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named_after_the_timeout(stage, tmp_path):
    job = Job(tmp_path / "run", words=WORDS, timeout=4.0)
    with job.start(Fault("stopped", 1, stage, 2)) as attempt:
        assert attempt.wait(seconds=45, ranks=[0])[0] == 1, attempt.text()
        stopped = attempt.processes[1].pid
    assert f"rank 1 (process {stopped} on" in attempt.text()
    assert "of 2 has stopped answering" in attempt.text()
    assert "--timeout 4 seconds" in attempt.text()


@pytest.mark.slow
def test_a_stopped_rank_of_a_mesh_of_two_axes_is_named(tmp_path):
    job = Job(tmp_path / "run", ranks=4, words=(*WORDS, "--mesh", "replicate=2,shard=2"), timeout=6.0)
    with job.start(Fault("stopped", 3, "drawing samples", 2)) as attempt:
        assert attempt.wait(seconds=60, ranks=[0, 1, 2])[:3] == [1, 1, 1], attempt.text()
    assert "rank 3 (process" in attempt.text()


def test_a_mistake_on_one_rank_does_not_keep_the_others_waiting(tmp_path):
    job = Job(tmp_path / "run", words=WORDS, timeout=60.0)
    with job.start(by_rank={1: ["--stpes", "3"]}) as attempt:
        assert attempt.wait(seconds=40) == [1, 2], attempt.text()
    assert "rank 1 of 2 left: No such option: --stpes" in attempt.text()
    assert "Traceback" not in attempt.text()


def test_a_second_run_in_the_folder_of_a_paused_one_is_refused(interrupted, undisturbed, tmp_path):
    job = copied(interrupted, tmp_path)
    with job.start(Fault("stopped", 0, "drawing samples", 1)) as first:
        while "\nT" not in state_of(first.processes[0].pid):
            assert time.monotonic() - first.began < SECONDS
            time.sleep(0.05)
        with job.start() as second:
            assert second.wait(seconds=SECONDS) == [2], second.text()
        assert f"belongs to a run that has not ended, process {first.processes[0].pid} on" in second.text()
        first.signal(0, signal.SIGCONT)
        assert first.wait(seconds=SECONDS) == [0]
    summary = job.summary()
    assert summary is not None
    assert same(summary, undisturbed)
    assert len((job.out / "metrics.jsonl").read_text().splitlines()) == 6


def state_of(pid: int | None) -> str:
    return "\n" + Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].strip()


def test_restarting_a_finished_run_succeeds(undisturbed, tmp_path, monkeypatch):
    job = Job(tmp_path / "run", ranks=1, words=WORDS)
    ended(job)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    from fdp.cli.main import main
    from tests.faults import COMMON

    with pytest.raises(SystemExit) as caught:
        main(["train", *COMMON, *WORDS, "--json", "--out", str(job.out)])
    assert not caught.value.code
