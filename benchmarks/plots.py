"""Draw the plots of docs/benchmarks.md from benchmarks/results/*.json.

    python -m benchmarks.plots            # write docs/images/bench_*.svg
    python -m benchmarks.plots --check    # change nothing; exit code 1 if a picture is out of date

The same results give the same bytes; ``tests/benchmarks/test_plots.py`` compares every picture with its file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.svg_charts import bar_chart, dot_chart, line_chart
from benchmarks.tables import REGIMES, load

FOLDER = Path(__file__).parents[1] / "docs" / "images"
AUTO = "fdp, private (auto)"
LINES = {
    "none": "fdp, not private",
    "auto": AUTO,
    "module_graphs": "torch.compile, not private",
    "ghost_bk": "fdp, private (ghost_bk)",
    "opacus": "Opacus, private, hooks",
    "opacus_ghost": "Opacus, private, ghost",
}
COLORS = {name: index for index, name in zip((4, 0, 1, 3, 5, 2), LINES.values())}


def _by_context(title: str, field: str) -> str:
    rows = load("gpt2_large_h200").rows
    series = {
        name: {row["context"]: row[field] for row in rows if row["mode"] == mode and field in row}
        for mode, name in LINES.items()
    }
    return line_chart(title, series, x_label="tokens per sample (T), 4 samples a step", colors=COLORS, strong=AUTO)


def gpt2_large_time() -> str:
    """Draw milliseconds per step against the length of a sample."""
    return _by_context("GPT-2-Large on one H200: milliseconds per step", "ms")


def gpt2_large_memory() -> str:
    """Draw GiB at the peak of a step against the length of a sample."""
    return _by_context("GPT-2-Large on one H200: GiB at the peak of a step", "peak_gib")


def regimes() -> str:
    """Draw the speed of a private step relative to one without privacy, for several models and batches."""
    cells = {(row["regime"], row["mode"]): row for row in load("regimes_h200").rows}
    bars = {}
    for name, title in REGIMES.items():
        auto, plain = cells[name, "auto"], cells.get((name, "none")) or cells["large_batch", "none"]
        bars[title.replace("`", "")] = plain["ms"] / auto["ms"]
    return bar_chart("Speed of a private step, relative to one without privacy", bars, show="{:.2f}")


def kfac_private() -> str:
    """Draw the test accuracy of private optimizers, seed by seed."""
    groups = {row["name"]: row["accuracies"] for row in load("kfac_private_neoverse-n1").rows}
    return dot_chart("Digits at epsilon 3: test accuracy of five seeds, and their mean", groups, show="{:.3f}")


def examples_accuracy() -> str:
    """Draw the accuracies that the examples print, seed by seed."""
    rows = [row for row in load("examples_neoverse-n1").rows if "accuracy" in row["figure"]]
    groups = {f"{row['example']}, {row['figure'].partition(', ')[2]}": row["values"] for row in rows}
    return dot_chart("The examples on the digits: test accuracy of five seeds, and their mean", groups, show="{:.3f}")


PLOTS: dict[str, Callable[[], str]] = {
    "bench_gpt2_large_time": gpt2_large_time,
    "bench_gpt2_large_memory": gpt2_large_memory,
    "bench_regimes": regimes,
    "bench_kfac_private": kfac_private,
    "bench_examples": examples_accuracy,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a picture is out of date")
    check = parser.parse_args(argv).check
    old = 0
    for name, draw in PLOTS.items():
        path, drawn = FOLDER / f"{name}.svg", draw()
        if not path.exists() or path.read_text() != drawn:
            old += 1
            print(f"{path.name}: {'out of date' if check else 'drawn'}")
            if not check:
                path.write_text(drawn)
    sys.exit(int(check and old > 0))


if __name__ == "__main__":
    main()
