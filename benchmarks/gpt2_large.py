"""Milliseconds and memory of a step of GPT-2-Large, T = 512 to 8192: every method of fdp, plain torch and Opacus.

    python -m benchmarks.gpt2_large --json runs/gpt2_large.json --budget 500     # run again to continue
    python -m benchmarks.gpt2_large --json runs/gpt2_large.json --first-step auto --contexts 512
    python -m benchmarks.gpt2_large --render runs/gpt2_large.json                # write page and plot; needs no GPU

Prints a line per row. ``--render`` writes ``benchmarks/results/gpt2_large_<hardware>_<yyyymm>.{md,png,json}``.

Vocabulary 50257, width 1280, 36 layers, 20 heads, untied head (Opacus' ghost mode refuses tied weights), learned
positions: 838M parameters at T = 512, 848M at 8192. B = 4, bfloat16 compute, float32 master weights, AdamW; private
modes clip to norm 1 and add noise of multiplier 1. ``benchmarks/harness.py`` says how modes are checked and measured,
``benchmarks/baselines.py`` what fdp is compared with.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch

from benchmarks.cold_start import empty_caches, first_step
from benchmarks.device import choose_sdpa
from benchmarks.modes import FAST, LEARNING_RATE, METHODS, OURS, Candidate, Case, Row, Speed
from benchmarks.report import overstatements, publish
from benchmarks.sweep_options import arguments, budget_of, open_report, run_sweep, speed_of
from fdp.model import Model
from fdp.models import GPTConfig, gpt
from fdp.types import Tree

CONFIG = GPTConfig(layers=36, width=1280, heads=20, context=512, vocab_size=50257, tied=False)
CONTEXTS = (512, 1024, 2048, 4096, 8192)
BATCH_SIZE = 4
CHECKED_LAYERS, CHECKED_CONTEXT = 2, 128
MODULES = ("module", "module_graphs", "module_blocks_graphs")
OPACUS = ("opacus", "opacus_ghost")
MODES = (*METHODS, *MODULES, *OPACUS)
RESULTS, WIDTH = Path("benchmarks/results"), 120
FASTDP = {512: (152, 9.9), 2048: (197, 34.6), 8192: (748, 98.6)}
"""Milliseconds and GiB of fastDP (BK-MixOpt; all in bfloat16, no master weights), measured earlier on an H200."""


def make_case(
    config: GPTConfig,
    *,
    batch_size: int,
    speed: Speed = FAST,
    memory_budget: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Return the case of GPT at ``config``, with the baselines."""

    def baseline(mode: str, model: Model, samples: int, device: torch.device, params: Tree | None) -> Candidate:
        from benchmarks.baselines import BASELINES, Setup

        assert model.context is not None
        shape = config._replace(layers=len(model.blocks) - 2, context=model.context)
        return BASELINES[mode](Setup(shape, samples, device, dtype, device.type == "cuda", params))

    layers, context = min(CHECKED_LAYERS, config.layers), min(CHECKED_CONTEXT, config.context)
    small = gpt(config._replace(layers=layers, context=context), name=f"gpt, {layers} layers, {context} tokens")
    model = gpt(config)
    return Case("gpt2_large", config.layers, model, small, batch_size, speed, dtype, memory_budget, baseline=baseline)


# The page


class Figure(NamedTuple):
    """One line of the table of targets."""

    figure: str
    target: str
    measured: str
    met: bool | None


def at(rows: Sequence[Row], context: int) -> dict[str, Row]:
    """Return the timed rows of one context, by mode."""
    return {row["mode"]: row for row in rows if row["context"] == context and "failed" not in row}


def fastest(rows: dict[str, Row], modes: Sequence[str]) -> Row | None:
    return min((rows[mode] for mode in modes if mode in rows), key=lambda row: row["ms"], default=None)


def ratio(a: float | None, b: float | None) -> float:
    return math.nan if not a or not b else a / b


