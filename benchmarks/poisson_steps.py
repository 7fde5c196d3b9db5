"""Time of steps whose number of samples is drawn, beside steps of exactly the expected number.

    python -m benchmarks.poisson_steps --json runs/poisson_steps.json          # on a GPU, a minute and a half
    python -m benchmarks.poisson_steps --render runs/poisson_steps.json        # write the page; needs no GPU

    ratio = (time of Poisson steps / their samples) / (time of a step of exactly n samples / n)

GPT-2 (124M), head tied, 512 tokens; bfloat16, AdamW, blocks compiled, steps recorded. Both kinds of step go through the
same step function, with microbatches as ``fdp train`` chooses them: at 64 of up to 80 samples, at 1024 of 64, 32, 16
and 8. Blocks of both kinds of step take turns, so that a GPU that slows down as it warms up slows down both.

| expected batch n | target |
|------------------|--------|
| 64               | 1.1    |
| 1024             | 1.02   |
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.device import free, synchronize
from benchmarks.gpt2_large import RESULTS
from benchmarks.modes import EAGER, FAST, Row, make_our_plan, make_our_step
from benchmarks.real_runs import GPT2, RATE
from benchmarks.report import Report, head_of_page, publish
from fdp import keys
from fdp.gradients.plan import Method, add_smaller_sizes
from fdp.models import GPTConfig, gpt
from fdp.optimizers import adamw
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.microbatches import group_rows, one_microbatch, pad_to_rows, sizes_from
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import init_state

BLOCKS = 3
STEPS = {64: 30, 1024: 3}
"""Steps of each kind per block, by the expected batch size."""
TARGETS = {64: 1.1, 1024: 1.02}


def sizes_of(expected: int, *, microbatch: int) -> tuple[int, ...]:
    """Return the sizes of microbatches that ``fdp train`` takes if ``microbatch`` samples keep the GPU busy."""
    return sizes_from(one_microbatch(expected) if expected <= microbatch else microbatch, expected=expected)


class Steps(NamedTuple):
    """A step function: ``run(count)`` makes a step of that many samples. ``sizes`` are those of its microbatches."""

    run: Callable[[int], None]
    sizes: tuple[int, ...]


def make_steps(config: GPTConfig, mode: str, *, sizes: tuple[int, ...], most: int, device: torch.device) -> Steps:
    """Return the step of a mode for steps of up to ``most`` samples, on random tokens."""
    model, method, microbatch = gpt(config), Method(mode), sizes[0]
    # The bound on the samples of a step must hold for the largest batch that is run.
    sampling, clip = poisson(1 << 20, expected_batch_size=most), flat(max_norm=1.0)
    mechanism = without_noise(sampling, clip) if method is Method.NONE else Mechanism(sampling, clip, 1.0)
    optimizer, speed = adamw(RATE, weight_decay=0.1), FAST if device.type == "cuda" else EAGER
    params = model.init(keys.key(0).to(device))
    draw = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(config.vocab_size, (most, config.context + 1), generator=draw, device=device)
    example, dtype = {"tokens": tokens[:microbatch]}, torch.bfloat16 if device.type == "cuda" else torch.float32
    plan = make_our_plan(model, params, example, method=method, dtype=dtype, speed=speed)
    plan = add_smaller_sizes(plan, model, params, example, sizes=sizes[1:])
    step = make_our_step(model, optimizer, mechanism=mechanism, plan=plan, speed=speed)
    state, root = init_state(model, params, optimizer, mechanism), keys.key(1).to(device)

    def run(count: int) -> None:
        nonlocal state
        groups = group_rows(count, sizes)
        matrix, mask = pad_to_rows(torch.arange(count), rows=sum(groups.sizes), size=sizes[-1])
        data = {"tokens": tokens[matrix.to(device)]}
        state, _ = step(state, trusted_batch(data, mask.to(device), sampling, step=None, groups=groups), root)

    return Steps(run, sizes)


def warm_up(steps: Steps) -> None:
    """Make steps in which every size occurs as the only microbatch and among others, until all are recorded."""
    largest, *smaller = steps.sizes
    for _ in range(3):
        for size in (largest, *smaller, *(largest + size for size in steps.sizes)):
            steps.run(size)


def measure(steps: Steps, expected: int, *, device: torch.device, per_block: int, blocks: int = BLOCKS) -> Row:
    """Return the seconds per sample of drawn and of exact steps, and their ratio."""
    draw = np.random.default_rng(expected)
    spent = {"poisson": 0.0, "exact": 0.0}
    samples = {"poisson": 0, "exact": 0}
    for _ in range(blocks):
        drawn = {"poisson": draw.poisson(expected, per_block).tolist(), "exact": [expected] * per_block}
        for kind, counts in drawn.items():
            synchronize(device)
            start = time.perf_counter()
            for count in counts:
                steps.run(count)
            synchronize(device)
            spent[kind] += time.perf_counter() - start
            samples[kind] += sum(counts)
    each = {kind: spent[kind] / samples[kind] for kind in spent}
    return {
        "batch_size": expected,
        "ratio": each["poisson"] / each["exact"],
        "exact_ms": 1e3 * each["exact"] * expected,
        "poisson_ms": 1e3 * spent["poisson"] / (blocks * per_block),
        "samples": samples["poisson"],
        "steps": blocks * per_block,
    }


def time_of_tail(steps: Steps, *, device: torch.device, repeats: int = 10) -> dict[str, float]:
    """Return the milliseconds of a step of one microbatch of each size, and of the largest one and each."""
    largest, found = steps.sizes[0], {}
    for size in (*steps.sizes, *(largest + size for size in steps.sizes)):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            steps.run(size)
        synchronize(device)
        found[str(size)] = 1e3 * (time.perf_counter() - start) / repeats
    return found


def page(content: dict[str, Any], *, name: str) -> str:
    """Return the Markdown page of a report."""
    rows = sorted(content["rows"], key=lambda row: (row["mode"], row["batch_size"]))
    lines = [
        *head_of_page(content, name=name, title="Steps of drawn batches"),
        "| mode | expected batch | exact step, ms | drawn step, ms | time per sample, drawn / exact | target | |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        target = TARGETS.get(row["batch_size"], float("inf"))
        met = "met" if row["ratio"] <= target else "**short**"
        lines.append(
            f"| {row['mode']} | {row['batch_size']} | {row['exact_ms']:.1f} | {row['poisson_ms']:.1f} | "
            f"{row['ratio']:.4f} | <= {target:g} | {met} |"
        )
    lines += ["", "Milliseconds of a step, by its number of samples:", ""]
    for row in rows:
        times = ", ".join(f"{size}: {ms:.1f}" for size, ms in row["tail_ms"].items())
        lines.append(f"- `{row['mode']}`, expected batch {row['batch_size']}: {times}")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time of steps of drawn batches, beside steps of the expected size.")
    parser.add_argument("--json", type=Path, default=Path("runs/poisson_steps.json"))
    parser.add_argument("--render", type=Path, help="write the page of an earlier report, and end")
    parser.add_argument("--modes", nargs="+", choices=("none", "auto"), default=["auto"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(TARGETS))
    parser.add_argument("--microbatch", type=int, default=64)
    parser.add_argument("--layers", type=int, default=GPT2.layers)
    parser.add_argument("--context", type=int, default=GPT2.context)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    if options.render:
        print(f"written: {publish(options.render, RESULTS, page)}")
        return
    device, config = torch.device(options.device), GPT2._replace(layers=options.layers, context=options.context)
    report = Report(options.json, benchmark="poisson_steps", device=device, microbatch=options.microbatch)
    cell = {"regime": "gpt2_tied", "context": config.context, "layers": config.layers}
    for mode in options.modes:
        for n in options.batches:
            start = time.perf_counter()
            sizes = sizes_of(n, microbatch=options.microbatch)
            most = int(max(n + 8 * n**0.5, 2 * sizes[0]))
            steps = make_steps(config, mode, sizes=sizes, most=most, device=device)
            warm_up(steps)
            print(f"{mode}: microbatches of {sizes}, ready after {time.perf_counter() - start:.0f} s", flush=True)
            tail = time_of_tail(steps, device=device)
            print(f"{mode}: ms by samples: " + ", ".join(f"{size}: {ms:.1f}" for size, ms in tail.items()), flush=True)
            row = measure(steps, n, device=device, per_block=STEPS.get(n, max(1, 2000 // n)))
            report.add({"mode": mode, **cell, **row, "tail_ms": tail, "sizes": list(sizes)})
            print(
                f"{mode}: expected batch {n}: exact {row['exact_ms']:.1f} ms, drawn {row['poisson_ms']:.1f} ms, "
                f"ratio {row['ratio']:.4f} (target {TARGETS.get(n, '-')})",
                flush=True,
            )
            del steps
            free(device)


if __name__ == "__main__":
    main()
