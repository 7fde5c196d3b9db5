"""The sizes of a run's microbatches: several, if a sample adds the same to the sum in all of them, else one.

>>> config = keep_equal_sizes(config, stages, state)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

from fdp.checks.equal_sizes import disagreement, explain_difference
from fdp.run.run_config import RunConfig
from fdp.run.run_plan import first_examples, local_sizes
from fdp.run.smaller_microbatches import RunWarning
from fdp.stages import Stages
from fdp.step import sample_part
from fdp.types import TrainState


class RoundingWarning(RunWarning):
    """A run does without smaller microbatches, in which samples would be rounded otherwise."""


def keep_equal_sizes(
    config: RunConfig, stages: Stages, state: TrainState, *, say: Callable[[str], None] = lambda stage: None
) -> RunConfig:
    """Return the configuration, with one size of microbatches if samples do not add the same in all its sizes.

    Without privacy every size will do. ``say(stage)`` is told what is done.
    """
    sharding = stages.execution.sharding
    sizes = local_sizes(config, sharding)
    if stages.sampling is None or len(sizes) == 1:
        return config
    say("checking that a sample adds the same to the sum in microbatches of every size")
    examples = first_examples(config, sizes[0])
    by = disagreement(sample_part(stages, state), examples, sizes=sizes, sharded=sharding is not None)
    if by is None:
        return config
    warnings.warn(
        f"the last microbatch of a step is padded to {config.microbatch_size} samples: {explain_difference(by)}; one "
        "sample more or less could move the gradients of others",
        RoundingWarning,
        stacklevel=2,
    )
    return replace(config, smaller_microbatches=False)
