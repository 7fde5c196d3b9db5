"""Options of ``fdp train`` about advice: a recipe for what is not given, and what to do when the loss diverges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fdp.cli.options import Effect, Flag


@dataclass(frozen=True)
class AdviceOptions:
    """The recipe, and what ends a run early."""

    panel: ClassVar[str] = "Training"

    on_divergence: Annotated[
        str,
        Flag(
            "When the loss stays far above its first value: stop ends the run, continue only says so.",
            effect=Effect.EXECUTION,
        ),
    ] = "stop"
