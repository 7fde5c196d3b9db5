"""Milliseconds and memory of a step at the batch sizes of private training: tied heads, large vocabularies.

    python -m benchmarks.real_runs --json runs/real_runs.json --budget 500     # run it again to continue
    python -m benchmarks.real_runs --render runs/real_runs.json                # write the page; needs no GPU

Prints a line per row. ``--render`` writes ``benchmarks/results/real_runs_<hardware>_<yyyymm>.{md,json}``.

| regime               | model                                                         | B   | T    |
|----------------------|---------------------------------------------------------------|-----|------|
| `gpt2_tied_512`      | GPT-2 (124M), head tied to the embedding                      | 64  | 512  |
| `gpt2_untied_512`    | the same, untied                                              | 64  | 512  |
| `gpt2_tied_256`      | GPT-2, tied                                                   | 128 | 256  |
| `gpt2_untied_256`    | the same, untied                                              | 128 | 256  |
| `gpt2_tied_1024`     | GPT-2, tied                                                   | 32  | 1024 |
| `gpt2_untied_1024`   | the same, untied                                              | 32  | 1024 |
| `gpt2_medium_tied`   | GPT-2-Medium (355M), tied                                     | 16  | 256  |
| `gpt2_medium_untied` | the same, untied                                              | 16  | 256  |
| `llama_1b_tied`      | Llama, 16 layers of width 2048, vocabulary 128256, tied       | 16  | 1024 |
| `gpt2_large`         | GPT-2-Large, untied                                           | 32  | 512  |
| `gpt2_large_b4`      | GPT-2-Large, untied                                           | 4   | 2048 |

bfloat16 compute, float32 master weights, AdamW with a learning rate of 1e-4: at its power limit a GPU multiplies the
numbers of a model that learns more slowly than those of one that stands still. ``benchmarks/harness.py`` says how modes
are checked and measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpt2_large import CONFIG as GPT2_LARGE
from benchmarks.gpt2_large import RESULTS
from benchmarks.modes import Case
from benchmarks.regimes import LLAMA_1B, Regime, case_of, page_of, run_regimes
from benchmarks.report import publish
from benchmarks.sweep_options import arguments
from fdp.models import GPTConfig, gpt, llama

MODES = ("none", "auto", "ghost_bk", "flash_bk")
RATE = 1e-4
GPT2 = GPTConfig(layers=12, width=768, heads=12, context=512, vocab_size=50257, tied=True)
MEDIUM = GPT2._replace(layers=24, width=1024, heads=16, context=256)
REGIMES = {
    "gpt2_tied_512": Regime(gpt, GPT2, 64, 0.90, 1.15),
    "gpt2_untied_512": Regime(gpt, GPT2._replace(tied=False), 64, 0.90, 1.15),
    "gpt2_tied_256": Regime(gpt, GPT2._replace(context=256), 128, 0.92, 1.15),
    "gpt2_untied_256": Regime(gpt, GPT2._replace(context=256, tied=False), 128, 0.92, 1.15),
    "gpt2_tied_1024": Regime(gpt, GPT2._replace(context=1024), 32, 0.92, 1.15),
    "gpt2_untied_1024": Regime(gpt, GPT2._replace(context=1024, tied=False), 32, 0.92, 1.15),
    "gpt2_medium_tied": Regime(gpt, MEDIUM, 16, 0.90, 1.15),
    "gpt2_medium_untied": Regime(gpt, MEDIUM._replace(tied=False), 16, 0.90, 1.15),
    "llama_1b_tied": Regime(llama, LLAMA_1B._replace(vocab_size=128256, tied=True, context=1024), 16, 0.92, 1.15),
    "gpt2_large": Regime(gpt, GPT2_LARGE, 32, 0.92, 1.15),
    "gpt2_large_b4": Regime(gpt, GPT2_LARGE._replace(context=2048), 4),
}


def make_case(name: str, **options: Any) -> Case:
    """Return the case of a regime."""
    return case_of(name, REGIMES[name], **options)._replace(learning_rate=RATE)


def page(content: dict[str, Any], *, name: str) -> str:
    """Return the Markdown page of a report."""
    title = f"A step at the batch sizes of private training (learning rate {RATE:g})"
    return page_of(content, REGIMES, name=name, title=title, source="benchmarks/real_runs.py")


def render(source: Path, folder: Path = RESULTS) -> Path:
    """Write page and rows of a report as ``real_runs_<hardware>_<yyyymm>.{md,json}``; return the page's path."""
    return publish(source, folder, page)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("Milliseconds and memory of a step at the batch sizes of private training.", modes=MODES)
    run_regimes(parser, "real_runs", REGIMES, make_case, render, argv)


if __name__ == "__main__":
    main()
