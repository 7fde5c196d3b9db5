"""Options of ``fdp train`` about advice: a recipe for what is not given, and what to do when the loss diverges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fdp.cli.needs import Needs
from fdp.cli.options import Effect, Flag


@dataclass(frozen=True)
class AdviceOptions:
    """The recipe, and what ends a run early."""

    panel: ClassVar[str] = "Training"

    recipe: Annotated[
        str,
        Flag(
            "auto fills in every setting that is not given: batch size, steps, learning rate, clipping, adapters, "
            "microbatch (fdp advise shows them and why). none keeps the defaults.",
            effect=Effect.EXECUTION,
        ),
    ] = "none"
    hours: Annotated[
        float | None,
        Flag(
            "With --recipe auto: the time for training.",
            default_text="1",
            effect=Effect.EXECUTION,
            needs=Needs.RECIPE,
        ),
    ] = None
    on_divergence: Annotated[
        str,
        Flag(
            "When the loss stays far above its first value: stop ends the run, continue only says so.",
            effect=Effect.EXECUTION,
        ),
    ] = "stop"
