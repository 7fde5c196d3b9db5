"""Search for the sample that moves the clipped sum furthest, relative to the sensitivity that the sum states.

    python -m benchmarks.worst_sample --minutes 10                       # every rule and pair of rules, on the CPU
    python -m benchmarks.worst_sample --device cuda --quick              # kernels and compiled blocks, about 90 seconds

Prints two tables, by attack and by choice; ``--out`` writes the rows as JSON. Exits with an error if a ratio is above
1 + 1e-6 in float32 or 1 + 1e-3 in half precision.

Models, attacks and the search are those of the tests (``tests/adversary.py``, ``tests/adversary_search.py``): leaves of
every rule and pair of rules, whose inputs and output gradients a sample chooses freely; every choice of norms and sums;
full models, adapters and foreign modules. First all named attacks are tried on every leaf by every choice, then the
search takes turns until the time is over. The time starts when everything is compiled. On a GPU all leaves share one
model, so that little is compiled.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import current_commit, hardware, versions
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.plan import Plan
from tests.adversary import ARENAS, MANY, SLACK, STYLES, TARGETS, Arena, crowded, joined, measure, on, plans_of
from tests.adversary_search import Found, Search, as_written

LONG_TOKENS = 160
"""Tokens of a use, enough for several tiles of a kernel."""
TURN_S = 2.0
"""Length of one leaf's turn in the search."""
BRIEF = ("linear", "embedding", "conv1d", "linear+embedding", "linear+add", "add|add", "whole+whole cube")
CROWD_SIZE = 1024
"""Samples that cancel around an honest one."""
CLASSES = {
    "honest": "an honest sample in a crowd that cancels",
    "uses": "uses of a leaf that cancel",
    "squares": "squares that round the most",
    "rounded": "squares that round the most",
    "nan": "not finite",
    "inf": "not finite",
    "denormal": "sizes at the ends of the dtype",
    "largest": "sizes at the ends of the dtype",
    "gain": "a loss times anything",
    "+-": "tokens that cancel",
    "tokens": "tokens that cancel",
}


class Row(NamedTuple):
    """The worst of several cases of one model, leaf, choice, dtype and compile option."""

    kind: str
    model: str
    leaf: str
    choice: str
    dtype: str
    compile: str
    attack: str
    cases: int
    ratio: float
    disturbed: float
    allowed: float
    sample: list[dict[str, list[str]]] | None = None

    @property
    def broken(self) -> bool:
        return not self.ratio <= self.allowed


class Job(NamedTuple):
    """A leaf of an arena, by one choice, to search."""

    search: Search
    leaf: str
    choice: str
    plan: Plan
    compile: str


def class_of(attack: str) -> str:
    """Return the kind of an attack, for the table."""
    return next((kind for part, kind in CLASSES.items() if part in attack), "sizes, equal and odd ones")


class Ground(NamedTuple):
    """An arena in one dtype, with compiled blocks or without."""

    arena: Arena
    dtype: torch.dtype
    blocks: CompiledRunner | None


def grounds(options: argparse.Namespace, device: torch.device, dtypes: list[torch.dtype]) -> Iterator[Ground]:
    """Yield what is attacked. Compiled blocks serve every choice; with ``--quick``, float32 has none."""
    blocks = CompiledRunner() if device.type == "cuda" else CompiledRunner(backend=options.backend)
    for dtype in dtypes:
        if options.joined or device.type == "cuda":
            if options.quick:
                yield Ground(joined(BRIEF), dtype, None if dtype is torch.float32 else blocks)
                continue
            yield Ground(joined(MANY), dtype, None)
            yield Ground(joined(BRIEF, tokens=LONG_TOKENS), dtype, blocks)
        else:
            yield from (Ground(ARENAS[name](), dtype, None) for name in (BRIEF if options.quick else ARENAS))
        if not options.quick:
            yield Ground(joined(MANY), dtype, blocks)


def jobs(options: argparse.Namespace, device: torch.device, dtypes: list[torch.dtype]) -> Iterator[Job]:
    """Yield every leaf by every choice."""
    for ground in grounds(options, device, dtypes):
        generation = 48 if device.type == "cuda" else 16
        search = Search(
            ground.arena,
            ground.dtype,
            seed=options.seed,
            device=device,
            blocks=ground.blocks,
            generation=generation,
            few=options.quick,
        )
        for choice, plan in search.plans().items():
            for leaf in ground.arena.leaves:
                yield Job(search, leaf, choice, plan, "none" if ground.blocks is None else "block")


