"""Reject options of ``fdp train`` that have no effect with the other settings.

fdp train --lora-alpha 8                            # an error: without --lora there is nothing to scale

Every option names its condition where it is declared, in :mod:`fdp.cli.train_options`; here the conditions are tested.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fdp.cli.needs import Needs
from fdp.cli.options import options_of, to_dict
from fdp.cli.train_options import TrainOptions
from fdp.data.file_kinds import holds_records
from fdp.data.files import find_token_files
from fdp.parallel import launch
from fdp.types import FdpError


def check_unused(options: TrainOptions) -> None:
    """Raise if an option differs from its default although its condition does not hold."""
    given = to_dict(options)
    for key, option in options_of(TrainOptions).items():
        needs = option.flag.needs
        if isinstance(needs, Needs) and given[key] != option.default and not CONDITIONS[needs](options):
            raise FdpError(
                f"{option.name}: expected {needs.value} to go with it, got {option.name} alone, which does nothing; "
                f"add that, or leave {option.name} out"
            )


def _reads_texts(options: TrainOptions) -> bool:
    path = Path(options.data.data)
    return path.exists() and not find_token_files(path)


def _reads_field(options: TrainOptions) -> bool:
    """Return True if a field of records is read: not of plain texts, and not of conversations."""
    path = Path(options.data.data)
    return (path.is_dir() or holds_records(path)) and options.data.form in ("auto", "text")


def _is_kfac(options: TrainOptions) -> bool:
    return options.training.optimizer == "kfac"


def _is_public_kfac(options: TrainOptions) -> bool:
    return _is_kfac(options) and options.privacy.method == "none"


def _evaluates(options: TrainOptions) -> bool:
    return options.evaluation.eval_data is not None or options.evaluation.eval_fraction is not None


CONDITIONS: dict[Needs, Callable[[TrainOptions], bool]] = {
    Needs.LORA: lambda options: options.model.lora is not None,
    Needs.UNIT_USER: lambda options: options.data.unit == "user",
    Needs.UNIT_RECORD_OR_USER: lambda options: options.data.unit in ("record", "user"),
    Needs.SEVERAL_WINDOWS: lambda options: (
        options.data.unit == "user" or (options.data.unit, options.reading.long) == ("record", "split")
    ),
    Needs.RECORDS: _reads_field,
    Needs.TEXTS: _reads_texts,
    Needs.RECIPE: lambda options: options.advice.recipe == "auto",
    Needs.SAVING: lambda options: options.output.save_every is not None,
    Needs.PRIVACY: lambda options: options.privacy.method != "none",
    Needs.BUDGETED_METHOD: lambda options: options.privacy.method in ("auto", "flash"),
    Needs.METHOD_AUTO: lambda options: options.privacy.method == "auto" or options.compute.stored_dtype == "full",
    Needs.ADAMW: lambda options: options.training.optimizer == "adamw",
    Needs.KFAC: _is_kfac,
    Needs.KFAC_WITHOUT_PRIVACY: _is_public_kfac,
    Needs.KFAC_POLICY_AUTO: lambda options: _is_public_kfac(options) and options.kfac.policy == "auto",
    Needs.KFAC_COLUMNS: lambda options: (
        _is_public_kfac(options) and (options.kfac.policy, options.kfac.distribution) != ("all", "ring")
    ),
    Needs.KFAC_NOISED: lambda options: options.kfac.data == "noised",
    Needs.EVALUATION: _evaluates,
    Needs.EVALUATED: lambda options: _evaluates(options) or bool(options.evaluation.sample),
    Needs.SAMPLE: lambda options: bool(options.evaluation.sample),
    Needs.EVAL_DATA: lambda options: options.evaluation.eval_data is not None,
    Needs.EVAL_EPSILON: lambda options: options.evaluation.eval_epsilon is not None,
    Needs.WANDB: lambda options: options.tracking.wandb is not None,
    Needs.SEVERAL_RANKS: lambda options: launch.started_by_torchrun(),
}
