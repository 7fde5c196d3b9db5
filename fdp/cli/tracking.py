"""Trackers beside the run's own files: check that they can work, and start those that are asked for.

Metrics are computed on private data and no budget covers them. TensorBoard's files stay in the run's folder; Weights &
Biases sends them away unless it is offline, so online it needs ``--wandb-online``, which says so.

    >>> check_tracking(options.tracking)                            # before anything is spent
    >>> for state, record in track(stream, options, folder, run, earlier=records): ...
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from fdp.cli.options import to_dict
from fdp.cli.tensorboard import write_events
from fdp.cli.tracking_options import TrackingOptions
from fdp.cli.train_options import TrainOptions
from fdp.cli.weights_and_biases import log_to_wandb
from fdp.extras import missing_package
from fdp.run.prepare_run import Run
from fdp.run.step_record import StepRecord
from fdp.types import FdpError, TrainState

Stream = Iterable[tuple[TrainState, StepRecord]]


def check_tracking(tracking: TrackingOptions) -> None:
    """Raise if a package is missing, or if metrics would leave the machine without a word of agreement."""
    if tracking.tensorboard and find_spec("tensorboard") is None:
        raise missing_package("tensorboard", purpose="for --tensorboard")
    if tracking.wandb is None:
        return
    if find_spec("wandb") is None:
        raise missing_package("wandb", purpose="for --wandb")
    if is_online() and not tracking.wandb_online:
        raise FdpError(
            "--wandb: expected --wandb-online, by which you agree that losses and norms leave this machine, or the "
            "environment variable WANDB_MODE=offline, which keeps them in the run's folder; got neither. The metrics "
            "are computed on private data, and the budget does not cover them"
        )
    if is_online() and not _has_key():
        raise FdpError("--wandb-online: expected a key of Weights & Biases, got none; run wandb login first")
    if tracking.wandb_online and not is_online():
        mode = os.environ["WANDB_MODE"]
        raise FdpError(
            f"--wandb-online: expected no WANDB_MODE, or online, got WANDB_MODE={mode}; leave one of them out"
        )


def is_online() -> bool:
    """Return True if Weights & Biases would send what is logged to its server."""
    return os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled", "dryrun")


def _has_key() -> bool:
    import wandb

    return wandb.api.api_key is not None


def track(
    stream: Stream, options: TrainOptions, folder: Path, run: Run, *, earlier: Sequence[StepRecord] = ()
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on through every tracker that is asked for; ``earlier`` are the records of a resumed run."""
    tracking, passed = options.tracking, iter(stream)
    if tracking.tensorboard:
        passed = write_events(passed, folder / "tensorboard", earlier=tuple(earlier))
    if tracking.wandb is not None:
        passed = log_to_wandb(
            passed, folder, run, project=tracking.wandb, settings=to_dict(options), earlier=tuple(earlier)
        )
    return passed
