"""Seconds and memory of one training step on the CPU: every method of fdp, plain torch, and Opacus.

    make bench-cpu            # prints one table; writes runs/bench_cpu.json

All rows train the same model (gpt-nano with an *untied* head, because Opacus' ghost mode refuses tied weights) from the
same weights on the same 16 samples, eagerly and in float32, with AdamW, flat clipping and noise multiplier 1. Plain
torch and Opacus run the same architecture as an ``nn.Module`` with torch's fused AdamW; Opacus is set up by its own
``PrivacyEngine.make_private``. fdp draws its noise with ChaCha20, Opacus with torch's generator (``secure_mode`` off,
the fast default).

Before anything is timed, one step of every row (no noise, SGD) is compared with a loop over single samples: losses,
gradient norms, parameters after the step. A row that differs is not timed.

Each row has its own process, which uses all cores, keeps the memory it frees (``fdp.cli.allocator``, as ``fdp train``
does; it makes all rows faster) and waits between its turns. A turn is a few steps, of which the first is shown apart:
it finds the caches full of other rows' data, which a step of a run that trains does not. A round is one turn of every
row, so that a disturbance of the machine affects all of them; times are medians over all rounds. Memory is the growth
of the process's peak resident set over all its steps, after model and batch are in place.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from opacus import PrivacyEngine  # pyright: ignore[reportMissingImports] (the extra `bench` installs it)
from rich.console import Console
from rich.status import Status
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fdp import keys, tree
from fdp.checks.first_call import Checks
from fdp.cli.allocator import keep_freed_memory
from fdp.data import datasets
from fdp.gradients.plan import Method, make_plan
from fdp.model import Model
from fdp.models import LANGUAGE, build
from fdp.optimizers import adamw, sgd
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import init_state, make_train_step
from fdp.types import Flat, Tree

BATCH_SIZE = 16
MAX_NORM = 1.0
WARM_UP_ROUNDS = 1
ROUNDS = {128: 8, 512: 5}
STEPS_PER_TURN = 4
TARGETS = "targets: auto / none at most 1.35, best Opacus / auto at least 1.2"
OUT = Path("runs/bench_cpu.json")
# The same two optimizers for both sides: AdamW is timed, SGD with rate 1 shows the gradient that was applied.
OPTIMIZERS: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (
        adamw(1e-3, weight_decay=0.01),
        partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01, fused=True),
    ),
    "sgd": (sgd(1.0), partial(torch.optim.SGD, lr=1.0)),
}


class Observation(NamedTuple):
    """A row's state: losses at its current parameters, gradient norms of its last step, parameters."""

    losses: Float[Tensor, " batch"]
    norms: Float[Tensor, " batch"] | None
    params: Flat


Steps: TypeAlias = Generator[Callable[[], Observation], None, None]
"""The first ``next`` builds model and batch, each further one takes a step. Yields a function that observes it."""


def starting_point(context: int) -> tuple[Model, Tree, Int[Tensor, "batch tokens"]]:
    """Return model, initial parameters and batch, the same for every row."""
    model = build("gpt-nano", context=context, tied=False)
    dataset = datasets.load("stdlib", context=context)
    tokens = dataset.fetch(np.linspace(0, len(dataset) - 1, BATCH_SIZE).astype(np.int64))["tokens"]
    return model, model.init(keys.key(0)), tokens


