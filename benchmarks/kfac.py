"""K-FAC against AdamW and SGD: steps and seconds to a given loss, the cost of a step, and the cost of an inverse.

    python -m benchmarks.kfac                                    # on the CPU, about ten minutes
    python -m benchmarks.kfac --sections digits inverses
    python -m benchmarks.kfac --gpu                              # gpt2-medium on a CUDA device, two minutes

Prints the page and writes ``benchmarks/results/kfac_<hardware>_<yyyymm>.{json,md}``, or ``--out``. A section that is
run again replaces its rows.

Every optimizer has its own grid of settings; AdamW's is wide enough that its best is not at an edge. For each, the
setting with the fewest steps to the loss is reported, as a median over seeds. A setting is given up once it has taken
as many steps as the best of its optimizer so far. The loss is that of a fixed set of training samples, evaluated
between steps and not timed. Batches are the same for all. K-FAC measures and inverts as often as its row says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.device import free, peak_gib, synchronize
from benchmarks.report import current_commit, hardware, slug, versions
from fdp import keys, tree
from fdp.data import datasets
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.linear_maps import apply_map
from fdp.gradients.plan import Method, make_plan
from fdp.kfac import KfacConfig, Where, auto, everything, kfac
from fdp.kfac.inversion.woodbury import Power, woodbury_cholesky, woodbury_map
from fdp.kfac.optimizer import Kfac
from fdp.kfac.state import find_kfac_state
from fdp.model import Model
from fdp.models import build
from fdp.optimizers import Optimizer, adamw, sgd
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.microbatches import Dataset
from fdp.privacy.sampling import poisson
from fdp.step import init_state, make_train_step
from fdp.types import Batch, Tree

RHO = 0.25
"""Flops that ``auto`` may add to a layer's part of a gpt2-medium step, relative; factors and inverses run slower."""
RESULTS = Path(__file__).parent / "results"
Rows = list[dict[str, Any]]


class Task(NamedTuple):
    """A model, its data, and the loss to reach on ``probe`` samples, evaluated every ``every`` steps."""

    model: Model
    dataset: Dataset
    batch_size: int
    loss: float
    probe: int
    every: int
    most: int
    seeds: int


class Contender(NamedTuple):
    """An optimizer with one setting of its grid; ``make`` returns it and, for K-FAC, its curvature."""

    name: str
    setting: str
    make: Callable[[Model, Tree], tuple[Optimizer, Kfac | None]]


def adam(rate: float, *, b2: float) -> Contender:
    optimizer = adamw(rate, b2=b2, weight_decay=0.0)
    return Contender("adamw", f"learning rate {rate:g}, beta2 {b2:g}", lambda model, example: (optimizer, None))


def descent(rate: float, *, momentum: float) -> Contender:
    optimizer = sgd(rate, momentum=momentum)
    return Contender("sgd", f"learning rate {rate:g}, momentum {momentum:g}", lambda model, example: (optimizer, None))


def natural(*, damping: float, kl_clip: float, momentum: float, period: int) -> Contender:
    """Return K-FAC at one setting; the trust region sets the step size, and the learning rate of 1 is a cap."""
    config = KfacConfig(
        damping=damping,
        kl_clip=kl_clip,
        momentum=momentum,
        factor_period=period,
        inverse_period=period,
        policy=everything(),
    )

    def make(model: Model, example: Tree) -> tuple[Optimizer, Kfac]:
        curvature = kfac(model, example, learning_rate=1.0, config=config)
        return curvature.optimizer, curvature

    said = f"damping {damping:g}, KL clip {kl_clip:g}, momentum {momentum:g}, period {period}"
    return Contender("kfac", said, make)


def digits_task(*, batch_size: int = 64) -> tuple[Task, list[Contender]]:
    model = build("mlp")
    dataset = datasets.load("digits", context=None, field="text", vocab_size=datasets.BYTE_VOCAB_SIZE)
    grid = [adam(lr, b2=b2) for lr in (2e-2, 1e-2, 4e-2) for b2 in (0.999, 0.95)]
    grid += [descent(lr, momentum=m) for lr in (0.4, 0.2, 0.8, 1.6) for m in (0.8, 0.9, 0.6)]
    grid += [natural(damping=0.03, kl_clip=c, momentum=0.8, period=1) for c in (1e-2, 3e-2, 3e-3)]
    grid += [natural(damping=d, kl_clip=c, momentum=m, period=1) for d in (0.1, 0.01) for c, m in GENTLE_OR_BOLD]
    grid += [natural(damping=0.01, kl_clip=0.3, momentum=0.5, period=1)]
    grid += [natural(damping=d, kl_clip=c, momentum=0.5, period=1) for d in (0.003, 0.001) for c in (0.1, 0.3)]
    grid += [natural(damping=0.03, kl_clip=c, momentum=m, period=10) for c, m in GENTLE_OR_BOLD]
    return Task(model, dataset, batch_size, 0.15, len(dataset), 1, 120, 5), grid


