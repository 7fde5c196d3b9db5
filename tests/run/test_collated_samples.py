"""Samples of different lengths, padded by a collate function, and samples that a dataset draws or reuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import default_collate

from fdp import tree
from fdp.run.collated_samples import CollatedSamples
from fdp.run.own_samples import as_samples
from fdp.types import FdpError

RAGGED = [torch.full((n,), i + 1.0) for i, n in enumerate((5, 5, 5, 5, 2, 4, 1, 3))]
"""The first samples are as long as the longest, so that sorting them changes nothing."""
FEATURES = [torch.randn(768, generator=torch.Generator().manual_seed(i)) for i in range(40)]


def pad(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    length = max(map(len, samples))
    rows = [torch.nn.functional.pad(sample, (0, length - len(sample))) for sample in samples]
    return {"row": torch.stack(rows), "mask": torch.stack([torch.arange(length) < len(s) for s in samples])}


def test_batches_are_padded_to_the_longest_sample_of_all():
    ragged = [torch.ones(n) for n in (2, 5, 1, 3)]
    samples = as_samples(ragged, collate_fn=pad)
    assert isinstance(samples, CollatedSamples)
    assert samples.longest == (1,)
    batch = samples.fetch(np.array([0, 2]))
    assert batch["row"].shape == (2, 5)
    assert batch["mask"].sum(1).tolist() == [2, 1]
    assert samples.fetch(np.array([], dtype=int))["row"].shape == (0, 5)
    assert tree.leaves(samples.fetch_alone(2))[0].shape == (1, 1)


def test_a_sample_that_appears_later_changes_no_row_but_its_own():
    """Rows that no check has seen: those of others are the same, and a change of the longest sample is an error."""

    def spoiled(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        found = pad(samples)
        marked = any(bool((sample < 0).any()) for sample in samples)
        return found | {"row": found["row"] * (2 if marked and kind == "scaled" else 1)}

    kind, source = "", list(RAGGED)
    samples = as_samples(source, collate_fn=spoiled)
    before = samples.fetch(np.arange(8))["row"]
    source[6], kind = torch.tensor([-1.0]), "scaled"
    assert torch.equal(samples.fetch(np.array([4, 5, 7]))["row"], before[[4, 5, 7]])
    with pytest.raises(FdpError, match="that does not depend on the samples beside it"):
        samples.fetch(np.array([4, 6]))


def test_samples_that_are_drawn_anew_by_the_dataset_are_collated_all_the_same():
    class Augmented(TorchDataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return RAGGED[index] + torch.rand(())

    rows = as_samples(Augmented(), collate_fn=pad).fetch(np.arange(8))["row"]
    assert rows.shape == (8, 5)
    assert torch.equal(rows.floor()[:, 0], torch.arange(1.0, 9.0))


class ReusedBuffer(TorchDataset):
    """Fills the same tensor, or the same array, for every sample."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.buffer[:] = index
        return {"row": self.buffer}


@pytest.mark.parametrize("buffer", [torch.zeros(3), np.zeros(3)], ids=["tensor", "array"])
@pytest.mark.parametrize("collate_fn", [None, default_collate], ids=["ours", "theirs"])
def test_a_dataset_may_fill_one_buffer_for_every_sample(buffer: Any, collate_fn: Any):
    rows = as_samples(ReusedBuffer(buffer), collate_fn=collate_fn).fetch(np.array([5, 2, 7]))["row"]
    assert rows[:, 0].tolist() == [5, 2, 7]


def test_samples_of_one_shape_are_collated_without_any_other():
    sizes: list[int] = []

    def stack(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes.append(len(samples))
        return {"x": torch.stack(samples)}

    samples = as_samples(FEATURES, collate_fn=stack)
    sizes.clear()
    assert torch.equal(samples.fetch(np.array([3, 1]))["x"], torch.stack([FEATURES[3], FEATURES[1]]))
    assert sizes == [1, 1]


@pytest.mark.parametrize("lengths", [(5, 3, 2), (3, 3, 3)], ids=["longest", "one shape"])
def test_samples_that_are_longer_when_they_are_read_again_are_refused(lengths: tuple[int, ...]):
    source = [torch.ones(length) for length in lengths]
    samples = as_samples(source, collate_fn=pad)
    source[2] = torch.ones(6)
    with pytest.raises(FdpError, match=r"the same length whenever they are read.* got a longer one"):
        samples.fetch(np.arange(3))
