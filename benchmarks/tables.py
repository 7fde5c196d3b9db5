"""The tables of figures in README.md and docs/benchmarks.md, each made from one file of ``benchmarks/results``.

    >>> TABLES["gpt2_large"]().rows[0]                      # ["fdp, not private (`none`)", "28.4", ...]

``benchmarks/readme_tables.py`` renders them with their captions.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"


class Results(NamedTuple):
    """The content of one file of ``benchmarks/results``."""

    path: Path
    content: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.content["rows"]

    @property
    def commit(self) -> str:
        return self.content["commit"]


class Table(NamedTuple):
    """A table of strings, where its figures come from, and what they are.

    ``title`` names the unit, the model and the batch; ``packages`` are those whose versions the caption states.
    """

    results: Results
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    packages: Sequence[str] = ("torch", "triton")
    how: str = "Measured"


def load(name: str) -> Results:
    """Read the newest ``<name>_<yyyymm>.json``."""
    newest = max(RESULTS.glob(f"{name}_[0-9]*.json"))
    return Results(newest, json.loads(newest.read_text()))


# GPT-2-Large


MODES = {
    "none": "fdp, not private (`none`)",
    "auto": "**fdp, private (`auto`)**",
    "flash": "fdp, private (`flash`)",
    "flash_bk": "fdp, private (`flash_bk`)",
    "ghost_bk": "fdp, private (`ghost_bk`)",
    "ghost": "fdp, private (`ghost`)",
    "materialize": "fdp, private (`materialize`)",
    "module_graphs": "nn.Module, torch.compile, CUDA graph, not private",
    "module_blocks_graphs": "nn.Module, layers compiled one by one, CUDA graph, not private",
    "opacus": "Opacus, hooks, private",
    "opacus_ghost": "Opacus, ghost clipping, private",
}
BRIEF = ("none", "auto", "module_graphs")
GPU_PACKAGES = ("torch", "triton", "opacus")
OF_TRANSFORMERS = ("torch", "triton", "transformers", "opacus")
GPT2_LARGE = "GPT-2-Large (36 layers, untied head), batch of 4 sequences of T tokens, bfloat16 compute, AdamW."


def gpt2_large(modes: Sequence[str] = BRIEF) -> Table:
    """Tabulate milliseconds per step by sequence length."""
    title = f"**Milliseconds per step**, median: {GPT2_LARGE}"
    return _by_context(title, modes, lambda row: f"{row['ms']:.0f}" if row["ms"] >= 1000 else f"{row['ms']:.1f}")


def gpt2_large_memory() -> Table:
    """Tabulate GiB at the peak of a step, by sequence length."""
    return _by_context(f"**Peak memory of a step in GiB**: {GPT2_LARGE}", MODES, lambda row: f"{row['peak_gib']:.1f}")


def _by_context(title: str, modes: Collection[str], show: Callable[[dict[str, Any]], str]) -> Table:
    results = load("gpt2_large_h200")
    contexts = sorted({row["context"] for row in results.rows})
    cells = {(row["mode"], row["context"]): row for row in results.rows}
    table = []
    for mode in modes:
        found = {T: cells[mode, T] for T in contexts if (mode, T) in cells}
        shown = [show(found[T]) if T in found else "" for T in contexts]
        table.append([MODES[mode] + _other_commits(found, results.commit), *_bold(shown, mode == "auto")])
    if "Milliseconds" in title:
        ratios = [cells["none", T]["ms"] / cells["auto", T]["ms"] for T in contexts]
        table.insert(2, ["speed, private / not private", *(f"{ratio:.2f}" for ratio in ratios)])
    note = "A row that names a commit was measured earlier, at that commit."
    note += noise_note(results) if "Milliseconds" in title else ""
    packages = GPU_PACKAGES if "opacus" in modes else GPU_PACKAGES[:2]
    return Table(results, title, ["", *(f"T = {T}" for T in contexts)], table, note, packages)


def noise_note(results: Results) -> str:
    """Say what the rows of commits with noise of 32 bits leave out; empty for other commits."""
    came_later = " Noise of 64 bits came later and adds a few milliseconds to a private step of fdp."
    return came_later if results.commit in ("f2a1966", "5013465") else ""


def _other_commits(found: dict[int, dict[str, Any]], usual: str) -> str:
    """Return the commits of a row's cells where they are not the usual one."""
    commits = {row["commit"] for row in found.values()}
    if commits == {usual}:
        return ""
    if len(commits) == 1:
        return f", at {commits.pop()}"
    others = [f"T = {T}: {row['commit']}" for T, row in found.items() if row["commit"] != usual]
    return f" ({', '.join(others)})"


