"""Sentences about samples that occur more than once, and about texts that do or are empty.

who is in k equal samples has k times the sensitivity: epsilon, which is about one sample, does not hold for them

>>> warn_of_repeats(repeats, len(dataset), reading=read_counts_of(dataset))      # before the first step
>>> describe_texts(documents)                                                    # whatever the sample
"""

from __future__ import annotations

import warnings

from fdp.data.documents import Documents, rows_with_loss
from fdp.data.nouns import count, plural
from fdp.data.read_counts import ReadCounts
from fdp.data.repeated import Repeats, count_equal_texts
from fdp.run.smaller_microbatches import RunWarning


class RepeatsWarning(RunWarning):
    """Some samples are equal to others."""


def warn_of_repeats(repeats: Repeats, samples: int, *, reading: ReadCounts | None = None) -> None:
    """Warn if some of the samples are equal. The numbers are private, so they go into no file."""
    if repeats.repeated:
        warnings.warn(describe_repeats(repeats, samples, reading=reading), RepeatsWarning, stacklevel=4)


def describe_repeats(repeats: Repeats, samples: int, *, reading: ReadCounts | None = None) -> str:
    """Return how many samples are equal, what follows for epsilon, and what to do.

    ``reading`` says whether samples were cut: then equal ones may be beginnings of different texts.
    """
    first = _first_part(reading)
    where = f" in {first}, all that is trained on of a longer one" if first else ""
    remedy = (
        "Longer ones may be no copies and only begin alike: remove those that are copies"
        if first
        else "Remove the copies"
    )
    return (
        f"data: {repeats.repeated:,} of {samples:,} samples are equal to another one{where}; one of them occurs "
        f"{repeats.most:,} times. Epsilon is about one sample: a person whose data occurs {repeats.most:,} times has "
        f"{repeats.most:,} times the sensitivity, and more than epsilon is spent on them. {remedy}, or make "
        f"all samples of a person one (--unit user --user-field FIELD, one name per person; from Python, one element). "
        f"These numbers are computed on private data and covered by no budget: do not publish them"
    )


def describe_texts(documents: Documents) -> list[str]:
    """Return a sentence about texts that are equal, and one about those with nothing to learn, if there are any."""
    found, repeats = [], count_equal_texts(documents)
    every = count(len(documents.starts) - 1, documents.text)
    if repeats.repeated:
        found.append(
            f"{repeats.repeated:,} of {every} are equal to another one; one of them occurs {repeats.most:,} times: "
            f"remove those that are copies"
        )
    if empty := int((~rows_with_loss(documents, context=None)).sum()):
        holds, it = ("holds", "it") if empty == 1 else ("hold", "them")
        found.append(f"{empty:,} of {every} {holds} nothing to learn (empty, one token, or no answer): remove {it}")
    return found


def _first_part(reading: ReadCounts | None) -> str:
    """Return the part of a sample that is compared, such as "their first 65 bytes"; empty if no sample was cut."""
    if reading is None or not (reading.cut or reading.capped):
        return ""
    windows = f"{reading.most} windows of " if reading.most > 1 else ""
    return f"their first {windows}{reading.tokens:,} {plural(reading.word)}"
