"""One way to measure a training step: check it, time it, note its memory, write the row; the next run goes on.

    time    CUDA events between consecutive steps; median, 20 and 80 % quantiles; new data and a new key every step
    memory  most bytes allocated in a step; of a captured step, from its capture on, which fills the graph's own pool
    check   three steps of a slice (two layers, few tokens, same widths and dtype, compiled and captured alike) equal
            ``materialize`` run eagerly; and at full size so do the norms of the first two steps (or ``auto``'s), but
            that those by Gram matrices may be above, as they are by design: the row says by how much

A mode that fails a check is not timed: its row says what was wrong. Modes are built one at a time in one process, and
what a mode made is freed before the next. The report is written after every cell, and a cell that it holds is not run
again.

    >>> report = Report(path, layers=36)
    >>> sweep(report, cases, modes, device=device)
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fdp import keys, timing, tree
from fdp.clipping import flat
from fdp.costs import NormBy
from fdp.mechanism import Mechanism
from fdp.methods import BUDGETED, CHOOSING, Method, Plan, make_plan
from fdp.model import Model
from fdp.optimizers import Optimizer, adamw
from fdp.rules import HALF
from fdp.sampling import poisson
from fdp.step import Compile, init_state, make_train_step
from fdp.types import Batch, Flat, Key, Step, Tree

Row: TypeAlias = dict[str, Any]

GIB = 2**30
OURS = ("none", "materialize", "ghost", "ghost_bk", "flash", "flash_bk", "auto")
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 0.0, 0.1, 1.0
"""Nothing is learnt while a step is timed, in any mode or baseline, though all its work is done. At its power limit a
GPU multiplies some numbers faster than others, and parameters that learn are other numbers than noised ones: of
GPT-2-Large at T = 8192, in turns on one H200 at 700 W, ``none`` took 497 ms at a rate of 1e-4 (1770 MHz) and 511 at 0
(1735 MHz), ``auto`` 515 and 512 (1705 MHz)."""
SLACK = 2e-2
"""How far losses, norms and the update may be from the reference, relative; bfloat16 takes up to half of it."""
LEAF_SLACK = 0.1
"""The same for the update of a single leaf."""
OVERSTATED = 4.0
"""Norms by Gram matrices may be above the reference by so many times what ``cover_of`` gives for independent tokens. Of
a model's tokens more cancels, and less is left beside the cover: 3.0, 2.6 and 2.0 times were seen of GPT-2-Large at
T = 2048, 4096 and 8192."""
BATCHES, MOST_STEPS, CHECKED_STEPS = 16, 300, 3


class Candidate(NamedTuple):
    """A mode, built. ``step(tokens, key)`` trains one step and returns losses; the rest looks at the last step."""

    step: Callable[[Tensor, Key], Tensor]
    norms: Callable[[], Tensor] | None = None
    params: Callable[[], Flat] | None = None
    graph: bool = False
    choices: dict[str, str] | None = None
    by_gram: bool = False


class Case(NamedTuple):
    """A model and the size of its batch. ``small`` is the slice to be checked: few layers and tokens, same widths.

    ``baseline(mode, model, batch_size, device, params)`` builds a mode that is not ours; with params, to be checked.
    ``microbatches``: into how many a private step of ours cuts the batch; the sum it clips and the noise are the same.
    """

    regime: str
    layers: int
    model: Model
    small: Model
    batch_size: int
    speed: Speed
    dtype: torch.dtype = torch.bfloat16
    memory_budget: float | None = None
    microbatches: int = 1
    baseline: Callable[[str, Model, int, torch.device, Tree | None], Candidate] | None = None

    @property
    def cell(self) -> Row:
        """What a row says of the case."""
        return {
            "regime": self.regime,
            "context": self.model.context,
            "batch_size": self.batch_size,
            "layers": self.layers,
        }


class Limits(NamedTuple):
    """Time at least ``least`` steps and ``seconds``, but no more than ``cap`` seconds; at least 3 steps."""

    seconds: float = 2.0
    least: int = 10
    cap: float = 20.0


class WrongError(Exception):
    """A mode computes something else than the reference."""


# Our modes


class Speed(NamedTuple):
    """How fdp's step is run: what is compiled, whether the whole is captured, whether choices are timed first."""

    compile: Compile
    cuda_graph: bool
    timed_plan: bool