def target_figures(content: dict[str, Any]) -> list[Figure]:
    """Return the figures that have a target, as measured."""
    rows = content["rows"]
    figures = []

    def compare(what: str, context: int, value: float, bound: float, *, at_least: bool = True, note: str = "") -> None:
        sign, unknown = (">=" if at_least else "<="), math.isnan(value)
        met = None if unknown else value >= bound if at_least else value <= bound
        shown = "not measured" if unknown else f"{value:.4f}{note}"
        figures.append(Figure(f"{what}, T = {context}", f"{sign} {bound:g}", shown, met))

    contexts = sorted({row["context"] for row in rows})
    found = {context: at(rows, context) for context in contexts}
    ms: Callable[[int, str], float | None] = lambda context, mode: found[context].get(mode, {}).get("ms")  # noqa: E731

    def over(what: str, context: int, modes: Sequence[str], bound: float) -> None:
        best = fastest(found[context], modes)
        value = ratio(best["ms"] if best else None, ms(context, "auto"))
        compare(f"speed, `auto` / {what}", context, value, bound, note=f" ({best['mode']})" if best else "")

    for context in contexts:
        bound = 0.95 if context < 1024 else 0.97
        compare("speed, `auto` / `none`", context, ratio(ms(context, "none"), ms(context, "auto")), bound)
    for context in contexts:
        over("fastest nn.Module", context, MODULES, 1.0)
    for context, bound in ((512, 6.0), (2048, 3.0), (8192, 1.7)):
        if context in found:
            over("best Opacus", context, OPACUS, bound)
    for context in contexts:
        peaks = [found[context].get(mode, {}).get("peak_gib") for mode in ("auto", "none")]
        compare("peak memory, `auto` / `none`", context, ratio(*peaks), 1.05, at_least=False)
    for context in contexts:
        for mode in ("flash", "flash_bk"):
            compare(f"speed, `{mode}` / `ghost_bk`", context, ratio(ms(context, "ghost_bk"), ms(context, mode)), 1.0)
    for row in content["first_steps"]:
        if row["mode"] == "auto" and row["layers"] == CONFIG.layers:
            seconds = row["first_step_s"]
            what = f"seconds from the start of the program to the first step, T = {row['context']}"
            earlier = row.get("commit") not in (None, content["commit"])
            shown = f"{seconds:.1f}" + (f" (at {row['commit']})" if earlier else "")
            figures.append(Figure(what, "<= 60", shown, seconds <= 60))
    return figures


def page(content: dict[str, Any], *, name: str) -> str:
    """Return the Markdown page of a report."""
    rows, settings = content["rows"], content["settings"]
    versions = ", ".join(f"{what} {which}" for what, which in content["versions"].items())
    layers = sorted({row["layers"] for row in rows})
    commits = sorted({row["commit"] for row in rows})
    lines = [
        f"# A step of GPT-2-Large on one {content['hardware']}, {content['date']}",
        "",
        f"    {content['command']}",
        "",
        fill(
            f"{versions}; commit {', '.join(commits)}; fdp with `--compile {settings['compile']}`"
            f"{' and a CUDA graph' if settings['cuda_graph'] else ''}; attention kernel: {settings['sdpa']}. "
            f"Rows: `{name}.json`.",
            WIDTH,
        ),
        "",
        fill(
            f"Vocabulary {CONFIG.vocab_size}, width {CONFIG.width}, {', '.join(map(str, layers))} layers, "
            f"{CONFIG.heads} heads, untied head, learned positions, B = {BATCH_SIZE}; bfloat16 compute, float32 master "
            "weights, AdamW; private modes clip to norm 1 and add noise of multiplier 1. Median of consecutive steps "
            "by CUDA events, a new key and new tokens every step, at a learning rate of "
            f"{LEARNING_RATE:g}, by which every mode and baseline multiplies the same parameters "
            "(`benchmarks/modes.py` says why); memory is the most that was allocated in a step, for "
            "captured steps since the capture. Before a mode is timed, three steps of a two-layer slice of it "
            "(losses, norms, parameters after noise and AdamW) and the norms of its first two steps at full size are "
            "compared with `materialize`: bfloat16 slack 2 %, more where a table says so. Compile caches are warm in "
            "all but the first cell, so `first_step_s` of the rows is no measure of a cold start.",
            WIDTH,
        ),
        "",
        *other_rates(rows),
        *([fill(f"Tests on this GPU: {content['tests']}", WIDTH), ""] if "tests" in content else []),
        f"![time and memory against T]({name}.png)",
        "",
        "## Targets",
        "",
        "| figure | target | measured | |",
        "|---|---|---|---|",
    ]
    verdict = {True: "met", False: "**short**", None: ""}
    lines += [f"| {f.figure} | {f.target} | {f.measured} | {verdict[f.met]} |" for f in target_figures(content)]
    for context in sorted({row["context"] for row in rows}):
        lines += ["", f"## T = {context}", "", *table(rows, context)]
    chosen = {row["context"]: row["choices"] for row in rows if row["mode"] == "auto" and "choices" in row}
    if chosen:
        lines += ["", "## Choices of `auto` (norm, sum)", ""]
        kinds = list(next(iter(chosen.values())))
        lines += ["| leaf | " + " | ".join(f"T = {context}" for context in sorted(chosen)) + " |"]
        lines += ["|---" * (1 + len(chosen)) + "|"]
        lines += [
            f"| {kind} | " + " | ".join(chosen[context].get(kind, "") for context in sorted(chosen)) + " |"
            for kind in kinds
        ]
    profiles = [row for row in rows if "profile_ms" in row]
    if profiles:
        kinds = sorted({kind for row in profiles for kind in row["profile_ms"]["by_class"]})
        lines += ["", "## Milliseconds of a step by class of kernel", "", f"| T | mode | {' | '.join(kinds)} |"]
        lines += ["|---" * (2 + len(kinds)) + "|"]
        for row in sorted(profiles, key=lambda row: row["context"]):
            times = (row["profile_ms"]["by_class"].get(kind, 0.0) for kind in kinds)
            lines.append(f"| {row['context']} | {row['mode']} | " + " | ".join(f"{ms:.2f}" for ms in times) + " |")
    return "\n".join(lines) + "\n"


