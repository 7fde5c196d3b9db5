"""Conditions that an option of ``fdp train`` can depend on; :mod:`fdp.cli.unused_options` checks them."""

from __future__ import annotations

from enum import Enum


class Needs(Enum):
    """A condition without which an option does nothing, in the words of the error."""

    LORA = "--lora"
    UNIT_USER = "--unit user"
    UNIT_RECORD_OR_USER = "--unit record or user"
    SEVERAL_WINDOWS = "--unit user, or --unit record with --long split,"
    RECORDS = "--data of records (.jsonl, .json, .csv, .parquet), read as text"
    TEXTS = "--data of texts or records"
    RECIPE = "--recipe auto"
    SAVING = "--save-every"
    PRIVACY = "a --method other than none"
    BUDGETED_METHOD = "--method auto or flash"
    METHOD_AUTO = "--method auto"
    ADAMW = "--optimizer adamw"
    KFAC = "--optimizer kfac"
    KFAC_WITHOUT_PRIVACY = "--optimizer kfac --method none"
    KFAC_POLICY_AUTO = "--optimizer kfac --method none --kfac-policy auto"
    KFAC_COLUMNS = "--optimizer kfac --method none, and --kfac-policy auto or --kfac-distribution gather or owner"
    KFAC_NOISED = "--kfac-data noised"
    EVALUATION = "--eval-data or --eval-fraction"
    EVALUATED = "--eval-data, --eval-fraction or --sample"
    SAMPLE = "--sample"
    EVAL_DATA = "--eval-data"
    EVAL_EPSILON = "--eval-epsilon"
    WANDB = "--wandb"
    SEVERAL_RANKS = "several ranks, started with --nproc or torchrun"