EAGER = Speed(Compile.NONE, False, False)
FAST = Speed(Compile.BLOCK, True, True)


def make_our_plan(
    model: Model, params: Tree, microbatch: Tree, *, method: Method, dtype: torch.dtype, speed: Speed, **options: Any
) -> Plan:
    """fdp's plan, refined by times taken on the device where the method has a choice."""
    plan = make_plan(model, params, microbatch, method=method, dtype=dtype, **options)
    if not speed.timed_plan or method not in CHOOSING:
        return plan
    uses = [use for block in plan.uses for use in block]
    device = tree.leaves(microbatch)[0].device
    times = timing.measure(uses, dtype=dtype, device=device, store=timing.default_store())
    return make_plan(model, params, microbatch, method=method, dtype=dtype, timings=times, **options)


def make_our_step(model: Model, optimizer: Optimizer, *, mechanism: Mechanism, plan: Plan, speed: Speed) -> Step:
    """fdp's step."""
    return make_train_step(
        model,
        optimizer,
        mechanism=mechanism,
        plan=plan,
        donate=("state",),
        compile=speed.compile,
        cuda_graph=speed.cuda_graph,
    )


def our_mode(
    model: Model,
    mode: str,
    *,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    optimizer: Optimizer | None = None,
    max_norm: float = MAX_NORM,
    noise_multiplier: float = 1.0,
    memory_budget: float | None = None,
    microbatches: int = 1,
    speed: Speed,
) -> Candidate:
    """fdp through its public interface, the parameters drawn on the device."""
    method = Method(mode)
    if batch_size % microbatches:
        raise ValueError(f"{microbatches} microbatches: expected a divisor of the batch of {batch_size}")
    cut = (microbatches, batch_size // microbatches)
    noise = 0.0 if method is Method.NONE else noise_multiplier
    mechanism = Mechanism(poisson(1 << 20, expected_batch_size=batch_size), flat(max_norm=max_norm), noise)
    opt = adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY) if optimizer is None else optimizer
    assert model.context is not None
    params = model.init(keys.key(0).to(device))
    example = torch.zeros((), dtype=torch.int64, device=device).expand(cut[1], model.context + 1)
    microbatch, budget = {"tokens": example}, memory_budget if method in BUDGETED else None
    plan = make_our_plan(model, params, microbatch, method=method, dtype=dtype, speed=speed, memory_budget=budget)
    run = make_our_step(model, opt, mechanism=mechanism, plan=plan, speed=speed)
    state = init_state(model, params, opt, mechanism)
    del params
    mask = torch.ones(cut, device=device)
    seen: Any = None

    def step(tokens: Tensor, key: Key) -> Tensor:
        nonlocal state, seen
        state, seen = run(state, Batch({"tokens": tokens.unflatten(0, cut)}, mask), key)
        return seen.losses

    return Candidate(
        step,
        norms=(lambda: seen.norms) if plan.private else None,
        params=lambda: tree.flatten(state.params),
        graph=speed.cuda_graph,
        choices=summary(plan) if plan.choices else None,
        by_gram=covered(plan),
    )


def covered(plan: Plan) -> bool:
    """Whether norms have what rounding may have lost added: by Gram matrices in half precision, but for embeddings."""
    uses = (use for block in plan.uses for use in block if plan.private and use.rule != "embedding")
    return plan.dtype in HALF and any(plan.choices[use.path].norm in (NormBy.GRAM, NormBy.SYMMETRIC) for use in uses)


def summary(plan: Plan) -> dict[str, str]:
    """What the plan chose for every kind of leaf: ``{"blocks.qkv": "keep, reuse"}``."""
    found: dict[str, Counter[str]] = {}
    for path, choice in plan.choices.items():
        kind = re.sub(r"\.\d+\.", ".", path)
        found.setdefault(kind, Counter())[f"{choice.norm.value}, {choice.sum.value}"] += 1
    return {
        kind: "; ".join(how if len(ways) == 1 else f"{how} ({n})" for how, n in ways.most_common())
        for kind, ways in found.items()
    }


