"""Held-out samples that are trained on too are counted, one by one or as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fdp.data import digest, overlap
from fdp.data.overlap import count_shared


class Rows:
    """Samples of three numbers and a bfloat16 label."""

    def __init__(self, *rows: int) -> None:
        self.rows = torch.tensor(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: np.ndarray) -> Any:
        rows = self.rows[torch.as_tensor(indices)]
        return {"x": rows[:, None].repeat(1, 3), "empty": torch.zeros(len(rows), 0), "y": rows.to(torch.bfloat16)}


@pytest.mark.parametrize("together", [80, 1 << 20])
def test_every_held_out_sample_with_a_copy_is_counted_once(together, monkeypatch):
    monkeypatch.setattr(digest, "FETCHED_BYTES", together)
    assert count_shared(Rows(7, 1, 1, 9, 8), Rows(1, 2, 1, 3, 8)) == 3
    assert count_shared(Rows(1, 2), Rows(3, 4, 5)) == 0
    assert count_shared(Rows(3, 2, 1), Rows(1, 2, 3)) == 3


def test_samples_of_another_type_or_shape_are_other_samples():
    class Narrow(Rows):
        def fetch(self, indices: np.ndarray) -> Any:
            return {name: leaf.to(torch.int32) for name, leaf in super().fetch(indices).items()}

    assert count_shared(Narrow(1, 2), Rows(1, 2)) == 0


def test_many_samples_are_compared_as_a_whole(monkeypatch):
    monkeypatch.setattr(overlap, "MOST_COMPARED", 2)
    assert count_shared(Rows(1, 2, 3), Rows(1, 2, 3)) == 3
    assert count_shared(Rows(1, 2, 4), Rows(1, 2, 3)) == 0
    assert count_shared(Rows(1), Rows(1, 2, 3)) == 0
