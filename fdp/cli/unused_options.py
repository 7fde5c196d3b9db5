"""Options of ``fdp train`` that would do nothing beside the others: a mistake, since they were meant to do something.

fdp train --lora-alpha 8                            # without --lora there is nothing to scale

>>> check_idle(settings)                            # an error that names the option and what it goes with
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fdp.cli.train import train_command
from fdp.data.files import holds_records, holds_tokens
from fdp.parallel import launch
from fdp.types import FdpError


class Partner(NamedTuple):
    """What an option goes with, in words, and whether it is there."""

    words: str
    there: Callable[[Mapping[str, Any]], bool]


LORA = Partner("--lora", lambda s: s["lora"] is not None)
USER = Partner("--unit user", lambda s: s["unit"] == "user")
RECORDS = Partner("--data of records (.jsonl, .ndjson, .json), read as text", lambda s: _records(s))
TEXTS = Partner("--data of texts or records", lambda s: _texts(s))
SAVING = Partner("--save-every", lambda s: s["save_every"] is not None)
PRIVATE = Partner("a --method other than none", lambda s: s["method"] != "none")
BUDGETED = Partner("--method auto or flash", lambda s: s["method"] in ("auto", "flash"))
KFAC = Partner("--optimizer kfac", lambda s: s["optimizer"] == "kfac")
MEASURED = Partner("--optimizer kfac --method none", lambda s: s["optimizer"] == "kfac" and s["method"] == "none")
BY_COST = Partner(
    "--optimizer kfac --method none --kfac-policy auto",
    lambda s: MEASURED.there(s) and s["kfac_policy"] == "auto",
)
CAPPED = Partner(
    "--optimizer kfac --method none, and --kfac-policy auto or --kfac-distribution gather or owner",
    lambda s: MEASURED.there(s) and (s["kfac_policy"], s["kfac_distribution"]) != ("all", "ring"),
)
NOISED = Partner("--kfac-data noised", lambda s: s["kfac_data"] == "noised")
RANKS = Partner("several ranks, started with torchrun", lambda s: launch.started_by_torchrun())

GOES_WITH = {
    "lora_alpha": LORA, "lora_targets": LORA, "windows_per_user": USER, "pack": USER, "field": RECORDS, "form": TEXTS,
    "keep": SAVING, "clip": PRIVATE, "max_norm": PRIVATE, "delta": PRIVATE, "memory_budget": BUDGETED,
    "kfac_damping": KFAC, "kfac_period": KFAC, "kfac_policy": MEASURED, "kfac_fisher": KFAC, "kfac_distribution": KFAC,
    "kfac_sharing": KFAC, "kfac_momentum": KFAC, "kfac_kl_clip": KFAC, "kfac_max_condition": KFAC,
    "kfac_cap": CAPPED, "kfac_rho": BY_COST, "kfac_max_norm": NOISED, "kfac_noise": NOISED,
    "zero": RANKS, "reduce": RANKS, "reduce_dtype": RANKS, "replicate_data": RANKS, "timeout": RANKS,
}  # fmt: skip


def _texts(settings: Mapping[str, Any]) -> bool:
    path = Path(settings["data"])
    return path.exists() and (path.is_dir() or not holds_tokens(path))


def _records(settings: Mapping[str, Any]) -> bool:
    """Whether a field of records is read: not of texts, and not of conversations."""
    path, form = Path(settings["data"]), settings["form"]
    return (path.is_dir() or holds_records(path)) and form in ("auto", "text")


def check_idle(settings: Mapping[str, Any]) -> None:
    """Refuse an option that is not at its default while what it goes with is not there."""
    defaults = inspect.signature(train_command).parameters
    for name, partner in GOES_WITH.items():
        if settings[name] != defaults[name].default and not partner.there(settings):
            option = f"--{name.replace('_', '-')}"
            raise FdpError(
                f"{option}: expected {partner.words} to go with it, got none; alone it does nothing: drop it"
            )
