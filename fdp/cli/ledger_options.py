"""The options of ``fdp train`` about what was spent before: the ledger, and the run that is continued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fdp.cli.options import Effect, Flag


@dataclass(frozen=True)
class LedgerOptions:
    """The record of what is spent on which data."""

    panel: ClassVar[str] = "Privacy"

    ledger: Annotated[
        str | None,
        Flag(
            "The folder that records, for you alone, what was spent on which data; off records nothing.",
            default_text="$FDP_LEDGER, else ~/.config/fdp",
            effect=Effect.EXECUTION,
        ),
    ] = None
    extend: Annotated[
        str | None,
        Flag(
            "Go on training from the run in this folder, on its data, as a new run: --steps are its further steps, and "
            "--epsilon is for all of it together (default: the noise of that run, and the total is stated)."
        ),
    ] = None