def fdp_steps(context: int, *, noise: float, optimizer: str, method: Method) -> Steps:
    """Run fdp: the composed step, eager."""
    model, params, tokens = starting_point(context)
    noise = noise if method is not Method.NONE else 0.0
    sampling, clip = poisson(10_000, expected_batch_size=BATCH_SIZE), flat(max_norm=MAX_NORM)
    mechanism = Mechanism(sampling, clip, noise) if noise else without_noise(sampling, clip)
    plan = make_plan(model, params, {"tokens": tokens}, method=method)
    opt = OPTIMIZERS[optimizer][0]
    step = make_train_step(model, opt, mechanism=mechanism, plan=plan, checks=Checks.SKIPPED)  # timed
    batch = trusted_batch({"tokens": tokens.unsqueeze(0)}, torch.ones(1, BATCH_SIZE), sampling, step=None)
    key = keys.key(1)
    yield lambda: Observation(model.loss(params, {"tokens": tokens}), None, tree.flatten(params))
    state = init_state(model, params, opt, mechanism)
    while True:
        state, metrics = step(state, batch, key)

        def look(params: Tree = state.params, norms: Tensor = metrics.norms) -> Observation:
            losses = model.loss(params, {"tokens": tokens})
            return Observation(losses, None if method is Method.NONE else norms, tree.flatten(params))

        yield look


def torch_steps(context: int, *, noise: float, optimizer: str) -> Steps:
    """Run plain torch: an ``nn.Module`` and its mean loss, without privacy."""
    module, tokens = torch_module(context)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    criterion = nn.CrossEntropyLoss()
    yield lambda: Observation(sample_losses(module, tokens), None, by_path(module))
    opt = OPTIMIZERS[optimizer][1](module.parameters())
    while True:
        opt.zero_grad(set_to_none=True)
        criterion(module(inputs).flatten(0, 1), targets.flatten()).backward()
        opt.step()
        yield lambda: Observation(sample_losses(module, tokens), None, by_path(module))


def opacus_hooks_steps(context: int, *, noise: float, optimizer: str) -> Steps:
    """Run Opacus with per-sample gradients by hooks (its default)."""
    plain, tokens = torch_module(context)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    criterion = nn.CrossEntropyLoss()
    yield lambda: Observation(sample_losses(plain, tokens), None, by_path(plain))
    module, opt, _ = private(plain, tokens, noise=noise, optimizer=optimizer, grad_sample_mode="hooks")
    while True:
        opt.zero_grad(set_to_none=True)
        criterion(module(inputs).flatten(0, 1), targets.flatten()).backward()
        opt.step()

        def look() -> Observation:
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in opt.grad_samples]).norm(dim=0)
            return Observation(sample_losses(plain, tokens), norms, by_path(plain))

        yield look


def opacus_ghost_steps(context: int, *, noise: float, optimizer: str) -> Steps:
    """Run Opacus with ghost clipping: norms in a first backward, the clipped sum in a second."""
    plain, tokens = torch_module(context)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    yield lambda: Observation(sample_losses(plain, tokens), None, by_path(plain))
    module, opt, criterion, _ = private(plain, tokens, noise=noise, optimizer=optimizer, grad_sample_mode="ghost")
    while True:
        opt.zero_grad(set_to_none=True)
        logits = module(inputs)
        criterion(logits.flatten(0, 1), targets.flatten(), shape=logits.shape).backward()
        opt.step()
        yield lambda: Observation(sample_losses(plain, tokens), module.per_sample_gradient_norms, by_path(plain))


ROWS: dict[str, Callable[..., Steps]] = {
    **{method.value: partial(fdp_steps, method=method) for method in Method},
    "torch": torch_steps,
    "opacus_hooks": opacus_hooks_steps,
    "opacus_ghost": opacus_ghost_steps,
}
NOT_PRIVATE = ("none", "torch")
OPACUS = ("opacus_hooks", "opacus_ghost")
TITLES = {"none": "fdp none", "torch": "torch nn.Module"}
TITLES |= {"opacus_hooks": "Opacus hooks", "opacus_ghost": "Opacus ghost"}


