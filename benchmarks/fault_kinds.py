"""Kinds of fault that ``benchmarks.faults`` injects into ``fdp train``, and what must hold after each.

>>> lab = Lab(folder, seed=0)
>>> stopped(lab, 4)                               # a rank that does not answer, four times
>>> lab.outcomes
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fdp.storage import checkpoint
from fdp.types import FdpError
from tests.faults import (
    CORRUPTIONS,
    FORGERIES,
    SIGNALS,
    STAGES,
    Fault,
    Job,
    checkpoints,
    rewrite,
    torchrun,
)

STEPS, SAVE_EVERY = 12, 2
WORDS = ("--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--keep", "3")
TIMEOUT_S = 8.0
LIMIT_S = 45.0
"""A process that should have ended by then hangs. Covers the start, --timeout, and the search for the silent rank."""
RUNNING = [stage for stage in STAGES if stage not in ("making the folder", "joining", "pruning")]
"""Stages that any attempt may reach; some only at the end of a run, or when it resumes."""


class Outcome(NamedTuple):
    """The outcome of one fault: its kind, where it hit, whether it happened, and the duration of the attempt."""

    kind: str
    detail: str
    happened: bool
    seconds: float
    problem: str | None


class Lab:
    """The folder of all jobs, the results of undisturbed runs, and the outcomes so far."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.chance = root, random.Random(seed)
        self.outcomes: list[Outcome] = []
        self.expected: dict[str, dict[str, Any]] = {}
        self.jobs = 0

    def job(self, *, disk: Path | None = None, words: tuple[str, ...] = WORDS) -> Job:
        """Return a new job in its own folder."""
        self.jobs += 1
        return Job((disk or self.root) / f"job-{self.jobs}", words=words, timeout=TIMEOUT_S)

    def undisturbed(self, *faults: Fault, ranks: int = 2) -> dict[str, Any]:
        """Return the result of an undisturbed run; ``faults`` are in the data, not in the machine."""
        name = f"{ranks} {faults}"
        if name not in self.expected:
            job = self.job()
            with job.start(*faults, ranks=ranks) as attempt:
                codes = attempt.wait(seconds=4 * LIMIT_S)
            summary = job.summary()
            assert summary is not None, f"the undisturbed run ended with {codes}: {attempt.text()[-2000:]}"
            self.expected[name] = summary
        return self.expected[name]

    def note(self, kind: str, detail: str, began: float, problem: str | None, *, happened: bool = True) -> None:
        """Record an outcome; print it if it is a failure."""
        self.outcomes.append(Outcome(kind, detail, happened, time.monotonic() - began, problem))
        if problem is not None:
            print(f"FAILED {kind} ({detail}): {problem}", flush=True)


def attempt_with(lab: Lab, job: Job, kind: str, fault: Fault, *more: Fault) -> None:
    """Start the job, let the fault happen, and check the files that are left."""
    began, before = time.monotonic(), newest_step(job)
    with job.start(fault, *more) as attempt:
        watched = [rank for rank in range(job.ranks) if fault.act != "stopped" or rank != fault.rank]
        codes = attempt.wait(seconds=LIMIT_S, ranks=watched)
        stuck = [rank for rank in watched if codes[rank] is None]
    happened = codes[fault.rank] != 0
    problem = f"ranks {stuck} were still there after {LIMIT_S:g} seconds" if stuck else None
    if happened and fault.act in ("terminated", "interrupted") and problem is None:
        problem = _wrong_exit(fault, codes, saved=newest_step(job) > before and job.summary() is None)
    lab.note(kind, f"rank {fault.rank}, {fault.stage}", began, problem or check_files(job, before), happened=happened)
    if problem:
        print(attempt.text()[-1500:], flush=True)


def _wrong_exit(fault: Fault, codes: list[int | None], *, saved: bool) -> str | None:
    """Return what is wrong with the exit codes. Before the first step and after the last, a signal just ends a rank."""
    number = SIGNALS[fault.act]
    if saved and codes != [128 + number] * len(codes) and fault.stage != "joining":
        return f"expected the exit code {128 + number} on every rank, got {codes}"
    return None if set(codes) <= {0, 1, 128 + number, -number} else f"got the exit codes {codes}"


def newest_step(job: Job) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    found = checkpoints(job.out)
    return int(found[-1].name.split("-")[1]) if found else 0


