"""Metrics for Weights & Biases: ``DIR/wandb``, and online its server.

Metrics, settings and versions are logged. The seed and the paths of the machine are not, nor its name, its user, the
command line, the code or the output of the run: a seed reveals the noise, and the output shows counts of private data.
A resumed run continues under the same name: offline it writes its file anew, online it skips the steps that the server
has, so no step is logged twice.

    >>> for state, record in log_to_wandb(stream, folder, run, project="notes", settings=to_dict(options)): ...
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fdp.cli.run_files import key_digest
from fdp.cli.tracked_values import tracked_values
from fdp.run.prepare_run import Run
from fdp.run.step_record import StepRecord
from fdp.types import FdpError, TrainState

NOT_SENT = frozenset({"seed", "out", "quiet", "as_json", "wandb", "wandb_online", "tensorboard"})
"""Settings that are not logged."""
QUIET = {
    "silent": True,
    "console": "off",
    "host": "not told",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""What Weights & Biases would collect by itself, switched off."""


def log_to_wandb(
    stream: Iterable[tuple[TrainState, StepRecord]],
    folder: Path,
    run: Run,
    *,
    project: str,
    settings: Mapping[str, Any],
    earlier: Sequence[StepRecord] = (),
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on, and log each record."""
    tracked = _start(folder, run, project, settings)
    first = tracked.starting_step if tracked.resumed else 0
    try:
        for record in earlier:
            _log(tracked, record, first)
        for state, record in stream:
            _log(tracked, record, first)
            yield state, record
    finally:
        tracked.finish()


def sent_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are logged; of a path only its last part."""
    sent = {key: value for key, value in settings.items() if key not in NOT_SENT}
    texts = {key: Path(value).name for key, value in sent.items() if isinstance(value, Path)}
    texts |= {key: Path(value).name for key, value in sent.items() if isinstance(value, str) and "/" in value}
    return sent | texts


def _start(folder: Path, run: Run, project: str, settings: Mapping[str, Any]) -> Any:
    import wandb

    place = folder / "wandb"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    config = sent_settings(settings) | {
        "noise_multiplier_used": run.mechanism.noise_multiplier,
        "delta_used": run.config.delta,
        "sampling_rate": run.mechanism.sampling.rate,
    }
    try:
        return wandb.init(
            project=project,
            name=folder.resolve().name,
            id=key_digest(run.root)[:16],
            resume="allow",
            dir=str(folder),
            config=config,
            settings=wandb.Settings(**QUIET),
        )
    except wandb.Error as error:
        raise FdpError(f"--wandb: Weights & Biases could not start: {error}; or leave --wandb out") from error


def _log(tracked: Any, record: StepRecord, first: int) -> None:
    if record.step >= first:
        tracked.log(tracked_values(record), step=record.step)
