"""Warn, before the first step, of samples that occur more than once.

who is in k equal samples has k times the sensitivity: epsilon, which is about one sample, does not hold for them

>>> warn_of_repeats(repeats, len(dataset), reading=read_counts_of(dataset))
"""

from __future__ import annotations

import warnings

from fdp.data.nouns import plural
from fdp.data.read_counts import ReadCounts
from fdp.data.repeated import Repeats
from fdp.run.smaller_microbatches import RunWarning


class RepeatsWarning(RunWarning):
    """Some samples are equal to others."""


def warn_of_repeats(repeats: Repeats, samples: int, *, reading: ReadCounts | None = None) -> None:
    """Warn if some of the samples are equal. The numbers are private, so they go into no file.

    ``reading`` says whether samples were cut: then equal ones may be beginnings of different texts.
    """
    if not repeats.repeated:
        return
    first = _first_part(reading)
    where = f" in {first}, all that is trained on of a longer one" if first else ""
    remedy = (
        "Longer ones may be no copies and only begin alike: remove those that are copies"
        if first
        else "Remove the copies"
    )
    warnings.warn(
        f"data: {repeats.repeated:,} of {samples:,} samples are equal to another one{where}; one of them occurs "
        f"{repeats.most:,} times. Epsilon is about one sample: a person whose data occurs {repeats.most:,} times has "
        f"{repeats.most:,} times the sensitivity, and more than epsilon is spent on them. {remedy}, or make "
        f"all samples of a person one (--unit user --user-field FIELD, one name per person; from Python, one element). "
        f"These numbers are computed on private data and covered by no budget: do not publish them",
        RepeatsWarning,
        stacklevel=4,
    )


def _first_part(reading: ReadCounts | None) -> str:
    """Return the part of a sample that is compared, such as "their first 65 bytes"; empty if no sample was cut."""
    if reading is None or not (reading.cut or reading.capped):
        return ""
    windows = f"{reading.most} windows of " if reading.most > 1 else ""
    return f"their first {windows}{reading.tokens:,} {plural(reading.word)}"
