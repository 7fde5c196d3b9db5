"""Resume a run: find its newest good checkpoint, check that it is the same run, and say what a checkpoint stores.

Two runs are the same if every option that changes the result is the same. Options that change only how it is computed
(ranks, ZeRO stage, offload, compilation, microbatches, device) may differ: the numbers stay the same up to rounding,
which must not need more noise than before (:mod:`fdp.run.same_noise`).
K-FAC measures the curvature on one microbatch of all ranks, so with K-FAC the microbatch must be the same too: with
noised statistics, another one would reuse noise.

    >>> resumed = find_run(options)                     # None: a new run
    >>> checkpoint.save(checkpoint_folder(folder), state, meta=checkpoint_meta(run, settings, state), keep=2)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fdp import keys
from fdp.cli import run_files
from fdp.cli.options import Effect, options_of, to_dict
from fdp.cli.train_options import TrainOptions
from fdp.kfac.private.public_data import Public
from fdp.parallel import launch
from fdp.parallel.agree import PRIVATE_SETTINGS, gather_values, run_in_unison
from fdp.run.evaluation_config import Cost
from fdp.run.prepare_run import NEW_RUN, EarlierNoise, Run, measured_samples
from fdp.run.run_folder import read_records
from fdp.run.same_noise import check_same_noise, check_same_rounding, earlier_noise, noise_record, read_noise
from fdp.run.step_record import Evaluation
from fdp.storage import checkpoint
from fdp.storage.checkpoint_record import Damaged, Verified
from fdp.storage.private_files import write_private
from fdp.types import FdpError, Key, TrainState


class ResumedRun(NamedTuple):
    """A run found in ``--out``: its newest good checkpoint and its key, both None if it never saved one.

    ``damaged`` says why newer checkpoints were refused. ``finished`` is True if the run has ended, as when torchrun
    restarts a process of a run that is already done. ``began`` is the ``config.json`` of a run with a fixed seed that
    never saved a checkpoint: it begins again with the same noise.
    """

    checkpoint: Verified | None = None
    root: Key | None = None
    damaged: tuple[str, ...] = ()
    finished: bool = False
    began: Mapping[str, Any] | None = None


class FoundFolder(NamedTuple):
    """The contents of ``--out``: ``config.json``, whether the run has ended, and its checkpoints, newest first."""

    config: dict[str, Any]
    finished: bool
    checkpoints: list[Path]


def options_with(*effects: Effect) -> tuple[str, ...]:
    """Return the keys of the options with one of these effects."""
    return tuple(key for key, option in options_of(TrainOptions).items() if option.flag.effect in effects)


def checkpoint_folder(folder: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return folder / "checkpoints"


def find_run(options: TrainOptions) -> ResumedRun | None:
    """Return the run in ``--out`` if it is this one, None if the folder is free; otherwise raise an error.

    Every rank calls it. A checkpoint whose content differs from what was saved, or whose copies of the step, the key
    and the budget disagree, is set aside and the next older one is used.
    """
    settings = to_dict(options)
    # Use what rank 0 sees: on a shared disk another rank may see it later, and all must do the same.
    found = gather_values(run_in_unison(lambda: _read_folder(settings), None), None)[0]
    if found is None:
        return None
    if found.finished:
        return ResumedRun(finished=True)
    damaged: dict[Path, str] = {}
    for path in found.checkpoints:
        try:
            verified = checkpoint.verify(path)
            run_in_unison(lambda: _check_copies(verified, found.config), None)  # noqa: B023
        except Damaged as error:
            damaged[path] = str(error)
            continue
        run_in_unison(lambda: _check_settings(verified.meta["settings"], settings, path), None)  # noqa: B023
        messages = run_in_unison(lambda: _set_aside(damaged), None)
        return ResumedRun(verified, torch.tensor(verified.meta["key"]), messages)
    run_in_unison(lambda: _check_nothing_lost(settings["out"], found.config, damaged), None)
    return ResumedRun(began=found.config if settings["seed"] is not None else None)


def microbatch_of(resumed: ResumedRun | None) -> int | None:
    """Return the microbatch that a run with the same noise was computed with; None for a new run."""
    if resumed is None:
        return None
    found = resumed.began if resumed.checkpoint is None else resumed.checkpoint.meta
    return None if found is None else found["settings"].get("microbatch")


def earlier_noise_of(resumed: ResumedRun | None) -> EarlierNoise:
    """Return what the noise of a resumed run was drawn for so far."""
    if resumed is not None and resumed.checkpoint is not None:
        return earlier_noise(resumed.checkpoint.meta)
    began = None if resumed is None else resumed.began
    return NEW_RUN if began is None else read_noise(began, began.get("extra_noise"))


def _read_folder(settings: Mapping[str, Any]) -> FoundFolder | None:
    """Return the contents of ``--out`` if it holds this run, None if it is free; otherwise raise an error."""
    out = settings["out"]
    if out is None:
        return None
    if not (out / "config.json").exists() or ((out / "summary.json").exists() and not launch.is_restart()):
        run_files.check_free(out)
        return None
    if settings["save_every"] is None:
        run_files.check_free(out, hint="; with --save-every the command that began it resumes it")
    try:
        config = json.loads((out / "config.json").read_text())
        then = config["settings"]
        config["key_check"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FdpError(
            f"{out / 'config.json'}: expected the settings of a run of this fdp, got {type(error).__name__}: {error}; "
            f"put a good copy back, or give another --out, which spends the budget again"
        ) from error
    _check_settings(then, settings, out)
    return FoundFolder(config, (out / "summary.json").exists(), checkpoint.list_published(checkpoint_folder(out)))


def _check_copies(found: Verified, config: Mapping[str, Any]) -> None:
    """Raise unless all copies of the step and the key agree: a step that is too low would spend the budget twice."""
    meta, path = found.meta, found.path
    steps = {
        "its name": found.step,
        "the meta": meta["step"],
        "the sampler": meta["sampler"]["next_step"],
        "the accountant": meta["accountant"]["steps"],
    }
    if len(set(steps.values())) > 1:
        listed = ", ".join(f"{step} by {where}" for where, step in steps.items())
        raise Damaged(f"{path}: expected one number of steps, got {listed}")
    root = torch.tensor(meta["key"])
    if run_files.key_digest(root) != config["key_check"]:
        raise Damaged(f"{path}: holds the key of another run than config.json")
    seed = config["settings"]["seed"]
    if seed is not None and not torch.equal(root, keys.key(seed)):
        raise Damaged(f"{path}: holds a key that --seed {seed} does not give")


def _set_aside(damaged: Mapping[Path, str]) -> tuple[str, ...]:
    """Rename damaged checkpoints, on rank 0; return what was wrong with each, and its new name."""
    if launch.rank() == 0:
        return tuple(f"{message}. It is now {checkpoint.set_aside(path).name}" for path, message in damaged.items())
    return tuple(damaged.values())


def _check_nothing_lost(out: Path, config: Mapping[str, Any], damaged: Mapping[Path, str]) -> None:
    """Raise if the run has saved checkpoints but none can be used: it would start again and spend the budget twice."""
    if damaged:
        raise FdpError(
            f"{checkpoint_folder(out)}: expected a good checkpoint, got damaged ones only: "
            f"{'; '.join(damaged.values())}. Put a good copy back, or start anew in another --out, which spends the "
            f"budget again"
        )
    steps, every = run_files.count_metrics(out), config["settings"]["save_every"]
    # The checkpoint of one save is published before the next one begins.
    if every is not None and steps > 2 * every:
        raise FdpError(
            f"{checkpoint_folder(out)}: expected a checkpoint, got none, but metrics.jsonl holds {steps} steps, "
            f"saved every {every}: put the checkpoints back, or start anew in another --out, which spends the budget "
            f"again"
        )


def _check_settings(then: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Raise if an option that changes the result differs."""
    effects = (Effect.RESULT, Effect.KFAC_RESULT) if now["optimizer"] == "kfac" else (Effect.RESULT,)
    flags = options_of(TrainOptions)
    # The steps of --epochs are counted when the data is read; epochs, population and batch size are compared here.
    compared = [name for name in options_with(*effects) if name != "steps" or now["epochs"] is None]
    before = {name: then.get(name, flags[name].default) for name in compared}  # a newer option: unused
    if differing := [name for name in before if before[name] != now[name]]:
        listed = ", ".join(f"{flags[name].name} {before[name]} there, {now[name]} here" for name in differing)
        raise FdpError(f"{where}: holds a run of another configuration ({listed}); give another --out")


