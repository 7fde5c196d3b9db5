"""What ``fdp search`` states in the end, in sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from fdp.cli.search_options import SearchOptions
from fdp.cli.search_promise import Price, statement


def test_the_noise_of_a_search_is_rounded_up() -> None:
    """Copied into another command, a number rounded down would spend more than the budget."""
    search = SearchOptions(out=Path("out"), trials=2.0)
    best = {"settings": {"lr": 0.1}, "score": 1.0, "folder": "out/trial-1"}
    said = " ".join(statement(Price(1.78518, 4.0, 1e-6), search, {"eval_public": True}, best, 1))
    assert "noise multiplier 1.786 in every run" in said


@pytest.mark.parametrize("seed", [None, 1])
def test_a_private_search_names_a_fixed_seed(seed: int | None) -> None:
    search = SearchOptions(out=Path("out"), trials=2.0, seed=seed)
    best = {"settings": {"lr": 0.1}, "score": 1.0, "folder": "out/trial-1"}
    said = " ".join(statement(Price(1.0, 4.0, 1e-6), search, {"eval_public": True}, best, 1))
    assert ("whoever guesses --seed" in said) == (seed is not None)


@pytest.mark.parametrize(("count", "words"), [(1, "the only run: --lr 0.01"), (3, "best of 3 runs: --lr 0.01")])
def test_the_result_says_among_how_many_runs_was_chosen(count: int, words: str) -> None:
    best = {"settings": {"lr": 0.01}, "score": 5.0, "folder": "s/trial-1"}
    shared = {"eval_fraction": 0.1, "eval_public": False}
    said = statement(Price(1.0, 2.0, 1e-6), SearchOptions(), shared, best, count)
    assert said[0].startswith(words)