def _bold(cells: Iterable[str], bold: bool) -> list[str]:
    return [f"**{cell}**" if bold and cell else cell for cell in cells]


def opacus() -> Table:
    """Tabulate milliseconds of a private step by fdp and by Opacus."""
    results = load("gpt2_large_h200")
    ms = {(row["mode"], row["context"]): row["ms"] for row in results.rows}
    contexts = sorted(T for mode, T in ms if mode == "opacus")
    rows = []
    for T in contexts:
        best = min(ms["opacus", T], ms["opacus_ghost", T])
        times = (ms["auto", T], ms["opacus", T], ms["opacus_ghost", T])
        rows.append([f"T = {T}", *(f"{time:.0f}" for time in times), f"{best / ms['auto', T]:.1f} x"])
    commits = sorted({row["commit"] for row in results.rows if row["mode"].startswith("opacus")})
    columns = ["", "fdp `auto`", "Opacus, hooks", "Opacus, ghost clipping", "fdp is faster by"]
    note = f"Opacus was measured at {' and '.join(commits)}.{noise_note(results)}"
    return Table(results, f"**Milliseconds per private step**: {GPT2_LARGE}", columns, rows, note, GPU_PACKAGES)


def first_step() -> Table:
    """Tabulate seconds from the start of the program to the first step, without compile caches."""
    results = load("gpt2_large_h200")
    rows = [
        [
            f"T = {row['context']}, `{row['mode']}`",
            f"{row['imported_s']:.0f}",
            f"{row['first_step_s']:.0f}",
            row["commit"],
        ]
        for row in results.content["first_steps"]
    ]
    title = "**Seconds from the start of the program**, compile caches empty: GPT-2-Large, `--compile block`."
    return Table(results, title, ["", "imports done", "first step done", "commit"], rows)


# Other models on a GPU

REGIMES = {
    "large_batch": "GPT-2-Large, batch of 32",
    "cut_batch": "GPT-2-Large, batch of 32 in microbatches",
    "llama_1b": "Llama, 1 billion parameters",
    "llama_3b": "Llama, 3 billion parameters",
    "lora": "GPT-2-Large, LoRA",
}


def regimes() -> Table:
    """Tabulate milliseconds and memory of a step for other models and batch sizes."""
    results = load("regimes_h200")
    cells = {(row["regime"], row["mode"]): row for row in results.rows}
    rows = []
    for name, title in REGIMES.items():
        auto, plain = cells[name, "auto"], cells.get((name, "none")) or cells["large_batch", "none"]
        speed, memory = plain["ms"] / auto["ms"], auto["peak_gib"] / plain["peak_gib"]
        label = title + _other_commits({0: auto}, results.commit)
        shape = f"{auto['batch_size']} x {auto['context']}"
        rows.append([label, shape, f"{plain['ms']:.1f}", f"{auto['ms']:.1f}", f"{speed:.2f}", f"{memory:.2f}"])
    columns = ["", "B x T", "`none`, ms", "`auto`, ms", "speed, auto / none", "memory, auto / none"]
    note = noise_note(results).strip()
    return Table(results, "**Milliseconds per step**, median; bfloat16 compute.", columns, rows, note)


