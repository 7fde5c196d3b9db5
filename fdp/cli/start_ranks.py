"""``--nproc N``: start N ranks of ``fdp train`` on this machine, by torch's own launcher.

    fdp train --nproc 4                               # as torchrun --nproc-per-node 4 -m fdp train --mesh shard=4

Every rank gets the settings as words of its command line, so a file of settings is read once. A signal reaches every
rank; the exit code is that of the rank that failed first.

    >>> code = start_ranks(options, given={"nproc", "lr"}, more=[])
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Collection, Sequence

from torch.distributed import run as launcher
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from fdp.cli.options import to_words
from fdp.cli.train_options import TrainOptions
from fdp.parallel import launch
from fdp.types import FdpError


def is_launcher(options: TrainOptions) -> bool:
    """Return True if this process has to start the ranks; raise if torchrun has started another number of them."""
    count = options.ranks.nproc
    if count is not None and launch.started_by_torchrun() and launch.world_size() != count:
        raise FdpError(
            f"--nproc: expected the {launch.world_size()} processes that torchrun has started, got {count}; leave it "
            f"out, or start fdp without torchrun"
        )
    return count is not None and count > 1 and not launch.started_by_torchrun()


def start_ranks(options: TrainOptions, given: Collection[str], more: Sequence[str]) -> int:
    """Run ``fdp train`` with these options on ``--nproc`` ranks and return the exit code.

    ``given`` are the keys of options that are passed on even with their default, ``more`` are more words.
    """
    count = options.ranks.nproc
    assert count is not None
    # torch's launcher would give every rank one thread, and say so in a box of asterisks.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks explain themselves
    arguments = launcher.parse_args(["--standalone", f"--nproc-per-node={count}", "-m", "fdp"])
    # not parsed with the others: the launcher would take --nproc for its own
    arguments.training_script_args = ["train", *to_words(options, always=given), *more]
    if hasattr(arguments, "shutdown_timeout"):  # before it kills ranks that still save after a signal
        arguments.shutdown_timeout = math.ceil(options.ranks.timeout)
    try:
        launcher.run(arguments)
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        print(f"fdp: rank {rank} of {count} was ended by {name}; {launch.TO_RESUME}", file=sys.stderr)
        return 128 - failure.exitcode
    return 0
