"""Milliseconds and memory of a step in other regimes: a large batch, Llama at 1B and 3B, low-rank adapters.

    python -m benchmarks.regimes --json runs/regimes.json --budget 500     # run it again to continue where it stopped
    python -m benchmarks.regimes --render runs/regimes.json                # write the page; needs no GPU

Prints a line per row. ``--render`` writes ``benchmarks/results/regimes_<hardware>_<yyyymm>.{md,json}``.

| regime          | model                                                        | B  | T    |
|-----------------|--------------------------------------------------------------|----|------|
| `large_batch`   | GPT-2-Large, untied                                          | 32 | 512  |
| `cut_batch`     | the same, private steps in four microbatches of 8            | 32 | 512  |
| `llama_1b`      | Llama, 16 layers of width 2048, vocabulary 32000 (1.1B)      | 8  | 2048 |
| `llama_1b_tied` | the same with vocabulary 128256, head tied (Llama-3.2-1B)    | 8  | 2048 |
| `llama_3b`      | Llama, 28 layers of width 3072, vocabulary 32000 (3.0B)      | 4  | 2048 |
| `lora`          | GPT-2-Large, frozen, with rank-16 adapters on all its layers | 4  | 2048 |

bfloat16 compute, float32 master weights, AdamW. ``benchmarks/harness.py`` says how modes are checked and measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from benchmarks.device import choose_sdpa
from benchmarks.gpt2_large import CHECKED_CONTEXT, CHECKED_LAYERS, CONFIG, RESULTS, WIDTH
from benchmarks.modes import FAST, INT8, LEAN, OURS, Case, Row, Speed
from benchmarks.report import overstatements, publish, title_and_command, versions_and_commits
from benchmarks.sweep_options import arguments, budget_of, open_report, run_sweep, speed_of
from fdp import ops
from fdp.init import normal
from fdp.model import Block, LeafSpec, Model
from fdp.models import GPTConfig, LlamaConfig, gpt, llama
from fdp.types import Tree

MODES = ("none", "ghost_bk", "auto")
LLAMA_1B = LlamaConfig(
    layers=16, width=2048, heads=32, key_heads=8, hidden=8192, context=2048, vocab_size=32000, rope_base=500_000.0
)
LLAMA_3B = LLAMA_1B._replace(layers=28, width=3072, heads=24)
RANK, ALPHA = 16, 32.0
ADAPTED = ("qkv", "out", "up", "down")


def lora_gpt(config: GPTConfig, *, rank: int = RANK, name: str = "gpt-lora") -> Model:
    """Return a frozen GPT with ``y = W x + b + (alpha / rank) B A x`` in every layer (Hu et al., arXiv 2106.09685).

    Both factors start at random: with the usual ``B = 0`` the gradient of ``A`` would be 0, and a check would not
    cover it.
    """
    base = gpt(config, name=name)
    leaves, blocks = dict(base.leaves), []
    apply_layer = partial(_lora_layer, heads=config.heads, scale=ALPHA / rank)
    for block in base.blocks:
        if not block.name.startswith("blocks."):
            blocks.append(block)
            continue
        paths = dict(block.params)
        for weight in ADAPTED:
            rows, columns = base.leaves[block.params[weight]].shape
            for factor, shape in (("a", (rank, columns)), ("b", (rows, rank))):
                paths[f"{weight}_{factor}"] = f"{block.params[weight]}_{factor}"
                leaves[paths[f"{weight}_{factor}"]] = LeafSpec(shape, normal(0.02))
        blocks.append(Block(block.name, paths, apply_layer))
    return base._replace(leaves=leaves, blocks=tuple(blocks), frozen=frozenset(base.leaves), parallel=None)


def _lora_layer(p: Tree, h: Tensor, data: Tree, *, heads: int, scale: float) -> Float[Tensor, "batch tokens width"]:
    B, T, D = h.shape

    def adapted_linear(x: Tensor, weight: str) -> Tensor:
        low = ops.linear(ops.linear(x, p[f"{weight}_a"]), p[f"{weight}_b"])
        return ops.linear(x, p[weight], p[f"{weight}_bias"]) + scale * low

    n = ops.layer_norm(h, p["norm1"], p["norm1_bias"])
    q, k, v = adapted_linear(n, "qkv").reshape(B, T, -1, 3, D // heads).transpose(1, 2).unbind(3)
    h = h + adapted_linear(ops.attention(q, k, v).transpose(1, 2).reshape(B, T, -1), "out")
    m = ops.layer_norm(h, p["norm2"], p["norm2_bias"])
    return h + adapted_linear(F.gelu(adapted_linear(m, "up"), approximate="tanh"), "down")


class Regime(NamedTuple):
    """A model and its batch size, with targets for auto / none: ``least`` speed and ``most_memory``.

    ``plain`` is the regime whose ``none`` it is compared with; None means its own.
    """

    make: Callable[..., Model]
    config: GPTConfig | LlamaConfig
    batch_size: int
    least: float | None = None
    most_memory: float | None = None
    microbatches: int = 1
    plain: str | None = None


REGIMES = {
    "large_batch": Regime(gpt, CONFIG, 32, 0.92, 1.15),
    "cut_batch": Regime(gpt, CONFIG, 32, 0.92, 1.15, microbatches=4, plain="large_batch"),
    "llama_1b": Regime(llama, LLAMA_1B, 8, 0.92),
    "llama_1b_tied": Regime(llama, LLAMA_1B._replace(vocab_size=128256, tied=True), 8),
    "llama_3b": Regime(llama, LLAMA_3B, 4),
    "lora": Regime(lora_gpt, CONFIG._replace(context=2048), 4),
}


def make_case(name: str, **options: Any) -> Case:
    """Return the case of a regime of this benchmark."""
    return case_of(name, REGIMES[name], **options)


def case_of(
    name: str,
    regime: Regime,
    *,
    speed: Speed = FAST,
    layers: int | None = None,
    memory_budget: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Return the case of a regime, with a small slice of its model to check."""
    config = regime.config._replace(layers=layers or regime.config.layers)
    few, short = min(CHECKED_LAYERS, config.layers), min(CHECKED_CONTEXT, config.context)
    about = f"{regime.make.__name__}, {few} layers, {short} tokens"
    small = regime.make(config._replace(layers=few, context=short), name=about)
    model, batch_size = regime.make(config), regime.batch_size
    return Case(name, config.layers, model, small, batch_size, speed, dtype, memory_budget, regime.microbatches)


