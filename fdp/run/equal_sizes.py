"""The sizes of a run's microbatches: those that fit into memory and in which a sample adds the same to the sum.

    m difference <= 1e-6,     m the largest size        so that all samples that come into another size, together,
                                                        move the sum by no more than rounding is said to: 1e-6 C

Attention's backward may add in any order, so that a sample differs from itself in one size. A size that rounds
otherwise differs each time, so sizes are compared again; if a sample still differs, and from itself as well, they are
compared with attention that adds in one order.

>>> sizes = usable_sizes(config, stages, state)         # (64, 32, 16) if microbatches of 8 are rounded otherwise
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

from fdp.checks.equal_sizes import differences, explain_difference, least_differences, smaller_differences
from fdp.run.run_config import RunConfig
from fdp.run.run_plan import first_examples, local_sizes
from fdp.run.smaller_microbatches import MemoryWarning, RunWarning
from fdp.stages import Stages
from fdp.step import sample_part
from fdp.types import NotRepeatable, TrainState

MOST_MOVED = 1e-6
"""The most, as a fraction of C, by which samples that come into a microbatch of another size may move the sum."""
REPETITIONS = 5
"""How often the largest size is compared with itself."""
MOST_TIMES = 2.0
"""What a size may differ by, as a multiple of what a sample differs from itself, for the order of additions to be the
reason."""


class RoundingWarning(RunWarning):
    """A run does without some sizes of microbatches, in which samples would be rounded otherwise."""


def usable_sizes(
    config: RunConfig, stages: Stages, state: TrainState, *, say: Callable[[str], None] = lambda stage: None
) -> tuple[int, ...]:
    """Return the sizes of microbatches that the run uses, largest first; it warns about those that it leaves out.

    Without privacy every size will do. ``say(stage)`` is told what is done.

    Guarantees:
      - of two sizes that are used, both were compared, and samples in them differ by at most ``MOST_MOVED / m`` or,
        if attention adds in any order, by ``MOST_TIMES`` what a sample differs from itself, which is not in the slack.
    """
    sizes = config.microbatch_sizes
    if stages.sampling is None or len(sizes) == 1:
        return sizes
    say("checking that a sample adds the same to the sum in microbatches of every size")
    by = _differences(config, stages, state)
    if not by:
        return sizes[-1:]  # nothing fits; the first step will say so
    if (largest := next(iter(by))) != sizes[0]:
        _warn(f"out of memory with microbatches of {sizes[0]} samples; steps have at most {largest}", MemoryWarning)
    used = join_sizes([size for size in by if by[size] <= _tolerance(by)])
    if wrong := [difference for difference in by.values() if not difference <= _tolerance(by)]:
        others = [size for size in by if size not in used]
        _warn(
            f"microbatches of {_listed(used)} samples are used, not of {_listed(others)}: {explain_difference(wrong)}. "
            "One sample more or less could move the gradients of others. Steps take longer: more of them is padding",
            RoundingWarning,
        )
    return used


def _differences(config: RunConfig, stages: Stages, state: TrainState) -> dict[int, float]:
    """Return the difference of every size that fits from the largest, the least of several if they come and go.

    If they stay, and a sample differs from itself in the largest size, that of repeatable gradients counts for every
    size that differs by at most ``MOST_TIMES`` that; not on several ranks, of which one could run out of memory.
    """
    sharding, sizes = stages.execution.sharding, config.microbatch_sizes
    local = local_sizes(config, sharding)
    examples = first_examples(config, local[0])

    def compare(stages: Stages, these: Sequence[int]) -> dict[int, float]:
        found = differences(sample_part(stages, state), examples, sizes=these, sharded=sharding is not None)
        return {size: found[here] for size, here in zip(sizes, local) if here in found}

    if stages.repeatable:
        return compare(stages, local)
    by = least_differences(lambda: compare(stages, local), agree=_agree)
    if _agree(by) or sharding is not None:
        return by
    largest = next(here for size, here in zip(sizes, local) if size in by)
    itself = max(compare(stages, [largest] * REPETITIONS).values(), default=0.0)
    try:
        repeated = compare(stages._replace(repeatable=True), local) if 0 < itself < math.inf else {}
    except NotRepeatable:
        return by
    if next(iter(repeated), None) != next(iter(by)):
        return by
    explained = {size: one for size, one in repeated.items() if by.get(size, 0) <= MOST_TIMES * itself}
    return smaller_differences(by, explained)


def _agree(by: dict[int, float]) -> bool:
    return all(difference <= _tolerance(by) for difference in by.values())


def _tolerance(by: dict[int, float]) -> float:
    """Return how much each size may differ from the largest, so that two others differ by at most twice as much."""
    return MOST_MOVED / next(iter(by)) / 2


def join_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the largest of the sizes, and others, so that all are multiples of the smallest: rows of a batch are."""
    smallest = min(size for size in sizes if sizes[0] % size == 0)
    return tuple(size for size in sizes if size % smallest == 0)


def _listed(sizes: Sequence[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))


def _warn(text: str, kind: type[RunWarning]) -> None:
    warnings.warn(text, kind, stacklevel=3)
