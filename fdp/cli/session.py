"""One ``fdp train``, from options to files: every rank computes, rank 0 prints and writes.

check the options -> create the folder, or load the last checkpoint -> make the steps, saving -> write the result

>>> code = train(options)                           # 0; 130 or 143 after SIGINT or SIGTERM
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rich.console import Console

from fdp.advice.hints import Diverged, hints_before
from fdp.cli import display, diverged, progress, resume, run_files, tracking
from fdp.cli.bookkeeping import Account, check_ledger, open_account
from fdp.cli.configure import check_batch_size, configure
from fdp.cli.evaluation_display import evaluation_summary, result_summary, show_evaluations
from fdp.cli.extend import continue_state
from fdp.cli.fast_defaults import choose_microbatch, resolve_fast_defaults
from fdp.cli.folder_lock import FolderLock, lock_folder
from fdp.cli.model_and_data import export_model
from fdp.cli.options import to_dict
from fdp.cli.resume import ResumedRun
from fdp.cli.sample_texts import make_writer, text_steps
from fdp.cli.signals import stop_on_signals
from fdp.cli.train_options import OutputOptions, TrainOptions
from fdp.cli.unused_options import check_unused
from fdp.parallel import launch
from fdp.parallel.agree import gather_values, run_in_unison
from fdp.parallel.heartbeat import Heartbeat
from fdp.parallel.launch import Ranks
from fdp.privacy.chain import compose_chain
from fdp.report import figure
from fdp.run.evaluation import Evaluator, attach_evaluations, make_evaluator
from fdp.run.generate import attach_texts
from fdp.run.kept import Kept, exported, plain, start_keeping
from fdp.run.prepare_run import Run, prepare
from fdp.run.run_config import RunConfig
from fdp.run.run_folder import read_records
from fdp.run.step_metrics import summarise
from fdp.run.step_record import StepRecord
from fdp.run.training_run import can_run_ahead, steps
from fdp.storage import checkpoint
from fdp.types import FdpError, TrainState, Tree


class Session(NamedTuple):
    """A prepared run and where its files and its messages go. ``lock`` is None on every rank but 0."""

    options: TrainOptions
    run: Run
    folder: Path
    console: Console
    lock: FolderLock | None
    heart: Heartbeat | None
    account: Account
    evaluator: Evaluator | None = None
    write_texts: Callable[[Tree], tuple[str, ...]] | None = None


Introduce: TypeAlias = Callable[[Run, TrainState, TrainOptions, Evaluator | None, Account], None]


def train(
    options: TrainOptions, ranks: Ranks | None = None, *, dry_run: bool = False, introduce: Introduce | None = None
) -> int:
    """Train, write the run's files, and return the exit code. A dry run stops before the first file and step.

    ``introduce`` describes the run before its first step, also a quiet one.
    """
    options = resolve_fast_defaults(options)  # settings that are saved say what was computed
    first, out = launch.rank() == 0, options.output.out
    _check_saving(options.output)
    tracking.check_tracking(options.tracking)
    with ExitStack() as stack:
        taken = first and out is not None and out.is_dir() and not dry_run
        lock = run_in_unison(lambda: _lock(out, stack) if taken and out is not None else None, None)
        resumed = resume.find_run(options)  # before the data is loaded
        console = Console(quiet=options.output.quiet or not first, highlight=False)
        if resumed is not None and resumed.finished:
            return _report_finished(options.output, console)
        with progress.tell_stages(console) as say, display.show_run_warnings(console):
            say(f"reading the data ({options.data.data}) and the model")
            config, options = _checked_config(options, resumed)
            root = None if resumed is None else resumed.root
            run, state = prepare(config, root=root, earlier=resume.earlier_noise_of(resumed), say=say)
            state = start_keeping(run, continue_state(options, run, state))
            evaluator = make_evaluator(run)
            write_texts = run_in_unison(lambda: make_writer(options, run), None)
            if resumed is not None and resumed.checkpoint is not None:
                say("loading the checkpoint")
                run_in_unison(lambda: resume.check_same_run(resumed, run), None)
                state = checkpoint.load(resumed.checkpoint, like=state)
        same_noise = run.config.seed is not None or (resumed is not None and resumed.checkpoint is not None)
        if dry_run:
            display.show_header(console, run, state, options, evaluator)
            display.show_hints(console, hints_before(run))
            goes_on = same_noise and out is not None
            account = open_account(options, run, out or Path(), evaluator, goes_on=goes_on, write=False)
            display.show_warnings(console, account.warnings())
            console.print("dry run: every check passed; no step was made and nothing was written")
            return 0
        if resumed is not None:
            folder = out
            run_in_unison(lambda: _go_on(resumed, out, options, run, state) if first and out else None, None)
        else:
            created = run_in_unison(lambda: _create_folder(options, run, lock, stack) if first else None, None)
            lock, folder = created or (None, None)
            folder = gather_values(folder, None)[0]
        assert folder is not None
        display.show_header(console, run, state, options, evaluator)
        display.show_hints(console, hints_before(run))
        with _no_settings_on_error(folder if first and resumed is None else None):
            account = open_account(options, run, folder, evaluator, goes_on=same_noise)
        display.show_warnings(console, account.warnings())
        if introduce is not None:
            introduce(run, state, options, evaluator, account)
        console.print(repeat_hint(folder, options), soft_wrap=True)
        _report_resumed(resumed, console)
        heart = ranks.heart if ranks else None
        account.resume_at(int(state.step))
        with account:
            return _train(Session(options, run, folder, console, lock, heart, account, evaluator, write_texts), state)


def _go_on(resumed: resume.ResumedRun, out: Path, options: TrainOptions, run: Run, state: TrainState) -> None:
    """Refuse a run whose evaluations were released otherwise; remove what it computed after its checkpoint."""
    resume.check_not_released(resumed, run, out)
    _remove_partial_results(out, options, run, state)


def _checked_config(options: TrainOptions, resumed: resume.ResumedRun | None) -> tuple[RunConfig, TrainOptions]:
    """Return the configuration, once data, options and ledger are checked, and the options with what it chose."""
    config = run_in_unison(lambda: configure(options), None)
    config = run_in_unison(lambda: choose_microbatch(options, config, saved=resume.microbatch_of(resumed)), None)
    options = with_choices(options, config)
    run_in_unison(lambda: _check_together(options, config), None)
    run_in_unison(lambda: check_ledger(options) if launch.rank() == 0 else None, None)
    return config, options


def with_choices(options: TrainOptions, config: RunConfig) -> TrainOptions:
    """Return the options with the number of steps, which may follow from ``--epochs``, and the microbatch."""
    compute = replace(options.compute, microbatch=config.microbatch_size)
    return replace(options, training=replace(options.training, steps=config.steps), compute=compute)


def repeat_hint(folder: Path, options: TrainOptions) -> str:
    """Return where the settings are, and how to repeat the run."""
    noise = "draws" if options.privacy.method == "none" else "noise"
    drawn = f"with new {noise}, since it has no --seed" if options.training.seed is None else f"with the same {noise}"
    spends = ", and spends its epsilon again" if (noise, options.training.seed) == ("noise", None) else ""
    again = run_files.repeat_command(folder, saves=options.output.save_every is not None)
    return f"settings saved in {folder / run_files.SETTINGS}; {again} repeats the run {drawn}{spends}"


def _train(session: Session, state: TrainState) -> int:
    """Make the remaining steps and finish; if asked to stop, save and say how to resume."""
    options, run, folder, console, lock = session[:5]
    first = launch.rank() == 0
    records, done = read_records(folder, upto=int(state.step)) if first else [], int(state.step)
    released = run_in_unison(lambda: resume.keep_released(folder, after=done) if first else {}, None)
    released = gather_values(released, None)[0]
    with stop_on_signals() as stop, display.show_run_warnings(console):
        is_used, account = _find_used_states(session, state), session.account
        ahead = (lambda step: not is_used(step)) if can_run_ahead(run) else None
        stream = steps(run, plain(state), stop=stop.requested, ahead=ahead, begin=account.begin)
        stream = account.follow(stream, done=done)
        stream = _check_alive(session, stream)
        stream = attach_evaluations(stream, run, session.evaluator, state, released=released)
        stream = attach_texts(stream, session.write_texts, text_steps(options))
        stream = run_files.write_metrics(stream, folder, earlier=records, sync_after=is_used) if first else stream
        stream = tracking.track(stream, options, folder, run, earlier=records) if first else stream
        stream = progress.follow(_save_checkpoints(session, stream), run, console)
        stream = show_evaluations(stream, session.evaluator, console)
        try:
            for state, record in diverged.watch(stream, run, options, console, earlier=tuple(records)):  # noqa: B007
                records.append(record)
        except Diverged as error:
            run_in_unison(lambda: lock.check() if lock else None, None)
            session.account.end_as("diverged")
            summary = summarise(run, plain(state), records) | session.account.summary()
            return diverged.finish(session.folder, summary, error, options, console)
        code = max(gather_values(stop.exit_code, None)) if int(state.step) < run.config.steps else 0
        if code:
            kept = (
                "" if options.output.save_every is not None else ", but it cannot be resumed: that needs --save-every"
            )
            console.print(f"interrupted after {int(state.step)} steps; their results are kept{kept}")
        if code and options.output.save_every is not None:
            root = resume.checkpoint_folder(folder)
            if not checkpoint.has_reached(root, int(state.step)):
                meta = resume.checkpoint_meta(run, to_dict(options), state)
                checkpoint.save(root, state, meta=meta, keep=options.output.keep)
            console.print("the same command resumes")
            return code
        run_in_unison(lambda: lock.check() if lock else None, None)
        _finish(session, state, records)
        return code


def _find_used_states(session: Session, state: TrainState) -> Callable[[int], bool]:
    """Return a function that says whether the state after a step is used before the next step may overwrite it."""
    options, evaluator = session.options, session.evaluator
    every, evaluated = options.output.save_every, set() if evaluator is None else set(evaluator.steps)
    written = set() if session.write_texts is None else set(text_steps(options))
    averaged = isinstance(state.opt, Kept)  # an average follows every step
    return lambda step: averaged or step in evaluated or step in written or (every is not None and step % every == 0)


def _check_saving(output: OutputOptions) -> None:
    if output.save_every is not None and output.out is None:
        raise FdpError("--save-every: expected an --out to save to, and to resume from, got none; add --out runs/NAME")


def _check_together(options: TrainOptions, config: RunConfig) -> None:
    """Check options against each other and against the data."""
    check_unused(options)
    check_batch_size(config)


def _lock(folder: Path, stack: ExitStack) -> FolderLock:
    lock = lock_folder(folder)
    stack.callback(lock.release)
    return lock


def _report_finished(output: OutputOptions, console: Console) -> int:
    """Say that the run had already ended when torchrun restarted this process."""
    assert output.out is not None
    console.print(f"{output.out} holds the finished run; nothing is left to do")
    if output.as_json and launch.rank() == 0:
        summary = json.loads((output.out / "summary.json").read_text())
        print(json.dumps(summary | {"out": str(output.out)}))
    return 0


def _report_resumed(resumed: ResumedRun | None, console: Console) -> None:
    if resumed is None:
        return
    for message in resumed.damaged:
        console.print(f"passed over: {message}")
    if resumed.checkpoint is None:
        console.print("no checkpoint was saved yet: starting again from the first step")
    else:
        console.print(f"resumed after step {resumed.checkpoint.step}, from {resumed.checkpoint.path}")


def _create_folder(
    options: TrainOptions, run: Run, lock: FolderLock | None, stack: ExitStack
) -> tuple[FolderLock, Path]:
    existed = options.output.out is not None and options.output.out.exists()
    folder = run_files.create_folder(options.output.out, model=options.model.model, data=options.data.data)
    if not existed:
        stack.callback(_remove_if_empty, folder)  # after the lock in it is released
    lock = lock or _lock(folder, stack)
    run_files.check_free(folder)  # another run may have begun there before this one locked it
    run_files.write_config(folder, to_dict(options), run)
    run_files.write_plan(folder, run)
    return lock, folder


@contextmanager
def _no_settings_on_error(folder: Path | None) -> Iterator[None]:
    """If the block raises, remove the settings from the folder of a new run: they would block the next command."""
    try:
        yield
    except BaseException:
        if folder is not None:
            run_files.remove_settings(folder)
        raise


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _remove_partial_results(folder: Path, options: TrainOptions, run: Run, state: TrainState) -> None:
    """Remove the result files of an attempt that was cut short while it wrote them."""
    for name in ("model.safetensors", "report.png"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "model", ignore_errors=True)
    run_files.write_plan(folder, run)  # another microbatch or device may plan otherwise
    if int(state.step) == 0:  # nothing of the earlier attempt is used but its settings
        run_files.write_config(folder, to_dict(options), run)


def _check_alive(
    session: Session, stream: Iterator[tuple[TrainState, StepRecord]]
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on; report the step to the other ranks, and raise if the folder was taken over."""
    for state, record in stream:
        if session.heart is not None:
            session.heart.step = record.step
        if session.lock is not None:
            session.lock.check()
        yield state, record