def check_files(job: Job, before: int, *, behind: int = 1) -> str | None:
    """Return what is wrong with the files that an attempt left; None if nothing is.

    ``behind`` is the number of saves that may be missing: the one in progress and, if the disk refuses it, the next
    one, which reports the error.
    """
    for path in checkpoints(job.out):
        try:
            found = checkpoint.verify(path)
        except FdpError as error:
            return f"{path.name} was published but is incomplete: {error}"
        if not found.step == found.meta["step"] == found.meta["accountant"]["steps"]:
            return f"{path.name} records another number of steps"
    if newest_step(job) < before:
        return f"the checkpoint of step {before} is gone"
    lines = [json.loads(line) for line in complete_lines(job.out / "metrics.jsonl")]
    if [line["step"] for line in lines] != list(range(1, len(lines) + 1)):
        return f"metrics.jsonl has gaps: {[line['step'] for line in lines]}"
    if newest_step(job) < (len(lines) // SAVE_EVERY - behind) * SAVE_EVERY:
        return f"{len(lines)} steps ran, but the newest checkpoint is of step {newest_step(job)}"
    return None


def complete_lines(path: Path) -> list[str]:
    """Return the lines of a file that end with a newline."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def finish(lab: Lab, job: Job, expected: dict[str, Any], *faults: Fault, ranks: int = 2) -> str | None:
    """Run the job to its end, undisturbed; return how its result differs from the expected one, or None."""
    if job.summary() is None:
        with job.start(*faults, ranks=ranks) as attempt:
            codes = attempt.wait(seconds=2 * LIMIT_S)
        if job.summary() is None:
            return f"did not end: {codes}: {attempt.text()[-1500:]}"
    got = job.summary()
    assert got is not None
    same = ("parameter_sha256", "epsilon", "steps", "samples") if ranks == 2 else ("epsilon", "steps", "samples")
    if odd := {name: (got[name], expected[name]) for name in same if got[name] != expected[name]}:
        return f"another result than the undisturbed run: {odd}"
    if abs(got["parameter_norm"] / expected["parameter_norm"] - 1) > 1e-5:
        return f"another norm: {got['parameter_norm']} instead of {expected['parameter_norm']}"
    if len(complete_lines(job.out / "metrics.jsonl")) != STEPS:
        return "metrics.jsonl is not complete"
    shutil.rmtree(job.out)
    return None


def random_fault(lab: Lab, act: str) -> Fault:
    """Return a fault at a random stage, or some milliseconds after it."""
    chance = lab.chance
    stage = chance.choice(RUNNING)
    often = {"drawing samples": 5, "summing up a step": 5, "writing metrics": 5, "amid a part": 40}.get(stage, 2)
    late = chance.choice([0.0, 0.0, chance.uniform(0, 0.1)])
    return Fault(act, chance.randrange(2), stage, chance.randint(1, often), late)


def signals(lab: Lab, act: str, count: int) -> None:
    """Kill, terminate or interrupt ranks, several times per job."""
    expected = lab.undisturbed()
    done = 0
    while done < count:
        job, hits = lab.job(), 0
        while hits < 6 and done < count and job.summary() is None:
            attempt_with(lab, job, act, random_fault(lab, act))
            happened = lab.outcomes[-1].happened
            hits, done = hits + 1, done + happened
            if not happened:  # the stage was not reached, so no fault was injected
                lab.outcomes.pop()
        if problem := finish(lab, job, expected):
            lab.note(act, "the result", time.monotonic(), problem)


def every_stage(lab: Lab, rank: int) -> None:
    """Kill a rank at every stage, in order."""
    expected = lab.undisturbed()
    job = lab.job()
    for stage in STAGES:
        attempt_with(lab, job, "killed at every stage", Fault("killed", rank, stage))
        if not lab.outcomes[-1].happened:
            lab.outcomes.pop()
        if job.summary() is not None or newest_step(job) >= STEPS - 2:
            if problem := finish(lab, job, expected):
                lab.note("killed at every stage", "the result", time.monotonic(), problem)
            job = lab.job()
    if problem := finish(lab, job, expected):
        lab.note("killed at every stage", "the result", time.monotonic(), problem)


def stopped(lab: Lab, count: int) -> None:
    """Stop a rank without killing it: the others must exit and name it."""
    expected = lab.undisturbed()
    for number in range(count):
        job = lab.job()
        stage = ("drawing samples", "writing parts", "summing up a step", "publishing")[number % 4]
        fault = Fault("stopped", 0 if stage == "publishing" else number // 4 % 2, stage, 2)
        began = time.monotonic()
        with job.start(fault) as attempt:
            other = 1 - fault.rank
            code = attempt.wait(seconds=LIMIT_S, ranks=[other])[other]
            named = f"rank {fault.rank} (process {attempt.processes[fault.rank].pid} on" in attempt.text()
        problem = None if code == 1 and named else f"exit code {code}, the silent rank named: {named}"
        lab.note(
            "stopped",
            f"rank {fault.rank}, {stage}",
            began,
            problem or check_files(job, 0) or finish(lab, job, expected),
        )


def corrupted(lab: Lab, count: int) -> None:
    """Damage or forge the newest checkpoint in every way; the one before it stays good."""
    expected = lab.undisturbed()
    ways = [*CORRUPTIONS, *FORGERIES, "of another run", "an older one under a newer name"]
    pristine = lab.job()
    with pristine.start(Fault("terminated", 0, "drawing samples", 9)) as attempt:
        attempt.wait(seconds=LIMIT_S)
    foreign = lab.job(words=(*WORDS, "--lr", "0.001"))
    with foreign.start(Fault("terminated", 0, "drawing samples", 9)) as attempt:
        attempt.wait(seconds=LIMIT_S)
    for number in range(count):
        way, job, began = ways[number % len(ways)], lab.job(), time.monotonic()
        shutil.copytree(pristine.out, job.out)
        older, newest = checkpoints(job.out)[-2:]
        detail = way
        if way in CORRUPTIONS:
            file = lab.chance.choice(sorted(newest.iterdir()))
            CORRUPTIONS[way](file, lab.chance)
            detail = f"{way}: {file.name}"
        elif way in FORGERIES:
            rewrite(newest, FORGERIES[way])
        elif way == "of another run":
            shutil.rmtree(newest)
            shutil.copytree(checkpoints(foreign.out)[-1], newest)
        else:
            shutil.rmtree(newest)
            shutil.copytree(older, newest)
        with job.start() as attempt:
            codes = attempt.wait(seconds=LIMIT_S)
        text = attempt.text()
        # A checkpoint without a record was never published, so it is ignored without a message.
        silent = detail == "removed: complete.json"
        if way == "of another run" and codes[0] == 2 and "another configuration" in text:
            problem = None  # refused: nothing was trained
        elif not silent and "passed over" not in text:
            problem = f"was believed, or nothing was said: {codes} {text[-600:]}"
        else:
            problem = finish(lab, job, expected)
        lab.note("corrupted checkpoint", detail, began, problem)
        shutil.rmtree(job.out, ignore_errors=True)


def deleted(lab: Lab, count: int) -> None:
    """Delete all checkpoints (the run must refuse to start over) or the newest (it must resume from the one before)."""
    expected = lab.undisturbed()
    for number in range(count):
        job, began = lab.job(), time.monotonic()
        with job.start(Fault("terminated", number % 2, "drawing samples", 9)) as attempt:
            attempt.wait(seconds=LIMIT_S)
        backup = job.out.with_name(f"{job.out.name}-backup")
        shutil.copytree(job.out / "checkpoints", backup)
        shutil.rmtree(checkpoints(job.out)[-1] if number % 2 else job.out / "checkpoints")
        with job.start() as attempt:
            codes = attempt.wait(seconds=LIMIT_S)
        problem = None
        if number % 2 == 0:
            if codes[0] != 2 or "expected a checkpoint, got none" not in attempt.text():
                problem = f"began again: {codes} {attempt.text()[-600:]}"
            shutil.copytree(backup, job.out / "checkpoints")
        shutil.rmtree(backup)
        lab.note("checkpoints deleted", "all" if number % 2 == 0 else "the newest", began,
                 problem or finish(lab, job, expected))  # fmt: skip


@contextmanager
def small_disk(lab: Lab) -> Iterator[Path | None]:
    """Mount a file system of 4 MiB; yield None if this process may not."""
    folder = Path(tempfile.mkdtemp(dir=lab.root))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    try:
        yield folder if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk(lab: Lab, count: int) -> None:
    """Fill the disk in the middle of a save or of writing metrics; then make room again."""
    expected = lab.undisturbed()
    for _ in range(count):
        with small_disk(lab) as disk:
            if disk is None:
                return
            job, began = lab.job(disk=disk), time.monotonic()
            with job.start() as attempt:
                wait_for(lambda: newest_step(job) >= 2)  # noqa: B023
                fill(disk, leave=lab.chance.randrange(0, 120_000))
                codes = attempt.wait(seconds=LIMIT_S)
            text = attempt.text()
            problem = None
            if None in codes:
                problem = f"hung: {codes}"
            elif job.summary() is None and "No space left on device" not in text:
                problem = f"the full disk was not reported: {codes} {text[-800:]}"
            (disk / "filler").unlink()
            lab.note(
                "disk full",
                f"exit codes {codes}",
                began,
                problem or check_files(job, 2, behind=2) or finish(lab, job, expected),
            )


def fill(disk: Path, *, leave: int) -> None:
    """Fill a file system, except for the given number of bytes."""
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    with (disk / "filler").open("r+b") as file:
        file.truncate(max(0, (disk / "filler").stat().st_size - leave))


def read_only(lab: Lab, count: int) -> None:
    """Mount a read-only file system over the checkpoints in the middle of a run; then unmount it."""
    expected = lab.undisturbed()
    for _ in range(count):
        job, began = lab.job(), time.monotonic()
        folder = str(job.out / "checkpoints")
        with job.start() as attempt:
            wait_for(lambda: newest_step(job) >= 2)  # noqa: B023
            if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True).returncode:
                return
            codes = attempt.wait(seconds=LIMIT_S)
        subprocess.run(["umount", "-l", folder], check=True)
        problem = f"hung: {codes}" if None in codes else None
        if not problem and job.summary() is None and "Read-only file system" not in attempt.text():
            problem = f"the read-only disk was not reported: {codes} {attempt.text()[-600:]}"
        problem = problem or check_files(job, 2, behind=2) or finish(lab, job, expected)
        lab.note("read-only disk", f"exit codes {codes}", began, problem)


def slow_disk(lab: Lab, count: int) -> None:
    """Kill a run while it writes to a slow disk."""
    expected = lab.undisturbed()
    for number in range(count):
        job = lab.job()
        slow = [Fault("slow disk", rank, "amid a part") for rank in (0, 1)]
        attempt_with(lab, job, "slow disk", Fault("killed", number % 2, "writing parts", 2, late=0.1), *slow)
        if problem := finish(lab, job, expected):
            lab.note("slow disk", "the result", time.monotonic(), problem)


def two_runs(lab: Lab, count: int) -> None:
    """Start a second run in the folder of one that runs or is paused: it must be refused, and the first continue."""
    expected = lab.undisturbed()
    for number in range(count):
        job, began, paused = lab.job(), time.monotonic(), number % 2 == 1
        with job.start() as first:
            wait_for(lambda: newest_step(job) >= 2 or not first.processes[0].is_alive())  # noqa: B023
            if paused:
                first.signal(0, signal.SIGSTOP)
            with job.start(ranks=1) as second:
                code = second.wait(seconds=LIMIT_S)[0]
                text = Path(f"{job.out}.0.log").read_text()
            ended = not first.processes[0].is_alive()
            first.signal(0, signal.SIGCONT)
            codes = first.wait(seconds=LIMIT_S)
        refused = code == 2 and ("belongs to a run that has not ended" in text or ended)
        problem = None if refused else f"the second run ended with {code}: {text[-600:]}"
        lab.note("two runs in one folder", "paused" if paused else "running", began,
                 problem or (f"the first ended with {codes}" if codes not in ([0, 0], [1, 1]) else None)
                 or finish(lab, job, expected))  # fmt: skip


def bad_batches(lab: Lab, count: int) -> None:
    """Feed NaN samples and kill a rank: the result must equal that of the same samples without the kill."""
    spoilt = [Fault("NaN samples", rank, "drawing samples", 4) for rank in (0, 1)]
    expected = lab.undisturbed(*spoilt)
    if not expected["parameter_norm"] < 1e6:
        lab.note("NaN samples", "the result", time.monotonic(), "the parameters are not finite")
    for number in range(count):
        job = lab.job()
        once = [fault._replace(count=4) for fault in spoilt]
        began = time.monotonic()
        with job.start(*once, Fault("killed", number % 2, "summing up a step", 2)) as attempt:
            attempt.wait(seconds=LIMIT_S)
        # After resuming from the start or from step 2, the fourth batch of the run is a different call.
        again = [fault._replace(count=4 - newest_step(job)) for fault in spoilt]
        lab.note("NaN samples", "and a kill", began, check_files(job, 0) or finish(lab, job, expected, *again))


def clock_jumps(lab: Lab, count: int) -> None:
    """Set the clock back by a year in the middle of a run."""
    expected = lab.undisturbed()
    for number in range(count):
        job = lab.job()
        stage = ("drawing samples", "writing parts")[number % 2]
        began = time.monotonic()
        with job.start(*(Fault("clock jump", rank, stage, 2) for rank in range(2))) as attempt:
            codes = attempt.wait(seconds=LIMIT_S)
        problem = None if codes == [0, 0] else f"ended with {codes}: {attempt.text()[-600:]}"
        lab.note("clock jump", stage, began, problem or finish(lab, job, expected))


def other_ranks(lab: Lab, count: int) -> None:
    """Kill a rank, then resume the run on another number of ranks."""
    expected = lab.undisturbed()
    for number in range(count):
        job, ranks = lab.job(), (1, 3, 4)[number % 3]
        attempt_with(lab, job, "other ranks", Fault("killed", number % 2, "drawing samples", 8))
        lab.outcomes[-1] = lab.outcomes[-1]._replace(detail=f"resumed on {ranks}")
        if problem := finish(lab, job, expected, ranks=ranks):
            lab.note("other ranks", f"the result on {ranks}", time.monotonic(), problem)


def restarts(lab: Lab, count: int, kills: int = 2) -> None:
    """Kill ranks under torchrun, which restarts all of them: the run must continue by itself."""
    expected = lab.undisturbed()
    for number in range(-(-count // kills)):
        job = lab.job()
        process = torchrun(job, "--standalone", "--max-restarts", str(kills))
        began, hit = time.monotonic(), 0
        for kill in range(kills):
            goal = 2 + 4 * kill if kills > 1 else 4
            if not wait_for(lambda: newest_step(job) >= goal or process.poll() is not None):  # noqa: B023
                break
            ranks = ranks_of(process)
            if len(ranks) == job.ranks and process.poll() is None:
                os.kill(ranks[(number + kill) % job.ranks], signal.SIGKILL)
                hit += 1
                wait_for(lambda: ranks_of(process) != ranks or process.poll() is not None)  # noqa: B023
        try:
            text, _ = process.communicate(timeout=4 * LIMIT_S)
            problem = None if process.returncode == 0 else f"torchrun ended with {process.returncode}: {text[-1500:]}"
        except subprocess.TimeoutExpired:
            process.kill()
            problem = "hung"
        for _ in range(hit):
            lab.note("restarted by torchrun", f"{kills} kills in a run", began, None)
        if problem := problem or finish(lab, job, expected):
            lab.note("restarted by torchrun", "the result", began, problem)


def soak(lab: Lab, *, steps: int, every: int) -> dict[str, Any]:
    """Run long under torchrun, killing a rank about every so many steps; return the result and the memory."""
    words = ("--steps", str(steps), "--save-every", "5", "--keep", "2")
    reference = lab.job(words=words)
    with reference.start() as attempt:
        attempt.wait(seconds=20 * LIMIT_S)
    expected = reference.summary()
    assert expected is not None, attempt.text()[-2000:]
    job = lab.job(words=words)
    process = torchrun(job, "--standalone", "--max-restarts", str(2 * steps // every))
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True)
    reader.start()  # a pipe that nobody reads fills up, and whoever writes to it waits for ever
    kills, memory, goal = 0, [], lab.chance.randint(1, every)
    while process.poll() is None and time.monotonic() - attempt.began < 3600:
        done, ranks = len(complete_lines(job.out / "metrics.jsonl")), ranks_of(process)
        if done >= goal and done < steps - 1 and len(ranks) == job.ranks:
            memory.append([resident(process.pid), *map(resident, ranks)])
            os.kill(lab.chance.choice(ranks), signal.SIGKILL)
            kills, goal = kills + 1, goal + every
            wait_for(lambda: ranks_of(process) != ranks or process.poll() is not None)  # noqa: B023
        time.sleep(0.02)
    process.wait(timeout=LIMIT_S)
    reader.join(timeout=LIMIT_S)
    got = job.summary()
    return {
        "kills": kills,
        "exit code": process.returncode,
        "same hash": got is not None and got["parameter_sha256"] == expected["parameter_sha256"],
        "same epsilon": got is not None and got["epsilon"] == expected["epsilon"],
        "lines of metrics": len(complete_lines(job.out / "metrics.jsonl")),
        "memory of torchrun and its ranks, MiB, first and last": [memory[0], memory[-1]] if memory else None,
        "said": "" if got is not None else "".join(said)[-2000:],
    }


def resident(pid: int) -> int:
    """Return the resident memory of a process in MiB; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    except OSError:
        return 0


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of torchrun's ranks, in order of their rank."""
    rank = {}
    try:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            rank |= {int(value[5:]): int(child) for value in variables if value.startswith(b"RANK=")}
    except (OSError, ValueError):
        return []
    return [rank[i] for i in sorted(rank)]


def wait_for(what: Callable[[], bool], *, seconds: float = LIMIT_S) -> bool:
    """Wait until the condition holds; return False if it does not in time."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
