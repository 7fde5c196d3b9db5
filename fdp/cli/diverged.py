"""A run whose loss diverges: watch for it, end the run, and write a result that says so.

    summary.json     as of any run, with "diverged": {"step", "loss", "first", "limit"}; no model is exported
    exit code 4

>>> for state, record in watch(stream, run, options, console): ...
>>> code = finish(folder, summary, error, options, console)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fdp.advice.hints import Diverged, follow_hints
from fdp.cli import display, run_files
from fdp.cli.names import choose
from fdp.cli.train_options import TrainOptions
from fdp.parallel import launch
from fdp.run.prepare_run import Run
from fdp.run.step_record import StepRecord
from fdp.types import TrainState

EXIT_CODE = 4


def watch(
    stream: Iterable[tuple[TrainState, StepRecord]],
    run: Run,
    options: TrainOptions,
    console: Console,
    *,
    earlier: Sequence[StepRecord] = (),
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on with hints on the console; raise ``Diverged`` unless ``--on-divergence continue``."""
    stop = choose("--on-divergence", options.advice.on_divergence, {"stop": True, "continue": False})
    return follow_hints(stream, run, say=lambda hint: display.show_hints(console, [hint]), stop=stop, earlier=earlier)


def finish(folder: Path, summary: dict[str, Any], error: Diverged, options: TrainOptions, console: Console) -> int:
    """Write and show the result of a run that diverged, and return the exit code."""
    summary = summary | {"diverged": error.found._asdict()}
    if launch.rank() == 0:
        run_files.write_summary(folder, summary)
        Console(stderr=True).print(Text(f"fdp: {error}", style="bold red"), soft_wrap=True)  # also with --quiet
        display.show_diverged(console, summary, folder)
        if options.output.as_json:
            print(json.dumps(summary | {"out": str(folder)}))
    return EXIT_CODE