GENTLE_OR_BOLD = ((1e-2, 0.8), (1e-1, 0.5))
"""KL clip and momentum: short steps with more momentum, or long steps with less."""


def nano_task() -> tuple[Task, list[Contender]]:
    model = build("gpt-nano", context=32)
    dataset = datasets.load("stdlib", context=32, field="text", vocab_size=datasets.BYTE_VOCAB_SIZE)
    grid = [adam(lr, b2=b2) for lr, b2 in ((1e-3, 0.95), (1e-3, 0.999), (5e-4, 0.95), (2e-3, 0.95))]
    grid += [descent(lr, momentum=0.9) for lr in (0.1, 0.2)]
    grid += [natural(damping=d, kl_clip=3e-3, momentum=0.8, period=1) for d in (1e-2, 3e-2, 3e-3)]
    return Task(model, dataset, 32, 2.75, 64, 2, 160, 3), grid


def race(task: Task, contender: Contender, seed: int, *, most: int) -> dict[str, Any]:
    """Train until the loss is reached; return steps (None if ``most`` do not suffice) and seconds."""
    model, dataset, size = task.model, task.dataset, task.batch_size
    params = model.init(keys.key(seed))
    example = dataset.fetch(np.arange(size) % len(dataset))
    mechanism = Mechanism(poisson(len(dataset), expected_batch_size=size), flat(max_norm=1.0), 0.0)
    optimizer, curvature = contender.make(model, example)
    plan = make_plan(model, params, example, method=Method.NONE)
    step = make_train_step(model, optimizer, mechanism=mechanism, plan=plan)
    state = init_state(model, params, optimizer, mechanism)
    draw, mask = np.random.default_rng(seed), torch.ones(size)
    probe = dataset.fetch(np.linspace(0, len(dataset) - 1, task.probe).astype(np.int64))
    seconds: list[float] = []
    reached, loss = None, float("nan")
    for t in range(most):
        microbatch = dataset.fetch(draw.integers(0, len(dataset), size))
        batch = Batch(tree.map(lambda leaf: leaf.unsqueeze(0), microbatch), mask.unsqueeze(0))
        start = time.perf_counter()
        key = keys.key(seed)
        if curvature is not None:
            state = curvature.refresh(state, microbatch, mask, key, t)
        state, _ = step(state, batch, key)
        seconds.append(time.perf_counter() - start)
        if (t + 1) % task.every == 0:
            with torch.no_grad():
                loss = float(model.loss(state.params, probe).mean())
            if loss <= task.loss or not np.isfinite(loss):
                reached = t + 1 if loss <= task.loss else None
                break
    failures = 0 if curvature is None else int(find_kfac_state(state.opt).failures)
    return {"steps": reached, "seconds": sum(seconds), "per_step": sum(seconds) / len(seconds), "failures": failures}


def race_all(make: Callable[[], tuple[Task, list[Contender]]], say: Callable[[str], None]) -> Rows:
    """Return a row for every setting of every optimizer: one seed for all, the others for the best of each."""
    task, contenders = make()
    rows: Rows = []
    firsts = []
    for contender in contenders:
        most = min([row["each"][0] for row in rows if _reached(row, contender)], default=task.most)
        firsts.append(race(task, contender, 0, most=most))
        rows.append(_row(task, contender, firsts[-1:], most))
        say(f"{contender.name:6} {contender.setting:60} steps {rows[-1]['each']} of {most}")
    for name in dict.fromkeys(contender.name for contender in contenders):
        own = [i for i, row in enumerate(rows) if row["optimizer"] == name and row["steps"] is not None]
        if own:
            best = min(own, key=lambda i: rows[i]["steps"])  # the first of equals
            runs = [race(task, contenders[best], seed, most=task.most) for seed in range(1, task.seeds)]
            rows[best] = _row(task, contenders[best], [firsts[best], *runs], task.most) | {"best": True}
            say(f"{name:6} best of its grid: {contenders[best].setting}: steps {rows[best]['each']}")
    return rows


