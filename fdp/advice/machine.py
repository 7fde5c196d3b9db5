"""The speed and memory of this machine for one model: timed on the real step, not looked up.

    seconds of a step = per_step + batch size x per_sample          from steps of one and of two microbatches
    bytes             = fixed + microbatch x per_sample             from traces of a step at two sizes

The timed steps run on a few real samples, since their shapes decide. Nothing of them is released but the time; their
parameters are thrown away.

    >>> memory = estimate_memory(config)
    >>> size = choose_microbatch(memory, free_memory(config.device), most=256)
    >>> speed = time_steps(config, microbatch=size)
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from fdp import tree
from fdp.advice.batch_and_steps import Speed
from fdp.estimate.estimate import StepSettings, plan_at_scale
from fdp.privacy.sampling import trusted_batch
from fdp.run.prepare_run import Run, prepare
from fdp.run.run_config import RunConfig
from fdp.types import Batch, TrainState

USABLE = 0.8
"""The part of free memory that a step may use; fragmentation and caches take the rest."""

LARGEST_MICROBATCH = {"cpu": 32, "cuda": 64}
"""Beyond these, larger microbatches are hardly faster."""

TRACED = (1, 4)
"""Microbatches that memory is traced at."""


class Memory(NamedTuple):
    """Bytes of a step: ``fixed + microbatch x per_sample``."""

    fixed: float
    per_sample: float

    def bytes(self, microbatch: int) -> float:
        """Return the bytes of a step that computes ``microbatch`` samples at once."""
        return self.fixed + microbatch * self.per_sample


def estimate_memory(config: RunConfig) -> Memory:
    """Return the memory of a step of the run, by tracing it at two sizes without allocating anything."""
    settings = two_microbatches(config)
    few, more = (plan_at_scale(config.model, _samples(config, size), settings=settings).device.total for size in TRACED)
    per_sample = max(0.0, (more - few) / (TRACED[1] - TRACED[0]))
    return Memory(few - TRACED[0] * per_sample, per_sample)


def two_microbatches(config: RunConfig) -> StepSettings:
    """Return the settings of a step of two microbatches: with more, it takes no more memory."""
    return StepSettings(
        method=config.method,
        dtype=config.dtype,
        optimizer=config.optimizer,
        offload=config.offload,
        checkpoint_activations=config.checkpoint_activations,
        memory_budget=config.memory_budget,
        stored_dtype=config.stored_dtype,
        microbatches=2,
    )


def free_memory(device: torch.device) -> float:
    """Return the bytes that are free on the device, or in the machine for a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            known = dict(line.split(":") for line in lines)
        return 1024.0 * int(known["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # not Linux
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def choose_microbatch(memory: Memory, free: float, *, most: int, device: torch.device) -> int:
    """Return the largest power of two that fits into free memory and is of use; at least 1."""
    size = 1
    while 2 * size <= min(most, LARGEST_MICROBATCH[device.type]) and memory.bytes(2 * size) <= USABLE * free:
        size *= 2
    return size


def time_steps(config: RunConfig, *, microbatch: int, repeats: int = 2) -> Speed:
    """Return the speed of the run's step on this machine, the fastest of ``repeats`` after one to warm up."""
    quick = replace(
        config,
        epsilon=None,
        noise_multiplier=None if config.noise_multiplier is None and config.epsilon is None else 1.0,
        batch_size=min(microbatch, len(config.dataset)),
        population=None,
        microbatch_size=microbatch,
        smaller_microbatches=False,
        steps=1,
        seed=None,
        layout=None,
        evaluation=None,
        cuda_graph=False,
    )
    run, state = prepare(quick)
    one, two = (_batch(run, count) for count in (1, 2))
    state = _timed(run, state, one)[1]
    times: dict[int, float] = {}
    for count, batch in ((1, one), (2, two)) * repeats:
        seconds, state = _timed(run, state, batch)
        times[count] = min(seconds, times.get(count, seconds))
    each = max(times[2] - times[1], 0.1 * times[1])
    return Speed(max(0.0, times[1] - each), each / microbatch)


def _timed(run: Run, state: TrainState, batch: Batch) -> tuple[float, TrainState]:
    device = run.config.device
    key = run.key.to(device)
    start = time.perf_counter()
    state, _ = run.step(state, batch, key)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, state


def _batch(run: Run, count: int) -> Batch:
    """Return ``count`` equal microbatches of the first samples, for timing only."""
    config = run.config
    rows = tree.map(lambda leaf: leaf.to(config.device), _samples(config, config.microbatch_size))
    data = tree.map(lambda leaf: leaf.expand(count, *leaf.shape).contiguous(), rows)
    mask = torch.ones(count, config.microbatch_size, device=config.device)
    return trusted_batch(data, mask, run.mechanism.sampling, step=None)


def _samples(config: RunConfig, count: int) -> dict[str, torch.Tensor]:
    return config.dataset.fetch(np.arange(count) % len(config.dataset))