def named_rows(job: Job, style: str) -> Iterator[Row]:
    """Yield the worst named attack on a leaf, per kind."""
    found: dict[str, list[tuple[str, Found]]] = {}
    for attack, each in job.search.all_named(job.leaf, job.plan, style).items():
        found.setdefault(class_of(attack), []).append((attack, each))
    for kind, those in found.items():
        attack, worst = max(those, key=lambda entry: entry[1].ratio)
        disturbed = max(each.disturbed for _, each in those)
        yield row_of(job, kind, f"{attack}, {style}", worst._replace(tried=len(those), disturbed=disturbed))


def row_of(job: Job, kind: str, attack: str, found: Found) -> Row:
    dtype = job.search.dtype
    allowed = 1 + SLACK[dtype]
    sample = as_written(found.tokens) if not found.ratio <= allowed else None
    name = str(dtype).removeprefix("torch.")
    return Row(kind, job.search.arena.name, job.leaf, job.choice, name, job.compile, attack, found.tried, found.ratio,
               found.disturbed, allowed, sample)  # fmt: skip


def full_models(options: argparse.Namespace, device: torch.device, dtypes: list[torch.dtype]) -> Iterator[Row]:
    """Yield rows of full models: language models, users' windows, packed documents, adapters, foreign modules."""
    names = ("gpt-tied", "pooled") if options.quick else tuple(TARGETS)
    for name in names:
        for dtype in dtypes:
            blocks = CompiledRunner() if device.type == "cuda" and not options.quick else None
            target = on(TARGETS[name](dtype), device)
            ways = plans_of(target, dtype, methods=not options.quick, device=device)
            for choice, plan in ways.items():
                seen = measure(target, plan, STYLES["flat"](target.model.trainable), blocks=blocks)
                attack, ratio = seen.worst()
                kind, how = class_of(attack), "none" if blocks is None else "block"
                yield Row(kind, target.name, "all", choice, str(dtype).removeprefix("torch."), how, attack,
                          len(seen.ratios), ratio, 0.0, 1 + SLACK[dtype])  # fmt: skip