class GPTBlock(nn.Module):
    """The block of ``fdp.models.gpt`` as a module."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        B, T, D = h.shape
        mixture = self.qkv(self.norm1(h)).reshape(B, T, self.heads, 3, D // self.heads)  # q, k, v head by head
        q, k, v = mixture.transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        h = h + self.out(mixed)
        return h + self.down(F.gelu(self.up(self.norm2(h)), approximate="tanh"))


class GPT(nn.Module):
    """The model of ``fdp.models.gpt``, untied, from modules that Opacus has rules for; see :func:`by_path`."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int, vocab_size: int):
        super().__init__()
        tokens, positions = nn.Embedding(vocab_size, width), nn.Embedding(context, width)
        self.embed = nn.ModuleDict({"tokens": tokens, "positions": positions})
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(width), "weight": nn.Linear(width, vocab_size, bias=False)})

    def forward(self, ids: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens vocab"]:
        places = torch.arange(ids.shape[1]).repeat(ids.shape[0], 1)  # one row per sample, for Opacus
        h = self.embed["tokens"](ids) + self.embed["positions"](places)
        for block in self.blocks:
            h = block(h)
        return self.head["weight"](self.head["norm"](h))


def torch_module(context: int) -> tuple[GPT, Int[Tensor, "batch tokens"]]:
    """Return the starting point as an ``nn.Module``, and the batch."""
    _, params, tokens = starting_point(context)
    config = LANGUAGE["gpt-nano"]
    module = GPT(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        context=context,
        vocab_size=config.vocab_size,
    )
    mine, theirs = by_path(module), tree.flatten(params)
    assert mine.keys() == theirs.keys()
    for path, leaf in mine.items():
        leaf.copy_(theirs[path])
    return module, tokens


def private(module: nn.Module, tokens: Tensor, *, noise: float, optimizer: str, grad_sample_mode: str) -> Any:
    """Set up Opacus as its users do, but without sampling: every row gets the same batch."""
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    return PrivacyEngine().make_private(
        module=module,
        optimizer=OPTIMIZERS[optimizer][1](module.parameters()),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(tokens), batch_size=len(tokens)),
        noise_multiplier=noise,
        max_grad_norm=MAX_NORM,
        poisson_sampling=False,
        grad_sample_mode=grad_sample_mode,
    )


def by_path(module: nn.Module) -> Flat:
    """Return the module's parameters under fdp's names: ``qkv.weight`` is ``qkv``, ``qkv.bias`` is ``qkv_bias``."""
    named = {name.removesuffix(".weight").replace(".bias", "_bias"): p for name, p in module.named_parameters()}
    return {path: named[path].detach() for path in sorted(named)}


def sample_losses(module: nn.Module, tokens: Int[Tensor, "batch tokens"]) -> Float[Tensor, " batch"]:
    """Return the mean cross-entropy of each sample."""
    with torch.no_grad():
        return _losses(module, tokens)


def _losses(module: nn.Module, tokens: Int[Tensor, "batch tokens"]) -> Float[Tensor, " batch"]:
    targets = tokens[:, 1:]
    logits = module(tokens[:, :-1]).transpose(1, 2)
    return F.cross_entropy(logits, targets, reduction="none").mean(1)


def one_by_one(context: int, *, max_norm: float) -> tuple[Observation, Observation]:
    """Return the state before and after one SGD step with rate 1, from ordinary backwards of single samples."""
    module, tokens = torch_module(context)
    before = Observation(sample_losses(module, tokens), None, {p: leaf.clone() for p, leaf in by_path(module).items()})
    parameters, norms = list(module.parameters()), []
    total = [torch.zeros_like(p) for p in parameters]
    for i in range(len(tokens)):
        gradient = torch.autograd.grad(_losses(module, tokens[i : i + 1]).sum(), parameters)
        norm = float(torch.stack([g.double().square().sum() for g in gradient]).sum().sqrt())
        for leaf, g in zip(total, gradient):
            leaf += g * min(1.0, max_norm / norm)
        norms.append(norm)
    with torch.no_grad():
        for p, leaf in zip(parameters, total):
            p -= leaf / len(tokens)
    return before, Observation(sample_losses(module, tokens), torch.tensor(norms), by_path(module))