def transformers() -> Table:
    """Tabulate milliseconds of a step of modules of transformers, beside fdp's own models and Opacus."""
    results = load("foreign_h200")
    cells = {(row["regime"], row["mode"]): row for row in results.rows}
    rows = []
    for name, title in (("gpt2_large", "GPT-2-Large"), ("llama_1b", "Llama, 1.1 billion parameters")):
        own, theirs = cells[f"{name}, own", "auto"], cells[f"{name}, transformers", "auto"]
        opacus = [cells[f"{name}, transformers", mode] for mode in ("opacus", "opacus_ghost")]
        shape = f"{own['batch_size']} x {own['context']}"
        rows.append([title, shape, *(f"{row['ms']:.1f}" for row in (theirs, own, *opacus))])
    columns = ["", "B x T", "**module of transformers by fdp**", "fdp's own model", "module by Opacus, hooks", "ghost"]
    return Table(
        results,
        "**Milliseconds per private step** (`auto`), median; bfloat16 compute.",
        columns,
        rows,
        noise_note(results).strip(),
        OF_TRANSFORMERS,
    )


def noise_cost() -> Table:
    """Tabulate milliseconds of a step before and after noise of 64 bits on a grid."""
    results = load("noise_cost_h200")
    rows = []
    for commit in dict.fromkeys(row["commit"] for row in results.rows):
        found = {(row["context"], row["mode"]): row for row in results.rows if row["commit"] == commit}
        cells = []
        for T in (512, 2048):
            none, auto = found[T, "none"]["ms"], found[T, "auto"]["ms"]
            cells += [f"{none:.1f}", f"{auto:.1f}", f"{none / auto:.2f}"]
        rows.append([f"{next(iter(found.values()))['noise']} ({commit})", *cells])
    columns = ["noise", *(f"T = {T}: {what}" for T in (512, 2048) for what in ("`none`", "`auto`", "none / auto"))]
    return Table(results, "**Milliseconds per step**: GPT-2-Large, B = 4, bfloat16 compute.", columns, rows)


KERNELS = {
    "foreach_direct": "`direct`: norms, gradients never stored",
    "foreach_ghost": "`ghost`: norms from Gram matrices",
    "foreach_keep": "`keep`: per-sample gradients and norms",
    "foreach_weighted": "`weighted`: clipped sum of stored pairs",
}
FORMER_NAMES = {
    "many_direct": "foreach_direct",
    "many_ghosts": "foreach_ghost",
    "many_kept": "foreach_keep",
    "many_weighted": "foreach_weighted",
}
"""Names of kernels in results up to November 2026."""


def kernels() -> Table:
    """Tabulate milliseconds, and share of the matrix rate, of kernels that take a block's matrices in one launch."""
    results = load("kernels_h200")
    named = [(FORMER_NAMES.get(row["kernel"], row["kernel"]), row) for row in results.rows]
    cells = {(name, row["shape"]): row for name, row in named if name in KERNELS}
    shapes = list(dict.fromkeys(shape for _, shape in cells))
    rows = [
        [title, *(f"{cells[name, shape]['ms']:.3f} ({cells[name, shape]['share']:.2f})" for shape in shapes)]
        for name, title in KERNELS.items()
    ]
    title = (
        "**Milliseconds per launch** (share of cuBLAS' rate) for the four matrices of a GPT-2-Large block, bfloat16."
    )
    return Table(results, title, ["B x T", *(shape.removesuffix(", a block") for shape in shapes)], rows)


# CPU


def cpu() -> Table:
    """Tabulate seconds and memory of a step of gpt-nano on a CPU."""
    results = load("cpu_neoverse-n1")
    titles = {name: title for name, title in MODES.items() if name not in ("opacus", "module_graphs")}
    titles |= {"torch": "nn.Module, not private", "opacus_hooks": MODES["opacus"]}
    cells = {(row["method"], row["context"]): row for row in results.rows}
    contexts = sorted({T for _, T in cells})
    rows = []
    for method in ("none", "auto", "materialize", "ghost_bk", "ghost", "torch", "opacus_hooks", "opacus_ghost"):
        found = [cells[method, T] for T in contexts]
        seconds = [f"{row['seconds_per_step']:.3f}" for row in found]
        memory = [f"{row['peak_memory_bytes'] / 2**20:.0f}" for row in found]
        rows.append([titles[method], *_bold([*seconds, *memory], method == "auto")])
    columns = ["", *(f"T = {T}, seconds" for T in contexts), *(f"T = {T}, MiB" for T in contexts)]
    title = "**Seconds per step and growth of the peak memory**: gpt-nano (untied head), B = 16, float32, eager."
    return Table(results, title, columns, rows, packages=("torch", "opacus"))