def crowds(options: argparse.Namespace, device: torch.device, dtypes: list[torch.dtype]) -> Iterator[Row]:
    """Yield rows of honest samples, each in a crowd that cancels, on every leaf by every choice."""
    arena = joined(BRIEF if options.quick else MANY)
    for dtype in dtypes:
        plans: dict[str, Plan] = {}
        for leaf in arena.leaves:
            target = on(
                crowded(arena, leaf, dtype, size=CROWD_SIZE // 4 if options.quick else CROWD_SIZE, honest=4), device
            )
            plans = plans or plans_of(target, dtype, methods=False, device=device)
            for choice, plan in plans.items():
                seen = measure(target, plan, STYLES["flat"](arena.model.trainable))
                attack, ratio = seen.worst()
                yield Row(class_of(attack), arena.name, leaf, choice, str(dtype).removeprefix("torch."), "none", attack,
                          len(seen.ratios), ratio, 0.0, 1 + SLACK[dtype])  # fmt: skip


def run(options: argparse.Namespace, device: torch.device, say: Callable[[str], None]) -> list[Row]:
    """Return all rows; the search runs until the time is over, which excludes compilation."""
    dtypes = [getattr(torch, name) for name in options.dtype]
    start = time.perf_counter()
    todo = list(jobs(options, device, dtypes))
    for job in {id(job.search): job for job in todo if job.search.blocks is not None}.values():
        job.search.climb(job.leaf, job.plan, seconds=0.0)
    say(f"{len(todo)} leaves and choices; compiled after {time.perf_counter() - start:.0f} s")
    start, seconds = time.perf_counter(), 60.0 * options.minutes
    rows: list[Row] = []

    def stop(share: float, what: str) -> bool:
        over = time.perf_counter() - start > share * seconds
        if over:
            say(f"{what}: stopped at {share:.0%} of the time")
        return over

    for share, what, found in ((0.15, "full models", full_models), (0.25, "crowds", crowds)):
        for row in found(options, device, dtypes):
            rows.append(row)
            if stop(share, what):
                break
        say(f"{what}: {sum(row.cases for row in rows)} cases so far, {time.perf_counter() - start:.0f} s")
    draw = random.Random(options.seed)
    draw.shuffle(todo)
    done: list[Job] = []
    for i, job in enumerate(todo):
        rows += named_rows(job, "flat" if options.quick else list(STYLES)[i % len(STYLES)])
        done.append(job)
        if stop(0.8, f"named attacks, {len(done)} of {len(todo)} leaves and choices"):
            break
    say(f"named attacks: {sum(row.cases for row in rows)} cases, {time.perf_counter() - start:.0f} s")
    searched = 0
    while (left := start + seconds - time.perf_counter()) > 0 or not searched:
        job = draw.choice(done)
        found = job.search.climb(job.leaf, job.plan, seconds=min(TURN_S, left))
        rows.append(row_of(job, "search", "search", found))
        searched += 1
    say(f"search: {sum(row.cases for row in rows)} cases in all, {time.perf_counter() - start:.0f} s")
    return rows


def tables(rows: list[Row], title: str) -> list[Table]:
    """Return two tables of the rows: by attack, and by choice."""
    result = []
    for heading, key in (("attack", lambda row: row.kind), ("choice", lambda row: f"{row.choice}, {row.compile}")):
        table = Table(title=title)
        for column in (heading, "dtype", "cases", "worst ratio", "disturbed", "allowed", "where"):
            table.add_column(column, justify="left" if column in (heading, "dtype", "where") else "right")
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            groups.setdefault((row.dtype, key(row)), []).append(row)
        for (dtype, name), those in sorted(groups.items()):
            worst = max(those, key=lambda row: row.ratio)
            disturbed = max(row.disturbed for row in those)
            where = f"{worst.model}: {worst.leaf}, {worst.attack if heading == 'choice' else worst.choice}"
            table.add_row(name, dtype, str(sum(row.cases for row in those)), f"{worst.ratio:.9g}", f"{disturbed:.1e}",
                          f"{worst.allowed:.7g}", where)  # fmt: skip
        result.append(table)
    return result


def report(rows: list[Row], device: torch.device) -> dict[str, Any]:
    """Return the content of ``--out``: the environment, and the worst case per model, leaf, choice and attack."""
    merged: dict[tuple, Row] = {}
    for row in rows:
        key = row[:6]
        old = merged.get(key)
        worst = row if old is None or row.ratio > old.ratio else old
        cases = row.cases + (0 if old is None else old.cases)
        disturbed = max(row.disturbed, 0.0 if old is None else old.disturbed)
        merged[key] = worst._replace(cases=cases, disturbed=disturbed)
    return {
        "benchmark": "worst_sample",
        "hardware": hardware(device),
        "versions": versions(device),
        "commit": current_commit(),
        "command": " ".join(["python", "-m", "benchmarks.worst_sample", *sys.argv[1:]]),
        "rows": [row._asdict() for row in merged.values()],
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Search for the sample that moves the clipped sum the most.")
    parser.add_argument("--minutes", type=float, default=10.0, help="total time, without compilation")
    parser.add_argument("--quick", action="store_true", help="few models, about 75 seconds plus compilation")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], metavar="DTYPE",
                        choices=["float32", "bfloat16", "float16", "float64"], help="compute dtypes")  # fmt: skip
    parser.add_argument("--joined", action="store_true", help="leaves share one model, as on a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="aot_eager", help="torch.compile backend of compiled blocks on a CPU")
    parser.add_argument("--out", type=Path, metavar="JSON", help="write the rows to this file")
    return parser


def main() -> None:
    options = arguments().parse_args()
    if options.quick:
        options.minutes = min(options.minutes, 1.25)
    device = torch.device(options.device)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    rows = run(options, device, lambda line: console.print(line))
    for table in tables(rows, f"{hardware(device)}, torch {torch.__version__}"):
        console.print(table)
    console.print(f"{sum(row.cases for row in rows)} cases, worst ratio {max(row.ratio for row in rows):.9g}")
    broken = sorted((row for row in rows if row.broken), key=lambda row: -row.ratio)
    for row in broken[:20]:
        where = f"{row.model}, {row.leaf}, {row.choice}, {row.dtype}, compile {row.compile}"
        console.print(f"broken: {where}, {row.attack}: {row.ratio:.6g}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report(rows, device), indent=1) + "\n")
        console.print(f"written to {options.out}")
    sys.exit(f"{len(broken)} rows above what is allowed" if broken else 0)


if __name__ == "__main__":
    main()
