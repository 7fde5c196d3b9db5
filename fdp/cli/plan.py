"""``fdp plan``: what a step would hold, send and compute on a rank of any number of ranks, without any of them.

    fdp plan --model llama-13b --world 8 --zero 3 --method auto --context 2048 --microbatch 1 --dtype bfloat16
    fdp plan --model gpt-1t --world 256 --mesh shard=32,tensor=8 --method ghost --offload all --gpu h100

The step itself is traced, on tensors without memory; seconds to two minutes on a laptop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Option

if TYPE_CHECKING:
    from fdp.estimate.estimate import Footprint
    from fdp.gradients.costs import Choice
    from fdp.gradients.plan import Plan
    from fdp.kfac.private.sources import KfacOptimizer

GIB = 2**30
GPUS = {"rtx4090": 24, "a100-40": 40, "l40s": 48, "a100": 80, "h100": 80, "h200": 141, "b200": 180}
"""GiB by name."""
RESERVED = 1.5
"""GiB that a process cannot use: the CUDA context, workspaces of cuBLAS, buffers of NCCL."""
HINTS = {
    "parameters": "more ranks along shard, or --offload params",
    "optimizer": "more ranks along shard, or --offload optimizer; of kfac a smaller --microbatch",
    "gathered": "--zero 3, or a tensor axis (--mesh shard=..,tensor=..)",
    "gradients": "--offload grads,optimizer, more ranks along shard, or a tensor axis, which cuts whole gradients too",
    "kept pairs": "--memory-budget, --method ghost, or a smaller --microbatch",
    "activations": "--checkpoint-activations, a smaller --microbatch, or a tensor axis",
}
"""What makes less of each kind."""
WHAT, HOW, RANKS, SHOW = "What to train", "How to compute it", "Ranks", "What it is for"


def plan_command(
    model: Annotated[str, Option(help="A language model preset, up to gpt-1t.", rich_help_panel=WHAT)] = "llama-13b",
    context: Annotated[
        int | None, Option(help="Tokens of a sample; default: the model's own.", rich_help_panel=WHAT)
    ] = None,
    optimizer: Annotated[
        str,
        Option(help="adamw, adam, sgd, lamb, adafactor, adagrad, adadelta, adamax or kfac.", rich_help_panel=WHAT),
    ] = "adamw",
    kfac_policy: Annotated[
        str, Option(help="Of kfac without privacy: auto, per layer by cost, or all, dense.", rich_help_panel=WHAT)
    ] = "auto",
    kfac_distribution: Annotated[
        str, Option(help="Of kfac over ranks: gather, owner or ring.", rich_help_panel=WHAT)
    ] = "gather",
    method: Annotated[
        str,
        Option(help="auto, ghost, ghost_bk, flash, flash_bk, materialize; none: without privacy.", rich_help_panel=HOW),
    ] = "auto",
    dtype: Annotated[str, Option(help="float32 or bfloat16.", rich_help_panel=HOW)] = "bfloat16",
    microbatch: Annotated[int, Option(help="Samples computed at once, per rank.", rich_help_panel=HOW)] = 1,
    batch: Annotated[
        int | None, Option(help="Samples of a step, per rank; default: one microbatch.", rich_help_panel=HOW)
    ] = None,
    memory_budget: Annotated[
        float | None,
        Option(help="GiB that --method auto or flash may keep between norms and sum.", rich_help_panel=HOW),
    ] = None,
    checkpoint_activations: Annotated[
        bool,
        Option("--checkpoint-activations", help="Keep only every block's input.", rich_help_panel=HOW),
    ] = False,
    offload: Annotated[
        str,
        Option(help="Kept on the CPU: none, all, or a list of params, grads, optimizer.", rich_help_panel=HOW),
    ] = "none",
    world: Annotated[int | None, Option(help="Ranks; default: those of --mesh, or 1.", rich_help_panel=RANKS)] = None,
    mesh: Annotated[
        str | None,
        Option(help="Ranks by axis: replicate=2,shard=4,tensor=1; default: all along shard.", rich_help_panel=RANKS),
    ] = None,
    zero: Annotated[int, Option(help="What is cut over shard: 0, 2 or 3 (ZeRO).", rich_help_panel=RANKS)] = 3,
    gpu: Annotated[
        str, Option(help="Must it fit? A name, such as h100, a100-40 or h200, or GiB.", rich_help_panel=SHOW)
    ] = "h100",
    as_json: Annotated[
        bool, Option("--json", help="Print the result as one JSON object, last.", rich_help_panel=SHOW)
    ] = False,
) -> None:
    """Memory by kind, traffic and flops of a step on one rank of many; nothing of that size is allocated."""
    # torch takes seconds to import, and --help and mistakes on the command line should not.
    import torch

    from fdp import models
    from fdp.cli.configure import OPTIMIZERS, choose, offloaded
    from fdp.estimate.estimate import Scale, StepSettings, plan_at_scale
    from fdp.gradients.plan import Method
    from fdp.parallel.sharding import Zero
    from fdp.types import FdpError

    if microbatch < 1 or (batch is not None and batch < 1):
        raise FdpError(f"expected --microbatch and --batch of at least 1, got {microbatch} and {batch}")
    if memory_budget is not None and not memory_budget > 0:
        raise FdpError(f"--memory-budget: expected a positive number of GiB, got {memory_budget}")
    if memory_budget is not None and method not in ("auto", "flash"):
        raise FdpError(
            f"--memory-budget: expected --method auto or flash to go with it, got {method}; with others it does nothing"
        )
    axes = _axes(world, mesh)
    room = _room(gpu)
    chosen = models.build(choose("model", model, {name: name for name in models.LANGUAGE}), context=context)
    assert chosen.context is not None
    tokens = torch.empty((), dtype=torch.int64).expand(microbatch, chosen.context + 1)
    rules = OPTIMIZERS | {"kfac": lambda rate: _kfac(kfac_policy, kfac_distribution, private=method != "none")}
    if optimizer != "kfac" and (kfac_policy, kfac_distribution) != ("auto", "gather"):
        raise FdpError(f"--kfac-policy, --kfac-distribution: expected --optimizer kfac with them, got {optimizer}")
    stage = choose("zero", str(zero), {str(stage.value): stage for stage in Zero})
    console = Console(highlight=False)
    microbatches = 1 if batch is None else -(-batch // microbatch)
    settings = StepSettings(
        method=choose("method", method, {each.value: each for each in Method}),
        dtype=choose("dtype", dtype, {"float32": torch.float32, "bfloat16": torch.bfloat16}),
        optimizer=choose("optimizer", optimizer, rules)(1e-3),
        offload=offloaded(offload),
        memory_budget=None if memory_budget is None else memory_budget * GIB,
        checkpoint_activations=checkpoint_activations,
        microbatches=microbatches,
    )
    with console.status("tracing a step"):
        scale = None if _ranks(axes) == 1 else Scale(axes, stage)
        found = plan_at_scale(chosen, {"tokens": tokens}, scale=scale, settings=settings)
    arranged = ", ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "one"
    console.print(
        f"{model}: {found.parameters / 1e9:,.3f} billion parameters, context {chosen.context}, ZeRO-{zero}, ranks: "
        f"{arranged}; {microbatches} microbatch{'es' if microbatches > 1 else ''} of {microbatch} in {dtype}, "
        f"method {method}, {optimizer}, offload: {offload}",
        soft_wrap=True,
    )
    for table in (
        _memory(found),
        _phases(found),
        _traffic(found),
        _flops(found),
        _curvature(found),
        _choices(found.plan),
    ):
        if table.row_count:
            console.print(table)
    console.print(_verdict(found, room), soft_wrap=True)
    if as_json:
        print(json.dumps(_result(found, room) | {"model": model, "axes": axes, "zero": zero, "gpu_gib": room}))


def _kfac(policy: str, distribution: str, *, private: bool) -> KfacOptimizer:
    """K-FAC by default otherwise; of a private run from public or synthetic data, which costs no privacy."""
    from fdp.cli.configure import choose
    from fdp.kfac.config import Distribution, KfacConfig
    from fdp.kfac.policy import policy_named
    from fdp.kfac.private.sources import KfacOptimizer, Synthetic
    from fdp.types import FdpError

    chosen = choose("kfac-policy", policy, {name: name for name in ("auto", "all")})
    over = choose("kfac-distribution", distribution, {one.value: one for one in Distribution})
    if private and chosen != "auto":
        raise FdpError(
            "--kfac-policy: expected --method none to go with it: a private run is dense up to 4096 features"
        )
    if private and over is Distribution.RING:
        raise FdpError(
            "--kfac-distribution: expected gather or owner with a private --method, or --method none; got ring"
        )
    config = KfacConfig(policy=policy_named(chosen), distribution=over)
    return KfacOptimizer(1e-3, config, Synthetic() if private else None)


def _axes(world: int | None, mesh: str | None) -> dict[str, int]:
    from fdp.cli.configure import mesh_axes
    from fdp.types import FdpError

    if world is not None and world < 1:
        raise FdpError(f"--world: expected at least 1 rank, got {world}")
    axes = {"shard": world or 1} if mesh is None else mesh_axes(mesh)
    if world is not None and _ranks(axes) != world:
        raise FdpError(f"--mesh: expected sizes that multiply to the {world} ranks of --world, got {mesh}")
    return axes


def _ranks(axes: dict[str, int]) -> int:
    ranks = 1
    for size in axes.values():
        ranks *= size
    return ranks


def _room(gpu: str) -> float:
    """The GiB of a GPU, by name or as a number."""
    from fdp.cli.configure import choose
    from fdp.types import FdpError

    try:
        room = float(gpu)
    except ValueError:
        return choose("gpu", gpu, GPUS)
    if not RESERVED < room < float("inf"):
        raise FdpError(f"--gpu: expected a name, or a number of GiB above {RESERVED}, got {gpu}")
    return room


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
        *("collective", "axis", "dtype", "calls", "whole GiB", "sent per rank GiB", "x parameters"),
    )
    for each in found.transfers:
        table.add_row(
            each.collective,
            f"{each.axis} ({each.ranks})",
            _name(each.dtype),
            f"{each.calls:,}",
            _gib(each.bytes),
            _gib(each.sent),
            f"{each.passes * each.elements / found.parameters:.2f}",
        )
    return table


def _flops(found: Footprint) -> Table:
    table = _table("flops of one rank", "dtype", "Tflop")
    for dtype, count in found.flops.items():
        table.add_row(_name(dtype), f"{count / 1e12:,.2f}")
    return table


def _curvature(found: Footprint) -> Table:
    """What K-FAC does beside a step, once in a period; no rows of other optimizers."""
    table = _table("curvature, each time it is measured (inverses not counted)", "what", "", "amount")
    if found.measurement is None:
        return table
    for each in found.measurement.transfers:
        table.add_row(
            f"{each.collective} over {each.axis} ({each.ranks})", _name(each.dtype), f"{_gib(each.bytes)} GiB"
        )
    for dtype, count in found.measurement.flops.items():
        table.add_row("flops", _name(dtype), f"{count / 1e12:,.2f} Tflop")
    return table


def _choices(plan: Plan) -> Table:
    """How norms and sums are made, leaves that differ only in their layer as one row."""
    table = _table(
        f"method {plan.method.value}: {plan.kept_bytes / GIB:.2f} GiB kept between norms and sum",
        *("leaf", "leaves", "norm by", "sum by", "ms", "timed", "kept GiB"),
    )
    alike: dict[tuple[str, str, str], list[Choice]] = {}
    for path, choice in plan.choices.items():
        leaf = re.sub(r"\.\d+\.", ".*.", path)
        alike.setdefault((leaf, choice.norm.value, choice.sum.value), []).append(choice)
    for (leaf, norm, by), kept in alike.items():
        predicted = _milliseconds(choice.seconds for choice in kept)
        measured = _milliseconds(choice.measured for choice in kept)
        table.add_row(leaf, f"{len(kept):,}", norm, by, predicted, measured, _gib(sum(c.kept_bytes for c in kept)))
    return table


def _milliseconds(seconds: Iterable[float | None]) -> str:
    known = [one for one in seconds if one is not None]
    return f"{sum(known) * 1e3:.3f}" if known else ""


def _verdict(found: Footprint, room: float) -> str:
    spare = _spare(found, room)
    kept = f"{room:g} GiB less {RESERVED} for the CUDA context and libraries"
    if spare >= 0:
        return f"[green]fits: {spare:.1f} GiB to spare of {kept}[/]"
    most = max(found.device.by_kind, key=lambda kind: found.device.by_kind[kind]).value
    return f"[yellow]does not fit: {-spare:.1f} GiB more than {kept}. Most are {most}: try {HINTS[most]}[/]"


def _spare(found: Footprint, room: float) -> float:
    return room - RESERVED - found.device.total / GIB


def _result(found: Footprint, room: float) -> dict[str, Any]:
    return {
        "parameters": found.parameters,
        "peak_bytes": found.device.total,
        "peak_phase": found.phase.value,
        "by_kind": {kind.value: held for kind, held in found.device.by_kind.items()},
        "host_bytes": found.host.total,
        "host_by_kind": {kind.value: held for kind, held in found.host.by_kind.items()},
        "phases": {phase.value: device.total for phase, (device, _) in found.phases.items()},
        "traffic": [
            each._asdict() | {"dtype": _name(each.dtype), "bytes": each.bytes, "sent": each.sent}
            for each in found.transfers
        ],
        "units": found.units,
        "flops": _by_dtype(found.flops),
        "measurement_flops": None if found.measurement is None else _by_dtype(found.measurement.flops),
        "kept_bytes": found.plan.kept_bytes,
        "fits": _spare(found, room) >= 0,
        "spare_gib": _spare(found, room),
    }


def _table(title: str, first: str, *rest: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for heading in rest:
        table.add_column(heading, justify="right")
    return table


def _by_dtype(flops: dict[Any, float]) -> dict[str, float]:
    return {_name(dtype): count for dtype, count in flops.items()}


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(size: float) -> str:
    return "-" if size < GIB / 1000 else f"{size / GIB:,.2f}"
