"""The plan of a run: how norms and sums are computed, for every size of its microbatches.

>>> plan, config = make_run_plan(config, model, sharding)      # a config of one size if others cannot be planned
>>> sizes = local_sizes(config, sharding)                      # this rank's samples of a microbatch, largest first
>>> examples = first_examples(config, sizes[0])                # for shapes
>>> examples = spread_examples(config, 4)                      # for checks of values
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fdp.gradients import timing
from fdp.gradients.plan import TIMED_METHODS, CannotRound, Plan, add_smaller_sizes, make_plan
from fdp.model import Model
from fdp.parallel.sharding import Sharding, abstract_params
from fdp.privacy.microbatches import samples_per_rank
from fdp.run.overlap import send_to_device
from fdp.run.own_samples import spread_indices
from fdp.run.run_config import RunConfig
from fdp.types import FdpError, Path, Tree


def make_run_plan(
    config: RunConfig, model: Model, sharding: Sharding | None, *, rounded: Collection[Path] | None = None
) -> tuple[Plan, RunConfig]:
    """Return the plan, and the configuration with the sizes of microbatches that could be planned.

    ``rounded`` are the leaves that a resumed run stores in 8 bits; None: a new run, which chooses them.
    """
    config = _stored_as_before(config, rounded)
    params = abstract_params(model, sharding, device=config.device)
    largest, *smaller = local_sizes(config, sharding)
    examples = first_examples(config, largest)
    plan_with = partial(
        make_plan,
        model,
        params,
        examples,
        method=config.method,
        memory_budget=config.memory_budget,
        dtype=config.dtype,
        stored_dtype=config.stored_dtype,
        rounded=rounded,
    )
    # Several ranks, and runs that are to be repeatable, must make the same choices, so they do not go by times.
    timed = config.method in TIMED_METHODS and sharding is None and not config.repeatable
    try:
        plan = plan_with()
    except CannotRound as error:
        raise FdpError(
            f"resume: this run stores gradients in 8 bits, and its noise is drawn for that: expected --stored-dtype "
            f"auto or int8 with --dtype bfloat16, in one process on a Hopper GPU (H100, H200), got {config.dtype} on "
            f"{config.device.type}; resume it there, or give another --out to start anew"
        ) from error
    if timed and timing.is_worth_timing(config.device, config.dtype):
        uses = [use for block in plan.uses for use in block]
        norms = timing.timed_norms(config.stored_dtype)
        store = timing.default_store()
        times = timing.measure(uses, dtype=config.dtype, device=config.device, store=store, norms=norms)
        plan = plan_with(timings=times)
    if config.stored_by_default and not plan.rounded:  # the same sums as without, so the same noise
        plan = plan._replace(stored_dtype=None)
    try:
        return add_smaller_sizes(plan, model, params, examples, sizes=smaller), config
    except FdpError:  # a dimension of the model happens to be one of the smaller sizes
        return make_run_plan(replace(config, smaller_microbatches=False), model, sharding, rounded=rounded)


def _stored_as_before(config: RunConfig, rounded: Collection[Path] | None) -> RunConfig:
    """Return the configuration in which a resumed run stores gradients as it did; by default only, not if asked."""
    if rounded is None or not config.stored_by_default:
        return config
    return replace(config, stored_dtype=torch.int8 if rounded else None)


def local_sizes(config: RunConfig, sharding: Sharding | None) -> list[int]:
    """Return how many samples of a microbatch this rank computes, for every size."""
    sizes, ranks = config.microbatch_sizes, 1 if sharding is None else sharding.ranks
    return [samples_per_rank(size, sizes, ranks=ranks) for size in sizes]


def spread_examples(config: RunConfig, count: int) -> Tree:
    """Return samples from all over the data on the device: in sorted data, the first ones are all of one kind."""
    return send_to_device(config.dataset.fetch(spread_indices(len(config.dataset), count)), config.device)


def first_examples(config: RunConfig, count: int) -> Tree:
    """Return the first samples on the device, for their shapes and for checks."""
    return send_to_device(config.dataset.fetch(np.arange(count) % len(config.dataset)), config.device)
