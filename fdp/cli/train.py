"""``fdp train``: train a model privately.

    fdp train --model gpt-nano --data stdlib --epsilon 8 --steps 300 --out runs/first

Every check comes before the first file is written. The options are declared in :mod:`fdp.cli.train_options`.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from typer import Context, Exit

from fdp.cli.options import build, expand_groups, to_dict
from fdp.cli.train_options import TrainOptions


@expand_groups
def train_command(call: Context, options: TrainOptions) -> None:
    """Train a model privately. The budget covers the parameters, not the metrics shown on the way."""
    # On a CPU without bfloat16, torch warns with a stack trace and goes on.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    # torch takes seconds to import; --help and mistakes on the command line should not wait for it.
    from fdp.cli.configure import learning_rate
    from fdp.cli.session import train
    from fdp.parallel import launch
    from fdp.parallel.agree import check_agreement

    if options.ledger.extend is not None:
        from fdp.cli.extend import extend_settings

        given = {key: value for key, value in to_dict(options).items() if _given(call, key)}
        options = build(TrainOptions, extend_settings(given))
    # Store the default as a number, so that a resumed run is compared by it.
    options = replace(options, training=replace(options.training, lr=learning_rate(options.training)))
    if launch.started_by_torchrun():
        device_type = launch.device_type(options.compute.device)
        with launch.join_ranks(device_type, timeout=options.ranks.timeout) as ranks:
            check_agreement(to_dict(options))
            code = train(options, ranks)
    else:
        code = train(options)
    if code:
        raise Exit(code)


def _given(call: Context, key: str) -> bool:
    """Return True if the option was given on the command line."""
    source = call.get_parameter_source(key)
    return source is not None and source.name == "COMMANDLINE"
