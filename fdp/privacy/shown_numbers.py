"""Numbers of a promise as text: a bound is rounded up, so that what is printed holds.

>>> round_up(1.00491e-6, 3)
'1.01e-06'
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal


def round_up(value: float, digits: int) -> str:
    """Return ``value`` rounded up to so many digits: a printed bound holds, and printed noise is enough."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exact = Decimal(repr(value))
    last = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(last, rounding=ROUND_CEILING)):.{digits}g}"


def shown_epsilon(epsilon: float) -> str:
    """Return three decimals, rounded up, so that the number shown is never below the number spent."""
    return f"{math.ceil(epsilon * 1000) / 1000:.3f}"


def shown_delta(delta: float) -> str:
    """Return three digits, rounded up, so that the delta shown is never below the delta promised."""
    return round_up(delta, 3)
