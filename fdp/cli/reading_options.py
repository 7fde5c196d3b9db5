"""The options of ``fdp train`` about long records, and about public data that is mixed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fdp.cli.needs import Needs
from fdp.cli.options import Flag


@dataclass(frozen=True)
class ReadingOptions:
    """The treatment of long records, and the public data that is read beside the private."""

    panel: ClassVar[str] = "What to train"

    long: Annotated[
        str | None,
        Flag(
            "A record longer than a window: cut keeps its beginning; split makes it several windows of the same "
            "sample, at most --windows-per-user.",
            default_text="cut with --unit record, split with --unit user",
            needs=Needs.UNIT_RECORD_OR_USER,
        ),
    ] = None
    public_data: Annotated[
        str | None,
        Flag(
            "Public data to train on together with --data, read in the same way. It is drawn, clipped and noised "
            "alike; the guarantee is about the units of --data."
        ),
    ] = None