def _save_checkpoints(
    session: Session, stream: Iterator[tuple[TrainState, StepRecord]]
) -> Generator[tuple[TrainState, StepRecord], None, None]:
    """Pass the stream on; every ``--save-every`` steps start to write a checkpoint."""
    output, settings = session.options.output, to_dict(session.options)
    if output.save_every is None:
        yield from stream
        return
    group, saving = checkpoint.make_group(timeout=session.options.ranks.timeout), None
    try:
        for state, record in stream:
            if record.step % output.save_every == 0:
                if saving is not None:
                    checkpoint.finish_save(saving)
                saving = checkpoint.start_save(
                    resume.checkpoint_folder(session.folder),
                    state,
                    meta=resume.checkpoint_meta(session.run, settings, state),
                    keep=output.keep,
                    group=group,
                )
            yield state, record
    finally:
        if saving is not None:
            checkpoint.finish_save(saving)


def _finish(session: Session, state: TrainState, records: list[StepRecord]) -> None:
    """Write the model, the report and the summary, and show the result."""
    options, run, folder, console = session[:4]
    result = exported(run, state)
    summary = summarise(run, result, records) | evaluation_summary(session.evaluator, records)
    summary |= result_summary(run, state, session.evaluator) | session.account.summary()
    model = export_model(result.params, options.model, folder, guarantees=session.account.promises)
    if launch.rank() == 0:
        summary |= {"file_sha256": run_files.digests_of(model, folder)}
        figure.write_report(folder, run, records, title=f"{options.model.model} on {options.data.data}")
        run_files.write_summary(folder, summary)  # last: a folder with a summary is a finished run
        extends = options.ledger.extend is not None
        chain = compose_chain(run.config.before, session.account.promise, extends=extends)
        display.show_result(console, summary, folder, chain=chain, others=session.account.others())
        if options.output.as_json:
            print(json.dumps(summary | {"out": str(folder)}))
