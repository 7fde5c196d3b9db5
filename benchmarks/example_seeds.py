"""The figures of the examples over five seeds, so that no header states the luckiest one.

    python -m benchmarks.example_seeds                     # all examples; a row that is in the file is kept
    python -m benchmarks.example_seeds logistic own_layer

Each example runs in a process of its own, as a reader runs it, once per seed. The headers of the examples and a table
in docs/benchmarks.md state the mean and the standard deviation; ``tests/test_examples.py`` compares them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import current_commit, versions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "examples_neoverse-n1_202611.json"
SEEDS = range(5)
PRINTED = {
    "logistic": r"test accuracy ([\d.]+)",
    "digits_cnn": r"test accuracy ([\d.]+)",
    "own_layer": r"test accuracy ([\d.]+)",
    "nano_gpt": r"held-out loss ([\d.]+) at",
    "finetune_hf": r"([\d.]+) (?:with LoRA|in full) at",
}
"""How each example prints its figures."""
NAMES = {
    "logistic": ["test accuracy, epsilon 3"],
    "digits_cnn": ["test accuracy, epsilon 3", "test accuracy, epsilon 8"],
    "own_layer": ["test accuracy, epsilon 4"],
    "nano_gpt": ["held-out loss, epsilon 8"],
    "finetune_hf": ["held-out loss with LoRA, epsilon 8", "held-out loss in full, epsilon 8"],
}


def measure(example: str) -> list[dict[str, Any]]:
    """Run an example once per seed and return one row per figure."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    printed, seconds = [], []
    for seed in SEEDS:
        start = time.perf_counter()
        command = [sys.executable, f"examples/{example}.py", "--seed", str(seed)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - start)
        printed.append([float(value) for value in re.findall(PRINTED[example], done.stdout)])
        print(f"{example}, seed {seed}: {printed[-1]} after {seconds[-1]:.0f} s", flush=True)
    figures = zip(*printed, strict=True)
    return [
        {"example": example, "figure": name, "values": list(values), "seconds": round(statistics.median(seconds))}
        for name, values in zip(NAMES[example], figures, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "examples", nargs="*", choices=[*PRINTED, []], help="which examples; default: all that are missing"
    )
    chosen = parser.parse_args(argv).examples
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    for example in chosen or [name for name in PRINTED if name not in {row["example"] for row in rows}]:
        rows = [row for row in rows if row["example"] != example] + measure(example)
        content = {
            "hardware": f"{torch.get_num_threads()} threads of neoverse-n1",
            "versions": versions(torch.device("cpu")),
            "commit": current_commit(),
            "command": "python -m benchmarks.example_seeds",
            "date": datetime.now(UTC).date().isoformat(),
            "rows": sorted(rows, key=lambda row: list(PRINTED).index(row["example"])),
        }
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