def build(case: Case, mode: str, device: torch.device) -> Candidate:
    """The mode at full size."""
    if mode in OURS:
        budget = case.memory_budget
        return our_mode(
            case.model,
            mode,
            batch_size=case.batch_size,
            device=device,
            dtype=case.dtype,
            memory_budget=budget,
            microbatches=1 if mode == "none" else case.microbatches,
            speed=case.speed,
        )
    if case.baseline is None:
        raise ValueError(f"{case.regime}: no mode {mode!r}; expected one of {', '.join(OURS)}")
    return case.baseline(mode, case.model, case.batch_size, device, None)


def feed(model: Model, batch_size: int, device: torch.device, *, batches: int = BATCHES) -> tuple[Tensor, Tensor]:
    """Random tokens (batches, batch, context + 1) and keys, on the device; the same for every mode."""
    assert model.context is not None
    assert model.vocab_size is not None
    draw = torch.Generator(device).manual_seed(0)
    shape = (batches, batch_size, model.context + 1)
    tokens = torch.randint(model.vocab_size, shape, generator=draw, device=device)
    return tokens, keys.split(keys.key(1).to(device), MOST_STEPS)


# Checks


class Reference(NamedTuple):
    """A few steps of the slice by ``materialize``, eager, and their settings. Tensors on the CPU."""

    losses: Tensor
    norms: Tensor
    moved: Flat
    optimizer: Optimizer
    max_norm: float
    noise_multiplier: float