def _row(task: Task, contender: Contender, runs: list[dict[str, Any]], most: int) -> dict[str, Any]:
    counts = [run["steps"] for run in runs]
    return {
        "optimizer": contender.name,
        "setting": contender.setting,
        "best": False,
        "steps": statistics.median(counts) if None not in counts else None,
        "each": counts,
        "seconds": statistics.median(run["seconds"] for run in runs),
        "seconds_per_step": statistics.median(run["per_step"] for run in runs),
        "failures": sum(run["failures"] for run in runs),
        "loss": task.loss,
        "most": most,
    }


def _reached(row: Mapping[str, Any], contender: Contender) -> bool:
    return row["optimizer"] == contender.name and row["steps"] is not None


def digits(say: Callable[[str], None]) -> Rows:
    """The digits classifier: 64-128-10, batch 64."""
    return race_all(digits_task, say)


def digits_large(say: Callable[[str], None]) -> Rows:
    """The same classifier and grids, batch 512. Added after batch 64 was run, where K-FAC gained less: with less
    gradient noise the direction matters more."""
    return race_all(lambda: digits_task(batch_size=512), say)


def nano(say: Callable[[str], None]) -> Rows:
    """gpt-nano at context 32 on the embedded text, batch 32: 1024 tokens. The loss, in nats per byte, begins at 5.5; a
    model that knows only the byte frequencies has 3.1. To a loss of 2.9, tried first on one seed, K-FAC took about 0.55
    of AdamW's steps."""
    return race_all(nano_task, say)


def inverses(say: Callable[[str], None]) -> Rows:
    """Time the inverse of one side of p features from n columns, and its product with a gradient of 256 columns."""
    p, d, damping, rows = 1024, 256, 1e-3, []
    draw = torch.Generator().manual_seed(0)
    y = torch.randn(p, d, generator=draw)
    eye = torch.eye(p)
    for n in (64, 128, 256, 448, 512, 768):
        u = torch.randn(p, n, generator=draw)

        def dense(u: Tensor = u, n: int = n) -> Tensor:
            return torch.cholesky_inverse(torch.linalg.cholesky(u @ u.T / n + damping * eye))

        def eigen(u: Tensor = u, n: int = n) -> Tensor:
            values, vectors = torch.linalg.eigh(u @ u.T / n)
            return (vectors / (values + damping)) @ vectors.T

        inverse = dense()
        low = woodbury_cholesky(u, weight=float(n), damping=damping)
        error = float((apply_map(low, y) - inverse @ y).norm() / (inverse @ y).norm())
        row = {
            "p": p,
            "n": n,
            "d": d,
            "error": error,
            "dense_invert": _median(dense),
            "dense_eigen": _median(eigen, 2),
            "woodbury_invert": _median(lambda u=u, n=n: woodbury_cholesky(u, weight=float(n), damping=damping)),
            "woodbury_eigen": _median(
                lambda u=u, n=n: woodbury_map(u, weight=float(n), damping=damping, power=Power.INVERSE)
            ),
            "dense_apply": _median(lambda m=inverse: m @ y),
            "woodbury_apply": _median(lambda low=low: apply_map(low, y)),
        }
        rows.append(row)
        say(f"p {p} n {n}: {row}")
    return rows


def _median(act: Callable[[], Any], times: int = 5) -> float:
    act()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


# On a GPU


def medium(say: Callable[[str], None], *, layers: int = 24, steps: int = 40) -> Rows:
    """gpt2-medium, bfloat16, blocks compiled: AdamW, and K-FAC by ``auto`` at period 10; microbatches of 8 x 1024."""
    from fdp.models import LANGUAGE, GPTConfig, gpt

    device = torch.device("cuda")
    config = LANGUAGE["gpt2-medium"]
    assert isinstance(config, GPTConfig)
    model = gpt(config._replace(layers=layers), name="gpt2-medium")
    size, rows = 8, []
    tokens = torch.randint(0, 50257, (8, size, 1025), generator=torch.Generator().manual_seed(0)).to(device)
    for microbatches in (1, 4):
        for name in ("adamw", "kfac"):
            free(device)
            row = step_cost(model, tokens, name, compile=Compile.BLOCK, steps=steps, microbatches=microbatches)
            rows.append(row)
            say(f"{name}: {row}")
    return rows


