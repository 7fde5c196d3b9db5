"""Time the options for norms and sums on this device, once per shape, and cache the times on disk.

    >>> timings = measure(plan_uses, dtype=torch.bfloat16, device=device, store=default_store())
    >>> plan = make_plan(model, params, microbatch, dtype=torch.bfloat16, timings=timings)

A cached time is valid for one shape, dtype, option, device and version of torch, Triton and fdp. Inputs are random
numbers: no training data are read.
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
from fdp_kernels.cache_folder import cache_folder
from fdp_kernels.keep import weighted_sum
from fdp_kernels.tile_gemm import MATRICES_PER_LAUNCH
from torch import Tensor

from fdp.gradients.costs import SQUARED_NORMS, NormBy, rates_of, sizes
from fdp.gradients.eight_bits import can_round, store_rounded
from fdp.gradients.launches import store_gradients, weighted_parts
from fdp.gradients.rules import OneHot, Pair, squared_norm
from fdp.gradients.tape import EXPANDED, Use
from fdp.types import FdpError

Timings: TypeAlias = Mapping[str, float]
"""Seconds of each :func:`signature`."""
ALIGNED_ELEMENTS = 64
"""Rows of an output gradient are padded to a multiple of this many elements."""
MAX_BATCHED_ELEMENTS = 1 << 30
"""Matrices whose per-sample gradients have at most this many elements are timed several per launch."""
TIMED_NORMS = (NormBy.KEEP, NormBy.DIRECT, NormBy.SYMMETRIC, NormBy.GRAM)
"""Options that are timed by default; KEEP_INT8 is timed for those who allow it."""


def signature(use: Use, by: NormBy, dtype: torch.dtype) -> str:
    """Return the key of a cached time: option, rule, sizes, dtype."""
    batch, tokens, rows, columns = sizes(use)
    return f"{by.value} {use.rule} B={batch} T={tokens} p={rows} d={columns} {str(dtype).removeprefix('torch.')}"


def default_store() -> FilePath:
    """Return the cache file, in the folder of fdp's own files."""
    return cache_folder() / "timings.json"


def is_worth_timing(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if our kernels run here, so that timings can change a choice."""
    return rates_of(device, dtype).kernels


def timed_norms(stored_dtype: torch.dtype | None) -> tuple[NormBy, ...]:
    """Return the options to time, if gradients may be stored in ``stored_dtype``."""
    return TIMED_NORMS if stored_dtype is None else (*TIMED_NORMS, NormBy.KEEP_INT8)


def load_times(device: torch.device, *, store: FilePath) -> dict[str, float]:
    """Return the cached times of this device and these versions; empty if there are none or the file is unreadable."""
    try:
        return dict(json.loads(store.read_text()).get(_device_and_versions(device), {}))
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def measure(
    uses: Iterable[Use],
    *,
    dtype: torch.dtype,
    device: torch.device,
    store: FilePath | None,
    seconds: float = 0.02,
    norms: Sequence[NormBy] = TIMED_NORMS,
) -> dict[str, float]:
    """Return the seconds of every option for the norms and sum of linear, matmul and embedding uses.

    Only shapes that are not in ``store`` are timed, for about ``seconds`` each. An option that runs out of memory has
    no entry.
    """
    if seconds <= 0:
        raise FdpError(f"seconds: expected a positive time per measurement, got {seconds}")
    known = {} if store is None else load_times(device, store=store)
    fresh = {}
    for use in {(u.rule, sizes(u)): u for u in uses if u.rule in ("linear", "matmul", "embedding")}.values():
        for by in norms:
            name = signature(use, by, dtype)
            possible = by is not NormBy.KEEP_INT8 or can_round(use.rule, sizes(use)[3])
            if possible and name not in known and name not in fresh:
                taken = _time(use, by, dtype, device, seconds)
                fresh |= {} if taken is None else {name: taken}
    if fresh and store is not None:
        _save_times(device, known | fresh, store)
    return known | fresh


def option_runs(records: Sequence[Pair], factors: Tensor) -> dict[NormBy, Callable[[], object]]:
    """Return the work of each option on records of equal shape: norms, then sums, then an update that reads them."""

    def update(rows: Tensor, factors: Tensor) -> Tensor:
        return weighted_sum(rows.flatten(1), factors, torch.float32)

    def keep() -> object:
        stored = store_gradients(records)
        squares = [squared_norm(of) if of.squares is None else of.squares for of in stored]
        return squares, [update(of.gradient, factors) for of in stored]

    def keep_int8() -> object:
        stored = store_rounded(records)
        sums = weighted_parts(stored, [factors] * len(stored))
        return [of.squares for of in stored], [update(parts, factors[: len(parts)]) for parts in sums]

    def pair(by: NormBy) -> object:
        squares, sums = SQUARED_NORMS[by](records), weighted_parts(records, [factors] * len(records))
        return squares, [update(parts, factors[: len(parts)]) for parts in sums]

    return {NormBy.KEEP: keep, NormBy.KEEP_INT8: keep_int8} | {by: partial(pair, by) for by in SQUARED_NORMS}


def _time(use: Use, by: NormBy, dtype: torch.dtype, device: torch.device, seconds: float) -> float | None:
    batch, tokens, rows, columns = sizes(use)
    assert use.rule != EXPANDED
    # A block's matrices share launches, so time them that way unless they take much memory.
    copies = MATRICES_PER_LAUNCH if use.rule != "embedding" and batch * rows * columns <= MAX_BATCHED_ELEMENTS else 1
    try:
        records = []
        for _ in range(copies):
            right = torch.randn(batch, 1, tokens, columns, dtype=dtype, device=device)
            if use.rule == "embedding":
                left: Tensor | OneHot = OneHot(torch.randint(0, rows, (batch, tokens), device=device))
            else:
                padded = -(-rows // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS  # as a fused head pads its vocabulary
                left = torch.randn(batch, 1, tokens, padded, dtype=dtype, device=device)[..., :rows]
            records.append(Pair(left, right, (rows, columns)))
        factors = torch.rand(batch, dtype=torch.float64, device=device) + 0.5
        return _median(option_runs(records, factors)[by], device, seconds) / copies
    except torch.OutOfMemoryError:
        return None


def _median(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    run()  # compiles
    if device.type == "cuda":
        run = _record_graph(run)  # leave out the time that Python takes to launch, as in a recorded step
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


def _record_graph(run: Callable[[], object]) -> Callable[[], object]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def _device_and_versions(device: torch.device) -> str:
    from importlib.metadata import PackageNotFoundError, version

    def number(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}, triton {number('triton')}, fdp {number('fdp')}"


def _save_times(device: torch.device, times: Mapping[str, float], store: FilePath) -> None:
    """Write the times to the file of all devices. The file is replaced as a whole, so concurrent runs never mix."""
    try:
        cached = json.loads(store.read_text())
    except (OSError, ValueError):
        cached = None
    cached = cached if isinstance(cached, dict) else {}
    cached[_device_and_versions(device)] = dict(sorted(times.items()))
    store.parent.mkdir(parents=True, exist_ok=True)
    part = store.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(cached, indent=1))
    part.replace(store)
