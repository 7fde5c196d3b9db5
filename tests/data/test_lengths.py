"""Suggestions that follow from the lengths of texts."""

from __future__ import annotations

import numpy as np
import pytest

from fdp.data.lengths import length_quantiles, share_whole, suggest_context, suggest_windows

LENGTHS = np.arange(1, 101)


def test_quantiles_are_lengths_that_occur() -> None:
    found = length_quantiles(LENGTHS)
    assert found == {"5%": 6, "25%": 26, "median": 51, "75%": 76, "95%": 96, "longest": 100}


@pytest.mark.parametrize(
    ("context", "longest", "suggested"),
    [(16, None, 128), (128, None, None), (200, None, None), (512, None, 128), (16, 64, 64), (64, 64, None)],
)
def test_a_context_holds_most_texts_whole(context: int, longest: int | None, suggested: int | None) -> None:
    assert suggest_context(LENGTHS, context=context, longest=longest) == suggested
    if suggested == 128:
        assert share_whole(LENGTHS, suggested) == 1.0
    assert share_whole(LENGTHS, 49) == 0.5


def test_windows_per_user_use_all_of_most_users() -> None:
    windows = np.array([1] * 80 + [5] * 15 + [100] * 5)
    assert suggest_windows(windows, most=1) == 5
    assert suggest_windows(windows, most=8) is None
    assert suggest_windows(windows, most=64) == 5
