"""Compare predicted and measured peak memory of one step on a CUDA GPU; exit with 1 if any is more than 10 % off.

    python benchmarks/plan_check.py            # one GPU, under two minutes; without an install: PYTHONPATH=.:kernels

Prints a table and writes ``runs/plan_check.json``. The prediction is ``plan_at_scale``, made before the GPU is touched;
the measurement is ``torch.cuda.max_memory_allocated`` over the second step, after the first has warmed up the
libraries. Rows with a mesh run on a mesh of one rank over NCCL. Weights and tokens are random: neither changes a byte.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from fdp import keys, tree
from fdp.checks.first_call import Checks
from fdp.estimate.estimate import Footprint, Scale, StepSettings, plan_at_scale
from fdp.estimate.ledger import MemoryKind
from fdp.fast.compile_modes import make_execution
from fdp.gradients.plan import Method, make_plan
from fdp.model import Model
from fdp.models import LANGUAGE, LlamaConfig, build, llama
from fdp.optimizers import adamw
from fdp.parallel.dtensors import as_dtensor
from fdp.parallel.mesh import make_mesh
from fdp.parallel.offload import NO_OFFLOAD, Offload
from fdp.parallel.sharding import Sharding, Zero, abstract_params, make_sharding
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import init_state, make_train_step

GIB = 2**30
TOLERANCE = 0.1
OUT = Path("runs/plan_check.json")
CUDA = torch.device("cuda")
LLAMA_7B = LANGUAGE["llama-7b"]
assert isinstance(LLAMA_7B, LlamaConfig)


class Case(NamedTuple):
    """One step: a model, the shape of its microbatch, and the options of the step."""

    name: str
    model: Model
    samples: int
    method: Method
    dtype: torch.dtype = torch.bfloat16
    offload: Offload = NO_OFFLOAD
    checkpoint_activations: bool = False
    memory_budget: float | None = None
    microbatches: int = 1
    zero: Zero | None = None


GPT2 = build("gpt2")
LLAMA = llama(LLAMA_7B._replace(layers=8), name="llama-7b, 8 layers")
CASES = (
    *(Case("gpt2", GPT2, 4, method) for method in (Method.AUTO, Method.GHOST, Method.GHOST_BK, Method.NONE)),
    Case("gpt2, float32", GPT2, 4, Method.AUTO, torch.float32),
    Case("gpt2, 3 microbatches", GPT2, 4, Method.AUTO, microbatches=3),
    Case("gpt2, checkpoints", GPT2, 8, Method.GHOST, checkpoint_activations=True),
    Case("gpt2, offload", GPT2, 8, Method.AUTO, offload=Offload(params=True, grads=True, optimizer=True)),
    Case("gpt2-large", build("gpt2-large"), 2, Method.AUTO, memory_budget=4 * GIB),
    *(Case("llama 8 layers", LLAMA, 1, method) for method in (Method.AUTO, Method.GHOST, Method.NONE)),
    Case("gpt2, mesh of 1, ZeRO-3", GPT2, 4, Method.AUTO, zero=Zero.THREE),
    Case("gpt2, mesh of 1, ZeRO-2", GPT2, 4, Method.GHOST, zero=Zero.TWO),
)


def shapes_of(case: Case) -> dict[str, torch.Tensor]:
    assert case.model.context is not None
    return {"tokens": torch.zeros((), dtype=torch.int64).expand(case.samples, case.model.context + 1)}


def predict(case: Case) -> Footprint:
    return plan_at_scale(
        case.model,
        shapes_of(case),
        scale=None if case.zero is None else Scale({"shard": 1}, case.zero),
        settings=StepSettings(
            method=case.method,
            dtype=case.dtype,
            offload=case.offload,
            checkpoint_activations=case.checkpoint_activations,
            memory_budget=case.memory_budget,
            microbatches=case.microbatches,
        ),
    )


def measure_peak(case: Case) -> int:
    """Return the bytes allocated at the peak of the second step."""
    model, optimizer = case.model, adamw(1e-3)
    private = case.method is not Method.NONE
    mechanism = Mechanism(poisson(1 << 20, expected_batch_size=1024), flat(max_norm=1.0), 1.0 if private else 0.0)
    sharding: Sharding | None = None
    if case.zero is not None:
        sharding = make_sharding(model, make_mesh({"shard": 1}, device_type="cuda"), zero=case.zero)
    plan = make_plan(
        model,
        abstract_params(model, sharding),
        shapes_of(case),
        method=case.method,
        memory_budget=case.memory_budget,
        dtype=case.dtype,
    )
    flat_params: dict[str, Any] = {
        path: torch.randn(spec.shape, device=CUDA).mul_(0.02) for path, spec in model.leaves.items()
    }
    if sharding is not None:
        flat_params = {path: as_dtensor(leaf, path, sharding) for path, leaf in flat_params.items()}
    state = init_state(
        model,
        tree.nest(flat_params),
        optimizer,
        mechanism,
        execution=make_execution(sharding=sharding, offload=case.offload),
        device=CUDA,
    )
    del flat_params
    step = make_train_step(
        model,
        optimizer,
        mechanism=mechanism,
        plan=plan,
        execution=make_execution(
            sharding=sharding, offload=case.offload, checkpoint_activations=case.checkpoint_activations
        ),
        checks=Checks.SKIPPED,
    )
    assert model.vocab_size is not None
    assert model.context is not None
    shape = (case.microbatches, case.samples, model.context + 1)
    tokens = torch.randint(model.vocab_size, shape, device=CUDA)
    batch = trusted_batch({"tokens": tokens}, torch.ones(shape[:2], device=CUDA), mechanism.sampling, step=None)
    key = keys.key(0).to(CUDA)
    for _ in range(2):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        state, _ = step(state, batch, key)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("plan_check: expected a CUDA GPU, found none")
    plans = [(case, predict(case)) for case in CASES]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for heading in ("case", "method", "predicted GiB", "measured GiB", "ratio", "at", "seconds"):
        table.add_column(heading, justify="left" if heading in ("case", "method", "at") else "right")
    rows = []
    for case, plan in plans:
        start = time.perf_counter()
        peak = measure_peak(case)
        gc.collect()
        torch.cuda.empty_cache()
        ratio = plan.device.total / peak
        rows.append(
            {
                "case": case.name,
                "method": case.method.value,
                "predicted": plan.device.total,
                "measured": peak,
                "ratio": ratio,
                "by_kind": {kind.value: plan.device.by_kind[kind] for kind in MemoryKind},
            }
        )
        seconds = f"{time.perf_counter() - start:.1f}"
        sizes = (f"{plan.device.total / GIB:.3f}", f"{peak / GIB:.3f}", f"{ratio:.3f}")
        table.add_row(case.name, case.method.value, *sizes, plan.phase.value, seconds)
    dist.destroy_process_group()
    Console(width=120, highlight=False).print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(rows, indent=2) + "\n")
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    print(f"worst: {worst['case']}, {worst['method']}: {worst['ratio']:.3f}; allowed 1 +- {TOLERANCE}")
    sys.exit(int(abs(worst["ratio"] - 1) > TOLERANCE))


if __name__ == "__main__":
    main()