def other_rates(rows: Sequence[Row]) -> list[str]:
    """Return a paragraph on rows that were measured at another learning rate, if there are any."""
    known = ((row["commit"], row.get("learning_rate", LEARNING_RATE)) for row in rows)
    rates = {commit: rate for commit, rate in known if rate != LEARNING_RATE}
    if not rates:
        return []
    listed = ", ".join(f"{commit} ({rate:g})" for commit, rate in sorted(rates.items()))
    return [fill(f"Rows of earlier commits were measured at another learning rate: {listed}.", WIDTH), ""]


def table(rows: Sequence[Row], context: int) -> list[str]:
    """Return the table of one context: a line per mode, with its speed over ``none`` and over the fastest baseline."""
    mine = at(rows, context)
    plain, best = mine.get("none"), fastest(mine, ("none", *MODULES))
    lines = [
        "| mode | ms | 20-80 % | tokens/s | peak GiB | speed / `none` | speed / fastest non-private | commit |",
        "|---" * 8 + "|",
    ]
    known = sorted((row for row in rows if row["context"] == context), key=lambda row: MODES.index(row["mode"]))
    for row in known:
        if "failed" in row:
            lines.append(f"| {row['mode']} | not timed: {row['failed']} | | | | | | {row['commit']} |")
            continue
        speeds = [f"{other['ms'] / row['ms']:.3f}" if other else "" for other in (plain, best)]
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        name = f"**{row['mode']}**" if row["mode"] == "auto" else row["mode"]
        lines.append(
            f"| {name} | {row['ms']:.1f} | {row['ms_p20']:.1f}-{row['ms_p80']:.1f} | {row['tokens_per_second']:,.0f} | "
            f"{peak} | {' | '.join(speeds)} | {row['commit']} |"
        )
    if context in FASTDP:
        ms, gib = FASTDP[context]
        speeds = [f"{other['ms'] / ms:.3f}" if other else "" for other in (plain, best)]
        rate = BATCH_SIZE * context / ms * 1e3
        lines.append(f"| fastDP, measured earlier (1) | {ms} | | {rate:,.0f} | {gib} | {' | '.join(speeds)} | |")
        lines += [
            "",
            "(1) BK-MixOpt, all in bfloat16 without master weights; an H200 with torch 2.11, not in this run.",
        ]
    return lines + overstatements(known)


def plot(content: dict[str, Any], path: Path) -> None:
    """Plot time and memory against T, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 6.2), layout="constrained")
    rows = [row for row in content["rows"] if "failed" not in row]
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for i, mode in enumerate(MODES):
        mine = sorted((row for row in rows if row["mode"] == mode), key=lambda row: row["context"])
        style = {"color": colours[i % 20], "marker": "o", "linestyle": "-" if mode in OURS else "--", "label": mode}
        style |= {"linewidth": 2.5 if mode in ("auto", "none") else 1.2, "markersize": 4}
        for axis, field in zip(axes, ("ms", "peak_gib")):
            points = [(row["context"], row[field]) for row in mine if row[field] is not None]
            if points:
                axis.plot(*zip(*points), **style)
    if any(row["context"] in FASTDP for row in rows):
        style = {"color": "gray", "marker": "x", "linestyle": ":", "label": "fastDP (measured earlier)"}
        for axis, column in zip(axes, (0, 1)):
            axis.plot(list(FASTDP), [figures[column] for figures in FASTDP.values()], **style)
    contexts = sorted({row["context"] for row in rows})
    for axis, label in zip(axes, ("milliseconds per step", "peak memory, GiB")):
        axis.set(xscale="log", yscale="log", xlabel="T (tokens per sample)", ylabel=label)
        axis.set_xticks(contexts, [str(context) for context in contexts])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=9)
    figure.suptitle(f"One step of GPT-2-Large, B = {BATCH_SIZE}, {content['hardware']}, {content['date']}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def render(source: Path, folder: Path = RESULTS) -> Path:
    """Write page, plot and rows as ``gpt2_large_<hardware>_<yyyymm>.{md,png,json}``; return the page's path."""
    written = publish(source, folder, page)
    plot(json.loads(source.read_text()), written.with_suffix(".png"))
    return written


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("Milliseconds and memory of a step of GPT-2-Large, against torch and Opacus.", modes=MODES)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), metavar="T")
    parser.add_argument("--first-step", metavar="MODE", help="only: seconds to its first step, with empty caches")
    options = parser.parse_args(argv)
    if options.render:
        print(f"written: {render(options.render)}")
        return
    device = torch.device(options.device)
    choose_sdpa(options.sdpa)
    report = open_report(options, "gpt2_large", device)
    config = CONFIG._replace(layers=options.layers or CONFIG.layers)
    cases = [
        make_case(
            config._replace(context=context),
            batch_size=BATCH_SIZE,
            speed=speed_of(options),
            memory_budget=budget_of(options),
        )
        for context in options.contexts
    ]
    if options.first_step:
        with tempfile.TemporaryDirectory() as folder:
            empty_caches(folder)
            first_step(report, cases[0], options.first_step, device)
        return
    run_sweep(report, cases, options, device)


if __name__ == "__main__":
    main()
