"""``fdp plan``: estimate the memory, traffic and flops of a step on one rank of many, without having them.

    fdp plan --model llama-13b --world 8 --zero 3 --method auto --context 2048 --microbatch 1 --dtype bfloat16
    fdp plan --model gpt-1t --world 256 --mesh shard=32,tensor=8 --method ghost --offload all --gpu h100

The step itself is traced on tensors without memory, which takes seconds to two minutes on a laptop.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from rich.console import Console

from fdp.cli.options import Flag, expand_groups
from fdp.cli.plan_tables import RESERVED_GIB, result_of, tables_of, verdict_of
from fdp.cli.train_options import train_flag

if TYPE_CHECKING:
    from fdp.estimate.estimate import Footprint
    from fdp.kfac.private.curvature_sources import KfacOptimizer
    from fdp.model import Model

GIB = 2**30
GPU_GIB = {"rtx4090": 24, "a100-40": 40, "l40s": 48, "a100": 80, "h100": 80, "h200": 141, "b200": 180}


@dataclass(frozen=True)
class PlanModelOptions:
    """The model and the optimizer."""

    panel: ClassVar[str] = "What to train"

    model: Annotated[str, Flag("A language model preset, up to gpt-1t.")] = "llama-13b"
    context: Annotated[int | None, train_flag("context")] = None
    optimizer: Annotated[str, train_flag("optimizer")] = "adamw"
    moments: Annotated[str, train_flag("moments")] = "float32"
    kfac_policy: Annotated[str, train_flag("kfac_policy")] = "auto"
    kfac_distribution: Annotated[str, train_flag("kfac_distribution")] = "gather"


@dataclass(frozen=True)
class PlanComputeOptions:
    """The method, precision and memory of a step."""

    panel: ClassVar[str] = "How to compute it"

    method: Annotated[str, train_flag("method")] = "auto"
    dtype: Annotated[str, train_flag("dtype")] = "bfloat16"
    microbatch: Annotated[int, Flag("Samples computed at once, per rank.")] = 1
    batch: Annotated[int | None, Flag("Samples of a step, per rank.", default_text="one microbatch")] = None
    memory_budget: Annotated[float | None, train_flag("memory_budget")] = None
    checkpoint_activations: Annotated[bool, train_flag("checkpoint_activations")] = False
    offload: Annotated[str, train_flag("offload")] = "none"
    sum_dtype: Annotated[str, train_flag("sum_dtype")] = "float64"
    stored_dtype: Annotated[
        str, Flag("full, or int8: gradients stored in 8 bits, as fdp train does on a Hopper GPU.")
    ] = "full"
    compile: Annotated[
        str,
        Flag(
            "none, or block: the head is fused with its loss, and noise and update are one pass in place, as fdp train "
            "runs AdamW on one GPU."
        ),
    ] = "none"

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return 1 if self.batch is None else -(-self.batch // self.microbatch)


@dataclass(frozen=True)
class PlanRankOptions:
    """The ranks and what is sharded over them."""

    panel: ClassVar[str] = "Ranks"

    world: Annotated[int | None, Flag("Number of ranks.", default_text="the ranks of --mesh, or 1")] = None
    mesh: Annotated[
        str | None, Flag("Ranks by axis: replicate=2,shard=4,tensor=1.", default_text="all along shard")
    ] = None
    zero: Annotated[int, train_flag("zero")] = 3


@dataclass(frozen=True)
class PlanOutputOptions:
    """The GPU that the step must fit on, and how the result is printed."""

    panel: ClassVar[str] = "What it is for"

    gpu: Annotated[str, Flag("The GPU it must fit on: a name, such as h100, a100-40 or h200, or GiB.")] = "h100"
    as_json: Annotated[bool, Flag("Print the result as one JSON object, last.", name="--json")] = False


@expand_groups
def plan_command(
    what: PlanModelOptions, compute: PlanComputeOptions, ranks: PlanRankOptions, output: PlanOutputOptions
) -> None:
    """Estimate the memory, traffic and flops of a step on one rank of many; nothing of that size is allocated."""
    # torch takes seconds to import; --help and mistakes on the command line should not wait for it.
    from fdp import models
    from fdp.cli.names import choose

    _check_options(what, compute)
    axes, gpu_gib = _parse_axes(ranks), _parse_gpu(output.gpu)
    model = models.build(choose("--model", what.model, {name: name for name in models.LANGUAGE}), context=what.context)
    console = Console(highlight=False)
    with console.status("tracing a step"):
        found = _estimate(model, what, compute, axes=axes, zero=ranks.zero)
    layout = ", ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "one"
    plural = "es" if compute.microbatches > 1 else ""
    console.print(
        f"{what.model}: {found.parameters / 1e9:,.3f} billion parameters, context {model.context}, ZeRO-{ranks.zero}, "
        f"ranks: {layout}; {compute.microbatches} microbatch{plural} of {compute.microbatch} in {compute.dtype}, "
        f"method {compute.method}, {what.optimizer}, offload: {compute.offload}",
        soft_wrap=True,
    )
    for table in tables_of(found):
        console.print(table)
    console.print(verdict_of(found, gpu_gib), soft_wrap=True)
    if output.as_json:
        given = {"model": what.model, "axes": axes, "zero": ranks.zero, "gpu_gib": gpu_gib}
        print(json.dumps(result_of(found, gpu_gib) | given))


def _check_options(what: PlanModelOptions, compute: PlanComputeOptions) -> None:
    from fdp.types import FdpError

    microbatch, batch, budget = compute.microbatch, compute.batch, compute.memory_budget
    if microbatch < 1 or (batch is not None and batch < 1):
        raise FdpError(f"expected --microbatch and --batch of at least 1, got {microbatch} and {batch}")
    if budget is not None and not budget > 0:
        raise FdpError(f"--memory-budget: expected a positive number of GiB, got {budget}")
    if budget is not None and compute.method not in ("auto", "flash"):
        raise FdpError(
            f"--memory-budget: expected --method auto or flash to go with it, got {compute.method}; it does nothing "
            f"with others"
        )
    if what.optimizer != "kfac" and (what.kfac_policy, what.kfac_distribution) != ("auto", "gather"):
        raise FdpError(f"--kfac-policy, --kfac-distribution: expected --optimizer kfac with them, got {what.optimizer}")


def _estimate(
    model: Model, what: PlanModelOptions, compute: PlanComputeOptions, *, axes: dict[str, int], zero: int
) -> Footprint:
    """Trace a step and return its footprint on one rank."""
    import torch

    from fdp.cli.configure import STORED_DTYPES, SUM_DTYPES
    from fdp.cli.names import by_value, choose, choose_dtype, parse_offload
    from fdp.estimate.estimate import Scale, StepSettings, plan_at_scale
    from fdp.gradients.plan import Method
    from fdp.optimizers.by_name import OPTIMIZERS
    from fdp.parallel.sharding import Zero

    assert model.context is not None
    tokens = torch.empty((), dtype=torch.int64).expand(compute.microbatch, model.context + 1)
    optimizers: dict[str, Any] = OPTIMIZERS | {"kfac": lambda rate: _make_kfac(what, private=compute.method != "none")}
    stage = choose("--zero", str(zero), by_value(Zero))
    settings = StepSettings(
        method=choose("--method", compute.method, by_value(Method)),
        dtype=choose_dtype(compute.dtype),
        optimizer=_narrow(what, choose("--optimizer", what.optimizer, optimizers)(1e-3)),
        sum_dtype=choose("--sum-dtype", compute.sum_dtype, SUM_DTYPES),
        stored_dtype=choose("--stored-dtype", compute.stored_dtype, STORED_DTYPES),
        in_place=choose("--compile", compute.compile, {"none": False, "block": True}),
        offload=parse_offload(compute.offload),
        memory_budget=None if compute.memory_budget is None else compute.memory_budget * GIB,
        checkpoint_activations=compute.checkpoint_activations,
        microbatches=compute.microbatches,
    )
    scale = None if math.prod(axes.values()) == 1 else Scale(axes, stage)
    return plan_at_scale(model, {"tokens": tokens}, scale=scale, settings=settings)


def _narrow(what: PlanModelOptions, optimizer: Any) -> Any:
    """Return the optimizer with the moments that ``--moments`` names."""
    from fdp.cli.configure import MOMENTS
    from fdp.cli.names import choose
    from fdp.types import FdpError

    if what.moments != "float32" and what.optimizer != "adamw":
        raise FdpError(f"--moments: expected --optimizer adamw to go with it, got {what.optimizer}")
    return choose("--moments", what.moments, MOMENTS)(optimizer)


def _make_kfac(what: PlanModelOptions, *, private: bool) -> KfacOptimizer:
    """Return K-FAC with default settings; a private run uses synthetic data, which costs no privacy."""
    from fdp.cli.configure_kfac import POLICIES
    from fdp.cli.names import by_value, choose
    from fdp.kfac.config import Distribution, KfacConfig
    from fdp.kfac.form_policy import policy_named
    from fdp.kfac.private.curvature_sources import KfacOptimizer, Synthetic
    from fdp.types import FdpError

    policy = choose("--kfac-policy", what.kfac_policy, POLICIES)
    distribution = choose("--kfac-distribution", what.kfac_distribution, by_value(Distribution))
    if private and policy != "auto":
        raise FdpError(
            "--kfac-policy: expected --method none to go with it: a private run is dense up to 4096 features"
        )
    if private and distribution is Distribution.RING:
        raise FdpError(
            "--kfac-distribution: expected gather or owner with a private --method, or --method none; got ring"
        )
    config = KfacConfig(policy=policy_named(policy), distribution=distribution)
    return KfacOptimizer(1e-3, config, Synthetic() if private else None)


def _parse_axes(ranks: PlanRankOptions) -> dict[str, int]:
    from fdp.cli.names import parse_mesh
    from fdp.types import FdpError

    if ranks.world is not None and ranks.world < 1:
        raise FdpError(f"--world: expected at least 1 rank, got {ranks.world}")
    axes = {"shard": ranks.world or 1} if ranks.mesh is None else parse_mesh(ranks.mesh)
    if ranks.world is not None and math.prod(axes.values()) != ranks.world:
        raise FdpError(f"--mesh: expected sizes that multiply to the {ranks.world} ranks of --world, got {ranks.mesh}")
    return axes


def _parse_gpu(gpu: str) -> float:
    """Return the GiB of a GPU that is given by name or as a number."""
    from fdp.cli.names import choose
    from fdp.types import FdpError

    try:
        gib = float(gpu)
    except ValueError:
        return choose("--gpu", gpu, GPU_GIB)
    if not RESERVED_GIB < gib < math.inf:
        raise FdpError(f"--gpu: expected a name, or a number of GiB above {RESERVED_GIB}, got {gpu}")
    return gib
