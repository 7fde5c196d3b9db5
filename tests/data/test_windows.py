"""Windows that do not overlap, and tokens that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdp.data import datasets, windows
from fdp.types import FdpError


@given(length=st.integers(2, 400), context=st.integers(1, 40))
def test_a_token_is_in_at_most_one_sample(length: int, context: int) -> None:
    tokens = np.arange(length, dtype=np.int32)
    if length < context + 1:
        with pytest.raises(FdpError, match="at least one window"):
            windows.windows(tokens, context=context, vocab_size=length, where="here")
        return
    dataset = windows.windows(tokens, context=context, vocab_size=length, where="here")
    seen = dataset.fetch(np.arange(len(dataset)))["tokens"].flatten()
    assert len(seen) == len(seen.unique()) == len(dataset) * (context + 1)
    assert length - len(seen) <= context  # only a last, shorter window is left out


def test_fetch_gives_int64_windows_in_the_order_asked_for() -> None:
    dataset = windows.windows(np.arange(12, dtype=np.uint8), context=3, vocab_size=256, where="here")
    rows = dataset.fetch(np.array([2, 0, 2]))["tokens"]
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3], [8, 9, 10, 11]]
    assert dataset.fetch(np.array([], dtype=np.int64))["tokens"].shape == (0, 4)


@pytest.mark.parametrize(("bad", "value"), [(0, 50), (37, 99), (63, -1)])
def test_a_token_outside_the_vocabulary_is_named_with_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int, value: int
) -> None:
    monkeypatch.setattr(windows, "CHUNK_TOKENS", 16)
    tokens = np.zeros(64, dtype=np.int32)
    tokens[bad] = value
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(FdpError, match=rf"from 0 to 49, got another at position {bad};"):
        datasets.load(tmp_path / "tokens.npy", context=3, vocab_size=50)


@pytest.mark.parametrize("array", [np.zeros(9), np.full(9, np.nan), np.zeros((3, 3), dtype=np.int64)])
def test_an_array_that_is_not_one_row_of_integers_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(FdpError, match="expected integers in one dimension"):
        datasets.load(tmp_path / "x.npy", context=2)