def page(content: dict[str, Any], *, name: str) -> str:
    """Return the Markdown page of a report."""
    return page_of(content, REGIMES, name=name, title="A step in other regimes", source="benchmarks/regimes.py")


def page_of(content: dict[str, Any], regimes: Mapping[str, Regime], *, name: str, title: str, source: str) -> str:
    """Return the Markdown page of a sweep over ``regimes``, which the file ``source`` defines."""
    rows: list[Row] = content["rows"]
    lines = [*page_head(content, name=name, title=title, source=source), "", *rows_table(rows, regimes)]
    lines += overstatements(rows)
    lines += ["", "| figure | target | measured | |", "|---|---|---|---|", *verdicts(rows, regimes)]
    return "\n".join(lines) + "\n"


def page_head(content: dict[str, Any], *, name: str, title: str, source: str) -> list[str]:
    """Return the beginning of a page: title, command, versions, commits."""
    return [
        *title_and_command(content, title=title),
        fill(
            f"{versions_and_commits(content)}; attention kernel: {content['settings']['sdpa']}. Rows: `{name}.json`. "
            f"Models and measurement: `{source}`, `benchmarks/harness.py`.",
            WIDTH,
        ),
    ]


def rows_table(rows: Sequence[Row], regimes: Mapping[str, Regime]) -> list[str]:
    """Return the table of all regimes and modes."""
    lines = [
        "| regime | layers | B | T | mode | ms | 20-80 % | tokens/s | peak GiB | speed / `none` | memory / `none` |",
        "|---" * 11 + "|",
    ]
    for each, regime in regimes.items():
        plain = row_of(rows, regime.plain or each, "none")
        mine = (row for row in rows if row["regime"] == each)
        lines += [table_line(row, plain) for row in sorted(mine, key=lambda row: OURS.index(row["mode"]))]
    return lines


