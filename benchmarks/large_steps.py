"""Time a step of many samples, cut into microbatches, and find the microbatch at which a mode is fastest.

    whole         if a whole step takes at most WHOLE_S seconds, whole steps are timed
    extrapolated  else steps of SHORT and LONG microbatches: t(n) = t(SHORT) + (n - SHORT) (t(LONG) - t(SHORT)) /
                  (LONG - SHORT), which counts noise and update once per step

A row is one mode at one size of microbatch, in milliseconds of a step of all samples.

    >>> for case, mode in climb(report, make_case, "auto", start=64, sizes=(8, 16, 32, 64, 128)): ...
    >>> row = measure_large_step(case, "auto", device)
    >>> row["samples_per_second"], row["batch_size"]         # the size of the microbatch
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.device import GIB, free, peak_gib, synchronize
from benchmarks.measure import step_peak, time_steps
from benchmarks.mode_checks import WrongError
from benchmarks.modes import OURS, Case, Row, build, feed
from benchmarks.report import Report
from fdp.types import Key

SHORT, LONG = 2, 6
WHOLE_S, REPEATS = 5.0, 3
BATCHES = 2
OUT_OF_MEMORY = "out of memory"


def climb(
    report: Report, make_case: Callable[[int], Case], mode: str, *, start: int, sizes: Sequence[int]
) -> Iterator[tuple[Case, str]]:
    """Yield the mode at ``start`` and at larger sizes while it gets faster; if it does not, at smaller ones.

    The next size depends on the rows that the report holds by then.
    """

    def rate(size: int) -> float:
        """Return samples per second; 0 if the size does not fit, infinity if it failed for any other reason."""
        row = report.find(make_case(size), mode) or {}
        return row.get("samples_per_second", 0.0 if row.get("failed") == OUT_OF_MEMORY else np.inf)

    at = sizes.index(start)
    yield make_case(start), mode
    best = rate(start)
    if best == np.inf:
        return
    climbed = False
    for size in sizes[at + 1 :] if best else ():
        yield make_case(size), mode
        if rate(size) <= best:
            break
        best, climbed = rate(size), True
    for size in () if climbed else reversed(sizes[:at]):
        yield make_case(size), mode
        if rate(size) <= best and best:
            break
        best = rate(size)


def measure_large_step(
    case: Case, mode: str, device: torch.device, *, whole_s: float = WHOLE_S, repeats: int = REPEATS
) -> Row:
    """Return the row of a mode at one size of microbatch."""
    assert case.samples is not None
    size, count = case.batch_size, case.samples // case.batch_size
    tokens, step_keys = feed(case.model, case.samples, device, batches=BATCHES)
    free(device)
    start, calls = time.perf_counter(), 0
    candidate = build(case, mode, device)
    peak_gib(device)

    def inputs(microbatches: int) -> tuple[Tensor, Key]:
        nonlocal calls
        calls += 1
        return tokens[calls % BATCHES, : microbatches * size], step_keys[calls]

    first = candidate.step(*inputs(min(SHORT, count))).float().mean()
    synchronize(device)
    first_step_s = time.perf_counter() - start
    if not bool(first.isfinite()):
        raise WrongError("the loss of the first step is not finite")
    peaks = [peak_gib(device)]
    warm_up = 2 if candidate.graph and mode in OURS else 0  # fdp records every number of microbatches it meets

    def milliseconds(microbatches: int, steps: int) -> list[float]:
        for _ in range(warm_up):
            candidate.step(*inputs(microbatches))
            peaks.append(peak_gib(device))
        return time_steps(candidate.step, [inputs(microbatches) for _ in range(steps)], device)

    short = milliseconds(min(SHORT, count), repeats)
    whole = float(np.median(short)) * count / min(SHORT, count) <= 1e3 * whole_s
    if count <= LONG or whole:
        ms, timed = (short, SHORT) if count <= SHORT else (milliseconds(count, repeats), count)
    else:
        slopes = [(b - a) / (LONG - SHORT) for a, b in zip(short, milliseconds(LONG, repeats))]
        ms, timed = [a + (count - SHORT) * slope for a, slope in zip(short, slopes)], LONG
    steady = peak_gib(device)
    low, middle, high = (float(q) for q in np.quantile(ms, (0.2, 0.5, 0.8)))
    row = {
        "mode": mode,
        **case.cell,
        "samples": case.samples,
        "microbatches_timed": min(timed, count),
        "ms": middle,
        "ms_p20": low,
        "ms_p80": high,
        "samples_per_second": case.samples / middle * 1e3,
        "tokens_per_second": case.samples * (tokens.shape[-1] - 1) / middle * 1e3,
        "peak_gib": step_peak(peaks, steady, graph=candidate.graph),
        "first_step_s": first_step_s,
        "steps": repeats,
        "loss": float(first),
        "learning_rate": case.learning_rate,
    }
    if candidate.stored_bytes is not None:
        row["stored_gib"] = candidate.stored_bytes / GIB
    return row | ({"choices": candidate.choices} if candidate.choices else {})


def fastest(rows: Sequence[Row], regime: str, mode: str) -> Row | None:
    """Return the mode's row at its best microbatch, if one was timed."""
    mine = (row for row in rows if (row["regime"], row["mode"]) == (regime, mode) and "failed" not in row)
    return max(mine, key=lambda row: row["samples_per_second"], default=None)


def table(rows: Sequence[Row], regimes: Sequence[str], modes: Sequence[str]) -> list[str]:
    """Return the table of large steps: a line per regime and mode, at its best microbatch."""
    lines = [
        "| regime | T | mode | microbatch | samples/s | tokens/s | seconds per step | peak GiB | `auto` is faster by | "
        "tried: samples/s (GiB) | timed |",
        "|---" * 11 + "|",
    ]
    for regime in regimes:
        auto = fastest(rows, regime, "auto")
        for mode in modes:
            mine = [row for row in rows if (row["regime"], row["mode"]) == (regime, mode)]
            best, tried = (
                fastest(rows, regime, mode),
                "; ".join(map(trial, sorted(mine, key=lambda r: r["batch_size"]))),
            )
            if best is None:
                lines += (
                    [f"| {regime} | {mine[0]['context']} | {mode} | not timed | | | | | | {tried} | |"] if mine else []
                )
                continue
            peak = "" if best["peak_gib"] is None else f"{best['peak_gib']:.1f}"
            faster = f"{auto['samples_per_second'] / best['samples_per_second']:.2f}" if auto else ""
            timed = best["microbatches_timed"]
            how = (
                "whole steps" if timed * best["batch_size"] == best["samples"] else f"{SHORT} and {timed} microbatches"
            )
            lines.append(
                f"| {regime} | {best['context']} | {mode} | {best['batch_size']} | {best['samples_per_second']:,.1f} | "
                f"{best['tokens_per_second']:,.0f} | {best['ms'] / 1e3:.2f} | {peak} | {faster} | {tried} | {how} |"
            )
    return lines if len(lines) > 2 else ["Not measured yet."]


def trial(row: Row) -> str:
    """Format a row as one of the microbatches that were tried: ``64: 812.3 (16.0)``."""
    if "failed" in row:
        return f"{row['batch_size']}: {row['failed']}"
    peak = "" if row["peak_gib"] is None else f" ({row['peak_gib']:.1f})"
    return f"{row['batch_size']}: {row['samples_per_second']:,.1f}{peak}"
