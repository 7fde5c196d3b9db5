"""Taking a run up again: which checkpoint, whether it is of the same run, and what a checkpoint must remember.

A run is the same if everything that decides its result is the same. How it is computed (ranks, ZeRO stage, offload,
compilation, microbatches, device) may change: the numbers do not, beyond rounding. K-FAC measures one microbatch of all
ranks: there its size decides, too, and with noised statistics another one would meet noise that was already used.

    >>> taken_up = find(settings)                       # None: a new run
    >>> checkpoint.save(root_of(folder), state, meta=meta(run, settings, state), keep=2)
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
from fdp.kfac.private.public_data import Public
from fdp.parallel import launch
from fdp.parallel.agree import PRIVATE_SETTINGS, gather_values, run_in_unison
from fdp.run.training_run import Run
from fdp.storage import checkpoint
from fdp.storage.checkpoint import Verified
from fdp.types import FdpError, Key, TrainState

DECIDING = (
    "model", "lora", "lora_alpha", "lora_targets", "prefix", "train_only", "data", "form", "field", "tokenizer", "unit",
    "user_field", "windows_per_user", "pack", "context", "epsilon", "noise_multiplier", "delta", "population", "clip",
    "max_norm", "method", "batch_size", "steps", "lr", "optimizer", "weight_decay", "schedule", "warmup", "seed",
    "dtype", "kfac_damping", "kfac_period", "kfac_data", "kfac_max_norm", "kfac_noise", "kfac_policy", "kfac_fisher",
    "kfac_sharing", "kfac_momentum", "kfac_kl_clip", "kfac_max_condition", "kfac_rho", "kfac_cap", "clip_value",
)  # fmt: skip
"""The settings that decide a result."""
MEASURED = ("microbatch",)
"""What decides it, too, where curvature is measured on a microbatch: with K-FAC."""


class TakenUp(NamedTuple):
    """A run that is already in the folder: its newest good checkpoint and its key, None where it never saved one.

    ``damaged``: why newer ones were refused. ``finished``: it has ended, and this is a restart that came too late.
    """

    checkpoint: Verified | None = None
    root: Key | None = None
    damaged: tuple[str, ...] = ()
    finished: bool = False


def root_of(folder: Path) -> Path:
    """Where a run's checkpoints are."""
    return folder / "checkpoints"


def find(settings: Mapping[str, Any]) -> TakenUp | None:
    """The unfinished run in ``--out``, if it is this one; None if the folder is free; else an error that says why.

    Every rank calls it. Checkpoints that are not what was saved, or whose copies of the step, the key and the budget
    do not agree, are passed over and set aside; what was taken in their place is in the result.
    """
    # What the first rank sees: on a shared disk another may see it later, and they must do the same.
    begun = gather_values(run_in_unison(lambda: _begun(settings), None), None)[0]
    if begun is None:
        return None
    out, (config, finished, paths) = settings["out"], begun
    if finished:
        return TakenUp(finished=True)
    damaged: dict[Path, str] = {}
    for path in paths:
        try:
            found = checkpoint.verify(path)
            run_in_unison(lambda: _check_copies(found, config), None)  # noqa: B023
        except checkpoint.Damaged as error:
            damaged[path] = str(error)
            continue
        run_in_unison(lambda: _same(found.meta["settings"], settings, path), None)  # noqa: B023
        words = run_in_unison(lambda: _set_aside(damaged), None)
        return TakenUp(found, torch.tensor(found.meta["key"]), words)
    run_in_unison(lambda: _check_lost(out, config, damaged), None)
    return TakenUp()


def _begun(settings: Mapping[str, Any]) -> tuple[dict[str, Any], bool, list[Path]] | None:
    """What ``config.json`` says of the run in ``--out``, if that is this one; None if the folder is free.

    Also whether it has ended, and its checkpoints, the newest first.
    """
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
    _same(then, settings, out)
    return config, (out / "summary.json").exists(), checkpoint.published(root_of(out))


def _check_copies(found: Verified, config: Mapping[str, Any]) -> None:
    """Raise unless every copy of the step and the key agrees: one that is too low would spend the budget twice."""
    meta, path = found.meta, found.path
    steps = {
        "its name": found.step,
        "the meta": meta["step"],
        "the sampler": meta["sampler"]["next_step"],
        "the accountant": meta["accountant"]["steps"],
    }
    if len(set(steps.values())) > 1:
        said = ", ".join(f"{step} by {where}" for where, step in steps.items())
        raise checkpoint.Damaged(f"{path}: expected one number of steps, got {said}")
    root = torch.tensor(meta["key"])
    if run_files.key_check(root) != config["key_check"]:
        raise checkpoint.Damaged(f"{path}: holds the key of another run than config.json")
    seed = config["settings"]["seed"]
    if seed is not None and not torch.equal(root, keys.key(seed)):
        raise checkpoint.Damaged(f"{path}: holds a key that --seed {seed} does not give")