def verdicts(rows: Sequence[Row], regimes: Mapping[str, Regime]) -> list[str]:
    """Return the lines that compare speed and memory of ``auto``, and of its variants, with the regimes' targets."""
    lines = []
    for each, regime in regimes.items():
        plain = row_of(rows, regime.plain or each, "none")
        measured = [mode for mode in ("auto", INT8, LEAN) if row_of(rows, each, mode) is not None]
        for mode in measured or ["auto"]:
            speed, memory = ratios_to(row_of(rows, each, mode), plain)
            if regime.least is not None:
                lines.append(verdict(f"speed, `{mode}` / `none`, {each}", ">=", regime.least, speed))
            if regime.most_memory is not None:
                lines.append(verdict(f"peak memory, `{mode}` / `none`, {each}", "<=", regime.most_memory, memory))
    return lines


def row_of(rows: Sequence[Row], regime: str, mode: str) -> Row | None:
    """Return the timed row of a mode, if there is one."""
    found = (row for row in rows if (row["regime"], row["mode"]) == (regime, mode) and "failed" not in row)
    return next(found, None)


def table_line(row: Row, plain: Row | None) -> str:
    """Return a line of the table: regime, sizes, mode, measurements, and their ratios to ``plain``."""
    where = f"| {row['regime']} | {row['layers']} | {row['batch_size']} | {row['context']} | {row['mode']}"
    if "failed" in row:
        return f"{where} | not timed: {row['failed']} | | | | | |"
    speed, memory = (f"{value:.3f}" if value else "" for value in ratios_to(row, plain))
    peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    return (
        f"{where} | {row['ms']:.1f} | {row['ms_p20']:.1f}-{row['ms_p80']:.1f} | {row['tokens_per_second']:,.0f} | "
        f"{peak} | {speed} | {memory} |"
    )


def ratios_to(row: Row | None, plain: Row | None) -> tuple[float | None, float | None]:
    """Return speed and memory of a row, relative to ``none``; ``plain_ms`` is its time in the row's own run."""
    if row is None or plain is None:
        return None, None
    memory = row["peak_gib"] / plain["peak_gib"] if row["peak_gib"] and plain["peak_gib"] else None
    return row.get("plain_ms", plain["ms"]) / row["ms"], memory


def verdict(figure: str, sign: str, bound: float, value: float | None) -> str:
    if value is None or math.isnan(value):
        return f"| {figure} | {sign} {bound:g} | not measured | |"
    met = value >= bound if sign == ">=" else value <= bound
    return f"| {figure} | {sign} {bound:g} | {value:.4f} | {'met' if met else '**short**'} |"


def render(source: Path, folder: Path = RESULTS) -> Path:
    """Write page and rows of a report as ``regimes_<hardware>_<yyyymm>.{md,json}``; return the page's path."""
    return publish(source, folder, page)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("Milliseconds and memory of a step in other regimes.", modes=MODES)
    run_regimes(parser, "regimes", REGIMES, make_case, render, argv)


def run_regimes(
    parser: argparse.ArgumentParser,
    benchmark: str,
    regimes: Mapping[str, Regime],
    make: Callable[..., Case],
    render: Callable[[Path], Path],
    argv: Sequence[str] | None,
) -> None:
    """Sweep over the regimes that the command line names, or write the page of an earlier sweep."""
    parser.add_argument("--regimes", nargs="+", choices=regimes, default=list(regimes), metavar="REGIME")
    options = parser.parse_args(argv)
    if options.render:
        print(f"written: {render(options.render)}")
        return
    device = torch.device(options.device)
    choose_sdpa(options.sdpa)
    report = open_report(options, benchmark, device)
    cases = [
        make(name, speed=speed_of(options), layers=options.layers, memory_budget=budget_of(options))
        for name in options.regimes
    ]
    run_sweep(report, cases, options, device)


if __name__ == "__main__":
    main()
