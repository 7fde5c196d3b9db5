"""What a choice takes on this device: candidates timed once per shape, and remembered on disk.

    >>> timings = measure(plan_uses, dtype=torch.bfloat16, device=device, store=default_store())
    >>> plan = make_plan(model, params, microbatch, dtype=torch.bfloat16, timings=timings)

A time belongs to a shape, a dtype, a way, a device and the versions of torch, Triton and fdp: change one, and it is
taken again. Inputs are random numbers of the right shapes: no data are needed, and none are touched.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import TypeAlias

import torch
from fdp_kernels.keep import weighted_sum
from fdp_kernels.tile_gemm import MATRICES_PER_LAUNCH
from torch import Tensor

from fdp.gradients.costs import SQUARED_NORMS, NormBy, rates_of, sizes
from fdp.gradients.launches import kept_gradients, weighted_gradients
from fdp.gradients.rules import OneHot, Pair, squared_norm
from fdp.gradients.taps import EXPANDED, Use
from fdp.types import FdpError

Timings: TypeAlias = Mapping[str, float]
"""Seconds by signature."""
MANY = 1 << 30
"""Elements of all samples' gradients of a matrix up to which four are timed at once."""


def signature(use: Use, by: NormBy, dtype: torch.dtype) -> str:
    """The name under which a time is kept: way, rule, sizes, dtype."""
    batch, tokens, rows, columns = sizes(use)
    return f"{by.value} {use.rule} B={batch} T={tokens} p={rows} d={columns} {str(dtype).removeprefix('torch.')}"


def default_store() -> FilePath:
    """Where times are kept: ``$FDP_CACHE``, else ``$XDG_CACHE_HOME/fdp``, else ``~/.cache/fdp``."""
    base = os.environ.get("FDP_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fdp")
    return FilePath(base).expanduser() / "timings.json"


def worthwhile(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether times are worth taking: where kernels compete with the library."""
    return rates_of(device, dtype).kernels


def remembered(device: torch.device, *, store: FilePath) -> dict[str, float]:
    """The times kept for this device and these versions; empty if there are none or the file is not readable."""
    try:
        return dict(json.loads(store.read_text()).get(_who(device), {}))
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def measure(
    uses: Iterable[Use], *, dtype: torch.dtype, device: torch.device, store: FilePath | None, seconds: float = 0.02
) -> dict[str, float]:
    """Times of every way to the norms and sum of linear, matmul and embedding uses, those known not taken again.

    ``seconds`` is about what each is run for. A way that does not fit into memory is given no time.
    """
    if seconds <= 0:
        raise FdpError(f"seconds: expected a positive time per measurement, got {seconds}")
    known = {} if store is None else remembered(device, store=store)
    fresh = {}
    for use in {(u.rule, sizes(u)): u for u in uses if u.rule in ("linear", "matmul", "embedding")}.values():
        for by in (NormBy.KEEP, NormBy.DIRECT, NormBy.SYMMETRIC, NormBy.GRAM):
            name = signature(use, by, dtype)
            if name not in known and name not in fresh:
                taken = _time(use, by, dtype, device, seconds)
                fresh |= {} if taken is None else {name: taken}
    if fresh and store is not None:
        _remember(device, known | fresh, store)
    return known | fresh


def ways(records: Sequence[Pair], factors: Tensor) -> dict[NormBy, Callable[[], object]]:
    """What each way does for uses alike: their norms, then their sums, as far as an update that reads them."""

    def update(rows: Tensor, factors: Tensor) -> Tensor:
        return weighted_sum(rows.flatten(1), factors, torch.float32)

    def keep() -> object:
        made = kept_gradients(records)
        squares = [squared_norm(of) if of.squares is None else of.squares for of in made]
        return squares, [update(of.gradient, factors) for of in made]

    def paired(by: NormBy) -> object:
        squares, sums = SQUARED_NORMS[by](records), weighted_gradients(records, [factors] * len(records))
        return squares, [update(total.unsqueeze(0), factors[:1]) for total in sums]

    return {NormBy.KEEP: keep} | {by: partial(paired, by) for by in SQUARED_NORMS}


def _time(use: Use, by: NormBy, dtype: torch.dtype, device: torch.device, seconds: float) -> float | None:
    batch, tokens, rows, columns = sizes(use)
    assert use.rule != EXPANDED
    # Matrices of a block go through kernels together, and so do those timed, if that much of memory is no matter.
    copies = MATRICES_PER_LAUNCH if use.rule != "embedding" and batch * rows * columns <= MANY else 1
    try:
        records = []
        for _ in range(copies):
            right = torch.randn(batch, 1, tokens, columns, dtype=dtype, device=device)
            if use.rule == "embedding":
                left: Tensor | OneHot = OneHot(torch.randint(0, rows, (batch, tokens), device=device))
            else:
                left = torch.randn(batch, 1, tokens, rows, dtype=dtype, device=device)
            records.append(Pair(left, right, (rows, columns)))
        factors = torch.rand(batch, dtype=torch.float64, device=device) + 0.5
        return _median(ways(records, factors)[by], device, seconds) / copies
    except torch.OutOfMemoryError:
        return None


def _median(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    run()  # compiles
    if device.type == "cuda":
        run = _recorded(run)  # as in a recorded step: without the time that Python takes to launch
    times: list[float] = []
    spent = 0.0
    while len(times) < 3 or (spent < seconds and len(times) < 50):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            before = time.perf_counter()
            run()
            times.append(time.perf_counter() - before)
        spent += times[-1]
    return statistics.median(times)


def _recorded(run: Callable[[], object]) -> Callable[[], object]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def _who(device: torch.device) -> str:
    from importlib.metadata import PackageNotFoundError, version

    def number(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}, triton {number('triton')}, fdp {number('fdp')}"


def _remember(device: torch.device, times: Mapping[str, float], store: FilePath) -> None:
    """All devices' times in one file, replaced whole: two runs at once leave the times of one, never a mixture."""
    try:
        everyone = json.loads(store.read_text())
    except (OSError, ValueError):
        everyone = None
    everyone = everyone if isinstance(everyone, dict) else {}
    everyone[_who(device)] = dict(sorted(times.items()))
    store.parent.mkdir(parents=True, exist_ok=True)
    part = store.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(everyone, indent=1))
    part.replace(store)