class Checker:
    """Compares the first steps of a mode on the slice with ``materialize``; once for every slice and mode.

    There are three, because a captured step is recorded in the second and replayed from then on. The bound is the
    median norm, so that some samples are clipped and some are not; noise and Adam's ``eps`` have the size of the
    gradient, so that a mistake in the norms, the sum, the noise or the update shows in the parameters.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.references: dict[Any, Reference] = {}
        self.errors: dict[Any, dict[str, float]] = {}

    def check(self, case: Case, mode: str) -> dict[str, float]:
        """The relative differences that were found; ``WrongError`` if one of them is too large."""
        at = (case.small.name, case.dtype, mode, case.microbatches)
        if at not in self.errors:
            try:
                self.errors[at] = self._differences(case, mode)
            finally:
                free(self.device)
        allowed = {what: LEAF_SLACK if " of " in what else SLACK for what in self.errors[at]}
        bad = [f"{what} off by {error:.1e}" for what, error in self.errors[at].items() if not error <= allowed[what]]
        if bad:
            raise WrongError(f"on the slice, against materialize: {', '.join(bad[:4])}")
        return self.errors[at]

    def _differences(self, case: Case, mode: str) -> dict[str, float]:
        reference = self._reference(case, private=mode != "none")
        if mode in OURS:
            cut = 1 if mode == "none" else case.microbatches
            losses, norms, moved = self._steps(case, mode, reference, case.speed, microbatches=cut)
        else:
            assert case.baseline is not None
            tokens, step_keys = self._batches(case)
            params = case.small.init(keys.key(0).to(self.device))
            candidate = case.baseline(mode, case.small, tokens.shape[1], self.device, params)
            for i in (1, 0):  # its learning rate is 0, and what it captures must not remember the first tokens
                losses, moved = candidate.step(tokens[i], step_keys[i]).float().mean().cpu(), None
            norms = None if candidate.norms is None else candidate.norms().float().cpu()
            samples = tokens.shape[1]
            reference = reference._replace(losses=reference.losses[:samples].mean(), norms=reference.norms[:samples])
        found = {"losses": worst(losses, reference.losses)}
        if norms is not None:
            found["norms"] = worst(norms, reference.norms)
        if moved is not None:
            expected = {path: reference.moved[path].to(self.device) for path in moved}
            far = {path: (leaf - expected[path]).double().norm() for path, leaf in moved.items()}
            whole = {path: leaf.double().norm() for path, leaf in expected.items()}
            found["update"] = float(total(far.values()) / total(whole.values()))
            leaves = {path: float(far[path] / whole[path]) for path in far}
            path = max(leaves, key=lambda path: math.inf if math.isnan(leaves[path]) else leaves[path])
            found[f"update of {path}"] = leaves[path]
        return found

    def _reference(self, case: Case, *, private: bool) -> Reference:
        at = (case.small.name, case.dtype, private)
        if at not in self.references:
            size = sum(math.prod(case.small.leaves[path].shape) for path in case.small.trainable)
            nothing = torch.empty(0)
            draft = Reference(nothing, nothing, {}, adamw(0.0, weight_decay=0.0), 1e6, 0.0)
            _, norms, _ = self._steps(case, "materialize", draft, EAGER)
            assert norms is not None
            median = float(norms.median())
            settings = draft._replace(
                optimizer=adamw(1e-3, eps=median / math.sqrt(size), weight_decay=WEIGHT_DECAY),
                max_norm=median if private else 1e6,
                noise_multiplier=1 / math.sqrt(size) if private else 0.0,
            )
            losses, norms, moved = self._steps(case, "materialize", settings, EAGER)
            assert norms is not None
            moved = {path: leaf.cpu() for path, leaf in moved.items()}
            self.references[at] = settings._replace(losses=losses, norms=norms, moved=moved)
        return self.references[at]

    def _batches(self, case: Case) -> tuple[Tensor, Tensor]:
        return feed(case.small, min(case.batch_size, 8), self.device, batches=CHECKED_STEPS)

    def _steps(
        self, case: Case, mode: str, reference: Reference, speed: Speed, *, microbatches: int = 1
    ) -> tuple[Tensor, Tensor | None, Flat]:
        """Losses and norms of the samples of all steps, and how far the parameters have moved after the last."""
        start = tree.flatten(case.small.init(keys.key(0).to(self.device)))
        tokens, step_keys = self._batches(case)
        candidate = our_mode(
            case.small,
            mode,
            batch_size=tokens.shape[1],
            device=self.device,
            dtype=case.dtype,
            optimizer=reference.optimizer,
            max_norm=reference.max_norm,
            noise_multiplier=reference.noise_multiplier,
            microbatches=microbatches,
            speed=speed,
        )
        assert candidate.params is not None
        look, losses, norms = candidate.norms, [], []
        for batch, key in zip(tokens, step_keys):
            losses.append(candidate.step(batch, key).float().cpu())
            if look is not None:
                norms.append(look().float().cpu())
        trained = {path: leaf for path, leaf in candidate.params().items() if path in case.small.trainable}
        moved = {path: leaf - start[path] for path, leaf in trained.items()}
        return torch.cat(losses), torch.cat(norms) if norms else None, moved


def worst(got: Tensor, expected: Tensor) -> float:
    """The largest relative difference; infinite where one is not finite."""
    difference = ((got.double() - expected.double()).abs() / expected.double().abs()).max()
    return float(difference) if bool(difference.isfinite()) else math.inf


def total(norms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(norms)).norm()


# Measurements


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give back all that the last mode left: compiled code, graphs, cached memory."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Most GiB allocated since this was last called."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) / GIB
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def cover_of(tokens: int) -> float:
    """How far above the truth a norm by Gram matrices in half precision is, by design, if tokens are independent.

    The worst that rounding can do is added (``fdp_kernels.ghost``). With u = 2^-23: to the norm, about sqrt(T) |g| |x|,
    5/4 u T sum_t |g_t| |x_t|, because the sum has T products; to its square 5/4 u K |g_t| |g_s| |x_t . x_s| for every
    t, s, and the like with g and x exchanged, K = 1024 features at a time. In all 5/4 u T (sqrt(T) + sqrt(2 K / pi)).
    """
    return 1.25 * 2.0**-23 * tokens * (math.sqrt(tokens) + math.sqrt(1024 * 2 / math.pi))


def check_norms(seen: Tensor, expected: Tensor, *, tokens: int, by_gram: bool) -> float:
    """How far the norms are above the reference, at most.

    Those below it by more than SLACK are refused, and those above by more than SLACK or, by Gram matrices, by more than
    their cover may make of it: such norms are private, but clip more.
    """
    off = (seen - expected) / expected
    most = max(SLACK, OVERSTATED * cover_of(tokens)) if by_gram else SLACK
    if not bool(((off >= -SLACK) & (off <= most)).all()):
        raise WrongError(
            f"at full size, against the reference: norms off by {float(off.min()):.1e} to {float(off.max()):.1e}, "
            f"expected {-SLACK:.1e} to {most:.1e}"
        )
    return float(off.max())


def measure(
    case: Case,
    mode: str,
    device: torch.device,
    *,
    limits: Limits,
    expected_norms: Sequence[float] | None = None,
    profiled: bool = False,
) -> Row:
    """The row of one cell."""
    tokens, step_keys = feed(case.model, case.batch_size, device)
    free(device)
    start = time.perf_counter()
    candidate = build(case, mode, device)
    peak_gib(device)
    losses = candidate.step(tokens[0], step_keys[0]).float().mean()
    synchronize(device)
    first_step_s = time.perf_counter() - start
    look = candidate.norms if mode in OURS else None
    norms = [] if look is None else [look().float().cpu()]
    build_peaks, begun, taken, count = [peak_gib(device)], time.perf_counter(), 0.0, 0
    while count < 3 and (count == 0 or time.perf_counter() - begun < 5.0):
        before = time.perf_counter()
        count += 1
        candidate.step(tokens[count % BATCHES], step_keys[count])
        synchronize(device)
        taken = time.perf_counter() - before
        build_peaks.append(peak_gib(device))
        if look is not None and count == 1:
            norms.append(look().float().cpu())
    seen = torch.cat(norms) if norms else None
    above = 0.0
    if seen is not None and expected_norms is not None:
        length = tokens.shape[-1] - 1
        above = check_norms(seen, torch.tensor(expected_norms), tokens=length, by_gram=candidate.by_gram)
    if not bool(losses.isfinite()):
        raise WrongError("the loss of the first step is not finite")
    wanted = max(limits.least, math.ceil(limits.seconds / taken))
    steps = max(3, min(wanted, int(limits.cap / taken), MOST_STEPS - count - 1))
    picks = [count + 1 + i for i in range(steps)]
    ms = timed(candidate.step, [(tokens[i % BATCHES], step_keys[i]) for i in picks], device)
    steady = peak_gib(device)
    low, middle, high = (float(q) for q in np.quantile(ms, (0.2, 0.5, 0.8)))
    tokens_per_step = case.batch_size * (tokens.shape[-1] - 1)
    row = {
        "mode": mode,
        **case.cell,
        "ms": middle,
        "ms_p20": low,
        "ms_p80": high,
        "peak_gib": step_peak(build_peaks, steady, graph=candidate.graph),
        "tokens_per_second": tokens_per_step / middle * 1e3,
        "first_step_s": first_step_s,
        "steps": steps,
        "loss": float(losses),
        "learning_rate": LEARNING_RATE,
    }
    if device.type == "cuda":
        row["reserved_gib"] = torch.cuda.memory_reserved(device) / GIB
    if seen is not None:
        row["norms"] = seen.tolist()
    if above > SLACK:
        row["overstated"] = above
    if candidate.choices:
        row["choices"] = candidate.choices
    if case.memory_budget is not None and mode in [method.value for method in BUDGETED]:
        row["memory_budget_gib"] = case.memory_budget / GIB
    if profiled and device.type == "cuda":
        try:
            row["profile_ms"] = profile(candidate.step, [(tokens[i], step_keys[i]) for i in (0, 1)])
        except RuntimeError as error:  # the times stand without it
            print(f"{mode}: no profile: {error}", file=sys.stderr)
    return row


def step_peak(build: list[float | None], steady: float | None, *, graph: bool) -> float | None:
    """The peak of a step from the peaks of the first calls and of the timed ones.

    A replayed graph allocates nothing: its memory was allocated when it was captured, in the last call that took more
    than a replay does. Without a graph the first calls hold what compilation took, and only the timed ones count.
    """
    if steady is None or not graph:
        return steady
    captured = [peak for peak in build if peak is not None and peak > 1.01 * steady]
    return max(steady, *captured[-1:]) if captured else steady


def timed(step: Callable[[Tensor, Key], Tensor], inputs: list[tuple[Tensor, Key]], device: torch.device) -> list[float]:
    """Milliseconds of each step, one right after the other."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for each in inputs:
            step(*each)
            marks.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(inputs) + 1)]
    events[0].record()
    for each, event in zip(inputs, events[1:]):
        step(*each)
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in pairwise(events)]


