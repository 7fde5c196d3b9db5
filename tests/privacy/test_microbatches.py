"""Microbatches of fixed shape, and rows fetched from tensors, memory maps and dataset objects."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fdp.privacy.microbatches import (
    OVERHEAD_ROWS,
    Dataset,
    check_sizes,
    dataset_length,
    fetch_rows,
    group_rows,
    one_microbatch,
    pad_to_microbatches,
    pad_to_rows,
    power_of_two_below,
    samples_per_rank,
    sizes_from,
    split_microbatches,
)
from fdp.privacy.sum_rounding import SMALLER_MICROBATCHES
from fdp.types import Batch, FdpError, RowGroups


@given(count=st.integers(0, 70), size=st.integers(1, 20))
def test_microbatches_hold_every_index_once_and_padding_is_masked(count, size):
    indices = torch.arange(count) * 3 + 1
    matrix, mask = pad_to_microbatches(indices, microbatch_size=size)
    assert matrix.shape == mask.shape == (max(1, -(-count // size)), size)
    assert matrix.dtype == torch.int64
    assert mask.dtype == torch.float32
    assert torch.equal(matrix[mask > 0], indices)
    assert (matrix[mask == 0] == 0).all()
    assert set(mask.unique().tolist()) <= {0.0, 1.0}


def test_an_empty_draw_is_one_microbatch_of_padding():
    matrix, mask = pad_to_microbatches(torch.empty(0, dtype=torch.int64), microbatch_size=4)
    assert matrix.tolist() == [[0, 0, 0, 0]]
    assert mask.tolist() == [[0.0, 0.0, 0.0, 0.0]]


SIZES = (64, 32, 16, 8)


@given(count=st.integers(0, 700), size=st.sampled_from([1, 6, 9, 16, 64, 72, 80]), expected=st.integers(1, 200))
def test_microbatches_of_several_sizes_have_a_place_for_every_sample_and_little_padding(count, size, expected):
    sizes = sizes_from(size, expected=expected)
    groups = group_rows(count, sizes).sizes
    samples = [rows * sizes[-1] for rows in groups]
    assert set(samples) <= set(sizes)
    assert samples == sorted(samples, reverse=True)
    assert max(count, 1) <= sum(samples) < max(count, 1) + size
    least = -(-max(count, 1) // sizes[-1])
    most = least // (size // sizes[-1]) + SMALLER_MICROBATCHES + 1
    assert sum(groups) + OVERHEAD_ROWS * len(groups) <= least + OVERHEAD_ROWS * most
    assert len(groups) <= -(-max(count, 1) // size) + SMALLER_MICROBATCHES, "expected no more than the slack covers"


def test_the_sizes_are_those_of_the_least_work():
    def samples(count: int) -> list[int]:
        return [8 * rows for rows in group_rows(count, SIZES).sizes]

    assert samples(0) == [8]
    assert samples(64) == [64]
    assert samples(69) == [64, 8]
    assert samples(100) == [64, 32, 8]
    assert samples(57) == [64], "four more rows of padding are cheaper than three more microbatches"
    assert samples(1030) == [64] * 16 + [8]
    assert [16 * rows for rows in group_rows(35, (16,)).sizes] == [16, 16, 16]


def test_sizes_are_halves_of_one_another_or_close_to_the_draws():
    assert sizes_from(64, expected=1024) == SIZES
    assert sizes_from(12, expected=1024) == (12, 6, 3)
    assert sizes_from(7, expected=1024) == (7,)
    assert sizes_from(64, expected=64) == (64, 56, 32, 16, 8)
    assert sizes_from(64, expected=30) == SIZES
    assert [one_microbatch(n) for n in (1, 3, 15, 16, 64, 100)] == [1, 4, 16, 20, 80, 130]
    assert sizes_from(one_microbatch(64), expected=64) == (80, 72, 64, 56, 32, 8)
    sizes = [group_rows(n, (80, 72, 64, 56, 32, 8)).sizes for n in (40, 50, 61, 70, 80, 90)]
    assert sizes == [(4, 1), (7,), (8,), (9,), (10,), (10, 1, 1)]
    assert [power_of_two_below(n) for n in (2, 3, 8, 9, 72)] == [1, 2, 4, 8, 64]
    assert check_sizes(5) == (5,)
    for wrong in ((), (64, 32, 15), (64, 8, 16), (0,), (8, 4.0), (2, 2)):
        with pytest.raises(FdpError, match="microbatch_size: expected"):
            check_sizes(wrong)  # type: ignore[arg-type]
    assert [samples_per_rank(size, SIZES, ranks=4) for size in SIZES] == [16, 8, 4, 2]
    assert [samples_per_rank(size, SIZES, ranks=3) for size in SIZES] == [24, 12, 6, 3]
    assert samples_per_rank(64, (64,), ranks=3) == 22


@given(count=st.integers(0, 300))
def test_every_row_is_in_exactly_one_microbatch(count):
    groups = group_rows(count, SIZES)
    matrix, mask = pad_to_rows(torch.arange(count) + 1, rows=sum(groups.sizes), size=8)
    batch = Batch({"x": matrix}, mask, groups=groups)
    found = split_microbatches(batch)
    assert [len(m) for _, m in found] == [8 * rows for rows in groups.sizes]
    assert torch.equal(torch.cat([data["x"] for data, _ in found]), matrix.flatten())
    assert torch.equal(torch.cat([data["x"][m > 0] for data, m in found]), torch.arange(count) + 1)
    assert all((data["x"][m == 0] == 0).all() for data, m in found)
    for wrong in ((*groups.sizes, 1), groups.sizes[1:], (*groups.sizes, 0)):
        with pytest.raises(FdpError, match=r"batch\.groups: expected groups that add up to its"):
            split_microbatches(batch._replace(groups=RowGroups(wrong)))


class Rows(NamedTuple):
    tokens: np.ndarray
    target: Tensor


def test_fetch_rows_reads_tensors_and_memory_maps(tmp_path):
    array = np.arange(60, dtype=np.int32).reshape(10, 6)
    array.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.int32, mode="r", shape=(10, 6))
    data = Rows(mapped, torch.arange(10.0))
    matrix = torch.tensor([[3, 4], [9, 0], [3, 0]])
    rows = fetch_rows(data, matrix)
    assert isinstance(rows, Rows)
    assert torch.equal(torch.as_tensor(rows.tokens), torch.from_numpy(array)[matrix])
    assert torch.equal(rows.target, matrix.float())
    rows.target.zero_()
    assert data.target[3] == 3  # a copy: what the step does to a batch never reaches the data


class Squares:
    """A dataset that computes its rows."""

    def __len__(self) -> int:
        return 10

    def fetch(self, indices: np.ndarray):
        assert isinstance(indices, np.ndarray)
        values = torch.from_numpy(indices)
        return {"x": values.float()[:, None].expand(-1, 2), "y": values**2}


def test_fetch_rows_calls_fetch_of_a_dataset():
    assert isinstance(Squares(), Dataset)
    rows = fetch_rows(Squares(), torch.tensor([[1, 2, 3], [4, 0, 0]]))
    assert rows["y"].tolist() == [[1, 4, 9], [16, 0, 0]]
    assert rows["x"].shape == (2, 3, 2)


class Liar(Squares):
    def fetch(self, indices: np.ndarray):
        return torch.zeros(3)


class Plain(Squares):
    def fetch(self, indices: np.ndarray):
        return indices


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pad_to_microbatches(torch.arange(3), microbatch_size=0), "microbatch_size"),
        (lambda: fetch_rows({"x": torch.zeros(3), "y": torch.zeros(4)}, torch.zeros(1, 1).long()), "leading"),
        (lambda: fetch_rows({"x": "text"}, torch.zeros(1, 1).long()), "x: expected a tensor"),
        (lambda: fetch_rows(torch.zeros(3), torch.tensor([[3]])), r"\[0, 3\)"),
        (lambda: fetch_rows(torch.zeros(3), torch.tensor([[-1]])), r"\[0, 3\)"),
        (lambda: fetch_rows(Liar(), torch.tensor([[0, 1]])), "2 rows"),
        (lambda: fetch_rows(Plain(), torch.tensor([[0, 1]])), "ndarray"),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(call, words):
    with pytest.raises(FdpError, match=words):
        call()


def test_length_is_the_leading_dimension():
    assert dataset_length(torch.zeros(7, 2)) == 7
    assert dataset_length({"a": np.zeros((5, 1)), "b": torch.zeros(5)}) == 5
    assert dataset_length(Squares()) == 10
