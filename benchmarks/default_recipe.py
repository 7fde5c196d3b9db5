"""The recipe of ``fdp advise`` against the earlier defaults of ``fdp train``: gpt-nano on the standard library.

    python -m benchmarks.default_recipe             # six runs: 15 minutes on two cores, 2 minutes on a GPU

Both train at epsilon 8 on 95 % of the files of Python's standard library and are evaluated on the others (a hash of the
file's name decides), over three seeds. The recipe is made for ``SAMPLES_PER_SECOND``, the speed of two CPU cores, and
``SECONDS``, which with the start of the program makes two minutes. Writes
``benchmarks/results/default_recipe_<hardware>_<yyyymm>.{json,md}``, or to ``--out``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import current_commit, hardware, slug, versions
from fdp import models
from fdp.advice.batch_and_steps import Problem, Speed
from fdp.advice.recipe import Situation, make_recipe, model_width
from fdp.advice.signal import trained_parameters
from fdp.cli import session
from fdp.cli.options import build
from fdp.cli.train_options import TrainOptions
from fdp.data.datasets import _SKIPPED
from fdp.run.run_folder import read_run_folder

RESULTS = Path(__file__).parent / "results"
EPSILON, DELTA, SEEDS = 8.0, 1e-7, (0, 1, 2)
HELD_OUT = 0.05
SAMPLES_PER_SECOND, SECONDS = 34.0, 105.0
BEFORE = {"batch_size": 64, "steps": 40, "lr": 4e-3, "clip": "flat", "max_norm": 1.0, "schedule": "cosine"}


def split_files(folder: Path) -> dict[str, int]:
    """Copy the sources of the standard library to ``train`` and ``held_out``; return the number of files in each."""
    counts = {"train": 0, "held_out": 0}
    for name in counts:
        (folder / name).mkdir()
    root = Path(sysconfig.get_path("stdlib"))
    for where, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in sorted(names):
            if not name.endswith(".py") or not (content := Path(where, name).read_bytes()):
                continue
            path = Path(where, name).relative_to(root).as_posix()
            part = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) / 2**64
            side = "held_out" if part < HELD_OUT else "train"
            text = content.decode("utf-8", errors="replace").encode()
            (folder / side / f"{path.replace('/', '.')}.txt").write_bytes(text)
            counts[side] += 1
    return counts


def recipe() -> dict[str, Any]:
    """Return the settings that the advice gives for two minutes on two cores."""
    model = models.build("gpt-nano")
    problem = Problem(trained_parameters(model), False, 66_000, EPSILON, DELTA)
    situation = Situation(problem, Speed(0.0, 1 / SAMPLES_PER_SECOND), model_width(model), 32)
    settings = make_recipe(situation, given={}, seconds=SECONDS).settings
    return {key: value for key, value in settings.items() if key in BEFORE}


def run_once(settings: Mapping[str, Any], data: Path, out: Path, seed: int) -> dict[str, Any]:
    """Train once and return the held-out loss in nats per byte, the noise and the time."""
    common = {"epsilon": EPSILON, "delta": DELTA, "eval_every": settings["steps"], "quiet": True, "seed": seed}
    where = {"data": str(data / "train"), "eval_data": str(data / "held_out"), "out": out}
    session.train(build(TrainOptions, dict(settings) | common | where))
    run = read_run_folder(out)
    evaluation, summary = run.records[-1].evaluation, run.summary
    assert evaluation is not None
    assert summary is not None
    return {
        "seed": seed,
        "held_out_loss": evaluation.loss,
        "training_loss": summary["loss_last"],
        "epsilon": summary["epsilon"],
        "noise_multiplier": summary["noise_multiplier"],
        "seconds": sum(record.seconds for record in run.records),
    }


def make_page(result: Mapping[str, Any]) -> str:
    """Return the result as a page."""
    lines = [
        f"# The recipe of `fdp advise` against the earlier defaults ({result['date']})",
        "",
        f"gpt-nano on {result['files']['train']} files of Python's standard library, evaluated on "
        f"{result['files']['held_out']} others; epsilon {EPSILON:g}, delta {DELTA:g}. Measured on {result['hardware']} "
        f"by `{result['command']}` at commit {result['commit']}.",
        "",
        "| | settings | held-out loss, nats per byte: mean (each seed) |",
        "| --- | --- | --- |",
    ]
    for name, row in result["rows"].items():
        settings = ", ".join(f"{key} {value}" for key, value in row["settings"].items())
        each = ", ".join(f"{run['held_out_loss']:.3f}" for run in row["runs"])
        lines.append(f"| {name} | {settings} | **{row['mean']:.3f}** ({each}) |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both recipes over the seeds and write the result."""
    parser = argparse.ArgumentParser(description="The recipe of fdp advise against the earlier defaults.")
    parser.add_argument("--out", type=Path, default=None, help="a .json file; a page is written beside it")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = split_files(folder)
        for label, settings in (("earlier default", BEFORE), ("recipe", recipe())):
            runs = [run_once(settings, folder, folder / f"{label} {seed}", seed) for seed in SEEDS]
            mean = statistics.fmean(run["held_out_loss"] for run in runs)
            rows[label] = {"settings": settings, "mean": mean, "runs": runs}
            print(label, settings, f"{mean:.4f}", [round(run["held_out_loss"], 4) for run in runs], flush=True)
    result = {
        "benchmark": "default_recipe",
        "hardware": hardware(device),
        "versions": versions(device),
        "commit": current_commit(),
        "command": "python -m benchmarks.default_recipe",
        "date": datetime.now(UTC).date().isoformat(),
        "files": files,
        "rows": rows,
    }
    stem = f"default_recipe_{slug(hardware(device))}_{datetime.now(UTC):%Y%m}"
    path = given.out or RESULTS / f"{stem}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    path.with_suffix(".md").write_text(make_page(result))
    print(make_page(result))


if __name__ == "__main__":
    main()
