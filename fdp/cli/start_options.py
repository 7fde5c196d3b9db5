"""Options of ``fdp train`` that are no settings of a run: the file of settings, and what to do with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from fdp.cli.options import Effect, Flag

HOW = Effect.EXECUTION


@dataclass(frozen=True)
class StartOptions:
    """A file of settings, and what to do with them."""

    panel: ClassVar[str] = "Settings from a file"

    config: Annotated[
        Path | None,
        Flag(
            "Read settings from this TOML file; flags replace them. The config.toml of a run repeats it.",
            effect=HOW,
            paths=True,
        ),
    ] = None
    show_config: Annotated[bool, Flag("Print every setting as a TOML file and exit.", effect=HOW)] = False
    dry_run: Annotated[bool, Flag("Make every check and stop before the first step; write nothing.", effect=HOW)] = (
        False
    )
