"""The tables, the verdict and the JSON result of ``fdp plan``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from fdp.estimate.estimate import Footprint
    from fdp.gradients.costs import Choice
    from fdp.gradients.plan import Plan

GIB = 2**30
RESERVED_GIB = 1.5
"""Memory that a process cannot use: the CUDA context, workspaces of cuBLAS, buffers of NCCL."""
HINTS = {
    "parameters": "more ranks along shard, or --offload params",
    "optimizer": "--moments bfloat16, more ranks along shard, or --offload optimizer; with kfac a smaller --microbatch",
    "gathered": "--zero 3, or a tensor axis (--mesh shard=..,tensor=..)",
    "gradients": "--sum-dtype float32, --compile block, --offload grads,optimizer, more ranks along shard, or a tensor "
    "axis, which shards full gradients too",
    "kept pairs": "--memory-budget, --method ghost, or a smaller --microbatch",
    "activations": "--compile block, --checkpoint-activations, a smaller --microbatch, or a tensor axis",
}
"""How to reduce each kind of memory."""


def tables_of(found: Footprint) -> Iterator[Table]:
    """Return the tables of a footprint, without the empty ones."""
    tables = (_memory(found), _phases(found), _traffic(found), _flops(found), _curvature(found), _methods(found.plan))
    return (table for table in tables if table.row_count)


def verdict_of(found: Footprint, gpu_gib: float) -> str:
    """Say whether the step fits on the GPU, and otherwise what to try."""
    spare = _spare_gib(found, gpu_gib)
    usable = f"{gpu_gib:g} GiB less {RESERVED_GIB} for the CUDA context and libraries"
    if spare >= 0:
        return f"[green]fits: {spare:.1f} GiB to spare of {usable}[/]"
    most = max(found.device.by_kind, key=lambda kind: found.device.by_kind[kind]).value
    return f"[yellow]does not fit: {-spare:.1f} GiB more than {usable}. Most are {most}: try {HINTS[most]}[/]"


def result_of(found: Footprint, gpu_gib: float) -> dict[str, Any]:
    """Return a footprint for JSON."""
    return {
        "parameters": found.parameters,
        "peak_bytes": found.device.total,
        "peak_phase": found.phase.value,
        "by_kind": {kind.value: held for kind, held in found.device.by_kind.items()},
        "host_bytes": found.host.total,
        "host_by_kind": {kind.value: held for kind, held in found.host.by_kind.items()},
        "phases": {phase.value: device.total for phase, (device, _) in found.phases.items()},
        "traffic": [
            each._asdict() | {"dtype": _dtype_name(each.dtype), "bytes": each.bytes, "sent": each.sent}
            for each in found.transfers
        ],
        "units": found.units,
        "flops": _by_dtype(found.flops),
        "measurement_flops": None if found.measurement is None else _by_dtype(found.measurement.flops),
        "kept_bytes": found.plan.stored_bytes,
        "fits": _spare_gib(found, gpu_gib) >= 0,
        "spare_gib": _spare_gib(found, gpu_gib),
    }


def _memory(found: Footprint) -> Table:
    table = _table(f"memory of one rank at its peak ({found.phase.value})", "kind", "device GiB", "", "host GiB")
    for kind, held in found.device.by_kind.items():
        share = f"{held / max(1, found.device.total):.0%}"
        table.add_row(kind.value, _gib(held), share, _gib(found.host.by_kind[kind]))
    table.add_row("total", _gib(found.device.total), "", _gib(found.host.total), style="bold")
    return table


def _phases(found: Footprint) -> Table:
    table = _table("peaks through the step", "phase", "device GiB", "host GiB")
    for phase, (device, host) in found.phases.items():
        table.add_row(phase.value, _gib(device.total), _gib(host.total))
    return table


def _traffic(found: Footprint) -> Table:
    table = _table(
        f"traffic of a step: {found.units:.2f} x the parameters over the data axes",
        *("collective", "axis", "dtype", "calls", "full GiB", "sent per rank GiB", "x parameters"),
    )
    for each in found.transfers:
        table.add_row(
            each.collective,
            f"{each.axis} ({each.ranks})",
            _dtype_name(each.dtype),
            f"{each.calls:,}",
            _gib(each.bytes),
            _gib(each.sent),
            f"{each.passes * each.elements / found.parameters:.2f}",
        )
    return table


def _flops(found: Footprint) -> Table:
    table = _table("flops of one rank", "dtype", "Tflop")
    for dtype, count in found.flops.items():
        table.add_row(_dtype_name(dtype), f"{count / 1e12:,.2f}")
    return table


def _curvature(found: Footprint) -> Table:
    """Return what K-FAC adds once in a period; empty with other optimizers."""
    table = _table("curvature, each time it is measured (inverses not counted)", "what", "", "amount")
    if found.measurement is None:
        return table
    for each in found.measurement.transfers:
        table.add_row(
            f"{each.collective} over {each.axis} ({each.ranks})", _dtype_name(each.dtype), f"{_gib(each.bytes)} GiB"
        )
    for dtype, count in found.measurement.flops.items():
        table.add_row("flops", _dtype_name(dtype), f"{count / 1e12:,.2f} Tflop")
    return table


def _methods(plan: Plan) -> Table:
    """Return how norms and sums are computed; leaves that differ only in their layer share a row."""
    table = _table(
        f"method {plan.method.value}: {plan.stored_bytes / GIB:.2f} GiB stored between norms and sum",
        *("leaf", "leaves", "norm by", "sum by", "ms", "timed", "stored GiB"),
    )
    by_choice: dict[tuple[str, str, str], list[Choice]] = {}
    for path, choice in plan.choices.items():
        leaf = re.sub(r"\.\d+\.", ".*.", path)
        by_choice.setdefault((leaf, choice.norm.value, choice.sum.value), []).append(choice)
    for (leaf, norm, by), choices in by_choice.items():
        predicted = _milliseconds(choice.seconds for choice in choices)
        measured = _milliseconds(choice.measured for choice in choices)
        stored = _gib(sum(choice.stored_bytes for choice in choices))
        table.add_row(leaf, f"{len(choices):,}", norm, by, predicted, measured, stored)
    return table


def _milliseconds(seconds: Iterable[float | None]) -> str:
    known = [one for one in seconds if one is not None]
    return f"{sum(known) * 1e3:.3f}" if known else ""


def _spare_gib(found: Footprint, gpu_gib: float) -> float:
    return gpu_gib - RESERVED_GIB - found.device.total / GIB


def _table(title: str, first: str, *rest: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for heading in rest:
        table.add_column(heading, justify="right")
    return table


def _by_dtype(flops: dict[Any, float]) -> dict[str, float]:
    return {_dtype_name(dtype): count for dtype, count in flops.items()}


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(size: float) -> str:
    return "-" if size < GIB / 1000 else f"{size / GIB:,.2f}"