# K-FAC


def kfac_steps() -> Table:
    """Tabulate steps to a loss for SGD, AdamW and K-FAC, each at the best of its grid."""
    results = load("kfac_neoverse-n1")
    titles = {"nano": "gpt-nano, 1024 tokens a step", "digits": "digits, batch 64", "digits_large": "digits, batch 512"}
    rows = []
    for section, title in titles.items():
        tried = results.content["sections"][section]
        best = {row["optimizer"]: row for row in tried if row["best"]}
        steps = [
            str(best[name]["steps"]) if name in best else f"not in {_most(tried, name)}"
            for name in ("sgd", "adamw", "kfac")
        ]
        by_steps, by_seconds = (best["kfac"][what] / best["adamw"][what] for what in ("steps", "seconds"))
        rows.append([f"{title}, to a loss of {tried[0]['loss']}", *steps, f"{by_steps:.2f}", f"{by_seconds:.2f}"])
    columns = ["", "SGD", "AdamW", "K-FAC", "K-FAC / AdamW, steps", "K-FAC / AdamW, seconds"]
    title = (
        "**Steps to a training loss** (nats), not private; median over seeds, every optimizer at the best of its grid."
    )
    return Table(results, title, columns, rows, packages=("torch",))


def _most(rows: Iterable[dict[str, Any]], optimizer: str) -> int:
    return max(row["most"] for row in rows if row["optimizer"] == optimizer)


def kfac_gpu() -> Table:
    """Tabulate milliseconds of a step of gpt2-medium by AdamW and K-FAC."""
    results = load("kfac_h200")
    rows, plain = [], {}
    for row in results.content["sections"]["medium"]:
        plain.setdefault(row["batch_size"], row["ms"])
        figures = (f"{row['ms']:.1f}", f"{row['step_ms']:.1f}", f"{row['refresh_ms']:.1f}", f"{row['peak_gib']:.1f}")
        rows.append([str(row["batch_size"]), row["optimizer"], *figures, f"{row['ms'] / plain[row['batch_size']]:.2f}"])
    columns = ["samples", "optimizer", "ms per step", "step alone", "one refresh", "peak GiB", "time / AdamW"]
    title = "**Milliseconds per step**, not private: gpt2-medium, T = 1024, bfloat16 compute, refreshed every 10 steps."
    return Table(results, title, columns, rows)


def kfac_private() -> Table:
    """Tabulate test accuracy of private optimizers at epsilon 3."""
    results = load("kfac_private_neoverse-n1")
    rows = []
    for row in results.rows:
        mean, spread = statistics.mean(row["accuracies"]), statistics.stdev(row["accuracies"])
        accuracy = f"{100 * mean:.1f} ± {100 * spread:.1f} %"
        rows.append([row["name"], accuracy, f"{row['noise_multiplier']:.3f}", f"{row['epsilon']:.3f}"])
    columns = ["", "test accuracy, mean ± deviation of 5 seeds", "noise multiplier", "epsilon"]
    title = "**Test accuracy at epsilon 3**, delta 1e-5: a classifier of the digits (64-32-10), 60 steps."
    return Table(results, title, columns, rows, packages=("torch",))


# Examples


