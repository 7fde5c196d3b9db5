"""The options of ``fdp train`` that send its metrics to other programs: TensorBoard, and Weights & Biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fdp.cli.needs import Needs
from fdp.cli.options import Effect, Flag

HOW = Effect.EXECUTION


@dataclass(frozen=True)
class TrackingOptions:
    """The programs that get a run's metrics besides its own files."""

    panel: ClassVar[str] = "How to run"

    tensorboard: Annotated[bool, Flag("Write event files for TensorBoard into the run's folder.", effect=HOW)] = False
    wandb: Annotated[
        str | None,
        Flag(
            "Log to this project of Weights & Biases; without a name: fdp. Online it needs --wandb-online.", effect=HOW
        ),
    ] = None
    wandb_online: Annotated[
        bool,
        Flag(
            "Agree that losses and norms, computed on private data and not covered by the budget, leave this machine "
            "for the server of Weights & Biases.",
            effect=HOW,
            needs=Needs.WANDB,
        ),
    ] = False