# The first that matches, in lower case: Inductor's kernels list what they fuse, ours start with an underscore.
CLASSES = (
    ("gemm", r"^triton_(tem|mm)|^_(keep|weighted)_body"),
    ("elementwise, norm layers", r"^triton_|^_softmax_gradient"),
    ("noise + update", r"^_(noisy_adamw|normal|words|bits|blocks)|chacha|adam|multi_tensor|distribution"),
    ("norms, clipped sums", r"^_(body|direct|ghost|token_norms|norms|squares|sum|partial_sums|finish)"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("gemm", r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk"),
    ("copy", r"memcpy|memset|copy"),
    ("elementwise, norm layers", r"elementwise|layer_norm|reduce|softmax|cat|embedding|index|scatter|nll|sort|scan"),
)


def kernel_class(name: str) -> str:
    """Which of ``CLASSES`` a kernel belongs to, by its name; else ``other``."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name.lower())), "other")


def profile(step: Callable[[Tensor, Key], Tensor], inputs: list[tuple[Tensor, Key]]) -> dict[str, Any]:
    """Milliseconds per step by class of kernel, and the ten kernels that take most."""
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for each in inputs:
            step(*each)
        torch.cuda.synchronize()
    for event in profiler.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        ms = event.time_range.elapsed_us() / 1e3 / len(inputs)
        kinds[kernel_class(event.name)] += ms
        names[event.name[:100]] += ms
    return {"by_class": dict(kinds.most_common()), "longest": dict(names.most_common(10))}


# The report and the command line


class Report:
    """Rows in a JSON file, written after each; rows that were there before stay."""

    def __init__(self, path: Path, *, benchmark: str, device: torch.device, commit: str | None = None, **settings: Any):
        self.path = path
        old = json.loads(path.read_text()) if path.exists() else {}
        self.rows: list[Row] = old.get("rows", [])
        self.first_steps: list[Row] = old.get("first_steps", [])
        self.commit = commit or current_commit()
        self.head = {
            "benchmark": benchmark,
            "hardware": hardware(device),
            "versions": versions(device),
            "commit": self.commit,
            "command": " ".join(["python", "-m", f"benchmarks.{benchmark}", *map(_named, sys.argv[1:])]),
            "date": datetime.now(UTC).date().isoformat(),
            "settings": settings,
        }
        same = ("benchmark", "hardware", "settings")
        if old and [old[name] for name in same] != [self.head[name] for name in same]:
            raise ValueError(
                f"{path}: expected rows of {[self.head[name] for name in same]}, found {[old[name] for name in same]}; "
                f"give another file"
            )

    def find(self, case: Case, mode: str) -> Row | None:
        wanted = {"mode": mode, **case.cell}
        return next((row for row in self.rows if all(row[name] == value for name, value in wanted.items())), None)

    def expected_norms(self, case: Case, mode: str) -> Sequence[float] | None:
        """The norms of the case's first two steps by ``materialize`` or, where it was not run, by ``auto``."""
        found = (self.find(case, reference) for reference in ("materialize", "auto") if reference != mode)
        return next((row["norms"] for row in found if row and "norms" in row), None)

    def checked(self, case: Case, mode: str) -> dict[str, float] | None:
        """What a check of the same slice found at the same commit, for a run that goes on where another stopped."""
        if self.commit == "unknown" or self.commit.endswith("+"):
            return None
        wanted = {"mode": mode, "regime": case.regime, "layers": case.layers, "commit": self.commit}
        same = (row for row in self.rows if "check" in row and all(row[name] == wanted[name] for name in wanted))
        return next((row["check"] for row in same), None)

    def add(self, row: Row) -> None:
        """Put the row in, in the place of one of the same cell, and write the file."""
        cell = ("mode", "regime", "context", "batch_size", "layers")
        self.rows = [old for old in self.rows if any(old[name] != row[name] for name in cell)]
        self.rows.append(row | {"commit": self.commit})
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {**self.head, "rows": self.rows, "first_steps": self.first_steps}
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(content, indent=1) + "\n")
        beside.replace(self.path)


def sweep(
    report: Report,
    cases: Iterable[Case],
    modes: Sequence[str],
    *,
    device: torch.device,
    limits: Limits = Limits(),  # noqa: B008
    budget: float = math.inf,
    profiled: bool = False,
    retry: bool = False,
) -> None:
    """Measure every mode in every case that the report does not hold yet; start none after ``budget`` seconds.

    ``retry`` runs cells again that have failed.
    """
    checker, begun = Checker(device), time.perf_counter()
    for case in cases:
        for mode in modes:
            row = report.find(case, mode)
            if row is not None and not (retry and "failed" in row):
                continue
            if time.perf_counter() - begun > budget:
                print(f"stopped after {time.perf_counter() - begun:.0f} s; run again for the rest", flush=True)
                return
            row, broken = cell(report, checker, case, mode, device, limits, profiled)
            report.add(row)
            print(line(row), flush=True)
            if broken:
                sys.exit("the GPU reports an error of the program, which ends with it; run again for the rest")


def cell(
    report: Report, checker: Checker, case: Case, mode: str, device: torch.device, limits: Limits, profiled: bool
) -> tuple[Row, bool]:
    """The row of a cell, or why there is none; and whether the GPU can still be used."""
    begun = time.perf_counter()
    try:
        errors = report.checked(case, mode) or checker.check(case, mode)
        expected = report.expected_norms(case, mode)
        row = measure(case, mode, device, limits=limits, expected_norms=expected, profiled=profiled)
        row["check"] = errors
    except WrongError as error:
        row = {"mode": mode, **case.cell, "failed": f"wrong: {error}"}
    except Exception as error:
        if out_of_memory(error):
            why = "out of memory"
        else:
            traceback.print_exc()
            why = f"{type(error).__name__}: {str(error)[:300]}"
        row = {"mode": mode, **case.cell, "failed": why}
    row["cell_s"] = time.perf_counter() - begun
    try:
        free(device)
    except RuntimeError:
        return row, True
    return row, False


def out_of_memory(error: BaseException | None) -> bool:
    """Whether this is it, or came of it: a capture that ran out of memory ends with another error."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or out_of_memory(error.__context__))


def line(row: Row) -> str:
    """A row for the eye."""
    where = f"{row['regime']} {row['context']:5} x {row['batch_size']:<3} {row['mode']:20}"
    if "failed" in row:
        return f"{where} not timed: {row['failed']}"
    peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:7.2f} GiB"
    spread = f"({row['ms_p20']:.1f}-{row['ms_p80']:.1f})"
    return (
        f"{where} {row['ms']:9.2f} ms {spread:16} {peak}  first {row['first_step_s']:.1f} s, cell {row['cell_s']:.0f} s"
    )


def arguments(description: str, *, modes: Sequence[str]) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--modes", nargs="+", default=list(modes), metavar="MODE", help=f"of {', '.join(modes)}")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try things")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the rows are, and go")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="start no cell after these")
    parser.add_argument("--cap", type=float, default=Limits().cap, metavar="SECONDS", help="time no mode for longer")
    parser.add_argument("--profile", action="store_true", help="also milliseconds by class of kernel")
    parser.add_argument("--retry", action="store_true", help="run again what has failed")
    parser.add_argument(
        "--memory-budget", type=float, metavar="GIB", help="what auto and flash may keep between norms and sum"
    )
    parser.add_argument("--commit", help="what the rows are labelled with where there is no git")
    parser.add_argument(
        "--compile", choices=[c.value for c in Compile], default=Compile.BLOCK.value, help="fdp's modes"
    )
    parser.add_argument("--no-cuda-graph", action="store_true", help="fdp's modes without a CUDA graph")
    parser.add_argument("--no-timed-plan", action="store_true", help="fdp's choices by the cost model alone")
    parser.add_argument("--sdpa", choices=SDPA, default="default", help="the attention kernel, for every mode")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--render", type=Path, metavar="JSON", help="write the page of these rows; needs no GPU")
    return parser


def speed_of(options: argparse.Namespace) -> Speed:
    return Speed(Compile(options.compile), not options.no_cuda_graph, not options.no_timed_plan)


def open_report(options: argparse.Namespace, benchmark: str, device: torch.device) -> Report:
    """The report of these options; rows made with others are refused."""
    return Report(
        options.json or Path(f"runs/{benchmark}.json"),
        benchmark=benchmark,
        device=device,
        commit=options.commit,
        sdpa=options.sdpa,
        compile=options.compile,
        cuda_graph=not options.no_cuda_graph,
        timed_plan=not options.no_timed_plan,
    )


def run_sweep(report: Report, cases: Sequence[Case], options: argparse.Namespace, device: torch.device) -> None:
    """Every case in every mode that was asked for, within the limits that were set."""
    sweep(
        report,
        cases,
        options.modes,
        device=device,
        limits=Limits(cap=options.cap),
        budget=options.budget,
        profiled=options.profile,
        retry=options.retry,
    )


def overstatements(rows: Sequence[Row]) -> list[str]:
    """What a page says under a table of modes whose norms are above the reference; nothing if there are none."""
    above = [row for row in rows if "overstated" in row]
    if not above:
        return []
    which = "; ".join(
        f"{row['regime']}, T = {row['context']}, {row['mode']}: {100 * row['overstated']:.0f} %" for row in above
    )
    return [
        "",
        "Norms by Gram matrices have the worst that rounding can do added, so that none is understated. They clip more "
        f"than they need to, being above the reference by up to ({which}).",
    ]


def publish(source: Path, folder: Path, page: Callable[..., str]) -> Path:
    """The page and the rows of a report as ``<benchmark>_<hardware>_<yyyymm>.{md,json}``; returns the page."""
    content = json.loads(source.read_text())
    name = f"{content['benchmark']}_{slug(content['hardware'])}_{content['date'][:7].replace('-', '')}"
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{name}.md"
    written.write_text(page(content, name=name))
    if source.resolve() != (folder / f"{name}.json").resolve():
        shutil.copyfile(source, folder / f"{name}.json")
    return written


def budget_of(options: argparse.Namespace) -> float | None:
    """``--memory-budget`` in bytes."""
    return None if options.memory_budget is None else options.memory_budget * GIB


SDPA = ("default", "flash", "cudnn")


def choose_sdpa(name: str) -> None:
    """Let ``scaled_dot_product_attention`` use one kernel only (and plain math where that cannot)."""
    if name != "default":
        torch.backends.cuda.enable_flash_sdp(name == "flash")
        torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)


def first_step(report: Report, case: Case, mode: str, device: torch.device) -> None:
    """Seconds from the start of this process to the end of the mode's first step, into the report.

    For a process of its own with empty compile caches: see ``empty_caches``.
    """
    imported_s = seconds_since_start()
    start = time.perf_counter()
    tokens, step_keys = feed(case.model, case.batch_size, device, batches=1)
    candidate = build(case, mode, device)
    candidate.step(tokens[0], step_keys[0])
    synchronize(device)
    row = {
        "mode": mode,
        **case.cell,
        "imported_s": imported_s,
        "built_s": time.perf_counter() - start,
        "first_step_s": seconds_since_start(),
        "commit": report.commit,
    }
    report.first_steps.append(row)
    report.write()
    print(json.dumps(row), flush=True)


def empty_caches(folder: str) -> None:
    """Point the compile caches of Inductor and Triton to an empty folder; before anything is compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
    os.environ["XDG_CACHE_HOME"] = folder


def seconds_since_start() -> float:
    """How old this process is."""
    clock = os.sysconf("SC_CLK_TCK")
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / clock
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def slug(name: str) -> str:
    """A piece of hardware as part of a file name: ``NVIDIA H200`` is ``h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


def versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "opacus", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    return found


def _named(argument: str) -> str:
    """An argument as it goes into a page: of a file, its name."""
    return Path(argument).name if "/" in argument else argument


def current_commit() -> str:
    """The commit of the working tree, with ``+`` if files differ from it; ``unknown`` outside a checkout."""
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")
