"""Lengths of the texts of a dataset, and suggestions that follow from them.

whole(context) = share of texts with at most context + 1 tokens

>>> suggest_context(np.array([10, 20, 500]), context=16, longest=1024)
512
"""

from __future__ import annotations

import numpy as np

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
ENOUGH = 0.95
"""Share of the texts that a context should hold whole."""
SMALLEST_CONTEXT = 16


def length_quantiles(lengths: np.ndarray) -> dict[str, int]:
    """Return the quantiles of the lengths in tokens, by name."""
    names = (f"{q:.0%}" if q not in (0.5, 1.0) else {0.5: "median", 1.0: "longest"}[q] for q in QUANTILES)
    return {name: int(value) for name, value in zip(names, np.quantile(lengths, QUANTILES, method="higher"))}


def share_whole(lengths: np.ndarray, context: int) -> float:
    """Return the share of texts that a window of a context holds whole."""
    return float((lengths <= context + 1).mean())


def suggest_context(lengths: np.ndarray, *, context: int, longest: int | None) -> int | None:
    """Return the power of two that holds 95 % of the texts whole, at most ``longest``; None if ``context`` is that.

    A context of up to twice that size is good enough too.
    """
    need = int(np.quantile(lengths, ENOUGH, method="higher")) - 1
    best = SMALLEST_CONTEXT
    while best < need:
        best *= 2
    best = best if longest is None else min(best, longest)
    return None if best <= context <= 2 * best else best


def suggest_windows(windows: np.ndarray, *, most: int, share: float = 0.9) -> int | None:
    """Return the number of windows that uses all of ``share`` of the users; None if ``most`` does, or twice as many."""
    best = max(1, int(np.quantile(windows, share, method="higher")))
    return None if best <= most <= 2 * best else best
