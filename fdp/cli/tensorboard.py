"""Event files for TensorBoard: ``DIR/tensorboard``, readable by their owner alone.

A resumed run writes its files anew from ``metrics.jsonl``, so no step is there twice.

    >>> for state, record in write_events(stream, folder / "tensorboard"): ...
    tensorboard --logdir runs/notes/tensorboard
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from fdp.cli.tracked_values import tracked_values
from fdp.run.step_record import StepRecord
from fdp.storage.private_files import OWNER_ONLY, disk_errors
from fdp.types import TrainState


def write_events(
    stream: Iterable[tuple[TrainState, StepRecord]], folder: Path, *, earlier: Sequence[StepRecord] = ()
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on, and write each record to an event file in ``folder``."""
    from torch.utils.tensorboard.writer import SummaryWriter

    with disk_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        writer = SummaryWriter(str(folder), flush_secs=10)
        for path in folder.iterdir():
            path.chmod(OWNER_ONLY)
    try:
        times = accumulate((record.seconds for record in earlier), initial=time.time() - _seconds(earlier))
        for record, when in zip(earlier, list(times)[1:]):
            _add(writer, record, when)
        for state, record in stream:
            _add(writer, record, time.time())
            yield state, record
    finally:
        writer.close()


def _add(writer: Any, record: StepRecord, when: float) -> None:
    for name, value in tracked_values(record).items():
        writer.add_scalar(name, value, record.step, walltime=when)
    for number, text in enumerate(record.evaluation.texts if record.evaluation else ()):
        writer.add_text(f"generated/{number}", f"```\n{text}\n```", record.step, walltime=when)


def _seconds(records: Sequence[StepRecord]) -> float:
    return sum(record.seconds for record in records)
