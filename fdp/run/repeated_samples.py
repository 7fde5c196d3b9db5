"""Warn, before the first step, of samples that occur more than once.

who is in k equal samples has k times the sensitivity: epsilon, which is about one sample, does not hold for them

>>> warn_of_repeats(repeats, len(dataset))
"""

from __future__ import annotations

import warnings

from fdp.data.repeated import Repeats
from fdp.run.smaller_microbatches import RunWarning


class RepeatsWarning(RunWarning):
    """Some samples are equal to others."""


def warn_of_repeats(repeats: Repeats, samples: int) -> None:
    """Warn if some of the samples are equal. The numbers are private, so they go into no file."""
    if not repeats.repeated:
        return
    warnings.warn(
        f"data: {repeats.repeated:,} of {samples:,} samples are equal to another one; one of them occurs "
        f"{repeats.most:,} times. Epsilon is about one sample: a person whose data occurs {repeats.most:,} times has "
        f"{repeats.most:,} times the sensitivity, and more than epsilon is spent on them. Remove the copies, or make "
        f"all samples of a person one (--unit user --user-field FIELD, one name per person; from Python, one element). "
        f"These numbers are computed on private data and covered by no budget: do not publish them",
        RepeatsWarning,
        stacklevel=4,
    )
