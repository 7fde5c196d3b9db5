"""By how much a sample adds something else to the sum in a smaller microbatch, for every way to compute a step.

    python -m benchmarks.equal_sizes --json runs/equal_sizes.json             # on a GPU, a few minutes: it compiles
    python -m benchmarks.equal_sizes --render runs/equal_sizes.json           # write the page; needs no GPU

    difference = ||part in a microbatch of this size - part in the largest|| / ||part in the largest||

``fdp train`` uses the sizes for which this, and the difference of the norms, is small enough
(``fdp.run.equal_sizes``); that is measured once before, so a difference that comes and goes shows as a size that is
used and differs, or the reverse. Layers of gpt2's width and its vocabulary, two of them, since all layers run the same
code; 512 tokens, flat clipping, sizes as at an expected batch of 64 and of 1024.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.device import free
from benchmarks.gpt2_large import RESULTS
from benchmarks.real_runs import GPT2
from benchmarks.report import Report, head_of_page, publish
from fdp.checks.equal_sizes import differences
from fdp.fast.compile_modes import Compile
from fdp.gradients.plan import Method
from fdp.models import GPTConfig, gpt
from fdp.optimizers import adamw
from fdp.privacy.clipping import flat
from fdp.run.equal_sizes import RoundingWarning
from fdp.run.prepare_run import prepare
from fdp.run.run_config import RunConfig
from fdp.run.run_plan import first_examples
from fdp.step import sample_part
from fdp.types import Tree

BATCHES = {64: 80, 1024: 64}
"""The largest microbatch by the expected batch size, as ``fdp train`` chooses it."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class RandomTexts:
    """Texts of random tokens."""

    def __init__(self, config: GPTConfig, count: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(config.vocab_size, (count, config.context + 1), generator=draw)

    def __len__(self) -> int:
        return len(self.tokens)

    def fetch(self, indices: np.ndarray) -> Tree:
        return {"tokens": self.tokens[torch.as_tensor(indices)]}


def measure(
    config: GPTConfig, *, batch_size: int, microbatch: int, compile: Compile, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return the difference of every size, and the sizes that a run would use."""
    run_config = RunConfig(
        model=gpt(config),
        dataset=RandomTexts(config, 2 * batch_size),
        method=Method.AUTO,
        clip=flat(max_norm=1.0),
        noise_multiplier=1.0,
        epsilon=None,
        delta=1e-6,
        batch_size=batch_size,
        steps=1,
        optimizer=adamw(1e-4),
        seed=0,
        dtype=dtype,
        microbatch_size=microbatch,
        smaller_microbatches=True,
        memory_budget=None,
        compile=compile,
        device=device,
    )
    sizes = run_config.microbatch_sizes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundingWarning)
        run, state = prepare(run_config)
    found = differences(
        sample_part(run.stages, state), first_examples(run_config, sizes[0]), sizes=sizes, sharded=False
    )
    return {"differences": {str(size): by for size, by in found.items()}, "sizes": sizes, "used": run.sizes}


def page(content: dict[str, Any], *, name: str) -> str:
    """Return the Markdown page of a report."""
    rows = sorted(content["rows"], key=lambda row: (row["regime"], row["mode"], row["batch_size"]))
    lines = [
        *head_of_page(content, name=name, title="What a sample adds in smaller microbatches,"),
        "The sizes used were chosen by an earlier measurement in the same process.",
        "",
        "| model | step | expected batch | difference from the largest size | sizes used |",
        "|---" * 5 + "|",
    ]
    for row in rows:
        by_size = ", ".join(f"{size}: {by:.1e}" for size, by in row["differences"].items())
        used = ", ".join(map(str, row["used"]))
        lines.append(f"| {row['regime']} | {row['mode']} | {row['batch_size']} | {by_size} | {used} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a sample adds to the sum in microbatches of several sizes.")
    parser.add_argument("--json", type=Path, default=Path("runs/equal_sizes.json"))
    parser.add_argument("--render", type=Path, help="write the page of an earlier report, and end")
    parser.add_argument("--heads", nargs="+", choices=("tied", "untied"), default=["tied", "untied"])
    parser.add_argument("--compile", nargs="+", choices=("none", "block"), default=["none", "block"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=GPT2.context)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    if options.render:
        print(f"written: {publish(options.render, RESULTS, page)}")
        return
    device = torch.device(options.device)
    report = Report(options.json, benchmark="equal_sizes", device=device)
    for head, compile, dtype, n in product(options.heads, options.compile, options.dtypes, options.batches):
        start = time.perf_counter()
        config = GPT2._replace(layers=options.layers, context=options.context, tied=head == "tied")
        found = measure(
            config,
            batch_size=n,
            microbatch=BATCHES[n],
            compile=Compile(compile),
            dtype=DTYPES[dtype],
            device=device,
        )
        mode = f"{dtype}, {'blocks compiled' if compile == 'block' else 'eager'}"
        cell = {"regime": f"gpt2_{head}", "context": config.context, "layers": config.layers, "batch_size": n}
        report.add({"mode": mode, **cell, **found})
        by_size = ", ".join(f"{size}: {by:.1e}" for size, by in found["differences"].items())
        print(f"{head}, {mode}, expected {n}: {by_size} ({time.perf_counter() - start:.0f} s)", flush=True)
        free(device)


if __name__ == "__main__":
    main()