def step_cost(
    model: Model, tokens: Tensor, name: str, *, compile: Compile, steps: int, microbatches: int = 1
) -> dict[str, Any]:
    """Return a row: milliseconds of an average step on ``tokens`` (count, samples, context + 1) and its parts.

    Each step takes ``microbatches`` of them; every tenth step refresh_seconds the factors on one microbatch.
    """
    device, size = tokens.device, tokens.shape[1]
    begin = time.perf_counter()
    params = model.init(keys.key(0).to(device))
    example = {"tokens": tokens[0]}
    mechanism = Mechanism(poisson(1 << 20, expected_batch_size=size * microbatches), flat(max_norm=1.0), 0.0)
    optimizer, curvature = adamw(1e-4, weight_decay=0.1), None
    if name == "kfac":
        config = KfacConfig(damping=3e-2, policy=auto(rho=RHO), store=Where.DEVICE)
        runner = CompiledRunner() if compile is Compile.BLOCK else EAGER
        curvature = kfac(
            model, example, learning_rate=0.1, config=config, dtype=torch.bfloat16, execution=Execution(runner=runner)
        )
        optimizer = curvature.optimizer
    plan = make_plan(model, params, example, method=Method.NONE, dtype=torch.bfloat16)
    graph = device.type == "cuda"
    step = make_train_step(
        model,
        optimizer,
        mechanism=mechanism,
        plan=plan,
        donate=("state",),
        execution=make_execution(compile=compile, cuda_graph=graph),
    )
    state = init_state(model, params, optimizer, mechanism)
    del params
    mask, key = torch.ones(size, device=device), keys.key(1).to(device)
    step_seconds, refresh_seconds, losses = [], [], mask
    for t in range(10 + steps):
        chosen = [(t * microbatches + i) % len(tokens) for i in range(microbatches)]
        microbatch = {"tokens": tokens[chosen[0]]}
        batch = Batch({"tokens": tokens[chosen]}, mask.expand(microbatches, size).contiguous())
        synchronize(device)
        start = time.perf_counter()
        if curvature is not None:
            state = curvature.refresh(state, microbatch, mask, key, t, donate=True)
            synchronize(device)
        middle = time.perf_counter()
        state, (losses, *_) = step(state, batch, key)
        synchronize(device)
        if t >= 10:  # compiled and captured by then
            step_seconds.append(time.perf_counter() - middle)
            refresh_seconds += [middle - start] if t % 10 == 0 else []
    one, other = statistics.median(step_seconds), statistics.median(refresh_seconds)
    rows = () if curvature is None else curvature.plan.rows
    return {
        "optimizer": name,
        "batch_size": size * microbatches,
        "context": tokens.shape[2] - 1,
        "ms": 1e3 * (one + other / 10),
        "step_ms": 1e3 * one,
        "refresh_ms": 1e3 * other,
        "peak_gib": peak_gib(device),
        "loss": float(losses.mean()),
        "seconds_in_all": time.perf_counter() - begin,
        "failures": 0 if curvature is None else int(find_kfac_state(state.opt).failures),
        "forms": [f"{row.layer.weight}: {row.left.value} x {row.right.value}; {row.why}" for row in rows[:12]],
    }


SECTIONS: dict[str, Callable[[Callable[[str], None]], Rows]] = {
    "digits": digits,
    "digits_large": digits_large,
    "nano": nano,
    "inverses": inverses,
}
GPU_SECTIONS: dict[str, Callable[[Callable[[str], None]], Rows]] = {"medium": medium}


TITLES = {
    "digits": "Digits classifier",
    "digits_large": "Digits classifier, large batches",
    "nano": "gpt-nano",
}


# The page


def page(content: Mapping[str, Any]) -> str:
    """Return the Markdown page of a report."""
    sections: Mapping[str, Rows] = content["sections"]
    lines = [
        f"# K-FAC, {content['month']}",
        "",
        f"Command `{content['command']}` at commit {content['commit']}; {content['hardware']}, "
        f"{', '.join(f'{name} {number}' for name, number in content['versions'].items())}; float32 unless said "
        "otherwise.",
        *([f"Load: {content['load']}; beside other work, seconds are overestimates."] if "load" in content else []),
        "",
    ]
    for name, title in TITLES.items():
        if name in sections:
            lines += _loss_table(title, " ".join((SECTIONS[name].__doc__ or "").split()), sections[name])
    if "inverses" in sections:
        lines += _inverse_table(sections["inverses"])
    if "medium" in sections:
        lines += _gpu_table(sections["medium"])
    return "\n".join(lines) + "\n"


