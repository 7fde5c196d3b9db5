"""Save the state of a run with its key and its budget, and resume the same run from it.

A checkpoint holds the key of the noise: whoever reads it can subtract the noise. Keep it where the data is.

    >>> save_checkpoint(run, state, folder, keep=2)
    >>> run, state = load_checkpoint(run, state, folder)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fdp.run.prepare_run import Run, prepare
from fdp.run.same_noise import check_same_rounding, earlier_noise, noise_record
from fdp.storage import checkpoint
from fdp.storage.checkpoint_record import read_record
from fdp.types import FdpError, TrainState


def save_checkpoint(run: Run, state: TrainState, folder: str | os.PathLike[str], *, keep: int = 2) -> Path:
    """Write ``folder/step-<step>``; every rank calls it. A step that is there already is not written again.

    Guarantees:
      - a folder holds the checkpoints of one run: those of another one are an error.
    """
    path = Path(folder)
    check_folder(run, path)
    path.mkdir(parents=True, exist_ok=True)
    if checkpoint.has_reached(path, int(state.step)):
        found = checkpoint.latest(path)
        assert found is not None
        return found
    return checkpoint.save(path, state, meta=_meta(run), keep=keep)


def check_folder(run: Run, folder: str | os.PathLike[str]) -> None:
    """Raise if the newest checkpoint in a folder is that of another run, of which a resumed run would go on."""
    path = checkpoint.latest(Path(folder))
    if path is not None and read_record(path)["meta"].get("run_key") != run.key.tolist():
        raise FdpError(
            f"{path}: expected the checkpoints of this run, or none, got those of another run; give another folder, or "
            f"resume that run (load_checkpoint; PrivateTrainer: train(resume_from_checkpoint=True))"
        )


def load_checkpoint(run: Run, state: TrainState, folder: str | os.PathLike[str]) -> tuple[Run, TrainState]:
    """Return the run and the state of the newest checkpoint; refuse that of another run or of other data.

    Guarantees:
      - the resumed run draws the samples and the noise that the interrupted one would have drawn;
      - another mechanism, delta, number of steps or dataset than those of the checkpoint is refused.
    """
    path = checkpoint.latest(Path(folder))
    if path is None:
        raise FdpError(f"{folder}: expected a folder of checkpoints (run.save_checkpoint), got none there")
    found = checkpoint.verify(path)
    if "private_run" not in found.meta:
        raise FdpError(f"{path}: expected a checkpoint of fdp.private, got one of fdp train; resume it there")
    now = _meta(run)["private_run"]
    for name, then in found.meta["private_run"].items():
        if now[name] != then:
            got = f"{now[name]}, not {then}" if name != "data" else "other data"
            raise FdpError(
                f"{path}: expected the same run, got another {name} ({got}); make the run with the arguments and the "
                f"data that it was saved with"
            )
    resumed, fresh = prepare(run.config, root=torch.tensor(found.meta["key"]), earlier=earlier_noise(found.meta))
    if (noise := found.meta.get("noise")) is not None:  # absent from a checkpoint of an older fdp
        check_same_rounding(noise["rounded"], noise["slack"], resumed, path)
    if found.meta["run_key"] != resumed.key.tolist():
        raise FdpError(
            f"{path}: expected the same run, got another model, optimizer, loss or first parameters; make the run with "
            f"the module as it was before training"
        )
    return resumed, checkpoint.load(found, like=fresh)


def _meta(run: Run) -> dict[str, Any]:
    mechanism = run.mechanism
    return {
        "key": run.root.tolist(),
        "run_key": run.key.tolist(),
        "noise": noise_record(run),
        "private_run": {
            "data": run.data_digest,
            "noise_multiplier": mechanism.noise_multiplier,
            "sampling_rate": mechanism.sampling.rate,
            "clip": mechanism.clip.name,
            "delta": run.config.delta,
            "steps": run.config.steps,
        },
    }
