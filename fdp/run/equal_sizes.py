"""Sizes of microbatches that may stand side by side: a sample adds the same to the sum in all of them.

    batch       | 64 samples | 64 samples | 8 |           one more sample, before all others, and these move up by one:
    batch'      | 64 samples | 64 samples | 16    |       eight samples are now in a microbatch of another size

A library may compute a product of other sizes with another kernel, which rounds otherwise. If that changed what these
samples add, the sum would move by more than the new sample's part, which is all that the noise covers. In microbatches
of one size a sample's part does not depend on its place. So a run uses several sizes only if one real sample, alone in
the sum, adds the same numbers in each of them, at another place and beside other samples.

    >>> config = keep_equal_sizes(config, stages, state)                # one size, if others disagree with it
    >>> sizes_agree(stages, state, examples, sizes=(64, 32, 16, 8))
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.fast.out_of_memory import is_out_of_memory
from fdp.gradients.lazy_sum import LazySum
from fdp.gradients.taps import batch_size_of
from fdp.parallel.agree import gather_values
from fdp.parallel.dtensors import localize
from fdp.run.run_config import RunConfig
from fdp.run.run_plan import first_examples, local_sizes
from fdp.run.smaller_microbatches import RunWarning
from fdp.stages import Stages
from fdp.step import begin, microbatch_sum
from fdp.types import ClippedSum, TrainState, Tree

TOLERANCE = 1e-8
"""The most, as a fraction of it, by which a sample's part may differ: of a thousand samples together 1e-5 C."""
SAMPLES_TRIED = 4
"""Samples that are tried until one has a gradient."""
ELEMENTS_COMPARED = 1 << 12
"""Elements of every leaf that are compared: what rounds otherwise does so all over a leaf."""


class RoundingWarning(RunWarning):
    """A run does without smaller microbatches, in which samples would be rounded otherwise."""


def keep_equal_sizes(
    config: RunConfig, stages: Stages, state: TrainState, *, say: Callable[[str], None] = lambda stage: None
) -> RunConfig:
    """Return the configuration, with one size of microbatches if samples do not add the same in all its sizes.

    Without privacy every size will do. ``say(stage)`` is told what is done.
    """
    sizes = local_sizes(config, stages.execution.sharding)
    if stages.sampling is None or len(sizes) == 1:
        return config
    say("checking that a sample adds the same to the sum in microbatches of every size")
    if sizes_agree(stages, state, first_examples(config, sizes[0]), sizes=sizes):
        return config
    warnings.warn(
        f"the last microbatch of a step is padded to {config.microbatch_size} samples: in a smaller one this device "
        "rounds a sample's gradient otherwise, and one sample more or less would move the gradients of others",
        RoundingWarning,
        stacklevel=2,
    )
    return replace(config, smaller_microbatches=False)


def sizes_agree(stages: Stages, state: TrainState, examples: Tree, *, sizes: Sequence[int]) -> bool:
    """Return True if a sample adds the same to the sum in microbatches of all ``sizes``, which are this rank's.

    ``examples`` are as many samples as the largest size has. A size for which there is no memory is left out: a step
    does not use it either. Every rank calls this, with the same sizes, and gets the same answer.

    Guarantees:
      - nothing is released, and ``state`` is not changed;
      - if no sample that is tried has a gradient that is finite and not 0, the answer is False.
    """
    local = localize(state)
    local = local._replace(params=tree.map(_without_zeros, local.params))
    try:
        for which in range(min(SAMPLES_TRIED, batch_size_of(examples))):
            parts = _parts(stages, local, examples, which, sizes)
            if (first := next(parts, None)) is None:
                return True  # nothing fits; the first step will say so
            norms = gather_values(float(first.norm()), None)
            if max(norms) > 0 and all(map(math.isfinite, norms)):
                tolerance = TOLERANCE * max(norms)
                return all(all(gather_values(bool((part - first).norm() <= tolerance), None)) for part in parts)
        return False
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # a recorded step has memory of its own


def _parts(
    stages: Stages, state: TrainState, examples: Tree, which: int, sizes: Sequence[int]
) -> Iterator[Float[Tensor, " elements"]]:
    """Yield what one sample adds to the sum: first in a microbatch of the largest size, then last in one of each other.

    The smallest comes next, since it is the likeliest to differ, and each size may have to be compiled.
    """
    count, device, place = batch_size_of(examples), tree.leaves(examples)[0].device, 0
    work = begin(stages, state, device)
    largest, *others = sizes
    for size in (largest, *reversed(others)):
        rows = (torch.arange(size, device=device) + which + 1) % count
        rows[place] = which
        mask = torch.zeros(size, device=device)
        mask[place] = 1
        try:
            total = microbatch_sum(stages, work, state, tree.map(lambda leaf, at=rows: leaf[at], examples), mask).total
        except Exception as error:
            if stages.execution.sharding is not None or not is_out_of_memory(error):
                raise
            continue
        place = -1
        yield _some_elements(total)


def _some_elements(total: ClippedSum) -> Float[Tensor, " elements"]:
    """Return elements of every leaf, evenly spaced, in float64."""
    found = []
    for leaf in total.value.values():
        flat = (leaf.evaluate() if isinstance(leaf, LazySum) else leaf).double().flatten()
        found.append(flat[:: max(1, len(flat) // ELEMENTS_COMPARED | 1)])
    return torch.cat(found)


def _without_zeros(leaf: Tensor) -> Tensor:
    """Return the leaf or, if all of it is 0, other numbers: a head of zeros would hide how the blocks below round."""
    if not leaf.is_floating_point() or bool(leaf.any()):
        return leaf
    index = torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float32)
    return (0.02 * index.sin()).to(leaf.dtype).view(leaf.shape)
