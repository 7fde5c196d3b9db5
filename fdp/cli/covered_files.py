"""The outputs of a run that its budget covers, and those that it does not, by the files that are there.

>>> describe_covered(folder)
'the parameters: model.safetensors, and everything computed from them alone'
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PARAMETERS = ("model.safetensors", "model")
METRICS = (
    "metrics.jsonl", "released_evaluations.json", "report.png", "report.html", "summary.json", "tensorboard", "wandb",
)  # fmt: skip
CHECKPOINTS = "checkpoints"


def describe_covered(folder: Path) -> str:
    """Return which outputs of the run in ``folder`` the budget covers."""
    return f"the parameters: {_named(folder, PARAMETERS)}, and everything computed from them alone"


def describe_not_covered(folder: Path) -> str:
    """Return which outputs of the run in ``folder`` the budget does not cover, also a report that is made later."""
    secret = f"; and {CHECKPOINTS}/, which hold the key of the noise" if (folder / CHECKPOINTS).is_dir() else ""
    return (
        f"every loss, gradient norm, clipped fraction, sample count and time: {_named(folder, METRICS)}, this screen, "
        f"and any report made of them (fdp report), which are computed on the private data{secret}. Guard them as you "
        f"guard the data"
    )


def _named(folder: Path, names: Sequence[str]) -> str:
    """Return the names that are in the folder, those of folders with a slash."""
    return ", ".join(f"{name}{'/' * (folder / name).is_dir()}" for name in names if (folder / name).exists())
