"""Taking a run up again: which checkpoint, whether it is of the same run, and what a checkpoint must remember.

A run is the same if everything that decides its result is the same. How it is computed (ranks, ZeRO stage, offload,
compilation, microbatches, device) may change: the numbers do not, beyond rounding. K-FAC measures one microbatch of all
ranks: there its size decides, too, and with noised statistics another one would meet noise that was already used.

    >>> taken_up = find(settings)                       # None: a new run
    >>> checkpoint.save(root_of(folder), state, meta=meta(run, settings, state), keep=2)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fdp import checkpoint, launch
from fdp.cli import report
from fdp.kfac.public import Public
from fdp.run import Run
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
    """A run that is already in the folder: its newest checkpoint and its key, None where it never saved one."""

    checkpoint: Path | None
    root: Key | None
    meta: dict[str, Any]


def root_of(folder: Path) -> Path:
    """Where a run's checkpoints are."""
    return folder / "checkpoints"


def find(settings: Mapping[str, Any]) -> TakenUp | None:
    """The unfinished run in ``--out``, if it is this one; None if the folder is free; else an error that says why."""
    out = settings["out"]
    if out is None or not (out / "config.json").exists() or (out / "summary.json").exists():
        if out is not None:
            report.check_free(out)
        return None
    if settings["save_every"] is None:
        report.check_free(out, hint="; with --save-every the command that began it resumes it")
    _same(json.loads((out / "config.json").read_text())["settings"], settings, out)
    path = checkpoint.latest(root_of(out))
    if path is None:
        return TakenUp(None, None, {})
    meta = checkpoint.read_meta(path)
    _same(meta["settings"], settings, path)
    return TakenUp(path, torch.tensor(meta["key"]), meta)


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
        "accountant": {
            "steps": step,
            "noise_multiplier": run.mechanism.noise_multiplier,
            "sampling_rate": sampling.rate,
            "clip": run.mechanism.clip.name,
            "count_noise": run.mechanism.clip.count_noise,
            "statistics": report.statistics_of(run),
            "delta": run.config.delta,
            "epsilon": None if run.epsilons is None or not step else float(run.epsilons[step - 1]),
        },
    }


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
    found = taken_up.meta
    expected = {
        "number of samples": (found["sampler"]["samples"], run.mechanism.sampling.dataset_size),
        "content of the data": (found["sampler"]["data"], run.data_digest),
        "noise multiplier": (found["accountant"]["noise_multiplier"], run.mechanism.noise_multiplier),
        "statistics": (found["accountant"].get("statistics"), report.statistics_of(run)),
        "content of the public data": (found.get("public_data"), public_digest(run)),
    }
    for what, (then, now) in expected.items():
        if then != now:
            got = f"another {what}" if what in launch.PRIVATE else f"{now} as its {what}, not {then}"
            raise FdpError(
                f"{taken_up.checkpoint}: expected the same run, got {got}. Noise that was drawn for other data must "
                "not be used again: put the data back, or give another --out to start anew"
            )
    if found.get("measured") != measured(run):
        raise FdpError(
            f"{taken_up.checkpoint}: expected a run that measures curvature on {found.get('measured')} samples of all "
            f"ranks, got {measured(run)}; take it up on a number of ranks that divides --microbatch"
        )


def _same(then: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    deciding = (*DECIDING, *MEASURED) if now["optimizer"] == "kfac" else DECIDING
    if differing := [name for name in deciding if then.get(name) != now[name]]:
        said = ", ".join(f"--{name.replace('_', '-')} {then.get(name)} there, {now[name]} here" for name in differing)
        raise FdpError(f"{where}: holds a run of another configuration ({said}); give another --out")
