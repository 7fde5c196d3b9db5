"""``fdp train``: train a model privately.

    fdp train --model gpt-nano --data stdlib --epsilon 8 --steps 300 --out runs/first
    fdp train --config runs/first/config.toml         # the same settings again

Every check comes before the first file is written. The options are declared in :mod:`fdp.cli.train_options`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from typer import Context, Exit

from fdp.cli.config_file import config_text, settle
from fdp.cli.options import build, check_ranges, expand_groups, to_dict
from fdp.cli.start_options import StartOptions
from fdp.cli.train_options import TrainOptions

SHOWN = "The settings of fdp train, in the form of a file for --config."


@expand_groups
def train_command(call: Context, options: TrainOptions, start: StartOptions) -> None:
    """Train a model privately. The budget covers the parameters, not the metrics shown on the way."""
    # On a CPU without bfloat16, torch warns with a stack trace and goes on.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    try:
        given = settle(start.config, {key: value for key, value in to_dict(options).items() if _given(call, key)})
        options = build(TrainOptions, given)
        check_ranges(options)
    except ValueError as error:
        _withdraw(error)
        raise
    if start.show_config:
        print(config_text(to_dict(options), heading=SHOWN), end="")
    elif code := _start(options, given, start):
        raise Exit(code)


def _start(options: TrainOptions, given: Mapping[str, Any], start: StartOptions) -> int:
    # torch takes seconds to import; --help and mistakes on the command line should not wait for it.
    from fdp.cli.start_ranks import is_launcher, start_ranks

    if is_launcher(options):
        return start_ranks(options, given, ["--dry-run"] if start.dry_run else [])
    # A process that only starts ranks does not wait for these either.
    from fdp.cli.session import train
    from fdp.parallel import launch
    from fdp.parallel.agree import check_agreement

    if options.ledger.extend is not None:
        from fdp.cli.extend import extend_settings

        options = build(TrainOptions, extend_settings(given))
    if not launch.started_by_torchrun():
        return train(_complete(options, given), dry_run=start.dry_run)
    with launch.join_ranks(launch.device_type(options.compute.device), timeout=options.ranks.timeout) as ranks:
        options = _complete(options, given)
        check_agreement(to_dict(options))
        return train(options, ranks, dry_run=start.dry_run)


def _complete(options: TrainOptions, given: Mapping[str, Any]) -> TrainOptions:
    """Fill in the recipe of ``--recipe auto``, and the default learning rate as a number, by which a run is resumed."""
    from fdp.cli.advise import fill_in_recipe
    from fdp.cli.configure import learning_rate

    options = fill_in_recipe(options, given)
    return replace(options, training=replace(options.training, lr=learning_rate(options.training)))


def _given(call: Context, key: str) -> bool:
    """Return True if the option was given on the command line."""
    source = call.get_parameter_source(key)
    return source is not None and source.name == "COMMANDLINE"


def _withdraw(error: Exception) -> None:
    """Tell the other ranks, if torchrun started any, not to wait for this one."""
    if "RANK" in os.environ:
        from fdp.parallel import launch

        launch.withdraw(str(error))
