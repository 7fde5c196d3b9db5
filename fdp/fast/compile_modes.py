"""Compile modes of the command line, and the execution that each stands for.

>>> execution = make_execution(compile=Compile.BLOCK, cuda_graph=True)
>>> step = make_train_step(model, optimizer, mechanism=mechanism, plan=plan, execution=execution, donate=("state",))
"""

from __future__ import annotations

from enum import Enum

import torch

from fdp.fast.compiled import CompiledRunner
from fdp.gradients.execution import EAGER, Execution, Memory
from fdp.parallel.offload import NO_OFFLOAD, Offload
from fdp.parallel.sharding import Sharding


class Compile(Enum):
    """Compile nothing, each kind of block once, or the full work on a microbatch and the full update."""

    NONE = "none"
    BLOCK = "block"
    STEP = "step"


def make_execution(
    *,
    sharding: Sharding | None = None,
    offload: Offload = NO_OFFLOAD,
    checkpoint_activations: bool = False,
    compile: Compile = Compile.NONE,
    cuda_graph: bool = False,
    repeatable: bool = False,
    backend: str = "inductor",
    sum_dtype: torch.dtype = torch.float64,
    microbatch_size: int | None = None,
) -> Execution:
    """Return an execution with a runner of its own. ``checkpoint_activations`` recomputes blocks in the backward;
    ``backend`` is torch.compile's; for the last two, see :class:`fdp.gradients.execution.Memory`.
    """
    return Execution(
        sharding,
        Memory(recompute=checkpoint_activations, offload=offload, sum_dtype=sum_dtype, microbatch_size=microbatch_size),
        CompiledRunner(backend, one_order=repeatable or sharding is not None) if compile is Compile.BLOCK else EAGER,
        compile_step=backend if compile is Compile.STEP else None,
        cuda_graph=cuda_graph,
        repeatable=repeatable,
    )
