"""Numbers and versions as text."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal
from importlib import metadata


def package_version(package: str) -> str:
    """Return the installed version, or say that the package runs from source."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "run from source, not installed"


def round_up(value: float, digits: int) -> str:
    """Return ``value`` rounded up to so many digits: a printed bound holds, and printed noise is enough."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exact = Decimal(repr(value))
    last = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(last, rounding=ROUND_CEILING)):.{digits}g}"