def _loss_table(title: str, about: str, rows: Rows) -> list[str]:
    lines = [
        f"## {title}",
        "",
        f"{about} Steps to a training loss of {rows[0]['loss']:g}, at most {rows[0]['most']}; the best setting of each "
        "optimizer on the first seed (bold) is run on all seeds, that one included, the others on one, and no further "
        "than the best before them.",
        "",
        "| optimizer | setting | steps (median) | each seed | seconds | ms per step |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        mark = "**" if row["best"] else ""
        steps = f"not in {row['most']}" if row["steps"] is None else f"{row['steps']:g}"
        each = ", ".join("-" if n is None else str(n) for n in row["each"])
        lines.append(
            f"| {mark}{row['optimizer']}{mark} | {row['setting']} | {mark}{steps}{mark} | {each} | "
            f"{row['seconds']:.2f} | {1e3 * row['seconds_per_step']:.1f} |"
        )
    best = {row["optimizer"]: row for row in rows if row["best"] and row["steps"] is not None}
    if {"adamw", "kfac"} <= best.keys():
        a, k = best["adamw"], best["kfac"]
        ratio = k["steps"] / a["steps"]
        met = "Met" if ratio < 0.5 else "**Missed**"
        lines += [
            "",
            f"- **K-FAC's steps / AdamW's: {ratio:.2f}** (target: below 0.5). {met}. Seconds: "
            f"{k['seconds'] / a['seconds']:.2f} of AdamW's; a step costs "
            f"{k['seconds_per_step'] / a['seconds_per_step']:.2f} of AdamW's, measuring included. Layers that kept "
            f"their last inverse: {k['failures']}.",
        ]
    return [*lines, ""]


def _inverse_table(rows: Rows) -> list[str]:
    lines = [
        "## One inverse, and applying it",
        "",
        f"A side of p = {rows[0]['p']} features from n columns, beside one of {rows[0]['d']}: milliseconds, median.",
        "",
        "| n | Cholesky, dense | Woodbury | eigenvalues, dense | Woodbury | apply, dense | Woodbury | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = ("dense_invert", "woodbury_invert", "dense_eigen", "woodbury_eigen", "dense_apply", "woodbury_apply")
    for row in rows:
        cells = " | ".join(f"{1e3 * row[name]:.2f}" for name in names)
        lines.append(f"| {row['n']} | {cells} | {row['error']:.0e} |")
    below = [row for row in rows if 2 * row["n"] < row["p"]]
    worst = max(row["woodbury_apply"] / row["dense_apply"] for row in below)
    make = max(row["woodbury_invert"] / row["dense_invert"] for row in below)
    return [*lines, "", f"- For n < p/2: applying takes at most {worst:.2f} of dense, inverting {make:.2f}.", ""]


def _gpu_table(rows: Rows) -> list[str]:
    lines = [
        "## gpt2-medium",
        "",
        f"{medium.__doc__} `auto` with rho {RHO}, factors on the device.",
        "",
        "| optimizer | samples | ms per step | of which the step | one refresh | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = " | ".join(f"{row[name] or 0.0:.1f}" for name in ("ms", "step_ms", "refresh_ms", "peak_gib"))
        lines.append(f"| {row['optimizer']} | {row['batch_size']} | {numbers} |")
    by_name = {(row["optimizer"], row["batch_size"]): row for row in rows}
    lines += [""]
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        if ("adamw", size) in by_name and ("kfac", size) in by_name:
            ratio = by_name["kfac", size]["ms"] / by_name["adamw", size]["ms"]
            met = "Met" if ratio < 1.5 else "**Missed**"
            lines.append(f"- **K-FAC / AdamW, {size} samples: {ratio:.2f}** (target: below 1.5). {met}.")
    return [*lines, ""]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the sections that need a CUDA device")
    parser.add_argument("--sections", nargs="+", choices=[*SECTIONS, *GPU_SECTIONS], metavar="SECTION")
    parser.add_argument("--out", type=Path, help="the JSON file; default: benchmarks/results/kfac_<hardware>_<month>")
    parser.add_argument("--hardware", help="its name; default: as the system reports it")
    parser.add_argument("--commit", help="label of the rows if there is no git")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if options.gpu else "cpu")
    known = GPU_SECTIONS if options.gpu else SECTIONS
    now = datetime.now(UTC)
    name = options.hardware or hardware(device)
    out = options.out or RESULTS / f"kfac_{slug(name)}_{now:%Y%m}.json"
    content: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"sections": {}}
    content |= {
        "hardware": name
        if device.type == "cuda"
        else f"{os.environ.get('OMP_NUM_THREADS', os.cpu_count())} threads of {name}",
        "versions": versions(device),
        "commit": options.commit or current_commit(),
        "command": "python -m benchmarks.kfac" + (" --gpu" if options.gpu else ""),
        "month": f"{now:%B %Y}",
    }
    for section in options.sections or known:
        content["sections"][section] = known[section](lambda text: print(text, file=sys.stderr, flush=True))
        content["load"] = f"{os.getloadavg()[2]:.1f} on {os.cpu_count()} cores, a mean over 15 minutes"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=1) + "\n")
        out.with_suffix(".md").write_text(page(content))
    print(out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
