"""The noise of a resumed run: its steps and evaluations are repeated with the noise that they had, or refused.

    sum + z C (1 + slack) N(key)                          a step that was interrupted is made again, and counted once

That is right only if key and slack are the same as before. The same noise with two scales can be solved for; other
noise is another release, which the budget does not hold; and noised evaluations of other parameters, with the noise of
the first ones, differ from these by a number without noise. A run that needs less slack than before, because its
microbatches are smaller or on a CPU, keeps the slack that it had. So it does with the leaves whose gradients it stores
in 8 bits, which are chosen by measured times.

    >>> meta = {"noise": noise_record(run)}
    >>> run, state = prepare(config, root=root, earlier=earlier_noise(meta))
    >>> check_same_noise(meta, run, path)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fdp.run.prepare_run import NEW_RUN, EarlierNoise, Run, extra_noise
from fdp.types import FdpError

ROUNDING = 1e-12
"""Difference of two slacks, relative to 1, that counts as none: sums of the same numbers in another order."""


def noise_record(run: Run) -> dict[str, Any]:
    """Return what decides a run's noise beside its root key, for its checkpoints."""
    return {"key": run.key.tolist(), "slack": extra_noise(run), **rounding_record(run)}


def rounding_record(run: Run) -> dict[str, Any]:
    """Return how the run rounds sums and gradients, by names and public numbers alone."""
    return {"rounded": run.stages.rounded, "rounded_leaves": list(run.plan.rounded)}


def earlier_noise(meta: Mapping[str, Any]) -> EarlierNoise:
    """Return the noise of a run that is resumed; no slack and no gradients in 8 bits if its checkpoint does not say."""
    found = meta.get("noise", {})
    return read_noise(found, found.get("slack"))


def read_noise(record: Mapping[str, Any], slack: float | None) -> EarlierNoise:
    """Return the noise of :func:`rounding_record` with this slack.

    A record without leaves is of an fdp that stored none in 8 bits.
    """
    return EarlierNoise(slack or NEW_RUN.slack, tuple(record.get("rounded_leaves", ())))


def check_same_noise(meta: Mapping[str, Any], run: Run, where: Path) -> None:
    """Raise if a step that the run makes again would get other noise, or the same noise with another scale."""
    found = meta.get("noise")
    if found is None:  # an older checkpoint
        return
    check_same_rounding(found["rounded"], found["slack"], run, where)
    if found["key"] != run.key.tolist():
        raise FdpError(
            f"{where}: expected the same run, got another model, optimizer, mechanism or first parameters, or another "
            "version of fdp; other noise would be released and not counted. Put back what was changed, or give another "
            "--out to start anew"
        )


def check_same_rounding(rounded: str | None, slack: float, run: Run, where: Path) -> None:
    """Raise if the run draws noise for other sums than before, or needs more slack: the same noise, scaled otherwise.

    ``rounded`` and ``slack`` are those of :func:`noise_record`; None if an older fdp did not write them.
    """
    if rounded not in (None, run.stages.rounded):
        raise FdpError(
            f"{where}: expected the rounding that the noise of this run was drawn for ({_in_words(rounded)}), got "
            f"{_in_words(run.stages.rounded)}; resume it with the --microbatch, the --sum-dtype, the --stored-dtype "
            "and the kind of device that it began with, or give another --out to start anew"
        )
    if extra_noise(run) <= slack + ROUNDING:
        return
    raise FdpError(
        f"{where}: expected sums that are rounded by at most {slack:.6g} of the clipping bound, which the noise of "
        f"this run covers, got {extra_noise(run):.6g}; resume it with the --microbatch, the --sum-dtype, the "
        "--stored-dtype and the kind of device that it began with, or give another --out to start anew"
    )


def _in_words(rounded: str) -> str:
    return rounded.removeprefix(", ") or "neither sums nor stored gradients"