def check(context: int, rows: Sequence[str]) -> dict[str, str]:
    """Return the errors of each row's first step; rows without errors are left out."""
    wrong = {}
    references = {bound: one_by_one(context, max_norm=bound) for bound in (MAX_NORM, float("inf"))}
    for row in rows:
        before, after = references[float("inf") if row in NOT_PRIVATE else MAX_NORM]
        steps = ROWS[row](context, noise=0.0, optimizer="sgd")
        first = next(steps)()
        moved = tree.map(lambda a, b: a - b, after.params, before.params)
        first = first._replace(params={path: leaf.clone() for path, leaf in first.params.items()})
        second = next(steps)()
        error = {
            "losses": (first.losses - before.losses).abs().max(),
            "losses after the step": (second.losses - after.losses).abs().max(),
            "update": tree.global_norm(tree.map(lambda a, b: a - b, second.params, after.params))
            / tree.global_norm(moved),
        }
        if second.norms is not None and after.norms is not None:
            error["norms"] = ((second.norms - after.norms) / after.norms).abs().max()
        allowed = {"losses": 1e-5, "losses after the step": 1e-4, "update": 1e-3, "norms": 1e-3}
        bad = [f"{what} off by {float(e):.1e}" for what, e in error.items() if not e <= allowed[what]]
        if bad:
            wrong[row] = ", ".join(bad)
    return wrong


def peak_memory() -> int:
    """Return the peak resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def worker(row: str, context: int, pipe: Connection) -> None:
    """Run a row in its own process: take and time as many steps as it is told to; told none, send its memory."""
    keep_freed_memory()
    steps = ROWS[row](context, noise=1.0, optimizer="adamw")
    next(steps)
    before = peak_memory()
    pipe.send(torch.get_num_threads())
    while count := pipe.recv():
        ends = [time.perf_counter()]
        for _ in range(count):
            next(steps)
            ends.append(time.perf_counter())
        pipe.send([end - start for start, end in pairwise(ends)])
    pipe.send(peak_memory() - before)


def measure(rows: list[str], context: int, rounds: int, status: Status) -> tuple[list[dict[str, Any]], int]:
    """Time ``rows`` in turn, ``rounds`` times; return the result rows and the number of threads per row."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes, threads = {}, [], 0
    for row in rows:
        pipes[row], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=worker, args=(row, context, theirs), daemon=True))
        processes[-1].start()
        theirs.close()  # so that the death of a worker raises EOFError here instead of blocking
        threads = pipes[row].recv()
    turns: dict[str, list[list[float]]] = {row: [] for row in rows}
    for turn in range(WARM_UP_ROUNDS + rounds):
        status.update(f"context {context}, round {turn + 1} of {WARM_UP_ROUNDS + rounds}")
        for row in rows:
            pipes[row].send(STEPS_PER_TURN)
            turns[row].append(pipes[row].recv())
    results = []
    for row in rows:
        pipes[row].send(0)
        timed = turns[row][WARM_UP_ROUNDS:]
        taken = [seconds for turn in timed for seconds in turn[1:]]
        low, high = np.quantile(taken, (0.2, 0.8))
        results.append(
            {
                "method": row,
                "context": context,
                "batch_size": BATCH_SIZE,
                "seconds_per_step": statistics.median(taken),
                "seconds_of_first_steps": statistics.median(turn[0] for turn in timed),
                "peak_memory_bytes": pipes[row].recv(),
                "seconds_20": float(low),
                "seconds_80": float(high),
            }
        )
    for process in processes:
        process.join()
    return results, threads


def ratios(mine: dict[str, dict[str, Any]], context: int) -> list[str]:
    """Return the line of the two ratios that matter; none if a row of them was not timed."""
    times = {row: result["seconds_per_step"] for row, result in mine.items()}
    opacus = [times[row] for row in OPACUS if row in times]
    if not opacus or not {"auto", "none"} <= set(times):
        return []
    dear, fast = times["auto"] / times["none"], min(opacus) / times["auto"]
    return [f"context {context}: auto / none = {dear:.2f}, best Opacus / auto = {fast:.2f}"]


