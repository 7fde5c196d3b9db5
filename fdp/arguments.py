"""Checks of the numbers that people give: Python's or numpy's; no bool, string, tensor, NaN or infinity.

>>> batch_size = whole_number("batch_size", np.int64(10))   # 10, an int
>>> steps = whole_number("steps", 10.5)                      # steps: expected a whole number, 1 or more, got 10.5
"""

from __future__ import annotations

import math
from numbers import Integral, Number, Real
from typing import Any

from fdp.types import FdpError


def is_whole_number(value: Any) -> bool:
    """Return True for integers; a bool is not one."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return True for finite integers and floats."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return is_whole_number(value) or math.isfinite(plain_number(value))
    except OverflowError:  # a fraction beyond the largest float
        return False


def whole_number(name: str, value: Any, *, least: int = 1, of: str = "", advice: str = "") -> int:
    """Return ``value`` as an int, or refuse it. ``of`` says what is counted, ``advice`` what to do instead."""
    if not is_whole_number(value) or value < least:
        raise FdpError(f"{name}: expected a whole number{of}, {least} or more, got {shown(value)}{advice}")
    return int(value)


def positive_number(name: str, value: Any, *, advice: str = "") -> float:
    """Return ``value`` as a number of Python, or refuse what is not above 0."""
    if not is_number(value) or plain_number(value) <= 0:
        raise FdpError(f"{name}: expected a finite number above 0, got {shown(value)}{advice}")
    return plain_number(value)


def nonnegative_number(name: str, value: Any, *, advice: str = "") -> float:
    """Return ``value`` as a number of Python, or refuse what is below 0."""
    if not is_number(value) or plain_number(value) < 0:
        raise FdpError(f"{name}: expected a finite number, 0 or more, got {shown(value)}{advice}")
    return plain_number(value)


def probability(name: str, value: Any, *, advice: str = "") -> float:
    """Return ``value`` as a float, or refuse what is not in (0, 1)."""
    if not is_number(value) or not 0 < float(value) < 1:
        raise FdpError(f"{name}: expected a probability in (0, 1), got {shown(value)}{advice}")
    return float(value)


def plain_number(value: Any) -> float:
    """Return a number as an int, if it is one, or as a float: keys are folded from words, and numpy's differ."""
    return int(value) if is_whole_number(value) else float(value)


def shown(value: Any) -> str:
    """Return a number or a string as it is; of anything else, which may be private data, only the kind."""
    if is_number(value):
        return repr(plain_number(value))
    return repr(value) if value is None or isinstance(value, Number | str) else f"a {type(value).__name__}"
