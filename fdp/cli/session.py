"""One ``fdp train``, from settings to files: every rank computes, the first one speaks and writes.

checks -> a new folder, or the last checkpoint of the same run -> steps, saving on the way -> the result

>>> code = train(settings)                          # 0; 130 or 143 if SIGINT or SIGTERM asked it to stop
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from fdp.cli import display, resume, run_files
from fdp.cli.configure import configure
from fdp.cli.model_and_data import export
from fdp.cli.ownership import Owner, own
from fdp.cli.resume import TakenUp
from fdp.cli.stopping import heeding
from fdp.cli.unused_options import check_idle
from fdp.parallel import launch
from fdp.parallel.agree import gather_values, run_in_unison
from fdp.parallel.heartbeat import Heartbeat
from fdp.parallel.launch import Ranks
from fdp.run.step_metrics import Record, guarantee_of, summarise
from fdp.run.training_run import Run, prepare, steps
from fdp.storage import checkpoint
from fdp.types import FdpError, TrainState


def train(settings: Mapping[str, Any], ranks: Ranks | None = None) -> int:
    """Train, and leave the run's files. The exit code."""
    first, out = launch.rank() == 0, settings["out"]
    _check_saving(settings)
    with ExitStack() as held:
        owner = run_in_unison(lambda: _owner(out, held) if first and out is not None and out.is_dir() else None, None)
        taken_up = resume.find(settings)  # before the data is loaded
        console = Console(quiet=settings["quiet"] or not first, highlight=False)
        if taken_up is not None and taken_up.finished:
            return _say_finished(settings, console)
        config = run_in_unison(lambda: configure(settings), None)
        run_in_unison(lambda: check_idle(settings), None)
        with console.status("checking the data, the model and the budget"):
            run, state = prepare(config, root=None if taken_up is None else taken_up.root)
        if taken_up is not None and taken_up.checkpoint is not None:
            run_in_unison(lambda: resume.check(taken_up, run), None)
            state = checkpoint.load(taken_up.checkpoint, like=state)
        if taken_up is not None:
            folder = settings["out"]
            run_in_unison(lambda: _clear(folder, settings, run, state) if first else None, None)
        else:
            made = run_in_unison(lambda: _new_folder(settings, run, owner, held) if first else None, None)
            owner, folder = made or (None, None)
            folder = gather_values(folder, None)[0]
        assert folder is not None
        display.show_header(console, run, state, settings)
        _say_resumed(taken_up, console)
        return _train(run, state, settings, folder, console, owner=owner, heart=ranks.heart if ranks else None)


def _train(
    run: Run,
    state: TrainState,
    settings: Mapping[str, Any],
    folder: Path,
    console: Console,
    *,
    owner: Owner | None,
    heart: Heartbeat | None,
) -> int:
    """Make the steps that are left, and finish, or save and say how to go on if somebody asks to stop."""
    first = launch.rank() == 0
    records = run_files.read_metrics(folder, upto=int(state.step)) if first else []
    with heeding() as stop:
        stream = _watched(steps(run, state, stop=stop.asked), owner, heart)
        stream = run_files.write_metrics(stream, folder, kept=records) if first else stream
        for state, record in display.follow(_saved(stream, run, settings, folder), run, console):  # noqa: B007
            records.append(record)
        code = max(gather_values(stop.code, None)) if int(state.step) < run.config.steps else 0
        if code:
            console.print(f"interrupted after {int(state.step)} steps; what they gave is kept")
        if code and settings["save_every"] is not None:
            if not checkpoint.holds(resume.root_of(folder), int(state.step)):
                meta = resume.meta(run, settings, state)
                checkpoint.save(resume.root_of(folder), state, meta=meta, keep=settings["keep"])
            console.print("the same command resumes")
            return code
        run_in_unison(lambda: owner.check() if owner else None, None)
        _finish(run, state, records, settings, folder, console)
        return code


def _check_saving(settings: Mapping[str, Any]) -> None:
    save_every, keep = settings["save_every"], settings["keep"]
    if save_every is not None and (save_every < 1 or keep < 1):
        raise FdpError(f"expected --save-every and --keep of at least 1, got {save_every} and {keep}")
    if save_every is not None and settings["out"] is None:
        raise FdpError("--save-every: expected an --out to save to, and to resume from")


def _owner(folder: Path, held: ExitStack) -> Owner:
    owner = own(folder)
    held.callback(owner.release)
    return owner


def _say_finished(settings: Mapping[str, Any], console: Console) -> int:
    """A restart of a run that had ended when one of its processes was lost."""
    console.print(f"{settings['out']} holds the finished run; nothing is left to do")
    if settings["as_json"] and launch.rank() == 0:
        summary = json.loads((settings["out"] / "summary.json").read_text())
        print(json.dumps(summary | {"out": str(settings["out"])}))
    return 0


def _say_resumed(taken_up: TakenUp | None, console: Console) -> None:
    if taken_up is None:
        return
    for words in taken_up.damaged:
        console.print(f"passed over: {words}")
    if taken_up.checkpoint is None:
        console.print("no checkpoint was saved yet: starting again from the first step")
    else:
        console.print(f"resumed after step {taken_up.checkpoint.step}, from {taken_up.checkpoint.path}")


def _new_folder(settings: Mapping[str, Any], run: Run, owner: Owner | None, held: ExitStack) -> tuple[Owner, Path]:
    folder = run_files.claim(settings["out"], model=settings["model"], data=settings["data"])
    owner = owner or _owner(folder, held)
    run_files.check_free(folder)  # another run may have begun there before this one owned it
    run_files.write_config(folder, settings, run)
    return owner, folder


def _clear(folder: Path, settings: Mapping[str, Any], run: Run, state: TrainState) -> None:
    """Remove what an attempt that was cut short at its end has left beside the checkpoints."""
    for name in ("model.safetensors", "report.png"):  # of an end that was cut short
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "model", ignore_errors=True)
    if int(state.step) == 0:  # nothing of the former attempt is left but its settings
        run_files.write_config(folder, settings, run)


def _watched(
    stream: Iterator[tuple[TrainState, Record]], owner: Owner | None, heart: Heartbeat | None
) -> Iterator[tuple[TrainState, Record]]:
    """The same stream; signs of life tell how far this rank is, and a folder that was lost ends it."""
    for state, record in stream:
        if heart is not None:
            heart.step = record.step
        if owner is not None:
            owner.check()
        yield state, record


def _saved(
    stream: Iterator[tuple[TrainState, Record]], run: Run, settings: Mapping[str, Any], folder: Path
) -> Generator[tuple[TrainState, Record], None, None]:
    """The same stream, with a checkpoint on its way to disk after every so many steps."""
    every = settings["save_every"]
    if every is None:
        yield from stream
        return
    group, saving = checkpoint.make_group(timeout=settings["timeout"]), None
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
        run_files.write_report(folder, run, records, title=f"{settings['model']} on {settings['data']}")
        run_files.write_summary(folder, summary)  # last: a folder with a summary is a finished run
        display.show_closing(console, summary, folder)
        if settings["as_json"]:
            print(json.dumps(summary | {"out": str(folder)}))
