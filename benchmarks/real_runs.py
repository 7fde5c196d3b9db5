"""Milliseconds and memory of a step at the batch sizes of private training, and samples/s of a step of 1024 samples.

    python -m benchmarks.real_runs --json runs/real_runs.json --budget 500     # run it again to continue
    python -m benchmarks.real_runs --regimes gpt2_tied_512 step_gpt2 --modes none auto opacus
    python -m benchmarks.real_runs --render runs/real_runs.json                # write the page; needs no GPU

Prints a line per row, most important first. ``--render`` writes
``benchmarks/results/real_runs_<hardware>_<yyyymm>.{md,json}``.

| regime               | model                                                         | B    | T    |
|----------------------|---------------------------------------------------------------|------|------|
| `gpt2_tied_512`      | GPT-2 (124M), head tied to the embedding                      | 64   | 512  |
| `gpt2_untied_512`    | the same, untied                                              | 64   | 512  |
| `gpt2_tied_256`      | GPT-2, tied                                                   | 128  | 256  |
| `gpt2_untied_256`    | the same, untied                                              | 128  | 256  |
| `gpt2_tied_2x64`     | GPT-2, tied, private steps in two microbatches of 64          | 128  | 256  |
| `gpt2_untied_2x64`   | the same, untied                                              | 128  | 256  |
| `gpt2_tied_1024`     | GPT-2, tied                                                   | 32   | 1024 |
| `gpt2_untied_1024`   | the same, untied                                              | 32   | 1024 |
| `gpt2_medium_tied`   | GPT-2-Medium (355M), tied                                     | 16   | 256  |
| `gpt2_medium_untied` | the same, untied                                              | 16   | 256  |
| `llama_1b_tied`      | Llama, 16 layers of width 2048, vocabulary 128256, tied       | 16   | 1024 |
| `llama_1b`           | the same with vocabulary 32000, untied                        | 6    | 1536 |
| `gpt2_large_b4`      | GPT-2-Large, untied                                           | 4    | 2048 |
| `gpt2_large`         | GPT-2-Large, untied                                           | 32   | 512  |
| `llama_3b`           | Llama, 28 layers of width 3072, vocabulary 32000, untied      | 4    | 2048 |
| `step_gpt2`          | GPT-2, untied (Opacus' ghost mode refuses a tied head)        | 1024 | 512  |
| `step_llama_1b`      | Llama of 16 layers, vocabulary 32000, untied                  | 1024 | 1024 |
| `step_gpt2_tied`     | GPT-2, tied                                                   | 1024 | 512  |
| `step_llama_1b_tied` | Llama of 16 layers, vocabulary 128256, tied                   | 1024 | 1024 |

A step of 1024 samples is cut into microbatches; every mode is timed at several sizes and shown at its fastest
(``benchmarks/large_steps.py``). ``auto_lean`` is measured where ``auto`` takes more than its share of memory: the plan
of ``auto`` that stores less. bfloat16 compute, float32 master weights, AdamW with a learning rate of 1e-4: at its power
limit a GPU multiplies the numbers of a model that learns more slowly than those of one that stands still.
``benchmarks/harness.py`` says how modes are checked and measured, ``benchmarks/baselines.py`` what fdp is compared
with; ``benchmarks/llama_8b.py`` measures 8 billion parameters. In a process that imports fdp, cuBLAS has a small
workspace (``fdp.equal_rounding``). Opacus and modules were measured before that was so; to give them theirs again, set
``CUBLAS_WORKSPACE_CONFIG=:4096:8 CUBLASLT_WORKSPACE_SIZE=32768`` and measure them by themselves (``--modes``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch

from benchmarks import large_steps
from benchmarks.device import GIB, choose_sdpa
from benchmarks.gpt2_large import CONFIG as GPT2_LARGE
from benchmarks.gpt2_large import OPACUS, RESULTS, WIDTH
from benchmarks.modes import INT8, LEAN, OURS, Candidate, Case, Row
from benchmarks.regimes import (
    LLAMA_1B,
    LLAMA_3B,
    Regime,
    case_of,
    page_head,
    row_of,
    rows_table,
    verdict,
    verdicts,
)
from benchmarks.report import Report, overstatements, publish
from benchmarks.sweep_options import arguments, budget_of, open_report, run_cells, speed_of
from fdp.model import Model
from fdp.models import GPTConfig, gpt, llama
from fdp.types import Tree

RATE, SAMPLES, FASTER_THAN_OPACUS = 1e-4, 1024, 4.0
MODES = ("none", "auto", LEAN)
BY_NAME = (*MODES, INT8)
"""Modes of one microbatch; the last is measured if ``--modes`` names it."""
PAIR_METHODS = ("ghost_bk", "flash_bk")
"""Methods that must take about as long for a tied model as for an untied one."""
PAIRED, MOST_FOR_TIES = ("gpt2_tied_512", "gpt2_untied_512"), 1.1
MODULE = "module_graphs"
STEP_MODES = ("auto", *OPACUS, "none", MODULE)
STEP_BY_NAME = (*STEP_MODES, INT8)

GPT2 = GPTConfig(layers=12, width=768, heads=12, context=512, vocab_size=50257, tied=True)
MEDIUM = GPT2._replace(layers=24, width=1024, heads=16, context=256)
LLAMA = LLAMA_1B._replace(context=1024)
LLAMA_TIED = LLAMA._replace(vocab_size=128256, tied=True)
REGIMES = {
    "gpt2_tied_512": Regime(gpt, GPT2, 64, 0.90, 1.15),
    "gpt2_untied_512": Regime(gpt, GPT2._replace(tied=False), 64, 0.90, 1.15),
    "gpt2_tied_256": Regime(gpt, GPT2._replace(context=256), 128, 0.92, 1.15),
    "gpt2_untied_256": Regime(gpt, GPT2._replace(context=256, tied=False), 128, 0.92, 1.15),
    "gpt2_tied_2x64": Regime(gpt, GPT2._replace(context=256), 128, None, 1.15, 2, "gpt2_tied_256"),
    "gpt2_untied_2x64": Regime(gpt, GPT2._replace(context=256, tied=False), 128, None, 1.15, 2, "gpt2_untied_256"),
    "gpt2_tied_1024": Regime(gpt, GPT2._replace(context=1024), 32, 0.92, 1.15),
    "gpt2_untied_1024": Regime(gpt, GPT2._replace(context=1024, tied=False), 32, 0.92, 1.15),
    "gpt2_medium_tied": Regime(gpt, MEDIUM, 16, 0.90, 1.15),
    "gpt2_medium_untied": Regime(gpt, MEDIUM._replace(tied=False), 16, 0.90, 1.15),
    "llama_1b_tied": Regime(llama, LLAMA_TIED, 16, 0.92, 1.15),
    "gpt2_large_b4": Regime(gpt, GPT2_LARGE._replace(context=2048), 4),
    "llama_1b": Regime(llama, LLAMA_1B._replace(context=1536), 6, 0.92, 1.15),
    "gpt2_large": Regime(gpt, GPT2_LARGE, 32, 0.92, 1.15),
    "llama_3b": Regime(llama, LLAMA_3B, 4, 0.92, 1.15),
}


class Step(NamedTuple):
    """A step of many samples: the regime whose ``batch_size`` is the first microbatch to try, and those to try."""

    regime: Regime
    sizes: tuple[int, ...]


STEPS = {
    "step_gpt2": Step(Regime(gpt, GPT2._replace(tied=False), 64), (8, 16, 32, 64, 128)),
    "step_llama_1b": Step(Regime(llama, LLAMA, 16), (2, 4, 8, 16, 32, 64)),
    "step_gpt2_tied": Step(Regime(gpt, GPT2, 64), (8, 16, 32, 64, 128)),
    "step_llama_1b_tied": Step(Regime(llama, LLAMA_TIED, 8), (2, 4, 8, 16, 32, 64)),
}
FIRST = list(REGIMES)[: list(REGIMES).index("llama_1b_tied") + 1]
LATER = [name for name in REGIMES if name not in FIRST]
ORDER = (*FIRST, "step_gpt2", "step_llama_1b", *LATER, "step_gpt2_tied", "step_llama_1b_tied")


def make_case(name: str, *, microbatch: int | None = None, samples: int = SAMPLES, **options: Any) -> Case:
    """Return the case of a regime, or of a step of ``samples`` in microbatches."""
    if name in REGIMES:
        return case_of(name, REGIMES[name], **options)._replace(learning_rate=RATE)
    regime = STEPS[name].regime
    size = regime.batch_size if microbatch is None else microbatch
    case = case_of(name, regime._replace(batch_size=size), **options)
    return case._replace(
        learning_rate=RATE, samples=samples, baseline=partial(baseline, regime.config, samples, case.dtype)
    )


def baseline(
    config: Any,
    samples: int,
    dtype: torch.dtype,
    mode: str,
    model: Model,
    size: int,
    device: torch.device,
    params: Tree | None,
) -> Candidate:
    """Build a baseline with as many layers and tokens as ``model``; with params, for a check, in one microbatch."""
    from benchmarks.baselines import BASELINES, Setup

    assert model.context is not None
    shape = config._replace(layers=len(model.blocks) - 2, context=model.context)
    setup = Setup(shape, size, device, dtype, device.type == "cuda", params)
    if params is None:
        setup = setup._replace(learning_rate=RATE, samples=samples)
    return BASELINES[mode](setup)


# The sweep


def cells(report: Report, options: argparse.Namespace) -> Iterator[tuple[Case, str]]:
    """Yield the cells, most important first; what comes next may depend on the rows before."""
    make = partial(make_case, speed=speed_of(options), layers=options.layers, memory_budget=budget_of(options))
    for name in (name for name in ORDER if name in options.regimes):
        if name in STEPS:
            for mode in chosen(options, STEP_MODES if options.modes is None else STEP_BY_NAME):
                case_at = lambda size: make(name, microbatch=size, samples=options.samples)  # noqa: B023, E731
                start, sizes = STEPS[name].regime.batch_size, fitting(STEPS[name].sizes, options.samples)
                yield from large_steps.climb(report, case_at, mode, start=min(start, sizes[-1]), sizes=sizes)
            continue
        for mode in chosen(options, MODES if options.modes is None else BY_NAME):
            case = make(name)
            if mode == "none" and REGIMES[name].plain is not None:
                continue
            if mode == LEAN:
                budget = lean_budget(report, case, most=REGIMES[name].most_memory)
                if budget is None and report.find(case, mode) is None:
                    continue
                case = case._replace(memory_budget=budget)
            yield case, mode
    for name in (name for name in PAIRED if name in options.regimes):
        for mode in chosen(options, PAIR_METHODS):
            yield make(name), mode


def chosen(options: argparse.Namespace, modes: Sequence[str]) -> list[str]:
    """Return the modes that the command line allows, in order of importance."""
    return [mode for mode in modes if options.modes is None or mode in options.modes]


def fitting(sizes: Sequence[int], samples: int) -> list[int]:
    """Return the microbatches that divide the step; of a tiny step, itself."""
    return [size for size in sizes if samples % size == 0 and size < samples] or [samples]


def lean_budget(report: Report, case: Case, *, most: float | None) -> float | None:
    """Return the bytes that ``auto_lean`` may store so as to take ``most`` of the memory of ``none``.

    At the peak, a byte that is stored counts as one byte of memory. None if ``auto`` is within its share, or unknown.
    """
    plain, auto = (report.find(case, mode) or {} for mode in ("none", "auto"))
    if most is None or not plain.get("peak_gib") or not auto.get("peak_gib") or "stored_gib" not in auto:
        return None
    excess = auto["peak_gib"] - most * plain["peak_gib"]
    return None if excess <= 0 else max(auto["stored_gib"] - excess, 0.0) * GIB


# The page


def page(content: dict[str, Any], *, name: str) -> str:
    """Return the Markdown page of a report."""
    rows: list[Row] = content["rows"]
    title = "Steps at the batch sizes of private training"
    plain = [row for row in rows if row["regime"] in REGIMES]
    lines = [
        *page_head(content, name=name, title=title, source="benchmarks/real_runs.py"),
        "",
        fill(
            f"Learning rate {RATE:g}, not 0: at its power limit a GPU multiplies the numbers of a model that learns a "
            "few per cent more slowly than those of one that stands still.",
            WIDTH,
        ),
        "",
        "## One microbatch",
        "",
        *rows_table(plain, REGIMES),
        *overstatements(plain),
        *(["", LEAN_NOTE] if any(row["mode"] == LEAN for row in rows) else []),
        *(["", INT8_NOTE] if any(row["mode"] == INT8 for row in rows) else []),
        "",
        f"## A step of {SAMPLES} samples",
        "",
        fill(STEP_NOTE, WIDTH),
        "",
        *large_steps.table(rows, list(STEPS), ("none", "auto", INT8, MODULE, *OPACUS)),
        "",
        "## Targets",
        "",
        "| figure | target | measured | |",
        "|---|---|---|---|",
        *verdicts(rows, REGIMES),
        *tie_verdicts(rows),
        *opacus_verdicts(rows),
    ]
    return "\n".join(lines) + "\n"


LEAN_NOTE = fill(
    f"`{LEAN}` is the plan of `auto` that stores least with one backward pass, measured where `auto` takes more memory "
    "than its share. For gpt2 that is `auto`'s own plan, measured again at 512 tokens: the two rows differ as two runs "
    "do. Smaller microbatches take less memory: `gpt2_tied_2x64` and `gpt2_untied_2x64` are steps of 128 samples of "
    "256 tokens in two microbatches, compared with plain steps in one; see also the next table.",
    WIDTH,
)
INT8_NOTE = fill(
    f"`{INT8}` is `auto` with gradients stored in 8 bits, as `fdp train` has it unless a seed is fixed. Rows of one "
    "regime may be of several commits (`commit` in the file of rows), measured on several machines, on which `none` "
    "took up to 2.5 % more or less time: so far a ratio of two rows may be off. Where the file gives a row the time of "
    "`none` in its own run (`plain_ms`), its speed is relative to that.",
    WIDTH,
)
STEP_NOTE = (
    "Every mode at the microbatch that is fastest for it, of those tried; out of memory ends a search. Opacus 1.6.0 by "
    "its `PrivacyEngine`, with hooks and with ghost clipping (two backward passes), on an nn.Module of the same shape: "
    "float32 weights, bfloat16 autocast, torch's fused attention and fused AdamW, noise from torch's generator, eager, "
    "since its hooks do not compile; microbatches as its `BatchMemoryManager` has them. `module_graphs` is that "
    "nn.Module without privacy, compiled, in CUDA graphs. fdp: compiled blocks and a CUDA graph."
)


def tie_verdicts(rows: Sequence[Row]) -> list[str]:
    """Return the lines on the time of a tied model relative to an untied one."""
    lines = []
    for mode in PAIR_METHODS:
        tied, untied = (row_of(rows, regime, mode) for regime in PAIRED)
        value = tied["ms"] / untied["ms"] if tied and untied else None
        lines.append(verdict(f"time, `{mode}`, {PAIRED[0]} / {PAIRED[1]}", "<=", MOST_FOR_TIES, value))
    return lines


def opacus_verdicts(rows: Sequence[Row]) -> list[str]:
    """Return the lines on samples/s relative to the better mode of Opacus; 8 bits where they were measured."""
    lines = []
    for regime, mine in product(STEPS, ("auto", INT8)):
        auto = large_steps.fastest(rows, regime, mine)
        if auto is None and mine == INT8:
            continue
        found = [row for mode in OPACUS if (row := large_steps.fastest(rows, regime, mode))]
        theirs = max(found, key=lambda row: row["samples_per_second"], default=None)
        value = auto["samples_per_second"] / theirs["samples_per_second"] if auto and theirs else None
        which = f" ({theirs['mode']})" if theirs else ""
        lines.append(verdict(f"samples/s, `{mine}` / best Opacus{which}, {regime}", ">=", FASTER_THAN_OPACUS, value))
    return lines


def render(source: Path, folder: Path = RESULTS) -> Path:
    """Write page and rows of a report as ``real_runs_<hardware>_<yyyymm>.{md,json}``; return the page's path."""
    return publish(source, folder, page)


def main(argv: Sequence[str] | None = None) -> None:
    modes = tuple(dict.fromkeys((*BY_NAME, *PAIR_METHODS, *STEP_MODES)))
    parser = arguments("Steps at the batch sizes of private training, against plain torch and Opacus.", modes=modes)
    parser.set_defaults(modes=None)
    parser.add_argument("--regimes", nargs="+", choices=ORDER, default=list(ORDER), metavar="REGIME")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples of a large step, to try things")
    options = parser.parse_args(argv)
    if options.render:
        print(f"written: {render(options.render)}")
        return
    if unknown := set(options.modes or ()) - {*OURS, *modes}:
        parser.error(f"--modes: expected some of {', '.join(modes)}, got {', '.join(sorted(unknown))}")
    device = torch.device(options.device)
    choose_sdpa(options.sdpa)
    report = open_report(options, "real_runs", device)
    run_cells(report, cells(report, options), options, device)


if __name__ == "__main__":
    main()