def show(results: list[dict[str, Any]], wrong: dict[int, dict[str, str]], threads: int, console: Console) -> None:
    """Print the table, then the two ratios that matter."""
    table = Table(
        title=f"One step of gpt-nano (untied head), batch {BATCH_SIZE}, CPU, {threads} threads",
        caption=f"Median seconds of turns of {STEPS_PER_TURN} steps, one process per row; 'first': the first step of a "
        "turn, after other rows have used the caches; it is in no other column. Memory: growth of the peak "
        "resident set from before the first step. fdp draws its noise with ChaCha20, Opacus with torch's "
        "generator; none and torch train without privacy. Before timing, losses, norms and update of "
        "every row were compared with a loop over single samples.",
    )
    for column in ("context", "method", "seconds", "(20-80 %)", "first", "memory MiB", "x none", "x best Opacus"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    lines = []
    for context in wrong:
        mine = {result["method"]: result for result in results if result["context"] == context}
        times = {row: result["seconds_per_step"] for row, result in mine.items()}
        plain, opacus = times.get("none"), min((times[row] for row in OPACUS if row in times), default=None)
        for row in (row for row in ROWS if row in mine or row in wrong[context]):
            name = TITLES.get(row, f"fdp {row}")
            if row not in mine:
                table.add_row(str(context), name, f"not timed: {wrong[context][row]}")
                continue
            r = mine[row]
            table.add_row(
                str(context),
                name,
                f"{r['seconds_per_step']:.3f}",
                f"{r['seconds_20']:.3f}-{r['seconds_80']:.3f}",
                f"{r['seconds_of_first_steps']:.3f}",
                f"{r['peak_memory_bytes'] / 2**20:.0f}",
                f"{times[row] / plain:.2f}" if plain else "",
                f"{times[row] / opacus:.2f}" if opacus else "",
            )
        table.add_section()
        lines += ratios(mine, context)
    console.print(table)
    for line in [*lines, TARGETS]:
        console.print(line, highlight=False)


def main() -> None:
    """Check and measure all rows, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(description="Seconds and memory per private step on the CPU, against Opacus.")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(ROUNDS), help="sequence lengths")
    parser.add_argument("--rounds", type=int, help="turns of every row (default: 8 at 128 tokens, else 5)")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="what to time")
    arguments = parser.parse_args()
    keep_freed_memory()  # the environment of all rows
    console = Console(width=None if sys.stdout.isatty() else 100)
    spawn = multiprocessing.get_context("spawn")
    # This process computes nothing, because a child inherits its parent's peak memory.
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool, console.status("comparing all rows"):
        wrong = {context: pool.submit(check, context, arguments.rows).result() for context in arguments.contexts}
    results, threads = [], 0
    with console.status("starting") as status:
        for context in arguments.contexts:
            rows = [row for row in arguments.rows if row not in wrong[context]]
            found, threads = measure(rows, context, arguments.rounds or ROUNDS.get(context, 5), status)
            results += found
            for line in ratios({result["method"]: result for result in found}, context):
                console.print(line, highlight=False)
    show(results, wrong, threads, console)
    report = {
        "rows": results,
        "not_timed": {f"{row} at {context}": why for context in wrong for row, why in wrong[context].items()},
        "versions": {name: version(name) for name in ("torch", "opacus", "numpy")}
        | {"python": platform.python_version(), "machine": platform.machine()},
        "command": " ".join(["python", *sys.argv]),
        "torch_threads": threads,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"written to {OUT}", highlight=False)
    if any(wrong.values()):
        sys.exit("some rows were not timed: they differ from a loop over single samples")


if __name__ == "__main__":
    main()