def checkpoint_meta(run: Run, settings: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint stores beside the state: settings, key, position of the sampler, budget spent.

    The noise is a function of the key: whoever reads a checkpoint of a private run can subtract it.
    """
    step, sampling = int(state.step), run.mechanism.sampling
    return {
        "settings": {name: settings[name] for name in options_with(Effect.RESULT, Effect.KFAC_RESULT)},
        "step": step,
        "key": run.root.tolist(),
        "sampler": {"samples": sampling.dataset_size, "data": run.data_digest, "next_step": step},
        "public_data": public_data_digest(run),
        "measured": kfac_microbatch_size(run),
        "held_out": held_out_digest(run),
        "accountant": spent_budget(run, step),
        "noise": noise_record(run),
    }


def spent_budget(run: Run, step: int) -> dict[str, Any]:
    """Return the mechanism and the epsilon spent after ``step`` steps."""
    return {
        "steps": step,
        "noise_multiplier": run.mechanism.noise_multiplier,
        "sampling_rate": run.mechanism.sampling.rate,
        "clip": run.mechanism.clip.name,
        "count_noise": run.mechanism.clip.count_noise,
        "statistics": run_files.statistics_settings(run),
        "delta": run.config.delta,
        "epsilon": None if run.epsilons is None or not step else float(run.epsilons[step - 1]),
    }


def public_data_digest(run: Run) -> str | None:
    """Return the digest of the public data that the curvature is measured on; None without it."""
    return run.feed.digest if isinstance(run.feed, Public) else None


def check_not_released(resumed: ResumedRun, run: Run, out: Path) -> None:
    """Raise if an earlier attempt released noised evaluations with a key that is lost, so that they would differ now.

    Those of a resumed run, and of one with a fixed seed, are read again (:func:`keep_released`). The noise of a seeded
    run that begins again must have the scale that it had.
    """
    if resumed.began is not None:
        check_same_rounding(resumed.began.get("rounded"), earlier_noise_of(resumed).slack, run, out)
    evaluation = run.config.evaluation
    if evaluation is None or evaluation.budget is None or resumed.checkpoint is not None or run.config.seed is not None:
        return
    if any(record.evaluation is not None for record in read_records(out)):
        raise FdpError(
            f"--eval-epsilon: expected evaluations that were not released before, got those of an attempt in {out} "
            "that ended before its first checkpoint; to release others would spend their budget twice. Give another "
            "--out and add up both budgets; a --save-every at most as large as --eval-every avoids this"
        )


def keep_released(folder: Path, *, after: int) -> dict[int, Evaluation]:
    """Return the noised evaluations of later steps than ``after`` that the run has released, by their step.

    A run that makes these steps again may round otherwise: on other ranks or another device, or if attention adds in
    any order. The same noise on another sum would reveal the difference of the two, so what was released stands. It is
    written to a file of its own, since the lines in ``metrics.jsonl`` are about to be dropped.
    """
    path = folder / run_files.RELEASED
    known = {int(step): values for step, values in json.loads(path.read_text()).items()} if path.exists() else {}
    lines = [(record.step, record.evaluation) for record in read_records(folder)]
    found = {step: one._asdict() for step, one in lines if one is not None and one.cost == Cost.NOISED.value} | known
    if any(step > after for step in found):
        write_private(path, json.dumps(found))
    return {step: Evaluation(**values)._replace(texts=()) for step, values in found.items() if step > after}


def held_out_digest(run: Run) -> str | None:
    """Return the digest of the data that the run is evaluated on; None without evaluation."""
    return None if run.config.evaluation is None else run.config.evaluation.digest


def kfac_microbatch_size(run: Run) -> int | None:
    """Return the samples of all ranks in one microbatch of K-FAC; None without K-FAC."""
    return None if run.kfac is None else measured_samples(run.kfac, run.sharding)


def check_same_run(resumed: ResumedRun, run: Run) -> None:
    """Raise if the data or the mechanism differ from those that the budget was spent on."""
    assert resumed.checkpoint is not None
    path, found = resumed.checkpoint.path, resumed.checkpoint.meta
    spent, now = found["accountant"], spent_budget(run, found["step"])
    expected = {
        "number of samples": (found["sampler"]["samples"], run.mechanism.sampling.dataset_size),
        "content of the data": (found["sampler"]["data"], run.data_digest),
        **{name.replace("_", " "): (spent.get(name), now[name]) for name in now if name != "epsilon"},
        "content of the public data": (found.get("public_data"), public_data_digest(run)),
        "content of the held-out data": (found.get("held_out"), held_out_digest(run)),
    }
    if not _is_close(spent.get("epsilon"), now["epsilon"]):
        expected["epsilon spent so far"] = (spent.get("epsilon"), now["epsilon"])
    for what, (then, here) in expected.items():
        if then != here:
            got = f"another {what}" if what in PRIVATE_SETTINGS else f"{here} as its {what}, not {then}"
            raise FdpError(
                f"{path}: expected the same run, got {got}. Noise that was drawn for other data must "
                "not be used again: put the data back, or give another --out to start anew"
            )
    if found.get("measured") != kfac_microbatch_size(run):
        raise FdpError(
            f"{path}: expected a run that measures curvature on {found.get('measured')} samples of all "
            f"ranks, got {kfac_microbatch_size(run)}; resume it on a number of ranks that divides --microbatch"
        )
    check_same_noise(found, run, path)


def _is_close(then: float | None, now: float | None) -> bool:
    return then == now or (then is not None and now is not None and math.isclose(then, now, rel_tol=1e-6))
