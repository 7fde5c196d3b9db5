"""Measure one cell: build a mode, compare its norms, time its steps and record their memory.

    time    CUDA events between consecutive steps; median, 20 and 80 % quantiles; new data and a new key every step
    memory  most bytes allocated in a step; for a captured step, since its capture, which fills the graph's own pool

If norms or losses are wrong, ``measure`` raises ``WrongError`` and there is no row.

    >>> row = measure(case, "auto", device, limits=Limits(cap=6.0))
    >>> row["ms"], row["peak_gib"]
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.device import GIB, free, peak_gib, synchronize
from benchmarks.mode_checks import SLACK, WrongError, check_norms
from benchmarks.modes import BATCHES, LEAN, MAX_STEPS, OURS, Case, Row, build, feed
from fdp.gradients.plan import BUDGETED_METHODS
from fdp.types import Key


class Limits(NamedTuple):
    """Limits of the timing: at least ``least`` steps and ``seconds``, at most ``cap`` seconds, always 3 steps."""

    seconds: float = 2.0
    least: int = 10
    cap: float = 20.0


def measure(
    case: Case,
    mode: str,
    device: torch.device,
    *,
    limits: Limits,
    expected_norms: Sequence[float] | None = None,
    profiled: bool = False,
) -> Row:
    """Return the row of one cell."""
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
    steps = max(3, min(wanted, int(limits.cap / taken), MAX_STEPS - count - 1))
    picks = [count + 1 + i for i in range(steps)]
    ms = time_steps(candidate.step, [(tokens[i % BATCHES], step_keys[i]) for i in picks], device)
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
        "learning_rate": case.learning_rate,
    }
    if device.type == "cuda":
        row["reserved_gib"] = torch.cuda.memory_reserved(device) / GIB
    if seen is not None:
        row["norms"] = seen.tolist()
    if above > SLACK:
        row["overstated"] = above
    if candidate.choices:
        row["choices"] = candidate.choices
    if candidate.stored_bytes is not None:
        row["stored_gib"] = candidate.stored_bytes / GIB
    if case.memory_budget is not None and mode in [LEAN, *(method.value for method in BUDGETED_METHODS)]:
        row["memory_budget_gib"] = case.memory_budget / GIB
    if profiled and device.type == "cuda":
        try:
            row["profile_ms"] = profile(candidate.step, [(tokens[i], step_keys[i]) for i in (0, 1)])
        except RuntimeError as error:  # the times are valid without it
            print(f"{mode}: no profile: {error}", file=sys.stderr)
    return row


def step_peak(build: list[float | None], steady: float | None, *, graph: bool) -> float | None:
    """Return the peak of a step, from the peaks of the first calls and of the timed ones.

    A replayed graph allocates nothing: its memory was allocated at the capture, in the last call that took more than a
    replay does. Without a graph the first calls include compilation, and only the timed ones count.
    """
    if steady is None or not graph:
        return steady
    captured = [peak for peak in build if peak is not None and peak > 1.01 * steady]
    return max(steady, *captured[-1:]) if captured else steady


def time_steps(
    step: Callable[[Tensor, Key], Tensor], inputs: list[tuple[Tensor, Key]], device: torch.device
) -> list[float]:
    """Return the milliseconds of each step, run back to back."""
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


# The first match counts, in lower case. Inductor's names list what they fuse; ours end in _body.
CLASSES = (
    ("gemm", r"^triton_(tem|mm)|^_(keep|weighted)(_hopper)?_body"),
    ("elementwise, norm layers", r"^triton_|^_softmax_gradient"),
    (
        "noise + update",
        r"^_noisy_adamw|^(normal|wide_normal|words|bits|blocks)_body|chacha|adam|multi_tensor|distribution",
    ),
    ("norms, clipped sums", r"^_(body|direct|ghost|token_norms|norms|squares|sum|partial_sums|finish)"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("gemm", r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk"),
    ("copy", r"memcpy|memset|copy"),
    ("elementwise, norm layers", r"elementwise|layer_norm|reduce|softmax|cat|embedding|index|scatter|nll|sort|scan"),
)


def kernel_class(name: str) -> str:
    """Return the class of a kernel in ``CLASSES`` by its name, else ``other``."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name.lower())), "other")


def profile(step: Callable[[Tensor, Key], Tensor], inputs: list[tuple[Tensor, Key]]) -> dict[str, Any]:
    """Return milliseconds per step by class of kernel, and the ten slowest kernels."""
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
