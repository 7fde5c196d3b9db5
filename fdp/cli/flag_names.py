"""Errors in the words of the command line: the flag that was typed, not the parameter it became.

    peak: expected a finite number, 0 or more, got -1   ->      --lr: expected a finite number, 0 or more, got -1

An error of the library begins with the name of the setting that is wrong. On the command line that setting has a flag:
the same name, or the one listed here.

    >>> name_flag("delta: expected a probability", {"--delta"})        # "--delta: expected a probability"
"""

from __future__ import annotations

import re
from collections.abc import Collection

FLAGS = {
    "peak": "--lr",
    "start": "--lr",
    "value": "--lr",
    "learning_rate": "--lr",
    "expected_batch_size": "--batch-size",
    "microbatch_size": "--microbatch",
    "warmup steps": "--warmup",
    "windows": "--windows-per-user",
    "kfac": "--optimizer kfac",
    "fraction held out": "--eval-fraction",
    "epsilon of the evaluations": "--eval-epsilon",
    "population of the held-out data": "--eval-population",
    "largest loss of an evaluation": "--eval-max-loss",
    "statistics.noise_multiplier": "--kfac-noise",
    "statistics.max_norm": "--kfac-max-norm",
    "statistics.period": "--kfac-period",
    "period": "--kfac-period",
    "clip.count_noise": "--count-noise",
}
"""Settings of the library whose flag has another name."""

_START = re.compile(r"((?:rank \d+: )?)([a-z][\w. '-]*)(?=: )")


def name_flag(message: str, flags: Collection[str]) -> str:
    """Return an error message with the flag in place of the setting it begins with, if the command has that flag."""
    found = _START.match(message)
    if found is None:
        return message
    rank, name = found.groups()
    first, space, rest = name.partition(" ")
    for setting, more in ((name, ""), (first, space + rest)):  # "noise multiplier: ...", or "model mlp: ..."
        flag = FLAGS.get(setting, f"--{setting.replace('_', '-').replace(' ', '-')}")
        if flag.split()[0] in flags:
            return f"{rank}{flag}{more}{message[found.end() :]}"
    return message
