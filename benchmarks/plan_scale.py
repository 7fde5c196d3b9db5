"""Predict the peak memory of private steps of large models with ``fdp plan``, and write the rows to a JSON file.

    python -m benchmarks.plan_scale --out benchmarks/results/plan_scale_neoverse-n1_202611.json --hardware "..."

Each case is one command, run in a process of its own; a CPU is enough, and all three take a few minutes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import current_commit, hardware, versions

GIB = 2**30
CASES = (
    "fdp plan --model llama-13b --mesh shard=8",
    "fdp plan --model gpt3-175b --mesh shard=128 --memory-budget 8",
    "fdp plan --model gpt-1t --mesh shard=32,tensor=8 --method ghost --offload all",
)


def predict(command: str) -> dict[str, Any]:
    """Run ``command`` and return its peak, stored pairs and host memory in GiB."""
    words = [sys.executable, "-m", *shlex.split(command), "--context", "2048", "--microbatch", "1", "--json"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    sizes = {"peak_gib": found["peak_bytes"], "pairs_gib": found["kept_bytes"], "host_gib": found["host_bytes"]}
    row = {"command": command, **{name: size / GIB for name, size in sizes.items()}}
    return row | {"peak_at": found["peak_phase"], "fits_h100": found["fits"]}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/plan_scale.json"), help="where the rows go")
    parser.add_argument("--hardware", help="the name of this machine; default: what the system reports")
    options = parser.parse_args(argv)
    cpu = torch.device("cpu")
    head = {
        "benchmark": "plan_scale",
        "hardware": options.hardware or hardware(cpu),
        "versions": versions(cpu),
        "commit": current_commit(),
        "command": "python -m benchmarks.plan_scale",
        "date": datetime.now(UTC).date().isoformat(),
    }
    rows = []
    for command in CASES:
        rows.append(predict(command))
        print(rows[-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