def _set_aside(damaged: Mapping[Path, str]) -> tuple[str, ...]:
    """Rename what is damaged, on the first rank; say what was wrong with it, and where it is now."""
    if launch.rank() == 0:
        return tuple(f"{words}. It is now {checkpoint.set_aside(path).name}" for path, words in damaged.items())
    return tuple(damaged.values())


def _check_lost(out: Path, config: Mapping[str, Any], damaged: Mapping[Path, str]) -> None:
    """Raise if the run has saved a checkpoint, of which there is none that can be used: it would begin again."""
    if damaged:
        raise FdpError(
            f"{root_of(out)}: expected a good checkpoint, got damaged ones only: {'; '.join(damaged.values())}. Put a "
            f"good copy back, or start anew in another --out, which spends the budget again"
        )
    steps, every = run_files.count_metrics(out), config["settings"]["save_every"]
    # The checkpoint of one save is published before the next one begins.
    if every is not None and steps > 2 * every:
        raise FdpError(
            f"{root_of(out)}: expected a checkpoint, got none, but metrics.jsonl tells of {steps} steps, saved every "
            f"{every}: put the checkpoints back, or start anew in another --out, which spends the budget again"
        )


def meta(run: Run, settings: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds beside the state: settings, the key, where the sampler stands, what has been spent.

    The key is all there is to know about the noise: whoever reads a checkpoint of a private run can take it away.
    """
    step, sampling = int(state.step), run.mechanism.sampling
    return {
        "settings": {name: settings[name] for name in (*DECIDING, *MEASURED)},
        "step": step,
        "key": run.root.tolist(),
        "sampler": {"samples": sampling.dataset_size, "data": run.data_digest, "next_step": step},
        "public_data": public_digest(run),
        "measured": measured(run),
        "accountant": accountant(run, step),
    }


def accountant(run: Run, step: int) -> dict[str, Any]:
    """What the budget was spent on, and how much of it, after so many steps."""
    return {
        "steps": step,
        "noise_multiplier": run.mechanism.noise_multiplier,
        "sampling_rate": run.mechanism.sampling.rate,
        "clip": run.mechanism.clip.name,
        "count_noise": run.mechanism.clip.count_noise,
        "statistics": run_files.statistics_of(run),
        "delta": run.config.delta,
        "epsilon": None if run.epsilons is None or not step else float(run.epsilons[step - 1]),
    }


def _close(then: float | None, now: float | None) -> bool:
    return then == now or (then is not None and now is not None and math.isclose(then, now, rel_tol=1e-6))


def public_digest(run: Run) -> str | None:
    """The digest of the public data that curvature is measured on; None where there is none."""
    return run.feed.digest if isinstance(run.feed, Public) else None


def measured(run: Run) -> int | None:
    """How many samples of all ranks one microbatch of K-FAC holds; None without it."""
    if run.kfac is None:
        return None
    return run.kfac.plan.known.plan.batch_size * (1 if run.sharding is None else run.sharding.ranks)


def check(taken_up: TakenUp, run: Run) -> None:
    """Refuse to go on with other data or another mechanism than the ones the budget has been spent on."""
    assert taken_up.checkpoint is not None
    path, found = taken_up.checkpoint.path, taken_up.checkpoint.meta
    told, now = found["accountant"], accountant(run, found["step"])
    expected = {
        "number of samples": (found["sampler"]["samples"], run.mechanism.sampling.dataset_size),
        "content of the data": (found["sampler"]["data"], run.data_digest),
        **{name.replace("_", " "): (told.get(name), now[name]) for name in now if name != "epsilon"},
        "content of the public data": (found.get("public_data"), public_digest(run)),
    }
    if not _close(told.get("epsilon"), now["epsilon"]):
        expected["epsilon spent so far"] = (told.get("epsilon"), now["epsilon"])
    for what, (then, here) in expected.items():
        if then != here:
            got = f"another {what}" if what in PRIVATE_SETTINGS else f"{here} as its {what}, not {then}"
            raise FdpError(
                f"{path}: expected the same run, got {got}. Noise that was drawn for other data must "
                "not be used again: put the data back, or give another --out to start anew"
            )
    if found.get("measured") != measured(run):
        raise FdpError(
            f"{path}: expected a run that measures curvature on {found.get('measured')} samples of all "
            f"ranks, got {measured(run)}; take it up on a number of ranks that divides --microbatch"
        )


def _same(then: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    deciding = (*DECIDING, *MEASURED) if now["optimizer"] == "kfac" else DECIDING
    if differing := [name for name in deciding if then.get(name) != now[name]]:
        said = ", ".join(f"--{name.replace('_', '-')} {then.get(name)} there, {now[name]} here" for name in differing)
        raise FdpError(f"{where}: holds a run of another configuration ({said}); give another --out")
