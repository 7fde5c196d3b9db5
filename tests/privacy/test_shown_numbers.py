"""Epsilon and delta as text: never below what they are."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fdp
from fdp.privacy.shown_numbers import shown_delta, shown_epsilon

FILES = sorted(Path(fdp.__file__).parent.rglob("*.py"))


@given(epsilon=st.floats(0, 1e6))
def test_the_epsilon_shown_is_never_below_the_epsilon_spent(epsilon):
    shown = float(shown_epsilon(epsilon))
    assert epsilon * (1 - 1e-12) <= shown <= epsilon + 1e-3 + 1e-9
    assert math.isfinite(shown)


@given(delta=st.floats(1e-30, 1))
def test_the_delta_shown_is_never_below_the_delta_promised(delta):
    assert delta <= float(shown_delta(delta)) <= delta * (1 + 1.01e-2)


@pytest.mark.parametrize(
    ("delta", "shown"),
    [(1e-6, "1e-06"), (1.0049e-6, "1.01e-06"), (3.14e-5, "3.14e-05"), (9.999e-7, "1e-06"), (0.5, "0.5"), (1.0, "1")],
)
def test_a_delta_of_three_digits_is_shown_as_it_is_and_any_other_is_rounded_up(delta, shown):
    assert shown_delta(delta) == shown


def test_no_file_rounds_a_delta_to_the_nearest_number():
    """``default_delta`` has one digit already."""
    rounded = re.compile(r"\{(?!default_delta)[^{}]*\bdeltas?\b[^{}]*:\.?\d*[gef]\}")
    found = [f"{file.name}: {hit}" for file in FILES for hit in rounded.findall(file.read_text())]
    assert found == [], "use shown_delta"
