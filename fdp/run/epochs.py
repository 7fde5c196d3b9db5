"""Epochs of Poisson sampling as a number of steps.

    steps = ceil(epochs * population / batch size)

With Poisson sampling there is no pass over the data: an epoch is as many steps as draw ``population`` samples in
expectation. Only public numbers are used, so the number of steps reveals nothing.

    >>> steps_of_epochs(3, population=60_000, batch_size=256)      # 704
"""

from __future__ import annotations

import math
from fractions import Fraction

from fdp.arguments import positive_number


def steps_of_epochs(epochs: float, *, population: int, batch_size: float) -> int:
    """Return the number of steps that draw ``epochs * population`` samples in expectation, rounded up."""
    epochs = positive_number("epochs", epochs)
    # as decimals, since 0.1 * 300 / 30 in floats is above 1
    return math.ceil(Fraction(str(epochs)) * population / Fraction(str(batch_size)))
