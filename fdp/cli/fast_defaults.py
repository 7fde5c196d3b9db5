"""Choose how a step is computed where the user leaves the choice to fdp: ``--dtype``, ``--compile``, ``--microbatch``.

    on a GPU with bfloat16, a language model     bfloat16, blocks compiled, the step recorded as a CUDA graph
    everywhere else                              float32, nothing compiled
    microbatch                                   on a GPU the largest that fits and is of use; 8 on a CPU, where a
                                                 small one wastes less: a Poisson batch fills its last microbatch with
                                                 padding; 32 with K-FAC, a whole compiled step, or several ranks

Compiled blocks and a recorded step start within seconds, and a private step is then about as fast as a plain one. A
recording needs state on the GPU and one process: with ``--offload`` or several ranks blocks are only compiled. With
K-FAC, which measures curvature between steps, nothing is compiled. What was chosen is in the header of the run and in
its settings, so that a resumed run computes the same.

    >>> options = resolve_fast_defaults(options)
    >>> config = choose_microbatch(options, configure(options))      # nothing is left to choose from here on
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fdp import models
from fdp.advice.machine import free_memory
from fdp.advice.microbatch import largest_microbatch, useful_microbatch
from fdp.cli.train_options import TrainOptions
from fdp.fast.compile_modes import Compile
from fdp.run.run_config import RunConfig
from fdp.types import FdpError

AUTO = "auto"
MICROBATCH, MICROBATCH_ON_CPU = 32, 8


def resolve_fast_defaults(options: TrainOptions) -> TrainOptions:
    """Return the options with ``auto`` replaced by what this machine does best; options that were given stay.

    A microbatch of None is left: :func:`choose_microbatch` needs the model.
    """
    compute, kfac = options.compute, options.training.optimizer == "kfac"
    on_gpu = compute.device in (AUTO, "cuda") and torch.cuda.is_available()
    fixed = kfac or compute.compile == "step" or options.ranks.mesh is not None
    if compute.microbatch is None and (fixed or not on_gpu):
        compute = replace(compute, microbatch=MICROBATCH if on_gpu or kfac else MICROBATCH_ON_CPU)
    if AUTO not in (compute.dtype, compute.compile):
        return replace(options, compute=compute)
    fast = _is_language_model(options.model.model) and _has_fast_gpu(compute.device)
    if compute.dtype == AUTO:
        compute = replace(compute, dtype="bfloat16" if fast else "float32")
    if compute.compile == AUTO:
        # Kernels for the rest of a step are in half precision.
        fast = fast and compute.dtype == "bfloat16" and not kfac
        recorded = fast and options.ranks.mesh is None and options.ranks.offload == "none"
        compute = replace(compute, compile="block" if fast else "none", cuda_graph=compute.cuda_graph or recorded)
    return replace(options, compute=compute)


def choose_microbatch(options: TrainOptions, config: RunConfig, *, saved: int | None = None) -> RunConfig:
    """Return the configuration with the microbatch of ``--microbatch auto``, if it was left to fdp.

    ``saved`` is that of the run that is resumed. A model that cannot be traced gets the microbatch of several ranks.
    """
    if options.compute.microbatch is not None:
        return config
    if saved is not None:
        return replace(config, microbatch_size=saved)
    if options.compute.repeatable:
        raise FdpError(
            "--repeatable: expected --microbatch N, got auto, which goes by the memory that happens to be free, and "
            "other sizes add in another order; give the one in the header of a run without --repeatable, or 64"
        )
    try:
        size = largest_microbatch(config, free_memory(config.device))
    except (FdpError, RuntimeError, NotImplementedError):  # a foreign model without shape rules
        size = min(MICROBATCH, useful_microbatch(config))
    return replace(config, microbatch_size=size)


def has_smaller_microbatches(device: torch.device, compile: Compile, *, kfac: bool) -> bool:
    """Return True if the end of a batch may have microbatches that are smaller than ``--microbatch``.

    K-FAC measures curvature on a whole microbatch, and to compile a whole step takes minutes per size.
    """
    return device.type == "cuda" and compile is not Compile.STEP and not kfac


def _has_fast_gpu(device: str) -> bool:
    """Return True if the run is on a GPU with tensor cores for bfloat16 (Ampere or newer)."""
    return device in (AUTO, "cuda") and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def _is_language_model(name: str) -> bool:
    return name in models.LANGUAGE or (name not in models.PRESETS and Path(name).is_dir())
