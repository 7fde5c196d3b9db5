"""Make a step that does not fit into memory again with smaller microbatches, and all later steps with those.

    (64, 64, 8)  out of memory with 64  ->  (32, 32, 32, 32, 8)       the same rows, the same draw, the same noise

The sizes are those of the plan (``fdp.gradients.plan.add_smaller_sizes``); the rows of a batch are of the smallest. If
memory ran out for some data and not for neighbouring data, all samples of a step would come into microbatches of other
sizes, and not one microbatch (``fdp.checks.equal_sizes``); it runs out for a size, not for the numbers in it.

    >>> step = or_smaller(step, sizes=(64, 32, 16, 8))
    >>> state, metrics = step(state, batch, key)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from fdp.fast.out_of_memory import OutOfMemory
from fdp.parallel.sharding import Sharding
from fdp.privacy.microbatches import power_of_two_below
from fdp.types import Batch, Key, Metrics, RowGroups, Step, TrainState


class RunWarning(UserWarning):
    """Something that the user of a run should read; ``fdp train`` prints it in a line."""


class MemoryWarning(RunWarning):
    """A run goes on with smaller microbatches."""


def or_smaller(step: Step, sharding: Sharding | None = None, *, sizes: Sequence[int]) -> Step:
    """Return the step, made again with smaller microbatches if it runs out of memory, and a warning that says so.

    ``sizes`` are those of the plan, largest first. With a ``sharding`` the step itself is returned: other ranks would
    wait in a collective for one that starts again.

    Guarantees:
      - a step is made once, on the samples that were drawn for it: a failed one has changed nothing;
      - if the smallest size does not fit either, the error says which to give.
    """
    if sharding is not None:
        return step
    rows = [size // sizes[-1] for size in sizes]
    most_rows: int | None = None

    def step_or_smaller(state: TrainState, batch: Batch, key: Key) -> tuple[TrainState, Metrics]:
        nonlocal most_rows
        while True:
            if most_rows is not None:
                batch = limit_groups(batch, [of for of in rows if of <= most_rows])
            try:
                return step(state, batch, key)
            except OutOfMemory as error:
                largest = 1 if batch.groups is None else max(batch.groups.sizes)
                if largest == 1:
                    raise
                half = power_of_two_below(largest)
                most_rows, size = max(of for of in rows if of <= half), error.size
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


def limit_groups(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return the batch with microbatches of these numbers of rows, largest first and the last of them 1.

    Larger ones are cut, each into as few as possible if these numbers are powers of two.
    """
    if batch.groups is None:
        return batch
    sizes: list[int] = []
    for size in batch.groups.sizes:
        while size:
            sizes.append(next(of for of in rows if of <= size))
            size -= sizes[-1]
    return batch._replace(groups=RowGroups(tuple(sizes)))
