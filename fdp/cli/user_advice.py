"""Options by which the samples of users hold more, or cost less: ``--windows-per-user`` and ``--pack``.

A sample has ``--windows-per-user`` windows, padded or not, and a step computes all of them. What a user has beyond
them is left out. The suggestions follow from how many windows each user has: **they are computed from private data and
covered by no budget.**

    >>> suggest_for_users(dataset, most=8)["windows_per_user"]
    '--windows-per-user 2: uses all windows of 90% of the patients, and pads no sample beyond that'
"""

from __future__ import annotations

from fdp.data.lengths import suggest_windows
from fdp.data.mixed import Mixed
from fdp.data.nouns import plural
from fdp.data.users import Users
from fdp.privacy.microbatches import Dataset


def suggest_for_users(dataset: Dataset, *, most: int) -> dict[str, str]:
    """Return better options than ``most`` windows, each with its reason, by key; empty if samples are not of users."""
    data = dataset.private if isinstance(dataset, Mixed) else dataset
    if not isinstance(data, Users):
        return {}
    found, better = {}, suggest_windows(data.counts.windows + data.counts.left_out, most=most)
    if better is not None:
        found["windows_per_user"] = (
            f"--windows-per-user {better}: uses all windows of 90% of the {plural(data.reading.sample)}, and pads no "
            "sample beyond that"
        )
    if "--pack" in data.reading.line():
        found["pack"] = "--pack: short records of one user share a window, within the same unit of privacy"
    return found
