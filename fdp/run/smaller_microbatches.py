"""Make a step that does not fit into memory again with smaller microbatches, and all later steps with those.

    (64, 64, 8)  out of memory with 64  ->  (32, 32, 32, 32, 8)       the same rows, the same draw, the same noise

The sizes are those of the plan (``fdp.gradients.plan.add_smaller_sizes``); the rows of a batch are of the smallest.

    >>> step = or_smaller(step)
    >>> state, metrics = step(state, batch, key)
"""

from __future__ import annotations

import warnings

import torch

from fdp.fast.out_of_memory import OutOfMemory
from fdp.parallel.sharding import Sharding
from fdp.privacy.microbatches import power_of_two_below
from fdp.types import Batch, Key, Metrics, RowGroups, Step, TrainState


class RunWarning(UserWarning):
    """Something about microbatches that the user of a run should read; ``fdp train`` prints it in a line."""


class MemoryWarning(RunWarning):
    """A run goes on with smaller microbatches."""


def or_smaller(step: Step, sharding: Sharding | None = None) -> Step:
    """Return the step, made again with microbatches of the next smaller size if it runs out of memory; it says so.

    With a ``sharding`` the step itself is returned: other ranks would wait in a collective for one that starts again.

    Guarantees:
      - a step is made once, on the samples that were drawn for it: a failed one has changed nothing;
      - if the smallest size does not fit either, the error says which to give.
    """
    if sharding is not None:
        return step
    most_rows: int | None = None

    def step_or_smaller(state: TrainState, batch: Batch, key: Key) -> tuple[TrainState, Metrics]:
        nonlocal most_rows
        while True:
            batch = limit_groups(batch, most_rows)
            try:
                return step(state, batch, key)
            except OutOfMemory as error:
                largest = 1 if batch.groups is None else max(batch.groups.sizes)
                if largest == 1:
                    raise
                most_rows, size = power_of_two_below(largest), error.size
            # The error and the tensors of its frames are gone here.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            warnings.warn(
                f"out of memory with microbatches of {size} samples; this step and the next are made with "
                f"{size * most_rows // largest} (results differ by rounding only)",
                MemoryWarning,
                stacklevel=2,
            )

    return step_or_smaller


def limit_groups(batch: Batch, most_rows: int | None) -> Batch:
    """Return the batch with microbatches of at most ``most_rows`` rows, a power of two.

    Larger ones are cut into powers of two, which are among the sizes (``fdp.privacy.microbatches.sizes_from``).
    """
    if batch.groups is None or most_rows is None:
        return batch
    sizes: list[int] = []
    for size in batch.groups.sizes:
        part = min(size, most_rows)
        while size:
            while part > size:
                part //= 2
            sizes.append(part)
            size -= part
    return batch._replace(groups=RowGroups(tuple(sizes)))
