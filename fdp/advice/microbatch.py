"""The microbatch of ``--microbatch auto``: the largest that fits beside the state and is of use.

    size = 10/8 of the expected batch, so that most draws are one microbatch (fdp.privacy.microbatches.one_microbatch),
           or 2^k <= MOST_TOKENS / tokens of a sample  if the expected batch has more tokens
    the next smaller power of two until  state + MARGIN x the rest of a traced step  fits into the GPU's free memory

The step is traced on shapes (``fdp plan``), so nothing is allocated and no sample is looked at: the size depends on the
model, the shape of a sample and the machine. If the trace is wrong, a run goes on with the next smaller size
(``fdp.run.smaller_microbatches``).

    >>> config = replace(config, microbatch_size=largest_microbatch(config, free_memory(config.device)))
"""

from __future__ import annotations

import numpy as np

from fdp import tree
from fdp.advice.machine import USABLE, two_microbatches
from fdp.estimate.estimate import plan_at_scale
from fdp.estimate.ledger import MemoryKind
from fdp.fast.compile_modes import Compile
from fdp.privacy.microbatches import one_microbatch, power_of_two_below
from fdp.run.run_config import RunConfig
from fdp.types import Tree

MOST_TOKENS, MOST_SAMPLES = 1 << 15, 256
"""A GPU is busy with this many tokens, or samples of another kind, at once: more are not faster."""
MARGIN = 1.5
"""A recording of one size and the first, eager run of another may hold memory at the same time."""


def largest_microbatch(config: RunConfig, free: float) -> int:
    """Return the largest size that fits into ``free`` bytes and is of use; at least 1.

    Guarantees:
      - it is a function of public settings, of the shape of a sample and of ``free``.
    """
    size = useful_microbatch(config)
    while size > 1 and bytes_of_step(config, size) > USABLE * free:
        size = power_of_two_below(size)
    return size


def useful_microbatch(config: RunConfig) -> int:
    """Return the size beyond which nothing is gained: enough work for a GPU, or one microbatch for most draws."""
    tokens = _tokens(_sample(config)) if config.model.vocab_size is not None else None
    most = MOST_SAMPLES if tokens is None else max(1, MOST_TOKENS // tokens)
    return one_microbatch(config.batch_size) if config.batch_size <= most else power_of_two_below(most + 1)


def bytes_of_step(config: RunConfig, size: int) -> float:
    """Return the memory of a step of two microbatches of ``size`` samples, with a margin for what is not traced."""
    in_place = config.compile is Compile.BLOCK
    settings = two_microbatches(config)._replace(sum_dtype=config.sum_dtype, in_place=in_place)
    samples = tree.map(lambda leaf: leaf.expand(size, *leaf.shape[1:]), _sample(config))
    peak = plan_at_scale(config.model, samples, settings=settings).device
    state = sum(peak.by_kind.get(kind, 0) for kind in (MemoryKind.PARAMETERS, MemoryKind.OPTIMIZER))
    return state + MARGIN * (peak.total - state)


def _sample(config: RunConfig) -> Tree:
    """Return one sample, for its shapes."""
    return config.dataset.fetch(np.arange(1))


def _tokens(sample: Tree) -> int:
    """Return the positions of a sample: all tokens but the last, which is only predicted."""
    return max(1, max((leaf.shape[1] for leaf in tree.leaves(sample) if leaf.ndim > 1), default=1) - 1)
