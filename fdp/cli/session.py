"""One ``fdp train``, from settings to files: every rank computes, the first one speaks and writes.

checks -> a new folder, or the last checkpoint of the same run -> steps, saving on the way -> the result

>>> code = train(settings)                          # 0, or 130 if interrupted
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fdp import checkpoint, launch
from fdp.cli import display, report, resume
from fdp.cli.configure import configure
from fdp.cli.idle import check_idle
from fdp.cli.subject import export
from fdp.records import Record, guarantee_of, summarise
from fdp.run import Run, prepare, steps
from fdp.types import FdpError, TrainState
from fdp.unison import everyones, in_unison

INTERRUPTED = 130


def train(settings: Mapping[str, Any]) -> int:
    """Train, and leave the run's files. The exit code."""
    first = launch.rank() == 0
    out, save_every = settings["out"], settings["save_every"]
    if save_every is not None and (save_every < 1 or settings["keep"] < 1):
        raise FdpError(f"expected --save-every and --keep of at least 1, got {save_every} and {settings['keep']}")
    if save_every is not None and out is None:
        raise FdpError("--save-every: expected an --out to save to, and to resume from")
    taken_up = in_unison(lambda: resume.find(settings), None)  # before the data is loaded
    config = in_unison(lambda: configure(settings), None)
    in_unison(lambda: check_idle(settings), None)
    console = Console(quiet=settings["quiet"] or not first, highlight=False)
    with console.status("checking the data, the model and the budget"):
        run, state = prepare(config, root=None if taken_up is None else taken_up.root)
    if taken_up is not None and taken_up.checkpoint is not None:
        in_unison(lambda: resume.check(taken_up, run), None)
        state = checkpoint.load(taken_up.checkpoint, like=state)
    folder = in_unison(lambda: _folder(settings, run, state, again=taken_up is not None) if first else None, None)
    folder = everyones(folder, None)[0]
    assert folder is not None
    display.show_header(console, run, state, settings)
    if int(state.step):
        console.print(f"resumed after step {int(state.step)}, from {taken_up.checkpoint if taken_up else folder}")
    records = report.read_metrics(folder, upto=int(state.step)) if first else []
    made = report.write_metrics(steps(run, state), folder, kept=records) if first else steps(run, state)
    stream = _saved(made, run, settings, folder)
    interrupted = False
    try:
        for state, record in display.follow(stream, run, console):  # noqa: B007
            records.append(record)
    except KeyboardInterrupt:
        if run.sharding is not None or run.in_place:
            raise  # the ranks may have stopped at different steps, or in the middle of writing the state
        interrupted = True
        stream.close()  # a save that is under way is finished first
        console.print(f"interrupted after {int(state.step)} steps; what they gave is kept")
    if interrupted and save_every is not None:
        if not checkpoint.holds(resume.root_of(folder), int(state.step)):
            meta = resume.meta(run, settings, state)
            checkpoint.save(resume.root_of(folder), state, meta=meta, keep=settings["keep"])
        console.print("the same command resumes")
        return INTERRUPTED
    _finish(run, state, records, settings, folder, console)
    return INTERRUPTED if interrupted else 0


def _folder(settings: Mapping[str, Any], run: Run, state: TrainState, *, again: bool) -> Path:
    if again:
        folder = Path(settings["out"])
        for name in ("model.safetensors", "report.png"):  # of an end that was cut short
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / "model", ignore_errors=True)
        if int(state.step) == 0:  # nothing of the former attempt is left but its settings
            (folder / "config.json").unlink()
            report.write_config(folder, settings, run)
        return folder
    folder = report.claim(settings["out"], model=settings["model"], data=settings["data"])
    report.write_config(folder, settings, run)
    return folder


def _saved(
    stream: Iterator[tuple[TrainState, Record]], run: Run, settings: Mapping[str, Any], folder: Path
) -> Generator[tuple[TrainState, Record], None, None]:
    """The same stream, with a checkpoint on its way to disk after every so many steps."""
    every = settings["save_every"]
    if every is None:
        yield from stream
        return
    group, saving = checkpoint.make_group(), None
    try:
        for state, record in stream:
            if record.step % every == 0:
                if saving is not None:
                    checkpoint.finish_save(saving)
                saving = checkpoint.start_save(
                    resume.root_of(folder),
                    state,
                    meta=resume.meta(run, settings, state),
                    keep=settings["keep"],
                    group=group,
                )
            yield state, record
    finally:
        if saving is not None:
            checkpoint.finish_save(saving)


def _finish(
    run: Run, state: TrainState, records: list[Record], settings: Mapping[str, Any], folder: Path, console: Console
) -> None:
    summary = summarise(run, state, records)
    export(state.params, settings, folder, promised=[*run.config.before, guarantee_of(run)])
    if launch.rank() == 0:
        report.write_report(folder, run, records, title=f"{settings['model']} on {settings['data']}")
        report.write_summary(folder, summary)  # last: a folder with a summary is a finished run
        display.show_closing(console, summary, folder)
        if settings["as_json"]:
            print(json.dumps(summary | {"out": str(folder)}))