def examples() -> Table:
    """Tabulate the figures that the examples print, over five seeds."""
    results = load("examples_neoverse-n1")
    rows = []
    for row in results.rows:
        mean, spread = statistics.mean(row["values"]), statistics.stdev(row["values"])
        values = (f"{value:.3f}" for value in (mean, spread, min(row["values"]), max(row["values"])))
        rows.append([f"`examples/{row['example']}.py`", row["figure"], *values])
    columns = ["", "figure", "mean", "deviation", "lowest", "highest"]
    title = "**Test accuracy, or held-out loss in nats, of the examples** over five seeds."
    return Table(results, title, columns, rows, packages=("torch", "transformers"))


# Memory estimates, worst samples, module zoo


def plan_accuracy() -> Table:
    """Tabulate peak memory of a step as predicted and as measured."""
    results = load("plan_h200")
    rows = []
    for row in results.rows:
        predicted, measured = row["predicted_gib"], row["measured_gib"]
        figures = (f"{predicted:.2f}", f"{measured:.2f}", f"{predicted / measured:.3f}")
        rows.append([row["case"], f"`{row['method']}`", *figures, row["peak_at"]])
    columns = ["", "method", "predicted", "measured", "ratio", "peak at"]
    return Table(results, "**GiB at the peak of a step**, by `fdp plan` and by the allocator.", columns, rows)


def plan_scale() -> Table:
    """Tabulate peak memory per rank of models that no machine here could hold."""
    results = load("plan_scale_neoverse-n1")
    rows = [
        [f"`{row['command']}`", *(f"{row[what]:.1f}" for what in ("peak_gib", "pairs_gib", "host_gib"))]
        for row in results.rows
    ]
    columns = ["", "peak", "stored between norms and sum", "in host memory"]
    title = "**GiB per rank at the peak of a private step**: bfloat16 compute, AdamW, one sample of 2048 tokens."
    return Table(results, title, columns, rows, packages=("torch",), how="Predicted")


def worst_sample() -> Table:
    """Tabulate the most that one sample moved the clipped sum, as a share of the stated sensitivity."""
    results = load("worst_sample_h200")
    rows = []
    for dtype in ("float32", "bfloat16"):
        found = [row for row in results.rows if row["dtype"] == dtype]
        worst, allowed = max(row["ratio"] for row in found), max(row["allowed"] for row in found)
        rows.append([dtype, f"{sum(row['cases'] for row in found):,}", f"{worst:.8f}", f"{allowed:.7g}"])
    title = "**How far the worst sample moved the clipped sum**, as a share of the sensitivity C."
    return Table(results, title, ["compute dtype", "samples tried", "worst", "allowed"], rows)


def zoo() -> Table:
    """Tabulate how many kinds of module are exact, exact by a remedy, or refused."""
    results = load("zoo_aarch64")
    verdicts = {"exact": "exact", "exact by that remedy": "exact by the remedy that the refusal names"}
    verdicts |= {"refused with a remedy": "refused, with a remedy"}
    rows = [
        [
            group,
            *(str(sum(row["group"] == group and row["verdict"] == name for row in results.rows)) for name in verdicts),
        ]
        for group in dict.fromkeys(row["group"] for row in results.rows)
    ]
    title = "**Kinds of module**, each compared in float64 with a loop of single-sample backward passes."
    return Table(results, title, ["from", *verdicts.values()], rows, packages=("torch", "transformers", "peft"))


TABLES: dict[str, Callable[[], Table]] = {
    "opacus": opacus,
    "gpt2_large": gpt2_large,
    "gpt2_large_methods": lambda: gpt2_large(tuple(MODES)),
    "gpt2_large_memory": gpt2_large_memory,
    "first_step": first_step,
    "regimes": regimes,
    "transformers": transformers,
    "noise_cost": noise_cost,
    "kernels": kernels,
    "cpu": cpu,
    "kfac_steps": kfac_steps,
    "kfac_gpu": kfac_gpu,
    "kfac_private": kfac_private,
    "examples": examples,
    "plan_accuracy": plan_accuracy,
    "plan_scale": plan_scale,
    "worst_sample": worst_sample,
    "zoo": zoo,
}
