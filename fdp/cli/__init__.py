"""The ``fdp`` command: names and numbers in at the door, plain functions of :mod:`fdp` behind it."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal
from importlib import metadata


def version_of(package: str) -> str:
    """The installed version; of a source tree that is run in place, that it is one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "run from source, not installed"


def rounded_up(value: float, digits: int) -> str:
    """``value`` in so many digits, none of it lost: a bound that is printed still holds, and so does noise copied."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exact = Decimal(repr(value))
    last = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(last, rounding=ROUND_CEILING)):.{digits}g}"
