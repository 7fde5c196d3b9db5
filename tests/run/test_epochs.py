"""Epochs are steps that draw the population so many times in expectation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdp.run.epochs import steps_of_epochs
from fdp.types import FdpError


def test_decimals_are_exact() -> None:
    assert steps_of_epochs(3, population=60_000, batch_size=256) == 704
    assert steps_of_epochs(0.1, population=300, batch_size=30) == 1
    assert steps_of_epochs(0.3, population=1000, batch_size=100) == 3


@given(st.integers(1, 50), st.integers(1, 10**7), st.integers(1, 10**4))
def test_enough_samples_are_drawn_and_one_step_less_is_too_few(epochs: int, population: int, batch: int) -> None:
    steps = steps_of_epochs(epochs, population=population, batch_size=batch)
    assert steps * batch >= epochs * population > (steps - 1) * batch


@pytest.mark.parametrize("epochs", [0.0, -1.0, math.inf, math.nan])
def test_epochs_must_be_positive(epochs: float) -> None:
    with pytest.raises(FdpError, match="epochs: expected a finite number above 0"):
        steps_of_epochs(epochs, population=10, batch_size=1)
